use std::fmt;
use std::sync::Arc;

use super::Account;
use crate::in_flight::Lease;
use crate::refunds::{RefundQueue, Reserved};

/// Counts what a request really costs: in the extensions of every request that passes a layer that
/// [settles](crate::RateLimitLayer::settle), or holds what it has taken [until the body's
/// end](crate::RateLimitLayer::until_body_end).
///
/// What it counts is charged at the end, instead of what was reserved, if the layer's rule returns
/// [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd), or if the request ended without a response. The end is when
/// the response body has ended or was dropped, and no clone of the `Charge` is left: a WebSocket's task or a background
/// job that continues the request keeps one. The response of an upgraded connection ends before the connection begins.
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
/// If layers are nested it counts for all of them. For an uncounted request it does nothing.
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

    /// Adds to the count.
    pub fn add(&self, units: u32) {
        self.account.count(|counted| counted.saturating_add(units.into()));
    }

    /// Sets the count, whatever was counted before.
    pub fn set(&self, units: u32) {
        self.account.count(|_| units.into());
    }

    /// How much was reserved: what the request [costs](crate::RateLimitLayer::cost) beforehand. 0 if it is not counted.
    pub fn reserved(&self) -> u32 {
        self.account.reserved()
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge").field("reserved", &self.reserved()).finish_non_exhaustive()
    }
}
