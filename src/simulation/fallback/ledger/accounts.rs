use std::collections::{BTreeMap, VecDeque};

use super::super::plan::{Caller, Habit, Plan, Sharing};
use crate::limit::{Policy, Refill, Strategy, Verdict};

/// The totals of one caller.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// Grants that its clients received.
    pub(super) granted: i64,
    /// Grants of instances for requests that were sent and not answered. The primary store may have charged them too.
    pub(super) unanswered: i64,
    pub(super) refunded: i64,
    pub(super) resets: i64,
    /// Total charges of the primary store.
    pub(super) charged: i64,
    /// Final charges that were reported to its clients: grants minus refunds.
    pub(super) told: i64,
    /// Cost of refunds that were sent before the last answered reset and answered after it. The primary
    /// store may have run them before it or after it.
    pub(super) refunded_about_reset: i64,
    /// Number of resets that were answered.
    pub(super) resets_told: u32,
    /// Whether an instance has decided a reset, which the primary store receives later.
    pub(super) reset_later: bool,
    /// Whether the primary store may have executed an operation whose outcome is unknown, so that
    /// the sum of final charges is not exact.
    pub(super) in_doubt: bool,
    pub(super) ids: BTreeMap<Vec<u8>, Id>,
}

/// The history of one id of a caller.
#[derive(Debug, Default)]
pub(super) struct Id {
    pub(super) cost: i64,
    /// Whether a client received a grant for it.
    pub(super) granted: bool,
    /// Whether the primary store charged it for a client.
    pub(super) ran: bool,
    /// A bit for each instance that has granted it.
    pub(super) instances: u8,
    /// Number of these instances that granted it without a request to the primary store, which has not seen the id.
    pub(super) local: i64,
}

/// The account of one caller at one instance.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// The last report of the primary store about each policy, and its total charges at that time.
    pub(super) heard: Option<Vec<Left>>,
    pub(super) heard_at: i64,
    /// Grants of the instance since that report, minus its refunds.
    pub(super) since: i64,
    /// Grants that the primary store was not charged for, minus refunds.
    pub(super) owed: i64,
    /// Whether a grant was ever owed.
    pub(super) has_owed: bool,
    /// The part of `owed` that was granted while the breaker was not open.
    pub(super) well: i64,
    /// Number of the grants while the breaker was not open.
    pub(super) alone: i64,
    /// The grants owed to the primary store, by time.
    pub(super) grants: VecDeque<(u64, i64)>,
    /// Grants for requests without an answer, by time.
    pub(super) unanswered: VecDeque<(u64, i64)>,
    /// Requested refunds in excess of the grants of the instance.
    pub(super) beyond: i64,
    /// Whether the owed amount is uncertain: a refund of the instance may also have been executed
    /// in Redis, or has named a charge, so that only the stores can compute its effect.
    pub(super) vague: bool,
    /// Whether the instance has decided a refund locally.
    pub(super) refunded: bool,
    /// Whether the primary store lacks a reset.
    pub(super) reset: bool,
    /// Number of resets that may still be sent.
    pub(super) resets: u32,
    /// Charges in flight to the primary store.
    pub(super) flying: u32,
    /// Time at which the instance stops waiting for the last of these charges.
    pub(super) given_up_at: u64,
    /// Number of requests that the primary store had executed when the last of these charges was
    /// executed or failed.
    pub(super) landed: u64,
    pub(super) open: Option<Open>,
    /// Cost that may exceed the limit, because the instance and the primary store did not have the
    /// grants of each other.
    pub(super) excess: i64,
}

/// The debt of an instance to the primary store, from its first grant until all is charged.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) granted: i64,
    /// The total charges of the primary store when the instance last received a report.
    pub(super) from: i64,
    /// The part that was charged to the primary store.
    pub(super) told: i64,
}

impl Account {
    /// Returns `true` if the primary store lacks a grant or a reset.
    pub(super) fn owes(&self) -> bool {
        self.owed != 0 || self.reset
    }

    pub(super) fn owe(&mut self, now: u64, granted: i64) {
        self.owed += granted;
        self.has_owed = true;
        self.grants.push_back((now, granted));
        self.open
            .get_or_insert(Open {
                granted: 0,
                from: self.heard_at,
                told: 0,
            })
            .granted += granted;
    }

    /// An upper bound of the owed cost that has not expired. Includes the grants for requests
    /// without an answer, because the instance counts them together with the owed ones.
    pub(super) fn counts(&mut self, who: &Caller, now: u64) -> i64 {
        let each = who.policies.iter().map(Policy::counts_for);
        let counts_for = each.max().unwrap_or(0);
        // Twice the time, because the instance need not know the exact start of each charge.
        let lifetime = 2 * counts_for.unsigned_abs() / 1000;
        let mut counts = 0;
        for grants in [&mut self.grants, &mut self.unanswered] {
            grants.retain(|(at, _)| at + lifetime >= now);
            counts += grants.iter().map(|(_, granted)| granted).sum::<i64>();
        }
        counts
    }

    /// Number of the instance's own windows in which it may have granted something while the primary store decided the
    /// rest. They do not begin together with the primary store's windows, and each new window drops the last report.
    pub(super) fn windows(&self, strategy: Option<Strategy>, period: i64, now: u64) -> i64 {
        match strategy {
            Some(Strategy::FixedWindow(_) | Strategy::TokenBucket(Refill::Interval)) => {
                self.alone.min(now as i64 * 1000 / period + 2)
            }
            Some(
                Strategy::SlidingLog
                | Strategy::SlidingWindow { .. }
                | Strategy::SlidingCounter
                | Strategy::TokenBucket(Refill::Greedy)
                | Strategy::LeakyBucket
                | Strategy::Gcra,
            )
            | None => 0,
        }
    }

    /// Removes charged grants, oldest first.
    pub(super) fn forget(&mut self, mut cost: i64) {
        while cost > 0
            && let Some((_, granted)) = self.grants.front_mut()
        {
            let told = cost.min(*granted);
            (cost, *granted) = (cost - told, *granted - told);
            if *granted == 0 {
                self.grants.pop_front();
            }
        }
    }

    /// Returns how much the instance may have granted locally since the last report.
    pub(super) fn part(&self, plan: &Plan, caller: usize, fewer: i64, now: u64) -> i64 {
        let parts = plan.callers[caller]
            .policies
            .iter()
            .enumerate()
            .map(|(i, policy)| {
                let (left, whole) = self
                    .heard
                    .as_ref()
                    .map_or((1, 1), |heard| heard[i].at(policy, now));
                Parts::of(plan, policy.params().capacity, fewer).left(left, whole)
            });
        parts.min().unwrap_or(0)
    }
}

/// A report of the primary store: the capacity left under a policy.
#[derive(Debug)]
pub(super) struct Left {
    remaining: i64,
    /// Time in microseconds at which all of it will be left.
    all_at: i64,
}

impl Left {
    pub(super) fn new(verdict: &Verdict, now: u64) -> Self {
        Self {
            remaining: verdict.remaining,
            all_at: now as i64 * 1000 + verdict.reset,
        }
    }

    /// Returns the part that is left now, and the whole. A policy that refills gradually reports whole units, but a
    /// part of the next unit is left too. That part may count as a full unit, because the refund of an older charge is
    /// reduced by the drained part.
    fn at(&self, policy: &Policy, now: u64) -> (i64, i64) {
        let capacity = policy.params().capacity;
        if !policy.frees().is_gradual() {
            return (self.remaining.min(capacity), capacity);
        }
        let whole = policy.quota().time_for(capacity.unsigned_abs()).as_micros() as i64;
        (
            whole - (self.all_at - now as i64 * 1000).clamp(0, whole),
            whole,
        )
    }
}

/// The smallest and the largest share of a limit that an instance may have.
pub(super) struct Parts {
    least: i64,
    most: i64,
    /// Additional allowance after a change of the number of instances.
    changed: i64,
}

impl Parts {
    pub(super) fn of(plan: &Plan, capacity: i64, fewer: i64) -> Self {
        let least = (capacity / plan.instances as i64).max(1);
        match plan.share {
            Sharing::Fixed => Self {
                least,
                most: least,
                changed: 0,
            },
            // An instance that has used some of a smaller share may continue with a larger one. And a small share drops
            // the used part of a larger one beyond twice its own size.
            Sharing::Alive => Self {
                least,
                most: capacity,
                changed: capacity - least + fewer * capacity,
            },
        }
    }

    /// The instance's share of the capacity left.
    fn left(&self, left: i64, whole: i64) -> i64 {
        left * self.least / whole + self.changed
    }

    /// The sum of all shares in excess of the whole limit.
    pub(super) fn beyond(&self, capacity: i64, instances: usize) -> i64 {
        let instances = instances as i64;
        (instances * self.most - capacity).max(0) + instances * self.changed
    }
}

impl Caller {
    /// Returns `true` if the caller's charges are never refunded.
    pub(super) fn takes_only(&self) -> bool {
        matches!(
            self.habit,
            Habit::Steady | Habit::Bursting | Habit::Dropping
        )
    }
}
