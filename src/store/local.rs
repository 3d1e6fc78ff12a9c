use std::fmt;
use std::future::Pending;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::{Answer, Backend, Hooks, JointFuture, Store, Waiters};
use crate::blocks::Blocks;
use crate::error::StoreError;
use crate::limit::{
    Answered, Check, Decision, JointCheck, Key, Mode, Policies, Policy, Snapshot, Source, State,
    Verdict, Verdicts, Writer,
};
use crate::util::{BoundedMap, Clock, Digest, Hold, MapSlot, Ranked, Shards, bounded_map, lock};

/// A store in this process: each instance has its own counts.
///
/// It makes exactly the decisions of a [`RedisStore`](crate::RedisStore), in well under a
/// microsecond. Use it alone for a single instance; in a [`Fallback`](crate::Fallback) it takes
/// over while Redis is down.
///
/// Make one store and clone it: clones share their counts, and a second `LocalStore::default()` has its own, so that two
/// layers with one policy would allow twice its limit.
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
/// The number of keys is bounded; it defaults to [`DEFAULT_KEYS`](Self::DEFAULT_KEYS). Each policy
/// of each caller is one key, of at most 116 bytes, or 124 while charges under an earlier quota of a
/// bucket count. A store that holds fewer than 2,000 keys takes more for each. A
/// [`SlidingLog`](crate::Strategy::SlidingLog) adds 12 to 15 bytes per charge, a
/// [`SlidingWindow`](crate::Strategy::SlidingWindow) the same per cell: a log of 10,000 takes at most
/// 150 KB, the longest log at most 1.5 MB (twice that in full debt), and a window of 1,000 cells at
/// most 15 KB. The store keeps seeded 128-bit hashes of the
/// callers' keys, not the keys.
///
/// A key is dropped when all its charges have expired. If the store is full before that, each new
/// key replaces another one. The store compares a few keys, some old and some inserted while it was
/// full, and drops the key with the smallest used share of its limit at its last check; of
/// equal ones, the newer. So a flood of new keys replaces mainly itself, however long it lasts: a
/// caller that has used at least as large a share is kept. If the store is full of callers that
/// have used up their limits, new keys replace each other in a small percentage of the entries,
/// where the one with the highest usage is usually kept.
#[derive(Clone)]
pub struct LocalStore {
    shared: Arc<SharedCounts>,
}

struct SharedCounts {
    /// All keys of a caller are in one shard: one lock covers all its policies.
    shards: Shards<Mutex<CountShard>>,
    clock: Clock,
    /// Microseconds that the clock of calendars is ahead of `clock`: the last seen difference to Redis, in a fallback.
    ahead: AtomicI64,
    waiters: Waiters,
    blocks: Blocks,
}

/// A count of a check: the index of its shard among the locked shards, and its digest.
struct CountPlace {
    shard: usize,
    count: Digest,
}

struct CountShard {
    /// As in the store, at the last decision.
    ahead: i64,
    /// Per caller and policy.
    states: BoundedMap<LocalCount>,
    /// Recorded answers to checks with an id, per caller, id and list of policies.
    answers: BoundedMap<Answered>,
}

/// The state of one caller under one policy.
enum LocalCount {
    Counted(State),
    /// Counted by another store: at the [moment](moment_of) `seen`, `remaining` of the capacity was left there under
    /// this quota; all of it at `until`.
    Warmed {
        remaining: u32,
        writer: Writer,
        until: i64,
        seen: u32,
    },
}

/// Answers of another store may arrive out of order. Of answers that arrive within this time of
/// each other, in milliseconds, the one with the least remaining is the newest.
const MOMENT: i32 = 100;

/// Returns a time in milliseconds modulo 2^32: with a longer number, an entry would not fit into a cache line.
fn moment_of(now: i64) -> u32 {
    (now / 1_000) as u32
}

impl Ranked for LocalCount {
    const OLD_STAYS: bool = true;
}

/// Ranked by expiry only: with one period, the oldest is dropped first.
impl Ranked for Answered {
    const OLD_STAYS: bool = false;
}

/// Ranks a key by the share of its limit that is used, then by the time at which it is fresh again.
fn hold_of(verdict: &Verdict, policy: &Policy, now: i64) -> Hold {
    Hold::new(verdict.used(policy), now + verdict.reset)
}

/// Ranks a counted key, which may have to be kept for longer than this policy needs it.
#[inline]
fn hold_counted(state: &State, verdict: &Verdict, policy: &Policy, now: i64) -> Hold {
    let kept_until = state.kept_until(policy.params(), now);
    Hold::new(verdict.used(policy), kept_until.max(now + verdict.reset))
}

/// Maximum time until a state of this policy is fresh again, even in full debt, in microseconds.
fn longest_reset(policy: &Policy) -> i64 {
    2 * policy.counts_for().saturating_add(policy.params().period)
}

/// Identifies the counts of a list, in order.
fn counts_of(policies: &Policies) -> u64 {
    let mut hasher = DefaultHasher::new();
    for policy in policies {
        policy.id().hash(&mut hasher);
    }
    hasher.finish()
}

/// Returns `true` if a check has changed its states. Unchanged ones must not be stored again:
/// during a rolling deployment, the same state may be counted under a longer quota of that name,
/// and storing it here would shorten its expiry to this quota's.
#[inline]
fn changes(check: &Check, granted: i64, each: &[Verdict]) -> bool {
    if granted > 0 {
        return true;
    }
    match check.mode() {
        Mode::Reset | Mode::Renew | Mode::Release => true,
        Mode::Peek => false,
        // Another policy may have charged its part.
        Mode::Charge => each.iter().any(Verdict::is_allowed),
        // A cost of 0 takes a slot too.
        Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Refund => {
            each.iter().all(Verdict::is_allowed) && check.policies().in_flight().is_some()
        }
    }
}

impl LocalCount {
    /// Returns the state to decide on. A counted state is moved out until it is put back or
    /// replaced. That under a calendar has its clock, which is `ahead`.
    fn take(&mut self, policy: &Policy, now: i64, ahead: i64) -> State {
        match *self {
            Self::Counted(ref mut state) => mem::replace(state, State::fresh(policy.kind())),
            Self::Warmed { until, .. } if until <= now => State::fresh(policy.kind()),
            Self::Warmed {
                remaining,
                writer,
                until,
                ..
            } => {
                let ours = policy.params().capacity;
                let whole = policy.whole().params().capacity.max(1);
                let capacity = writer.numbers().map_or(whole, |[.., capacity]| capacity);
                let used = (capacity - i64::from(remaining)).max(0);
                // Scale the used units to this instance's share. Round up, so that the parts of
                // all instances do not exceed the whole.
                let part = (i128::from(used) * i128::from(ours) + i128::from(whole) - 1)
                    / i128::from(whole);
                let snapshot = Snapshot {
                    used: part as i64,
                    until: policy.params().time(until, ahead),
                    writer,
                };
                State::resume(policy.kind(), policy.params(), now, snapshot)
            }
        }
    }

    /// Returns `true` if another store's answer, which left `remaining`, is older than this one, although
    /// it has arrived later. The newer answer already includes the refill since the older one.
    fn outdates(&self, remaining: i64, now: i64) -> bool {
        match *self {
            Self::Counted(_) => false,
            Self::Warmed {
                remaining: least,
                until,
                seen,
                ..
            } => {
                let is_recent = moment_of(now).wrapping_sub(seen).cast_signed() < MOMENT;
                let counts = until > now;
                i64::from(least) < remaining && is_recent && counts
            }
        }
    }

    /// Puts back a state that was charged nothing. A denied take may have made this policy its writer.
    fn put_back(&mut self, taken: State, policy: &Policy) {
        match self {
            Self::Counted(state) => *state = taken,
            Self::Warmed { writer, .. } => {
                let params = policy.params();
                let was_of_another = policy.frees().is_gradual() && *writer != params.writer;
                // A denial of a faster quota was written, which a warmed count cannot express.
                if was_of_another && taken.is_of(params) {
                    *self = Self::Counted(taken);
                }
            }
        }
    }
}

impl SharedCounts {
    /// Returns the time of calendars.
    fn calendar_micros(&self) -> i64 {
        self.clock.micros() + self.ahead.load(Ordering::Relaxed)
    }
}

impl LocalStore {
    /// Number of keys that the default store holds.
    pub const DEFAULT_KEYS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(99_999);

    /// Creates a store for about this many keys, one per policy of each caller; at least 16, and at most
    /// 4 billion.
    pub fn with_capacity(keys: NonZeroUsize) -> Self {
        // Shards must be large to fill evenly, and to hold all policies of a caller.
        let keys = keys.get();
        let count = bounded_map::shards((keys / 256).min(64), keys);
        let shards = Shards::new(count, |shards| {
            let max = keys.div_ceil(shards).max(Policies::MAX);
            Mutex::new(CountShard {
                ahead: 0,
                states: BoundedMap::new(max),
                answers: BoundedMap::new(max),
            })
        });
        Self {
            shared: Arc::new(SharedCounts {
                shards,
                clock: Clock::new(),
                ahead: AtomicI64::new(0),
                waiters: Waiters::default(),
                blocks: Blocks::local(),
            }),
        }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.shared
            .shards
            .iter()
            .map(|shard| lock(shard).states.len())
            .sum()
    }

    /// Returns `true` if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Locks the shard of a caller; also returns the caller's digest.
    #[inline]
    fn shard(&self, key: &Key) -> (MutexGuard<'_, CountShard>, Digest) {
        let (shard, caller) = self.shared.shards.of(key);
        (lock(shard), caller)
    }

    /// Decides at the time `now`, which is read under the lock: no state is checked at an earlier
    /// time than its own.
    #[inline]
    pub(super) fn verdicts(&self, check: &Check, now: impl FnOnce() -> i64) -> Verdicts {
        let (mut shard, caller) = self.shard(check.key());
        // Under the lock, so that the times of a caller's checks do not go back.
        let now = now();
        shard.ahead = self.shared.ahead.load(Ordering::Relaxed);
        let mut verdicts = match check.id() {
            None => shard.decide(check, caller, now),
            Some(id) => {
                // As in Redis, each list of policies has its own answer per id.
                let of_id = self.shared.shards.digester().pair(check.key(), id);
                let answer = of_id.of_count(counts_of(check.policies()));
                shard.decide_once(check, answer, caller, now)
            }
        };
        verdicts.at = now - verdicts.age;
        verdicts.ahead = shard.ahead;
        verdicts
    }

    /// As [`verdicts`](Self::verdicts), for the [one check](JointCheck::as_one) of several callers, whose shards are all
    /// locked.
    pub(super) fn joint_verdicts(&self, check: &Check, now: impl FnOnce() -> i64) -> Verdicts {
        let Some(joint) = check.joint() else {
            return self.verdicts(check, now);
        };
        let shards = &self.shared.shards;
        let mut indices = SmallVec::<[usize; 4]>::new();
        for key in joint.keys() {
            indices.push(shards.index(shards.digester().digest(key)));
        }
        // Always in this order, and each once: two checks with the same keys never wait for each other.
        indices.sort_unstable();
        indices.dedup();
        let mut guards = SmallVec::<[MutexGuard<'_, CountShard>; 4]>::new();
        for index in &indices {
            guards.extend(shards.iter().nth(*index).map(lock));
        }
        let mut locked: SmallVec<[&mut CountShard; 4]> =
            guards.iter_mut().map(|guard| &mut **guard).collect();
        let now = now();
        let ahead = self.shared.ahead.load(Ordering::Relaxed);
        for shard in &mut locked {
            shard.ahead = ahead;
        }
        let mut places = SmallVec::<[CountPlace; 4]>::new();
        for (key, policy) in joint.key_of_each().zip(check.policies()) {
            let caller = shards.digester().digest(key);
            let index = shards.index(caller);
            places.push(CountPlace {
                shard: indices.partition_point(|locked| *locked < index),
                count: caller.of_count(policy.id()),
            });
        }
        let answer = check.id().map(|id| {
            let of_id = shards.digester().pair(check.key(), id);
            of_id.of_count(counts_of(check.policies()))
        });
        // The answer is in the shard of the first key, like that of a check of this key alone.
        let home = places.first().map_or(0, |place| place.shard);
        let again = answer.and_then(|answer| locked[home].answer(check, answer, now));
        let mut verdicts = match again {
            Some(again) => again,
            None => {
                let verdicts = decide_all(&mut locked, check, &places, now);
                if let Some(answer) = answer {
                    locked[home].remember(check, answer, &verdicts, now);
                }
                verdicts
            }
        };
        verdicts.at = now - verdicts.age;
        verdicts.ahead = ahead;
        verdicts
    }
}

/// Shows the number of keys only.
impl fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalStore")
            .field("keys", &self.len())
            .finish_non_exhaustive()
    }
}

/// Holds up to [`LocalStore::DEFAULT_KEYS`] keys.
impl Default for LocalStore {
    fn default() -> Self {
        Self::with_capacity(Self::DEFAULT_KEYS)
    }
}

impl Store for LocalStore {
    /// Replies are always ready.
    type Future = Pending<Result<Decision, StoreError>>;

    #[inline]
    fn check(&self, check: Check) -> Answer<Self::Future> {
        if let Err(error) = check.prepare(|| self.shared.calendar_micros()) {
            return Answer::ready(Err(error));
        }
        let verdicts = self.verdicts(&check, || self.shared.clock.micros());
        // After the decision: the waiters that it wakes check again immediately.
        if check.gives_room() {
            self.shared.waiters.freed(&check);
        }
        Answer::ready(Ok(check.answer(verdicts, Source::Local)))
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        let check = joint.as_one();
        if let Err(error) = check.prepare(|| self.shared.calendar_micros()) {
            return JointFuture::ready(Err(error));
        }
        let verdicts = self.joint_verdicts(&check, || self.shared.clock.micros());
        JointFuture::ready(Ok(joint.split(check.answer(verdicts, Source::Local))))
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::new(self)
    }
}

impl Hooks for LocalStore {
    fn prepare(&self, check: &Check) -> Result<(), StoreError> {
        check.prepare(|| self.shared.calendar_micros())
    }

    fn waiters(&self) -> Option<Waiters> {
        Some(self.shared.waiters.clone())
    }

    fn blocks(&self) -> Option<Blocks> {
        Some(self.shared.blocks.clone())
    }

    fn warm(&self, key: &Key, decision: &Decision) {
        let now = self.shared.clock.micros();
        if let Some(redis_now) = time_for_calendars(decision) {
            self.shared.ahead.store(redis_now - now, Ordering::Relaxed);
        }
        let (mut shard, caller) = self.shard(key);
        shard.warm(decision, caller, now);
    }
}

/// Returns Redis's time at a decision under a calendar.
fn time_for_calendars(decision: &Decision) -> Option<i64> {
    let verdicts = decision.verdicts();
    if decision.policies().have_calendar() && decision.source() == Source::Redis {
        verdicts.calendar_micros()
    } else {
        None
    }
}

impl CountShard {
    fn decide(&mut self, check: &Check, caller: Digest, now: i64) -> Verdicts {
        // Most checks have one policy, and are decided in place.
        if let [policy] = check.policies().as_slice() {
            return self.decide_one(check, policy, caller.of_count(policy.id()), now);
        }
        let mut places = SmallVec::<[CountPlace; 4]>::new();
        for policy in check.policies() {
            places.push(CountPlace {
                shard: 0,
                count: caller.of_count(policy.id()),
            });
        }
        decide_all(&mut [self], check, &places, now)
    }

    fn state_at(&mut self, place: Option<usize>) -> Option<&mut MapSlot<LocalCount>> {
        self.states.at(place?)
    }

    /// Decides under one policy: in place, if the caller is counted.
    fn decide_one(&mut self, check: &Check, policy: &Policy, count: Digest, now: i64) -> Verdicts {
        let ahead = self.ahead;
        let place = self.states.find(count);
        let mut state = match self.state_at(place) {
            Some(MapSlot {
                value: LocalCount::Counted(state),
                hold,
            }) => {
                let (verdict, granted) = check.decide_one(state, policy, now, ahead);
                // A denial may have extended the count of another calendar.
                if changes(check, granted, &[verdict]) || now + verdict.reset > hold.expires_at() {
                    *hold = hold_counted(state, &verdict, policy, now);
                    // It equals the state of a new caller.
                    if hold.expires_at() <= now {
                        self.states.remove(count);
                    }
                }
                return Verdicts::of_one(granted, verdict);
            }
            Some(slot) => slot.value.take(policy, now, ahead),
            None => State::fresh(policy.kind()),
        };
        let was_of_another = place.is_some() && !state.is_of(policy.params());
        let (verdict, granted) = check.decide_one(&mut state, policy, now, ahead);
        // A denied take of a faster quota becomes the writer.
        let is_rewritten = was_of_another && state.is_of(policy.params());
        if is_rewritten || changes(check, granted, &[verdict]) {
            let hold = hold_counted(&state, &verdict, policy, now);
            let value = LocalCount::Counted(state);
            match place {
                None => self.states.insert(count, value, hold, now),
                Some(_) => self.states.put(count, value, hold, now),
            };
        }
        Verdicts::of_one(granted, verdict)
    }

    fn warm(&mut self, decision: &Decision, caller: Digest, now: i64) {
        for (policy, verdict) in decision.policies().iter().zip(&decision.verdicts().each) {
            if policy.is_in_flight() {
                // A fallback mirrors the slots of requests in flight individually.
                continue;
            }
            // A store outside this crate may report any time; Redis counts turns reserved ahead.
            let ahead = match decision.source() {
                Source::Redis => policy.params().longest,
                _ => 0,
            };
            let verdict = Verdict {
                reset: verdict.reset.min(longest_reset(policy) + ahead),
                ..*verdict
            };
            let key = caller.of_count(policy.id());
            if let Some(slot) = self.states.get(key)
                && slot.value.outdates(verdict.remaining, now)
            {
                continue;
            }
            let followed = LocalCount::Warmed {
                remaining: u32::try_from(verdict.remaining).unwrap_or(u32::MAX),
                writer: policy.params().writer,
                until: now + verdict.reset,
                seen: moment_of(now),
            };
            let hold = hold_of(&verdict, policy, now);
            self.states.put(key, followed, hold, now);
        }
    }

    /// Returns the answer that this id got before, if any; else decides.
    fn decide_once(&mut self, check: &Check, answer: Digest, caller: Digest, now: i64) -> Verdicts {
        if let Some(again) = self.answer(check, answer, now) {
            return again;
        }
        let verdicts = self.decide(check, caller, now);
        self.remember(check, answer, &verdicts, now);
        verdicts
    }

    /// Returns the answer that an id got before, if any.
    fn answer(&self, check: &Check, answer: Digest, now: i64) -> Option<Verdicts> {
        let MapSlot { value, hold } = self.answers.get(answer)?;
        value.again(check, hold.expires_at(), now)
    }

    /// Remembers the answer to an id.
    fn remember(&mut self, check: &Check, answer: Digest, verdicts: &Verdicts, now: i64) {
        if Answered::is_kept(check, verdicts) {
            let value = Answered::new(check, verdicts, now);
            let hold = Hold::new(0, value.until(check.policies()));
            self.answers.put(answer, value, hold, now);
        }
    }
}

/// Decides under several policies. `places` has the count of each.
fn decide_all(
    shards: &mut [&mut CountShard],
    check: &Check,
    places: &[CountPlace],
    now: i64,
) -> Verdicts {
    // All locked shards have one clock.
    let ahead = shards.first().map_or(0, |shard| shard.ahead);
    let mut found = SmallVec::<[Option<usize>; 4]>::new();
    let mut states = SmallVec::<[State; 4]>::new();
    for (policy, CountPlace { shard, count }) in check.policies().iter().zip(places) {
        let shard = &mut shards[*shard];
        let place = shard.states.find(*count);
        states.push(match shard.state_at(place) {
            Some(slot) => slot.value.take(policy, now, ahead),
            None => State::fresh(policy.kind()),
        });
        found.push(place);
    }
    let verdicts = check.decide_by(&mut states, now, ahead);
    let counts = check.policies().iter().zip(places).zip(found);
    if !changes(check, verdicts.granted, &verdicts.each) {
        let decided = states.into_iter().zip(&verdicts.each);
        for ((state, verdict), ((policy, CountPlace { shard, .. }), place)) in decided.zip(counts) {
            if let Some(slot) = shards[*shard].state_at(place) {
                if now + verdict.reset > slot.hold.expires_at() {
                    // A denial has extended the count of another calendar.
                    slot.hold = hold_counted(&state, verdict, policy, now);
                }
                slot.value.put_back(state, policy);
            }
        }
        return verdicts;
    }

    // Update existing entries first: inserting new ones, and removing fresh ones, may move them.
    let mut others = SmallVec::<[(&CountPlace, MapSlot<LocalCount>); 4]>::new();
    let decided = states.into_iter().zip(&verdicts.each);
    for ((state, verdict), ((policy, of_count), place)) in decided.zip(counts) {
        let hold = hold_counted(&state, verdict, policy, now);
        let slot = MapSlot {
            value: LocalCount::Counted(state),
            hold,
        };
        let is_fresh = hold.expires_at() <= now;
        match shards[of_count.shard].state_at(place) {
            Some(existing) if !is_fresh => *existing = slot,
            _ => others.push((of_count, slot)),
        }
    }
    for (CountPlace { shard, count }, MapSlot { value, hold }) in others {
        shards[*shard].states.put(*count, value, hold, now);
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::limit::{Align, Strategy};

    fn ask(store: &LocalStore, check: Check) -> Decision {
        store.check(check).now_or_never().unwrap().unwrap()
    }

    /// The newest of several answers is the one with the least remaining, unless its window has ended.
    #[tokio::test(start_paused = true)]
    async fn continues_from_answers_of_a_new_window() {
        let (there, here) = (LocalStore::default(), LocalStore::default());
        let policies = Policies::from(
            Policy::new("test", Strategy::FixedWindow(Align::FirstHit), "4/300ms").unwrap(),
        );
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        for (elapsed, cost) in [(0, 4), (290, 1), (15, 3)] {
            tokio::time::advance(Duration::from_millis(elapsed)).await;
            here.backend().warm(&Key::GLOBAL, &ask(&there, take(cost)));
        }
        assert_eq!(
            ask(&here, Check::up_to(Key::GLOBAL, &policies, 4)).granted(),
            1
        );
    }

    /// Another quota continues the units that the other store has counted, and drains them at its rate.
    #[tokio::test(start_paused = true)]
    async fn continues_the_units_of_another_quota() {
        for strategy in Strategy::ALL {
            let (there, here) = (LocalStore::default(), LocalStore::default());
            let [old, new] = ["100/d", "40/d"]
                .map(|quota| Policies::from(Policy::new("test", *strategy, quota).unwrap()));
            let used = ask(&there, Check::take(Key::GLOBAL, &old, 30));
            here.backend().warm(&Key::GLOBAL, &used);
            let left = ask(&here, Check::up_to(Key::GLOBAL, &new, 100)).granted();
            assert_eq!(left, 10, "{strategy}");
        }
    }

    /// A caller whose count another store has kept is raised to a faster quota: a denied take drains it at the new rate.
    #[tokio::test(start_paused = true)]
    async fn a_faster_quota_drains_a_followed_count() {
        let gradual = Strategy::ALL
            .iter()
            .filter(|strategy| strategy.frees().is_gradual());
        for strategy in gradual {
            for is_alone in [true, false] {
                let (there, here) = (LocalStore::default(), LocalStore::default());
                let policies = |quota: &str| {
                    let policy = Policy::new("test", *strategy, quota).unwrap();
                    let other = Policy::new("other", *strategy, "100/s").unwrap();
                    if is_alone {
                        policy.into()
                    } else {
                        Policies::new([policy, other]).unwrap()
                    }
                };
                let (old, new) = (policies("10/d"), policies("10/s"));
                let used = ask(&there, Check::take(Key::GLOBAL, &old, 10));
                here.backend().warm(&Key::GLOBAL, &used);
                let take = || ask(&here, Check::take(Key::GLOBAL, &new, 1));
                let wait = take().retry_after().unwrap();
                tokio::time::advance(wait).await;
                assert!(take().is_allowed(), "{strategy}, {is_alone}: {wait:?}");
            }
        }
    }

    /// In an outage, windows follow the last seen difference to Redis's clock.
    #[tokio::test(start_paused = true)]
    async fn calendars_follow_the_clock_of_redis() {
        const HOUR: i64 = 3_600_000_000;
        let days = "fixed-window(day)".parse().unwrap();
        let policies: Policies = Policy::new("plan", days, "5/d").unwrap().into();
        let take = |name: &str| Check::take(Key::new(name), &policies, 4);
        for ahead in [0, 2_000_000, 2 * HOUR, -2 * HOUR, 40 * 24 * HOUR] {
            let store = LocalStore::default();
            let now = store.shared.clock.micros();
            let redis_now = now + ahead;
            let rest = 24 * HOUR - redis_now.rem_euclid(24 * HOUR);
            let mut states = [State::fresh(policies[0].kind())];
            let mut verdicts = take("bob").decide(&mut states, redis_now);
            verdicts.at = redis_now;
            let seen = take("bob").answer(verdicts, Source::Redis);
            Hooks::warm(&store, &Key::new("bob"), &seen);

            let ask = async |name| {
                let decision = store.check(take(name)).await.unwrap();
                let reset = decision.reset_after().as_micros() as i64;
                (decision.is_allowed(), reset)
            };
            assert_eq!(ask("ann").await, (true, rest), "{ahead}");
            assert_eq!(ask("bob").await, (false, rest), "Redis has counted 4");
            tokio::time::advance(Duration::from_micros(rest as u64 - 1)).await;
            for name in ["ann", "bob"] {
                assert_eq!(ask(name).await, (false, 1), "{name} at {ahead}");
            }
            tokio::time::advance(Duration::from_micros(1)).await;
            for name in ["ann", "bob"] {
                assert_eq!(ask(name).await, (true, 24 * HOUR), "{name} at {ahead}");
            }
        }
    }

    /// A count under another calendar, whose day ends an hour earlier, lasts until the end of the check's day: a denial has
    /// said so.
    #[tokio::test(start_paused = true)]
    async fn a_denial_extends_the_count_of_another_calendar() {
        const HOUR: Duration = Duration::from_secs(3_600);
        let plan = |strategy: &str| Policy::new("plan", strategy.parse().unwrap(), "5/d").unwrap();
        let east: Policies = plan("fixed-window(day, +01:00)").into();
        let utc = plan("fixed-window(day)");
        let burst = Policy::new("burst", Strategy::Gcra, "9/s").unwrap();
        let both = Policies::new([burst, utc.clone()]).unwrap();
        for policies in [utc.into(), both] {
            let store = LocalStore::default();
            let now = store.shared.clock.micros();
            let two_hours_to_midnight = 20_000 * 86_400_000_000 - 7_200_000_000;
            let ahead = two_hours_to_midnight - now;
            store.shared.ahead.store(ahead, Ordering::Relaxed);
            let take = |policies| store.check(Check::take(Key::new("ann"), policies, 5));
            let first = take(&east).await.unwrap();
            assert_eq!((first.is_allowed(), first.reset_after()), (true, HOUR));
            let denied = take(&policies).await.unwrap();
            // An extended count ends a microsecond later.
            let more = Duration::from_micros(1);
            assert_eq!(denied.retry_after(), Some(2 * HOUR + more));
            tokio::time::advance(HOUR + HOUR / 2).await;
            let denied = take(&policies).await.unwrap();
            assert_eq!(denied.retry_after(), Some(HOUR / 2 + more));
            tokio::time::advance(HOUR / 2 + Duration::from_millis(1)).await;
            assert!(take(&policies).await.unwrap().is_allowed());
        }
    }
}
