use std::mem;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Route;
use super::look::{Look, Seen};
use crate::limit::{Order, Policies};

/// What is known of the requests of one caller under one policy. Pure: the time is an argument.
#[derive(Debug)]
pub(super) struct Entry {
    /// Of one policy.
    policies: Policies,
    lease: Duration,
    /// By what the requests came that are asked about or held, and how many by each. The last one stays.
    routes: SmallVec<[(Arc<Route>, u32); 1]>,
    /// How many the store is being asked about, on each [`Side`] of a look; and how many are being released.
    asked: [u32; 2],
    leaving: [u32; 2],
    /// What is asked now is on this one.
    side: Side,
    /// How many are in flight.
    held: u32,
    /// When to look, since the store may count otherwise.
    doubt: Option<Instant>,
    /// A look, until it is known whether what it has seen is right.
    look: Option<Box<Look>>,
    /// By how much the store counted too many at the last one, or below 0 too few, if it has told right when it
    /// decided.
    surplus: i64,
    /// Whether it tells that.
    is_ordered: bool,
    /// Whether a correction is under way.
    correcting: bool,
    /// When the store last said how many it counts. A take renews what is counted too, but tells nothing of that.
    /// `None`: it is to be asked soon.
    renewed: Option<Instant>,
    /// When the store may last have written what it counts.
    written: Instant,
    /// No look is sent before.
    next_at: Instant,
    /// When nobody had heard an answer last, and when not that of a release: what was sent may come to the store until
    /// [`LATE`] after that, and what a network holds up until [`LATEST`].
    lost: Option<Instant>,
    lost_back: Option<Instant>,
}

/// Before a look was answered, or after it.
pub(super) type Side = usize;

/// Where an answer came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// From where the count is kept; and when it was decided there, if that is told.
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

/// Looks at one entry are so far apart.
const GAP: Duration = Duration::from_millis(25);
/// How late something may come to the store of which nobody has heard.
const LATE: Duration = Duration::from_millis(250);
/// How late it may come if the network lost and repeated it.
const LATEST: Duration = Duration::from_millis(2250);
/// How long a look waits for a moment in which nothing is released, and for those who may have come before it; and how
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
            lease: policies[0].quota().period(),
            policies,
            routes: SmallVec::new(),
            asked: [0; 2],
            leaving: [0; 2],
            side: 0,
            held: 0,
            doubt: None,
            look: None,
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
        self.lease
    }

    pub(super) fn routes(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.routes.iter().map(|(route, _)| route)
    }

    /// The store is about to be asked about a request, under policies that count the same, maybe by another quota. Who
    /// is asked last says how long the store keeps what it counts: so of several lease times it is renewed by the
    /// shortest.
    pub(super) fn ask(&mut self, policies: &Policies, route: &Arc<Route>) -> Side {
        let quota = policies[0].quota();
        if quota.period() < self.lease {
            (self.policies, self.lease) = (policies.clone(), quota.period());
        }
        match self.routes.iter_mut().find(|(other, _)| Arc::ptr_eq(other, route)) {
            Some((_, count)) => *count += 1,
            None => self.routes.push((Arc::clone(route), 1)),
        }
        self.asked[self.side] += 1;
        self.side
    }

    /// The request is in flight.
    pub(super) fn granted(&mut self, side: Side, answered: Origin, now: Instant) {
        self.answered(side);
        self.held += 1;
        self.counts(1, side, answered);
        self.heard(answered, now);
    }

    /// So many more are counted, or fewer: maybe since before a look.
    fn counts(&mut self, more: i64, side: Side, answered: Origin) {
        let is_new = side == self.side;
        if let Some(look) = &mut self.look {
            look.counts(more, is_new, answered.order());
        }
    }

    /// The request is not in flight. What was answered elsewhere the store may have granted. Returns what no request
    /// came by any more.
    #[must_use]
    pub(super) fn denied(
        &mut self,
        side: Side,
        route: &Arc<Route>,
        answered: Origin,
        now: Instant,
    ) -> Option<Arc<Route>> {
        self.answered(side);
        if answered == Origin::Other {
            self.heard(answered, now);
        }
        self.leave(route)
    }

    fn answered(&mut self, side: Side) {
        self.asked[side] = self.asked[side].saturating_sub(1);
    }

    /// Nobody will tell when a request ends. Returns what [`denied`](Self::denied) does.
    #[must_use]
    pub(super) fn left(&mut self, route: &Arc<Route>) -> Option<Arc<Route>> {
        if let Some(look) = &mut self.look {
            look.may_count(-1);
        }
        self.held = self.held.saturating_sub(1);
        self.leave(route)
    }

    /// A request has ended, and is released. Returns what [`denied`](Self::denied) does too.
    pub(super) fn ended(&mut self, route: &Arc<Route>) -> (Side, Option<Arc<Route>>) {
        self.leaving[self.side] += 1;
        self.held = self.held.saturating_sub(1);
        (self.side, self.leave(route))
    }

    fn leave(&mut self, route: &Arc<Route>) -> Option<Arc<Route>> {
        let at = self.routes.iter().position(|(other, _)| Arc::ptr_eq(other, route))?;
        self.routes[at].1 -= 1;
        (self.routes[at].1 == 0 && self.routes.len() > 1).then(|| self.routes.remove(at).0)
    }

    /// What came of giving one back at the time `since`: how many the store had.
    pub(super) fn released(&mut self, side: Side, since: Instant, answered: Origin, had: u32, now: Instant) {
        self.leaving[side] = self.leaving[side].saturating_sub(1);
        self.counts(-1, side, answered);
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

    /// The store may count otherwise: it is to be looked at this time.
    fn doubts(&mut self, at: Instant) {
        self.doubt = Some(self.doubt.map_or(at, |doubt| doubt.min(at)));
    }

    /// Whether the store may count otherwise.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.doubt.is_some() || self.look.as_ref().is_some_and(|look| look.seen.is_some())
    }

    /// The store may have forgotten it.
    pub(super) fn ask_again(&mut self) {
        self.renewed = None;
    }

    /// Whether it is time to look how many the store counts, which renews them: now and then, and if it may count
    /// otherwise. If the store does not tell when it decides, a moment is best in which nothing is released.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_good = |doubt| self.is_ordered || self.leaving == [0; 2] || now >= doubt + PATIENCE;
        let is_doubtful = self.doubt.is_some_and(|doubt| now >= doubt && is_good(doubt));
        let is_old = self.renewed.is_none_or(|renewed| now >= renewed + self.lease / 4);
        let is_free = self.look.is_none() && !self.correcting && now >= self.next_at;
        is_free && (is_doubtful || is_old && self.held > 0)
    }

    /// Begins a look, if it is due. Returns how many it renews.
    pub(super) fn look(&mut self, now: Instant) -> Option<u32> {
        if !self.is_due(now) {
            return None;
        }
        let is_recent = |lost: Option<Instant>| lost.is_some_and(|lost| now < lost + LATE);
        let mut look = Look::new(self.held, self.leaving.iter().sum());
        look.is_doubtful = self.doubt.take().is_some();
        (look.is_early, look.is_unsure) = (is_recent(self.lost), is_recent(self.lost_back));
        look.again_at = self.lost.and_then(|lost| [lost + LATE, lost + LATEST].into_iter().find(|at| now < *at));
        self.look = Some(Box::new(look));
        Some(self.held)
    }

    /// A look was answered: so many the store counts.
    pub(super) fn looked(&mut self, answered: Origin, counted: u32, now: Instant) {
        self.written = now;
        let Origin::Primary(order) = answered else {
            (self.look, self.next_at) = (None, now + LATE);
            return self.doubts(now + LATE);
        };
        (self.renewed, self.is_ordered) = (Some(now), order.is_some());
        // What was asked so long ago that it is on the other side still may have come before the look too.
        let other = 1 - self.side;
        let is_split = self.asked[other] == 0 && self.leaving[other] == 0;
        if is_split {
            self.side = other;
        }
        if let Some(look) = &mut self.look {
            look.sees(Seen { counted: counted.into(), order, at: now, is_split });
        }
    }

    /// By how much the store counts otherwise, once that is known: only what is certain, whatever has come to the store
    /// before the look and what after it. What follows only from the times that the store tells, two looks in a row
    /// have to say.
    pub(super) fn wrong(&mut self, now: Instant) -> Option<Wrong> {
        let Seen { counted, at, is_split, .. } = self.look.as_ref()?.seen?;
        let before = |count: [u32; 2]| count[1 - self.side] + if is_split { 0 } else { count[self.side] };
        let (asked, leaving) = (before(self.asked), before(self.leaving));
        if asked + leaving > 0 && now < at + PATIENCE {
            return None;
        }
        let mut look = self.look.take()?;
        self.next_at = now + GAP;
        look.may_count(asked.into());
        look.may_count(-i64::from(leaving));
        let surplus = look.likely.surplus(counted);
        let last = mem::replace(&mut self.surplus, surplus);
        let wrong = match look.certain.surplus(counted) {
            // Between two looks its clock may have been set, or another server may have taken over.
            0 if last.signum() == surplus.signum() => surplus.signum() * surplus.abs().min(last.abs()),
            certain => certain,
        };
        // Perhaps it is what a release takes away that is still on its way.
        if wrong < 0 || wrong > 0 && !look.is_unsure {
            (self.surplus, self.correcting) = (0, true);
            let count = u32::try_from(wrong.unsigned_abs()).unwrap_or(u32::MAX);
            return Some(if wrong > 0 { Wrong::TooMany(count) } else { Wrong::TooFew(count) });
        }
        // Where all that were held have ended, the look may have come after they were released, and found nothing: then it
        // counts them again.
        let counts_again = look.likely.least <= 0 && counted == i64::from(look.held) && counted > 0;
        let is_open = surplus != 0 || counts_again || look.is_doubtful && look.likely.least < look.likely.most;
        if is_open && !look.is_early {
            self.doubts(now);
        } else if let Some(at) = look.again_at {
            self.doubts(at);
        }
        None
    }

    /// A correction was answered.
    pub(super) fn corrected(&mut self, answered: Origin, now: Instant) {
        (self.correcting, self.next_at) = (false, now + GAP);
        self.heard_back(answered, now);
        // It may not be all, and another store that follows this one has to be told too.
        self.doubts(now);
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        let is_idle = self.is_idle() && self.leaving == [0; 2] && self.look.is_none() && !self.correcting;
        // What nobody has renewed for so long the store has forgotten.
        is_idle && (self.doubt.is_none() || now >= self.written + self.lease)
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

    fn entry() -> (Entry, Arc<Route>, Instant) {
        let (now, policies) = (instant(), Policy::in_flight("streams", 4).unwrap().into());
        let route = Arc::new(Route::new(&LocalStore::default(), None));
        let mut entry = Entry::new(Policies::clone(&policies), now);
        for _ in 0..3 {
            let side = entry.ask(&policies, &route);
            entry.granted(side, THERE, now);
        }
        (entry, route, now)
    }

    fn ask(entry: &mut Entry, route: &Arc<Route>) -> Side {
        let policies = entry.policies().clone();
        entry.ask(&policies, route)
    }

    fn end(entry: &mut Entry, route: &Arc<Route>) -> Side {
        let (side, unused) = entry.ended(route);
        assert!(unused.is_none());
        side
    }

    /// A request that was given up, or one that has begun meanwhile.
    #[tokio::test(start_paused = true)]
    async fn only_certain_differences_are_corrected() {
        let (mut entry, route, now) = entry();
        let side = ask(&mut entry, &route);
        assert!(entry.denied(side, &route, Origin::Other, now).is_none());
        assert_eq!(entry.look(now), Some(3));
        assert!(entry.look(now).is_none(), "one at a time");
        // It may have overtaken the look, or come after it.
        let side = ask(&mut entry, &route);
        entry.granted(side, THERE, now);
        entry.looked(THERE, 4, now);
        assert_eq!(entry.wrong(now), None);
        assert!(entry.look(now + GAP).is_none(), "what was given up may still be on its way");
        let now = now + LATE;
        assert!(entry.look(now).is_some());
        entry.looked(THERE, 5, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(1)));
        assert!(entry.look(now + GAP).is_none(), "it is being corrected");
        entry.corrected(THERE, now);
        let now = now + GAP;
        assert!(entry.look(now).is_some(), "whether it is right now");
        entry.looked(THERE, 4, now);
        assert_eq!(entry.wrong(now), None);
        assert!(entry.look(now + LATE).is_none(), "it is right");
        let now = now + LATEST;
        assert!(entry.look(now).is_some(), "whether something was held up for so long");
        entry.looked(THERE, 4, now);
        assert_eq!((entry.wrong(now), entry.is_in_doubt()), (None, false));
    }

    /// Those who are denied were not counted, whenever they came.
    #[tokio::test(start_paused = true)]
    async fn requests_that_may_precede_a_count_matter() {
        let (mut entry, route, now) = entry();
        entry.ask_again();
        assert!(entry.look(now).is_some());
        let first = [ask(&mut entry, &route), ask(&mut entry, &route)];
        entry.looked(THERE, 6, now);
        let later = ask(&mut entry, &route);
        entry.granted(later, THERE, now);
        assert!(entry.denied(first[0], &route, THERE, now).is_none());
        assert_eq!(entry.wrong(now), None);
        entry.granted(first[1], THERE, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(2)), "of 3, 1 that has begun, and none that came later");
        // One that is never answered is no reason to renew no more.
        entry.corrected(THERE, now);
        let (never, now) = (ask(&mut entry, &route), now + GAP);
        for _ in 0..3 {
            assert!(entry.look(now).is_some());
            entry.looked(THERE, 6, now);
            assert_eq!(entry.wrong(now), None);
            assert_eq!(entry.wrong(now + PATIENCE), None, "it may be counted");
            (entry.next_at, entry.doubt) = (now, Some(now));
        }
        assert!(entry.look(now).is_some());
        entry.granted(never, THERE, now);
        entry.looked(THERE, 6, now);
        assert_eq!(entry.wrong(now), None);
    }

    /// Where requests never pause, some begin and end during each look, and the store tells what came before it.
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
            let (mut entry, route, mut now) = entry();
            for (look, surplus) in surplus.into_iter().enumerate() {
                let at = |time: i64| Origin::Primary(Some((1_000 * look as i64 + time, 0)));
                entry.ask_again();
                assert_eq!(entry.look(now), Some(3));
                let takes = [0; 4].map(|_| ask(&mut entry, &route));
                entry.granted(takes[0], at(1), now);
                entry.granted(takes[1], at(9), now);
                let releases = [0; 4].map(|_| end(&mut entry, &route));
                entry.released(releases[0], now, at(2), 1, now);
                entry.released(releases[1], now, at(8), 1, now);
                entry.looked(at(5), (3 + surplus) as u32, now);
                entry.granted(takes[2], at(3), now);
                entry.granted(takes[3], at(7), now);
                let later = ask(&mut entry, &route);
                entry.granted(later, Origin::Primary(None), now);
                assert_eq!(entry.wrong(now), None, "two may have come before it still");
                entry.released(releases[2], now, at(4), 1, now);
                entry.released(releases[3], now, at(6), 1, now);
                let later = end(&mut entry, &route);
                entry.released(later, now, Origin::Primary(None), 1, now);
                if look == 0 {
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
            let (mut entry, route, now) = entry();
            entry.ask_again();
            assert!(entry.look(now).is_some());
            let side = end(&mut entry, &route);
            entry.released(side, now, THERE, 1, now);
            entry.looked(THERE, counted, now);
            assert_eq!(entry.wrong(now), wrong, "{counted}");
        }
    }

    /// It may come after what ended meanwhile was released: then it finds nothing, and counts all of it again.
    #[tokio::test(start_paused = true)]
    async fn requests_recounted_by_late_renewals_are_released() {
        let (mut entry, route, now) = entry();
        entry.ask_again();
        assert!(entry.look(now).is_some());
        for _ in 0..3 {
            let side = end(&mut entry, &route);
            entry.released(side, now, THERE, 1, now);
        }
        entry.looked(THERE, 3, now);
        assert_eq!(entry.wrong(now), None, "it may have come before, too");
        let now = now + GAP;
        assert!(entry.look(now).is_some(), "whether it counts them still");
        entry.looked(THERE, 3, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(3)));
    }

    /// It would be released twice.
    #[tokio::test(start_paused = true)]
    async fn released_requests_are_no_surplus() {
        let (mut entry, route, now) = entry();
        let side = end(&mut entry, &route);
        entry.ask_again();
        assert_eq!(entry.look(now), Some(2));
        (entry.look, entry.doubt) = (None, Some(now));
        entry.released(side, now, Origin::Other, 0, now);
        for (now, wrong) in [(now, None), (now + LATE, Some(Wrong::TooMany(1)))] {
            assert!(entry.look(now).is_some());
            entry.looked(THERE, 3, now);
            assert_eq!(entry.wrong(now), wrong);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_route_stays_while_it_is_used() {
        let (mut entry, first, now) = entry();
        let second = Arc::new(Route::new(&LocalStore::default(), None));
        let side = ask(&mut entry, &second);
        assert_eq!(entry.routes().count(), 2);
        assert!(entry.denied(side, &second, THERE, now).is_some_and(|route| Arc::ptr_eq(&route, &second)));
        for _ in 0..3 {
            end(&mut entry, &first);
        }
        assert!(entry.routes().all(|route| Arc::ptr_eq(route, &first)), "by it the store is asked");
    }
}
