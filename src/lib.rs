// Of two definitions of a link the first one holds: here, README's links lead to the guides of this version.
//! [answers]: guide::answers
//! [choosing]: guide::choosing
//! [faults]: guide::faults
//! [performance]: guide::performance
//! [recipes]: guide::recipes
//! [running]: guide::running
//! [servers]: guide::servers
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod gate;
#[cfg(doc)]
pub mod guide;
mod in_flight;
mod limit;
mod limiter;
mod middleware;
mod settle;
#[cfg(test)]
mod simulation;
mod store;
mod util;
mod wait_queues;

pub use gate::{Global, KeyExtractor, MissingKey, OnError, OnMissingKey, PolicySelector, Wait, key_fn, policies_fn};
pub use limit::{
    Align, Check, ConfigError, Decision, Key, Mode, Outcome, Policies, Policy, Quota, RateLimited, Refill, Source,
    Strategy, Verdict,
};
pub use limiter::Limiter;
pub use middleware::{
    AsIs, CallEnding, CallFuture, CallLimit, CallLimitLayer, ClientIp, ClientIpBuilder, DryRun, Ending, HeaderKey,
    Headers, HttpReject, LegacyHeaders, Live, PeerIp, RateLimit, RateLimitLayer, Reason, Reject, Rejection,
    ResponseFuture, Routes, Throttle, ThrottleLayer, Tier, Tiers, TrackedBody, UntilAnswer, UntilBodyEnd,
};
#[cfg(feature = "tonic")]
pub use middleware::{GrpcOr, GrpcReject};
#[cfg(feature = "axum")]
pub use middleware::{MatchedEndpoint, MatchedRoute};
pub use settle::{Charge, Reservation, ReserveError, Settlement};
#[cfg(feature = "metrics")]
pub use store::MetricsObserver;
#[cfg(feature = "tracing")]
pub use store::TracingObserver;
pub use store::{
    Answer, AnyStore, AnyStoreFuture, ErrorKind, Fallback, FallbackFuture, Instances, LocalStore, MockStore, Observer,
    RedisFuture, RedisStore, RedisStoreBuilder, Servers, Share, ShareConfig, Store, StoreConfig, StoreError, StoreKind,
    WrapStore, event,
};

/// The Redis client, to turn on its features and to name what [`RedisStore::connect`] takes.
pub use redis;

#[cfg(test)]
extern crate self as tower_redis_ratelimit;
#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;
