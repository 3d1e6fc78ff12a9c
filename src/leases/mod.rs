//! What this instance has in flight.
//!
//! A request under a policy of [requests in flight](crate::Strategy::InFlight) has a [`Lease`] for as long as it runs. The store
//! counts how many this instance holds of each caller; [`Leases`] knows the same by its own books, renews what runs for
//! longer, and puts the store right where it may count otherwise: after an outage, or a check whose answer never came.
//!
//! - All layers over one store share its [books](shelf), since the store counts what they hold as one.
//! - A request is entered in the books before the store is asked, so that they never say less than the store may count.
//! - What ends is given back off the request path, once, whatever ends it.
//! - What an [`Entry`](entry::Entry) is not sure of it tells as it should be, by [`Check::hold`]: once nothing of it is under
//!   way, so that no take is overwritten.

mod entry;
mod keeper;
mod lease;
mod shelf;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use tokio::runtime::Handle;
use tokio::time::Instant;

pub(crate) use self::lease::Lease;

use self::entry::{Answered, Entry, Sent};
use self::keeper::Watch;
use crate::limit::{Check, Decision, Key, Policies};
use crate::settle::{Mail, Outbox, Post};
use crate::store::{Answer, Error, Observer, Store, instant, lock};

/// The books of an instance: what it has in flight. Clones share them, and so do all that are of one store.
#[derive(Clone)]
pub struct Leases(Arc<Opening>);

/// Books that are opened with the first request.
struct Opening {
    books: OnceLock<Arc<dyn Books>>,
    open: Box<dyn Fn() -> Arc<dyn Books> + Send + Sync>,
    /// Where a decision came from. Others who have these books may ask another store, which asks the same one.
    worth: Box<dyn Fn(&Decision) -> Answered + Send + Sync>,
}

struct Shared<S: Store> {
    store: S,
    post: Arc<dyn Post>,
    books: Box<[Mutex<HashMap<Place, Entry>>]>,
    /// How many entries there are.
    len: AtomicUsize,
    /// Whether the last answers did not come from where the count is kept.
    away: AtomicBool,
    /// Whether it may have lost counts, since it was away.
    forgot: AtomicBool,
    /// Whether an entry is in doubt.
    doubt: AtomicBool,
    watch: Watch,
}

/// What an entry is of: a caller, and what a policy counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    key: Key,
    count: u64,
}

const SHARDS: usize = 16;
/// So many entries of which nothing is in flight may wait for the store to be back. The lease time makes up for the others.
const MAX_IDLE: usize = 100_000;

impl Leases {
    /// Keeps the books of what is taken in `store`, and tells it by `post` what has ended.
    pub(crate) fn new(store: impl Store, post: Arc<dyn Post>) -> Self {
        let (identity, asked) = (store.identity(), store.clone());
        let worth = Box::new(move |decision: &Decision| Answered::there(asked.knows(decision)));
        let new = move || Arc::new(Shared::new(store.clone(), Arc::clone(&post))) as Arc<dyn Books>;
        Self(Arc::new(Opening { books: OnceLock::new(), open: Box::new(move || shelf::find(identity, &new)), worth }))
    }

    fn worth(&self, decision: &Decision) -> Answered {
        (self.0.worth)(decision)
    }

    fn books(&self) -> &Arc<dyn Books> {
        self.0.books.get_or_init(|| (self.0.open)())
    }

    /// Enters a request that the store is about to be asked about. `None` if no policy counts what is in flight.
    ///
    /// Tell the lease what the store has [answered](Lease::answered). From a grant on, it holds what was taken until it is
    /// dropped.
    pub(crate) fn hold(&self, key: Key, policies: &Policies) -> Option<Lease> {
        let policies = policies.in_flight()?;
        let (books, now) = (self.books(), instant());
        for policy in policies.iter() {
            Arc::clone(books).asks(Place { key, count: policy.id() }, &policies.only(policy), now);
        }
        Some(Lease::new(self.clone(), key, policies.clone()))
    }
}

/// What settles in `store`, and the books of what is in flight there. `observer` is told of what could not be done.
pub(crate) fn desk<S: Store>(store: &S, observer: Option<Arc<dyn Observer>>) -> (Arc<dyn Post>, Leases) {
    let post: Arc<dyn Post> = Arc::new(Outbox::new(store.clone(), observer));
    (Arc::clone(&post), Leases::new(store.clone(), post))
}

/// What happens to a lease, with any store.
trait Books: Send + Sync {
    /// The store is about to be asked about a request.
    fn asks(self: Arc<Self>, place: Place, policies: &Policies, now: Instant);

    /// What was asked about was granted, or passes for another reason.
    fn granted(self: Arc<Self>, place: Place, answered: Answered);

    /// What was asked about is not in flight.
    fn denied(self: Arc<Self>, place: Place, answered: Answered);

    /// Nobody will tell when a request ends.
    fn left(self: Arc<Self>, place: Place);

    /// A request has ended.
    fn ended(self: Arc<Self>, place: Place);

    /// How many entries there are.
    fn len(&self) -> usize;
}

impl<S: Store> Books for Shared<S> {
    fn asks(self: Arc<Self>, place: Place, policies: &Policies, now: Instant) {
        {
            let entries = &mut *lock(self.book(&place));
            let entry = entries.entry(place).or_insert_with(|| {
                self.len.fetch_add(1, Ordering::AcqRel);
                Entry::new(policies.clone(), now)
            });
            entry.ask(policies);
            self.watch.note(entry.lease());
        }
        // Or what a runtime that has ended has left would wait for the next that ends.
        self.post.wake();
        self.attend(now);
    }

    fn granted(self: Arc<Self>, place: Place, answered: Answered) {
        self.heard(answered);
        self.change(place, |entry, now| {
            entry.granted(answered, now);
            0
        });
    }

    fn denied(self: Arc<Self>, place: Place, answered: Answered) {
        self.change(place, |entry, now| {
            entry.denied(answered, now);
            0
        });
    }

    fn left(self: Arc<Self>, place: Place) {
        self.change(place, |entry, _| {
            entry.left();
            0
        });
    }

    fn ended(self: Arc<Self>, place: Place) {
        self.change(place, Entry::ended);
    }

    fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }
}

impl<S: Store> Shared<S> {
    fn new(store: S, post: Arc<dyn Post>) -> Self {
        let books = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (away, forgot, doubt) = Default::default();
        let (len, watch) = (AtomicUsize::new(0), Watch::new(instant()));
        Self { store, post, books, len, away, forgot, doubt, watch }
    }

    fn book(&self, place: &Place) -> &Mutex<HashMap<Place, Entry>> {
        let bytes = place.key.as_bytes();
        let sum = bytes.iter().fold(place.count, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte));
        &self.books[(sum.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize % SHARDS]
    }

    /// Changes an entry, gives back what that says, and tells the store what it holds, if that is due.
    fn change(self: &Arc<Self>, place: Place, change: impl FnOnce(&mut Entry, Instant) -> u32) {
        let (mut back, mut hold) = (None, None);
        {
            let entries = &mut *lock(self.book(&place));
            let Some(entry) = entries.get_mut(&place) else { return };
            let now = instant();
            let count = change(entry, now);
            if count > 0 {
                back = Some((count, Check::give_back(place.key, entry.policies(), count)));
            } else if Handle::try_current().is_ok()
                && let Some(sent) = entry.hold(now)
            {
                // Under the lock, so that every take that is entered from here on comes to the store after it.
                let check = Check::hold(place.key, entry.policies(), sent.count);
                hold = Some((sent, self.store.check(check)));
            }
            if entry.is_in_doubt() {
                self.doubt.store(true, Ordering::Release);
            }
            self.remove_if_done(entries, place, now);
        }
        if let Some((count, check)) = back {
            self.give_back(place, count, check);
        }
        if let Some((sent, answer)) = hold {
            self.await_hold(place, sent, answer);
        }
    }

    fn remove_if_done(&self, entries: &mut HashMap<Place, Entry>, place: Place, now: Instant) {
        let is_full = || self.len.load(Ordering::Acquire) > MAX_IDLE;
        if entries.get(&place).is_some_and(|entry| entry.is_done(now) || entry.is_idle() && is_full()) {
            entries.remove(&place);
            self.len.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn give_back(self: &Arc<Self>, place: Place, count: u32, check: Check) {
        let (shared, since) = (Arc::clone(self), instant());
        self.post.put(Mail::ask_then(check, move |answer| {
            let (answered, had) = shared.read(answer);
            shared.change(place, |entry, now| {
                entry.gave_back(count, since, answered, had, now);
                0
            });
        }));
    }

    fn await_hold(self: &Arc<Self>, place: Place, sent: Sent, answer: Answer<S::Future>) {
        let told = Told { shared: Arc::clone(self), place, sent, answer: None };
        match answer {
            Answer::Ready { answer } => told.by(answer),
            Answer::Pending { future } => {
                // A runtime that has ended drops it at once.
                if let Ok(runtime) = Handle::try_current() {
                    runtime.spawn(async move { told.by(future.await) });
                }
            }
        }
    }

    /// Where the answer came from, and what it grants.
    fn read(&self, answer: Result<Decision, Error>) -> (Answered, u32) {
        let (answered, granted) = match &answer {
            Ok(decision) => (Answered::there(self.store.knows(decision)), decision.granted()),
            Err(_) => (Answered::Elsewhere, 0),
        };
        self.heard(answered);
        (answered, granted)
    }

    /// What the count was while it was away, nobody knows.
    fn heard(&self, answered: Answered) {
        match answered {
            Answered::Elsewhere => self.away.store(true, Ordering::Release),
            Answered::There if self.away.load(Ordering::Acquire) => {
                self.away.store(false, Ordering::Release);
                self.forgot.store(true, Ordering::Release);
            }
            Answered::There => {}
        }
    }

    /// Does what is due with time.
    fn look(self: &Arc<Self>, now: Instant) {
        let forgot = self.forgot.swap(false, Ordering::AcqRel);
        let doubt = self.doubt.swap(false, Ordering::AcqRel);
        if !(forgot || doubt || self.watch.is_due(now)) {
            return;
        }
        let mut renewals = Vec::new();
        for book in &self.books {
            let mut doubted = Vec::new();
            lock(book).iter_mut().for_each(|(place, entry)| {
                if forgot {
                    entry.ask_again();
                }
                if entry.is_in_doubt() {
                    doubted.push(*place);
                } else if let Some(sent) = entry.renew(now) {
                    renewals.push((*place, sent, Check::renew(place.key, entry.policies(), sent.count)));
                }
            });
            for place in doubted {
                self.change(place, |_, _| 0);
            }
        }
        for (place, sent, check) in renewals {
            let shared = Arc::clone(self);
            self.post.put(Mail::ask_then(check, move |answer| {
                let (answered, counted) = shared.read(answer);
                shared.change(place, |entry, now| {
                    entry.renewed(sent, answered, counted, now);
                    0
                });
            }));
        }
    }
}

/// A hold that was sent. Dropped with its runtime, it was not answered.
struct Told<S: Store> {
    shared: Arc<Shared<S>>,
    place: Place,
    sent: Sent,
    answer: Option<Result<Decision, Error>>,
}

impl<S: Store> Told<S> {
    fn by(mut self, answer: Result<Decision, Error>) {
        self.answer = Some(answer);
    }
}

impl<S: Store> Drop for Told<S> {
    fn drop(&mut self) {
        let answer = self.answer.take();
        let answered = answer.map_or(Answered::Elsewhere, |answer| self.shared.read(answer).0);
        self.shared.change(self.place, |entry, now| entry.told(self.sent, answered, now));
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("entries", &self.0.books.get().map_or(0, |books| books.len()))
            .finish_non_exhaustive()
    }
}
