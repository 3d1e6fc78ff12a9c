use std::fmt;
use std::future::Pending;
use std::mem;
use std::num::NonZeroUsize;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::bounded_map::{BoundedMap, Hold, Ranked, Slot};
use super::clock::Clock;
use super::digest::{Digest, Digester};
use super::{Answer, Error, Store, lock};
use crate::limit::{Check, Decision, Followed, Key, Mode, Policies, Policy, Source, State, Verdict, Verdicts};

/// A store in this process: every instance has counts of its own.
///
/// It decides exactly as [`RedisStore`](crate::RedisStore) does, in well under a microsecond. Alone it serves a
/// single instance; inside a [`Fallback`](crate::Fallback) it takes over while Redis is down.
///
/// It holds a bounded number of keys, [`DEFAULT_KEYS`](Self::DEFAULT_KEYS) unless told otherwise, at about 90 bytes
/// each, beside what [`SlidingLog`](crate::Strategy::SlidingLog) keeps for each charge and
/// [`SlidingWindow`](crate::Strategy::SlidingWindow) for each cell: 12 to 15 bytes. So a key of a log of 10,000 has up to
/// 150 KB, one of the longest log up to 1.5 MB, in full debt twice that, and one of 1,000 cells up to 15 KB. A key is held
/// as a hash of 128 bits, by a secret of the store's own.
///
/// A key makes room when all that was charged has flowed back. If the store is full before that, a new key takes the
/// place of the one, of a few, that had used the smallest share of its limit when it last asked; among equals, of a
/// newcomer. The few are some old keys, and some that came while the store was full. So a flood of new keys pushes out its
/// own kind, however long it is: it frees no caller that has used as large a share as each of them. A store that is full of exhausted callers keeps a few places in a hundred for new ones, which take
/// turns there: who has used more than the others there by the time of its turn mostly stays.
///
/// Clones share their counts.
#[derive(Clone)]
pub struct LocalStore {
    shared: Arc<Shared>,
}

struct Shared {
    /// All keys of a caller are in one shard, so that one lock decides on all its policies.
    shards: Box<[Mutex<Shard>]>,
    digester: Digester,
    clock: Clock,
}

struct Shard {
    /// By the caller, and which of its counts.
    states: BoundedMap<Entry>,
    /// What checks with an id were answered, by the caller, the id and the list of policies.
    answers: BoundedMap<Answered>,
}

/// What is known of one count of a caller.
enum Entry {
    Counted(State),
    /// Another store counts it. It had `capacity` there, of which `remaining` was left when it was `seen`, and all of
    /// it will be at `until`.
    Followed {
        remaining: i64,
        capacity: i64,
        until: i64,
        seen: i64,
    },
}

/// Answers that come within so many microseconds may come in another order than they were given: the least counts.
const MOMENT: i64 = 100_000;

/// What a check with an id was answered.
struct Answered {
    policies: Policies,
    verdicts: Verdicts,
}

impl Ranked for Entry {
    const OLD_STAYS: bool = true;
}

/// The oldest goes first, if all are held equally long.
impl Ranked for Answered {
    const OLD_STAYS: bool = false;
}

/// Who has used the least share of its limit goes first; among equals, who is fresh again first.
fn hold(verdict: &Verdict, policy: &Policy, now: i64) -> Hold {
    let capacity = policy.params().capacity.max(1);
    let used = (capacity - verdict.remaining).clamp(0, capacity);
    // In 255ths, rounded down: only who has nothing left has them all.
    Hold::new((used as u64 * 255 / capacity as u64) as u8, now + verdict.reset)
}

/// Whether a check leaves another count behind. What it does not charge may be counted by another quota too, by which it
/// has not flowed back yet.
fn changes(check: &Check, verdicts: &Verdicts) -> bool {
    verdicts.granted > 0 || check.mode() == Mode::Reset
}

impl Entry {
    /// The state to decide on. A counted one is taken out, until it is put back or another is put in its place.
    fn take(&mut self, policy: &Policy, now: i64) -> State {
        match *self {
            Self::Counted(ref mut state) => mem::replace(state, State::fresh(policy.strategy())),
            Self::Followed { until, .. } if until <= now => State::fresh(policy.strategy()),
            Self::Followed { remaining, capacity, until, .. } => {
                let ours = policy.params().capacity;
                // Our part of what is left, rounded down: all parts together are no more than that.
                let left = i128::from(remaining) * i128::from(ours) / i128::from(capacity.max(1));
                let used = ours - (left as i64).clamp(0, ours);
                State::resume(policy.strategy(), policy.params(), now, Followed { used, until })
            }
        }
    }

    fn put_back(&mut self, taken: State) {
        if let Self::Counted(state) = self {
            *state = taken;
        }
    }
}

impl LocalStore {
    /// How many keys the default store holds.
    pub const DEFAULT_KEYS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(99_999);

    /// A store that holds about `keys` keys, one for every policy of every caller; at least 16.
    pub fn with_capacity(keys: NonZeroUsize) -> Self {
        // Large shards fill evenly; and a shard must hold all policies of a caller.
        let shards = (keys.get() / 256).clamp(1, 64);
        let max = keys.get().div_ceil(shards).max(Policies::MAX);
        let shard = || Mutex::new(Shard { states: BoundedMap::new(max), answers: BoundedMap::new(max) });
        let shards = std::iter::repeat_with(shard).take(shards).collect();
        Self { shared: Arc::new(Shared { shards, digester: Digester::new(), clock: Clock::new() }) }
    }

    /// How many keys it holds now.
    pub fn len(&self) -> usize {
        self.shared.shards.iter().map(|shard| lock(shard).states.len()).sum()
    }

    /// Whether it holds no key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The shard of a caller, and the caller's digest.
    fn shard(&self, key: &Key) -> (MutexGuard<'_, Shard>, Digest) {
        let Shared { shards, digester, .. } = &*self.shared;
        let caller = digester.digest(key);
        (lock(&shards[caller.part(shards.len())]), caller)
    }

    /// The verdicts at a time, which is read under the lock, so that no state is asked about a time before its own.
    pub(super) fn verdicts(&self, check: &Check, now: impl FnOnce() -> i64) -> Verdicts {
        let (mut shard, caller) = self.shard(check.key());
        match check.id() {
            None => shard.decide(check, caller, now()),
            Some(id) => {
                // As the key in Redis: another list has an answer of its own.
                let answer = self.shared.digester.pair(check.key(), id).of_count(check.policies().id());
                shard.decide_once(check, answer, caller, now())
            }
        }
    }
}

/// Shows how many keys it holds, and none of them.
impl fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalStore").field("keys", &self.len()).finish_non_exhaustive()
    }
}

/// Holds [`LocalStore::DEFAULT_KEYS`].
impl Default for LocalStore {
    fn default() -> Self {
        Self::with_capacity(Self::DEFAULT_KEYS)
    }
}

impl Store for LocalStore {
    /// It never waits.
    type Future = Pending<Result<Decision, Error>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let verdicts = self.verdicts(&check, || self.shared.clock.micros());
        Answer::ready(Ok(check.answer(verdicts, Source::Local)))
    }

    fn follow(&self, key: &Key, decision: &Decision) {
        let (mut shard, caller) = self.shard(key);
        shard.follow(decision, caller, self.shared.clock.micros());
    }
}

impl Shard {
    fn decide(&mut self, check: &Check, caller: Digest, now: i64) -> Verdicts {
        if let [policy] = check.policies().as_slice()
            && let Some(place) = self.states.find(caller.of_count(policy.id()))
            && let Some(Slot { value: Entry::Counted(state), hold }) = self.states.at(place)
        {
            // The commonest: one count, decided where it is.
            let verdicts = check.decide(slice::from_mut(state), now);
            if changes(check, &verdicts) {
                *hold = self::hold(&verdicts.first, policy, now);
                if verdicts.first.reset <= 0 {
                    self.states.remove_at(place);
                }
            }
            return verdicts;
        }
        let mut places = SmallVec::<[Option<usize>; 1]>::new();
        let mut states = SmallVec::<[State; 1]>::new();
        for policy in check.policies().iter() {
            let place = self.states.find(caller.of_count(policy.id()));
            states.push(match place.and_then(|place| self.states.at(place)) {
                Some(slot) => slot.value.take(policy, now),
                None => State::fresh(policy.strategy()),
            });
            places.push(place);
        }
        let verdicts = check.decide(&mut states, now);
        if !changes(check, &verdicts) {
            for (state, place) in states.into_iter().zip(places) {
                if let Some(slot) = place.and_then(|place| self.states.at(place)) {
                    slot.value.put_back(state);
                }
            }
            return verdicts;
        }

        // First those that have a place, which putting others may change.
        let mut others = SmallVec::<[(&Policy, Entry, Hold); 1]>::new();
        let decided = states.into_iter().zip(places).zip(check.policies().iter()).zip(verdicts.iter());
        for (((state, place), policy), verdict) in decided {
            let (value, hold) = (Entry::Counted(state), hold(verdict, policy, now));
            match place.filter(|_| verdict.reset > 0).and_then(|place| self.states.at(place)) {
                Some(slot) => *slot = Slot { value, hold },
                None => others.push((policy, value, hold)),
            }
        }
        for (policy, value, hold) in others {
            self.states.put(caller.of_count(policy.id()), value, hold, now);
        }
        verdicts
    }

    fn follow(&mut self, decision: &Decision, caller: Digest, now: i64) {
        for (policy, verdict) in decision.verdicts() {
            let key = caller.of_count(policy.id());
            let (remaining, capacity, until) = (verdict.remaining, policy.params().capacity, now + verdict.reset);
            match self.states.get(key).map(|slot| &slot.value) {
                Some(Entry::Followed { remaining: least, seen, .. }) if *least < remaining && *seen > now - MOMENT => {}
                _ => {
                    let followed = Entry::Followed { remaining, capacity, until, seen: now };
                    self.states.put(key, followed, hold(verdict, policy, now), now);
                }
            }
        }
    }

    /// Answers as a check of the same id was answered, if there was one.
    fn decide_once(&mut self, check: &Check, answer: Digest, caller: Digest, now: i64) -> Verdicts {
        if let Some(Slot { value: Answered { policies, verdicts }, hold }) = self.answers.get(answer)
            && hold.expires_at() > now
            && policies.count_alike(check.policies())
        {
            return verdicts.within(check.policies());
        }
        let verdicts = self.decide(check, caller, now);
        if verdicts.granted > 0 {
            let value = Answered { policies: check.policies().clone(), verdicts: verdicts.clone() };
            self.answers.put(answer, value, Hold::new(0, now + check.policies().longest_period()), now);
        }
        verdicts
    }
}
