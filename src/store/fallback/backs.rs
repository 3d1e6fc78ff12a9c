//! What a caller refunded, to be refunded in the primary store too.

use smallvec::SmallVec;

use crate::limit::Charged;

/// What was refunded without an id, oldest first; a reset is before all of it.
#[derive(Debug, Default)]
pub(super) struct Backs {
    /// Until when a reset matters, in microseconds, if there was one.
    pub(super) reset_until: Option<i64>,
    each: SmallVec<[Back; 1]>,
}

/// What was refunded of one charge. It gets older until the primary store is told.
#[derive(Debug, Clone)]
pub(super) struct Back {
    pub(super) cost: u64,
    /// Of which charge, as it was at a time in microseconds.
    charged: Charged,
    at: i64,
}

/// Beyond so many, two become one.
const MAX: usize = 16;

impl Back {
    pub(super) fn new(cost: u64, charged: Charged, at: i64) -> Self {
        Self { cost, charged, at }
    }

    /// The charge as it is now.
    pub(super) fn charged(&self, now: i64) -> Charged {
        self.charged.clone().later(now - self.at)
    }
}

impl Backs {
    /// Whether there is nothing to refund.
    pub(super) fn is_empty(&self) -> bool {
        self.reset_until.is_none() && self.each.is_empty()
    }

    pub(super) fn reset(&mut self, until: i64) {
        self.reset_until = self.reset_until.max(Some(until));
        self.each.clear();
    }

    /// Adds one, of which nothing more is known than of the others if there are many: then less is refunded than might be.
    pub(super) fn add(&mut self, back: Back) {
        if self.reset_until.is_some() || back.cost == 0 {
            return;
        }
        let is_full = self.each.len() >= MAX;
        match self.each.last_mut().filter(|_| is_full) {
            Some(last) => {
                last.charged = last.charged(back.at).or(&back.charged);
                (last.cost, last.at) = (last.cost.saturating_add(back.cost), back.at);
            }
            None => self.each.push(back),
        }
    }

    /// Takes out up to so much, the oldest first. How much that was.
    pub(super) fn spend(&mut self, cost: u64) -> u64 {
        if self.reset_until.is_some() {
            return cost;
        }
        let mut left = cost;
        for back in &mut self.each {
            let part = left.min(back.cost);
            (back.cost, left) = (back.cost - part, left - part);
        }
        self.each.retain(|back| back.cost > 0);
        cost - left
    }

    /// What is still to be refunded.
    pub(super) fn into_each(self, now: i64) -> impl Iterator<Item = Back> {
        self.each.into_iter().filter(move |back| back.charged(now).counts())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of many, two become one of the age of the older: less is refunded than might be, and no memory grows.
    #[test]
    fn many_become_a_few_of_the_oldest_age() {
        let mut backs = Backs::default();
        for i in 0..100 {
            let charged = Charged { age: i, at: 0, cost: 9, resets: [1_000].into_iter().collect() };
            backs.add(Back::new(2, charged, 0));
        }
        assert_eq!(backs.each.len(), MAX);
        let last = backs.into_each(5).last().unwrap();
        assert_eq!((last.cost, last.charged(5).age, last.charged(5).cost), (2 * 85, 99 + 5, 9));
    }
}
