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
//! - Where the count is in doubt, the tracker looks how many the store counts. Takes and releases may come to it before
//!   the look or after it, in any order, since they go by several connections. Redis tells when it decided each of
//!   them: so the count is put right while requests come and end without a pause. Of a store that does not tell, only
//!   what is wrong whatever came first is corrected. A correction gives so many back, or charges them, and may come in
//!   any order too.

mod entry;
mod lease;
mod look;
mod registry;
mod renewer;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;
use tokio::time::Instant;

pub(crate) use self::lease::Lease;

use self::entry::{Entry, Origin, Side, Wrong};
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
    route: Arc<Route>,
}

/// How a layer asks the store. Layers that share a tracker may ask it by different routes.
struct Route {
    identity: Option<usize>,
    /// Whether a decision was made where the count is kept.
    knows: Box<dyn Fn(&Decision) -> bool + Send + Sync>,
    refunds: Arc<dyn RefundQueue>,
}

/// What an instance has in flight in one store.
struct Tracker {
    shards: Box<[Mutex<HashMap<Place, Entry>>]>,
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
struct Place {
    key: Key,
    count: u64,
}

/// What is due of an entry.
enum Due {
    Look { held: u32 },
    Correct(Wrong),
}

/// Those of an entry, of which the first one tells what the store counts.
type Routes = SmallVec<[Arc<Route>; 1]>;

const SHARDS: usize = 16;
/// So many entries of which nothing is in flight may wait for the store to be back. The lease time makes up for the
/// others.
const MAX_IDLE: usize = 100_000;

impl InFlightTracker {
    /// The tracker of what is taken in `store`. `observer` is told of what could not be released.
    pub(crate) fn new(store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        Self::over(Arc::default(), store, observer)
    }

    /// The same tracker, and another observer. `store` is the same.
    pub(crate) fn observed(&self, store: &impl Store, observer: Arc<dyn Observer>) -> Self {
        Self::over(Arc::clone(&self.0.tracker), store, Some(observer))
    }

    fn over(tracker: Arc<OnceLock<Arc<Tracker>>>, store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        Self(Arc::new(Inner { tracker, route: Arc::new(Route::new(store, observer)) }))
    }

    /// What settles in the store.
    pub(crate) fn refunds(&self) -> &Arc<dyn RefundQueue> {
        &self.0.route.refunds
    }

    fn route(&self) -> &Arc<Route> {
        &self.0.route
    }

    fn tracker(&self) -> &Arc<Tracker> {
        self.0.tracker.get_or_init(|| registry::find(self.0.route.identity))
    }

    /// Enters a request that the store is about to be asked about. `None` if no policy counts what is in flight.
    ///
    /// Tell the lease what the store has [answered](Lease::answered). From a grant on, it holds what was taken until it
    /// is dropped.
    pub(crate) fn hold(&self, key: Key, policies: &Policies) -> Option<Lease> {
        let policies = policies.in_flight()?;
        let (tracker, now) = (self.tracker(), instant());
        let ask =
            |policy: &Policy| tracker.ask(Place { key, count: policy.id() }, &policies.only(policy), self.route(), now);
        let sides = policies.iter().map(ask).collect();
        Some(Lease::new(self.clone(), key, policies.clone(), sides))
    }
}

impl Route {
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

    fn shard(&self, place: &Place) -> &Mutex<HashMap<Place, Entry>> {
        let bytes = place.key.as_bytes();
        let sum = bytes.iter().fold(place.count, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte));
        &self.shards[(sum.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize % SHARDS]
    }

    /// The store is about to be asked about a request.
    fn ask(self: &Arc<Self>, place: Place, policies: &Policies, route: &Arc<Route>, now: Instant) -> Side {
        let side = {
            let entries = &mut *lock(self.shard(&place));
            let entry = entries.entry(place).or_insert_with(|| {
                self.len.fetch_add(1, Ordering::AcqRel);
                Entry::new(policies.clone(), now)
            });
            let side = entry.ask(policies, route);
            self.heartbeat.note(entry.lease());
            side
        };
        // Or what a runtime that has ended has left would wait for the next that ends.
        route.refunds.wake();
        self.attend(now);
        side
    }

    /// What was asked about was granted, or passes for another reason.
    fn granted(self: &Arc<Self>, place: Place, side: Side, answered: Origin) {
        self.heard(answered);
        self.change(place, |entry, now| entry.granted(side, answered, now));
    }

    /// What was asked about is not in flight.
    fn denied(self: &Arc<Self>, place: Place, side: Side, route: &Arc<Route>, answered: Origin) {
        self.change(place, |entry, now| entry.denied(side, route, answered, now));
    }

    /// Nobody will tell when a request ends.
    fn left(self: &Arc<Self>, place: Place, route: &Arc<Route>) {
        self.change(place, |entry, _| entry.left(route));
    }

    /// A request has ended.
    fn ended(self: &Arc<Self>, place: Place, route: &Arc<Route>) {
        let change = |entry: &mut Entry, _| (entry.policies().clone(), entry.ended(route));
        let Some((policies, (side, _unused))) = self.change(place, change) else { return };
        let since = instant();
        self.ask_by(route, Check::refund(place.key, &policies, 1), move |tracker, answered, had| {
            tracker.change(place, |entry, now| entry.released(side, since, answered, had, now));
        });
    }

    /// Changes an entry, and does what is due then: corrects what the store counts, or looks how many that is.
    fn change<T>(self: &Arc<Self>, place: Place, change: impl FnOnce(&mut Entry, Instant) -> T) -> Option<T> {
        let (result, due, _done) = {
            let entries = &mut *lock(self.shard(&place));
            let entry = entries.get_mut(&place)?;
            let now = instant();
            let result = change(entry, now);
            let due = match entry.wrong(now) {
                Some(wrong) => Some(Due::Correct(wrong)),
                None => entry.look(now).map(|held| Due::Look { held }),
            };
            let due = due.map(|due| (due, entry.policies().clone(), entry.routes().map(Arc::clone).collect()));
            if entry.is_in_doubt() {
                self.doubt.store(true, Ordering::Release);
            }
            (result, due, self.remove_if_done(entries, place, now))
        };
        match due {
            Some((Due::Look { held }, policies, routes)) => self.look_at(place, held, &policies, routes),
            Some((Due::Correct(wrong), policies, routes)) => self.correct(place, wrong, &policies, routes),
            None => {}
        }
        Some(result)
    }

    /// What is removed may hold the last of a store, which is dropped without the lock.
    fn remove_if_done(&self, entries: &mut HashMap<Place, Entry>, place: Place, now: Instant) -> Option<Entry> {
        let is_full = || self.len.load(Ordering::Acquire) > MAX_IDLE;
        entries.get(&place).filter(|entry| entry.is_done(now) || entry.is_idle() && is_full())?;
        self.len.fetch_sub(1, Ordering::AcqRel);
        entries.remove(&place)
    }

    /// Looks how many the store counts, which renews them.
    fn look_at(self: &Arc<Self>, place: Place, held: u32, policies: &Policies, routes: Routes) {
        let renew = Check::renew(place.key, policies, held);
        // Each may have another store that follows the one that counts.
        for route in routes.iter().skip(1) {
            route.refunds.put(PendingOp::of_check(renew.clone()));
        }
        self.ask_first(routes, renew, move |tracker, answered, counted| {
            tracker.change(place, |entry, now| entry.looked(answered, counted, now));
        });
    }

    fn correct(self: &Arc<Self>, place: Place, wrong: Wrong, policies: &Policies, routes: Routes) {
        let check = match wrong {
            Wrong::TooMany(count) => Check::refund(place.key, policies, count),
            Wrong::TooFew(count) => Check::charge(place.key, policies, count),
        };
        self.ask_first(routes, check, move |tracker, answered, _| {
            tracker.change(place, |entry, now| entry.corrected(answered, now));
        });
    }

    fn ask_first(
        self: &Arc<Self>,
        routes: Routes,
        check: Check,
        then: impl FnOnce(&Arc<Self>, Origin, u32) + Send + 'static,
    ) {
        if let Some(route) = routes.into_iter().next() {
            self.ask_by(&route, check, then);
        }
    }

    /// Asks by this route, and calls `then` with where the answer came from, and what it grants.
    fn ask_by(
        self: &Arc<Self>,
        route: &Arc<Route>,
        check: Check,
        then: impl FnOnce(&Arc<Self>, Origin, u32) + Send + 'static,
    ) {
        let (tracker, asked) = (Arc::clone(self), Arc::clone(route));
        route.refunds.put(PendingOp::ask_then(check, move |answer| {
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
    fn look(self: &Arc<Self>, now: Instant) {
        let forgot = self.forgot.swap(false, Ordering::AcqRel);
        let doubt = self.doubt.swap(false, Ordering::AcqRel);
        if !(forgot || doubt || self.heartbeat.is_due(now)) {
            return;
        }
        for shard in &self.shards {
            let mut due = Vec::new();
            lock(shard).iter_mut().for_each(|(place, entry)| {
                if forgot {
                    entry.ask_again();
                }
                if entry.is_in_doubt() || entry.is_due(now) {
                    due.push(*place);
                }
            });
            for place in due {
                self.change(place, |_, _| ());
            }
        }
    }
}

impl fmt::Debug for InFlightTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.0.tracker.get().map_or(0, |tracker| tracker.len.load(Ordering::Acquire));
        f.debug_struct("InFlightTracker").field("entries", &entries).finish_non_exhaustive()
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route").finish_non_exhaustive()
    }
}
