//! The middleware, for tower and HTTP. See [`RateLimitLayer`], and [`CallLimitLayer`] for requests
//! other than HTTP.

pub mod call_limit;
mod dry_run;
pub mod extract;
#[cfg(feature = "axum")]
mod handler;
pub mod headers;
mod layers;
mod machine;
mod networks;
pub mod rate_limit;
pub mod reject;
pub mod select;
pub mod throttle;

use std::mem;

pub use call_limit::CallLimitLayer;
pub use dry_run::DryRun;
use networks::unmapped;
pub use rate_limit::RateLimitLayer;
pub use throttle::ThrottleLayer;

/// Takes a service that is ready, and leaves a clone that is not.
///
/// Call or drop it immediately: it may hold a permit that others wait for, such as
/// `ConcurrencyLimit`'s.
fn take_ready<T: Clone>(inner: &mut T) -> T {
    let clone = inner.clone();
    mem::replace(inner, clone)
}
