//! The credentials of a store, if they change: calls their [`CredentialSource`], and authenticates connections.
//!
//! One call runs at a time for all connections and runtimes, as a task on the runtime that needed it first. A call that is
//! still running after twice its time belongs to a runtime that stalls, and another one may begin.
//!
//! Redis keeps a connection authenticated when a password changes, but drops it with its user, and some managed services
//! drop it when its token expires. So each connection sends `AUTH` in front of its next batch once there are newer
//! credentials, and the pool does so for idle ones. A server that rejects `AUTH` keeps the former login, and
//! decides the batch behind it.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use redis::{Cmd, ConnectionInfo};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::errors::CONNECT;
use super::greeting::auth;
use crate::error::{ErrorKind, StoreError};
use crate::store::redis::credentials::{CredentialSource, Credentials};
use crate::util::{FOREVER, instant, lock, patient};

/// Minimum interval between two calls of the source.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two looks at a password file.
const FILE_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct Login {
    source: CredentialSource,
    /// The user of a password file.
    user: String,
    /// Maximum time of a call.
    patience: Duration,
    /// The newest credentials. Changes at the end of each call, even if they are the same.
    newest: watch::Sender<Option<Arc<Issued>>>,
    state: Mutex<LoginState>,
}

/// Resolves at the end of each call.
pub(crate) type LoginCalls = watch::Receiver<Option<Arc<Issued>>>;

/// Credentials that the source has returned.
pub(crate) struct Issued {
    credentials: Credentials,
    /// Whether a server has rejected them since the source last returned them.
    rejected: AtomicBool,
}

#[derive(Default)]
struct LoginState {
    /// The beginning of the running call.
    running: Option<Instant>,
    last: Option<LastCall>,
    /// The time of the next call, if none is needed before.
    renew_at: Option<Instant>,
    /// The time until which a new connection may use the newest credentials without a call.
    expires_at: Option<Instant>,
    /// The error of a failed renewal, until it is reported.
    unreported: Option<StoreError>,
}

struct LastCall {
    began: Instant,
    ended: Instant,
    error: Option<StoreError>,
}

/// The next step of a new connection.
enum LoginStep {
    Use(Arc<Issued>),
    Fail(StoreError),
    /// Wait for the end of the running call.
    Wait,
}

impl Login {
    /// Creates a login whose calls take at most three quarters of the time to connect, so that the connection can still be
    /// opened, or its failure explained.
    pub(crate) fn new(
        source: CredentialSource,
        user: &str,
        time_to_connect: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            source,
            user: user.to_owned(),
            patience: time_to_connect - time_to_connect / 4,
            newest: watch::Sender::new(None),
            state: Mutex::default(),
        })
    }

    /// Returns the credentials of a new connection. Rejected ones are returned too, if the source has no others: another
    /// server may accept them.
    ///
    /// # Errors
    ///
    /// The source's error, if it has never returned any.
    pub(crate) async fn credentials(self: &Arc<Self>) -> Result<Arc<Issued>, StoreError> {
        let since = instant();
        let mut calls = self.calls();
        loop {
            match self.next(since) {
                LoginStep::Use(issued) => return Ok(issued),
                LoginStep::Fail(error) => return Err(error),
                // The sender is alive: it is in `self`.
                LoginStep::Wait => drop(calls.changed().await),
            }
        }
    }

    /// Returns the next step of a connection that waits for credentials `since` this time. Begins a call if one is needed.
    fn next(self: &Arc<Self>, since: Instant) -> LoginStep {
        let now = instant();
        let newest = self.newest.borrow().clone();
        let needs_call = {
            let mut state = lock(&self.state);
            let is_kept = state.expires_at.is_some_and(|end| now < end);
            if let Some(issued) = &newest
                && is_kept
                && !issued.rejected.load(Relaxed)
            {
                return LoginStep::Use(Arc::clone(issued));
            }
            if let Some(last) = &state.last
                && (since <= last.ended || now < last.began + MIN_INTERVAL)
            {
                return match (newest, &last.error) {
                    (Some(issued), _) => LoginStep::Use(issued),
                    (None, Some(error)) => LoginStep::Fail(error.clone()),
                    (None, None) => LoginStep::Fail(StoreError::new(ErrorKind::Authentication)),
                };
            }
            state.begin(now, self.patience)
        };
        if needs_call {
            self.call(now);
        }
        LoginStep::Wait
    }

    /// Waits for the end of a call, or for the time of a renewal, which it then begins.
    pub(crate) async fn renew(self: &Arc<Self>, calls: &mut LoginCalls) {
        let due = lock(&self.state).due(instant(), self.patience);
        let Some(due) = due else {
            return drop(calls.changed().await);
        };
        if timeout_at(due, calls.changed()).await.is_err() {
            self.begin_renewal();
        }
    }

    fn begin_renewal(self: &Arc<Self>) {
        let now = instant();
        let begins = {
            let mut state = lock(&self.state);
            let is_due = state.renew_at.is_some_and(|at| at <= now);
            is_due && state.begin(now, self.patience)
        };
        if begins {
            self.call(now);
        }
    }

    /// Calls the source in a task of this runtime.
    fn call(self: &Arc<Self>, began: Instant) {
        let running = SourceCall {
            login: Arc::downgrade(self),
            began,
        };
        let source = self.source.clone();
        let user = self.user.clone();
        tokio::spawn(running.run(source, user, self.patience));
    }

    /// Records the outcome of a call. Ignores it if a later call has ended before: the runtime of this one has stalled.
    fn returned(&self, began: Instant, outcome: Result<Credentials, StoreError>) {
        let mut state = lock(&self.state);
        if state.last.as_ref().is_some_and(|last| began < last.began) {
            return;
        }
        let known = self.newest.borrow().clone();
        let mut error = None;
        let mut unreported = None;
        match outcome {
            Ok(credentials) => {
                (state.renew_at, state.expires_at) = self.times(began, &credentials);
                match known {
                    Some(known) if known.credentials.log_in_as(&credentials) => {
                        known.rejected.store(false, Relaxed);
                    }
                    _ => {
                        let rejected = AtomicBool::new(false);
                        let issued = Issued {
                            credentials,
                            rejected,
                        };
                        self.newest.send_replace(Some(Arc::new(issued)));
                    }
                }
            }
            Err(failure) => {
                if state.renew_at.is_some() {
                    state.renew_at = began.checked_add(self.retry_interval());
                }
                // Without credentials, each check returns the error.
                if known.is_some() {
                    unreported = state.unreported.replace(failure.clone());
                }
                error = Some(failure);
            }
        }
        let former = state.last.replace(LastCall {
            began,
            ended: instant(),
            error,
        });
        // Without the lock: an error of the closure may own anything.
        drop(state);
        drop(former);
        drop(unreported);
    }

    /// Returns the time of the next call, and the end of the credentials.
    fn times(&self, began: Instant, issued: &Credentials) -> (Option<Instant>, Option<Instant>) {
        match (&self.source, issued.validity()) {
            (CredentialSource::File(_), _) => (began.checked_add(FILE_INTERVAL), None),
            (CredentialSource::Closure(_), None) => (None, None),
            (CredentialSource::Closure(_), Some(validity)) => {
                let validity = validity.min(FOREVER);
                let renewal = (validity - validity / 5).max(MIN_INTERVAL);
                (began.checked_add(renewal), began.checked_add(validity))
            }
        }
    }

    fn retry_interval(&self) -> Duration {
        match self.source {
            CredentialSource::File(_) => FILE_INTERVAL,
            CredentialSource::Closure(_) => MIN_INTERVAL,
        }
    }

    pub(crate) fn calls(&self) -> LoginCalls {
        self.newest.subscribe()
    }

    /// Takes the error of a failed renewal, for one of its waiters to report.
    pub(crate) fn take_failure(&self) -> Option<StoreError> {
        lock(&self.state).unreported.take()
    }

    /// Returns the error of a server that has rejected the credentials: that of the last call, if it failed.
    pub(crate) fn rejection(&self) -> StoreError {
        let state = lock(&self.state);
        match state.last.as_ref().and_then(|last| last.error.clone()) {
            Some(error) => error,
            None => rejected(),
        }
    }
}

/// Shows no credentials.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Login").field(&self.source).finish()
    }
}

fn rejected() -> StoreError {
    StoreError::new(ErrorKind::Authentication).with_message(
        "the server rejected the credentials: check what the closure of `RedisStoreBuilder::credentials` returns, or the \
         content of the `password_file` and the user in the URL",
    )
}

impl LoginState {
    /// Returns the time until which the running call may be awaited, if there is one: a runtime that stalls may keep it for
    /// longer.
    fn running_until(&self, now: Instant, patience: Duration) -> Option<Instant> {
        let until = self.running? + patience * 2;
        (now < until).then_some(until)
    }

    /// Returns the time at which a call may be due.
    fn due(&self, now: Instant, patience: Duration) -> Option<Instant> {
        self.running_until(now, patience).or(self.renew_at)
    }

    /// Returns `true` if a call begins, and `false` if one is running.
    fn begin(&mut self, now: Instant, patience: Duration) -> bool {
        if self.running_until(now, patience).is_some() {
            return false;
        }
        self.running = Some(now);
        true
    }
}

/// A running call. Its drop lets another one begin: at its end, or when its runtime shuts down.
struct SourceCall {
    login: Weak<Login>,
    began: Instant,
}

impl SourceCall {
    async fn run(self, source: CredentialSource, user: String, patience: Duration) {
        let calling = AssertUnwindSafe(source.get(&user)).catch_unwind();
        let outcome = match patient(patience, CONNECT, calling).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(CredentialSource::panicked()),
            Err(_) => Err(source.late()),
        };
        if let Some(login) = self.login.upgrade() {
            login.returned(self.began, outcome);
        }
    }
}

impl Drop for SourceCall {
    fn drop(&mut self) {
        let Some(login) = self.login.upgrade() else {
            return;
        };
        {
            let mut state = lock(&login.state);
            // A call that has taken too long may have been replaced.
            if state.running == Some(self.began) {
                state.running = None;
            }
        }
        login.newest.send_modify(|_| {});
    }
}

impl Issued {
    /// Adds the credentials to the settings of a server.
    pub(super) fn apply(&self, server: &ConnectionInfo) -> ConnectionInfo {
        let mut settings = server.redis_settings().clone();
        settings = settings.set_password(self.credentials.password());
        if let Some(user) = self.user() {
            settings = settings.set_username(user);
        }
        server.clone().set_redis_settings(settings)
    }

    fn command(&self) -> Cmd {
        auth(self.user(), self.credentials.password())
    }

    /// `None` for the default user.
    fn user(&self) -> Option<&str> {
        match self.credentials.user() {
            "" => None,
            user => Some(user),
        }
    }

    /// Records that a server has rejected the credentials: the next connection calls the source before it uses them.
    pub(super) fn reject(&self) {
        self.rejected.store(true, Relaxed);
    }
}

/// The login of an open connection.
pub(crate) struct LoggedIn {
    login: Arc<Login>,
    with: Arc<Issued>,
    calls: LoginCalls,
}

impl LoggedIn {
    pub(super) fn new(login: &Arc<Login>, with: Arc<Issued>) -> Self {
        // Newer credentials may have been issued since.
        let mut calls = login.calls();
        calls.mark_changed();
        Self {
            login: Arc::clone(login),
            with,
            calls,
        }
    }

    /// Returns `true` if there are newer credentials.
    pub(super) fn is_due(&self) -> bool {
        match &*self.calls.borrow() {
            Some(newest) => !Arc::ptr_eq(newest, &self.with),
            None => false,
        }
    }

    /// Returns the command that sends newer credentials, if there are any.
    pub(super) fn due(&mut self) -> Option<Cmd> {
        // First, since it is fast, and each call of a script gets here.
        if !self.calls.has_changed().unwrap_or(false) {
            return None;
        }
        let newest = self.calls.borrow_and_update().clone()?;
        if Arc::ptr_eq(&newest, &self.with) {
            return None;
        }
        self.with = newest;
        Some(self.with.command())
    }

    /// Records that the server has rejected the credentials. Returns the error of the connection.
    pub(super) fn reject(&self) -> StoreError {
        self.with.reject();
        self.login.rejection()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::thread;

    use futures_util::future::join_all;
    use tokio::runtime::{Builder, Runtime};
    use tokio::time::{advance, sleep, timeout};

    use super::*;

    const TIME: Duration = Duration::from_secs(20);

    impl Login {
        /// Calls the source, and waits for the end of the call.
        pub(crate) async fn renew_now(self: &Arc<Self>) {
            let mut calls = self.calls();
            let now = instant();
            assert!(lock(&self.state).begin(now, self.patience));
            self.call(now);
            calls.changed().await.unwrap();
        }
    }

    /// A login whose source returns its number of calls as the password.
    fn counting(validity: Option<Duration>) -> Arc<Login> {
        let calls = AtomicUsize::new(0);
        let source = CredentialSource::closure(move || {
            let number = calls.fetch_add(1, SeqCst) + 1;
            async move {
                let credentials = Credentials::new("", number.to_string());
                Ok(match validity {
                    Some(validity) => credentials.valid_for(validity),
                    None => credentials,
                })
            }
        });
        Login::new(source, "", TIME)
    }

    /// Returns the number of the call that a new connection uses.
    async fn number(login: &Arc<Login>) -> usize {
        let issued = login.credentials().await.unwrap();
        issued.credentials.password().parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn calls_begin_a_second_apart() {
        let login = counting(None);
        assert_eq!(number(&login).await, 1);
        for _ in 0..3 {
            advance(MIN_INTERVAL / 4).await;
            assert_eq!(number(&login).await, 1);
        }
        advance(MIN_INTERVAL / 4).await;
        assert_eq!(number(&login).await, 2, "each connection calls it");
        login.credentials().await.unwrap().reject();
        advance(MIN_INTERVAL / 2).await;
        assert_eq!(number(&login).await, 2, "too early for another call");
        advance(MIN_INTERVAL).await;
        assert_eq!(number(&login).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn valid_credentials_are_kept_unless_rejected() {
        let login = counting(Some(TIME));
        assert_eq!(number(&login).await, 1);
        advance(TIME - Duration::from_millis(1)).await;
        assert_eq!(number(&login).await, 1);
        advance(Duration::from_millis(1)).await;
        assert_eq!(number(&login).await, 2);
        advance(MIN_INTERVAL).await;
        login.credentials().await.unwrap().reject();
        assert_eq!(number(&login).await, 3);
        let login = counting(Some(Duration::MAX));
        for _ in 0..2 {
            assert_eq!(number(&login).await, 1, "they never end");
            advance(MIN_INTERVAL * 2).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_fifth_before_their_end_they_are_renewed() {
        let login = counting(Some(TIME));
        assert_eq!(number(&login).await, 1);
        let since = instant();
        let mut calls = login.calls();
        // Begins the call, and waits for its end.
        for _ in 0..2 {
            login.renew(&mut calls).await;
        }
        assert_eq!(number(&login).await, 2);
        let after = since.elapsed();
        assert!(after >= TIME * 4 / 5, "{after:?}");
        assert!(
            after < TIME * 4 / 5 + Duration::from_millis(10),
            "{after:?}"
        );
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Waiters on several runtimes share a call.
    #[test]
    fn one_call_runs_for_all_runtimes() {
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let source = CredentialSource::closure(move || {
            let count = Arc::clone(&count);
            async move {
                count.fetch_add(1, SeqCst);
                sleep(Duration::from_millis(200)).await;
                Ok(Credentials::new("", "hunter2"))
            }
        });
        let login = Login::new(source, "", TIME);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    runtime().block_on(async {
                        let waiters = (0..8).map(|_| login.credentials());
                        for issued in join_all(waiters).await {
                            issued.unwrap();
                        }
                    });
                });
            }
        });
        assert_eq!(made.load(SeqCst), 1);
    }

    /// A runtime that shuts down during a call takes it along.
    #[test]
    fn a_call_outlives_no_runtime() {
        let calls = AtomicUsize::new(0);
        let source = CredentialSource::closure(move || {
            let hangs = calls.fetch_add(1, SeqCst) == 0;
            async move {
                if hangs {
                    pending::<()>().await;
                }
                Ok(Credentials::new("", "hunter2"))
            }
        });
        let login = Login::new(source, "", TIME);
        let (first, second) = (runtime(), runtime());
        first.block_on(async {
            assert!(login.credentials().now_or_never().is_none());
            tokio::task::yield_now().await;
        });
        drop(first);
        second.block_on(async {
            let issued = timeout(TIME, login.credentials()).await;
            issued.expect("another call").unwrap();
        });
    }

    /// A runtime that stalls keeps the others waiting for twice the time of a call at most.
    #[tokio::test(start_paused = true)]
    async fn a_stalled_call_is_replaced() {
        let login = counting(None);
        let now = instant();
        assert!(lock(&login.state).begin(now, login.patience));
        assert!(login.credentials().now_or_never().is_none());
        advance(login.patience * 2).await;
        let number = timeout(TIME, number(&login)).await;
        assert_eq!(number, Ok(1), "another call");
    }

    /// The upkeep of a pool waits until another call is needed.
    #[tokio::test(start_paused = true)]
    async fn a_stalled_call_keeps_no_task_busy() {
        let login = counting(None);
        let mut calls = login.calls();
        assert!(lock(&login.state).begin(instant(), login.patience));
        login.renew(&mut calls).await;
        assert!(login.renew(&mut calls).now_or_never().is_none());
        assert_eq!(number(&login).await, 1, "another call");
        assert!(login.renew(&mut calls).now_or_never().is_some());
        assert!(login.renew(&mut calls).now_or_never().is_none());
    }

    /// Its credentials may have ended since.
    #[tokio::test(start_paused = true)]
    async fn a_stalled_call_replaces_no_later_one() {
        let login = counting(None);
        let stalled = instant();
        advance(MIN_INTERVAL).await;
        assert_eq!(number(&login).await, 1);
        login.returned(stalled, Ok(Credentials::new("", "0")));
        assert_eq!(number(&login).await, 1);
    }

    /// An error of the application. Its drop uses the login.
    #[derive(Debug)]
    struct Careless(Weak<Login>);

    impl fmt::Display for Careless {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("careless")
        }
    }

    impl std::error::Error for Careless {}

    impl Drop for Careless {
        fn drop(&mut self) {
            if let Some(login) = self.0.upgrade() {
                drop(login.rejection());
            }
        }
    }

    #[test]
    fn errors_are_dropped_without_the_lock() {
        let (ended, ends) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let login = counting(None);
            let mut began = instant();
            for number in 0..9 {
                began += MIN_INTERVAL;
                let outcome = match number {
                    0 | 4 => Ok(Credentials::new("", "hunter2")),
                    _ => {
                        let cause = Box::new(Careless(Arc::downgrade(&login)));
                        let kind = ErrorKind::Authentication;
                        Err(StoreError::with_boxed_source(kind, cause))
                    }
                };
                login.returned(began, outcome);
            }
            ended.send(()).unwrap();
        });
        ends.recv_timeout(TIME).expect("it deadlocks");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_renewal_is_reported_once() {
        let calls = AtomicUsize::new(0);
        let source = CredentialSource::closure(move || {
            let fails = calls.fetch_add(1, SeqCst) > 0;
            async move {
                if fails {
                    return Err("the vault is sealed".into());
                }
                Ok(Credentials::new("", "hunter2").valid_for(MIN_INTERVAL))
            }
        });
        let login = Login::new(source, "", TIME);
        login.credentials().await.unwrap();
        assert!(login.take_failure().is_none());
        advance(MIN_INTERVAL).await;
        login.credentials().await.unwrap();
        let error = login.take_failure().unwrap();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "the vault is sealed");
        assert!(login.take_failure().is_none());
    }
}
