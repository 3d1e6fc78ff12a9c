//! The machine of [`RateLimitLayer`](crate::RateLimitLayer) and [`CallLimitLayer`](crate::CallLimitLayer).
//!
//! A [`LimitLayer`] has the settings and makes a [`Limit`], the service. The service sends a request
//! through the [`Gate`](crate::gate::Gate), and a [`LimitFuture`] waits for the decision, for the
//! inner service, and for the checks of dry runs. A [`Protocol`] is what differs between HTTP and
//! other calls: what a request consists of, what it is told of the decision, and what a refusal is.

mod future;
mod layer;
mod protocol;
mod service;

pub use future::LimitFuture;
pub use layer::LimitLayer;
pub(super) use protocol::sealed;
pub use protocol::{AsIs, Protocol, Serve};
pub use service::Limit;

pub(super) use layer::Config;
