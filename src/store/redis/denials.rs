//! A memory of denials, so that a flood on one key costs Redis nothing.
//!
//! With every strategy, what was denied stays denied until its `retry_after`, unless something is given back or
//! forgotten, or the policy is another. A denial of a cost answers every check of that cost or more.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use crate::limit::{Check, Decision, Key, Mode, Verdicts};
use crate::store::bounded::{Bounded, Slot};
use crate::store::clock::Clock;
use crate::store::lock;

#[derive(Debug)]
pub(super) struct Denials {
    shards: [Mutex<Shard>; 16],
    hasher: RandomState,
    clock: Clock,
    /// How many are held: while there are none, no check looks further.
    held: AtomicUsize,
    most: usize,
}

#[derive(Debug)]
struct Shard {
    /// The last denial of each caller.
    denials: Bounded<Key, Denial>,
    /// When something was last given back or forgotten: a denial of a call that was sent before may not be true any
    /// more.
    forgot: i64,
}

#[derive(Debug)]
struct Denial {
    cost: u32,
    decision: Decision,
    /// When its call was sent.
    sent: i64,
}

impl Denials {
    /// Holds at most so many denials; 0 for none.
    pub(super) fn new(most: usize) -> Self {
        let shard = |_| Mutex::new(Shard { denials: Bounded::new(most.div_ceil(16)), forgot: i64::MIN });
        Self {
            shards: std::array::from_fn(shard),
            hasher: RandomState::new(),
            clock: Clock::new(),
            held: AtomicUsize::new(0),
            most,
        }
    }

    /// The time to give to [`learn`](Self::learn).
    pub(super) fn now(&self) -> i64 {
        self.clock.micros()
    }

    /// The decision on this check, if it is known to be a denial.
    pub(super) fn answer(&self, check: &Check) -> Option<Decision> {
        if self.held.load(Relaxed) == 0 || check.mode() != Mode::Take || check.id_key().is_some() {
            return None;
        }
        let shard = self.shard(check.key());
        let slot = shard.denials.get(check.key())?;
        let Denial { cost, decision, sent } = &slot.value;
        let now = self.clock.micros();
        let known = now < slot.lapses && check.cost() >= *cost && decision.is_under(check.policies());
        // A cost that never fits is denied for another reason.
        let fits = check.policies().iter().all(|policy| check.cost() <= policy.quota().capacity());
        (known && fits).then(|| decision.remembered(now - sent))
    }

    /// Whether there is anything to learn of what Redis decided.
    pub(super) fn learns(&self, check: &Check, verdicts: &Verdicts) -> bool {
        self.most > 0
            && match check.mode() {
                Mode::Take => verdicts.each.iter().any(|verdict| verdict.wait > 0) && check.id_key().is_none(),
                Mode::GiveBack | Mode::Reset => true,
                Mode::UpTo | Mode::Peek | Mode::Charge => false,
            }
    }

    /// Learns what Redis decided on a call that was sent at this time.
    pub(super) fn learn(&self, check: &Check, decision: &Decision, sent: i64) {
        match (check.mode(), decision.retry_after()) {
            (Mode::GiveBack | Mode::Reset, _) => self.forget(check.key()),
            (Mode::Take, Some(wait)) => {
                let mut shard = self.shard(check.key());
                let now = self.clock.micros();
                let knows_more = |slot: &Slot<Denial>| slot.lapses > now && slot.value.cost < check.cost();
                if sent > shard.forgot && !shard.denials.get(check.key()).is_some_and(knows_more) {
                    let denial = Denial { cost: check.cost(), decision: decision.clone(), sent };
                    let before = shard.denials.len();
                    let lapses = sent.saturating_add(wait.as_micros() as i64);
                    shard.denials.put(*check.key(), denial, lapses, now);
                    self.count(before, shard.denials.len());
                }
            }
            _ => {}
        }
    }

    fn forget(&self, key: &Key) {
        let mut shard = self.shard(key);
        let before = shard.denials.len();
        shard.denials.remove(key);
        shard.forgot = self.clock.micros();
        self.count(before, shard.denials.len());
    }

    fn count(&self, before: usize, after: usize) {
        self.held.fetch_add(after.wrapping_sub(before), Relaxed);
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        let shard = self.hasher.hash_one(key) as usize % self.shards.len();
        lock(&self.shards[shard])
    }
}
