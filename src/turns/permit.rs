use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::line::Ask;
use super::{Place, Shared};
use crate::leases::Lease;
use crate::limit::{Check, Decision, Key, Policies, Policy, Strategy};
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
    times: Times,
    /// Of the policies that count requests in flight: given back with the permit.
    lease: Option<Lease>,
}

/// When a permit was asked for, by whoever was first then, when the store answered, and when it is due.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) asked: Instant,
    pub(super) answered: Instant,
    pub(super) due: Instant,
}

/// A permit that is used.
pub(crate) struct Spent {
    /// What was decided on it, as it is now.
    pub(crate) decision: Decision,
    /// When it was asked for, and for how many microseconds the store's answer is known.
    pub(crate) taken: Option<(Instant, i64)>,
    /// What it holds in flight.
    pub(crate) lease: Option<Lease>,
}

impl Permit {
    pub(super) fn new(
        shared: &Arc<Shared>,
        place: Place,
        runtime: &Handle,
        ask: &Ask,
        decision: Decision,
        times: Times,
    ) -> Self {
        let (shared, runtime) = (Arc::clone(shared), runtime.clone());
        let (policies, cost) = (ask.policies.clone(), ask.cost);
        Self { decision, held: Some(Held { shared, place, runtime, policies, cost, times, lease: None }) }
    }

    /// The same with what it holds in flight.
    pub(super) fn with_lease(mut self, lease: Option<Lease>) -> Self {
        if let Some(held) = &mut self.held {
            held.lease = lease;
        }
        self
    }

    /// What was decided on it, as it is now.
    pub(crate) fn decision(&self) -> Decision {
        self.decision.clone().later(self.age())
    }

    /// How many microseconds ago the store answered.
    fn age(&self) -> i64 {
        let age = self.held.as_ref().map(|held| instant().saturating_duration_since(held.times.answered));
        age.and_then(|age| i64::try_from(age.as_micros()).ok()).unwrap_or(0)
    }

    /// Uses it: the request is in flight while it has the lease. Of one that was held for too long, what is counted no more
    /// is charged again.
    pub(crate) fn spend(mut self) -> Spent {
        let age = self.age();
        let mut held = self.held.take();
        let taken = held.as_ref().map(|held| (held.times.asked, age));
        let lease = held.as_mut().and_then(|held| held.lease.take());
        if let Some(held) = held.filter(|held| !held.is_good(&self.decision)) {
            held.tell(
                Check::charge,
                held.counted(&self.decision).map(|(policy, counted)| (policy, held.cost(policy) - counted)),
            );
        }
        Spent { decision: self.decision.clone().later(age), taken, lease }
    }

    /// Hands it on to whoever is first in the line, or gives what is still counted of it back to the store.
    pub(super) fn hand_on(mut self) {
        while let Some(held) = self.held.take() {
            let is_good = held.is_good(&self.decision);
            let next = is_good.then(|| held.shared.pop(&held.place, held.cost)).flatten();
            let Some(waiter) = next else {
                held.tell(Check::give_back, held.counted(&self.decision));
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
    /// Whether it may be used as it is: it is counted still, or was due just now.
    fn is_good(&self, decision: &Decision) -> bool {
        instant() < self.times.due + PATIENCE
            || self.counted(decision).all(|(policy, counted)| counted == self.cost(policy))
    }

    /// What it cost under a policy. For what is in flight it has a lease.
    fn cost(&self, policy: &Policy) -> u32 {
        if policy.strategy() == Strategy::InFlight { 0 } else { self.cost }
    }

    /// How much of the cost each policy counts still, rounded up, as far as is known here. What has flowed back is
    /// another's by now.
    fn counted(&self, decision: &Decision) -> impl Iterator<Item = (&Policy, u32)> {
        let age = instant().saturating_duration_since(self.times.asked);
        self.policies.iter().zip(decision.verdicts()).map(move |(policy, (decided, verdict))| {
            let left = Duration::from_micros(u64::try_from(verdict.reset).unwrap_or_default()).saturating_sub(age);
            let all = if left.is_zero() { 0 } else { self.cost(policy) };
            let is_steady = decided.strategy().is_steady();
            (policy, if is_steady { decided.quota().units_in(left).min(self.cost) } else { all })
        })
    }

    /// Has the store count so much under each policy: in one check, if it is the same under all of them.
    fn tell<'a>(&self, check: fn(Key, &Policies, u32) -> Check, costs: impl Iterator<Item = (&'a Policy, u32)>) {
        let costs: Vec<_> = costs.collect();
        let tell = |policies: &Policies, cost| self.shared.tell(&self.runtime, check(self.place.key, policies, cost));
        match costs.as_slice() {
            [(_, first), others @ ..] if others.iter().all(|(_, cost)| cost == first) => tell(&self.policies, *first),
            costs => costs.iter().for_each(|(policy, cost)| tell(&Policies::from((*policy).clone()), *cost)),
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
