use std::sync::Arc;
use std::task::{Context, Poll};

use super::Gate;
use super::shadows::Shadows;
use crate::error::StoreError;
use crate::in_flight::Lease;
use crate::limit::{Decision, Key};
use crate::refunds::Reserved;
use crate::settle::{Charge, Settled, Settlement};
use crate::store::Store;

/// What a passing request holds. Its drop settles what was reserved, unless the body of the response or the handler
/// still has the [`Charge`], and ends what is in flight.
pub(crate) struct Grant<D> {
    /// None for an uncounted request.
    decision: Option<Decision>,
    /// Its reservation, and its slot in flight. None in a layer that settles nothing.
    charge: Option<Charge>,
    /// Its slot in flight, if there is no charge.
    lease: Option<Lease>,
    /// None if there are none, as with most layers.
    shadows: Option<Box<Shadows<D>>>,
}

impl<S: Store, R: 'static> Gate<S, R> {
    /// What a request holds that passes by this decision, or uncounted. Starts the checks of shadows for the `key`.
    #[inline]
    pub(super) fn grant(
        &self,
        request: &R,
        key: Option<Key>,
        decision: Option<Decision>,
        reserved: Option<Reserved>,
        lease: Option<Lease>,
    ) -> Grant<S::Future> {
        let (charge, lease) = if self.settles() {
            // In case nobody else has come since a runtime ended.
            self.refunds.wake();
            (Some(Charge::new(Arc::clone(&self.refunds), reserved, lease)), None)
        } else {
            (None, lease)
        };
        let shadows = key.and_then(|key| self.shadows(request, key, charge.as_ref()));
        Grant { decision, charge, lease, shadows }
    }
}

impl<D> Grant<D> {
    pub(crate) fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// The decision, for the response.
    pub(crate) fn take_decision(&mut self) -> Option<Decision> {
        let decision = self.decision.take()?;
        Some(match &self.charge {
            Some(charge) => charge.account().update(decision),
            None => decision,
        })
    }

    pub(crate) fn charge(&self) -> Option<&Charge> {
        self.charge.as_ref()
    }

    /// Settles by the head of the response, as far as it determines the cost.
    pub(crate) fn settle(&mut self, settlement: Settlement) {
        let settled = self.charge.as_ref().and_then(|charge| charge.account().settle(settlement));
        if let Some(Settled { reserved, cost }) = settled
            && cost != reserved
        {
            self.decision = self.decision.take().map(|decision| decision.settled(reserved, cost));
        }
    }

    pub(crate) fn has_shadows(&self) -> bool {
        self.shadows.is_some()
    }

    /// The decisions of shadows and dry runs. None if there are none.
    pub(crate) fn take_shadows(&mut self) -> Option<impl Iterator<Item = Decision> + use<D>> {
        self.shadows.take().map(|shadows| shadows.into_decisions())
    }

    /// What the response body holds from here on.
    pub(crate) fn take_charge(&mut self) -> Option<Charge> {
        self.charge.take()
    }

    /// Settles it, but for the checks that are not decided yet.
    pub(crate) fn end(&mut self) {
        self.charge = None;
        self.lease = None;
    }
}

impl<D: Future<Output = Result<Decision, StoreError>>> Grant<D> {
    /// Polls the shadows: ready when all are decided.
    pub(crate) fn poll_shadows(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shadows.as_mut().map_or(Poll::Ready(()), |shadows| shadows.poll(cx))
    }
}

/// Of an uncounted request.
impl<D> Default for Grant<D> {
    fn default() -> Self {
        Self { decision: None, charge: None, lease: None, shadows: None }
    }
}
