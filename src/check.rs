//! Checks and decisions: the request to a store, and its result.
//!
//! A layer creates a [`Check`] for each request. A [`Limiter`](crate::Limiter) and any
//! [`Store`](crate::store::Store) accept every kind of check:
//!
//! ```
//! use tower_redis_ratelimit::check::Check;
//! use tower_redis_ratelimit::store::Store;
//! use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, Strategy};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let policies = Policies::from(Policy::new("mails", Strategy::Gcra, Quota::per_minute(60))?);
//! let decision = LocalStore::default().check(Check::take(Key::new("user-42"), &policies, 20)).await?;
//! assert!(decision.is_allowed());
//! assert_eq!(decision.remaining(), 40);
//! # Ok(())
//! # }
//! ```

pub use crate::limit::{
    Check, Decision, JointCheck, JointDecision, Mode, Outcome, RateLimited, SlotId, Source, Verdict,
};
pub use crate::limiter::Applied;
pub use crate::middleware::DryRun;
