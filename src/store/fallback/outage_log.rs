//! The log of an outage: what the fallback did while the primary store could not decide, until that is reconciled.
//!
//! An [`OutageLog`] has a [`CallerLog`] for each caller and list of policies. A reconciliation takes these out and
//! replays them on the primary store, as [`ReplayOp`]s; what was not done goes back into the log.

use std::collections::{BTreeMap, HashMap, HashSet};

use smallvec::SmallVec;

use super::caller_log::{CallerLog, ReplayOp};
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::store::shards::Shards;
use crate::util::RandomState;

const SHARDS: usize = 16;

/// What is noted of each caller: a bounded number of callers and ids. And which answers of the primary store know of it
/// all, so that the fallback may go on from them.
pub(super) struct OutageLog {
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
    logs: HashMap<Key, CallerLogs, RandomState>,
    /// Whose logs a reconciliation has taken out, for each that is under way: one, unless a task's runtime stands
    /// still.
    reconciling: SmallVec<[(u64, HashSet<Key, RandomState>); 1]>,
    /// About whom a fallback is deciding outside of the lock.
    deciding: SmallVec<[Key; 1]>,
    /// What was granted beyond the bound.
    dropped: u64,
}

/// The logs of a caller, one for each list of policies.
pub(super) type CallerLogs = SmallVec<[CallerLog; 1]>;

/// A caller about whom one thread at a time decides.
pub(super) struct Caller<'a> {
    key: &'a Key,
    outages: &'a OutageLog,
    shard: MutexGuard<'a, Shard>,
}

/// A caller about whom a fallback is deciding.
pub(super) struct Deciding<'a> {
    key: &'a Key,
    outages: &'a OutageLog,
}

impl Budget {
    pub(super) fn new(max: usize) -> Self {
        Self {
            held: Arc::new(AtomicUsize::new(0)),
            max,
        }
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

impl OutageLog {
    pub(super) fn new(budget: Budget) -> Self {
        let shards = Shards::new(SHARDS, |_| Mutex::new(Shard::default()));
        let (callers, reconciliations, epoch) =
            (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self {
            shards,
            budget,
            callers,
            reconciliations,
            epoch,
        }
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
        Caller {
            key,
            outages: self,
            shard: self.shard(key),
        }
    }

    /// Until this is dropped, no thread begins to follow an answer about the caller.
    pub(super) fn deciding<'a>(&'a self, key: &'a Key) -> Deciding<'a> {
        self.shard(key).deciding.push(*key);
        Deciding { key, outages: self }
    }

    /// Goes on from an answer about a caller, unless that does not know of something which the fallback granted.
    ///
    /// the fallback decides and notes under the same lock. So what it granted before this is one of these:
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

    /// Records again an op that was not done, if there is room. It comes before what has been noted since.
    pub(super) fn put_back(&self, op: ReplayOp, now: i64) {
        let (key, policies) = (op.key, op.policies.clone());
        let (id, mode, cost) = (op.id, op.mode, op.cost);
        self.caller(&key)
            .change(&policies, id.as_ref(), mode, cost, |log, _| {
                log.put_back(op, now)
            });
    }

    /// Records again what is left of a log that was taken out, as [`put_back`](Self::put_back) does.
    pub(super) fn restore(&self, key: &Key, left: CallerLog, now: i64) {
        if left.is_done(now) {
            return;
        }
        let mut caller = self.caller(key);
        let is_new = caller.place(left.policies()).is_none();
        if is_new && self.budget.has_room(left.len()) {
            self.budget.take(left.len());
            return caller.logs().push(left);
        }
        drop(caller);
        left.into_ops(*key, now)
            .into_iter()
            .rev()
            .for_each(|op| self.put_back(op, now));
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
        let Some(shard) = self.shards.iter().nth(shard) else {
            return 0;
        };
        let mut shard = lock(shard);
        for (key, logs) in &shard.logs {
            let used = logs.iter().map(CallerLog::used).max().unwrap_or(0);
            callers.entry(used).or_default().push(*key);
        }
        std::mem::take(&mut shard.dropped)
    }

    /// Takes out all that is to be done about a caller. It is being reconciled from then on, until the reconciliation
    /// of this number is [`reconciled`](Self::reconciled).
    pub(super) fn take(&self, number: u64, key: &Key) -> CallerLogs {
        let mut shard = self.shard(key);
        let Some(logs) = shard.logs.remove(key) else {
            return CallerLogs::new();
        };
        if shard.logs.is_empty() {
            shard.logs.shrink_to_fit();
        }
        match shard
            .reconciling
            .iter_mut()
            .find(|(other, _)| *other == number)
        {
            Some((_, callers)) => drop(callers.insert(*key)),
            None => shard.reconciling.push((number, HashSet::from_iter([*key]))),
        }
        self.callers.fetch_sub(1, Ordering::AcqRel);
        self.budget.free(logs.iter().map(CallerLog::len).sum());
        logs
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
            lock(shard)
                .reconciling
                .retain(|(other, _)| *other != number);
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(self.shards.of(key).0)
    }
}

impl Caller<'_> {
    /// Whether something is noted of the caller, or being reconciled, or decided.
    pub(super) fn is_held(&self) -> bool {
        let Shard {
            logs,
            reconciling,
            deciding,
            ..
        } = &*self.shard;
        logs.contains_key(self.key)
            || reconciling
                .iter()
                .any(|(_, callers)| callers.contains(self.key))
            || deciding.contains(self.key)
    }

    /// Whether an answer of the epoch in which it was `asked` for knows of all that the fallback has granted.
    fn is_known(&self, asked: u64) -> bool {
        self.outages.epoch() == asked && !self.is_held()
    }

    /// Where the log under these policies is among those of the caller.
    fn place(&self, policies: &Policies) -> Option<usize> {
        self.shard
            .logs
            .get(self.key)?
            .iter()
            .position(|log| log.is_under(policies))
    }

    fn logs(&mut self) -> &mut CallerLogs {
        self.shard.logs.entry(*self.key).or_insert_with(|| {
            self.outages.callers.fetch_add(1, Ordering::AcqRel);
            CallerLogs::new()
        })
    }

    /// Records what the fallback decided on a check, which may have been `sent` to the primary store too. `None` if there
    /// is nothing to reconcile, or else the number of the log of what is charged.
    pub(super) fn note(
        mut self,
        check: &Check,
        sent: bool,
        decision: &Decision,
        now: impl FnOnce() -> i64,
    ) -> Option<i64> {
        let (mode, id) = (check.mode(), check.id());
        // Requests in flight are reported by their tracker.
        let policies = check.policies().without_in_flight()?;
        let cost = match mode {
            // The primary store may have more to refund.
            Mode::Refund => check.cost(),
            Mode::Reset | Mode::Renew | Mode::Release => 0,
            _ => decision.granted(),
        };
        if cost == 0 && mode != Mode::Reset {
            return None;
        }
        let mode = if matches!(mode, Mode::Refund | Mode::Reset) {
            mode
        } else {
            Mode::Charge
        };
        let (cost, now, mut number) = (u64::from(cost), now(), 0);
        let charged = if mode == Mode::Charge {
            decision.granted()
        } else {
            0
        };
        self.change(policies, id, mode, cost, |log, is_new| {
            if is_new {
                log.begin(decision, charged, now);
            }
            log.go_under(policies);
            log.add(mode, id.copied(), cost, check.charged(), now, sent);
            log.set_used(decision);
            // What has an id is charged before anything is refunded.
            number = if id.is_none() { log.number() } else { 0 };
        });
        Some(number)
    }

    /// Changes the log under some policies, which may be a new one, or drops what would be beyond the bound.
    fn change(
        &mut self,
        policies: &Policies,
        id: Option<&Key>,
        mode: Mode,
        cost: u64,
        change: impl FnOnce(&mut CallerLog, bool),
    ) {
        let place = self.place(policies);
        let has_id = |id| place.is_some_and(|place| self.shard.logs[self.key][place].has_id(id));
        let is_new = place.is_none();
        let more = is_new || id.is_some_and(|id| !has_id(id));
        let budget = &self.outages.budget;
        if more && !budget.has_room(1) {
            self.shard.dropped += if mode == Mode::Charge { cost } else { 0 };
            return;
        }
        let logs = self.logs();
        let (place, before) = match place {
            Some(place) => (place, logs[place].len()),
            None => {
                logs.push(CallerLog::new(policies.clone()));
                (logs.len() - 1, 0)
            }
        };
        change(&mut logs[place], is_new);
        budget.take(logs[place].len() - before);
    }
}

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        let deciding = &mut self.outages.shard(self.key).deciding;
        if let Some(place) = deciding.iter().position(|key| key == self.key) {
            deciding.swap_remove(place);
        }
    }
}
