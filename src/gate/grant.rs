//! The resources of an admitted request.
//!
//! [`Gate::grant`] is here, since it sets the private fields of a [`Grant`].

use std::fmt;
use std::task::{Context, Poll};

use super::Gate;
use super::shadows::Shadows;
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Decision, Key};
use crate::settle::{Charge, Reserved, Settled, Settlement};
use crate::store::Store;

/// The resources of an admitted request. Dropping it settles the charge, unless a clone of the
/// [`Charge`] is alive (in the response body or the handler), and releases the in-flight slot.
pub struct Grant<D> {
    /// The reservation and the in-flight slot. `None` if the layer does not settle charges.
    charge: Option<Charge>,
    /// The in-flight slot, if there is no charge.
    slot: Option<Slot>,
    /// The dry-run and shadow checks. `None` in most layers, which have no such policies.
    shadows: Option<Box<Shadows<D>>>,
}

impl<S: Store, R: 'static> Gate<S, R> {
    /// Creates the grant of an admitted request: its in-flight slot and, in a layer that settles,
    /// its reservation. Starts the shadow checks for `key`.
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
            // Restart the sender if its runtime has shut down.
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
    /// Returns `decision`, adjusted by the amounts that the handler has reserved.
    pub(crate) fn update(&self, decision: Decision) -> Decision {
        match &self.charge {
            Some(charge) => charge.account().update(decision),
            None => decision,
        }
    }

    pub(crate) fn charge(&self) -> Option<&Charge> {
        self.charge.as_ref()
    }

    /// Settles the charge after the response head. `None` if the cost is not final yet.
    pub(crate) fn settle(&mut self, settlement: Settlement) -> Option<Settled> {
        self.charge.as_ref()?.account().settle(settlement)
    }

    pub(crate) fn has_shadows(&self) -> bool {
        self.shadows.is_some()
    }

    /// Returns the decisions of shadows and dry runs, or `None` if there are no such checks.
    pub(crate) fn take_shadows(&mut self) -> Option<impl Iterator<Item = Decision> + use<D>> {
        self.shadows.take().map(|shadows| shadows.into_decisions())
    }

    /// Moves the charge out of the grant: the response body owns it until its end.
    pub(crate) fn take_charge(&mut self) -> Option<Charge> {
        self.charge.take()
    }

    /// Settles the charge and releases the slot. Shadow checks that are still pending settle when
    /// they complete.
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
    /// Polls the shadow checks; ready when all are decided.
    pub(crate) fn poll_shadows(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shadows
            .as_mut()
            .map_or(Poll::Ready(()), |shadows| shadows.poll(cx))
    }
}

/// The grant of an uncounted request.
impl<D> Default for Grant<D> {
    fn default() -> Self {
        Self {
            charge: None,
            slot: None,
            shadows: None,
        }
    }
}

impl<D> fmt::Debug for Grant<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant").finish_non_exhaustive()
    }
}
