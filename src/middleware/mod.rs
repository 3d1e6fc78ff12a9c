//! The middleware: tower's and HTTP's side. [`RateLimitLayer`] tells the story, and [`CallLimitLayer`] that of requests
//! that are not HTTP's.

mod annotation;
mod asked;
mod call;
mod choices;
mod config;
mod copies;
mod extract;
mod future;
mod headers;
mod layer;
mod misconfiguration;
mod ready;
mod reject;
mod select;
mod service;
mod settle;
mod shadow;
mod throttle;
mod wait;

pub use call::{CallFuture, CallLimit, CallLimitLayer};
pub use config::{OnError, OnMissingKey};
pub use extract::{ClientIp, ClientIpBuilder, Global, HeaderKey, KeyExtractor, MissingKey, PeerIp, key_fn};
#[cfg(feature = "axum")]
pub use extract::{MatchedEndpoint, MatchedRoute};
pub use future::ResponseFuture;
pub use headers::{Headers, LegacyHeaders};
pub use layer::RateLimitLayer;
#[cfg(feature = "tonic")]
pub use reject::{GrpcOr, GrpcReject};
pub use reject::{HttpReject, Reason, Reject, Rejection};
pub use select::{Live, PolicySelector, Routes, Tier, Tiers, policies_fn};
pub use service::RateLimit;
pub use settle::{AsIs, Ending, TrackedBody, UntilBodyEnd};
pub use shadow::DryRun;
pub use throttle::{Throttle, ThrottleLayer};
pub use wait::Wait;
