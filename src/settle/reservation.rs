use std::fmt;

use super::{RequestCharges, Settlement};
use crate::background::OpQueue;
use crate::error::StoreError;
use crate::held_slots::Slot;
use crate::limit::{Charge, Decision, RateLimited};

/// A cost that a [`Limiter`](crate::Limiter) has [reserved](crate::Limiter::reserve) for a caller.
/// Dropping it refunds everything that was not [counted](Self::add).
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
/// // It used less than was reserved.
/// answer.settle(150);
/// assert_eq!(limiter.peek(user, 0).await?.remaining(), 850);
/// # Ok(())
/// # }
/// ```
///
/// Refunds and charges are queued immediately, and sent in the background. In an outage they are retried while
/// they matter, unless they may have been sent already, to avoid charging twice. Lost ones
/// are reported to the limiter's [observer](crate::Limiter::observer). At the end of a process,
/// [`Limiter::flush`](crate::Limiter::flush) waits for them.
#[must_use = "dropping it refunds the reservation"]
pub struct Reservation {
    decision: Decision,
    charges: RequestCharges,
}

/// The error of a reservation.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ReserveError {
    /// The reservation was denied: nothing was charged.
    Denied(RateLimited),
    /// The store could not decide.
    Failed(StoreError),
}

impl Reservation {
    /// Creates a reservation of these charges, one for each key. None for an exempt caller.
    pub(crate) fn new(
        decision: Decision,
        charges: impl IntoIterator<Item = Charge>,
        slots: impl IntoIterator<Item = Slot>,
        ops: OpQueue,
    ) -> Self {
        Self {
            decision,
            charges: RequestCharges::new(ops, charges, slots),
        }
    }

    /// Returns the decision that granted the reservation.
    pub const fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Adds to the cost that is charged when the reservation is dropped. If neither this nor
    /// [`set`](Self::set) is called, that cost is 0.
    ///
    /// So the counted cost is charged even if a stream is disconnected or a job is aborted:
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
        self.charges
            .count(|counted| counted.saturating_add(units.into()));
    }

    /// Sets the cost that is charged when the reservation is dropped. Replaces earlier
    /// [additions](Self::add).
    pub fn set(&self, units: u32) {
        self.charges.count(|_| units.into());
    }

    /// Charges `cost` instead of the reserved cost: the rest is refunded, or the missing part is
    /// [charged](crate::check::Check::charge) even beyond the limit.
    pub fn settle(self, cost: u32) {
        self.charges.apply_rule(Settlement::Cost(cost));
    }

    /// Keeps the charge as reserved.
    pub fn keep(self) {
        self.charges.apply_rule(Settlement::Keep);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A counted cost is charged when the charges are dropped. This also runs after `settle` and
        // `keep`, which leave nothing to refund.
        if self.charges.counted().is_none() {
            self.charges.apply_rule(Settlement::Refund);
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

/// Allows `?` on other calls of a [`Limiter`](crate::Limiter) in a function that reserves.
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

/// The error displays like its cause, so its source is that of the cause.
impl std::error::Error for ReserveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Denied(denied) => denied.source(),
            Self::Failed(error) => error.source(),
        }
    }
}
