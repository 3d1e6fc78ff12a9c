use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use smallvec::SmallVec;

use super::policy::COUNT_SEPARATOR;
use super::{
    Answered, Check, Decision, Mode, PolicyKind, Source, State, Verdict, Verdicts, micros,
};

/// The counts of one caller, for a custom [`Store`](crate::store::Store): keep one `Counts` per key.
/// All modes, strategies and ids are decided as in the other stores.
///
/// ```
/// use std::collections::HashMap;
/// use std::future::Pending;
/// use std::sync::{Arc, Mutex, PoisonError};
/// use std::time::SystemTime;
///
/// use tower_redis_ratelimit::Key;
/// use tower_redis_ratelimit::check::{Check, Decision, Source};
/// use tower_redis_ratelimit::store::{Answer, Counts, Store, StoreError};
///
/// /// Counts in this process, and never drops a caller, unlike a `LocalStore`.
/// #[derive(Clone, Default)]
/// struct InMemory(Arc<Mutex<HashMap<Key, Counts>>>);
///
/// impl Store for InMemory {
///     /// It never waits.
///     type Future = Pending<Result<Decision, StoreError>>;
///
///     fn check(&self, check: Check) -> Answer<Self::Future> {
///         let mut callers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         let counts = callers.entry(*check.key()).or_default();
///         Answer::ready(Ok(counts.decide(&check, SystemTime::now(), Source::Other("memory"))))
///     }
/// }
/// ```
///
/// A remote store keeps the counts as [bytes](Self::to_bytes), and writes them by compare-and-swap:
/// it reads the bytes of the caller, decides, and replaces the bytes if they are still the same, or
/// else starts again. `tests/support/remote.rs` is such a store, for a table as in DynamoDB.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// By the name, strategy and span of the policy. Ordered, as `answers`: equal counts have equal
    /// bytes.
    states: BTreeMap<Box<str>, Expiring<State>>,
    /// Decisions on checks with an id, by the policies' keys in `states` and the id.
    answers: BTreeMap<Box<[u8]>, Expiring<Answered>>,
}

/// A value that is dropped when it expires.
#[derive(Debug, Clone)]
struct Expiring<T> {
    value: T,
    /// In microseconds since the Unix epoch.
    until: i64,
}

impl Counts {
    /// Decides a check of this caller at `now`, and charges what is granted. A clock that goes back
    /// grants nothing extra. A [refund](Decision::refund) that arrives late refunds what still counts at
    /// `now`.
    pub fn decide(&mut self, check: &Check, now: SystemTime, source: Source) -> Decision {
        let now = since_epoch(now);
        // An invalid window of a calendar grants nothing.
        let _ = check.prepare(|| now);
        let mut verdicts = self.verdicts(check, now);
        verdicts.at = now - verdicts.age;
        check.clone().answer(verdicts, source)
    }

    /// Returns the time at which all charges and ids have expired, so that the value can be dropped:
    /// the expiry of a stored item.
    pub fn expires_at(&self) -> SystemTime {
        let mut last = 0;
        for state in self.states.values() {
            last = last.max(state.until);
        }
        for answer in self.answers.values() {
            last = last.max(answer.until);
        }
        SystemTime::UNIX_EPOCH + Duration::from_micros(last as u64)
    }

    /// Returns `true` if every charge and id has expired at `now`, so that the value can be dropped.
    pub fn is_expired(&self, now: SystemTime) -> bool {
        self.expires_at() <= now
    }

    /// Returns the counts as bytes: about 40 for each policy, and for each id. A log or sliding
    /// window has 16 for each charge or cell, and requests in flight 24 for each slot. Equal counts
    /// have equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = ByteWriter(vec![VERSION]);
        bytes.len(self.states.len());
        for (key, state) in &self.states {
            bytes.key(key.as_bytes());
            bytes.numbers(&[state.until]);
            let numbers = state.value.to_numbers();
            bytes.len(numbers.len());
            bytes.numbers(&numbers);
        }
        bytes.len(self.answers.len());
        for (key, answer) in &self.answers {
            let Answered {
                charged_at,
                verdicts,
            } = &answer.value;
            bytes.key(key);
            bytes.numbers(&[answer.until, *charged_at, verdicts.granted]);
            bytes.len(verdicts.each.len());
            for verdict in &verdicts.each {
                bytes.numbers(&[verdict.remaining, verdict.reset]);
            }
        }
        bytes.0
    }

    /// Restores counts from their [bytes](Self::to_bytes). `None` for other bytes: report an error
    /// of the store, or start with empty counts. A later version of this crate reads the bytes of
    /// an earlier one, or returns `None`.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes.strip_prefix(&[VERSION])?);
        let mut counts = Self::default();
        for _ in 0..reader.len()? {
            let (key, state) = reader.state()?;
            counts.states.insert(key, state);
        }
        for _ in 0..reader.len()? {
            let (key, answer) = reader.answer()?;
            counts.answers.insert(key, answer);
        }
        // More bytes than counts: of another version, or damaged.
        if !reader.0.is_empty() {
            return None;
        }
        Some(counts)
    }

    fn verdicts(&mut self, check: &Check, now: i64) -> Verdicts {
        // First, so that an expired answer is not repeated.
        self.answers.retain(|_, answer| answer.until > now);
        let Some(id) = check.id() else {
            return self.charge(check, now);
        };
        // With the policies: an id is charged once under each list.
        let mut key = Vec::new();
        for policy in check.policies() {
            key.extend_from_slice(policy.count().as_bytes());
            key.push(b'\n');
        }
        key.extend_from_slice(id.as_bytes());
        if let Some(answer) = self.answers.get(&*key)
            && let Some(again) = answer.value.again(check, answer.until, now)
        {
            return again;
        }
        let verdicts = self.charge(check, now);
        if Answered::is_kept(check, &verdicts) {
            let value = Answered::new(check, &verdicts, now);
            let until = value.until(check.policies());
            self.answers.insert(key.into(), Expiring { value, until });
        }
        verdicts
    }

    fn charge(&mut self, check: &Check, now: i64) -> Verdicts {
        // An expired state equals a fresh one.
        self.states.retain(|_, state| state.until > now);
        let mut states: SmallVec<[State; 1]> = SmallVec::new();
        let mut expiries: SmallVec<[i64; 1]> = SmallVec::new();
        for policy in check.policies() {
            let stored = self.states.remove(policy.count());
            let stored = stored.unwrap_or_else(|| Expiring {
                value: State::fresh(policy.kind()),
                until: 0,
            });
            states.push(stored.value);
            expiries.push(stored.until);
        }
        let verdicts = check.decide(&mut states, now);
        for (i, (policy, value)) in check.policies().iter().zip(states).enumerate() {
            let mut until = now.saturating_add(verdicts.each[i].reset);
            // Keep the expiry after a refund, as Redis does: the window has not started again.
            if check.mode() != Mode::Reset {
                until = until.max(expiries[i]);
            }
            if until > now {
                let count = policy.count().into();
                self.states.insert(count, Expiring { value, until });
            }
        }
        verdicts
    }
}

/// The first byte: the version of the format.
const VERSION: u8 = 3;

struct ByteWriter(Vec<u8>);

impl ByteWriter {
    fn len(&mut self, len: usize) {
        // Saturated: memory holds no 2^32 charges of one caller.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.0.extend_from_slice(&len.to_le_bytes());
    }

    fn key(&mut self, key: &[u8]) {
        self.len(key.len());
        self.0.extend_from_slice(key);
    }

    fn numbers(&mut self, numbers: &[i64]) {
        for number in numbers {
            self.0.extend_from_slice(&number.to_le_bytes());
        }
    }
}

/// Reads [`ByteWriter`]'s bytes. Each method returns `None` if they are damaged.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn state(&mut self) -> Option<(Box<str>, Expiring<State>)> {
        let key = str::from_utf8(self.key()?).ok()?;
        let until = self.number()?;
        let kind = PolicyKind::of_letter(key.split(COUNT_SEPARATOR).nth(1)?)?;
        let len = self.len()?;
        let value = State::of_numbers(kind, &self.numbers(len)?)?;
        Some((key.into(), Expiring { value, until }))
    }

    fn answer(&mut self) -> Option<(Box<[u8]>, Expiring<Answered>)> {
        let key = self.key()?;
        let until = self.number()?;
        let charged_at = self.number()?;
        let granted = self.number()?;
        let mut verdicts = Verdicts::new(granted, SmallVec::new());
        for _ in 0..self.len()? {
            verdicts.each.push(Verdict {
                remaining: self.number()?,
                // A repetition passes: see `Answered::new`.
                wait: 0,
                reset: self.number()?,
            });
        }
        let value = Answered {
            charged_at,
            verdicts,
        };
        Some((key.into(), Expiring { value, until }))
    }

    fn len(&mut self) -> Option<usize> {
        let (len, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        usize::try_from(u32::from_le_bytes(*len)).ok()
    }

    fn key(&mut self) -> Option<&'a [u8]> {
        let len = self.len()?;
        let (key, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(key)
    }

    /// Returns a number that all strategies can calculate with.
    fn number(&mut self) -> Option<i64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        let number = i64::from_le_bytes(*bytes);
        // A damaged number could overflow in the decision.
        if !NUMBERS.contains(&number) {
            return None;
        }
        Some(number)
    }

    fn numbers(&mut self, len: usize) -> Option<Vec<i64>> {
        // The length may be damaged: reserve nothing.
        (0..len).map(|_| self.number()).collect()
    }
}

/// The numbers of a state: exact in a double, as in Redis.
const NUMBERS: std::ops::Range<i64> = 0..1 << 53;

/// Returns microseconds since the Unix epoch.
fn since_epoch(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    micros(since.unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Key, Policies, Policy, Quota, Strategy};

    fn policies() -> Vec<Policies> {
        let quota = Quota::per_minute(100);
        let rates = Strategy::ALL
            .iter()
            .map(|strategy| Policy::new("api", *strategy, quota).unwrap());
        rates
            .chain([Policy::in_flight("api", 100).unwrap()])
            .map(Policies::from)
            .collect()
    }

    fn check(policies: &Policies, rng: &mut fastrand::Rng) -> Check {
        let (key, cost) = (Key::GLOBAL, rng.u32(0..40));
        match rng.u32(0..8) {
            0 => Check::peek(key, policies, cost),
            1 => Check::up_to(key, policies, cost),
            2 => Check::charge(key, policies, cost),
            3 => Check::refund(key, policies, cost / 4),
            4 => Check::take_ahead(key, policies, cost, Duration::from_secs(20)),
            5 if rng.u32(0..10) == 0 => Check::reset(key, policies),
            6 => Check::take(key, policies, cost).with_id([rng.u8(0..5)]),
            _ => Check::take(key, policies, cost),
        }
    }

    /// A bucket drains while the refund is on its way, so that part is not refunded again.
    #[test]
    fn a_late_refund_returns_what_still_counts() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let policies = Policy::new("api", Strategy::Gcra, Quota::per_second(10))
            .unwrap()
            .into();
        for id in [false, true] {
            let mut counts = Counts::default();
            let mut take = Check::take(Key::GLOBAL, &policies, 5);
            if id {
                take = take.with_id("one");
                let _ = counts.decide(&take, start, Source::Other("remote"));
            }
            let sent = start + Duration::from_millis(if id { 100 } else { 0 });
            let taken = counts.decide(&take, sent, Source::Other("remote"));
            assert_eq!((taken.granted(), taken.is_repeated()), (5, id));
            let others = Check::take(Key::GLOBAL, &policies, 5);
            let _ = counts.decide(&others, start + Duration::from_millis(200), Source::Local);
            let refund = taken.refund(Key::GLOBAL, 5, Duration::ZERO).unwrap();
            let late = start + Duration::from_millis(300);
            let refunded = counts.decide(&refund, late, Source::Other("remote"));
            assert_eq!(refunded.granted(), 2, "of 5, 3 have drained");
        }
    }

    /// Each decision on restored counts equals that on the original ones.
    #[test]
    fn bytes_keep_all_counts() {
        let mut rng = fastrand::Rng::with_seed(11);
        for policies in policies() {
            let (mut original, mut bytes) = (Counts::default(), Counts::default().to_bytes());
            let mut now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
            for _ in 0..500 {
                let check = check(&policies, &mut rng);
                let mut restored = Counts::from_bytes(&bytes).unwrap();
                let source = Source::Other("remote");
                let [one, other] = [&mut original, &mut restored].map(|counts| {
                    let decision = counts.decide(&check, now, source);
                    (decision.is_repeated(), decision)
                });
                assert_eq!(one, other, "{check:?}");
                bytes = restored.to_bytes();
                assert_eq!(bytes, original.to_bytes(), "{check:?}");
                now += Duration::from_micros(rng.u64(0..2_000_000));
            }
            assert!(!original.is_expired(now));
            assert!(original.is_expired(original.expires_at()));
        }
    }

    /// Counts that have expired take no bytes.
    #[test]
    fn expired_counts_are_dropped() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        for policies in policies() {
            let mut counts = Counts::default();
            let take = Check::take(Key::GLOBAL, &policies, 10).with_id("one");
            let _ = counts.decide(&take, now, Source::Local);
            assert!(counts.to_bytes().len() > 40);
            let later = counts.expires_at();
            let peek = Check::peek(Key::GLOBAL, &policies, 1);
            let _ = counts.decide(&peek, later, Source::Local);
            assert_eq!(
                counts.to_bytes(),
                Counts::default().to_bytes(),
                "{policies:?}"
            );
        }
    }

    /// Damaged bytes are an error or other counts, never a panic.
    #[test]
    fn damaged_bytes_never_panic() {
        let mut rng = fastrand::Rng::with_seed(12);
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        for policies in policies() {
            let mut counts = Counts::default();
            for _ in 0..20 {
                let _ = counts.decide(&check(&policies, &mut rng), now, Source::Local);
            }
            let bytes = counts.to_bytes();
            for end in 0..bytes.len() {
                assert!(Counts::from_bytes(&bytes[..end]).is_none());
            }
            for _ in 0..2_000 {
                let mut bytes = bytes.clone();
                for _ in 0..rng.u32(1..4) {
                    let at = rng.usize(0..bytes.len());
                    bytes[at] = rng.u8(..);
                }
                if let Some(mut damaged) = Counts::from_bytes(&bytes) {
                    for _ in 0..5 {
                        let check = check(&policies, &mut rng);
                        let _ = damaged.decide(&check, now, Source::Local);
                    }
                    let _ = damaged.expires_at();
                }
            }
        }
    }
}
