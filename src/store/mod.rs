//! Who remembers: stores of the callers' counts.
//!
//! [`RedisStore`] keeps one count for all instances, [`LocalStore`] one for this process, and [`Fallback`] is a store
//! made of two: the second answers while the first cannot.

mod breaker;
mod clock;
mod error;
mod fallback;
mod local;
mod observer;
mod redis;

use std::future::Future;

pub use self::redis::{Answer, RedisStore, RedisStoreBuilder};
pub use error::{Error, ErrorKind};
pub use fallback::{Fallback, FallbackFuture};
pub use local::LocalStore;
pub use observer::Observer;

use crate::limit::{Check, Decision};

/// Decides checks, and remembers what was charged.
///
/// The contract of an implementation:
/// - A check is atomic: no other check of the same caller is decided between its reading and its charging.
/// - It is all or nothing over its policies, and a denied one charges nothing.
/// - A clone shares the counts.
/// - Every check is answered in bounded time, with a [`Decision`] or an [`Error`]; an error is no verdict.
/// - A future that is dropped before the check was sent charges nothing.
///
/// Outside of tower a store is used by itself:
///
/// ```
/// use tower_redis_ratelimit::{Check, Key, LocalStore, Policy, Quota, Store, Strategy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = LocalStore::default();
/// let policy = Policy::new("mails", Strategy::Gcra, Quota::per_hour(2))?.into();
/// let decision = store.check(Check::take(Key::new("user-42"), &policy, 1)).await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.remaining(), 1);
/// # Ok(())
/// # }
/// ```
pub trait Store: Clone + Send + Sync + 'static {
    /// Resolves to the decision.
    type Future: Future<Output = Result<Decision, Error>> + Send + 'static;

    /// Decides one check.
    fn check(&self, check: Check) -> Self::Future;
}
