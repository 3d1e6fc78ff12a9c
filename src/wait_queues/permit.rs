use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{QueueId, SharedQueues};
use crate::background::{OpQueue, PendingOp};
use crate::in_flight::{InFlightTracker, Slot};
use crate::limit::{Charged, Check, Decision, Frees, Key, Policies, Policy, micros};
use crate::util::instant;

/// For how long after it was due a permit may be used that the count has forgotten.
const PATIENCE: Duration = Duration::from_secs(1);

/// A permit that is due: charged, and to be used once.
///
/// Dropped unused, it goes to the next one in the queue, and if there is none back to the store.
#[must_use]
pub(crate) struct Permit {
    taken: Taken,
    /// None once it is used or has gone on.
    held: Option<Held>,
}

/// What was charged for a permit.
#[derive(Clone)]
struct Taken {
    decision: Decision,
    key: Key,
    /// What was asked for: a decision may be on a part of these.
    policies: Policies,
    cost: u32,
    times: Times,
}

struct Held {
    shared: Arc<SharedQueues>,
    id: QueueId,
    ops: OpQueue,
    /// Of the policies that count requests in flight: released with the permit.
    slot: Option<Slot>,
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
    pub(crate) slot: Option<Slot>,
}

impl Permit {
    pub(super) fn new(
        shared: &Arc<SharedQueues>,
        in_flight: &InFlightTracker,
        id: QueueId,
        policies: &Policies,
        cost: u32,
        decision: Decision,
        times: Times,
    ) -> Self {
        let (shared, ops, policies) = (
            Arc::clone(shared),
            in_flight.ops().clone(),
            policies.clone(),
        );
        let taken = Taken {
            decision,
            key: id.key,
            policies,
            cost,
            times,
        };
        Self {
            taken,
            held: Some(Held {
                shared,
                id,
                ops,
                slot: None,
            }),
        }
    }

    /// The same with what it holds in flight.
    pub(super) fn with_slot(mut self, slot: Option<Slot>) -> Self {
        if let Some(held) = &mut self.held {
            held.slot = slot;
        }
        self
    }

    /// What was decided on it, as it is now.
    pub(crate) fn decision(&self) -> Decision {
        self.taken.decision.clone().later(self.taken.age())
    }

    /// Uses the permit: the request is in flight while it has the slot. After too long a time, the expired part of the
    /// charge is charged again.
    pub(crate) fn spend(mut self) -> Spent {
        let (age, held) = (self.taken.age(), self.held.take());
        if let Some(held) = held.as_ref().filter(|_| !self.taken.is_good()) {
            self.taken.charge_again().for_each(|op| held.ops.put(op));
        }
        let decision = self.taken.decision.clone().later(age);
        let taken = held.is_some().then_some((self.taken.times.asked, age));
        Spent {
            decision,
            taken,
            slot: held.and_then(|held| held.slot),
        }
    }

    /// What gives the store back what each policy counts still of it.
    pub(super) fn refund(mut self) -> Vec<PendingOp> {
        self.held = None;
        self.taken.refunds().collect()
    }

    /// Hands it on to whoever is first in the queue, or gives what is still counted of it back to the store.
    pub(super) fn hand_on(mut self) {
        while let Some(held) = self.held.take() {
            let next = self
                .taken
                .is_good()
                .then(|| held.shared.pop(&held.id, self.taken.cost))
                .flatten();
            let Some(waiter) = next else {
                return self.taken.refunds().for_each(|op| held.ops.put(op));
            };
            match waiter.answer(Ok(Self {
                taken: self.taken.clone(),
                held: Some(held),
            })) {
                Some(permit) => self = permit,
                None => return,
            }
        }
    }
}

impl Taken {
    /// How many microseconds ago the store answered.
    fn age(&self) -> i64 {
        let age = instant().saturating_duration_since(self.times.answered);
        i64::try_from(age.as_micros()).unwrap_or(0)
    }

    /// Whether it may be used as it is: it is counted still, or was due just now.
    fn is_good(&self) -> bool {
        let now = instant();
        now < self.times.due + PATIENCE
            || self
                .counted(now)
                .all(|(policy, counted, _)| counted == self.cost(policy))
    }

    /// Its cost under a policy. A request in flight has a slot instead.
    fn cost(&self, policy: &Policy) -> u32 {
        if policy.is_in_flight() { 0 } else { self.cost }
    }

    /// How much of the cost each policy counts still, rounded up, as far as is known here. What has flowed back is
    /// another's by now. What refills at once, a window or a log, needs to know which charge that is: others may have been
    /// charged since.
    fn counted(&self, now: Instant) -> impl Iterator<Item = (&Policy, u32, Option<Charged>)> {
        let (age, at) = (
            micros(now.saturating_duration_since(self.times.asked)),
            self.decision.charged_at(),
        );
        self.policies.iter().zip(self.decision.verdicts()).map(
            move |(policy, (decided, verdict))| {
                let left =
                    Duration::from_micros(u64::try_from(verdict.reset - age).unwrap_or_default());
                let counted = match decided.frees() {
                    _ if left.is_zero() => 0,
                    Frees::Gradually => decided.quota().units_in(left),
                    // It is paid for last, by so many refills to come.
                    Frees::InBatches => decided.quota().units_in_periods(left),
                    Frees::WithWindow | Frees::OneByOne | Frees::Fading | Frees::OnRelease => {
                        self.cost
                    }
                };
                let cost = counted.min(self.cost(policy));
                let charged = match policy.frees() {
                    Frees::Gradually => None,
                    // Of what is paid for last, nothing has come back of what is counted still.
                    Frees::InBatches => Some(Charged {
                        age: 0,
                        at: at.undated(),
                        cost: cost.into(),
                        reset: verdict.reset - age,
                    }),
                    Frees::WithWindow | Frees::OneByOne | Frees::Fading | Frees::OnRelease => {
                        Some(Charged {
                            age,
                            at,
                            cost: cost.into(),
                            reset: verdict.reset,
                        })
                    }
                };
                (policy, cost, charged)
            },
        )
    }

    /// What gives back what each policy counts still: at once, if that is the same for all of them.
    fn refunds(&self) -> impl Iterator<Item = PendingOp> {
        let counted: Vec<_> = self
            .counted(instant())
            .map(|(_, cost, charged)| (cost, charged))
            .collect();
        parts(&counted, |(cost, _)| *cost > 0)
            .into_iter()
            .map(|only| {
                let taken = self.clone();
                PendingOp::refund(self.key, &self.policies, move |now| taken.refund(only, now))
            })
    }

    /// What gives back what is counted at a time under all policies, or `only` under one of them.
    fn refund(&self, only: Option<usize>, now: Instant) -> Option<Check> {
        let counted = self
            .counted(now)
            .enumerate()
            .filter(|(i, _)| only.is_none_or(|only| only == *i));
        let (costs, charged): (Vec<u32>, Vec<_>) = counted
            .map(|(_, (_, cost, charged))| (cost, charged))
            .unzip();
        // By now it may be more under one of them.
        let cost = costs.into_iter().min().filter(|cost| *cost > 0)?;
        Some(Check::refund_of(
            self.key,
            &self.part(only),
            cost,
            charged.into_iter().flatten().collect(),
        ))
    }

    /// What charges again what is counted no more.
    fn charge_again(&self) -> impl Iterator<Item = PendingOp> {
        let counted = self.counted(instant());
        let gone: Vec<u32> = counted
            .map(|(policy, counted, _)| self.cost(policy) - counted)
            .collect();
        parts(&gone, |gone| *gone > 0)
            .into_iter()
            .map(move |only| PendingOp::charge(self.key, &self.part(only), gone[only.unwrap_or(0)]))
    }

    fn part(&self, only: Option<usize>) -> Policies {
        let one = only.and_then(|only| self.policies.iter().nth(only));
        one.map_or_else(|| self.policies.clone(), |policy| policy.clone().into())
    }
}

/// All policies as one part, if they have the same, or each of them that has any.
fn parts<T: PartialEq>(each: &[T], has_any: impl Fn(&T) -> bool) -> Vec<Option<usize>> {
    let is_same = each.windows(2).all(|pair| pair[0] == pair[1]);
    match each.first() {
        Some(first) if is_same => has_any(first).then_some(None).into_iter().collect(),
        _ => each
            .iter()
            .enumerate()
            .filter(|(_, one)| has_any(one))
            .map(|(i, _)| Some(i))
            .collect(),
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.held.is_some() {
            Self {
                taken: self.taken.clone(),
                held: self.held.take(),
            }
            .hand_on();
        }
    }
}
