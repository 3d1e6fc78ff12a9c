use std::collections::VecDeque;
use std::fmt;

/// Charges, oldest first, of which the first counts nothing: it is the base, whose running sum is taken from the
/// others'. So whatever depends on the order of times or of sums is found by a binary search.
///
/// One pointer, and none before the first charge: a state is as large as the largest of any strategy, and a store holds
/// one for each caller.
#[allow(clippy::box_collection, reason = "a box is a quarter of a queue")]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Charges(Option<Box<VecDeque<Charge>>>);

/// A time, and the sum of all costs up to it. Such a sum starts again at 2^40, so only differences count.
///
/// 12 bytes, since a log may be long.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, packed(4))]
struct Charge {
    /// The time in the upper 56 bits, and bits 32 to 39 of the sum.
    upper: i64,
    /// The rest of the sum.
    lower: u32,
}

const WRAP: i64 = 1 << 40;

impl Charge {
    fn new(time: i64, total: i64) -> Self {
        Self {
            upper: time << 8 | (total >> 32 & 0xff),
            lower: total as u32,
        }
    }

    fn time(self) -> i64 {
        self.upper >> 8
    }

    fn total(self) -> i64 {
        (self.upper & 0xff) << 32 | i64::from(self.lower)
    }

    /// The sum of what was charged after `base`, up to this.
    fn since(self, base: Self) -> i64 {
        (self.total() - base.total()).rem_euclid(WRAP)
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.time(), self.total()).fmt(f)
    }
}

impl Charges {
    /// One charge.
    pub(super) fn one(time: i64, cost: i64) -> Self {
        Self(Some(Box::new(
            [Charge::new(0, 0), Charge::new(time, cost)].into(),
        )))
    }

    fn queue(&self) -> Option<&VecDeque<Charge>> {
        self.0.as_deref()
    }

    /// The place of the newest; 0 if there is none.
    fn last(&self) -> usize {
        self.queue()
            .map_or(0, |queue| queue.len().saturating_sub(1))
    }

    /// The time at a place. There is one.
    pub(super) fn time(&self, place: usize) -> i64 {
        self.queue()
            .and_then(|queue| queue.get(place))
            .map_or(0, |charge| charge.time())
    }

    /// The time of the newest, if there is one.
    pub(super) fn newest(&self) -> Option<i64> {
        self.queue()?.back().map(|newest| newest.time())
    }

    /// What is after `start`, if anything is: the place of its base, its sum, and the time of the newest.
    #[inline]
    pub(super) fn after(&self, start: i64) -> Option<(usize, i64, i64)> {
        let queue = self.queue()?;
        let newest = queue.back().filter(|newest| newest.time() > start)?;
        let (base, _) = search(0, queue.len() - 1, |place| queue[place].time() > start);
        Some((base, newest.since(queue[base]), newest.time()))
    }

    /// The time of the first charge after the base whose going leaves room for so much, if there is one.
    #[inline]
    pub(super) fn freeing(&self, base: usize, over: i64) -> Option<i64> {
        let queue = self.queue()?;
        let (_, place) = search(base, queue.len(), |place| {
            queue[place].since(queue[base]) >= over
        });
        queue.get(place).map(|charge| charge.time())
    }

    /// The first place after the base that is after `time`, as the newest is.
    #[cold]
    pub(super) fn first_after(&self, base: usize, time: i64) -> usize {
        search(self.last(), base, |place| self.time(place) <= time).0
    }

    /// Takes so much out after the base, of which there is more: of the charges after `time` in their order, and where these
    /// have less, of the last before them.
    pub(super) fn take_out(&mut self, base: usize, time: i64, cost: i64) {
        let Some(queue) = &mut self.0 else { return };
        let (from, sum) = (queue[base], queue[queue.len() - 1].since(queue[base]));
        let (before, _) = search(base, queue.len(), |place| queue[place].time() > time);
        // Of all units after the base, those after the first so many go.
        let start = queue[before].since(from).min(sum - cost);
        let (mut kept, first) = search(base, queue.len(), |place| queue[place].since(from) > start);
        let mut sum = queue[kept].since(from);
        for place in first..queue.len() {
            let charge = queue[place];
            let rest = start.max(charge.since(from) - cost);
            // Or nothing of it is left.
            if rest > sum {
                (kept, sum) = (kept + 1, rest);
                queue[kept] = Charge::new(charge.time(), from.total() + rest);
            }
        }
        queue.truncate(kept + 1);
    }

    /// All from a place on, which is after the base, become one charge at a time.
    #[cold]
    pub(super) fn merge(&mut self, place: usize, time: i64) {
        let Some(queue) = &mut self.0 else { return };
        let sum = queue[queue.len() - 1].since(queue[place - 1]);
        queue.truncate(place);
        self.push(time, sum);
    }

    /// Drops what is before the base.
    pub(super) fn drop_before(&mut self, base: usize) {
        let Some(queue) = &mut self.0 else { return };
        if base > 0 {
            queue.drain(..base);
        }
        // A log that was long once does not keep its memory.
        if queue.capacity() > 4 * queue.len() + 16 {
            queue.shrink_to(2 * queue.len());
        }
    }

    /// Drops everything, and begins with one charge, if its cost is above 0.
    pub(super) fn restart(&mut self, time: i64, cost: i64) {
        match &mut self.0 {
            Some(queue) if cost > 0 => {
                queue.clear();
                queue.extend([Charge::new(0, 0), Charge::new(time, cost)]);
                self.drop_before(0);
            }
            None if cost > 0 => *self = Self::one(time, cost),
            _ => self.0 = None,
        }
    }

    /// Adds a charge to the newest, if that is of the same time, or after it.
    pub(super) fn add(&mut self, base: usize, time: i64, cost: i64) {
        match &mut self.0 {
            Some(queue)
                if queue.len() > base + 1
                    && queue.back().is_some_and(|newest| newest.time() == time) =>
            {
                if let Some(newest) = queue.back_mut() {
                    *newest = Charge::new(time, newest.total() + cost);
                }
            }
            _ => self.push(time, cost),
        }
    }

    fn push(&mut self, time: i64, cost: i64) {
        let Some(queue) = &mut self.0 else {
            return *self = Self::one(time, cost);
        };
        if queue.len() == queue.capacity() {
            // Not twice as much: a log may be long, and there is one for each caller.
            queue.reserve_exact(2 + queue.len() / 4);
        }
        let total = queue.back().map_or(0, |charge| charge.total());
        queue.push_back(Charge::new(time, total + cost));
    }
}

/// Two neighbours between the places `near` and `far`: `test` is true of the second, and of `far`, but neither of the
/// first nor of `near`. Asks near `near` first, then by halves: how often grows with the logarithm of the distance.
#[inline]
fn search(mut near: usize, mut far: usize, test: impl Fn(usize) -> bool) -> (usize, usize) {
    let mut step = 1_usize;
    while near.abs_diff(far) > 1 {
        let ahead = step.min(near.abs_diff(far) / 2);
        let place = if far > near {
            near + ahead
        } else {
            near - ahead
        };
        if test(place) {
            (far, step) = (place, usize::MAX);
        } else {
            (near, step) = (place, step.saturating_mul(2));
        }
    }
    (near, far)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is a log for each caller.
    #[test]
    fn a_log_takes_memory_as_needed() {
        let mut charges = Charges::one(0, 1);
        let room = |charges: &Charges| {
            charges
                .queue()
                .map(|queue| (queue.len(), queue.capacity()))
                .unwrap()
        };
        for time in 0..1_000 {
            (0..3).for_each(|_| charges.add(0, time, 1));
            let (len, room) = room(&charges);
            assert_eq!(len as i64, time + 2, "those of one time are one");
            assert!(room <= len + len / 4 + 2, "{room} for {len}");
        }
        charges.drop_before(990);
        assert_eq!(room(&charges), (11, 22));
    }
}
