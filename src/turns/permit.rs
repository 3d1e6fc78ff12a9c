use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::line::Ask;
use super::{Place, Shared};
use crate::limit::{Check, Decision, Policies};
use crate::store::instant;

/// For how long after it was due a permit may be used that the count has forgotten.
const PATIENCE: Duration = Duration::from_secs(1);

/// A permit that is due: charged, and to be used once.
///
/// Dropped unused, it goes to the next one in the line, and if there is none back to the store.
#[must_use]
pub(crate) struct Permit {
    decision: Decision,
    /// None once it is used or has gone on.
    held: Option<Held>,
}

struct Held {
    shared: Arc<Shared>,
    place: Place,
    runtime: Handle,
    /// What was asked for: a decision may be on a part of these.
    policies: Policies,
    cost: u32,
    /// When the count has forgotten it at the earliest.
    counted_until: Instant,
    /// Until when it may be used as it is.
    good_until: Instant,
}

impl Permit {
    pub(super) fn new(
        shared: &Arc<Shared>,
        place: Place,
        runtime: &Handle,
        ask: &Ask,
        decision: Decision,
        taken_at: Instant,
        due_at: Instant,
    ) -> Self {
        let counted_until = taken_at + decision.reset_after();
        let good_until = counted_until.max(due_at + PATIENCE);
        let (shared, runtime) = (Arc::clone(shared), runtime.clone());
        let (policies, cost) = (ask.policies.clone(), ask.cost);
        Self { decision, held: Some(Held { shared, place, runtime, policies, cost, counted_until, good_until }) }
    }

    /// What was decided on it.
    pub(crate) fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Uses it. One that was held for too long is charged again.
    pub(crate) fn spend(mut self) -> Decision {
        if let Some(held) = self.held.take().filter(|held| !held.is_good()) {
            held.shared.tell(&held.runtime, Check::charge(held.place.key, &held.policies, held.cost));
        }
        self.decision.clone()
    }

    /// Hands it on to whoever is first in the line, or gives it back to the store, if that still counts it.
    pub(super) fn hand_on(mut self) {
        while let Some(held) = self.held.take() {
            let next = held.is_good().then(|| held.shared.pop(&held.place, &held.policies, held.cost)).flatten();
            let Some(waiter) = next else {
                // What has flowed back is another's by now.
                if instant() < held.counted_until {
                    held.shared.tell(&held.runtime, Check::give_back(held.place.key, &held.policies, held.cost));
                }
                return;
            };
            match waiter.tell(Ok(Self { decision: self.decision.clone(), held: Some(held) })) {
                Some(permit) => self = permit,
                None => return,
            }
        }
    }
}

impl Held {
    /// Whether it may be used as it is: the count knows it still, or it was due just now.
    fn is_good(&self) -> bool {
        instant() < self.good_until
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.held.is_some() {
            Self { decision: self.decision.clone(), held: self.held.take() }.hand_on();
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("decision", &self.decision).finish_non_exhaustive()
    }
}
