//! The middleware: tower's and HTTP's side. [`RateLimitLayer`] tells the story, and [`CallLimitLayer`] that of requests
//! that are not HTTP's.

mod call;
mod config;
mod copies;
mod dry_run;
mod extract;
mod future;
mod headers;
mod layer;
mod reject;
mod select;
mod service;
mod settings;
mod settle;
mod throttle;

use std::mem;

pub use call::{CallEnding, CallFuture, CallLimit, CallLimitLayer, UntilAnswer};
pub use dry_run::DryRun;
pub use extract::{ClientIp, ClientIpBuilder, HeaderKey, PeerIp};
#[cfg(feature = "axum")]
pub use extract::{MatchedEndpoint, MatchedRoute};
pub use future::ResponseFuture;
pub use headers::{Headers, LegacyHeaders};
pub use layer::RateLimitLayer;
#[cfg(feature = "tonic")]
pub use reject::{GrpcOr, GrpcReject};
pub use reject::{HttpReject, Reason, Reject, Rejection};
pub use select::{Live, Routes, Tier, Tiers};
pub use service::RateLimit;
pub use settle::{AsIs, Ending, TrackedBody, UntilBodyEnd};
pub use throttle::{Throttle, ThrottleLayer};

/// Takes a service that has been polled ready, and leaves a clone, which has not.
///
/// Call it, or drop it at once: it may hold a permit that others wait for, such as `ConcurrencyLimit`'s.
fn take_ready<T: Clone>(inner: &mut T) -> T {
    let clone = inner.clone();
    mem::replace(inner, clone)
}
