use std::collections::{BTreeMap, VecDeque};

use super::super::plan::{Caller, Habit, Plan, Sharing};
use crate::limit::{Policy, Refill, Strategy, Verdict};

/// What is known of one caller.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// What its clients were granted.
    pub(super) granted: i64,
    /// What instances granted it for requests that were sent and not answered: they may be charged too.
    pub(super) unanswered: i64,
    pub(super) refunded: i64,
    pub(super) resets: i64,
    /// What the primary store ever charged.
    pub(super) charged: i64,
    /// What its clients were told that they were charged in the end, and whether the primary store may know of it in
    /// another order, or may not know.
    pub(super) told: i64,
    /// Cost of refunds that were sent before the last answered reset and answered after it. The primary
    /// store may have run them before it or after it.
    pub(super) refunded_about_reset: i64,
    /// Number of resets that were answered.
    pub(super) resets_told: u32,
    pub(super) reset_later: bool,
    pub(super) in_doubt: bool,
    pub(super) ids: BTreeMap<Vec<u8>, Id>,
}

/// What is known of one id of a caller.
#[derive(Debug, Default)]
pub(super) struct Id {
    pub(super) cost: i64,
    /// Whether a client was granted it.
    pub(super) granted: bool,
    /// Whether the primary store charged it for a client.
    pub(super) ran: bool,
    /// A bit for every instance that has granted it.
    pub(super) instances: u8,
    /// How many of these did so without a request to the primary store, which does not know the id.
    pub(super) local: i64,
}

/// What an instance has to do with a caller.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// What the primary store last said is left under each policy, and what it had charged by then.
    pub(super) heard: Option<Vec<Left>>,
    pub(super) heard_at: i64,
    /// What the instance granted since, less what it took back.
    pub(super) since: i64,
    /// What was granted and not told to the primary store, less what was refunded.
    pub(super) owed: i64,
    /// How much of it was granted while the instance was not degraded, and how often.
    pub(super) well: i64,
    pub(super) alone: i64,
    /// The same, by the time.
    pub(super) grants: VecDeque<(u64, i64)>,
    /// What was granted for requests without an answer, by the time.
    pub(super) unanswered: VecDeque<(u64, i64)>,
    /// How much more was asked to be refunded than the instance had.
    pub(super) beyond: i64,
    /// Whether it refunded or forgot something that Redis may have refunded or forgotten too: it cannot know which of
    /// what it owes that was.
    pub(super) vague: bool,
    /// Whether it has refunded something by itself.
    pub(super) refunded: bool,
    /// A reset that the primary store was not told, and what was owed before it.
    pub(super) reset: bool,
    pub(super) before: i64,
    /// How many resets it may yet tell.
    pub(super) resets: u32,
    /// Charges on their way to the primary store.
    pub(super) flying: u32,
    /// When the instance gives up the last of them.
    pub(super) given_up_at: u64,
    /// How much the primary store had run when the last of them ran.
    pub(super) landed: u64,
    pub(super) open: Option<Open>,
    /// What others may have been granted on top, because they did not know of what this instance granted.
    pub(super) excess: i64,
}

/// What an instance owes, from the first grant until all is told.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) granted: i64,
    /// What the primary store had charged when the instance last heard of it.
    pub(super) from: i64,
    /// What it charged of this.
    pub(super) told: i64,
}

impl Account {
    /// Whether the primary store does not know of something.
    pub(super) fn owes(&self) -> bool {
        self.owed != 0 || self.reset
    }

    pub(super) fn owe(&mut self, now: u64, granted: i64) {
        self.owed += granted;
        self.grants.push_back((now, granted));
        self.open
            .get_or_insert(Open {
                granted: 0,
                from: self.heard_at,
                told: 0,
            })
            .granted += granted;
    }

    /// How much of what is owed still counts. An instance may take what counts of a request without an answer for some
    /// of it, since it keeps one count of both.
    pub(super) fn counts(&mut self, who: &Caller, now: u64) -> i64 {
        // It need not know to the moment when each began.
        let lifetime = 2 * who.policies.longest_count().unsigned_abs() / 1000;
        let mut counts = 0;
        for grants in [&mut self.grants, &mut self.unanswered] {
            grants.retain(|(at, _)| at + lifetime >= now);
            counts += grants.iter().map(|(_, granted)| granted).sum::<i64>();
        }
        counts
    }

    /// In how many windows of its own it may have granted something while the primary store decided the rest. They begin
    /// at other times than those of the primary store: when one does, the instance forgets what it has heard.
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

    /// The oldest are told first.
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

    /// How much the instance may have granted by itself by now, from what it has heard.
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

/// What the primary store has said is left under a policy.
#[derive(Debug)]
pub(super) struct Left {
    remaining: i64,
    /// When all will be, in microseconds.
    all_at: i64,
}

impl Left {
    pub(super) fn new(verdict: &Verdict, now: u64) -> Self {
        Self {
            remaining: verdict.remaining,
            all_at: now as i64 * 1000 + verdict.reset,
        }
    }

    /// What is left now, of how much. What flows back all the time is told in whole units, but there is also a part of the
    /// next one. It may be as good as whole: what is refunded of an older charge is less what has flowed back of it.
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

/// The least and the largest part of a limit that an instance may have.
pub(super) struct Parts {
    least: i64,
    most: i64,
    /// What it may have on top, since the number of instances has changed.
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
            // One that has used some of a smaller part may go on with a larger one. And a small part forgets what was
            // used of a larger one beyond twice its own size.
            Sharing::Alive => Self {
                least,
                most: capacity,
                changed: capacity - least + fewer * capacity,
            },
        }
    }

    /// The part of what is left of the whole.
    fn left(&self, left: i64, whole: i64) -> i64 {
        left * self.least / whole + self.changed
    }

    /// What all parts together are above the whole.
    pub(super) fn beyond(&self, capacity: i64, instances: usize) -> i64 {
        let instances = instances as i64;
        (instances * self.most - capacity).max(0) + instances * self.changed
    }
}

impl Caller {
    /// Whether nothing is ever refunded to it.
    pub(super) fn takes_only(&self) -> bool {
        matches!(
            self.habit,
            Habit::Steady | Habit::Bursting | Habit::Dropping
        )
    }
}
