//! The credentials of a store, if they change: calls their [`CredentialSource`], and authenticates connections.
//!
//! One call runs at a time for all connections and runtimes, as a task on the runtime that needed it first. A call that is
//! still running after twice its time belongs to a runtime that stalls, and another one may begin.
//!
//! Redis keeps a connection authenticated when a password changes, but drops it with its user, and some managed services
//! drop it when its token expires. So each connection sends `AUTH` in front of its next batch once there are newer
//! credentials, and the pool does so for idle ones. A server that rejects `AUTH` leaves the connection as it was, so the
//! batch behind it is decided.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use redis::{Cmd, ConnectionInfo};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::errors::STEPS;
use crate::error::{ErrorKind, StoreError};
use crate::store::redis::credentials::{CredentialSource, Credentials};
use crate::util::{instant, lock, patient};

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
    /// The error of a renewal that nobody has reported yet.
    unreported: Option<StoreError>,
}

struct LastCall {
    began: Instant,
    ended: Instant,
    error: Option<StoreError>,
}

/// What a new connection does next.
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

    /// Returns the credentials of a new connection. Those that a server has rejected are returned too, if the source has
    /// no others: another server may accept them.
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

    /// What a connection does that has waited for credentials `since` this time. Begins a call if one is needed.
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

    /// Waits for the end of a call, or until the credentials are to be renewed, which it then begins.
    pub(crate) async fn renew(self: &Arc<Self>, calls: &mut LoginCalls) {
        let due = {
            let state = lock(&self.state);
            match state.running {
                Some(since) => since.checked_add(self.patience * 2),
                None => state.renew_at,
            }
        };
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

    /// LoginCalls the source in a task of this runtime.
    fn call(self: &Arc<Self>, began: Instant) {
        let running = SourceCall {
            login: Arc::downgrade(self),
            began,
        };
        let source = self.source.clone();
        let user = self.user.clone();
        tokio::spawn(running.run(source, user, self.patience));
    }

    /// Records the outcome of a call.
    fn returned(&self, began: Instant, outcome: Result<Credentials, StoreError>) {
        let mut state = lock(&self.state);
        let known = self.newest.borrow().clone();
        let mut error = None;
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
                    state.unreported = Some(failure.clone());
                }
                error = Some(failure);
            }
        }
        state.last = Some(LastCall {
            began,
            ended: instant(),
            error,
        });
    }

    /// Returns the time of the next call, and the end of the credentials.
    fn times(&self, began: Instant, issued: &Credentials) -> (Option<Instant>, Option<Instant>) {
        match (&self.source, issued.validity()) {
            (CredentialSource::File(_), _) => (began.checked_add(FILE_INTERVAL), None),
            (CredentialSource::Closure(_), None) => (None, None),
            (CredentialSource::Closure(_), Some(validity)) => {
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
    /// Returns `true` if a call begins, and `false` if one is running.
    fn begin(&mut self, now: Instant, patience: Duration) -> bool {
        if let Some(since) = self.running
            && now < since + patience * 2
        {
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
        let outcome = match patient(patience, STEPS, calling).await {
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
        if !self.credentials.user().is_empty() {
            settings = settings.set_username(self.credentials.user());
        }
        server.clone().set_redis_settings(settings)
    }

    fn command(&self) -> Cmd {
        let mut command = redis::cmd("AUTH");
        if !self.credentials.user().is_empty() {
            command.arg(self.credentials.user());
        }
        command.arg(self.credentials.password());
        command
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
        // Whatever was issued since `with` counts as newer.
        let mut calls = login.calls();
        calls.mark_changed();
        Self {
            login: Arc::clone(login),
            with,
            calls,
        }
    }

    /// Returns the command that authenticates the connection anew, if there are newer credentials.
    pub(super) fn due(&mut self) -> Option<Cmd> {
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
