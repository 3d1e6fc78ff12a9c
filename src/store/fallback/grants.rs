//! What the fallback did while the primary store could not decide, until the primary store is told of it.

use std::collections::{BTreeMap, HashMap, HashSet};

use smallvec::SmallVec;

use super::notes::{Notes, Step};
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::store::shards::Shards;
use crate::util::RandomState;

const SHARDS: usize = 16;

/// What is noted of each caller: a bounded number of callers and ids. And which answers of the primary store know of it
/// all, so that the fallback may go on from them.
#[derive(Debug)]
pub(super) struct Grants {
    shards: Shards<Mutex<Shard>>,
    budget: Budget,
    /// How many callers are held.
    callers: AtomicUsize,
    /// How many reconciliations have begun.
    reconciliations: AtomicU64,
    /// Ends when the breaker opens, and with every reconciliation. An answer to a check of an earlier epoch does not
    /// know of what was reconciled since.
    epoch: AtomicU64,
}

/// How many callers and ids may be held, by all partitions of a primary store together: about, as threads that note
/// something at the same moment may exceed it by one each.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    held: Arc<AtomicUsize>,
    max: usize,
}

#[derive(Debug, Default)]
struct Shard {
    /// By the caller, for each list of policies.
    notes: HashMap<Key, Lists, RandomState>,
    /// Whose notes a reconciliation has taken out, for each that is under way: one, unless a task's runtime stands
    /// still.
    reconciling: SmallVec<[(u64, HashSet<Key, RandomState>); 1]>,
    /// About whom a fallback is deciding outside of the lock.
    deciding: SmallVec<[Key; 1]>,
    /// What was granted beyond the bound.
    dropped: u64,
}

/// The notes of a caller.
pub(super) type Lists = SmallVec<[Notes; 1]>;

/// A caller about whom one thread at a time decides.
pub(super) struct Caller<'a> {
    key: &'a Key,
    grants: &'a Grants,
    shard: MutexGuard<'a, Shard>,
}

/// A caller about whom a fallback is deciding.
pub(super) struct Deciding<'a> {
    key: &'a Key,
    grants: &'a Grants,
}

impl Budget {
    pub(super) fn new(max: usize) -> Self {
        Self { held: Arc::new(AtomicUsize::new(0)), max }
    }

    fn has_room(&self, more: usize) -> bool {
        self.held.load(Ordering::Relaxed).saturating_add(more) <= self.max
    }

    fn take(&self, more: usize) {
        self.held.fetch_add(more, Ordering::Relaxed);
    }

    fn free(&self, less: usize) {
        self.held.fetch_sub(less, Ordering::Relaxed);
    }
}

impl Grants {
    pub(super) fn new(budget: Budget) -> Self {
        let shards = Shards::new(SHARDS, |_| Mutex::new(Shard::default()));
        let (callers, reconciliations, epoch) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { shards, budget, callers, reconciliations, epoch }
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

    /// Until this is dropped, no thread begins to follow an answer about the caller.
    pub(super) fn deciding<'a>(&'a self, key: &'a Key) -> Deciding<'a> {
        self.shard(key).deciding.push(*key);
        Deciding { key, grants: self }
    }

    /// Goes on from an answer about a caller, unless that does not know of something which the fallback granted.
    ///
    /// The fallback decides and notes under the same lock. So what it granted before this is one of these:
    /// - noted, or taken out to be reconciled: then `is_held` says so;
    /// - reconciled: then the epoch ended before it was `reconciled`, and an answer that is of the present epoch was
    ///   asked for after that, so that it knows of it.
    pub(super) fn warm(&self, key: &Key, asked: u64, update: impl FnOnce()) {
        let caller = self.caller(key);
        if caller.is_known(asked) {
            update();
        }
    }

    /// Whether an answer knows of all that the fallback has granted a caller until now.
    pub(super) fn is_known(&self, key: &Key, asked: u64) -> bool {
        self.caller(key).is_known(asked)
    }

    /// Notes again a step that was not done, if there is room. It comes before what has been noted since.
    pub(super) fn put_back(&self, step: Step, now: i64) {
        let (key, policies) = (step.key, step.policies.clone());
        let (id, mode, cost) = (step.id, step.mode, step.cost);
        self.caller(&key).change(&policies, id.as_ref(), mode, cost, |notes| notes.put_back(step, now));
    }

    /// Notes again what is left of notes that were taken out, as [`put_back`](Self::put_back) does.
    pub(super) fn restore(&self, key: &Key, left: Notes, now: i64) {
        if left.is_done(now) {
            return;
        }
        let mut caller = self.caller(key);
        let is_new = caller.place(left.policies()).is_none();
        if is_new && self.budget.has_room(left.len()) {
            self.budget.take(left.len());
            return caller.lists().push(left);
        }
        drop(caller);
        left.into_steps(*key, now).into_iter().rev().for_each(|step| self.put_back(step, now));
    }

    /// Begins a reconciliation, of which this is the number.
    pub(super) fn begin(&self) -> u64 {
        self.reconciliations.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.iter().count()
    }

    /// Adds the callers of a shard of whom something is noted, by how much of a limit they have used. Returns what was
    /// granted there, but too much to note.
    pub(super) fn list(&self, shard: usize, callers: &mut BTreeMap<u8, Vec<Key>>) -> u64 {
        let Some(shard) = self.shards.iter().nth(shard) else { return 0 };
        let mut shard = lock(shard);
        for (key, lists) in &shard.notes {
            let used = lists.iter().map(Notes::used).max().unwrap_or(0);
            callers.entry(used).or_default().push(*key);
        }
        std::mem::take(&mut shard.dropped)
    }

    /// Takes out all that is to be done about a caller. It is being reconciled from then on, until the reconciliation
    /// of this number is [`reconciled`](Self::reconciled).
    pub(super) fn take(&self, number: u64, key: &Key) -> Lists {
        let mut shard = self.shard(key);
        let Some(lists) = shard.notes.remove(key) else { return Lists::new() };
        if shard.notes.is_empty() {
            shard.notes.shrink_to_fit();
        }
        match shard.reconciling.iter_mut().find(|(other, _)| *other == number) {
            Some((_, callers)) => drop(callers.insert(*key)),
            None => shard.reconciling.push((number, HashSet::from_iter([*key]))),
        }
        self.callers.fetch_sub(1, Ordering::AcqRel);
        self.budget.free(lists.iter().map(Notes::len).sum());
        lists
    }

    /// What a reconciliation took out has been done, or put back.
    pub(super) fn reconciled(&self, number: u64) {
        // First the epoch: what was asked before must not be followed once these callers may be again.
        self.end_epoch();
        self.lapsed(number);
    }

    /// What a reconciliation took out has lapsed, or was put back: no answer need know of it.
    pub(super) fn lapsed(&self, number: u64) {
        for shard in self.shards.iter() {
            lock(shard).reconciling.retain(|(other, _)| *other != number);
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(self.shards.of(key).0)
    }
}

impl Caller<'_> {
    /// Whether something is noted of the caller, or being reconciled, or decided.
    pub(super) fn is_held(&self) -> bool {
        let Shard { notes, reconciling, deciding, .. } = &*self.shard;
        notes.contains_key(self.key)
            || reconciling.iter().any(|(_, callers)| callers.contains(self.key))
            || deciding.contains(self.key)
    }

    /// Whether an answer of the epoch in which it was `asked` for knows of all that the fallback has granted.
    fn is_known(&self, asked: u64) -> bool {
        self.grants.epoch() == asked && !self.is_held()
    }

    /// Where the notes under these policies are among those of the caller.
    fn place(&self, policies: &Policies) -> Option<usize> {
        self.shard.notes.get(self.key)?.iter().position(|notes| notes.is_under(policies))
    }

    fn lists(&mut self) -> &mut Lists {
        self.shard.notes.entry(*self.key).or_insert_with(|| {
            self.grants.callers.fetch_add(1, Ordering::AcqRel);
            Lists::new()
        })
    }

    /// Notes what the fallback decided on a check, which may have been `sent` to the primary store too. `None` if there
    /// is nothing to reconcile, or else the number of the notes of what is charged.
    pub(super) fn note(
        mut self,
        check: &Check,
        sent: bool,
        decision: &Decision,
        now: impl FnOnce() -> i64,
    ) -> Option<i64> {
        let (mode, id) = (check.mode(), check.id());
        // Who holds requests in flight tells so itself.
        let policies = check.policies().without_in_flight()?;
        let cost = match mode {
            // The primary store may have more to refund.
            Mode::Refund => check.cost(),
            Mode::Reset | Mode::Renew | Mode::Hold => 0,
            _ => decision.granted(),
        };
        if cost == 0 && mode != Mode::Reset {
            return None;
        }
        let mode = if matches!(mode, Mode::Refund | Mode::Reset) { mode } else { Mode::Charge };
        let (cost, now, mut number) = (u64::from(cost), now(), 0);
        self.change(policies, id, mode, cost, |notes| {
            notes.go_under(policies);
            notes.add(mode, id.copied(), cost, check.charged(), now, sent);
            notes.set_used(decision);
            // What has an id is charged before anything is refunded.
            number = if id.is_none() { notes.number() } else { 0 };
        });
        Some(number)
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
        let place = self.place(policies);
        let has_id = |id| place.is_some_and(|place| self.shard.notes[self.key][place].has_id(id));
        let more = place.is_none() || id.is_some_and(|id| !has_id(id));
        let budget = &self.grants.budget;
        if more && !budget.has_room(1) {
            self.shard.dropped += if mode == Mode::Charge { cost } else { 0 };
            return;
        }
        let lists = self.lists();
        let (place, before) = match place {
            Some(place) => (place, lists[place].len()),
            None => {
                lists.push(Notes::new(policies.clone()));
                (lists.len() - 1, 0)
            }
        };
        change(&mut lists[place]);
        budget.take(lists[place].len() - before);
    }
}

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        let deciding = &mut self.grants.shard(self.key).deciding;
        if let Some(place) = deciding.iter().position(|key| key == self.key) {
            deciding.swap_remove(place);
        }
    }
}
