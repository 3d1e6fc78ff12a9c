//! The connections to one server. A [pool](Pool) keeps connections in bb8. It also discards broken
//! connections, reports why no connection can be made, and keeps the last returned connection for
//! the next checkout.
//!
//! A connection, and the tasks that bb8 spawns for it, belong to the runtime that created the
//! connection. So each runtime has its own pool, which is dropped with the runtime.
//!
//! Over plain TCP, the task that sends a command also drives the connection. A task per connection,
//! as redis-rs spawns it, costs two more scheduler turns per call. If more than three tasks in a row
//! wake each other, Tokio also wakes another thread to share the work; with one request at a time,
//! that takes longer than the work.
//!
//! So nothing reads while no command is in flight. Before each use, the pool checks whether the
//! connection was lost in the meantime.
//!
//! With TLS or over a Unix socket, redis-rs opens the connection and spawns its task, which ends when
//! the connection is lost. Such a task takes no command.
//!
//! A NAT drops idle connections silently, which only a ping detects. The pool sends it while the connection is idle,
//! without waiting for the reply: a check in the meantime follows in the same connection.
//!
//! A connection may take longer than a check waits. bb8 opens it in a task that outlives the
//! checkout, and starts no other one for the next checkout.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bb8_redis::bb8;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, Fuse, FusedFuture, join_all, select};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, ServerErrorKind, Value};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::task::coop::{Unconstrained, unconstrained};
use tokio::time::{Instant, sleep};

use super::errors::{CONNECT, STEPS, connecting_timed_out, error_of, replies_within};
use super::login::LoggedIn;
use crate::error::{ErrorKind, StoreError};
use crate::store::redis::script::Call;
use crate::util::{instant, jittered, lock, patient};

/// Connects to the server of a pool.
pub(crate) trait Connect: Send + Sync + 'static {
    /// Opens another connection.
    fn connect(&self) -> impl Future<Output = Result<Link, StoreError>> + Send;
}

/// Creates connections for bb8. [`Connection`] records whether its last use failed, so a checkout
/// needs no ping.
pub(crate) struct Manager<C> {
    to: C,
    times: Times,
    backoff: Arc<Backoff>,
    timeouts: Arc<AtomicU64>,
}

/// The limits of a [`Pool`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Maximum time to open a connection.
    pub(crate) connect: Duration,
    /// Maximum time of a ping.
    pub(crate) ping: Duration,
}

/// Delays new connections while a server is unreachable, so that not every check tries to connect.
/// The first few consecutive failures cause no delay, since a single one may be chance.
#[derive(Default)]
struct Backoff(Mutex<Streak>);

/// Consecutive failures to connect, or to use a new connection.
#[derive(Default)]
struct Streak {
    failures: u32,
    /// The last failure.
    last: Option<StoreError>,
    /// The time until which no connection is attempted.
    refused_until: Option<Instant>,
}

impl Backoff {
    /// Number of failures that cause no delay. By default, the same number opens the breaker of a
    /// [`Fallback`](crate::Fallback), so that its first probe is not delayed.
    const FREE_FAILURES: u32 = 3;
    /// Minimum delay; the maximum is twice as long.
    const SHORTEST: Duration = Duration::from_millis(50);

    /// The reason why no connection may be attempted, if any.
    fn error(&self) -> Option<StoreError> {
        let streak = lock(&self.0);
        match streak.refused_until {
            Some(until) if instant() < until => streak.last.clone(),
            _ => None,
        }
    }

    /// The last failure, unless a connection has worked since.
    fn last(&self) -> Option<StoreError> {
        lock(&self.0).last.clone()
    }

    fn failed(&self, error: StoreError) {
        let mut streak = lock(&self.0);
        streak.failures += 1;
        let former = streak.last.replace(error);
        if streak.failures > Self::FREE_FAILURES {
            streak.refused_until = Some(instant() + jittered(Self::SHORTEST, 1.0..2.0));
        }
        // Without the lock: the error of a closure may own anything.
        drop(streak);
        drop(former);
    }

    fn worked(&self) {
        let former = mem::take(&mut *lock(&self.0));
        drop(former);
    }
}

/// Interval between two looks at the idle connections. At most half of [`Connection::IDLE_THRESHOLD`]: each idle
/// connection is pinged before a check would ping it.
pub(crate) const PING_INTERVAL: Duration = Duration::from_secs(15);

/// A pause in which the runtime receives the events of its sockets.
const RECEIVES_EVENTS: Duration = Duration::from_millis(1);

impl<C: Connect> bb8::ManageConnection for Manager<C> {
    /// Boxed, since it is moved at each checkout.
    type Connection = Box<Connection>;
    type Error = StoreError;

    async fn connect(&self) -> Result<Box<Connection>, StoreError> {
        if let Some(error) = self.backoff.error() {
            return Err(error);
        }
        let connecting = self.to.connect();
        let connected = match patient(self.times.connect, CONNECT, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(connecting_timed_out()),
        };
        match connected {
            Ok(link) => {
                let timeouts = self.timeouts.load(Ordering::Relaxed);
                Ok(Box::new(Connection::new(link, self.times.ping, timeouts)))
            }
            Err(error) => {
                self.backoff.failed(error.clone());
                Err(error)
            }
        }
    }

    /// Always succeeds: bb8 is configured not to call it, since [`Pool::checkout`] checks the
    /// connection.
    async fn is_valid(&self, _connection: &mut Box<Connection>) -> Result<(), StoreError> {
        Ok(())
    }

    /// Also records the use that ends here. bb8 calls this once for each, even if the user was dropped.
    fn has_broken(&self, connection: &mut Box<Connection>) -> bool {
        match &connection.condition {
            Condition::Works => {
                if !connection.was_used {
                    connection.was_used = true;
                    self.backoff.worked();
                }
                false
            }
            Condition::Unanswered => {
                self.timeouts.fetch_add(1, Ordering::Relaxed);
                true
            }
            Condition::Failed(error) => {
                if !connection.was_used {
                    self.backoff.failed(error.clone());
                }
                true
            }
        }
    }
}

/// The connections of one runtime to the server of `C`.
pub(crate) struct Pool<C: Connect> {
    connections: bb8::Pool<Manager<C>>,
    /// The last connection failure, for the callers that wait for a connection.
    failures: watch::Receiver<Option<StoreError>>,
    /// The connection that was returned last. A checkout takes it faster than from bb8.
    spare: Mutex<Option<Checkout<C>>>,
    /// Number of checkouts that wait for bb8.
    waiting: AtomicUsize,
    backoff: Arc<Backoff>,
    /// Number of uses that were dropped before a reply arrived: the server may have vanished.
    timeouts: Arc<AtomicU64>,
}

/// A checkout that waits for bb8. Counted until its drop.
struct WaitingCheckout<'a>(&'a AtomicUsize);

impl<'a> WaitingCheckout<'a> {
    fn count(all: &'a AtomicUsize) -> Self {
        all.fetch_add(1, Ordering::AcqRel);
        Self(all)
    }
}

impl Drop for WaitingCheckout<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A connection in use. Dropping it returns it to bb8.
pub(crate) type Checkout<C> = bb8::PooledConnection<'static, Manager<C>>;

impl<C: Connect> Pool<C> {
    /// Creates a pool of at most `max` connections. Each is created on demand.
    pub(crate) fn new(to: C, max: usize, times: Times) -> Self {
        let (sender, failures) = watch::channel(None);
        let timeouts = Arc::default();
        let backoff = Arc::default();
        let manager = Manager {
            to,
            times,
            backoff: Arc::clone(&backoff),
            timeouts: Arc::clone(&timeouts),
        };
        let connections = bb8::Pool::builder()
            .max_size(u32::try_from(max).unwrap_or(u32::MAX))
            // `find_working` examines each connection, also the spare one, and pings it only if it was idle.
            .test_on_check_out(false)
            // bb8 would keep the reason from the checkouts that wait, and ignore the pauses of `Backoff`.
            .retry_connection(false)
            // A checkout limits its time itself, and so does a connection.
            .connection_timeout(times.connect.saturating_mul(100))
            // A check would have to wait until a closed connection is replaced.
            .idle_timeout(None)
            // Newer credentials go over the open connection, so none is closed for its age.
            .max_lifetime(None)
            .error_sink(Box::new(Sink(sender)))
            .build_unchecked(manager);
        Self {
            connections,
            failures,
            spare: Mutex::new(None),
            waiting: AtomicUsize::new(0),
            backoff,
            timeouts,
        }
    }

    /// Returns a working connection, or the reason why none is available within `time`. A connection that takes longer
    /// is then still opened, for a later checkout.
    pub(crate) async fn checkout(&self, time: Duration) -> Result<Checkout<C>, StoreError> {
        match patient(time, STEPS, pin!(self.find_working())).await {
            Ok(found) => found,
            Err(_) => Err(self.none_in_time()),
        }
    }

    /// Returns `true` if there is no connection yet.
    pub(crate) fn is_connecting(&self) -> bool {
        self.connections.state().connections == 0
    }

    /// The error of a checkout that has waited for too long. The last failure to connect says more than that another
    /// connection is being opened.
    fn none_in_time(&self) -> StoreError {
        if !self.is_connecting() {
            return StoreError::new(ErrorKind::Timeout);
        }
        match self.backoff.last() {
            Some(error) => error,
            None => StoreError::still_connecting(),
        }
    }

    async fn find_working(&self) -> Result<Checkout<C>, StoreError> {
        let mut one_was_dead = false;
        loop {
            let mut connection = self.get().await?;
            let mut is_closed = connection.is_closed();
            if is_closed && !one_was_dead && connection.ping.is_some() {
                // The reply may have arrived while the runtime was busy: it polls its sockets before a timer fires.
                Box::pin(sleep(RECEIVES_EVENTS)).await;
                is_closed = connection.is_closed();
            }
            if !is_closed {
                let timeouts = self.timeouts.load(Ordering::Relaxed);
                let may_be_dead = connection.begin_use(timeouts);
                if !may_be_dead {
                    return Ok(connection);
                }
                // If one idle connection is dead, the others probably are too: discard each other idle
                // connection without a ping. A ping is rare, and boxed so that the future of a worker is
                // small.
                if !one_was_dead && Box::pin(connection.responds_to_ping()).await {
                    return Ok(connection);
                }
                one_was_dead = true;
            }
            // A new connection that is lost immediately counts as a failure to connect.
            connection.give_up(StoreError::new(ErrorKind::Unreachable));
        }
    }

    /// Returns a connection after use: to the next checkout, or to bb8, which discards broken ones and
    /// serves the checkouts that wait.
    pub(crate) fn give_back(&self, connection: Checkout<C>) {
        let mut spare = lock(&self.spare);
        let is_awaited = self.waiting.load(Ordering::Acquire) > 0;
        if connection.is_proven() && !is_awaited && spare.is_none() {
            *spare = Some(connection);
            return;
        }
        // Its drop takes bb8's lock: never hold both.
        drop(spare);
        drop(connection);
    }

    /// Discards lost connections, and pings connections that were idle for [`PING_INTERVAL`].
    pub(crate) fn ping_idle(&self) {
        for _ in 0..self.connections.state().connections {
            let Some(mut connection) = self.take_idle() else {
                return;
            };
            if connection.is_closed() {
                connection.give_up(StoreError::new(ErrorKind::Unreachable));
            } else if connection.needs_ping() {
                connection.send_ping();
            }
            // To the end of bb8's queue, so that the next one is another.
            drop(connection);
        }
    }

    /// Sends newer credentials over each idle connection. Other connections send them with their next call.
    pub(crate) async fn log_in_idle(&self) {
        for _ in 0..self.connections.state().connections {
            let Some(mut connection) = self.take_idle() else {
                return;
            };
            if connection.is_closed() {
                connection.give_up(StoreError::new(ErrorKind::Unreachable));
            } else if connection.needs_login() {
                let timeouts = self.timeouts.load(Ordering::Relaxed);
                connection.begin_use(timeouts);
                connection.log_in().await;
            }
            // To the end of bb8's queue, so that the next one is another.
            drop(connection);
        }
    }

    /// Returns an idle connection, if there is one.
    fn take_idle(&self) -> Option<Checkout<C>> {
        let spare = lock(&self.spare).take();
        if spare.is_some() {
            return spare;
        }
        if self.connections.state().idle_connections == 0 {
            return None;
        }
        // A check may have taken it since: do not wait, since a connection that becomes the spare one ends no wait.
        self.connections.get_owned().now_or_never()?.ok()
    }

    async fn get(&self) -> Result<Checkout<C>, StoreError> {
        let _waiting = {
            let mut spare = lock(&self.spare);
            if let Some(connection) = spare.take() {
                return Ok(connection);
            }
            // Counted under the lock, so that the next connection that is returned goes to bb8.
            WaitingCheckout::count(&self.waiting)
        };
        // Rare, and boxed so that the future of a worker is small.
        Box::pin(self.get_from_bb8()).await
    }

    /// Returns a connection, or the reason why none is available: bb8 alone would wait until its
    /// timeout after a failure.
    async fn get_from_bb8(&self) -> Result<Checkout<C>, StoreError> {
        let mut failures = self.failures.clone();
        failures.mark_unchanged();
        let mut getting = pin!(self.connections.get_owned());
        loop {
            let got = match select(getting.as_mut(), pin!(failures.changed())).await {
                Either::Left((got, _)) => Some(got),
                Either::Right(_) => None,
            };
            match got {
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(bb8::RunError::User(error))) => return Err(error),
                Some(Err(bb8::RunError::TimedOut)) => {
                    return Err(StoreError::new(ErrorKind::Timeout));
                }
                // The server may refuse a further connection (`maxclients`), but an existing one
                // will be returned.
                None if !self.is_connecting() => {}
                None => {
                    let error = failures.borrow().clone();
                    return Err(error.unwrap_or_else(|| StoreError::new(ErrorKind::Unreachable)));
                }
            }
        }
    }
}

/// Forwards connection failures to [`Pool::failures`]: bb8 does not report them to the checkouts
/// that wait.
#[derive(Debug, Clone)]
struct Sink(watch::Sender<Option<StoreError>>);

impl bb8::ErrorSink<StoreError> for Sink {
    fn sink(&self, error: StoreError) {
        self.0.send_replace(Some(error));
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<StoreError>> {
        Box::new(self.clone())
    }
}

/// A new connection to a server.
pub(crate) struct Link {
    pub(crate) inner: Driven,
    /// Ends when the server is no longer the master. `None` without sentinels.
    pub(crate) epoch: Option<Epoch>,
}

/// The period in which one server is the master. The connection is closed when `current` differs
/// from `number`.
#[derive(Debug, Clone)]
pub(crate) struct Epoch {
    /// The number of the current epoch.
    pub(crate) current: Arc<AtomicU64>,
    pub(crate) number: u64,
}

/// The server's reply to each call.
pub(crate) type Replies = SmallVec<[Result<Value, RedisError>; 1]>;

/// A connection that records whether its last use failed.
pub(crate) struct Connection {
    link: Link,
    condition: Condition,
    /// Whether any use has succeeded.
    was_used: bool,
    /// Start of the last use, or of a later ping with a reply.
    seen_at: Instant,
    /// The pool's number of timeouts at the start of the last use.
    timeouts: u64,
    /// Maximum time of a ping.
    ping_time: Duration,
    /// The ping of an idle connection, until its reply is read.
    ping: Option<IdlePing>,
}

/// A ping that no task awaits.
struct IdlePing {
    sent_at: Instant,
    reply: Unconstrained<BoxFuture<'static, Result<Value, RedisError>>>,
}

/// How the last use of a connection ended.
enum Condition {
    /// With a reply. Also before the first use.
    Works,
    /// Without a reply so far: the use may have been dropped.
    Unanswered,
    /// With an error that the next use would probably meet too.
    Failed(StoreError),
}

impl Connection {
    /// Idle time after which a device in between may have dropped the connection silently: NATs and
    /// load balancers do so after a minute or more. The pool pings idle connections earlier, unless its
    /// runtime has stalled.
    const IDLE_THRESHOLD: Duration = Duration::from_secs(30);

    /// Idle time after which it is checked whether redis-rs's task has ended. Costs no round trip, but wakes the task.
    const UNWATCHED_THRESHOLD: Duration = Duration::from_millis(500);

    fn new(link: Link, ping_time: Duration, timeouts: u64) -> Self {
        Self {
            link,
            condition: Condition::Works,
            was_used: false,
            seen_at: instant(),
            timeouts,
            ping_time,
            ping: None,
        }
    }

    /// Returns `true` if the server has closed the connection, or is no longer the master.
    fn is_closed(&mut self) -> bool {
        let is_of_earlier_epoch = match &self.link.epoch {
            Some(epoch) => epoch.current.load(Ordering::Acquire) != epoch.number,
            None => false,
        };
        is_of_earlier_epoch || self.is_lost()
    }

    /// Returns `true` if the connection was lost, as far as the runtime has received events.
    fn is_lost(&mut self) -> bool {
        let link = &mut self.link.inner;
        let has_ended = match &mut link.driver {
            Some(driver) => has_ended(driver),
            None => self.seen_at.elapsed() >= Self::UNWATCHED_THRESHOLD && link.has_no_task(),
        };
        has_ended || self.lacks_reply_to_ping()
    }

    fn needs_ping(&self) -> bool {
        self.ping.is_none() && self.seen_at.elapsed() >= PING_INTERVAL
    }

    /// Sends a ping. Its reply is read before the next use, so that no check waits for it.
    fn send_ping(&mut self) {
        let mut connection = self.link.inner.connection.clone();
        let reply = async move {
            let ping = redis::cmd("PING");
            connection.send_packed_command(&ping).await
        };
        self.ping = Some(IdlePing {
            sent_at: instant(),
            reply: unconstrained(reply.boxed()),
        });
        // Passes the ping to the driver, which then writes it.
        if self.lacks_reply_to_ping() {
            self.give_up(StoreError::new(ErrorKind::Unreachable));
        } else if let Some(driver) = &mut self.link.inner.driver {
            has_ended(driver);
        }
    }

    /// Returns `true` if the ping of an idle connection has failed, or has no reply in its time.
    fn lacks_reply_to_ping(&mut self) -> bool {
        let Some(ping) = &mut self.ping else {
            return false;
        };
        let mut cx = Context::from_waker(Waker::noop());
        match ping.reply.poll_unpin(&mut cx) {
            Poll::Ready(Ok(_)) => {
                self.seen_at = self.seen_at.max(ping.sent_at);
                self.ping = None;
                false
            }
            Poll::Ready(Err(_)) => {
                // Not polled again: a lost connection is discarded.
                self.ping = None;
                true
            }
            Poll::Pending => ping.sent_at.elapsed() >= self.ping_time,
        }
    }

    /// Returns `true` if a use has succeeded and the last use did not break the connection.
    fn is_proven(&self) -> bool {
        self.was_used && matches!(self.condition, Condition::Works)
    }

    /// Starts a use. Returns `true` if the connection may be dead: it was idle for
    /// [`IDLE_THRESHOLD`](Self::IDLE_THRESHOLD), or another connection of the pool has timed out since the last use.
    fn begin_use(&mut self, timeouts: u64) -> bool {
        let seen_before = mem::replace(&mut self.seen_at, instant());
        let timeouts_before = mem::replace(&mut self.timeouts, timeouts);
        self.seen_at >= seen_before + Self::IDLE_THRESHOLD || timeouts_before != timeouts
    }

    /// Returns `true` if the server still responds. Any reply shows that, even an error that this
    /// user may not PING.
    async fn responds_to_ping(&mut self) -> bool {
        self.condition = Condition::Unanswered;
        // NATs and others drop idle connections silently.
        let ping = redis::cmd("PING");
        let reply = {
            let asking = pin!(self.link.inner.send_packed_command(&ping));
            replies_within(self.ping_time, asking).await
        };
        if reply.is_ok() {
            self.condition = Condition::Works;
        }
        reply.is_ok()
    }

    /// Returns `true` if there are newer credentials.
    fn needs_login(&self) -> bool {
        let login = self.link.inner.login.as_ref();
        login.is_some_and(LoggedIn::is_due)
    }

    /// Sends newer credentials, if there are any.
    async fn log_in(&mut self) {
        // The outcome is in `condition`.
        drop(replies_within(self.ping_time, pin!(self.send(smallvec![]))).await);
    }

    /// Discards the connection, so that the pool creates another one, possibly to another server.
    /// The error of an unused connection counts as a failure to connect.
    pub(crate) fn give_up(&mut self, error: StoreError) {
        self.condition = Condition::Failed(error);
    }

    /// Runs the script of each call in one round trip, within `time` and its graces. Returns one reply per call, in
    /// order: an error in one does not affect the others.
    ///
    /// A call is sent with the script's hash, and again with its text if the server does not know
    /// the hash: the server has then executed nothing, so nothing is charged twice.
    ///
    /// # Errors
    ///
    /// The connection error that prevented some replies. The pool drops a connection if its next
    /// use would probably fail too, or if this future is dropped before completion.
    pub(crate) async fn run<C: Call>(
        &mut self,
        calls: &[C],
        time: Duration,
    ) -> Result<Replies, StoreError> {
        replies_within(time, pin!(self.run_scripts(calls))).await
    }

    async fn run_scripts<C: Call>(&mut self, calls: &[C]) -> Result<Replies, RedisError> {
        let mut by_hash = SmallVec::with_capacity(calls.len());
        for call in calls {
            let command = call.command("EVALSHA", call.script().hash());
            by_hash.push((call.needs_asking(), command));
        }
        let mut replies = self.send(by_hash).await?;
        if !replies.iter().any(is_of_unknown_script) {
            return Ok(replies);
        }
        let mut unknown = vec![];
        let mut by_text = smallvec![];
        for (i, call) in calls.iter().enumerate() {
            if is_of_unknown_script(&replies[i]) {
                unknown.push(i);
                let command = call.command("EVAL", call.script().text);
                by_text.push((call.needs_asking(), command));
            }
        }
        // The other replies have arrived: a failure concerns only the calls sent again.
        match self.send(by_text).await {
            Ok(again) => {
                for (i, reply) in unknown.into_iter().zip(again) {
                    replies[i] = reply;
                }
            }
            Err(error) => {
                for i in unknown {
                    replies[i] = Err(error.clone());
                }
            }
        }
        Ok(replies)
    }

    /// Sends a command other than a script, and awaits its reply within `time` and its graces.
    ///
    /// # Errors
    ///
    /// The connection error, or the error reply.
    pub(crate) async fn ask(&mut self, command: Cmd, time: Duration) -> Result<Value, StoreError> {
        let asking = async {
            match self.send(smallvec![(false, command)]).await?.pop() {
                Some(reply) => reply,
                None => Err((redis::ErrorKind::UnexpectedReturnType, "no reply").into()),
            }
        };
        replies_within(time, pin!(asking)).await
    }

    /// Sends commands together, and returns their replies.
    pub(crate) async fn ask_all(
        &mut self,
        commands: impl Iterator<Item = Cmd>,
        time: Duration,
    ) -> Result<Replies, StoreError> {
        let commands = commands.map(|command| (false, command)).collect();
        replies_within(time, pin!(self.send(commands))).await
    }

    /// Sends these commands, each after `ASKING` if it is `true`, and returns their replies.
    /// Newer credentials are sent before them, in the same write.
    async fn send(
        &mut self,
        mut commands: SmallVec<[(bool, Cmd); 1]>,
    ) -> Result<Replies, RedisError> {
        self.condition = Condition::Unanswered;
        let login = self.link.inner.login.as_mut();
        let login_command = login.and_then(LoggedIn::due);
        let logs_in = login_command.is_some();
        if let Some(command) = login_command {
            commands.insert(0, (false, command));
        }
        let mut sent = match &commands[..] {
            [] => Ok(smallvec![]),
            // A single command needs no pipeline.
            [(false, command)] => match self.link.inner.send_packed_command(command).await {
                Ok(reply) => Ok(smallvec![received(reply)]),
                Err(error) => Err(error),
            },
            _ => self.send_pipeline(commands).await,
        };
        let login_reply = match &mut sent {
            Ok(replies) if logs_in => Some(replies.remove(0)),
            _ => None,
        };
        self.condition = match (&login_reply, lasting_error(&sent)) {
            (Some(Err(error)), _) => Condition::Failed(self.failure(error)),
            (_, Some(error)) => Condition::Failed(self.failure(error)),
            _ => Condition::Works,
        };
        sent
    }

    /// The error of a broken connection. If its server requires other credentials, their source is called before the next
    /// connection.
    fn failure(&self, error: &RedisError) -> StoreError {
        let error = error_of(error);
        match &self.link.inner.login {
            Some(login) if error.kind() == ErrorKind::Authentication => login.reject(),
            _ => error,
        }
    }

    async fn send_pipeline(
        &mut self,
        commands: SmallVec<[(bool, Cmd); 1]>,
    ) -> Result<Replies, RedisError> {
        let mut pipeline = Pipeline::with_capacity(commands.len());
        // Skip the replies to `ASKING`; the reply to the command reports any error.
        let mut skipped = vec![];
        for (needs_asking, command) in commands {
            if needs_asking {
                skipped.push(true);
                pipeline.add_command(redis::cmd("ASKING"));
            }
            skipped.push(false);
            pipeline.add_command(command);
        }
        let replies = self.link.inner.send_packed_commands(&pipeline).await?;
        if replies.len() < skipped.len() {
            let kind = redis::ErrorKind::UnexpectedReturnType;
            return Err((kind, "fewer replies than commands").into());
        }
        let mut received_replies = SmallVec::new();
        for (reply, is_skipped) in replies.into_iter().zip(skipped) {
            if !is_skipped {
                received_replies.push(received(reply));
            }
        }
        Ok(received_replies)
    }
}

/// Returns `true` if the server has rejected the call because it does not know the hash of the script.
fn is_of_unknown_script(reply: &Result<Value, RedisError>) -> bool {
    match reply {
        Ok(_) => false,
        Err(error) => error.kind() == ServerErrorKind::NoScript.into(),
    }
}

/// The error that breaks the connection, if any.
fn lasting_error(sent: &Result<Replies, RedisError>) -> Option<&RedisError> {
    let replies = match sent {
        Ok(replies) => replies,
        Err(error) => return Some(error),
    };
    let mut errors = replies.iter().filter_map(|reply| reply.as_ref().err());
    errors.find(|error| is_lasting(error))
}

/// A reply, or the error that it reports.
fn received(reply: Value) -> Result<Value, RedisError> {
    match reply {
        Value::ServerError(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

/// Returns `true` if the next call on this connection would probably fail too, while a call on a
/// new connection may succeed: this connection is broken, or its server is no longer the master or
/// requires another password. That a slot is elsewhere does not affect calls for other slots.
fn is_lasting(error: &RedisError) -> bool {
    error.code() == Some("NOAUTH")
        || !error.is_cluster_error()
            && !matches!(
                error.kind(),
                redis::ErrorKind::Server(
                    ServerErrorKind::NoScript
                        | ServerErrorKind::ResponseError
                        | ServerErrorKind::NoPerm
                        | ServerErrorKind::ExecAbort
                ) | redis::ErrorKind::Extension
            )
}

/// Reads and writes a connection, until the connection is lost.
pub(super) type Driver = Fuse<BoxFuture<'static, ()>>;

/// Returns `true` if the connection of this driver was lost with its last reply or while idle. Also replaces the waker
/// that the last user left in the driver, so that later events do not wake that task.
fn has_ended(driver: &mut Driver) -> bool {
    let _ = driver.poll_unpin(&mut Context::from_waker(Waker::noop()));
    driver.is_terminated()
}

/// A connection and its driver. `None` if a task of redis-rs drives the connection.
pub(crate) struct Driven {
    pub(super) connection: MultiplexedConnection,
    pub(super) driver: Option<Driver>,
    /// The login, if its credentials change.
    pub(super) login: Option<LoggedIn>,
}

impl Driven {
    /// Returns `true` if redis-rs's task has ended: it then takes no command. A running task drops a command whose future
    /// was dropped. Only if it takes the command before that, on another thread, it sends a ping and ignores the reply.
    fn has_no_task(&mut self) -> bool {
        let ping = redis::cmd("PING");
        let abandoned = unconstrained(self.connection.send_packed_command(&ping));
        matches!(abandoned.now_or_never(), Some(Err(_)))
    }

    /// Sends a command and returns its reply, like redis-rs's method of this name.
    pub(crate) async fn send_packed_command(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let request = pin!(unconstrained(self.connection.send_packed_command(command)));
        drive(&mut self.driver, request).await
    }

    /// Sends these commands together; returns the reply or the error of each. Other than with a pipeline, no error is lost
    /// if the connection ends before all replies have arrived.
    pub(super) async fn send_each(&mut self, commands: &[Cmd]) -> Vec<Result<Value, RedisError>> {
        let mut requests = vec![];
        for command in commands {
            let mut connection = self.connection.clone();
            requests.push(async move { connection.send_packed_command(command).await });
        }
        drive(&mut self.driver, pin!(unconstrained(join_all(requests)))).await
    }

    /// Sends a pipeline; returns the replies to all its commands.
    pub(crate) async fn send_packed_commands(
        &mut self,
        pipeline: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        let request = self
            .connection
            .send_packed_commands(pipeline, 0, pipeline.len());
        drive(&mut self.driver, pin!(unconstrained(request))).await
    }
}

/// Drives a connection until the reply has arrived.
///
/// Polls the request and the driver in one task. With the task's own waker, each would wake the task
/// for the other, so `request` gets a no-op waker, and only the driver registers the real one, for
/// data from the server. No wake-up is lost by that:
///
/// - The request waits for the driver only: to take the command, or to pass the reply. Each poll of the driver is
///   followed by a poll of the request, which sees what the driver did.
/// - A command that the request passes to the driver wakes the driver's task, which is this one.
/// - After the driver has ended, the request gets the real waker.
/// - Tokio's cooperative budget would suspend the request, which nothing would resume. So it is [unconstrained].
async fn drive<T>(
    driver: &mut Option<Driver>,
    mut request: Pin<&mut Unconstrained<impl Future<Output = T>>>,
) -> T {
    if let Some(answer) = request.as_mut().now_or_never() {
        return answer;
    }
    poll_fn(|cx| {
        let is_driven_here = match driver {
            Some(driver) => {
                let _ = driver.poll_unpin(cx);
                !driver.is_terminated()
            }
            None => false,
        };
        let waker = if is_driven_here {
            Waker::noop()
        } else {
            cx.waker()
        };
        request.as_mut().poll(&mut Context::from_waker(waker))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use redis::IntoConnectionInfo;
    use tokio::sync::{mpsc, oneshot};
    use tokio::time;

    use super::*;
    use crate::store::redis::credentials::{CredentialSource, Credentials};
    use crate::store::redis::link::{Dialer, Login};
    use crate::support::RedisServer;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Connects in the current epoch.
    struct InEpoch {
        server: redis::ConnectionInfo,
        current: Arc<AtomicU64>,
    }

    impl InEpoch {
        fn of(server: &RedisServer) -> Self {
            Self {
                server: server.url().into_connection_info().unwrap(),
                current: Arc::default(),
            }
        }
    }

    impl Connect for InEpoch {
        async fn connect(&self) -> Result<Link, StoreError> {
            let dialer = Dialer::new(PATIENCE, None, None);
            Ok(Link {
                inner: dialer.dial(&self.server).await?,
                epoch: Some(Epoch {
                    current: Arc::clone(&self.current),
                    number: self.current.load(Ordering::Acquire),
                }),
            })
        }
    }

    /// Returns Redis's id of the connection that the next checkout gets.
    async fn id_of_connection<C: Connect>(pool: &Pool<C>) -> Value {
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let command = redis::cmd("CLIENT").arg("ID").take();
        let id = connection.ask(command, PATIENCE).await;
        pool.give_back(connection);
        id.unwrap()
    }

    /// A checkout does not take the spare connection of an earlier epoch.
    #[tokio::test]
    async fn connections_of_an_earlier_epoch_are_replaced() {
        let server = RedisServer::start();
        let current = Arc::default();
        let to = InEpoch {
            server: server.url().into_connection_info().unwrap(),
            current: Arc::clone(&current),
        };
        let times = Times {
            connect: PATIENCE,
            ping: PATIENCE,
        };
        let pool = Pool::new(to, 1, times);
        let id = || id_of_connection(&pool);
        let first = id().await;
        assert_eq!(id().await, first);
        assert!(lock(&pool.spare).is_some());
        current.fetch_add(1, Ordering::Release);
        assert_ne!(id().await, first);
    }

    /// The reply to a ping may be read long after its arrival.
    #[tokio::test]
    async fn a_busy_runtime_keeps_a_pinged_connection() {
        let server = RedisServer::start();
        let to = InEpoch::of(&server);
        let times = Times {
            connect: PATIENCE,
            ping: Duration::from_millis(20),
        };
        let pool = Pool::new(to, 1, times);
        let id = || id_of_connection(&pool);
        let first = id().await;
        time::pause();
        time::advance(PING_INTERVAL).await;
        time::resume();
        pool.ping_idle();
        thread::sleep(Duration::from_millis(200));
        assert_eq!(id().await, first);
    }

    /// Connects with credentials that change.
    struct WithLogin {
        server: redis::ConnectionInfo,
        dialer: Dialer,
    }

    impl Connect for WithLogin {
        async fn connect(&self) -> Result<Link, StoreError> {
            Ok(Link {
                inner: self.dialer.dial(&self.server).await?,
                epoch: None,
            })
        }
    }

    /// Returns the user of a connection, and its id.
    async fn user_and_id(pool: &Pool<WithLogin>) -> (Value, Value) {
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let whoami = redis::cmd("ACL").arg("WHOAMI").take();
        let user = connection.ask(whoami, PATIENCE).await.unwrap();
        let id = redis::cmd("CLIENT").arg("ID").take();
        let id = connection.ask(id, PATIENCE).await.unwrap();
        pool.give_back(connection);
        (user, id)
    }

    /// Newer credentials take effect with the next command. If the server rejects them, that command has its reply, and
    /// the connection is replaced.
    #[tokio::test]
    async fn newer_credentials_go_in_front_of_a_command() {
        let server = RedisServer::start();
        for user in ["a", "b"] {
            let rule = format!("ACL SETUSER {user} on >hunter2 ~* +@all");
            let _: String = server.command(&rule).await;
        }
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        let source = CredentialSource::closure(move || {
            let user = ["a", "b", "unknown", "a"][count.fetch_add(1, Ordering::SeqCst)];
            async move { Ok(Credentials::new(user, "hunter2").valid_for(PATIENCE)) }
        });
        let login = Login::new(source, "", PATIENCE);
        let dialer = Dialer::new(PATIENCE, None, None).with_login(Some(Arc::clone(&login)));
        let to = WithLogin {
            server: server.url().into_connection_info().unwrap(),
            dialer,
        };
        let times = Times {
            connect: PATIENCE,
            ping: PATIENCE,
        };
        let pool = Pool::new(to, 1, times);
        let text = |text: &str| Value::BulkString(text.into());
        let (user, first) = user_and_id(&pool).await;
        assert_eq!(user, text("a"));
        login.renew_now().await;
        assert_eq!(user_and_id(&pool).await, (text("b"), first.clone()));
        login.renew_now().await;
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let whoami = redis::cmd("ACL").arg("WHOAMI").take();
        let user = connection.ask(whoami, PATIENCE).await.unwrap();
        assert_eq!(user, text("b"), "the command behind a rejected login");
        pool.give_back(connection);
        login.renew_now().await;
        let (user, second) = user_and_id(&pool).await;
        assert_eq!(user, text("a"));
        assert_ne!(first, second);
    }

    /// A pool whose credentials stay the same.
    fn with_constant_login(server: &RedisServer) -> Pool<WithLogin> {
        let source = CredentialSource::closure(|| async { Ok(Credentials::new("", "hunter2")) });
        let login = Login::new(source, "", PATIENCE);
        let to = WithLogin {
            server: server.url().into_connection_info().unwrap(),
            dialer: Dialer::new(PATIENCE, None, None).with_login(Some(login)),
        };
        let times = Times {
            connect: PATIENCE,
            ping: PATIENCE,
        };
        Pool::new(to, 1, times)
    }

    async fn rest(time: Duration) {
        time::pause();
        time::advance(time).await;
        time::resume();
    }

    /// A look at unchanged credentials is no use of a connection.
    #[tokio::test]
    async fn unchanged_credentials_leave_pings_as_they_are() {
        let server = RedisServer::start_with(&["--requirepass", "hunter2"]);
        let pool = with_constant_login(&server);
        let pings = async || {
            let mut connection = pool.checkout(PATIENCE).await.unwrap();
            let info = redis::cmd("INFO").arg("commandstats").take();
            let stats = connection.ask(info, PATIENCE).await.unwrap();
            pool.give_back(connection);
            format!("{stats:?}").contains("cmdstat_ping:")
        };
        assert!(!pings().await);
        rest(PING_INTERVAL - Duration::from_secs(1)).await;
        pool.log_in_idle().await;
        rest(Duration::from_secs(1)).await;
        pool.ping_idle();
        assert!(pings().await, "idle for long enough");

        let pool = with_constant_login(&server);
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let reset = redis::cmd("CONFIG").arg("RESETSTAT").take();
        drop(connection.ask(reset, PATIENCE).await.unwrap());
        pool.give_back(connection);
        pool.timeouts.fetch_add(1, Ordering::Relaxed);
        pool.log_in_idle().await;
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let info = redis::cmd("INFO").arg("commandstats").take();
        let stats = format!("{:?}", connection.ask(info, PATIENCE).await.unwrap());
        assert!(
            stats.contains("cmdstat_ping:"),
            "after a timeout of another"
        );
    }

    /// A check may take the last idle connection at the same moment.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn upkeep_waits_for_no_connection() {
        let server = RedisServer::start();
        let to = InEpoch::of(&server);
        let times = Times {
            connect: PATIENCE,
            ping: PATIENCE,
        };
        let pool = Arc::new(Pool::new(to, 1, times));
        let ends = Arc::new(AtomicBool::new(false));
        let (checks, stop) = (Arc::clone(&pool), Arc::clone(&ends));
        let checking = tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let connection = checks.checkout(PATIENCE).await.unwrap();
                checks.give_back(connection);
            }
        });
        for _ in 0..20_000 {
            pool.ping_idle();
        }
        ends.store(true, Ordering::Relaxed);
        checking.await.unwrap();
    }

    /// No wake-up is lost, whether it arrives before, during or after the poll.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_is_lost() {
        let (sender, mut asked) = mpsc::unbounded_channel::<oneshot::Sender<u32>>();
        let (echo, mut echoes) = mpsc::unbounded_channel::<oneshot::Sender<u32>>();
        // A separate task replies, at its own pace.
        tokio::spawn(async move {
            while let Some(answer) = echoes.recv().await {
                answer.send(7).unwrap();
            }
        });
        let driver = async move {
            for i in 0.. {
                let Some(answer) = asked.recv().await else {
                    return;
                };
                let (ask, told) = oneshot::channel();
                // Immediately, many times in a row, as if Tokio had nothing else to run.
                if i % 1_000 < 500 {
                    ask.send(7).unwrap()
                } else {
                    echo.send(ask).unwrap()
                }
                answer.send(told.await.unwrap()).unwrap();
            }
        };
        let mut driver = Some(driver.boxed().fuse());
        for _ in 0..10_000 {
            let ask = async {
                let (answer, told) = oneshot::channel();
                sender.send(answer).unwrap();
                told.await
            };
            assert_eq!(drive(&mut driver, pin!(unconstrained(ask))).await, Ok(7));
        }
    }
}
