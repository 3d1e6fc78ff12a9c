use std::fmt;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Place, Shared};
use crate::limit::{Check, Decision};
use crate::store::instant;

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
    cost: u32,
    /// When the count has forgotten it at the earliest.
    fresh_until: Option<Instant>,
}

impl Permit {
    pub(super) fn new(
        shared: &Arc<Shared>,
        place: Place,
        runtime: &Handle,
        decision: Decision,
        cost: u32,
        taken_at: Instant,
    ) -> Self {
        let fresh_until = taken_at.checked_add(decision.reset_after());
        let (shared, runtime) = (Arc::clone(shared), runtime.clone());
        Self { decision, held: Some(Held { shared, place, runtime, cost, fresh_until }) }
    }

    /// Uses it. One that was held so long that the count has forgotten it is charged again.
    pub(crate) fn spend(mut self) -> Decision {
        if let Some(held) = self.held.take().filter(|held| !held.is_fresh()) {
            held.tell_store(Check::charge(held.place.key, self.decision.policies(), held.cost));
        }
        self.decision.clone()
    }

    /// Hands it on to whoever is first in the line, or gives it back to the store, if that still counts it.
    pub(super) fn hand_on(mut self) {
        while let Some(held) = self.held.take() {
            if !held.is_fresh() {
                // What has flowed back is another's by now.
                return;
            }
            let policies = self.decision.policies();
            let Some(waiter) = held.shared.pop(&held.place, policies, held.cost) else {
                return held.tell_store(Check::give_back(held.place.key, policies, held.cost));
            };
            match waiter.tell(Ok(Self { decision: self.decision.clone(), held: Some(held) })) {
                Some(permit) => self = permit,
                None => return,
            }
        }
    }
}

impl Held {
    fn is_fresh(&self) -> bool {
        self.fresh_until.is_none_or(|until| instant() < until)
    }

    /// Has the store count, on a task: nobody waits for it, or is left to be told of a failure.
    fn tell_store(&self, check: Check) {
        if self.cost > 0 {
            let shared = Arc::clone(&self.shared);
            self.runtime.spawn(async move { shared.store.ask(check).await.map(drop) });
        }
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
