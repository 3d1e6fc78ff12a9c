//! What was granted while the primary store could not decide, and is still to be charged to it.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use smallvec::SmallVec;

use super::notes::{Notes, Step};
use crate::limit::{Check, Decision, Key, Mode, Policies, Quota};
use crate::store::lock;
use crate::store::seed::RandomState;

/// What is noted of each caller: a bounded number of callers and ids.
#[derive(Debug)]
pub(super) struct Grants {
    shards: [Mutex<Shard>; 16],
    hasher: RandomState,
    /// How much a shard may hold.
    max: usize,
    /// How many callers are held.
    callers: AtomicUsize,
    /// Whether some are being settled.
    settling: AtomicBool,
}

#[derive(Debug, Default)]
struct Shard {
    /// By the caller, for each list of policies.
    notes: HashMap<Key, SmallVec<[Notes; 1]>, RandomState>,
    len: usize,
    /// Those whose notes have been taken out to be settled.
    settling: HashSet<Key, RandomState>,
    /// What was granted beyond the bound.
    dropped: u64,
}

impl Grants {
    pub(super) fn new(max: usize) -> Self {
        let shards = Default::default();
        let (callers, settling) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { shards, hasher: RandomState::new(), max: max.div_ceil(16), callers, settling }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.callers.load(Relaxed) == 0
    }

    /// Whether something is noted of this caller, or being settled.
    pub(super) fn holds(&self, key: &Key) -> bool {
        if self.is_empty() && !self.settling.load(Relaxed) {
            return false;
        }
        let shard = self.shard(key);
        shard.notes.contains_key(key) || shard.settling.contains(key)
    }

    /// Notes what the fallback decided on a check, which may have been `sent` to the primary store too. Whether there is
    /// anything to settle.
    pub(super) fn note(&self, check: &Check, sent: bool, decision: &Decision, now: impl FnOnce() -> i64) -> bool {
        let (mode, policies) = (check.mode(), check.policies());
        let cost = match mode {
            // The primary store may have more to give back.
            Mode::GiveBack => check.cost(),
            Mode::Reset => 0,
            _ => decision.granted(),
        };
        if cost == 0 && mode != Mode::Reset {
            return false;
        }
        let mode = if matches!(mode, Mode::GiveBack | Mode::Reset) { mode } else { Mode::Charge };
        let mut expires_in = match mode {
            Mode::Charge => decision.verdicts().map(|(_, verdict)| verdict.reset).max().unwrap_or(0),
            // What it undoes was charged before, and counts no longer than a full count takes to flow back.
            _ => policies.iter().map(|policy| refill(policy.quota())).max().unwrap_or(0),
        };
        if sent {
            // As long as the primary store knows the id.
            expires_in = expires_in.min(policies.longest_period());
        }
        let (key, id, cost, now) = (*check.key(), check.id(), u64::from(cost), now());
        let mut shard = self.shard(&key);
        let noted = shard.notes.get(&key).and_then(|lists| lists.iter().find(|notes| notes.is_under(policies)));
        let more = noted.is_none() || id.is_some_and(|id| !noted.is_some_and(|notes| notes.has_id(id)));
        if more && shard.len >= self.max {
            shard.dropped += if mode == Mode::Charge { cost } else { 0 };
        } else {
            let expires_at = now.saturating_add(expires_in);
            self.change(&mut shard, key, policies, |notes| notes.add(mode, id.copied(), cost, now, expires_at));
        }
        true
    }

    /// Takes a step back that was not done: it comes before what has been noted since.
    pub(super) fn put_back(&self, step: Step, now: i64) {
        let mut shard = self.shard(&step.key);
        let policies = step.policies.clone();
        self.change(&mut shard, step.key, &policies, |notes| notes.put_back(step, now));
    }

    fn change(&self, shard: &mut Shard, key: Key, policies: &Policies, change: impl FnOnce(&mut Notes)) {
        let Shard { notes, len, .. } = shard;
        let lists = notes.entry(key).or_insert_with(|| {
            self.callers.fetch_add(1, Relaxed);
            SmallVec::new()
        });
        let (place, before) = match lists.iter().position(|notes| notes.is_under(policies)) {
            Some(place) => (place, lists[place].len()),
            None => {
                lists.push(Notes::new(policies.clone()));
                (lists.len() - 1, 0)
            }
        };
        change(&mut lists[place]);
        *len = *len + lists[place].len() - before;
    }

    /// Takes out all that is to be done, in its order, and how much was too much to note. It is being settled from then on,
    /// until it is [`settled`](Self::settled).
    pub(super) fn take(&self, now: i64) -> (Vec<Step>, u64) {
        let (mut steps, mut dropped) = (vec![], 0);
        // Before the callers are counted off, or one of them would be held by nothing for a moment.
        self.settling.store(true, Relaxed);
        for shard in &self.shards {
            let mut shard = lock(shard);
            let Shard { notes, dropped: more, .. } = std::mem::take(&mut *shard);
            shard.settling = notes.keys().copied().collect();
            drop(shard);
            self.callers.fetch_sub(notes.len(), Relaxed);
            dropped += more;
            for (key, lists) in notes {
                steps.extend(lists.into_iter().flat_map(|notes| notes.into_steps(key, now)));
            }
        }
        steps.sort_by_key(|step| step.order);
        (steps, dropped)
    }

    /// What was taken out has been done, or put back.
    pub(super) fn settled(&self) {
        for shard in &self.shards {
            lock(shard).settling = HashSet::default();
        }
        self.settling.store(false, Relaxed);
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.hasher.hash_one(key) as usize % self.shards.len()])
    }
}

/// How long a full count takes to flow back, in microseconds.
fn refill(quota: Quota) -> i64 {
    micros(quota.period().saturating_mul(quota.capacity().div_ceil(quota.limit().max(1))))
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
