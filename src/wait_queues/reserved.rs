//! The units that a line has reserved for its waiters. All methods run under the lock of the lines.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::permit::Charge;
use crate::util::instant;

#[derive(Default)]
pub(super) struct Reserved {
    /// By the due time, and a number that makes each key unique.
    turns: BTreeMap<(Instant, u64), Turn>,
    last: u64,
    /// Total units of the turns.
    units: u64,
    /// Due units, too few for the first waiter.
    part: Option<Charge>,
    /// Total units of the checks without a reply, and the number of such checks by the waiter that each was sent for.
    asked: u64,
    pending: BTreeMap<u64, u32>,
    /// Number of turns whose refund is in flight, and when the last of them is due.
    refunding: usize,
    refunding_until: Option<Instant>,
}

struct Turn {
    charge: Charge,
    /// Whether the store has rejected its refund, because a later turn depends on it.
    stays: bool,
}

impl Reserved {
    /// Returns `true` if no turn is left, except those whose refund is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Returns `true` if nothing is left, and all checks have their replies.
    pub(super) fn is_settled(&self) -> bool {
        self.turns.is_empty() && self.part.is_none() && self.pending.is_empty()
    }

    /// The time until which the reply to a refund may bring a turn back.
    pub(super) fn refunding_until(&self, now: Instant) -> Option<Instant> {
        let until = self.refunding_until.filter(|_| self.refunding > 0);
        until.filter(|until| now < *until)
    }

    /// All reserved units, due or not.
    fn there(&self) -> u64 {
        self.units + self.part.as_ref().map_or(0, |part| u64::from(part.cost))
    }

    /// The units that are reserved or requested.
    pub(super) fn expected(&self) -> u64 {
        self.there() + self.asked
    }

    /// The time at which the next turn is due.
    pub(super) fn first_due(&self) -> Option<Instant> {
        self.turns.first_key_value().map(|((due, _), _)| *due)
    }

    pub(super) fn last_due(&self) -> Option<Instant> {
        self.turns.last_key_value().map(|((due, _), _)| *due)
    }

    /// When this many of the reserved units are due. `None` if they are, or if there are fewer.
    pub(super) fn starts_at(&self, units: u64) -> Option<Instant> {
        let mut there = self.there() - self.units;
        if there >= units {
            return None;
        }
        let mut each = self.turns.iter();
        let last = each.find(|(_, turn)| {
            there += u64::from(turn.charge.cost);
            there >= units
        });
        last.map(|((due, _), _)| *due)
    }

    /// Returns `true` if a check without a reply was sent.
    pub(super) fn is_asked(&self) -> bool {
        self.asked > 0
    }

    /// The oldest waiter for which a check without a reply was sent.
    pub(super) fn first_pending(&self) -> Option<u64> {
        self.pending.first_key_value().map(|(number, _)| *number)
    }

    /// Records a check that is sent for this waiter.
    pub(super) fn ask(&mut self, number: u64, units: u32) {
        self.asked += u64::from(units);
        *self.pending.entry(number).or_default() += 1;
    }

    /// Records the reply to a check that was sent for this waiter.
    pub(super) fn replied(&mut self, number: u64, units: u32) {
        self.asked -= u64::from(units);
        if let Some(count) = self.pending.get_mut(&number) {
            *count -= 1;
            if *count == 0 {
                self.pending.remove(&number);
            }
        }
    }

    /// Adds a turn. It `stays` if the store has rejected its refund.
    pub(super) fn add(&mut self, charge: Charge, stays: bool) {
        self.units += u64::from(charge.cost);
        self.last += 1;
        let key = (charge.due, self.last);
        self.turns.insert(key, Turn { charge, stays });
    }

    /// Takes this many of the due units. Units that cannot be added to later ones go to `refund`.
    pub(super) fn take(
        &mut self,
        units: u32,
        now: Instant,
        refund: &mut Vec<Charge>,
    ) -> Option<Charge> {
        loop {
            if let Some(part) = self.part.take_if(|part| part.cost >= units) {
                let left = part.cost - units;
                self.part = (left > 0).then(|| part.of(left));
                return Some(part.of(units));
            }
            let charge = self.pop_due(now)?;
            self.part = Some(match self.part.take() {
                None => charge,
                Some(part) if part.joins(&charge) => part.of(part.cost + charge.cost),
                Some(part) => {
                    refund.push(part);
                    charge
                }
            });
        }
    }

    /// Takes some of the due units.
    pub(super) fn take_any(&mut self, now: Instant) -> Option<Charge> {
        self.part.take().or_else(|| self.pop_due(now))
    }

    fn pop_due(&mut self, now: Instant) -> Option<Charge> {
        let next = self.turns.first_entry();
        let Turn { charge, .. } = next.filter(|next| next.key().0 <= now)?.remove();
        self.units -= u64::from(charge.cost);
        Some(charge)
    }

    /// Takes the last turn for a refund, if the waiters need only `demand` units.
    pub(super) fn superfluous(&mut self, demand: u64) -> Option<Charge> {
        let surplus = self.there().saturating_sub(demand);
        let is_more = |turn: &Turn| !turn.stays && u64::from(turn.charge.cost) <= surplus;
        let last = self.turns.last_entry().filter(|last| is_more(last.get()))?;
        let Turn { charge, .. } = last.remove();
        self.units -= u64::from(charge.cost);
        self.refunding += 1;
        self.refunding_until = self.refunding_until.max(Some(charge.due));
        Some(charge)
    }

    /// Records the reply to a refund of a superfluous turn. `kept` is the turn if the store has rejected the refund.
    pub(super) fn refunded(&mut self, kept: Option<Charge>) {
        self.refunding -= 1;
        if let Some(charge) = kept.filter(|charge| charge.due > instant()) {
            self.add(charge, true);
        }
    }
}
