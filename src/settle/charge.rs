use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Account, ReserveError, Reserved};
use crate::background::{OpQueue, PendingOp};
use crate::error::{ErrorKind, StoreError};
use crate::in_flight::Slot;
use crate::limit::RateLimited;
use crate::util::instant;

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
/// use axum::body::Body;
/// use futures_util::{StreamExt, stream};
/// use tower_redis_ratelimit::settle::Charge;
///
/// async fn chat(charge: Charge) -> Body {
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
    pub(crate) fn new(ops: OpQueue, reserved: Option<Reserved>, slot: Option<Slot>) -> Self {
        Self {
            account: Arc::new(Account::new(ops, reserved, slot)),
        }
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
        self.account
            .count(|counted| counted.saturating_add(units.into()));
    }

    /// Sets the count, whatever was counted before.
    pub fn set(&self, units: u32) {
        self.account.count(|_| units.into());
    }

    /// Reserves more for the request, all or nothing, under the same policies: for what its body says of its cost, such as
    /// the most tokens of an answer. It is settled with the rest.
    ///
    /// ```
    /// use axum::Json;
    /// use tower_redis_ratelimit::settle::{Charge, ReserveError};
    ///
    /// #[derive(serde::Deserialize)]
    /// struct Question {
    ///     prompt: String,
    ///     max_tokens: u32,
    /// }
    ///
    /// async fn chat(charge: Charge, Json(question): Json<Question>) -> Result<String, ReserveError> {
    ///     // A request that is denied is answered with 429.
    ///     charge.reserve(question.max_tokens).await?;
    ///     let answer = question.prompt.to_uppercase();
    ///     charge.set(answer.len() as u32);
    ///     Ok(answer)
    /// }
    /// ```
    ///
    /// If it is denied, the request still costs what the layer took at the start, 1 by default: with
    /// [`.cost(|_| 0)`](crate::RateLimitLayer::cost) on the layer that is nothing.
    ///
    /// In nested layers it is reserved in all of them, or in none. It does nothing for an uncounted request, in a dry
    /// run, under policies that only count requests in flight, and once the head of the response has settled the
    /// request. A shadow is charged in the end.
    ///
    /// Dropping the future loses nothing: what is granted belongs to the request, and is settled with it.
    ///
    /// # Errors
    ///
    /// [`ReserveError::Denied`] if there is no room, and [`ReserveError::Failed`] if the store could not decide, whatever
    /// the layer's [`OnError`](crate::reject::OnError) is.
    pub async fn reserve(&self, units: u32) -> Result<(), ReserveError> {
        let mut granted = Vec::new();
        let mut next = Some(self);
        while let Some(charge) = next {
            if let Err(error) = charge.reserve_here(units).await {
                granted
                    .iter()
                    .for_each(|within: &&Self| within.account.give_back(units));
                return Err(error);
            }
            granted.push(charge);
            next = charge.account.outer();
        }
        Ok(())
    }

    /// Reserves for this layer.
    async fn reserve_here(&self, units: u32) -> Result<(), ReserveError> {
        let Some(check) = self.account.ask_more(units) else {
            return Ok(());
        };
        let (key, since, charge) = (*check.key(), instant(), self.clone());
        let (tell, told) = oneshot::channel();
        // It hears the answer also if nobody waits for it any more: until then it holds the account.
        let op = PendingOp::of_check(check).then(move |answer| {
            let granted = match answer {
                Ok(decision) if decision.is_allowed() => {
                    charge
                        .account
                        .add_more(Reserved::new(decision, key, units, since));
                    Ok(())
                }
                Ok(denied) => Err(ReserveError::Denied(RateLimited::new(denied))),
                Err(error) => Err(ReserveError::Failed(error)),
            };
            let _ = tell.send(granted);
        });
        self.account.ask(op).await;
        told.await
            .unwrap_or_else(|_| Err(StoreError::new(ErrorKind::NoRuntime).of_check().into()))
    }

    /// How much was reserved: what the request [costs](crate::RateLimitLayer::cost) beforehand, and what was
    /// [added](Self::reserve). 0 if it is not counted.
    pub fn reserved(&self) -> u32 {
        self.account.reserved()
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge")
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}
