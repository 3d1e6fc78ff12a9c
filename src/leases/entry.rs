use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Route;
use crate::limit::Policies;

/// What is known of the requests of one caller under one policy. Pure: the time is an argument.
#[derive(Debug)]
pub(super) struct Entry {
    /// Of one policy.
    policies: Policies,
    lease: Duration,
    /// By what the requests came that are asked about or held, and how many by each. The last one stays.
    routes: SmallVec<[(Arc<Route>, u32); 1]>,
    /// How many the store is being asked about, on each [`Side`] of a look.
    asked: [u32; 2],
    /// Who is asked about now is on this one.
    side: Side,
    /// How many are in flight.
    held: u32,
    /// How many are being given back.
    leaving: u32,
    /// When to look, since the store may count otherwise.
    doubt: Option<Instant>,
    /// Whether a look or a correction is under way.
    looking: bool,
    /// What a look has said, until all are answered that may have come before it.
    seen: Option<Seen>,
    /// When the store last said how many it counts. A take renews what is counted too, but tells nothing of that. `None`: it
    /// is to be asked soon.
    renewed: Option<Instant>,
    /// When the store may last have written what it counts.
    written: Instant,
    /// No look is sent before.
    next_at: Instant,
    /// When nobody had heard an answer last, and when not that of a give-back: what was sent may come to the store until
    /// [`LATE`] after that, and what a network holds up until [`LATEST`].
    lost: Option<Instant>,
    lost_back: Option<Instant>,
    /// How many requests have begun that may have come before the last look, and how many have ended.
    begun: u64,
    ended: u64,
}

/// Before a look was answered, or after it.
pub(super) type Side = usize;

/// Where an answer came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answered {
    /// From where the count is kept.
    There,
    /// From elsewhere, as in an outage; or it did not come.
    Elsewhere,
}

/// What was known when a look was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    pub(super) held: u32,
    leaving: u32,
    begun: u64,
    ended: u64,
    /// Whether the store may have counted otherwise.
    is_doubtful: bool,
    /// Whether something that was sent before may come after it, and whether that is a give-back.
    is_early: bool,
    is_unsure: bool,
    /// When more of what was sent before has come.
    again_at: Option<Instant>,
}

/// What a look has said.
#[derive(Debug, Clone, Copy)]
struct Seen {
    look: Look,
    counted: u32,
    /// The store has to count as many.
    least: u32,
    at: Instant,
    /// Whether those who are asked about from then on are on another side.
    is_split: bool,
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
const LATEST: Duration = Duration::from_secs(2);
/// How long a look waits for a moment in which nothing is given back, and for those who may have come before it; and how late
/// something may be given back.
const PATIENCE: Duration = Duration::from_secs(1);

impl Answered {
    pub(super) fn there(there: bool) -> Self {
        if there { Self::There } else { Self::Elsewhere }
    }
}

impl Entry {
    pub(super) fn new(policies: Policies, now: Instant) -> Self {
        Self {
            lease: policies[0].quota().period(),
            policies,
            routes: SmallVec::new(),
            asked: [0; 2],
            side: 0,
            held: 0,
            leaving: 0,
            doubt: None,
            looking: false,
            seen: None,
            renewed: Some(now),
            written: now,
            next_at: now,
            lost: None,
            lost_back: None,
            begun: 0,
            ended: 0,
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

    /// The store is about to be asked about a request, under policies that count the same, maybe by another quota. Who is
    /// asked last says how long the store keeps what it counts: so of several lease times it is renewed by the shortest.
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
    pub(super) fn granted(&mut self, side: Side, answered: Answered, now: Instant) {
        self.answered(side);
        self.held += 1;
        let is_later = self.seen.is_some_and(|seen| seen.is_split && side == self.side);
        self.begun += u64::from(!is_later);
        self.heard(answered, now);
    }

    /// The request is not in flight. What was answered elsewhere the store may have granted. Returns what no request came by
    /// any more.
    #[must_use]
    pub(super) fn denied(
        &mut self,
        side: Side,
        route: &Arc<Route>,
        answered: Answered,
        now: Instant,
    ) -> Option<Arc<Route>> {
        self.answered(side);
        if answered == Answered::Elsewhere {
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
        self.held = self.held.saturating_sub(1);
        self.ended += 1;
        self.leave(route)
    }

    /// A request has ended, and is given back. Returns what [`denied`](Self::denied) does.
    #[must_use]
    pub(super) fn ended(&mut self, route: &Arc<Route>) -> Option<Arc<Route>> {
        self.leaving += 1;
        self.left(route)
    }

    fn leave(&mut self, route: &Arc<Route>) -> Option<Arc<Route>> {
        let at = self.routes.iter().position(|(other, _)| Arc::ptr_eq(other, route))?;
        self.routes[at].1 -= 1;
        (self.routes[at].1 == 0 && self.routes.len() > 1).then(|| self.routes.remove(at).0)
    }

    /// What came of giving one back at the time `since`: how many the store had.
    pub(super) fn gave_back(&mut self, since: Instant, answered: Answered, had: u32, now: Instant) {
        self.leaving = self.leaving.saturating_sub(1);
        self.heard_back(answered, now);
        // Of one that it was late for, the lease time may have ended: then it had others.
        if had == 0 || now > since + PATIENCE {
            self.doubts(now);
        }
    }

    fn heard_back(&mut self, answered: Answered, now: Instant) {
        if answered == Answered::Elsewhere {
            self.lost_back = Some(now);
        }
        self.heard(answered, now);
    }

    fn heard(&mut self, answered: Answered, now: Instant) {
        self.written = now;
        if answered == Answered::Elsewhere {
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
        self.doubt.is_some() || self.seen.is_some()
    }

    /// The store may have forgotten it.
    pub(super) fn ask_again(&mut self) {
        self.renewed = None;
    }

    /// Whether it is time to look how many the store counts, which renews them: now and then, and if it may count otherwise.
    /// Then a moment is best in which nothing is given back.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_doubtful =
            self.doubt.is_some_and(|doubt| now >= doubt && (self.leaving == 0 || now >= doubt + PATIENCE));
        let is_old = self.renewed.is_none_or(|renewed| now >= renewed + self.lease / 4);
        !self.looking && now >= self.next_at && (is_doubtful || is_old && self.held > 0)
    }

    /// Begins a look, if it is due.
    pub(super) fn look(&mut self, now: Instant) -> Option<Look> {
        if !self.is_due(now) {
            return None;
        }
        self.looking = true;
        let is_recent = |lost: Option<Instant>| lost.is_some_and(|lost| now < lost + LATE);
        let (is_early, is_unsure) = (is_recent(self.lost), is_recent(self.lost_back));
        let again_at = self.lost.and_then(|lost| [lost + LATE, lost + LATEST].into_iter().find(|at| now < *at));
        let is_doubtful = self.doubt.take().is_some();
        let &mut Self { held, leaving, begun, ended, .. } = self;
        Some(Look { held, leaving, begun, ended, is_doubtful, is_early, is_unsure, again_at })
    }

    /// A look was answered: so many the store counts.
    pub(super) fn looked(&mut self, look: Look, answered: Answered, counted: u32, now: Instant) {
        self.written = now;
        if answered == Answered::Elsewhere {
            self.looking = false;
            self.next_at = now + LATE;
            return self.doubts(now + LATE);
        }
        self.renewed = Some(now);
        let least = look.held.saturating_sub(since(self.ended, look.ended));
        // One who was asked about so long ago that he is on the other side still may have come before the look too.
        let is_split = self.asked[1 - self.side] == 0;
        if is_split {
            self.side = 1 - self.side;
        }
        self.seen = Some(Seen { look, counted, least, at: now, is_split });
    }

    /// By how much the store counts otherwise, once that is known: only what is certain, whatever has come to the store before
    /// the look and what after it.
    pub(super) fn wrong(&mut self, now: Instant) -> Option<Wrong> {
        let Seen { look, counted, least, at, is_split } = self.seen?;
        let before = self.asked[1 - self.side] + if is_split { 0 } else { self.asked[self.side] };
        if before > 0 && now < at + PATIENCE {
            return None;
        }
        (self.seen, self.looking, self.next_at) = (None, false, now + GAP);
        let begun = since(self.begun, look.begun).saturating_add(before);
        let most = look.held.saturating_add(look.leaving).saturating_add(begun);
        let wrong = match counted {
            _ if counted < least => Wrong::TooFew(least - counted),
            // Perhaps it is what a give-back takes away that is still on its way.
            _ if counted > most && !look.is_unsure => Wrong::TooMany(counted - most),
            _ => {
                // Where all that were held have ended, the look may have come after they were given back, and found nothing:
                // then it counts them again.
                let counts_again = least == 0 && counted == look.held && counted > 0;
                let is_open = counted > most || counts_again || look.is_doubtful && least < most;
                if is_open && !look.is_early {
                    self.doubts(now);
                } else if let Some(at) = look.again_at {
                    self.doubts(at);
                }
                return None;
            }
        };
        self.looking = true;
        Some(wrong)
    }

    /// A correction was answered.
    pub(super) fn corrected(&mut self, answered: Answered, now: Instant) {
        (self.looking, self.next_at) = (false, now + GAP);
        self.heard_back(answered, now);
        // It may not be all, and another store that follows this one has to be told too.
        self.doubts(now);
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        let is_idle = self.is_idle() && self.leaving == 0 && !self.looking;
        // What nobody has renewed for so long the store has forgotten.
        is_idle && (self.doubt.is_none() || now >= self.written + self.lease)
    }

    /// Whether nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.asked == [0; 2] && self.held == 0
    }
}

fn since(now: u64, then: u64) -> u32 {
    u32::try_from(now - then).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Policy;
    use crate::store::{LocalStore, instant};

    fn entry() -> (Entry, Arc<Route>, Instant) {
        let (now, policies) = (instant(), Policy::in_flight("streams", 4).unwrap().into());
        let route = Arc::new(Route::new(&LocalStore::default(), None));
        let mut entry = Entry::new(Policies::clone(&policies), now);
        for _ in 0..3 {
            let side = entry.ask(&policies, &route);
            entry.granted(side, Answered::There, now);
        }
        (entry, route, now)
    }

    fn ask(entry: &mut Entry, route: &Arc<Route>) -> Side {
        let policies = entry.policies().clone();
        entry.ask(&policies, route)
    }

    /// A request that was given up, or one that has begun meanwhile.
    #[tokio::test(start_paused = true)]
    async fn only_what_is_certain_is_corrected() {
        let (mut entry, route, now) = entry();
        let side = ask(&mut entry, &route);
        assert!(entry.denied(side, &route, Answered::Elsewhere, now).is_none());
        let look = entry.look(now).unwrap();
        assert!(look.held == 3 && entry.look(now).is_none(), "one at a time");
        // It may have overtaken the look, or come after it.
        let side = ask(&mut entry, &route);
        entry.granted(side, Answered::There, now);
        entry.looked(look, Answered::There, 4, now);
        assert_eq!(entry.wrong(now), None);
        assert!(entry.look(now + GAP).is_none(), "what was given up may still be on its way");
        let now = now + LATE;
        let look = entry.look(now).unwrap();
        entry.looked(look, Answered::There, 5, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(1)));
        assert!(entry.look(now + GAP).is_none(), "it is being corrected");
        entry.corrected(Answered::There, now);
        let now = now + GAP;
        let look = entry.look(now).expect("whether it is right now");
        entry.looked(look, Answered::There, 4, now);
        assert_eq!(entry.wrong(now), None);
        assert!(entry.look(now + LATE).is_none(), "it is right");
        let now = now + LATEST;
        let look = entry.look(now).expect("whether something was held up for so long");
        entry.looked(look, Answered::There, 4, now);
        assert_eq!((entry.wrong(now), entry.is_in_doubt()), (None, false));
    }

    /// Those who are denied were not counted, whenever they came.
    #[tokio::test(start_paused = true)]
    async fn who_may_have_come_before_a_look_is_waited_for() {
        let (mut entry, route, now) = entry();
        entry.ask_again();
        let look = entry.look(now).unwrap();
        let first = [ask(&mut entry, &route), ask(&mut entry, &route)];
        entry.looked(look, Answered::There, 6, now);
        let later = ask(&mut entry, &route);
        entry.granted(later, Answered::There, now);
        assert!(entry.denied(first[0], &route, Answered::There, now).is_none());
        assert_eq!(entry.wrong(now), None);
        entry.granted(first[1], Answered::There, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(2)), "of 3, 1 that has begun, and none that came later");
        // One that is never answered is no reason to renew no more.
        entry.corrected(Answered::There, now);
        let (never, now) = (ask(&mut entry, &route), now + GAP);
        for _ in 0..3 {
            let look = entry.look(now).unwrap();
            entry.looked(look, Answered::There, 6, now);
            assert_eq!(entry.wrong(now), None);
            assert_eq!(entry.wrong(now + PATIENCE), None, "it may be counted");
            (entry.next_at, entry.doubt) = (now, Some(now));
        }
        let look = entry.look(now).unwrap();
        entry.granted(never, Answered::There, now);
        entry.looked(look, Answered::There, 6, now);
        assert_eq!(entry.wrong(now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_ends_during_a_look_may_be_counted_or_not() {
        for (counted, wrong) in [(1, Some(Wrong::TooFew(1))), (2, None), (3, None), (4, Some(Wrong::TooMany(1)))] {
            let (mut entry, route, now) = entry();
            entry.ask_again();
            let look = entry.look(now).unwrap();
            assert!(entry.ended(&route).is_none());
            entry.gave_back(now, Answered::There, 1, now);
            entry.looked(look, Answered::There, counted, now);
            assert_eq!(entry.wrong(now), wrong, "{counted}");
        }
    }

    /// It may come after what ended meanwhile was given back: then it finds nothing, and counts all of it again.
    #[tokio::test(start_paused = true)]
    async fn what_a_late_renewal_counts_again_is_given_back() {
        let (mut entry, route, now) = entry();
        entry.ask_again();
        let look = entry.look(now).unwrap();
        for _ in 0..3 {
            assert!(entry.ended(&route).is_none());
            entry.gave_back(now, Answered::There, 1, now);
        }
        entry.looked(look, Answered::There, 3, now);
        assert_eq!(entry.wrong(now), None, "it may have come before, too");
        let now = now + GAP;
        let look = entry.look(now).expect("whether it counts them still");
        entry.looked(look, Answered::There, 3, now);
        assert_eq!(entry.wrong(now), Some(Wrong::TooMany(3)));
    }

    /// It would be given back twice.
    #[tokio::test(start_paused = true)]
    async fn what_is_given_back_already_is_no_surplus() {
        let (mut entry, route, now) = entry();
        assert!(entry.ended(&route).is_none());
        entry.ask_again();
        assert!(entry.look(now).is_some_and(|look| (look.held, look.leaving) == (2, 1)));
        (entry.looking, entry.doubt) = (false, Some(now));
        entry.gave_back(now, Answered::Elsewhere, 0, now);
        for (now, wrong) in [(now, None), (now + LATE, Some(Wrong::TooMany(1)))] {
            let look = entry.look(now).unwrap();
            entry.looked(look, Answered::There, 3, now);
            assert_eq!(entry.wrong(now), wrong);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_route_stays_while_it_is_used() {
        let (mut entry, first, now) = entry();
        let second = Arc::new(Route::new(&LocalStore::default(), None));
        let side = ask(&mut entry, &second);
        assert_eq!(entry.routes().count(), 2);
        assert!(entry.denied(side, &second, Answered::There, now).is_some_and(|route| Arc::ptr_eq(&route, &second)));
        for _ in 0..3 {
            assert!(entry.ended(&first).is_none());
        }
        assert!(entry.routes().all(|route| Arc::ptr_eq(route, &first)), "by it the store is asked");
    }
}
