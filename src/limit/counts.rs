use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use smallvec::SmallVec;

use super::{Answered, Check, Decision, Key, Policy, Source, State, Verdicts, micros};

/// The counts of one caller, for a custom in-memory [`Store`](crate::store::Store): keep one
/// `Counts` per key. The counts cannot be serialized. A store that counts elsewhere computes its
/// own decisions: [`Check::decided`].
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
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// The state per policy id.
    states: HashMap<u64, State>,
    /// Decisions on checks with an id, by id and policies, with their expiry in microseconds.
    answers: HashMap<(Key, u64), (Answered, i64)>,
    /// The time in microseconds at which all counts have expired.
    until: i64,
}

impl Counts {
    /// Decides a check of this caller at `now`, and charges what is granted. A clock that goes back
    /// grants nothing extra.
    pub fn decide(&mut self, check: &Check, now: SystemTime, source: Source) -> Decision {
        let now = since_epoch(now);
        check.clone().answer(self.verdicts(check, now), source)
    }

    /// Returns `true` if every charge has expired at `now`, so that the value can be dropped.
    pub fn has_lapsed(&self, now: SystemTime) -> bool {
        self.until <= since_epoch(now)
    }

    fn verdicts(&mut self, check: &Check, now: i64) -> Verdicts {
        let Some(id) = check.id() else {
            return self.charge(check, now);
        };
        let id = (*id, check.policies().id());
        if let Some((answered, until)) = self.answers.get(&id)
            && let Some(again) = answered.again(check, *until, now)
        {
            return again;
        }
        self.answers.retain(|_, (_, until)| *until > now);
        let verdicts = self.charge(check, now);
        if verdicts.granted > 0 {
            let until = now.saturating_add(check.policies().longest_period());
            self.answers
                .insert(id, (Answered::new(check, &verdicts), until));
            self.until = self.until.max(until);
        }
        verdicts
    }

    fn charge(&mut self, check: &Check, now: i64) -> Verdicts {
        let state = |policy: &Policy| {
            self.states
                .remove(&policy.id())
                .unwrap_or_else(|| State::fresh(policy.kind()))
        };
        let mut states: SmallVec<[State; 1]> = check.policies().iter().map(state).collect();
        let verdicts = check.decide(&mut states, now);
        for (policy, state) in check.policies().iter().zip(states) {
            self.states.insert(policy.id(), state);
        }
        let reset = verdicts
            .each
            .iter()
            .map(|verdict| verdict.reset)
            .max()
            .unwrap_or(0);
        self.until = self.until.max(now.saturating_add(reset));
        verdicts
    }
}

/// Returns microseconds since the Unix epoch.
fn since_epoch(time: SystemTime) -> i64 {
    micros(
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO),
    )
}
