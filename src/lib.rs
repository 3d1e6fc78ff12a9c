// If a link is defined twice, the first definition counts. So the README's links lead to the guides
// and the types of this version, and its picture has a form that rustdoc renders.
//! [choosing]: guide::choosing
//! [comparison]: guide::comparison
//! [faults]: guide::faults
//! [guide]: guide
//! [keys]: guide::keys
//! [performance]: guide::performance
//! [pitfalls]: guide::pitfalls
//! [recipes]: guide::recipes
//! [start]: guide::start
//! [`RateLimitLayer`]: RateLimitLayer
//! [`CallLimitLayer`]: CallLimitLayer
//! [`ThrottleLayer`]: ThrottleLayer
//! [`Limiter`]: Limiter
//! [`RateLimited`]: check::RateLimited
//! [`Decision`]: check::Decision
//! [`PeerIp`]: extract::PeerIp
//! [`ClientIp`]: extract::ClientIp
//! [`HeaderKey`]: extract::HeaderKey
//! [`by_extension`]: extract::by_extension
//! [`Global`]: extract::Global
//! [`key_fn`]: extract::key_fn
//! [`Policy`]: Policy
//! [`Policies`]: Policies
//! [`Strategy`]: Strategy
//! [`Tiers`]: select::Tiers
//! [`Routes`]: select::Routes
//! [`Fallback`]: Fallback
//! [`RedisStore`]: RedisStore
//! [`LocalStore`]: LocalStore
//! [`AnyStore`]: store::AnyStore
//! [`OnError::Allow`]: reject::OnError::Allow
//! [`RequestCost`]: settle::RequestCost
#![cfg_attr(feature = "axum", doc = "[`MatchedRoute`]: extract::MatchedRoute")]
#![cfg_attr(
    feature = "axum",
    doc = "[`MatchedEndpoint`]: extract::MatchedEndpoint"
)]
#![cfg_attr(feature = "tonic", doc = "[`GrpcReject`]: reject::GrpcReject")]
#![cfg_attr(
    feature = "tracing",
    doc = "[`TracingObserver`]: observe::TracingObserver"
)]
#![cfg_attr(
    feature = "metrics",
    doc = "[`MetricsObserver`]: observe::MetricsObserver"
)]
#![doc = include_str!("../docs/pictures.md")]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod background;
mod blocks;
pub mod check;
mod error;
mod gate;
#[cfg(doc)]
pub mod guide;
mod held_slots;
mod leases;
mod limit;
mod limiter;
mod middleware;
pub mod observe;
pub mod settle;
#[cfg(test)]
mod simulation;
pub mod store;
pub mod strategy;
mod util;
mod wait_queues;
mod waiters;

#[doc(inline)]
pub use error::ConfigError;
pub use gate::wait;
pub use leases::{Leased, LeasedBuilder};
#[doc(inline)]
pub use limit::{Key, Policies, Policy, Quota, Strategy};
pub use limiter::Limiter;
#[doc(inline)]
pub use middleware::{CallLimitLayer, RateLimitLayer, ThrottleLayer};
pub use middleware::{call_limit, extract, headers, rate_limit, reject, select, throttle};
#[doc(inline)]
pub use store::{Fallback, LocalStore, RedisStore};

/// The Redis client, for a [`ConnectionInfo`](redis::ConnectionInfo) instead of a URL. It is
/// [exempt](store::Servers#the-client) from the version promise of this crate.
pub use redis;

#[cfg(test)]
extern crate self as tower_redis_ratelimit;
#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;
