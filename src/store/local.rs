use std::fmt;
use std::future::Pending;
use std::mem;
use std::num::NonZeroUsize;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::bounded_map::{BoundedMap, Hold, Ranked, Slot};
use super::digest::Digest;
use super::shards::Shards;
use super::{Answer, Store, Waiters};
use crate::error::StoreError;
use crate::limit::{
    Answered, Check, Decision, Key, Mode, Policies, Policy, Snapshot, Source, State, Verdict,
    Verdicts,
};
use crate::util::{Clock, lock};

/// A store in this process: every instance has its own counts.
///
/// It decides exactly as [`RedisStore`](crate::RedisStore) does, in well under a microsecond. Use it alone for a single
/// instance; in a [`Fallback`](crate::Fallback) it takes over while Redis is down.
///
/// ```
/// use std::num::NonZeroUsize;
/// use tower_redis_ratelimit::check::Check;
/// use tower_redis_ratelimit::store::Store;
/// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = LocalStore::with_capacity(NonZeroUsize::new(1_000_000).ok_or("zero")?);
/// let policies = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?.into();
/// let decision = store.check(Check::take(Key::new("user-42"), &policies, 1)).await?;
/// assert_eq!((decision.remaining(), store.len()), (49, 1));
/// # Ok(())
/// # }
/// ```
///
/// # Memory
///
/// It holds a bounded number of keys, one for every policy of every caller, at about 80 bytes each. Defaults to
/// [`DEFAULT_KEYS`](Self::DEFAULT_KEYS). A [`SlidingLog`](crate::Strategy::SlidingLog) adds 12 to 15 bytes for every
/// charge, a [`SlidingWindow`](crate::Strategy::SlidingWindow) as much for every cell: a log of 10,000 takes up to 150
/// KB, the longest log up to 1.5 MB (twice that in full debt), and a window of 1,000 cells up to 15 KB. The store keeps
/// no keys of callers, only seeded hashes of 128 bits.
///
/// A key is dropped once no charge counts any more. If the store is full before that, each new key replaces another.
/// The store compares a few keys, some old and some that came while it was full, and drops the one that had used the
/// smallest share of its limit at its last check; between equals, the newer one. So a flood of new keys mostly replaces
/// itself, however long it lasts: a caller that has used at least as large a share stays. If the store is full of
/// callers that have used up their limits, new keys replace each other in a small percentage of the entries. One that
/// has used more than the others there mostly stays.
///
/// Clones share their counts.
#[derive(Clone)]
pub struct LocalStore {
    shared: Arc<Shared>,
}

struct Shared {
    /// All keys of a caller are in one shard, so that one lock decides on all its policies.
    shards: Shards<Mutex<Shard>>,
    clock: Clock,
    waiters: Waiters,
}

struct Shard {
    /// By the caller and the policy.
    states: BoundedMap<Entry>,
    /// Answers to checks with an id, by the caller, the id and the list of policies.
    answers: BoundedMap<Answered>,
}

/// The state of one caller under one policy.
enum Entry {
    Counted(State),
    /// Another store counts it. At the time `seen`, `remaining` of `capacity` was left there; at `until` all of it is.
    Warmed {
        remaining: i64,
        capacity: i64,
        until: i64,
        seen: i64,
    },
}

/// Answers of another store may arrive out of order. Of those that arrive within so many microseconds of each other, the
/// one with the least remaining is the newest.
const MOMENT: i64 = 100_000;

impl Ranked for Entry {
    const OLD_STAYS: bool = true;
}

/// The one that expires first is dropped first: the oldest, if all have one period.
impl Ranked for Answered {
    const OLD_STAYS: bool = false;
}

/// The key that has used the smallest share of its limit is dropped first; between equals, the one that is fresh again
/// first.
fn hold(verdict: &Verdict, policy: &Policy, now: i64) -> Hold {
    Hold::new(verdict.used(policy), now + verdict.reset)
}

/// No state of this policy takes longer to be fresh again, even in full debt; in microseconds.
fn longest_reset(policy: &Policy) -> i64 {
    2 * policy.counts_for().saturating_add(policy.params().period) + policy.params().longest
}

/// Whether a check has changed its states. If not, they must not be stored again: a state may also be counted under a
/// longer quota of the same name, as in a rolling deploy, and would be held only as long as this quota needs it.
fn changes(check: &Check, verdicts: &Verdicts) -> bool {
    let takes_a_request = || check.mode() != Mode::Peek && check.policies().in_flight().is_some();
    verdicts.granted > 0
        || matches!(check.mode(), Mode::Reset | Mode::Renew | Mode::Release)
        || verdicts.each.iter().all(Verdict::is_allowed) && takes_a_request()
}

impl Entry {
    /// The state to decide on. A counted one is moved out, until it is put back or replaced.
    fn take(&mut self, policy: &Policy, now: i64) -> State {
        match *self {
            Self::Counted(ref mut state) => mem::replace(state, State::fresh(policy.kind())),
            Self::Warmed { until, .. } if until <= now => State::fresh(policy.kind()),
            Self::Warmed {
                remaining,
                capacity,
                until,
                ..
            } => {
                let ours = policy.params().capacity;
                // What is left, in proportion to our capacity. Rounded down, so that the parts of all instances are no
                // more than the whole.
                let left = i128::from(remaining) * i128::from(ours) / i128::from(capacity.max(1));
                let used = ours - (left as i64).clamp(0, ours);
                State::resume(
                    policy.kind(),
                    policy.params(),
                    now,
                    Snapshot { used, until },
                )
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

    /// A store that holds about this many keys, one for every policy of every caller; at least 16.
    pub fn with_capacity(keys: NonZeroUsize) -> Self {
        // Large shards fill evenly; and a shard must hold all policies of a caller.
        let shards = Shards::new((keys.get() / 256).min(64), |shards| {
            let max = keys.get().div_ceil(shards).max(Policies::MAX);
            Mutex::new(Shard {
                states: BoundedMap::new(max),
                answers: BoundedMap::new(max),
            })
        });
        Self {
            shared: Arc::new(Shared {
                shards,
                clock: Clock::new(),
                waiters: Waiters::default(),
            }),
        }
    }

    /// How many keys it holds.
    pub fn len(&self) -> usize {
        self.shared
            .shards
            .iter()
            .map(|shard| lock(shard).states.len())
            .sum()
    }

    /// Whether it holds no key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The shard of a caller, and the caller's digest.
    fn shard(&self, key: &Key) -> (MutexGuard<'_, Shard>, Digest) {
        let (shard, caller) = self.shared.shards.of(key);
        (lock(shard), caller)
    }

    /// Decides at the time `now`, which is read under the lock, so that no state is checked at a time before its own.
    pub(super) fn verdicts(&self, check: &Check, now: impl FnOnce() -> i64) -> Verdicts {
        let (mut shard, caller) = self.shard(check.key());
        match check.id() {
            None => shard.decide(check, caller, now()),
            Some(id) => {
                // As in Redis, the answer is kept for each list of policies.
                let answer = self
                    .shared
                    .shards
                    .digester()
                    .pair(check.key(), id)
                    .of_count(check.policies().id());
                shard.decide_once(check, answer, caller, now())
            }
        }
    }
}

/// Shows how many keys it holds, and none of them.
impl fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalStore")
            .field("keys", &self.len())
            .finish_non_exhaustive()
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
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let verdicts = self.verdicts(&check, || self.shared.clock.micros());
        self.shared.waiters.freed(&check);
        Answer::ready(Ok(check.answer(verdicts, Source::Local)))
    }

    fn waiters(&self) -> Option<Waiters> {
        Some(self.shared.waiters.clone())
    }

    fn warm(&self, key: &Key, decision: &Decision) {
        let (mut shard, caller) = self.shard(key);
        shard.warm(decision, caller, self.shared.clock.micros());
    }
}

impl Shard {
    fn decide(&mut self, check: &Check, caller: Digest, now: i64) -> Verdicts {
        if let [policy] = check.policies().as_slice()
            && let Some(place) = self.states.find(caller.of_count(policy.id()))
            && let Some(Slot {
                value: Entry::Counted(state),
                hold,
            }) = self.states.at(place)
        {
            // The most common case: one policy, of a caller that is known. It is decided in place.
            let verdicts = check.decide(slice::from_mut(state), now);
            if changes(check, &verdicts) {
                *hold = self::hold(verdicts.first(), policy, now);
                if verdicts.first().reset <= 0 {
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
                None => State::fresh(policy.kind()),
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

        // First those that have a place: to put new ones may move them.
        let mut others = SmallVec::<[(&Policy, Entry, Hold); 1]>::new();
        let decided = states
            .into_iter()
            .zip(places)
            .zip(check.policies().iter())
            .zip(&verdicts.each);
        for (((state, place), policy), verdict) in decided {
            let (value, hold) = (Entry::Counted(state), hold(verdict, policy, now));
            match place
                .filter(|_| verdict.reset > 0)
                .and_then(|place| self.states.at(place))
            {
                Some(slot) => *slot = Slot { value, hold },
                None => others.push((policy, value, hold)),
            }
        }
        for (policy, value, hold) in others {
            self.states
                .put(caller.of_count(policy.id()), value, hold, now);
        }
        verdicts
    }

    fn warm(&mut self, decision: &Decision, caller: Digest, now: i64) {
        // A fallback mirrors the slots of requests in flight one by one.
        let over_time = |(policy, _): &(&Policy, &Verdict)| !policy.is_in_flight();
        for (policy, verdict) in decision.verdicts().filter(over_time) {
            let key = caller.of_count(policy.id());
            // A store outside of this crate may tell any time.
            let verdict = &Verdict {
                reset: verdict.reset.min(longest_reset(policy)),
                ..*verdict
            };
            let (remaining, capacity, until) = (
                verdict.remaining,
                policy.params().capacity,
                now + verdict.reset,
            );
            match self.states.get(key).map(|slot| &slot.value) {
                // What has flowed back since is in the newer one.
                Some(Entry::Warmed {
                    remaining: least,
                    until,
                    seen,
                    ..
                }) if *least < remaining && *seen > now - MOMENT && *until > now => {}
                _ => {
                    let followed = Entry::Warmed {
                        remaining,
                        capacity,
                        until,
                        seen: now,
                    };
                    self.states
                        .put(key, followed, hold(verdict, policy, now), now);
                }
            }
        }
    }

    /// The answer that this id got before, if there is one.
    fn decide_once(&mut self, check: &Check, answer: Digest, caller: Digest, now: i64) -> Verdicts {
        if let Some(Slot { value, hold }) = self.answers.get(answer)
            && let Some(again) = value.again(check, hold.expires_at(), now)
        {
            return again;
        }
        let verdicts = self.decide(check, caller, now);
        if verdicts.granted > 0 {
            let value = Answered::new(check, &verdicts);
            self.answers.put(
                answer,
                value,
                Hold::new(0, now + check.policies().longest_period()),
                now,
            );
        }
        verdicts
    }
}
