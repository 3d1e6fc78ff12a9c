use std::fmt;

use super::{Account, Reserved, Settlement};
use crate::background::OpQueue;
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Decision, RateLimited};

/// What a [`Limiter`](crate::Limiter) has [reserved](crate::Limiter::reserve) for a caller. Dropping it refunds all of
/// it, but for what was [counted](Self::add).
///
/// ```
/// use tower_redis_ratelimit::settle::ReserveError;
/// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_minute(1_000))?;
/// let limiter = Limiter::new(LocalStore::default(), tokens);
/// let user = Key::new("user-42");
///
/// let answer = limiter.reserve(user, 600).await?;
/// let denied = limiter.reserve(user, 600).await.unwrap_err();
/// assert!(matches!(denied, ReserveError::Denied(_)));
///
/// // It took less than was reserved.
/// answer.settle(150);
/// assert_eq!(limiter.peek(user, 0).await?.remaining(), 850);
/// # Ok(())
/// # }
/// ```
///
/// Refunds and charges are sent at once in the background. In an outage they are retried while they matter, unless they
/// may have been sent already, so that nothing is charged twice. The limiter's [observer](crate::Limiter::observer) is
/// notified of what was lost.
#[must_use = "to drop it refunds what was reserved"]
pub struct Reservation {
    decision: Decision,
    account: Account,
}

/// Why there is no [`Reservation`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ReserveError {
    /// It was denied: nothing was charged.
    Denied(RateLimited),
    /// The store could not decide.
    Failed(StoreError),
}

impl Reservation {
    pub(crate) fn new(reserved: Reserved, slot: Option<Slot>, ops: OpQueue) -> Self {
        Self {
            decision: reserved.decision.clone(),
            account: Account::new(ops, Some(reserved), slot),
        }
    }

    /// The decision that granted it.
    pub const fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Adds to what it costs when it is dropped. Without any, and without a [`set`](Self::set), it then costs nothing.
    ///
    /// So whatever was counted is charged when a stream is hung up, or a job is aborted:
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_minute(1_000))?;
    /// # let limiter = Limiter::new(LocalStore::default(), tokens);
    /// # let user = Key::new("user-42");
    /// let answer = limiter.reserve(user, 600).await?;
    /// for _token in ["Once", "upon"] {
    ///     answer.add(1);
    /// }
    /// drop(answer);
    /// assert_eq!(limiter.peek(user, 0).await?.remaining(), 998);
    /// # Ok(())
    /// # }
    /// ```
    pub fn add(&self, units: u32) {
        self.account
            .count(|counted| counted.saturating_add(units.into()));
    }

    /// Sets what it costs when it is dropped, whatever was counted before.
    pub fn set(&self, units: u32) {
        self.account.count(|_| units.into());
    }

    /// Charges this much instead of what was reserved: less is refunded, and more is
    /// [charged](crate::check::Check::charge) in any case.
    pub fn settle(self, cost: u32) {
        self.account.settle(Settlement::Cost(cost));
    }

    /// Keeps the charge as reserved.
    pub fn keep(self) {
        self.account.settle(Settlement::Keep);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // By what was counted: nothing, if it is settled.
        if self.account.counted().is_none() {
            self.account.settle(Settlement::Refund);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("decision", &self.decision)
            .finish_non_exhaustive()
    }
}

/// So that whatever else is asked of a [`Limiter`](crate::Limiter) may fail by `?` beside a reservation.
impl From<StoreError> for ReserveError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(denied) => denied.fmt(f),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// Its text is that of its cause.
impl std::error::Error for ReserveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Denied(denied) => denied.source(),
            Self::Failed(error) => error.source(),
        }
    }
}
