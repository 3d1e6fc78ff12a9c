//! What the fallback did while the primary store could not decide, until the primary store is told of it.

use std::collections::{HashMap, HashSet};

use smallvec::SmallVec;

use super::notes::{Notes, Step};
use super::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::store::seed::RandomState;
use crate::store::shards::Shards;

const SHARDS: usize = 16;

/// What is noted of each caller: a bounded number of callers and ids. And which answers of the primary store know of it
/// all, so that the fallback may go on from them.
#[derive(Debug)]
pub(super) struct Grants {
    shards: Shards<Mutex<Shard>>,
    /// How much a shard may hold.
    max: usize,
    /// How many callers are held.
    callers: AtomicUsize,
    /// How many settlements have begun.
    settlements: AtomicU64,
    /// Ends when the breaker opens, and with every settlement. An answer to a check of an earlier epoch does not know of
    /// what was settled since.
    epoch: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    /// By the caller, for each list of policies.
    notes: HashMap<Key, SmallVec<[Notes; 1]>, RandomState>,
    len: usize,
    /// Whose notes a settlement has taken out, for each that is under way: one, unless a task's runtime stands still.
    settling: SmallVec<[(u64, HashSet<Key, RandomState>); 1]>,
    /// What was granted beyond the bound.
    dropped: u64,
}

/// A caller about whom one thread at a time decides.
pub(super) struct Caller<'a> {
    key: &'a Key,
    grants: &'a Grants,
    shard: MutexGuard<'a, Shard>,
}

/// What is to be settled.
#[derive(Debug)]
pub(super) struct Taken {
    /// Which settlement this is.
    pub(super) number: u64,
    /// In their order.
    pub(super) steps: Vec<Step>,
    /// What was granted, but too much to note.
    pub(super) dropped: u64,
}

impl Grants {
    /// Holds about so many callers and ids.
    pub(super) fn new(max: usize) -> Self {
        let shards = Shards::new(SHARDS, |_| Mutex::new(Shard::default()));
        let (callers, settlements, epoch) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { shards, max: max.div_ceil(SHARDS), callers, settlements, epoch }
    }

    /// Whether nothing is noted.
    pub(super) fn is_empty(&self) -> bool {
        self.callers.load(Ordering::Acquire) == 0
    }

    /// The present epoch. Whoever asks the primary store reads it before.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(super) fn end_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Until this is dropped, no other thread decides about the caller or follows an answer about it.
    pub(super) fn caller<'a>(&'a self, key: &'a Key) -> Caller<'a> {
        Caller { key, grants: self, shard: self.shard(key) }
    }

    /// Goes on from an answer about a caller, unless that does not know of something which the fallback granted.
    ///
    /// The fallback decides and notes under the same lock. So what it granted before this is one of these:
    /// - noted, or taken out to be settled: then `is_held` says so;
    /// - settled: then the epoch ended before it was `settled`, and an answer that is of the present epoch was asked for
    ///   after that, so that it knows of it.
    pub(super) fn follow(&self, key: &Key, asked: u64, follow: impl FnOnce()) {
        let caller = self.caller(key);
        if self.epoch() == asked && !caller.is_held() {
            follow();
        }
    }

    /// Notes again a step that was not done, if there is room. It comes before what has been noted since.
    pub(super) fn put_back(&self, step: Step, now: i64) {
        let (key, policies) = (step.key, step.policies.clone());
        let (id, mode, cost) = (step.id, step.mode, step.cost);
        self.caller(&key).change(&policies, id.as_ref(), mode, cost, |notes| notes.put_back(step, now));
    }

    /// Takes out all that is to be done. It is being settled from then on, until it is [`settled`](Self::settled).
    pub(super) fn take(&self, now: i64) -> Taken {
        let number = self.settlements.fetch_add(1, Ordering::Relaxed);
        let (mut steps, mut dropped) = (vec![], 0);
        for shard in self.shards.iter() {
            let mut shard = lock(shard);
            let notes = std::mem::take(&mut shard.notes);
            if !notes.is_empty() {
                shard.settling.push((number, notes.keys().copied().collect()));
            }
            shard.len = 0;
            dropped += std::mem::take(&mut shard.dropped);
            drop(shard);
            self.callers.fetch_sub(notes.len(), Ordering::AcqRel);
            for (key, lists) in notes {
                steps.extend(lists.into_iter().flat_map(|notes| notes.into_steps(key, now)));
            }
        }
        steps.sort_by_key(|step| step.order);
        Taken { number, steps, dropped }
    }

    /// What a settlement took out has been done, or put back.
    pub(super) fn settled(&self, number: u64) {
        // First the epoch: what was asked before must not be followed once these callers may be again.
        self.end_epoch();
        self.lapsed(number);
    }

    /// What a settlement took out has lapsed, or was put back: no answer need know of it.
    pub(super) fn lapsed(&self, number: u64) {
        for shard in self.shards.iter() {
            lock(shard).settling.retain(|(other, _)| *other != number);
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(self.shards.of(key).0)
    }
}

impl Caller<'_> {
    /// Whether something is noted of the caller, or being settled.
    fn is_held(&self) -> bool {
        let Shard { notes, settling, .. } = &*self.shard;
        notes.contains_key(self.key) || settling.iter().any(|(_, callers)| callers.contains(self.key))
    }

    /// Notes what the fallback decided on a check, which may have been `sent` to the primary store too. Whether there is
    /// anything to settle.
    pub(super) fn note(mut self, check: &Check, sent: bool, decision: &Decision, now: impl FnOnce() -> i64) -> bool {
        let (mode, id) = (check.mode(), check.id());
        // Who holds requests in flight tells so itself.
        let Some(policies) = check.policies().without_in_flight() else { return false };
        let cost = match mode {
            // The primary store may have more to give back.
            Mode::GiveBack => check.cost(),
            Mode::Reset | Mode::Renew | Mode::Hold => 0,
            _ => decision.granted(),
        };
        if cost == 0 && mode != Mode::Reset {
            return false;
        }
        let mode = if matches!(mode, Mode::GiveBack | Mode::Reset) { mode } else { Mode::Charge };
        let (cost, now) = (u64::from(cost), now());
        self.change(policies, id, mode, cost, |notes| {
            notes.go_under(policies);
            notes.add(mode, id.copied(), cost, check.charged(), now, sent);
        });
        true
    }

    /// Changes the notes under some policies, or drops what would be beyond the bound.
    fn change(
        &mut self,
        policies: &Policies,
        id: Option<&Key>,
        mode: Mode,
        cost: u64,
        change: impl FnOnce(&mut Notes),
    ) {
        let Shard { notes, len, dropped, .. } = &mut *self.shard;
        let noted = notes.get(self.key).and_then(|lists| lists.iter().find(|notes| notes.is_under(policies)));
        let more = noted.is_none() || id.is_some_and(|id| !noted.is_some_and(|notes| notes.has_id(id)));
        if more && *len >= self.grants.max {
            *dropped += if mode == Mode::Charge { cost } else { 0 };
            return;
        }
        let lists = notes.entry(*self.key).or_insert_with(|| {
            self.grants.callers.fetch_add(1, Ordering::AcqRel);
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
}
