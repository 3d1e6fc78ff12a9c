use std::task::{Context, Poll};

use super::Gate;
use super::shadows::Shadows;
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Decision, Key};
use crate::settle::{Charge, Reserved, Settled, Settlement};
use crate::store::Store;

/// What a passing request holds. Its drop settles what was reserved, unless the body of the response or the handler
/// still has the [`Charge`], and ends what is in flight.
pub(crate) struct Grant<D> {
    /// Its reservation, and its slot in flight. None in a layer that settles nothing.
    charge: Option<Charge>,
    /// Its slot in flight, if there is no charge.
    slot: Option<Slot>,
    /// None if there are none, as with most layers.
    shadows: Option<Box<Shadows<D>>>,
}

impl<S: Store, R: 'static> Gate<S, R> {
    /// The grant of a request that passes: its slot, and its reservation in a layer that settles. Starts the checks of
    /// shadows for the `key`.
    #[inline]
    pub(super) fn grant(
        &self,
        request: &R,
        key: Option<&Key>,
        slot: Option<Slot>,
        reserved: impl FnOnce() -> Option<Reserved>,
    ) -> Grant<S::Future> {
        let mut grant = Grant {
            slot,
            ..Grant::default()
        };
        if self.settles() {
            // In case nobody else has come since a runtime ended.
            self.ops.wake();
            grant.charge = Some(Charge::new(self.ops.clone(), reserved(), grant.slot.take()));
        }
        if let Some(key) = key
            && self.has_shadows()
        {
            grant.shadows = Some(self.shadows(request, *key, grant.charge.as_ref()));
        }
        grant
    }
}

impl<D> Grant<D> {
    /// The decision with what the handler has reserved beside it.
    pub(crate) fn update(&self, decision: Decision) -> Decision {
        match &self.charge {
            Some(charge) => charge.account().update(decision),
            None => decision,
        }
    }

    pub(crate) fn charge(&self) -> Option<&Charge> {
        self.charge.as_ref()
    }

    /// Settles by the head of the response, as far as it determines the cost.
    pub(crate) fn settle(&mut self, settlement: Settlement) -> Option<Settled> {
        self.charge.as_ref()?.account().settle(settlement)
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
        if let Some(charge) = self.charge.take() {
            charge.account().end();
        }
        self.slot = None;
        if let Some(shadows) = &mut self.shadows {
            shadows.end();
        }
    }
}

impl<D: Future<Output = Result<Decision, StoreError>>> Grant<D> {
    /// Polls the shadows: ready when all are decided.
    pub(crate) fn poll_shadows(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shadows
            .as_mut()
            .map_or(Poll::Ready(()), |shadows| shadows.poll(cx))
    }
}

/// Of an uncounted request.
impl<D> Default for Grant<D> {
    fn default() -> Self {
        Self {
            charge: None,
            slot: None,
            shadows: None,
        }
    }
}
