use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Place, Shared};
use crate::in_flight::Lease;
use crate::limit::{Charged, Check, Decision, EachCharged, Frees, Key, Policies, Policy, micros};
use crate::util::instant;

/// For how long after it was due a permit may be used that the count has forgotten.
const PATIENCE: Duration = Duration::from_secs(1);

/// A permit that is due: charged, and to be used once.
///
/// Dropped unused, it goes to the next one in the queue, and if there is none back to the store.
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
    /// Of the policies that count requests in flight: released with the permit.
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
        policies: &Policies,
        cost: u32,
        decision: Decision,
        times: Times,
    ) -> Self {
        let (shared, runtime, policies) = (Arc::clone(shared), runtime.clone(), policies.clone());
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
            let gone =
                held.counted(&self.decision).map(|(policy, counted)| (policy, held.cost(policy) - counted, None));
            held.checks(gone, |key, policies, cost, _| Check::charge(key, policies, cost))
                .into_iter()
                .for_each(|check| held.shared.tell(&held.runtime, check));
        }
        Spent { decision: self.decision.clone().later(age), taken, lease }
    }

    /// What gives the store back what each policy counts still of it.
    pub(super) fn refund(mut self) -> Vec<Check> {
        self.held.take().map(|held| held.refund(&self.decision)).unwrap_or_default()
    }

    /// Hands it on to whoever is first in the queue, or gives what is still counted of it back to the store.
    pub(super) fn hand_on(mut self) {
        while let Some(held) = self.held.take() {
            let is_good = held.is_good(&self.decision);
            let next = is_good.then(|| held.shared.pop(&held.place, held.cost)).flatten();
            let Some(waiter) = next else {
                held.refund(&self.decision).into_iter().for_each(|check| held.shared.tell(&held.runtime, check));
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
        if policy.is_in_flight() { 0 } else { self.cost }
    }

    /// How long ago it was asked for, in microseconds, rounded up.
    fn asked_ago(&self) -> i64 {
        micros(instant().saturating_duration_since(self.times.asked))
    }

    /// How much of the cost each policy counts still, rounded up, as far as is known here. What has flowed back is
    /// another's by now.
    fn counted(&self, decision: &Decision) -> impl Iterator<Item = (&Policy, u32)> {
        let age = self.asked_ago();
        self.policies.iter().zip(decision.verdicts()).map(move |(policy, (decided, verdict))| {
            let left = Duration::from_micros(u64::try_from(verdict.reset - age).unwrap_or_default());
            let counted = match decided.frees() {
                _ if left.is_zero() => 0,
                Frees::Gradually => decided.quota().units_in(left),
                // It is paid for last, by so many refills to come.
                Frees::InBatches => decided.quota().units_in_periods(left),
                _ => self.cost,
            };
            (policy, counted.min(self.cost(policy)))
        })
    }

    /// What refunds what each policy counts still. What refills at once, a window or a log, is told of which charge that
    /// is: others may have been charged since.
    fn refund(&self, decision: &Decision) -> Vec<Check> {
        let age = self.asked_ago();
        let counted = self.counted(decision).zip(decision.verdicts()).map(|((policy, cost), (_, verdict))| {
            let charged = match policy.frees() {
                Frees::Gradually => None,
                // Of what is paid for last, nothing has come back of what is counted still.
                Frees::InBatches => {
                    let at = decision.at().min(0);
                    Some(Charged { age: 0, at, cost: cost.into(), reset: verdict.reset - age })
                }
                _ => Some(Charged { age, at: decision.at(), cost: cost.into(), reset: verdict.reset }),
            };
            (policy, cost, charged)
        });
        self.checks(counted, Check::refund_of)
    }

    /// A check for each policy that has a cost; or one, if it is the same for all of them.
    fn checks<'a>(
        &self,
        costs: impl Iterator<Item = (&'a Policy, u32, Option<Charged>)>,
        check: impl Fn(Key, &Policies, u32, EachCharged) -> Check,
    ) -> Vec<Check> {
        let (key, costs) = (self.place.key, costs.collect::<Vec<_>>());
        let is_same = costs.windows(2).all(|pair| (pair[0].1, pair[0].2) == (pair[1].1, pair[1].2));
        let checks: Vec<Check> = match costs.first() {
            Some(&(_, cost, _)) if is_same => {
                let charged = costs.iter().filter_map(|(.., charged)| *charged).collect();
                vec![check(key, &self.policies, cost, charged)]
            }
            _ => {
                let one = |(policy, cost, charged): (&Policy, _, Option<_>)| {
                    check(key, &policy.clone().into(), cost, charged.into_iter().collect())
                };
                costs.into_iter().map(one).collect()
            }
        };
        checks.into_iter().filter(|check| check.cost() > 0).collect()
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
