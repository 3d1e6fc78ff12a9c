//! What this instance has in flight: the client side. How a store counts it is in `src/limit/in_flight.rs`.
//!
//! A request under a policy of [requests in flight](crate::Policy::in_flight) has a [`Lease`] for as long as it runs.
//! The store counts how many this instance holds of each caller; [`InFlightTracker`] keeps a count of its own, renews
//! what runs for longer, and puts the store right where it may count otherwise: after an outage, or a check whose
//! answer never came.
//!
//! - All layers over one store share its [tracker](registry), since the store counts what they hold as one.
//! - A request is released by the store that its layer asks: a fallback, maybe, over the one that others ask.
//! - What ends is released off the request path, once, whatever ends it.
//! - Where the count is in doubt, the tracker asks how many the store counts: a sync. Takes and releases may come to it before
//!   the sync or after it, in any order, since they go by several connections. Redis says when it decided each of them:
//!   so the count is put right while requests come and end without a pause. Of a store that does not say it, only what
//!   is wrong whatever came first is corrected. A correction refunds so many, or charges them, and may come in any order
//!   too.

mod entry;
mod lease;
mod pending_sync;
mod registry;
mod renewer;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;
use tokio::time::Instant;

pub(crate) use self::lease::Lease;

use self::entry::{Entry, Origin, Phase, Wrong};
use self::renewer::Heartbeat;
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Policies, Policy};
use crate::observe::Observer;
use crate::refunds::{PendingOp, RefundQueue, StoreQueue};
use crate::store::Store;
use crate::util::{contain, instant, lock};

/// What a layer has in flight, in the tracker that it shares with all that are over the same store. Clones have them
/// too.
#[derive(Clone)]
pub(crate) struct InFlightTracker(Arc<Inner>);

struct Inner {
    /// Opened with the first request.
    tracker: Arc<OnceLock<Arc<Tracker>>>,
    access: Arc<StoreAccess>,
}

/// How a layer asks the store. Layers that share a tracker may have different ones.
struct StoreAccess {
    identity: Option<usize>,
    /// Whether a decision was made where the count is kept.
    knows: Box<dyn Fn(&Decision) -> bool + Send + Sync>,
    refunds: Arc<dyn RefundQueue>,
}

/// What an instance has in flight in one store.
struct Tracker {
    shards: Box<[Mutex<HashMap<EntryId, Entry>>]>,
    /// How many entries there are.
    len: AtomicUsize,
    /// Whether the last answers did not come from where the count is kept.
    away: AtomicBool,
    /// Whether it may have lost counts, since it was away.
    forgot: AtomicBool,
    /// Whether an entry is in doubt.
    doubt: AtomicBool,
    heartbeat: Heartbeat,
}

/// What an entry is of: a caller, and what a policy counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct EntryId {
    key: Key,
    count: u64,
}

/// What is due of an entry.
enum Due {
    Sync { held: u32 },
    Correct(Wrong),
}

/// Those of an entry, of which the first one asks what the store counts.
type Accesses = SmallVec<[Arc<StoreAccess>; 1]>;

const SHARDS: usize = 16;
/// So many entries of which nothing is in flight may wait for the store to be back. The lease time makes up for the
/// others.
const MAX_IDLE: usize = 100_000;

impl InFlightTracker {
    /// The tracker of what is taken in `store`. `observer` is notified of what could not be released.
    pub(crate) fn new(store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        Self::over(Arc::default(), store, observer)
    }

    /// The same tracker, and another observer. `store` is the same.
    pub(crate) fn observed(&self, store: &impl Store, observer: Arc<dyn Observer>) -> Self {
        Self::over(Arc::clone(&self.0.tracker), store, Some(observer))
    }

    fn over(tracker: Arc<OnceLock<Arc<Tracker>>>, store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        Self(Arc::new(Inner { tracker, access: Arc::new(StoreAccess::new(store, observer)) }))
    }

    /// What settles in the store.
    pub(crate) fn refunds(&self) -> &Arc<dyn RefundQueue> {
        &self.0.access.refunds
    }

    fn access(&self) -> &Arc<StoreAccess> {
        &self.0.access
    }

    fn tracker(&self) -> &Arc<Tracker> {
        self.0.tracker.get_or_init(|| registry::find(self.0.access.identity))
    }

    /// Enters a request that the store is about to be asked about. `None` if no policy counts what is in flight.
    ///
    /// The lease has to learn what the store has [answered](Lease::answered). From a grant on, it holds what was taken until it
    /// is dropped.
    pub(crate) fn hold(&self, key: Key, policies: &Policies) -> Option<Lease> {
        let policies = policies.in_flight()?;
        let (tracker, now) = (self.tracker(), instant());
        let ask = |policy: &Policy| {
            tracker.ask(EntryId { key, count: policy.id() }, &policies.only(policy), self.access(), now)
        };
        let phases = policies.iter().map(ask).collect();
        Some(Lease::new(self.clone(), key, policies.clone(), phases))
    }
}

impl StoreAccess {
    fn new(store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        let (identity, asked) = (store.identity(), store.clone());
        let knows = Box::new(move |decision: &Decision| asked.is_authoritative(decision));
        Self { identity, knows, refunds: Arc::new(StoreQueue::new(store.clone(), observer)) }
    }

    /// Where a decision came from.
    fn answered(&self, decision: &Decision) -> Origin {
        match contain(|| (self.knows)(decision)).unwrap_or(false) {
            true => Origin::Primary(decision.order()),
            false => Origin::Other,
        }
    }

    /// Where an answer came from, and what it grants.
    fn read(&self, answer: &Result<Decision, StoreError>) -> (Origin, u32) {
        match answer {
            Ok(decision) => (self.answered(decision), decision.granted()),
            Err(_) => (Origin::Other, 0),
        }
    }
}

impl Tracker {
    fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (away, forgot, doubt) = Default::default();
        let (len, heartbeat) = (AtomicUsize::new(0), Heartbeat::new(instant()));
        Self { shards, len, away, forgot, doubt, heartbeat }
    }

    fn shard(&self, id: &EntryId) -> &Mutex<HashMap<EntryId, Entry>> {
        let bytes = id.key.as_bytes();
        let sum = bytes.iter().fold(id.count, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte));
        &self.shards[(sum.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize % SHARDS]
    }

    /// The store is about to be asked about a request.
    fn ask(self: &Arc<Self>, id: EntryId, policies: &Policies, access: &Arc<StoreAccess>, now: Instant) -> Phase {
        let phase = {
            let entries = &mut *lock(self.shard(&id));
            let entry = entries.entry(id).or_insert_with(|| {
                self.len.fetch_add(1, Ordering::AcqRel);
                Entry::new(policies.clone(), now)
            });
            let phase = entry.ask(policies, access);
            self.heartbeat.note(entry.lease());
            phase
        };
        // Or what a runtime that has ended has left would wait for the next that ends.
        access.refunds.wake();
        self.attend(now);
        phase
    }

    /// What was asked about was granted, or passes for another reason.
    fn granted(self: &Arc<Self>, id: EntryId, phase: Phase, answered: Origin) {
        self.heard(answered);
        self.change(id, |entry, now| entry.granted(phase, answered, now));
    }

    /// What was asked about is not in flight.
    fn denied(self: &Arc<Self>, id: EntryId, phase: Phase, access: &Arc<StoreAccess>, answered: Origin) {
        self.change(id, |entry, now| entry.denied(phase, access, answered, now));
    }

    /// It is not known when a request ends.
    fn left(self: &Arc<Self>, id: EntryId, access: &Arc<StoreAccess>) {
        self.change(id, |entry, _| entry.left(access));
    }

    /// A request has ended.
    fn ended(self: &Arc<Self>, id: EntryId, access: &Arc<StoreAccess>) {
        let change = |entry: &mut Entry, _| (entry.policies().clone(), entry.ended(access));
        let Some((policies, (phase, _unused))) = self.change(id, change) else { return };
        let since = instant();
        self.ask_by(access, Check::refund(id.key, &policies, 1), move |tracker, answered, had| {
            tracker.change(id, |entry, now| entry.released(phase, since, answered, had, now));
        });
    }

    /// Changes an entry, and does what is due then: corrects what the store counts, or asks how many that is.
    fn change<T>(self: &Arc<Self>, id: EntryId, change: impl FnOnce(&mut Entry, Instant) -> T) -> Option<T> {
        let (result, due, _done) = {
            let entries = &mut *lock(self.shard(&id));
            let entry = entries.get_mut(&id)?;
            let now = instant();
            let result = change(entry, now);
            let due = match entry.wrong(now) {
                Some(wrong) => Some(Due::Correct(wrong)),
                None => entry.begin_sync(now).map(|held| Due::Sync { held }),
            };
            let due = due.map(|due| (due, entry.policies().clone(), entry.accesses().map(Arc::clone).collect()));
            if entry.is_in_doubt() {
                self.doubt.store(true, Ordering::Release);
            }
            (result, due, self.remove_if_done(entries, id, now))
        };
        match due {
            Some((Due::Sync { held }, policies, accesses)) => self.send_sync(id, held, &policies, accesses),
            Some((Due::Correct(wrong), policies, accesses)) => self.correct(id, wrong, &policies, accesses),
            None => {}
        }
        Some(result)
    }

    /// What is removed may hold the last of a store, which is dropped without the lock.
    fn remove_if_done(&self, entries: &mut HashMap<EntryId, Entry>, id: EntryId, now: Instant) -> Option<Entry> {
        let is_full = || self.len.load(Ordering::Acquire) > MAX_IDLE;
        entries.get(&id).filter(|entry| entry.is_done(now) || entry.is_idle() && is_full())?;
        self.len.fetch_sub(1, Ordering::AcqRel);
        entries.remove(&id)
    }

    /// Asks how many the store counts, which renews them.
    fn send_sync(self: &Arc<Self>, id: EntryId, held: u32, policies: &Policies, accesses: Accesses) {
        let renew = Check::renew(id.key, policies, held);
        // Each may have another store that follows the one that counts.
        for access in accesses.iter().skip(1) {
            access.refunds.put(PendingOp::of_check(renew.clone()));
        }
        self.ask_first(accesses, renew, move |tracker, answered, counted| {
            tracker.change(id, |entry, now| entry.synced(answered, counted, now));
        });
    }

    fn correct(self: &Arc<Self>, id: EntryId, wrong: Wrong, policies: &Policies, accesses: Accesses) {
        let check = match wrong {
            Wrong::TooMany(count) => Check::refund(id.key, policies, count),
            Wrong::TooFew(count) => Check::charge(id.key, policies, count),
        };
        self.ask_first(accesses, check, move |tracker, answered, _| {
            tracker.change(id, |entry, now| entry.corrected(answered, now));
        });
    }

    fn ask_first(
        self: &Arc<Self>,
        accesses: Accesses,
        check: Check,
        then: impl FnOnce(&Arc<Self>, Origin, u32) + Send + 'static,
    ) {
        if let Some(access) = accesses.into_iter().next() {
            self.ask_by(&access, check, then);
        }
    }

    /// Asks with this access, and calls `then` with where the answer came from, and what it grants.
    fn ask_by(
        self: &Arc<Self>,
        access: &Arc<StoreAccess>,
        check: Check,
        then: impl FnOnce(&Arc<Self>, Origin, u32) + Send + 'static,
    ) {
        let (tracker, asked) = (Arc::clone(self), Arc::clone(access));
        access.refunds.put(PendingOp::of_check(check).then(move |answer| {
            let (answered, granted) = asked.read(&answer);
            tracker.heard(answered);
            then(&tracker, answered, granted);
        }));
    }

    /// What the count was while it was away, nobody knows.
    fn heard(&self, answered: Origin) {
        match answered {
            Origin::Other => self.away.store(true, Ordering::Release),
            Origin::Primary(_) if self.away.load(Ordering::Acquire) => {
                self.away.store(false, Ordering::Release);
                self.forgot.store(true, Ordering::Release);
            }
            Origin::Primary(_) => {}
        }
    }

    /// Does what is due with time.
    fn tick(self: &Arc<Self>, now: Instant) {
        let forgot = self.forgot.swap(false, Ordering::AcqRel);
        let doubt = self.doubt.swap(false, Ordering::AcqRel);
        if !(forgot || doubt || self.heartbeat.is_due(now)) {
            return;
        }
        for shard in &self.shards {
            let mut due = Vec::new();
            lock(shard).iter_mut().for_each(|(id, entry)| {
                if forgot {
                    entry.ask_again();
                }
                if entry.is_in_doubt() || entry.is_due(now) {
                    due.push(*id);
                }
            });
            for id in due {
                self.change(id, |_, _| ());
            }
        }
    }
}
