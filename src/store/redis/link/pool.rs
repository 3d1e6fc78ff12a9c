//! Connections: a bb8 pool that knows which of them still work, and says why one cannot be made.
//!
//! A connection, and whatever bb8 does for it, is driven by the tokio runtime that it was made on. So each runtime has
//! a pool of its own, which is gone with it.

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

/// Knows where a pool's connections lead.
pub(crate) trait Connect: Send + Sync + 'static {
    /// Makes another one.
    fn connect(&self) -> impl Future<Output = Result<Link, StoreError>> + Send;
}

/// Makes the connections. Unlike bb8-redis's own manager it knows whether the last use of one failed, and so needs no
/// ping at every checkout.
struct Manager<C> {
    to: C,
    timeout: Duration,
    backoff: Backoff,
}

/// Keeps those who ask on while a server is away from connecting each time. A few failures in a row are free: a single
/// one may be chance.
#[derive(Default)]
struct Backoff(Mutex<Streak>);

/// Connections that could not be made, or were of no use.
#[derive(Default)]
struct Streak {
    failures: u32,
    /// Until when no other is made, and why.
    refused: Option<(Instant, StoreError)>,
}

impl Backoff {
    /// As many as open the breaker of a fallback, whose probe then finds the way free.
    const FREE: u32 = 3;
    /// How long to wait, and at most twice as long.
    const SHORTEST: Duration = Duration::from_millis(50);

    /// Why no connection may be made now.
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
        if streak.failures > Self::FREE {
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
        // Half of the time is left to connect anew and to ask.
        Ok(Connection::new(link, self.timeout / 2))
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

/// The connections of one runtime to where `C` leads.
pub(crate) struct Pool<C: Connect> {
    connections: bb8::Pool<Manager<C>>,
    failures: Failures,
}

/// Why connections could not be made, for those who wait for one.
pub(crate) type Failures = watch::Receiver<Option<StoreError>>;

impl<C: Connect> Pool<C> {
    /// A pool of at most so many connections. Each is made when it is needed, within the time-out.
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
            // Without these bb8 runs no task of its own.
            .idle_timeout(None)
            .max_lifetime(None)
            .error_sink(Box::new(Sink(sender)))
            .build_unchecked(manager);
        Self {
            connections,
            failures,
        }
    }

    /// For [`checkout`](Self::checkout).
    pub(crate) fn failures(&self) -> Failures {
        self.failures.clone()
    }

    /// A connection that is alive, or why there is none.
    pub(crate) async fn checkout(
        &self,
        failures: &mut Failures,
    ) -> Result<impl DerefMut<Target = Connection>, StoreError> {
        let mut lost = false;
        loop {
            let mut connection = self.get(failures).await?;
            if !connection.is_over() {
                // What has befallen one that rested has likely befallen them all: to ask each would take too long.
                if !connection.has_rested() || !lost && connection.answers().await {
                    return Ok(connection);
                }
                lost = true;
            }
            // One that is new, and lost already, is a failure to connect.
            connection.give_up(Some(StoreError::new(ErrorKind::Unreachable)));
        }
    }

    /// A connection, or why there is none: bb8 alone would leave us waiting after a failure to connect.
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
                // There is no second one, as with `maxclients`: the first will come back.
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

/// Hands on why a connection could not be made, which bb8 keeps from those who wait for one. By then the pool may make
/// another.
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
