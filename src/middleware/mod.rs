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

pub use call_limit::CallLimitLayer;
pub use dry_run::DryRun;
use networks::unmapped;
pub use rate_limit::RateLimitLayer;
pub use throttle::ThrottleLayer;
