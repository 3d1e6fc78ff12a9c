//! A memory of denials, so that a flood on one key costs Redis nothing.
//!
//! With every strategy, what was denied stays denied until its `retry_after`, unless something is given back or
//! forgotten, or the policy is another. A denial of a cost answers every check of that cost or more.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock};

use crate::limit::{Check, Decision, Key, Mode, Policies, Source, Verdicts};
use crate::store::bounded::{Bounded, Slot};
use crate::store::clock::Clock;
use crate::store::digest::{Digest, Digester};

#[derive(Debug)]
pub(super) struct Denials {
    /// Read by all at once: a flood is mostly on one key.
    shards: [RwLock<Shard>; 16],
    digester: Digester,
    clock: Clock,
    /// How many are held: while there are none, no check looks further.
    held: AtomicUsize,
    most: usize,
}

#[derive(Debug)]
struct Shard {
    /// The last denial of each caller.
    denials: Bounded<Denial>,
    /// When something was last given back or forgotten: a denial of a call that was sent before may not be true any
    /// more.
    forgot: i64,
}

#[derive(Debug)]
struct Denial {
    cost: u32,
    policies: Policies,
    verdicts: Verdicts,
    /// When its call was sent.
    sent: i64,
}

impl Denials {
    /// Holds at most so many denials; 0 for none.
    pub(super) fn new(most: usize) -> Self {
        let shard = |_| RwLock::new(Shard { denials: Bounded::new(most.div_ceil(16)), forgot: i64::MIN });
        Self {
            shards: std::array::from_fn(shard),
            digester: Digester::new(),
            clock: Clock::new(),
            held: AtomicUsize::new(0),
            most,
        }
    }

    /// The time to give to [`learn`](Self::learn).
    pub(super) fn now(&self) -> i64 {
        self.clock.micros()
    }

    /// The decision on this check, if it is known to be a denial; else the check.
    pub(super) fn answer(&self, check: Check) -> Result<Decision, Check> {
        match self.verdicts(&check) {
            Some(verdicts) => Ok(check.answer(verdicts, Source::Cached)),
            None => Err(check),
        }
    }

    fn verdicts(&self, check: &Check) -> Option<Verdicts> {
        if self.held.load(Relaxed) == 0 || check.mode() != Mode::Take || check.id_key().is_some() {
            return None;
        }
        let (shard, caller) = self.shard(check.key());
        let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
        let Slot { value: Denial { cost, policies, verdicts, sent }, lapses } = shard.denials.get(caller)?;
        let now = self.clock.micros();
        let same = policies.is(check.policies()) || policies == check.policies();
        // A cost that never fits is denied for another reason.
        let fits = check.policies().iter().all(|policy| check.cost() <= policy.quota().capacity());
        (now < *lapses && check.cost() >= *cost && same && fits).then(|| verdicts.later(now - sent))
    }

    /// Learns what Redis decided on a call that was sent at this time.
    pub(super) fn learn(&self, check: &Check, verdicts: &Verdicts, sent: i64) {
        if self.most == 0 {
            return;
        }
        match (check.mode(), verdicts.wait()) {
            (Mode::GiveBack | Mode::Reset, _) => self.forget(check.key()),
            (Mode::Take, Some(wait)) if check.id_key().is_none() => {
                let (shard, caller) = self.shard(check.key());
                let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
                let now = self.clock.micros();
                let knows_more = |slot: &Slot<Denial>| slot.lapses > now && slot.value.cost < check.cost();
                if sent > shard.forgot && !shard.denials.get(caller).is_some_and(knows_more) {
                    let (cost, policies, verdicts) = (check.cost(), check.policies().clone(), verdicts.clone());
                    let denial = Denial { cost, policies, verdicts, sent };
                    let before = shard.denials.len();
                    shard.denials.put(caller, denial, sent.saturating_add(wait), now);
                    self.count(before, shard.denials.len());
                }
            }
            _ => {}
        }
    }

    fn forget(&self, key: &Key) {
        let (shard, caller) = self.shard(key);
        let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
        let before = shard.denials.len();
        shard.denials.remove(caller);
        shard.forgot = self.clock.micros();
        self.count(before, shard.denials.len());
    }

    fn count(&self, before: usize, after: usize) {
        if after != before {
            self.held.fetch_add(after.wrapping_sub(before), Relaxed);
        }
    }

    /// The shard of a caller, and the caller's digest.
    fn shard(&self, key: &Key) -> (&RwLock<Shard>, Digest) {
        let caller = self.digester.digest(key);
        (&self.shards[caller.part(self.shards.len())], caller)
    }
}
