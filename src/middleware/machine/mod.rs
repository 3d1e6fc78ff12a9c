//! The machine of [`RateLimitLayer`](crate::RateLimitLayer), [`SettledLayer`](crate::rate_limit::SettledLayer) and
//! [`CallLimitLayer`](crate::CallLimitLayer).
//!
//! A [`LimitLayer`] has the settings and makes a [`Limit`], the service. The service sends a request
//! through the [`Gate`](crate::gate::Gate), and a [`LimitFuture`] waits for the decision, for the
//! inner service, and for the checks of dry runs. A [`Protocol`] has the differences between HTTP
//! and other calls: the parts of a request, its access to the decision, and the form of a refusal.
//! Each public layer, service and future wraps one of these types.

mod layer;
mod protocol;
mod service;

pub(super) use layer::{Config, LimitLayer};
pub(super) use protocol::{Protocol, Serve};
pub(super) use service::{Limit, LimitFuture};
