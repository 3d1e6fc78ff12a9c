use std::mem;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::StoreAccess;
use super::pending_sync::{PendingSync, Seen};
use crate::limit::{Order, Policies};

/// What is known of the requests of one caller under one policy. Pure: the time is an argument.
pub(super) struct Entry {
    /// Of one policy.
    policies: Policies,
    /// The layers whose requests are asked about or held, and how many of each. The last one stays.
    accesses: SmallVec<[(Arc<StoreAccess>, u32); 1]>,
    /// How many the store is being asked about, in each [`Phase`]; and how many are being released.
    asked: [u32; 2],
    leaving: [u32; 2],
    /// What is asked now is in this one.
    phase: Phase,
    /// How many are in flight.
    held: u32,
    /// When to sync, since the store may count otherwise.
    doubt: Option<Instant>,
    /// A sync, until it is known whether what it has seen is right.
    sync: Option<Box<PendingSync>>,
    /// By how much the store counted too many at the last one, or below 0 too few, if it has said when it
    /// decided.
    surplus: i64,
    /// Whether it says that.
    is_ordered: bool,
    /// Whether a correction is under way.
    correcting: bool,
    /// When the store last said how many it counts. A take renews what is counted too, but says nothing of that.
    /// `None`: it is to be asked soon.
    renewed: Option<Instant>,
    /// When the store may last have written what it counts.
    written: Instant,
    /// No sync is sent before.
    next_at: Instant,
    /// When an answer was lost last, and when that of a release: what was sent may come to the store until
    /// [`LATE`] after that, and what a network holds up until [`LATEST`].
    lost: Option<Instant>,
    lost_back: Option<Instant>,
}

/// What is asked before a sync is answered is in one phase, and what is asked after it in the other: 0 or 1.
pub(super) type Phase = usize;

/// Where an answer came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// From where the count is kept; and when it was decided there, if that is known.
    Primary(Option<Order>),
    /// From elsewhere, as in an outage; or it did not come.
    Other,
}

/// By how much the store's count is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    TooMany(u32),
    TooFew(u32),
}

/// Syncs of one entry are so far apart.
const GAP: Duration = Duration::from_millis(25);
/// How late something may come to the store whose answer was lost.
const LATE: Duration = Duration::from_millis(250);
/// How late it may come if the network lost and repeated it.
const LATEST: Duration = Duration::from_millis(2250);
/// How long a sync waits for a moment in which nothing is released, and for those who may have come before it; and how
/// late something may be released.
const PATIENCE: Duration = Duration::from_secs(1);

impl Origin {
    pub(super) fn there(there: bool) -> Self {
        if there { Self::Primary(None) } else { Self::Other }
    }

    fn order(self) -> Option<Order> {
        match self {
            Self::Primary(order) => order,
            Self::Other => None,
        }
    }
}

impl Entry {
    pub(super) fn new(policies: Policies, now: Instant) -> Self {
        Self {
            policies,
            accesses: SmallVec::new(),
            asked: [0; 2],
            leaving: [0; 2],
            phase: 0,
            held: 0,
            doubt: None,
            sync: None,
            surplus: 0,
            is_ordered: true,
            correcting: false,
            renewed: Some(now),
            written: now,
            next_at: now,
            lost: None,
            lost_back: None,
        }
    }

    pub(super) fn policies(&self) -> &Policies {
        &self.policies
    }

    pub(super) fn lease(&self) -> Duration {
        self.policies[0].quota().period()
    }

    pub(super) fn accesses(&self) -> impl Iterator<Item = &Arc<StoreAccess>> {
        self.accesses.iter().map(|(access, _)| access)
    }

    /// The store is about to be asked about a request, under policies that count the same, maybe by another quota. Who
    /// is asked last says how long the store keeps what it counts: so of several lease times it is renewed by the
    /// shortest.
    pub(super) fn ask(&mut self, policies: &Policies, access: &Arc<StoreAccess>) -> Phase {
        if policies[0].quota().period() < self.lease() {
            self.policies = policies.clone();
        }
        match self.accesses.iter_mut().find(|(other, _)| Arc::ptr_eq(other, access)) {
            Some((_, count)) => *count += 1,
            None => self.accesses.push((Arc::clone(access), 1)),
        }
        self.asked[self.phase] += 1;
        self.phase
    }

    /// The request is in flight.
    pub(super) fn granted(&mut self, phase: Phase, answered: Origin, now: Instant) {
        self.answered(phase);
        self.held += 1;
        self.counts(1, phase, answered);
        self.heard(answered, now);
    }

    /// So many more are counted, or fewer: maybe since before a sync.
    fn counts(&mut self, more: i64, phase: Phase, answered: Origin) {
        let is_new = phase == self.phase;
        if let Some(sync) = &mut self.sync {
            sync.counts(more, is_new, answered.order());
        }
    }

    /// The request is not in flight. What was answered elsewhere the store may have granted. Returns what no request
    /// came by any more.
    #[must_use]
    pub(super) fn denied(
        &mut self,
        phase: Phase,
        access: &Arc<StoreAccess>,
        answered: Origin,
        now: Instant,
    ) -> Option<Arc<StoreAccess>> {
        self.answered(phase);
        if answered == Origin::Other {
            self.heard(answered, now);
        }
        self.leave(access)
    }

    fn answered(&mut self, phase: Phase) {
        self.asked[phase] = self.asked[phase].saturating_sub(1);
    }

    /// It is not known when a request ends. Returns what [`denied`](Self::denied) does.
    #[must_use]
    pub(super) fn left(&mut self, access: &Arc<StoreAccess>) -> Option<Arc<StoreAccess>> {
        if let Some(sync) = &mut self.sync {
            sync.may_count(-1);
        }
        self.held = self.held.saturating_sub(1);
        self.leave(access)
    }

    /// A request has ended, and is released. Returns what [`denied`](Self::denied) does too.
    pub(super) fn ended(&mut self, access: &Arc<StoreAccess>) -> (Phase, Option<Arc<StoreAccess>>) {
        self.leaving[self.phase] += 1;
        self.held = self.held.saturating_sub(1);
        (self.phase, self.leave(access))
    }

    fn leave(&mut self, access: &Arc<StoreAccess>) -> Option<Arc<StoreAccess>> {
        let at = self.accesses.iter().position(|(other, _)| Arc::ptr_eq(other, access))?;
        self.accesses[at].1 -= 1;
        (self.accesses[at].1 == 0 && self.accesses.len() > 1).then(|| self.accesses.remove(at).0)
    }

    /// What came of giving one back at the time `since`: how many the store had.
    pub(super) fn released(&mut self, phase: Phase, since: Instant, answered: Origin, had: u32, now: Instant) {
        self.leaving[phase] = self.leaving[phase].saturating_sub(1);
        self.counts(-1, phase, answered);
        self.heard_back(answered, now);
        // Of one that it was late for, the lease time may have ended: then it had others.
        if had == 0 || now > since + PATIENCE {
            self.doubts(now);
        }
    }

    fn heard_back(&mut self, answered: Origin, now: Instant) {
        if answered == Origin::Other {
            self.lost_back = Some(now);
        }
        self.heard(answered, now);
    }

    fn heard(&mut self, answered: Origin, now: Instant) {
        self.written = now;
        if answered == Origin::Other {
            self.lost = Some(now);
            self.doubts(now);
        }
    }

    /// The store may count otherwise: a sync is due at this time.
    fn doubts(&mut self, at: Instant) {
        self.doubt = Some(self.doubt.map_or(at, |doubt| doubt.min(at)));
    }

    /// Whether the store may count otherwise.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.doubt.is_some() || self.sync.as_ref().is_some_and(|sync| sync.seen.is_some())
    }

    /// The store may have forgotten it.
    pub(super) fn ask_again(&mut self) {
        self.renewed = None;
    }

    /// Whether it is time for a sync, which renews what the store counts: now and then, and if it may count
    /// otherwise. If the store does not say when it decides, a moment is best in which nothing is released.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_good = |doubt| self.is_ordered || self.leaving == [0; 2] || now >= doubt + PATIENCE;
        let is_doubtful = self.doubt.is_some_and(|doubt| now >= doubt && is_good(doubt));
        let is_old = self.renewed.is_none_or(|renewed| now >= renewed + self.lease() / 4);
        let is_free = self.sync.is_none() && !self.correcting && now >= self.next_at;
        is_free && (is_doubtful || is_old && self.held > 0)
    }

    /// Begins a sync, if it is due. Returns how many it renews.
    pub(super) fn begin_sync(&mut self, now: Instant) -> Option<u32> {
        if !self.is_due(now) {
            return None;
        }
        let is_recent = |lost: Option<Instant>| lost.is_some_and(|lost| now < lost + LATE);
        let mut sync = PendingSync::new(self.held, self.leaving.iter().sum());
        sync.is_doubtful = self.doubt.take().is_some();
        (sync.is_early, sync.is_unsure) = (is_recent(self.lost), is_recent(self.lost_back));
        sync.again_at = self.lost.and_then(|lost| [lost + LATE, lost + LATEST].into_iter().find(|at| now < *at));
        self.sync = Some(Box::new(sync));
        Some(self.held)
    }

    /// A sync was answered: so many the store counts.
    pub(super) fn synced(&mut self, answered: Origin, counted: u32, now: Instant) {
        self.written = now;
        let Origin::Primary(order) = answered else {
            (self.sync, self.next_at) = (None, now + LATE);
            return self.doubts(now + LATE);
        };
        (self.renewed, self.is_ordered) = (Some(now), order.is_some());
        // What was asked so long ago that it is in the other phase still may have come before the sync too.
        let other = 1 - self.phase;
        let is_split = self.asked[other] == 0 && self.leaving[other] == 0;
        if is_split {
            self.phase = other;
        }
        if let Some(sync) = &mut self.sync {
            sync.sees(Seen { counted: counted.into(), order, at: now, is_split });
        }
    }

    /// By how much the store counts otherwise, once that is known: only what is certain, whatever has come to the store
    /// before the sync and what after it. What follows only from the times that the store says, two syncs in a row
    /// have to show.
    pub(super) fn wrong(&mut self, now: Instant) -> Option<Wrong> {
        let Seen { counted, at, is_split, .. } = self.sync.as_ref()?.seen?;
        let before = |count: [u32; 2]| count[1 - self.phase] + if is_split { 0 } else { count[self.phase] };
        let (asked, leaving) = (before(self.asked), before(self.leaving));
        if asked + leaving > 0 && now < at + PATIENCE {
            return None;
        }
        let mut sync = self.sync.take()?;
        self.next_at = now + GAP;
        sync.may_count(asked.into());
        sync.may_count(-i64::from(leaving));
        let surplus = sync.likely.surplus(counted);
        let last = mem::replace(&mut self.surplus, surplus);
        let wrong = match sync.certain.surplus(counted) {
            // Between two syncs its clock may have been set, or another server may have taken over.
            0 if last.signum() == surplus.signum() => surplus.signum() * surplus.abs().min(last.abs()),
            certain => certain,
        };
        // Perhaps it is what a release takes away that is still on its way.
        if wrong < 0 || wrong > 0 && !sync.is_unsure {
            (self.surplus, self.correcting) = (0, true);
            let count = u32::try_from(wrong.unsigned_abs()).unwrap_or(u32::MAX);
            return Some(if wrong > 0 { Wrong::TooMany(count) } else { Wrong::TooFew(count) });
        }
        // Where all that were held have ended, the sync may have come after they were released, and found nothing: then it
        // counts them again.
        let counts_again = sync.likely.least <= 0 && counted == i64::from(sync.held) && counted > 0;
        let is_open = surplus != 0 || counts_again || sync.is_doubtful && sync.likely.least < sync.likely.most;
        if is_open && !sync.is_early {
            self.doubts(now);
        } else if let Some(at) = sync.again_at {
            self.doubts(at);
        }
        None
    }

    /// A correction was answered.
    pub(super) fn corrected(&mut self, answered: Origin, now: Instant) {
        (self.correcting, self.next_at) = (false, now + GAP);
        self.heard_back(answered, now);
        // It may not be all, and another store that follows this one needs it too.
        self.doubts(now);
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        let is_idle = self.is_idle() && self.leaving == [0; 2] && self.sync.is_none() && !self.correcting;
        // What nobody has renewed for so long the store has forgotten.
        is_idle && (self.doubt.is_none() || now >= self.written + self.lease())
    }

    /// Whether nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.asked == [0; 2] && self.held == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Policy;
    use crate::store::LocalStore;
    use crate::util::instant;

    const THERE: Origin = Origin::Primary(None);

    fn entry() -> (Entry, Arc<StoreAccess>, Instant) {
        let (now, policies) = (instant(), Policy::in_flight("streams", 4).unwrap().into());
        let access = Arc::new(StoreAccess::new(&LocalStore::default(), None));
        let mut entry = Entry::new(Policies::clone(&policies), now);
        for _ in 0..3 {
            let phase = entry.ask(&policies, &access);
            entry.granted(phase, THERE, now);
        }
        (entry, access, now)
    }

    fn ask(entry: &mut Entry, access: &Arc<StoreAccess>) -> Phase {
        let policies = entry.policies().clone();
        entry.ask(&policies, access)
    }

    fn end(entry: &mut Entry, access: &Arc<StoreAccess>) -> Phase {
        let (phase, unused) = entry.ended(access);
        assert!(unused.is_none());
        phase
    }

    /// A request that was given up, or one that has begun meanwhile.
    #[tokio::test(start_paused = true)]
    async fn only_certain_differences_are_corrected() {
        let (mut entry, access, now) = entry();
        let phase = ask(&mut entry, &access);
        assert!(entry.denied(phase, &access, Origin::Other, now).is_none());
        assert_eq!(entry.begin_sync(now), Some(3));
        assert!(entry.begin_sync(now).is_none(), "one at a time");
        // It may have overtaken the sync, or come after it.
        let phase = ask(&mut entry, &access);
        entry.granted(phase, THERE, now);
        entry.synced(THERE, 4, now);
        assert_eq!(entry.wrong(now), None);
        assert!(entry.begin_sync(now + GAP).is_none(), "what was given up may still be on its way");
        let now = now + LATE;
        assert!(entry.begin_sync(now).is_some());
        entry.synced(THERE, 5, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(1)));
        assert!(entry.begin_sync(now + GAP).is_none(), "it is being corrected");
        entry.corrected(THERE, now);
        let now = now + GAP;
        assert!(entry.begin_sync(now).is_some(), "whether it is right now");
        entry.synced(THERE, 4, now);
        assert_eq!(entry.wrong(now), None);
        assert!(entry.begin_sync(now + LATE).is_none(), "it is right");
        let now = now + LATEST;
        assert!(entry.begin_sync(now).is_some(), "whether something was held up for so long");
        entry.synced(THERE, 4, now);
        assert_eq!((entry.wrong(now), entry.is_in_doubt()), (None, false));
    }

    /// Those who are denied were not counted, whenever they came.
    #[tokio::test(start_paused = true)]
    async fn requests_that_may_precede_a_count_matter() {
        let (mut entry, access, now) = entry();
        entry.ask_again();
        assert!(entry.begin_sync(now).is_some());
        let first = [ask(&mut entry, &access), ask(&mut entry, &access)];
        entry.synced(THERE, 6, now);
        let later = ask(&mut entry, &access);
        entry.granted(later, THERE, now);
        assert!(entry.denied(first[0], &access, THERE, now).is_none());
        assert_eq!(entry.wrong(now), None);
        entry.granted(first[1], THERE, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(2)), "of 3, 1 that has begun, and none that came later");
        // One that is never answered is no reason to renew no more.
        entry.corrected(THERE, now);
        let (never, now) = (ask(&mut entry, &access), now + GAP);
        for _ in 0..3 {
            assert!(entry.begin_sync(now).is_some());
            entry.synced(THERE, 6, now);
            assert_eq!(entry.wrong(now), None);
            assert_eq!(entry.wrong(now + PATIENCE), None, "it may be counted");
            (entry.next_at, entry.doubt) = (now, Some(now));
        }
        assert!(entry.begin_sync(now).is_some());
        entry.granted(never, THERE, now);
        entry.synced(THERE, 6, now);
        assert_eq!(entry.wrong(now), None);
    }

    /// Where requests never pause, some begin and end during each sync, and the store says what came before it.
    #[tokio::test(start_paused = true)]
    async fn store_order_requires_two_equal_counts() {
        for (surplus, wrong) in [
            ([2, 2], Some(Wrong::TooMany(2))),
            ([1, 2], Some(Wrong::TooMany(1))),
            ([2, 0], None),
            ([-1, -1], Some(Wrong::TooFew(1))),
            // As when the clock of the store is set.
            ([-1, 1], None),
            ([0, 2], None),
        ] {
            let (mut entry, access, mut now) = entry();
            for (round, surplus) in surplus.into_iter().enumerate() {
                let at = |time: i64| Origin::Primary(Some((1_000 * round as i64 + time, 0)));
                entry.ask_again();
                assert_eq!(entry.begin_sync(now), Some(3));
                let takes = [0; 4].map(|_| ask(&mut entry, &access));
                entry.granted(takes[0], at(1), now);
                entry.granted(takes[1], at(9), now);
                let releases = [0; 4].map(|_| end(&mut entry, &access));
                entry.released(releases[0], now, at(2), 1, now);
                entry.released(releases[1], now, at(8), 1, now);
                entry.synced(at(5), (3 + surplus) as u32, now);
                entry.granted(takes[2], at(3), now);
                entry.granted(takes[3], at(7), now);
                let later = ask(&mut entry, &access);
                entry.granted(later, Origin::Primary(None), now);
                assert_eq!(entry.wrong(now), None, "two may have come before it still");
                entry.released(releases[2], now, at(4), 1, now);
                entry.released(releases[3], now, at(6), 1, now);
                let later = end(&mut entry, &access);
                entry.released(later, now, Origin::Primary(None), 1, now);
                if round == 0 {
                    assert_eq!((entry.wrong(now), entry.is_in_doubt()), (None, surplus != 0));
                }
                now += GAP;
            }
            assert_eq!(entry.wrong(now), wrong, "{surplus:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_ending_during_a_count_are_uncertain() {
        for (counted, wrong) in [(1, Some(Wrong::TooFew(1))), (2, None), (3, None), (4, Some(Wrong::TooMany(1)))] {
            let (mut entry, access, now) = entry();
            entry.ask_again();
            assert!(entry.begin_sync(now).is_some());
            let phase = end(&mut entry, &access);
            entry.released(phase, now, THERE, 1, now);
            entry.synced(THERE, counted, now);
            assert_eq!(entry.wrong(now), wrong, "{counted}");
        }
    }

    /// It may come after what ended meanwhile was released: then it finds nothing, and counts all of it again.
    #[tokio::test(start_paused = true)]
    async fn requests_recounted_by_late_renewals_are_released() {
        let (mut entry, access, now) = entry();
        entry.ask_again();
        assert!(entry.begin_sync(now).is_some());
        for _ in 0..3 {
            let phase = end(&mut entry, &access);
            entry.released(phase, now, THERE, 1, now);
        }
        entry.synced(THERE, 3, now);
        assert_eq!(entry.wrong(now), None, "it may have come before, too");
        let now = now + GAP;
        assert!(entry.begin_sync(now).is_some(), "whether it counts them still");
        entry.synced(THERE, 3, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(3)));
    }

    /// It would be released twice.
    #[tokio::test(start_paused = true)]
    async fn released_requests_are_no_surplus() {
        let (mut entry, access, now) = entry();
        let phase = end(&mut entry, &access);
        entry.ask_again();
        assert_eq!(entry.begin_sync(now), Some(2));
        (entry.sync, entry.doubt) = (None, Some(now));
        entry.released(phase, now, Origin::Other, 0, now);
        for (now, wrong) in [(now, None), (now + LATE, Some(Wrong::TooMany(1)))] {
            assert!(entry.begin_sync(now).is_some());
            entry.synced(THERE, 3, now);
            assert_eq!(entry.wrong(now), wrong);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_access_stays_while_used() {
        let (mut entry, first, now) = entry();
        let second = Arc::new(StoreAccess::new(&LocalStore::default(), None));
        let phase = ask(&mut entry, &second);
        assert_eq!(entry.accesses().count(), 2);
        assert!(entry.denied(phase, &second, THERE, now).is_some_and(|access| Arc::ptr_eq(&access, &second)));
        for _ in 0..3 {
            end(&mut entry, &first);
        }
        assert!(entry.accesses().all(|access| Arc::ptr_eq(access, &first)), "by it the store is asked");
    }
}
