//! A memory of denials, so that a flood of checks that are denied costs Redis next to nothing.
//!
//! With every strategy, what was denied stays denied until its `retry_after`, unless something is refunded or
//! forgotten, or the policies are others. So a caller's denial answers every check of that cost or more under the same
//! policies: one of 2 units that has to wait for 10 s says that 3 units have to wait for 10 s at least. Denials of
//! several costs are kept beside each other, since that of a larger cost holds for longer.
//!
//! Where costs are settled later, or blocks are leased, other instances refund all the time, and nobody tells this one.
//! So a check that reserves, or is under a policy that is leased, believes no denial for longer than a second.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock};

use smallvec::{SmallVec, smallvec};

use crate::limit::{Check, Key, Mode, Policies, Policy, Verdict, Verdicts};
use crate::store::bounded_map::{BoundedMap, Hold, Ranked};
use crate::store::digest::Digest;
use crate::store::freed::gives_room;
use crate::store::shards::Shards;
use crate::util::Clock;

pub(crate) struct DenialCache {
    /// Read by all at once: a flood is mostly on one key.
    shards: Shards<RwLock<Shard>>,
    clock: Clock,
    /// How many callers are held: while there are none, no check looks further.
    held: AtomicUsize,
    /// The most denials of a shard.
    max: usize,
}

#[derive(Debug)]
struct Shard {
    callers: BoundedMap<Caller>,
    /// How many denials they have.
    denials: usize,
    /// When something was last refunded or forgotten: a denial of a call that was sent before may not be true any
    /// more.
    forgot: i64,
}

#[derive(Debug)]
struct Caller {
    denials: SmallVec<[Denial; 1]>,
    /// How many checks this has answered, up to [`MAX_HITS`]; one less for each time it might have had to go.
    hits: AtomicU8,
}

#[derive(Debug)]
struct Denial {
    /// Not a [`Policies`], whose count of references every request writes to: to read it here would wait for them.
    policies: SmallVec<[Policy; 1]>,
    /// Of a check with an id: only that id, since another may have been granted before.
    id: Option<Box<Key>>,
    /// The room that it needs.
    needs: u32,
    /// How many of the policies never have that room. As many never have more room, and those that do are the same.
    exceeds: usize,
    verdicts: Verdicts,
    /// When its call was sent.
    sent: i64,
    expires_at: i64,
}

/// What a check asks, as far as a denial can answer it.
struct Question<'a> {
    policies: &'a Policies,
    id: Option<&'a Key>,
    needs: u32,
}

const SHARDS: usize = 16;
/// The most denials of one caller.
const MAX_OF_ONE: usize = 64;
/// Enough to stay while some thousand other callers are denied. A caller that has so many writes no more hits, which
/// threads would contend for.
const MAX_HITS: u8 = 15;
/// For how long a cost that never fits is remembered: until nothing is charged any more, but not so long that what is
/// told of the rest is of another day, and long enough for a flood of what a fresh caller asks.
const NEVER_FITS: (i64, i64) = (1_000_000, 60_000_000);
/// For how long a denial is believed where others refund, in microseconds.
const SHORT: i64 = 1_000_000;

impl DenialCache {
    /// Holds at most about so many denials; 0 for none.
    pub(crate) fn new(max: usize) -> Self {
        let max = max.div_ceil(SHARDS);
        let shard = |_| RwLock::new(Shard { callers: BoundedMap::new(max), denials: 0, forgot: i64::MIN });
        Self { shards: Shards::new(SHARDS, shard), clock: Clock::new(), held: AtomicUsize::new(0), max }
    }

    /// The time to give to [`learn`](Self::learn).
    pub(crate) fn now(&self) -> i64 {
        self.clock.micros()
    }

    /// The verdicts on this check, if it is known to be denied.
    pub(crate) fn verdicts(&self, check: &Check) -> Option<Verdicts> {
        if self.held.load(Relaxed) == 0 {
            return None;
        }
        let question = Question::of(check)?;
        let (shard, caller) = self.shards.of(check.key());
        let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
        let caller = &shard.callers.get(caller)?.value;
        let now = self.clock.micros();
        // The longest wait that is known to be true.
        let (mut known, mut until) = (None, now);
        for denial in &caller.denials {
            // What never fits is given nothing back for.
            let is_old = denial.exceeds == 0 && now - denial.sent >= SHORT && gets_refunds(check);
            if denial.expires_at > until && !is_old && denial.answers(&question) {
                (known, until) = (Some(denial), denial.expires_at);
            }
        }
        let Denial { verdicts, sent, .. } = known?;
        caller.hit();
        Some(verdicts.later(now - sent))
    }

    /// Learns what Redis decided on a call that was sent at this time.
    pub(crate) fn learn(&self, check: &Check, verdicts: &Verdicts, sent: i64) {
        if self.max == 0 {
            return;
        }
        if gives_room(check) {
            self.forget(check);
        } else if let Some(denial) = Denial::new(check, verdicts, sent) {
            self.change(check.key(), |shard, caller, now| {
                if denial.sent > shard.forgot && denial.expires_at > now {
                    shard.remember(caller, denial, self.max, now);
                }
            });
        } else if let Some(id) = check.id()
            && self.held.load(Relaxed) > 0
        {
            // It was granted, and is from now on told that.
            self.change(check.key(), |shard, caller, _| {
                shard.retain(caller, |denial| denial.id.as_deref() != Some(id))
            });
        }
    }

    /// Something may have been refunded or forgotten, also if Redis has not answered.
    pub(crate) fn forget(&self, check: &Check) {
        if self.max > 0 && gives_room(check) {
            self.change(check.key(), |shard, caller, now| {
                let gone = shard.callers.remove(caller);
                shard.gone(gone);
                shard.forgot = now;
            });
        }
    }

    /// Changes what is known of a caller.
    fn change(&self, key: &Key, change: impl FnOnce(&mut Shard, Digest, i64)) {
        let (shard, caller) = self.shards.of(key);
        let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
        let before = shard.callers.len();
        change(&mut shard, caller, self.clock.micros());
        let after = shard.callers.len();
        if after != before {
            self.held.fetch_add(after.wrapping_sub(before), Relaxed);
        }
    }
}

impl Shard {
    fn remember(&mut self, caller: Digest, denial: Denial, max: usize, now: i64) {
        self.retain(caller, |old| old.expires_at > now);
        if let Some(slot) = self.callers.get_mut(caller) {
            slot.hold = slot.hold.max(denial.hold());
            let denials = &mut slot.value.denials;
            if let Some(known) = denials.iter_mut().find(|known| known.is_replaced_by(&denial)) {
                // Answers of several workers may come in any order.
                if known.sent <= denial.sent {
                    *known = denial;
                }
                return;
            }
            if denials.len() >= max.min(MAX_OF_ONE) {
                // That of an id answers least. Then that of a large cost, which one of a smaller cost may answer too.
                let answers_least = |known: &&mut Denial| (known.id.is_some(), known.exceeds == 0, known.needs);
                if let Some(least) = denials.iter_mut().max_by_key(answers_least)
                    && (least.id.is_some() || denial.id.is_none())
                {
                    *least = denial;
                }
                return;
            }
        }
        if let Some(slot) = self.callers.get(caller) {
            // Or the room might be made of this very caller.
            slot.value.hit();
        }
        while self.denials >= max
            && let Some(gone) = self.callers.make_room(true, now)
        {
            self.gone(Some(gone));
        }
        self.denials += 1;
        if let Some(slot) = self.callers.get_mut(caller) {
            slot.value.denials.push(denial);
        } else {
            let hold = denial.hold();
            let value = Caller { denials: smallvec![denial], hits: AtomicU8::new(0) };
            let gone = self.callers.put(caller, value, hold, now);
            self.gone(gone);
        }
    }

    /// Forgets some of the denials of a caller.
    fn retain(&mut self, caller: Digest, mut keep: impl FnMut(&Denial) -> bool) {
        if let Some(slot) = self.callers.get_mut(caller) {
            let denials = &mut slot.value.denials;
            let before = denials.len();
            denials.retain(|denial| keep(denial));
            self.denials -= before - denials.len();
        }
    }

    /// A caller was dropped.
    fn gone(&mut self, caller: Option<Caller>) {
        self.denials -= caller.map_or(0, |caller| caller.denials.len());
    }
}

impl Caller {
    fn hit(&self) {
        let hits = self.hits.load(Relaxed);
        if hits < MAX_HITS {
            self.hits.store(hits + 1, Relaxed);
        }
    }
}

/// Who is asked least goes first; among equals a newcomer, so that callers who come in turn, more than are held, do not
/// each push out the next.
impl Ranked for Caller {
    const OLD_STAYS: bool = true;

    fn rank(&self, _hold: Hold) -> Hold {
        Hold::new(self.hits.load(Relaxed), 0)
    }

    fn age(&mut self) {
        let hits = self.hits.get_mut();
        *hits = hits.saturating_sub(1);
    }
}

impl<'a> Question<'a> {
    /// None if no denial of before says anything.
    fn of(check: &'a Check) -> Option<Self> {
        let needs = match check.mode() {
            Mode::Take => check.cost(),
            Mode::UpTo => check.cost().min(1),
            // A peek asks how it is at the moment, and a debt depends on more than this.
            Mode::TakeAhead | Mode::Peek | Mode::Charge | Mode::Refund | Mode::Reset | Mode::Renew | Mode::Release => {
                return None;
            }
        };
        Some(Self { policies: check.policies(), id: check.id(), needs })
    }

    /// How many of the policies never have the room that it needs.
    fn exceeds(&self) -> usize {
        self.policies.iter().filter(|policy| policy.never_fits(self.needs)).count()
    }
}

impl Denial {
    /// None if these verdicts are no denial, or one that says nothing of other checks.
    fn new(check: &Check, verdicts: &Verdicts, sent: i64) -> Option<Self> {
        if verdicts.each.iter().all(Verdict::is_allowed) {
            return None;
        }
        let question = Question::of(check)?;
        let exceeds = question.exceeds();
        let Question { policies, id, needs } = question;
        let holds = match exceeds {
            0 => verdicts.wait()?,
            _ => verdicts.each.iter().map(|verdict| verdict.reset).max()?.clamp(NEVER_FITS.0, NEVER_FITS.1),
        };
        let (id, verdicts) = (id.copied().map(Box::new), verdicts.clone());
        let policies = policies.as_slice().into();
        Some(Self { policies, id, needs, exceeds, verdicts, sent, expires_at: sent.saturating_add(holds) })
    }

    fn hold(&self) -> Hold {
        Hold::new(0, self.expires_at)
    }

    #[inline]
    fn answers(&self, question: &Question<'_>) -> bool {
        // What never fits does so at any cost.
        self.is_under(question.policies.as_slice(), question.id)
            && (self.needs == question.needs
                || (self.needs < question.needs || self.exceeds > 0) && self.exceeds == question.exceeds())
    }

    #[inline]
    fn is_under(&self, policies: &[Policy], id: Option<&Key>) -> bool {
        self.id.as_deref() == id && self.policies[..] == *policies
    }

    /// Whether the other answers all that this one does.
    fn is_replaced_by(&self, other: &Self) -> bool {
        self.is_under(&other.policies, other.id.as_deref())
            && self.exceeds == other.exceeds
            && (self.needs == other.needs || self.exceeds > 0)
    }
}

/// Whether other instances refund all the time what is charged as this is.
fn gets_refunds(check: &Check) -> bool {
    check.reserves() || check.policies().iter().any(|policy| policy.lease().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Policy, Strategy};

    fn list(name: &str) -> Policies {
        Policy::new(name, Strategy::Gcra, "100/h".parse().unwrap()).unwrap().into()
    }

    /// Has a check denied, as Redis would.
    fn deny(denials: &DenialCache, check: &Check) {
        let verdict = Verdict { remaining: 0, wait: 3_600_000_000, reset: 3_600_000_000 };
        denials.learn(check, &Verdicts::new(0, smallvec![verdict]), denials.now());
    }

    /// How many denials are held.
    fn held(denials: &DenialCache) -> usize {
        denials.shards.iter().map(|shard| shard.read().unwrap().denials).sum()
    }

    #[test]
    fn denials_under_leases_are_believed_briefly() {
        let leased = Policy::new("leased", Strategy::SlidingLog, "100/h".parse().unwrap()).unwrap();
        let leased = Policies::from(leased.leased(std::time::Duration::from_secs(1)).unwrap());
        let verdict = Verdict { remaining: 0, wait: 3_600_000_000, reset: 3_600_000_000 };
        let verdicts = Verdicts::new(0, smallvec![verdict]);
        for (policies, age, is_known) in
            [(&list("p"), SHORT, true), (&leased, SHORT / 2, true), (&leased, SHORT, false)]
        {
            let (denials, check) = (DenialCache::new(10), Check::take(Key::GLOBAL, policies, 1));
            denials.learn(&check, &verdicts, denials.now() - age);
            assert_eq!(denials.verdicts(&check).is_some(), is_known, "{policies:?} after {age} us");
        }
    }

    #[test]
    fn denials_are_bounded_overall_and_per_caller() {
        let denials = DenialCache::new(1_600);
        let lists: Vec<Policies> = (0..100).map(|i| list(&i.to_string())).collect();
        let mut rng = fastrand::Rng::with_seed(1);
        for cost in (1..=100).rev() {
            for policies in &lists {
                deny(&denials, &Check::take(Key::GLOBAL, policies, cost));
            }
        }
        assert_eq!(held(&denials), MAX_OF_ONE);
        for i in 0..20_000 {
            let check = Check::take(Key::new(format!("{}", rng.u32(..5_000))), &lists[rng.usize(..100)], rng.u32(1..9));
            let check = if i % 3 == 0 { check.with_id(i.to_string()) } else { check };
            deny(&denials, &check);
            assert!(check.id().is_some() || denials.verdicts(&check).is_some(), "the last is known");
        }
        let full = held(&denials);
        assert!((1_500..=1_600).contains(&full), "{full}");
        let reset = Verdicts::new(0, smallvec![Verdict { remaining: 1, wait: 0, reset: 0 }]);
        for key in (0..5_000).map(|i| Key::new(i.to_string())).chain([Key::GLOBAL]) {
            denials.learn(&Check::reset(key, &lists[0]), &reset, denials.now());
        }
        assert_eq!((held(&denials), denials.held.load(Relaxed)), (0, 0));
    }

    /// Ids of which each is denied do not push out what all checks without an id are answered by.
    #[test]
    fn ids_go_first() {
        let (denials, policies) = (DenialCache::new(10_000), list("api"));
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        for cost in (2..=1 + MAX_OF_ONE as u32).rev() {
            deny(&denials, &take(cost));
        }
        for i in 0..1_000 {
            deny(&denials, &take(1).with_id(i.to_string()));
        }
        let caller = denials.shards.of(&Key::GLOBAL);
        let shard = caller.0.read().unwrap();
        let plain = &shard.callers.get(caller.1).unwrap().value.denials;
        assert_eq!(plain.iter().filter(|denial| denial.id.is_none()).count(), MAX_OF_ONE);
    }
}
