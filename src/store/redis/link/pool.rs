//! Connection pool: bb8, extended to discard broken connections and to report why a connection
//! cannot be made.
//!
//! The Tokio runtime that created a connection drives it, and the tasks that bb8 spawns for it. So
//! each runtime has its own pool, which is dropped with the runtime.

use std::future::Future;
use std::ops::DerefMut;
use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use bb8_redis::bb8;
use futures_util::future::{Either, select};
use tokio::sync::watch;
use tokio::time::Instant;

use super::connection::{Connection, Link};
use super::errors::within;
use crate::error::{ErrorKind, StoreError};
use crate::util::{instant, jittered, lock};

/// Connects to the server of a pool.
pub(crate) trait Connect: Send + Sync + 'static {
    /// Opens another connection.
    fn connect(&self) -> impl Future<Output = Result<Link, StoreError>> + Send;
}

/// Creates the connections. Unlike bb8-redis's manager, it records whether the last use of a
/// connection failed, and so needs no ping per checkout.
struct Manager<C> {
    to: C,
    timeout: Duration,
    backoff: Backoff,
}

/// Delays new connections while a server is unreachable, so that not every check tries to connect.
/// The first few consecutive failures cause no delay, since a single one may be chance.
#[derive(Default)]
struct Backoff(Mutex<Streak>);

/// Consecutive failures to connect, or to use a new connection.
#[derive(Default)]
struct Streak {
    failures: u32,
    /// The time until which no connection is attempted, and the reason.
    refused: Option<(Instant, StoreError)>,
}

impl Backoff {
    /// Failures without a delay: the number that opens the breaker of a fallback, whose first probe
    /// is then not delayed.
    const FREE_FAILURES: u32 = 3;
    /// Minimum delay; the maximum is twice as long.
    const SHORTEST: Duration = Duration::from_millis(50);

    /// The reason why no connection may be attempted, if any.
    fn error(&self) -> Option<StoreError> {
        lock(&self.0)
            .refused
            .as_ref()
            .filter(|(until, _)| instant() < *until)
            .map(|(_, error)| error.clone())
    }

    fn failed(&self, error: StoreError) {
        let mut streak = lock(&self.0);
        streak.failures += 1;
        if streak.failures > Self::FREE_FAILURES {
            streak.refused = Some((instant() + jittered(Self::SHORTEST, 1.0..2.0), error));
        }
    }

    fn worked(&self) {
        *lock(&self.0) = Streak::default();
    }
}

impl<C: Connect> bb8::ManageConnection for Manager<C> {
    type Connection = Connection;
    type Error = StoreError;

    async fn connect(&self) -> Result<Connection, StoreError> {
        if let Some(error) = self.backoff.error() {
            return Err(error);
        }
        let link = within(self.timeout, self.to.connect()).await;
        let link = link.inspect_err(|error| self.backoff.failed(error.clone()))?;
        // Half of the time: the other half remains for a new connection and the command.
        Ok(Connection::new(link, self.timeout / 2))
    }

    /// Always succeeds: bb8 is configured not to call it, since [`Pool::checkout`] checks the
    /// connection.
    async fn is_valid(&self, _connection: &mut Connection) -> Result<(), StoreError> {
        Ok(())
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        if !connection.was_used {
            match (connection.broken, connection.failure.take()) {
                (false, _) => {
                    connection.was_used = true;
                    self.backoff.worked();
                }
                (true, Some(failure)) => self.backoff.failed(failure),
                (true, None) => {}
            }
        }
        connection.broken
    }
}

/// The connections of one runtime to the server of `C`.
pub(crate) struct Pool<C: Connect> {
    connections: bb8::Pool<Manager<C>>,
    failures: Failures,
}

/// Reports the last connection failure to the callers that wait for a connection.
pub(crate) type Failures = watch::Receiver<Option<StoreError>>;

impl<C: Connect> Pool<C> {
    /// Creates a pool of at most `max` connections. Each is created on demand, within the timeout.
    pub(crate) fn new(to: C, max: usize, timeout: Duration) -> Self {
        let (sender, failures) = watch::channel(None);
        let manager = Manager {
            to,
            timeout,
            backoff: Backoff::default(),
        };
        let connections = bb8::Pool::builder()
            .max_size(u32::try_from(max).unwrap_or(u32::MAX))
            .test_on_check_out(false)
            .retry_connection(false)
            .connection_timeout(timeout)
            // Disables bb8's background task.
            .idle_timeout(None)
            .max_lifetime(None)
            .error_sink(Box::new(Sink(sender)))
            .build_unchecked(manager);
        Self {
            connections,
            failures,
        }
    }

    /// A receiver to pass to [`checkout`](Self::checkout).
    pub(crate) fn failures(&self) -> Failures {
        self.failures.clone()
    }

    /// Returns a working connection, or the reason why none is available.
    pub(crate) async fn checkout(
        &self,
        failures: &mut Failures,
    ) -> Result<impl DerefMut<Target = Connection>, StoreError> {
        let mut lost = false;
        loop {
            let mut connection = self.get(failures).await?;
            if !connection.is_closed() {
                // If one idle connection is dead, the others probably are too: do not ping each. A ping is
                // rare, and boxed so that the future of a worker is small.
                if !connection.was_idle() || !lost && Box::pin(connection.responds_to_ping()).await
                {
                    return Ok(connection);
                }
                lost = true;
            }
            // A new connection that is lost immediately counts as a failure to connect.
            connection.give_up(Some(StoreError::new(ErrorKind::Unreachable)));
        }
    }

    /// Returns a connection, or the reason why none is available: bb8 alone would wait until its
    /// timeout after a failure.
    async fn get(
        &self,
        failures: &mut Failures,
    ) -> Result<bb8::PooledConnection<'_, Manager<C>>, StoreError> {
        failures.mark_unchanged();
        let mut getting = pin!(self.connections.get());
        let got = loop {
            let got = match select(getting.as_mut(), pin!(failures.changed())).await {
                Either::Left((got, _)) => Some(got),
                Either::Right(_) => None,
            };
            match got {
                Some(got) => break got,
                // The server may refuse a further connection (`maxclients`), but an existing one
                // will be returned.
                None if self.connections.state().connections > 0 => {}
                None => {
                    let error = failures.borrow().clone();
                    return Err(error.unwrap_or_else(|| StoreError::new(ErrorKind::Unreachable)));
                }
            }
        };
        got.map_err(|error| match error {
            bb8::RunError::User(error) => error,
            bb8::RunError::TimedOut => StoreError::new(ErrorKind::Timeout),
        })
    }
}

/// Forwards connection failures, which bb8 does not report to the callers that wait. The pool is
/// then ready to try again.
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
