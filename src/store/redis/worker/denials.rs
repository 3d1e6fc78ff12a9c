//! A cache of denials, so that a flood of denied checks costs Redis almost nothing.
//!
//! Under every strategy a denied caller stays denied until its `retry_after`, unless a refund or a reset frees
//! capacity. Until then, and for [`MAX_AGE`] at most, a denial answers every check of its cost under the same policies,
//! and of a larger cost whose wait [follows](crate::limit::Verdict::knows_wait_of_larger) from it. Redis decides any other
//! larger cost, and that denial is kept too. With [`MAX_COSTS`] denials, the wait of a larger cost lasts until nothing is
//! charged, which is never too short, so that a client that varies its cost does not reach Redis with each request.
//! [`MAX_AGE`] bounds how long a refund or reset by another instance goes unseen; this instance's own ones drop the
//! caller's denials when they are queued, and again after the reply. Checks with an id are never answered from the cache: the id may have been granted before.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use crate::limit::{Check, Key, Mode, Policies, Policy, Verdicts};
use crate::util::{BoundedMap, Clock, Digest, Hold, Ranked, Shards, bounded_map};

pub(super) struct DenialCache {
    /// A hit needs a read lock only: most floods are on one key, and their checks read concurrently.
    shards: Shards<RwLock<DenialShard>>,
    clock: Clock,
    /// Number of callers in the cache. While it is 0, checks read no shard.
    caller_count: AtomicUsize,
    /// `false` if the cache was created for 0 callers.
    is_on: bool,
}

#[derive(Debug)]
struct DenialShard {
    callers: BoundedMap<DeniedCaller>,
    /// Time of the last refund or reset of the callers with the same [`slot`](freed_slot). A check that was queued before
    /// that may report an outdated denial.
    freed_at: [i64; FREED],
}

#[derive(Debug)]
struct DeniedCaller {
    /// One for each list of policies, at most [`MAX_LISTS`], oldest first.
    lists: SmallVec<[DeniedList; 1]>,
    /// Number of checks answered, at most [`MAX_HITS`]. Reduced by one each time that the caller is a candidate for
    /// eviction.
    hits: AtomicU8,
}

/// The denials of a caller under one list of policies.
#[derive(Debug)]
struct DeniedList {
    /// Not a [`Policies`]: reading its reference count would wait for every request that writes to it.
    policies: SmallVec<[Policy; 1]>,
    /// At most [`MAX_COSTS`], the smallest cost first.
    denials: SmallVec<[Denial; 1]>,
}

#[derive(Debug)]
struct Denial {
    /// The capacity that the denied check needed.
    needs: u32,
    verdicts: Verdicts,
    /// Time at which its call was sent.
    sent: i64,
    expires_at: i64,
}

const SHARDS: usize = 16;
/// Maximum number of lists of one caller.
const MAX_LISTS: usize = 16;
/// Maximum number of denials under one list.
const MAX_COSTS: usize = 4;
/// Cap on `hits`, enough to survive a thousand other denied callers. At the cap the counter is not written, to avoid
/// contention.
const MAX_HITS: u8 = 15;
/// Maximum age of a denial in microseconds.
const MAX_AGE: i64 = 1_000_000;
/// Number of groups of a shard's callers: a refund delays the next denial of its whole group.
const FREED: usize = 64;

impl DenialCache {
    /// Creates a cache of about `max` callers. With 0, it caches nothing.
    pub(super) fn new(max: usize) -> Self {
        let shards = Shards::new(bounded_map::shards(SHARDS, max), |shards| {
            RwLock::new(DenialShard::new(max.div_ceil(shards)))
        });
        Self {
            shards,
            clock: Clock::new(),
            caller_count: AtomicUsize::new(0),
            is_on: max > 0,
        }
    }

    /// Returns the verdicts on this check if a cached denial covers it.
    #[inline]
    pub(super) fn verdicts(&self, check: &Check) -> Option<Verdicts> {
        // Usually no caller is denied: skip the hash and the lock. An id may repeat a grant from before the denial.
        if self.caller_count.load(Relaxed) == 0 || check.id().is_some() {
            return None;
        }
        let needs = needs(check)?;
        let (shard, caller) = self.shards.of(check.key());
        let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
        let caller = &shard.callers.get(caller)?.value;
        let mut lists = caller.lists.iter();
        let list = lists.find(|list| list.policies[..] == *check.policies().as_slice())?;
        let verdicts = list.verdicts_on(needs, self.clock.micros())?;
        caller.hit();
        Some(verdicts)
    }

    /// Records Redis's denial of a check, if it can answer other checks. The check was queued at `queued`, and its call
    /// was sent at `sent`.
    pub(super) fn learn(&self, check: &Check, verdicts: &Verdicts, queued: Instant, sent: Instant) {
        if !self.is_on {
            return;
        }
        let queued = self.clock.micros_at(queued);
        if let Some(denial) = Denial::new(check, verdicts, self.clock.micros_at(sent)) {
            self.change(check.key(), |shard, caller, now| {
                // A check that was queued before a refund may have been decided before it.
                if queued > shard.freed_at[freed_slot(caller)] && denial.expires_at > now {
                    shard.remember(caller, check.policies(), denial, now);
                }
            });
        }
    }

    /// Drops the denials of a caller whose check will free capacity, or may have freed it.
    pub(super) fn forget(&self, caller: &Key) {
        if self.is_on {
            self.change(caller, |shard, caller, now| {
                shard.callers.remove(caller);
                shard.freed_at[freed_slot(caller)] = now;
            });
        }
    }

    /// Calls `change` with the locked shard that has this caller, then updates `caller_count`.
    fn change(&self, key: &Key, change: impl FnOnce(&mut DenialShard, Digest, i64)) {
        let (shard, caller) = self.shards.of(key);
        let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
        let before = shard.callers.len();
        change(&mut shard, caller, self.clock.micros());
        let after = shard.callers.len();
        if after != before {
            // The difference may be negative: the addition wraps.
            self.caller_count
                .fetch_add(after.wrapping_sub(before), Relaxed);
        }
    }
}

/// The group of a caller within its shard. It uses the word that selects no shard.
fn freed_slot(caller: Digest) -> usize {
    caller.hash() as usize % FREED
}

impl DenialShard {
    fn new(max_callers: usize) -> Self {
        Self {
            callers: BoundedMap::new(max_callers),
            freed_at: [i64::MIN; FREED],
        }
    }

    fn remember(&mut self, caller: Digest, policies: &Policies, denial: Denial, now: i64) {
        let hold = Hold::new(0, denial.expires_at);
        let policies = policies.as_slice();
        let Some(slot) = self.callers.get_mut(caller) else {
            let lists = smallvec![DeniedList::new(policies, denial)];
            let hits = AtomicU8::new(0);
            self.callers
                .put(caller, DeniedCaller { lists, hits }, hold, now);
            return;
        };
        slot.hold = slot.hold.max(hold);
        let lists = &mut slot.value.lists;
        for list in &mut *lists {
            list.denials.retain(|known| known.expires_at > now);
        }
        // A caller whose lists change often keeps the memory of the current ones only.
        lists.retain(|list| !list.denials.is_empty());
        // The newest list is the last one, and the first one is dropped if there are too many.
        if let Some(place) = lists.iter().position(|list| list.policies[..] == *policies) {
            let mut list = lists.remove(place);
            list.remember(denial);
            lists.push(list);
        } else {
            if lists.len() >= MAX_LISTS {
                lists.remove(0);
            }
            lists.push(DeniedList::new(policies, denial));
        }
    }
}

impl DeniedCaller {
    fn hit(&self) {
        // Not one atomic step: a hit that another thread overwrites does no harm.
        let hits = self.hits.load(Relaxed);
        if hits < MAX_HITS {
            self.hits.store(hits + 1, Relaxed);
        }
    }
}

/// Evicts the caller with the fewest hits. Among equals the newcomer is evicted; otherwise callers in rotation, if too
/// many to fit, would evict each other before any hit.
impl Ranked for DeniedCaller {
    const OLD_STAYS: bool = true;

    fn rank(&self, _hold: Hold) -> Hold {
        Hold::new(self.hits.load(Relaxed), 0)
    }

    fn age(&mut self) {
        let hits = self.hits.get_mut();
        *hits = hits.saturating_sub(1);
    }
}

/// The capacity that a check needs. `None` if a cached denial must not answer it.
fn needs(check: &Check) -> Option<u32> {
    match check.mode() {
        Mode::Take => Some(check.cost()),
        Mode::UpTo => Some(check.cost().min(1)),
        // A peek reads the current state, and a debt depends on more than the free capacity.
        Mode::TakeAhead
        | Mode::Peek
        | Mode::Charge
        | Mode::Refund
        | Mode::Reset
        | Mode::Renew
        | Mode::Release => None,
    }
}

impl DeniedList {
    fn new(policies: &[Policy], denial: Denial) -> Self {
        Self {
            policies: policies.into(),
            denials: smallvec![denial],
        }
    }

    /// Adds a denial. The smaller costs answer more checks.
    fn remember(&mut self, denial: Denial) {
        match self
            .denials
            .binary_search_by_key(&denial.needs, |known| known.needs)
        {
            // Replies of different workers arrive in any order.
            Ok(same) if self.denials[same].sent > denial.sent => {}
            Ok(same) => self.denials[same] = denial,
            Err(place) => {
                self.denials.insert(place, denial);
                self.denials.truncate(MAX_COSTS);
            }
        }
    }

    /// Returns the verdicts on a check that needs this capacity, by the nearest denial of a cost at or below it. `None` if
    /// Redis must decide.
    #[inline]
    fn verdicts_on(&self, needs: u32, now: i64) -> Option<Verdicts> {
        let known = self.denials.iter().filter(|denial| denial.expires_at > now);
        // A larger cost is denied too, for at least as long.
        let nearest = known.clone().rfind(|denial| denial.needs <= needs)?;
        let mut verdicts = nearest.verdicts.later(now - nearest.sent);
        if needs > nearest.needs {
            // With fewer denials, Redis may decide, and its denial of this cost is kept too.
            if !nearest.is_exact_for(needs, &self.policies) && known.count() < MAX_COSTS {
                return None;
            }
            for (verdict, policy) in verdicts.each.iter_mut().zip(&self.policies) {
                verdict.wait = verdict.wait_of_larger(policy, needs);
            }
        }
        Some(verdicts)
    }
}

impl Denial {
    /// Returns `None` if the denial of this check cannot answer other checks.
    fn new(check: &Check, verdicts: &Verdicts, sent: i64) -> Option<Self> {
        let needs = needs(check)?;
        // A cost above the capacity has no wait. It stays denied as long as the cache may keep it.
        let holds = match verdicts.wait() {
            Some(wait) => wait.min(MAX_AGE),
            None => MAX_AGE,
        };
        Some(Self {
            needs,
            verdicts: verdicts.clone(),
            sent,
            expires_at: sent.saturating_add(holds),
        })
    }

    /// Returns `true` if the wait of a larger cost follows from this denial.
    fn is_exact_for(&self, needs: u32, policies: &[Policy]) -> bool {
        let mut each = self.verdicts.each.iter().zip(policies);
        each.all(|(verdict, policy)| verdict.knows_wait_of_larger(policy, needs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Strategy, Verdict};
    use crate::util::instant;

    const HOUR: i64 = 3_600_000_000;

    fn list(name: &str) -> Policies {
        Policy::new(name, Strategy::Gcra, "100/h").unwrap().into()
    }

    /// Redis's verdicts on a check that is denied for `wait`.
    fn denied(wait: i64) -> Verdicts {
        Verdicts::new(
            0,
            smallvec![Verdict {
                remaining: 0,
                wait,
                reset: HOUR
            }],
        )
    }

    fn deny(denials: &DenialCache, check: &Check) {
        denials.learn(check, &denied(HOUR), instant(), instant());
    }

    fn count(denials: &DenialCache) -> usize {
        denials
            .shards
            .iter()
            .map(|shard| shard.read().unwrap().callers.len())
            .sum()
    }

    #[tokio::test(start_paused = true)]
    async fn denials_expire_within_a_second() {
        let policies = list("p");
        let check = Check::take(Key::GLOBAL, &policies, 1);
        for (wait, holds) in [
            (HOUR, MAX_AGE),
            (MAX_AGE / 2, MAX_AGE / 2),
            (Verdict::NEVER, MAX_AGE),
        ] {
            let denials = DenialCache::new(10);
            denials.learn(&check, &denied(wait), instant(), instant());
            for (rest, is_known) in [(holds - 1_000, true), (1_000, false)] {
                tokio::time::advance(std::time::Duration::from_micros(rest as u64)).await;
                assert_eq!(
                    denials.verdicts(&check).is_some(),
                    is_known,
                    "{wait}, {rest}"
                );
            }
        }
    }

    #[test]
    fn the_denial_of_the_nearest_smaller_cost_answers() {
        let (denials, policies) = (DenialCache::new(10), list("p"));
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        let wait = |cost| {
            denials
                .verdicts(&take(cost))
                .map(|verdicts| verdicts.each[0].wait == Verdict::NEVER)
        };
        denials.learn(&take(101), &denied(Verdict::NEVER), instant(), instant());
        assert_eq!(
            (wait(101), wait(102), wait(5)),
            (Some(true), Some(true), None)
        );
        deny(&denials, &take(5).with_id("a"));
        assert_eq!(
            (wait(5), wait(7), wait(101), wait(4)),
            (Some(false), Some(false), Some(true), None)
        );
        deny(&denials, &take(7));
        assert_eq!((wait(5), wait(4)), (Some(false), None));
        assert!(
            denials.verdicts(&take(5).with_id("a")).is_none(),
            "the id may have been granted before"
        );
        assert!(
            denials
                .verdicts(&Check::take(Key::GLOBAL, &list("q"), 9))
                .is_none()
        );
    }

    #[test]
    fn denials_are_bounded_overall_and_per_caller() {
        let denials = DenialCache::new(1_600);
        let lists: Vec<Policies> = (0..100).map(|i| list(&i.to_string())).collect();
        for policies in &lists {
            deny(&denials, &Check::take(Key::GLOBAL, policies, 1));
        }
        let known = lists.iter().filter(|list| {
            denials
                .verdicts(&Check::take(Key::GLOBAL, list, 1))
                .is_some()
        });
        assert_eq!(known.count(), MAX_LISTS);
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let check = Check::take(
                Key::new(format!("{}", rng.u32(..5_000))),
                &lists[rng.usize(..100)],
                rng.u32(1..9),
            );
            deny(&denials, &check);
            assert!(denials.verdicts(&check).is_some(), "the last one answers");
        }
        let full = count(&denials);
        assert!((1_500..=1_600).contains(&full), "{full}");
        for key in (0..5_000)
            .map(|i| Key::new(i.to_string()))
            .chain([Key::GLOBAL])
        {
            denials.forget(&key);
        }
        assert_eq!(
            (count(&denials), denials.caller_count.load(Relaxed)),
            (0, 0)
        );
    }
}
