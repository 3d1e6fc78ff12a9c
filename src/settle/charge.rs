use std::fmt;
use std::sync::Arc;

use super::{Account, RefundQueue, Reserved};
use crate::in_flight::Lease;

/// Counts what a request really costs: in the extensions of every request that passes a layer that
/// [settles](crate::RateLimitLayer::settle), or holds what it has taken [until the body's
/// end](crate::RateLimitLayer::until_body_end).
///
/// What it counts is charged in the end, in the place of what was reserved, if the layer's rule says
/// [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd), and if the request has ended without a response. The end is
/// when the body of the response has ended or was dropped, and no clone of the `Charge` is left: who goes on working
/// for the request, such as a WebSocket's task or a job in the background, keeps one. The response of a connection that
/// is upgraded ends before the connection begins.
///
/// ```
/// use axum::Extension;
/// use axum::body::Body;
/// use futures_util::{StreamExt, stream};
/// use tower_redis_ratelimit::settle::Charge;
///
/// async fn chat(Extension(charge): Extension<Charge>) -> Body {
///     let tokens = stream::iter(["to", "ken", "s"]).inspect(move |_| charge.add(1));
///     Body::from_stream(tokens.map(Ok::<_, std::convert::Infallible>))
/// }
/// ```
///
/// Where layers wrap each other it counts for all of them. For a request that nobody counts it does nothing.
#[derive(Clone)]
pub struct Charge {
    account: Arc<Account>,
}

impl Charge {
    /// Counts for a request that has reserved this, or nothing, and that holds its place in flight until all is
    /// settled.
    pub(crate) fn new(refunds: Arc<dyn RefundQueue>, reserved: Option<Reserved>, lease: Option<Lease>) -> Self {
        Self { account: Arc::new(Account::new(refunds, reserved, lease)) }
    }

    /// Counts for a layer around this one, too.
    pub(crate) fn count_for(&self, outer: Self) {
        self.account.count_for(outer);
    }

    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    /// Counts so much more.
    pub fn add(&self, units: u32) {
        self.account.count(|counted| counted.saturating_add(units.into()));
    }

    /// Counts so much, in the place of all that was counted before.
    pub fn set(&self, units: u32) {
        self.account.count(|_| units.into());
    }

    /// How much was reserved: what the request [costs](crate::RateLimitLayer::cost) beforehand. 0 if nobody counts it.
    pub fn reserved(&self) -> u32 {
        self.account.reserved()
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge").field("reserved", &self.reserved()).finish_non_exhaustive()
    }
}
