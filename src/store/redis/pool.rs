//! Connections: a bb8 pool that knows which of them still work, and says why one cannot be made.
//!
//! A connection, and whatever bb8 does for it, is driven by the tokio runtime that it was made on. So each runtime has a
//! pool of its own, which is gone with it.

use std::future::{Future, poll_fn};
use std::hash::BuildHasher;
use std::pin::pin;
use std::sync::Mutex;
use std::task::Poll;
use std::time::Duration;

use bb8_redis::bb8;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use super::errors::error_of;
use super::lua::Lua;
use super::transport::{Epoch, Link, Node, Transport};
use crate::store::clock::instant;
use crate::store::seed::RandomState;
use crate::store::{ErrorKind as Kind, StoreError, lock};

/// Makes the connections to a node. Unlike bb8-redis's own manager it knows whether the last use of one failed, and so
/// needs no ping at every checkout.
#[derive(Debug)]
pub(super) struct Manager {
    transport: Transport,
    node: Node,
    timeout: Duration,
    backoff: Backoff,
}

/// Keeps those who ask on while a server is away from connecting each time. A few failures in a row are free: a single one may
/// be chance.
#[derive(Debug, Default)]
struct Backoff(Mutex<Streak>);

/// Connections that could not be made, or were of no use.
#[derive(Debug, Default)]
struct Streak {
    failures: u32,
    last: Option<StoreError>,
    /// Until when no other is made.
    until: Option<Instant>,
}

impl Backoff {
    /// As many as open the breaker of a fallback, whose probe then finds the way free.
    const FREE: u32 = 3;
    /// How long to wait, and at most twice as long.
    const SHORTEST: Duration = Duration::from_millis(50);

    /// Why no connection may be made now.
    fn error(&self) -> Option<StoreError> {
        let streak = lock(&self.0);
        streak.last.as_ref().filter(|_| streak.until.is_some_and(|until| instant() < until)).cloned()
    }

    fn failed(&self, error: StoreError) {
        let jitter = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let mut streak = lock(&self.0);
        streak.failures += 1;
        streak.until = (streak.failures > Self::FREE).then(|| instant() + Self::SHORTEST.mul_f64(1.0 + jitter));
        streak.last = Some(error);
    }

    fn worked(&self) {
        *lock(&self.0) = Streak::default();
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    inner: MultiplexedConnection,
    /// For how long its server is the one to ask. None for as long as it answers.
    epoch: Option<Epoch>,
    broken: bool,
    /// Whether it has been of use.
    proven: bool,
    /// What broke it.
    failure: Option<StoreError>,
    /// When the server was last heard.
    used: Instant,
    /// How long a ping may take.
    patience: Duration,
}

impl Connection {
    /// A connection that has rested so long may have been closed by the server, or by something between.
    const RESTED: Duration = Duration::from_millis(500);

    /// Whether its server is not the one to ask any more.
    fn is_over(&self) -> bool {
        self.epoch.as_ref().is_some_and(Epoch::is_over)
    }

    fn has_rested(&self) -> bool {
        self.used.elapsed() >= Self::RESTED
    }

    /// Whether the server is still there. Any reply shows it, even that this user may not PING.
    async fn answers(&mut self) -> bool {
        let alive = match tokio::time::timeout(self.patience, self.call(&redis::cmd("PING"))).await {
            Ok(Ok(_)) => true,
            Ok(Err(error)) => matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension),
            // A NAT, for one, forgets connections that rest, and tells nobody.
            Err(_) => false,
        };
        self.broken = !alive;
        alive
    }

    /// Sends one command. The pool drops the connection if the next command would likely fail as this one did, or if this
    /// future is dropped before the reply has come.
    async fn call(&mut self, cmd: &Cmd) -> Result<Value, RedisError> {
        self.broken = true;
        let reply = match self.inner.send_packed_command(cmd).await {
            Ok(Value::ServerError(error)) => Err(error.into()),
            reply => reply,
        };
        self.ended_by(reply.as_ref().err().filter(|error| is_lasting(error)));
        reply
    }

    /// Notes what came of a call: what broke the connection, if anything did.
    fn ended_by(&mut self, failure: Option<&RedisError>) {
        self.failure = failure.map(error_of);
        self.broken = failure.is_some();
        self.used = instant();
    }

    /// Runs a script by its hash, and by its text if Redis does not know the hash: then it has run nothing, so that
    /// nothing is charged twice.
    ///
    /// `command` makes the call of the script by a command's name and what stands for the script there.
    pub(super) async fn run(&mut self, script: &Lua, command: impl Fn(&str, &str) -> Cmd) -> Result<Value, RedisError> {
        match self.call(&command("EVALSHA", script.hash())).await {
            Err(error) if error.kind() == ServerErrorKind::NoScript.into() => {
                self.call(&command("EVAL", script.text)).await
            }
            result => result,
        }
    }

    /// Runs a script once for each of these calls, in one round trip; those that are `true` are of a slot that is being moved
    /// to this node. What the server has said to each is told in their order: one that it refused says nothing of the others.
    /// As [`run`](Self::run) does, it sends again those of a script that the server does not know.
    ///
    /// `command` makes a call, by its number.
    pub(super) async fn run_each(
        &mut self,
        script: &Lua,
        calls: &[bool],
        command: impl Fn(usize, &str, &str) -> Cmd,
    ) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
        let all: Vec<usize> = (0..calls.len()).collect();
        let mut replies = self.send_each(calls, &all, |call| command(call, "EVALSHA", script.hash())).await?;
        let unknown = |reply: &Result<_, RedisError>| {
            reply.as_ref().is_err_and(|error| error.kind() == ServerErrorKind::NoScript.into())
        };
        let unknown: Vec<usize> = all.into_iter().filter(|call| unknown(&replies[*call])).collect();
        if !unknown.is_empty() {
            // What the others said is known: a failure is of these alone.
            let again = self.send_each(calls, &unknown, |call| command(call, "EVAL", script.text)).await;
            match again {
                Ok(again) => unknown.into_iter().zip(again).for_each(|(call, reply)| replies[call] = reply),
                Err(error) => unknown.into_iter().for_each(|call| replies[call] = Err(error.clone())),
            }
        }
        Ok(replies)
    }

    async fn send_each(
        &mut self,
        calls: &[bool],
        these: &[usize],
        command: impl Fn(usize) -> Cmd,
    ) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
        let mut pipeline = Pipeline::with_capacity(these.len());
        for &call in these {
            if calls[call] {
                pipeline.add_command(redis::cmd("ASKING"));
            }
            pipeline.add_command(command(call));
        }
        self.broken = true;
        let replies = self.inner.send_packed_commands(&pipeline, 0, pipeline.len()).await;
        let replies = replies.inspect_err(|error| self.ended_by(Some(error)))?;
        let mut all = replies.into_iter();
        let mut replies = Vec::with_capacity(these.len());
        for &call in these {
            // That it may ask is not told apart: the next reply says what came of it.
            let reply = if calls[call] { all.nth(1) } else { all.next() };
            replies.push(match reply {
                Some(Value::ServerError(error)) => Err(error.into()),
                Some(reply) => Ok(reply),
                None => return Err((ErrorKind::UnexpectedReturnType, "fewer replies than commands").into()),
            });
        }
        let is_bad = |error: &RedisError| is_lasting(error) && !error.is_cluster_error();
        self.ended_by(replies.iter().filter_map(|reply| reply.as_ref().err()).find(|error| is_bad(error)));
        Ok(replies)
    }

    /// Has the pool make another connection, which may lead to another server.
    fn give_up(&mut self) {
        self.broken = true;
    }

    /// As [`give_up`](Self::give_up), as this server is of no use.
    pub(super) fn give_up_for(&mut self, failure: StoreError) {
        self.failure = Some(failure);
        self.give_up();
    }
}

/// Whether the next call on this connection would likely fail too, while one on a new connection may not: this one is
/// broken, or leads to a server that is not the master any more, or to one that wants another password.
fn is_lasting(error: &RedisError) -> bool {
    error.code() == Some("NOAUTH")
        || !matches!(
            error.kind(),
            ErrorKind::Server(
                ServerErrorKind::NoScript
                    | ServerErrorKind::ResponseError
                    | ServerErrorKind::NoPerm
                    | ServerErrorKind::ExecAbort
            ) | ErrorKind::Extension
        )
}

impl bb8::ManageConnection for Manager {
    type Connection = Connection;
    type Error = StoreError;

    async fn connect(&self) -> Result<Connection, StoreError> {
        if let Some(error) = self.backoff.error() {
            return Err(error);
        }
        let connected = tokio::time::timeout(self.timeout, self.transport.connect(self.node)).await;
        let connected = connected.unwrap_or_else(|_| Err(StoreError::new(Kind::Timeout)));
        let Link { mut inner, epoch } = connected.inspect_err(|error| self.backoff.failed(error.clone()))?;
        // The workers have their own, which is shorter.
        inner.set_response_timeout(self.timeout.saturating_mul(2));
        // Half of the time is left to connect anew and to ask.
        let patience = self.timeout / 2;
        Ok(Connection { inner, epoch, broken: false, proven: false, failure: None, used: instant(), patience })
    }

    /// The pool never asks: [`Pool::checkout`] finds out.
    async fn is_valid(&self, _connection: &mut Connection) -> Result<(), StoreError> {
        Ok(())
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        if !connection.proven {
            match (connection.broken, connection.failure.take()) {
                (false, _) => {
                    connection.proven = true;
                    self.backoff.worked();
                }
                (true, Some(failure)) => self.backoff.failed(failure),
                (true, None) => {}
            }
        }
        connection.broken
    }
}

/// The connections of one runtime to one node.
#[derive(Debug)]
pub(super) struct Pool {
    connections: bb8::Pool<Manager>,
    failures: Failures,
}

impl Pool {
    /// A pool of at most so many connections. Each is made when it is needed, within the time-out.
    pub(super) fn new(transport: Transport, node: Node, max: usize, timeout: Duration) -> Self {
        let manager = Manager { transport, node, timeout, backoff: Backoff::default() };
        let failures = Failures(watch::Sender::new(None));
        let connections = bb8::Pool::builder()
            .max_size(u32::try_from(max).unwrap_or(u32::MAX))
            .test_on_check_out(false)
            .retry_connection(false)
            .connection_timeout(timeout)
            // Without these bb8 runs no task of its own.
            .idle_timeout(None)
            .max_lifetime(None)
            .error_sink(Box::new(failures.clone()))
            .build_unchecked(manager);
        Self { connections, failures }
    }

    /// For [`checkout`](Self::checkout).
    pub(super) fn failures(&self) -> watch::Receiver<Option<StoreError>> {
        self.failures.0.subscribe()
    }

    /// A connection that is alive, or why there is none.
    pub(super) async fn checkout(
        &self,
        failures: &mut watch::Receiver<Option<StoreError>>,
    ) -> Result<bb8::PooledConnection<'_, Manager>, StoreError> {
        let mut lost = false;
        loop {
            let mut connection = self.get(failures).await?;
            if connection.is_over() {
                connection.give_up();
                continue;
            }
            if !connection.has_rested() {
                return Ok(connection);
            }
            // What has befallen one that rested has likely befallen them all: to ask each would take too long.
            if !lost && connection.answers().await {
                return Ok(connection);
            }
            lost = true;
            connection.give_up();
        }
    }

    /// A connection, or why there is none: bb8 alone would leave us waiting after a failure to connect.
    async fn get(
        &self,
        failures: &mut watch::Receiver<Option<StoreError>>,
    ) -> Result<bb8::PooledConnection<'_, Manager>, StoreError> {
        failures.mark_unchanged();
        let mut getting = pin!(self.connections.get());
        let got = loop {
            let mut failing = pin!(failures.changed());
            let got = poll_fn(|cx| match getting.as_mut().poll(cx) {
                Poll::Ready(got) => Poll::Ready(Some(got)),
                Poll::Pending => failing.as_mut().poll(cx).map(|_| None),
            });
            match got.await {
                // There is no second one, as with `maxclients`: the first will come back.
                None if self.connections.state().connections > 0 => {}
                got => break got,
            }
        };
        match got {
            Some(Ok(connection)) => Ok(connection),
            Some(Err(bb8::RunError::User(error))) => Err(error),
            Some(Err(bb8::RunError::TimedOut)) => Err(StoreError::new(Kind::Timeout)),
            None => Err(match &*failures.borrow() {
                Some(error) => error.clone(),
                None => StoreError::new(Kind::Unreachable),
            }),
        }
    }
}

/// Hands on why a connection could not be made, which bb8 keeps from those who wait for one.
#[derive(Debug, Clone)]
struct Failures(watch::Sender<Option<StoreError>>);

impl bb8::ErrorSink<StoreError> for Failures {
    fn sink(&self, error: StoreError) {
        self.0.send_replace(Some(error));
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<StoreError>> {
        Box::new(self.clone())
    }
}
