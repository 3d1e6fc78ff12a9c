//! What was refunded to a caller, to be replayed on the primary store.

use smallvec::SmallVec;

use super::charges::Charges;
use crate::limit::{Charged, EachCharged, LONGEST, Policies};

/// What was refunded without an id, oldest first; a reset is before all of it.
#[derive(Debug, Default)]
pub(super) struct Refunds {
    /// Until when a reset matters, in microseconds, if there was one.
    pub(super) reset_until: Option<i64>,
    each: SmallVec<[Refund; 1]>,
}

/// What was refunded of one charge. It gets older until it is replayed.
#[derive(Debug, Clone)]
pub(super) struct Refund {
    pub(super) cost: u64,
    /// Of which charge, as it was at a time in microseconds.
    charged: EachCharged,
    at: i64,
}

/// Beyond so many, two become one. Whoever refunds that many has held as many reservations, which take more memory.
const MAX: usize = 128;

impl Refund {
    pub(super) fn new(cost: u64, charged: EachCharged, at: i64) -> Self {
        Self { cost, charged, at }
    }

    /// The charge as it is now.
    pub(super) fn charged(&self, now: i64) -> EachCharged {
        self.charged
            .iter()
            .map(|charged| charged.later(now - self.at))
            .collect()
    }

    /// Whether any policy counts it still.
    fn counts(&self, now: i64) -> bool {
        self.charged(now).iter().any(|charged| charged.left() > 0)
    }

    /// The number of the log that the charge is in, if it is not in the primary store.
    pub(super) fn log_number(&self) -> Option<i64> {
        self.charged.first().and_then(Charged::log_number)
    }

    /// Takes it out of what is noted. How much that was.
    ///
    /// When the charge was made tells how much of it is left, and not until when it was to count: that is of a window which
    /// may have begun before that of the log.
    pub(super) fn take_out(&self, policies: &Policies, charges: &mut Charges, now: i64) -> u64 {
        if !self.counts(now) {
            return 0;
        }
        let of = self.charged(now).into_iter().map(|charged| Charged {
            reset: LONGEST,
            is_turn: false,
            ..charged
        });
        charges.refund(policies, self.cost, of, now)
    }
}

impl Refunds {
    /// Whether there is nothing to refund.
    pub(super) fn is_empty(&self) -> bool {
        self.reset_until.is_none() && self.each.is_empty()
    }

    pub(super) fn reset(&mut self, until: i64) {
        self.reset_until = self.reset_until.max(Some(until));
        self.each.clear();
    }

    /// Adds one, of which nothing more is known than of the others of its kind if there are many: then less is refunded
    /// than might be.
    pub(super) fn add(&mut self, refund: Refund) {
        if self.reset_until.is_some() || refund.cost == 0 {
            return;
        }
        let is_full = self.each.len() >= MAX;
        let alike = |other: &&mut Refund| {
            is_full && other.log_number().is_some() == refund.log_number().is_some()
        };
        match self.each.iter_mut().rfind(alike) {
            Some(last) => {
                let both = last.charged(refund.at).into_iter().zip(&refund.charged);
                last.charged = both.map(|(last, refund)| last.or(*refund)).collect();
                (last.cost, last.at) = (last.cost.saturating_add(refund.cost), refund.at);
            }
            None => self.each.push(refund),
        }
    }

    /// Takes out of a charge what was refunded since, the oldest first. The charge was noted in logs from this number on.
    pub(super) fn spend(
        &mut self,
        policies: &Policies,
        charge: &mut Charges,
        first: i64,
        now: i64,
    ) {
        for refund in self
            .each
            .iter_mut()
            .filter(|refund| refund.log_number().is_some_and(|number| number >= first))
        {
            refund.cost -= refund.take_out(policies, charge, now).min(refund.cost);
        }
        self.each.retain(|refund| refund.cost > 0);
    }

    /// What is still to be refunded.
    pub(super) fn into_each(self, now: i64) -> impl Iterator<Item = Refund> {
        self.each
            .into_iter()
            .filter(move |refund| refund.counts(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of many, two become one of the age of the older: less is refunded than might be, and no memory grows.
    #[test]
    fn many_refunds_merge_at_the_oldest_age() {
        let mut refunds = Refunds::default();
        for i in 0..MAX as i64 + 84 {
            let charged = Charged {
                age: i,
                at: i % 3,
                cost: 9,
                reset: 1_000,
                is_turn: false,
            };
            refunds.add(Refund::new(2, [charged].into(), 0));
        }
        assert_eq!(refunds.each.len(), MAX);
        let last = refunds.into_each(5).last().unwrap();
        assert_eq!(last.cost, 2 * 85);
        assert_eq!(
            last.charged(5)[..],
            [Charged {
                age: MAX as i64 + 83 + 5,
                at: 1,
                cost: 9,
                reset: 1_000,
                is_turn: false,
            }]
        );
    }
}
