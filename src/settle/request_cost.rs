use std::fmt;
use std::sync::Arc;

use smallvec::smallvec;
use tokio::sync::oneshot;

use super::charges::Addition;
use super::{RequestCharges, ReserveError};
use crate::background::{OpQueue, PendingOp};
use crate::error::{ErrorKind, StoreError};
use crate::held_slots::Slot;
use crate::limit::{Charge, JointCheck, RateLimited};
use crate::util::instant;

/// A handle that counts the actual cost of a request. A layer that
/// [settles](crate::RateLimitLayer::settle), or that keeps charges [until the body's
/// end](crate::RateLimitLayer::until_body_end), inserts it into the request's extensions.
///
/// The counted cost is charged at the end, instead of the reserved one, if the layer's rule returns
/// [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd), or if the request ended without a
/// response. The end is when the response body has ended or was dropped, and every clone of the
/// `RequestCost` is dropped: a WebSocket's task or a background job that continues the request keeps a
/// clone. The response of an upgraded connection ends before the connection begins.
///
/// ```
/// use axum::body::Body;
/// use futures_util::{StreamExt, stream};
/// use tower_redis_ratelimit::settle::RequestCost;
///
/// async fn chat(cost: RequestCost) -> Body {
///     let tokens = stream::iter(["to", "ken", "s"]).inspect(move |_| cost.add(1));
///     Body::from_stream(tokens.map(Ok::<_, std::convert::Infallible>))
/// }
/// ```
///
/// With nested layers it counts for all of them. For an uncounted request it does nothing.
#[doc(alias = "WebSocket")]
#[derive(Clone)]
pub struct RequestCost {
    charges: Arc<RequestCharges>,
}

impl RequestCost {
    /// Creates a handle for a request that may have reserved a cost of each of its keys, and holds `slots` until
    /// everything is settled.
    pub(crate) fn new(
        ops: OpQueue,
        reserved: impl IntoIterator<Item = Charge>,
        slots: impl IntoIterator<Item = Slot>,
    ) -> Self {
        Self {
            charges: Arc::new(RequestCharges::new(ops, reserved, slots)),
        }
    }

    /// Also counts for an outer layer.
    pub(crate) fn count_for(&self, outer: Self) {
        self.charges.count_for(outer.charges);
    }

    /// Examines the last handle of a request whose response upgrades the connection: the response ends before that.
    #[cold]
    pub(crate) fn upgraded(&self) {
        if Arc::strong_count(&self.charges) == 1 {
            self.charges.upgraded_alone();
        }
    }

    pub(crate) fn charges(&self) -> &RequestCharges {
        &self.charges
    }

    /// Adds to the counted cost.
    pub fn add(&self, units: u32) {
        self.charges
            .count(|counted| counted.saturating_add(units.into()));
    }

    /// Replaces the counted cost.
    pub fn set(&self, units: u32) {
        self.charges.count(|_| units.into());
    }

    /// Reserves more for the request, all or nothing, under the same policies: for a cost that its
    /// body states, such as the maximum number of tokens of a response. The addition is settled
    /// with the rest.
    ///
    /// ```
    /// use axum::Json;
    /// use tower_redis_ratelimit::settle::{RequestCost, ReserveError};
    ///
    /// #[derive(serde::Deserialize)]
    /// struct Question {
    ///     prompt: String,
    ///     max_tokens: u32,
    /// }
    ///
    /// async fn chat(cost: RequestCost, Json(question): Json<Question>) -> Result<String, ReserveError> {
    ///     // A denied request gets a 429.
    ///     cost.reserve(question.max_tokens).await?;
    ///     let answer = question.prompt.to_uppercase();
    ///     cost.set(answer.len() as u32);
    ///     Ok(answer)
    /// }
    /// ```
    ///
    /// If the addition is denied, the request still costs the layer's initial charge, 1 by default:
    /// use [`.cost(|_| 0)`](crate::RateLimitLayer::cost) on the layer to make that 0.
    ///
    /// In nested layers the cost is reserved in all of them, or in none. The method does nothing
    /// for an uncounted request, in a dry run, under policies that only count requests in flight,
    /// and after the head of the response has settled the request. A shadow is charged at the end.
    ///
    /// Dropping the future loses nothing: a grant belongs to the request and is settled with it. Only if the request's
    /// runtime shuts down before the store has replied, the addition may stay charged.
    ///
    /// # Errors
    ///
    /// [`ReserveError::Denied`] if the policies deny the cost, and [`ReserveError::Failed`] if the
    /// store could not decide, independent of the layer's [`OnError`](crate::reject::OnError).
    pub async fn reserve(&self, units: u32) -> Result<(), ReserveError> {
        let mut granted: Vec<&Arc<RequestCharges>> = Vec::new();
        let mut next = Some(&self.charges);
        while let Some(charges) = next {
            if let Err(error) = reserve_under(charges, units).await {
                for inner in granted {
                    inner.refund_extra(units);
                }
                return Err(error);
            }
            granted.push(charges);
            next = charges.outer();
        }
        Ok(())
    }

    /// Returns the reserved cost: the request's [initial cost](crate::RateLimitLayer::cost) plus
    /// [additions](Self::reserve). 0 if the request is not counted.
    pub fn reserved(&self) -> u32 {
        self.charges.reserved()
    }
}

/// Reserves under the policies of one layer.
async fn reserve_under(charges: &Arc<RequestCharges>, units: u32) -> Result<(), ReserveError> {
    let checks = charges.extra_checks(units);
    let since = instant();
    let (sender, receiver) = oneshot::channel();
    let this = Arc::clone(charges);
    // `this` keeps the charges unsettled until the reply, even if the handler stops waiting.
    let reply = move |granted: Result<Addition, ReserveError>| {
        let granted = granted.map(|addition| this.add_extra(addition));
        // Drop it first: the handler may then end the request, and the last reference settles the charges.
        drop(this);
        let _ = sender.send(granted);
    };
    match &checks[..] {
        [] => return Ok(()),
        [check] => {
            let key = *check.key();
            let op = PendingOp::of_check(check.clone()).then(move |answer| {
                reply(match answer {
                    Ok(decision) if decision.is_allowed() => {
                        let charge = Charge::new(key, decision, units, since, instant());
                        Ok(smallvec![charge])
                    }
                    Ok(denied) => Err(ReserveError::Denied(RateLimited::new(denied))),
                    Err(error) => Err(ReserveError::Failed(error)),
                });
            });
            charges.send(op);
        }
        checks => {
            let parts = checks.iter().map(|check| (*check.key(), check.policies()));
            let joint = JointCheck::take(parts, units).map_err(StoreError::from)?;
            let sent = joint.clone();
            charges.send_all(joint, move |answer| {
                reply(match answer {
                    Ok(decided) if decided.decision().is_allowed() => {
                        Ok(decided.charges(&sent, since, instant()))
                    }
                    Ok(denied) => {
                        let denied = RateLimited::new(denied.into_decision());
                        Err(ReserveError::Denied(denied))
                    }
                    Err(error) => Err(ReserveError::Failed(error)),
                });
            });
        }
    }
    match receiver.await {
        Ok(granted) => granted,
        // The queue's runtime has shut down, and dropped the operation.
        Err(_) => Err(StoreError::new(ErrorKind::NoRuntime).check_only().into()),
    }
}

impl fmt::Debug for RequestCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestCost")
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}
