use std::time::Duration;

use tokio::time::Instant;

use crate::limit::Policies;

/// What is known of the requests of one caller under one policy. Pure: the time is an argument.
#[derive(Debug)]
pub(super) struct Entry {
    /// Of one policy.
    policies: Policies,
    limit: u32,
    lease: Duration,
    /// How many the store is being asked about.
    asked: u32,
    /// How many are in flight.
    held: u32,
    /// How many have been given back, and the store has not said so yet.
    leaving: u32,
    /// How many have ended, and are told with the next hold, or given back after it.
    owed: u32,
    /// Since when the store may count otherwise.
    doubt: Option<Instant>,
    /// Whether a hold is under way.
    holding: bool,
    /// Whether a renewal is.
    renewing: bool,
    /// When the store last said how many it counts. A take renews what is counted too, but tells nothing of that. `None`: it
    /// is to be asked soon.
    renewed: Option<Instant>,
    /// When the store may last have written what it counts.
    written: Instant,
    /// No hold is sent before.
    next_at: Instant,
    /// When nobody had heard an answer last: what was asked may come to the store until [`PAUSE`] after that.
    lost: Option<Instant>,
    /// How many there were of each.
    asks: u64,
    ends: u64,
    holds: u64,
}

/// Where an answer came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answered {
    /// From where the count is kept.
    There,
    /// From elsewhere, as in an outage; or it did not come.
    Elsewhere,
}

/// What was known when something was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    /// How many are told.
    pub(super) count: u32,
    asked: u32,
    held: u32,
    leaving: u32,
    asks: u64,
    ends: u64,
    holds: u64,
    /// Whether something that was asked may have come after it.
    is_early: bool,
}

/// Holds of one entry are so far apart.
const PAUSE: Duration = Duration::from_millis(250);
/// How long a hold waits for a moment in which the store is not asked about the caller, and how late something may be given
/// back.
const PATIENCE: Duration = Duration::from_secs(1);

impl Answered {
    pub(super) fn there(there: bool) -> Self {
        if there { Self::There } else { Self::Elsewhere }
    }
}

impl Entry {
    pub(super) fn new(policies: Policies, now: Instant) -> Self {
        let quota = policies[0].quota();
        Self {
            limit: quota.limit(),
            lease: quota.period(),
            policies,
            asked: 0,
            held: 0,
            leaving: 0,
            owed: 0,
            doubt: None,
            holding: false,
            renewing: false,
            renewed: Some(now),
            written: now,
            next_at: now,
            lost: None,
            asks: 0,
            ends: 0,
            holds: 0,
        }
    }

    pub(super) fn policies(&self) -> &Policies {
        &self.policies
    }

    pub(super) fn lease(&self) -> Duration {
        self.lease
    }

    /// The store is about to be asked about a request, under policies that count the same, maybe by another quota. Who is
    /// asked last says how long the store keeps what it counts: so of several lease times it is renewed by the shortest.
    pub(super) fn ask(&mut self, policies: &Policies) {
        let quota = policies[0].quota();
        if quota.period() < self.lease {
            (self.policies, self.lease) = (policies.clone(), quota.period());
        }
        self.limit = self.limit.max(quota.limit());
        self.asked += 1;
        self.asks += 1;
    }

    /// The request is in flight.
    pub(super) fn granted(&mut self, answered: Answered, now: Instant) {
        self.asked = self.asked.saturating_sub(1);
        self.held += 1;
        if answered == Answered::Elsewhere {
            self.loses(now);
        }
        self.heard(answered, now);
    }

    /// The request is not in flight. What was answered elsewhere the store may have granted.
    pub(super) fn denied(&mut self, answered: Answered, now: Instant) {
        self.asked = self.asked.saturating_sub(1);
        if answered == Answered::Elsewhere {
            self.loses(now);
            self.heard(answered, now);
        }
    }

    /// What was asked may still be on its way, and on another connection than a hold.
    fn loses(&mut self, now: Instant) {
        self.lost = Some(now);
        // Who goes away again and again does not put it off again.
        if self.doubt.is_none() {
            self.next_at = self.next_at.max(now + PAUSE);
        }
    }

    /// Nobody will tell when a request ends.
    pub(super) fn left(&mut self) {
        self.held = self.held.saturating_sub(1);
        self.ends += 1;
    }

    /// A request has ended. Returns how many are to be given back.
    pub(super) fn ended(&mut self, now: Instant) -> u32 {
        self.held = self.held.saturating_sub(1);
        self.ends += 1;
        self.owed += 1;
        // What is given back now would come to the store before or after a hold, nobody knows.
        if self.holding || self.wants_hold(now) { 0 } else { self.give_back() }
    }

    /// Returns how many are to be given back.
    fn give_back(&mut self) -> u32 {
        let count = std::mem::take(&mut self.owed);
        self.leaving += count;
        count
    }

    /// What came of giving so many back at the time `since`: how many the store had.
    pub(super) fn gave_back(&mut self, count: u32, since: Instant, answered: Answered, had: u32, now: Instant) {
        self.leaving = self.leaving.saturating_sub(count);
        self.heard(answered, now);
        // Of those that it was late for, the lease time may have ended: then it had others.
        if had < count || now > since + PATIENCE {
            self.doubts(now);
        }
    }

    fn heard(&mut self, answered: Answered, now: Instant) {
        self.written = now;
        if answered == Answered::Elsewhere {
            self.doubts(now);
        }
    }

    fn doubts(&mut self, now: Instant) {
        self.doubt.get_or_insert(now);
    }

    /// Whether the store may count otherwise.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.doubt.is_some()
    }

    /// The store may have forgotten it.
    pub(super) fn ask_again(&mut self) {
        self.renewed = None;
    }

    fn wants_hold(&self, now: Instant) -> bool {
        self.doubt.is_some() && now >= self.next_at
    }

    /// How many the store would count if it were right, and had granted what it is being asked.
    fn most(&self) -> u32 {
        self.held.max(self.held.saturating_add(self.asked).min(self.limit))
    }

    fn sent(&self, count: u32, now: Instant) -> Sent {
        let &Self { asked, held, leaving, asks, ends, holds, .. } = self;
        let is_early = self.lost.is_some_and(|lost| now < lost + PAUSE);
        Sent { count, asked, held, leaving, asks, ends, holds, is_early }
    }

    /// Begins a hold, if one is due, and nothing is under way that it could overwrite.
    pub(super) fn hold(&mut self, now: Instant) -> Option<Sent> {
        let doubt = self.doubt.filter(|_| self.wants_hold(now) && !self.holding)?;
        // What is asked all the time is counted as granted: too many rather than too few.
        if self.leaving > 0 || self.asked > 0 && now < doubt + PATIENCE {
            return None;
        }
        self.holds += 1;
        (self.holding, self.doubt, self.owed) = (true, None, 0);
        Some(self.sent(self.most(), now))
    }

    /// A hold was answered. Returns how many are to be given back: what has ended meanwhile.
    pub(super) fn told(&mut self, sent: Sent, answered: Answered, now: Instant) -> u32 {
        self.holding = false;
        self.next_at = now + PAUSE;
        self.heard(answered, now);
        if answered == Answered::There {
            // What was asked since may have come before the hold.
            self.renewed = if self.asks == sent.asks { Some(now) } else { None };
            if sent.asked > 0 || sent.is_early {
                self.doubts(now);
            }
        }
        self.give_back()
    }

    /// Begins a renewal, if one is due.
    pub(super) fn renew(&mut self, now: Instant) -> Option<Sent> {
        let is_due = self.renewed.is_none_or(|renewed| now >= renewed + self.lease / 4);
        if !is_due || self.held == 0 || self.holding || self.renewing {
            return None;
        }
        self.renewing = true;
        Some(self.sent(self.most(), now))
    }

    /// A renewal was answered: so many the store counts.
    pub(super) fn renewed(&mut self, sent: Sent, answered: Answered, counted: u32, now: Instant) {
        self.renewing = false;
        self.heard(answered, now);
        if answered == Answered::There {
            self.renewed = Some(now);
            let ended = u32::try_from(self.ends - sent.ends).unwrap_or(u32::MAX);
            let asked = u32::try_from(self.asks - sent.asks).unwrap_or(u32::MAX);
            let least = sent.held.saturating_sub(ended);
            let most = sent.held.saturating_add(sent.leaving).saturating_add(sent.asked).saturating_add(asked);
            if !(least..=most).contains(&counted) && self.holds == sent.holds {
                self.doubts(now);
            }
        }
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        let is_idle = self.asked == 0 && self.held == 0 && self.leaving == 0 && !self.holding && !self.renewing;
        // What nobody has renewed for so long the store has forgotten.
        is_idle && (self.doubt.is_none() || now >= self.written + self.lease)
    }

    /// Whether nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.asked == 0 && self.held == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Policy;

    /// A give-back might come to the store before the hold or after it.
    #[tokio::test(start_paused = true)]
    async fn what_ends_during_a_hold_is_given_back_after_it() {
        let now = crate::store::instant();
        let policies = Policy::in_flight("streams", 4).unwrap().into();
        let mut entry = Entry::new(Policies::clone(&policies), now);
        for _ in 0..3 {
            entry.ask(&policies);
            entry.granted(Answered::Elsewhere, now);
        }
        assert!(entry.hold(now).is_none(), "what was asked may still be on its way");
        let now = now + PAUSE;
        let sent = entry.hold(now).unwrap();
        assert_eq!((sent.count, entry.hold(now).is_none(), entry.ended(now)), (3, true, 0));
        assert_eq!(entry.told(sent, Answered::There, now), 1);
        assert!(!entry.is_in_doubt() && entry.hold(now + PAUSE).is_none());
        entry.gave_back(1, now, Answered::There, 1, now);
        assert_eq!((entry.ended(now), entry.ended(now)), (1, 1));
    }

    /// What is under way already has to come before it.
    #[tokio::test(start_paused = true)]
    async fn a_hold_waits_for_what_is_under_way() {
        let now = crate::store::instant();
        let policies = Policy::in_flight("streams", 4).unwrap().into();
        let mut entry = Entry::new(Policies::clone(&policies), now);
        for _ in 0..3 {
            entry.ask(&policies);
            entry.granted(Answered::There, now);
        }
        assert_eq!(entry.ended(now), 1);
        entry.ask(&policies);
        entry.denied(Answered::Elsewhere, now);
        let now = now + PAUSE;
        assert!(entry.hold(now).is_none(), "one is being given back");
        // From here on what ends is told by the hold.
        assert_eq!(entry.ended(now), 0);
        entry.gave_back(1, now, Answered::There, 1, now);
        entry.ask(&policies);
        assert!(entry.hold(now).is_none(), "the store is being asked");
        let later = now + PATIENCE;
        assert_eq!(entry.hold(later).unwrap().count, 2, "what is asked all the time counts as granted");
    }
}
