use std::collections::VecDeque;
use std::fmt;

/// A queue of charges, oldest first. The first entry is the base, which does not count: its running
/// sum is subtracted from the sums of the others. Times and sums are sorted, so both are found by
/// binary search.
///
/// A single pointer, which is null before the first charge: a state is as large as the largest
/// strategy's, and a store holds one per caller.
#[allow(
    clippy::box_collection,
    reason = "a `Box` has a quarter of the size of a `VecDeque`"
)]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Charges(Option<Box<VecDeque<Entry>>>);

/// A time, and the running sum of all costs up to it. Sums wrap at 2^40, so only differences are
/// meaningful.
///
/// 12 bytes, since a log may be long.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, packed(4))]
struct Entry {
    /// The time in the upper 56 bits, and bits 32 to 39 of the sum in the lower 8.
    upper: i64,
    /// The lower 32 bits of the sum.
    lower: u32,
}

const WRAP: i64 = 1 << 40;

impl Entry {
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

    /// Returns the sum of the charges after `base`, up to and including this one.
    fn since(self, base: Self) -> i64 {
        (self.total() - base.total()).rem_euclid(WRAP)
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.time(), self.total()).fmt(f)
    }
}

impl Charges {
    /// Creates a queue with one charge.
    pub(super) fn one(time: i64, cost: i64) -> Self {
        Self(Some(Box::new(
            [Entry::new(0, 0), Entry::new(time, cost)].into(),
        )))
    }

    /// Returns the time of each entry, and its running sum counted from the base.
    pub(super) fn to_numbers(&self) -> Vec<i64> {
        let queue = self.queue().into_iter().flatten();
        let base = self.queue().and_then(VecDeque::front);
        let numbers = |charge: &Entry| {
            let sum = base.map_or(0, |base| charge.since(*base));
            [charge.time(), sum]
        };
        queue.flat_map(numbers).collect()
    }

    /// Restores a queue from its [numbers](Self::to_numbers). `None` if they are not sorted.
    pub(super) fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let (entries, []) = numbers.as_chunks::<2>() else {
            return None;
        };
        let is_sorted = entries.is_sorted_by(|[time, sum], [next_time, next_sum]| {
            time <= next_time && sum <= next_sum
        });
        let is_queue = match entries {
            [] => true,
            [[_, base], .., [_, sum]] => *base == 0 && *sum < WRAP,
            [_] => false,
        };
        if !is_sorted || !is_queue {
            return None;
        }
        let queue = entries.iter().map(|[time, sum]| Entry::new(*time, *sum));
        Some(Self(
            (!entries.is_empty()).then(|| Box::new(queue.collect())),
        ))
    }

    fn queue(&self) -> Option<&VecDeque<Entry>> {
        self.0.as_deref()
    }

    /// Returns the index of the newest charge, or 0 without charges.
    fn last(&self) -> usize {
        self.queue()
            .map_or(0, |queue| queue.len().saturating_sub(1))
    }

    /// Returns the time at an index, which must exist.
    pub(super) fn time(&self, place: usize) -> i64 {
        self.queue()
            .and_then(|queue| queue.get(place))
            .map_or(0, |charge| charge.time())
    }

    /// Returns the time of the newest charge.
    pub(super) fn newest(&self) -> Option<i64> {
        self.queue()?.back().map(|newest| newest.time())
    }

    /// Returns the index of the last entry at or before `start`, the sum of the charges after it,
    /// and the time of the newest. `None` if there is no charge after `start`.
    #[inline]
    pub(super) fn after(&self, start: i64) -> Option<(usize, i64, i64)> {
        let queue = self.queue()?;
        let newest = queue.back().filter(|newest| newest.time() > start)?;
        let (base, _) = search(0, queue.len() - 1, |place| queue[place].time() > start);
        Some((base, newest.since(queue[base]), newest.time()))
    }

    /// Returns the time of the charge whose expiry makes a total of `over` units expire, counted
    /// from the base.
    #[inline]
    pub(super) fn freeing(&self, base: usize, over: i64) -> Option<i64> {
        let queue = self.queue()?;
        let (_, place) = search(base, queue.len(), |place| {
            queue[place].since(queue[base]) >= over
        });
        queue.get(place).map(|charge| charge.time())
    }

    /// Returns the index of the first charge after `time`. The newest must be after `time`.
    #[cold]
    pub(super) fn first_after(&self, base: usize, time: i64) -> usize {
        search(self.last(), base, |place| self.time(place) <= time).0
    }

    /// Removes `cost` units, oldest first, from the charges after `time`; if these hold fewer, also
    /// the newest units before them. The charges after the base must hold more than `cost`.
    pub(super) fn take_out(&mut self, base: usize, time: i64, cost: i64) {
        let Some(queue) = &mut self.0 else { return };
        let (from, sum) = (queue[base], queue[queue.len() - 1].since(queue[base]));
        let (before, _) = search(base, queue.len(), |place| queue[place].time() > time);
        // Removes the units `start..start + cost`, counted from the base.
        let start = queue[before].since(from).min(sum - cost);
        let (mut kept, first) = search(base, queue.len(), |place| queue[place].since(from) > start);
        let mut sum = queue[kept].since(from);
        for place in first..queue.len() {
            let charge = queue[place];
            let rest = start.max(charge.since(from) - cost);
            // Skip a charge that is removed entirely.
            if rest > sum {
                (kept, sum) = (kept + 1, rest);
                queue[kept] = Entry::new(charge.time(), from.total() + rest);
            }
        }
        queue.truncate(kept + 1);
    }

    /// Merges all charges from an index on into one charge at `time`. The index must be after the
    /// base.
    #[cold]
    pub(super) fn merge(&mut self, place: usize, time: i64) {
        let Some(queue) = &mut self.0 else { return };
        let sum = queue[queue.len() - 1].since(queue[place - 1]);
        queue.truncate(place);
        self.push(time, sum);
    }

    /// Drops the entries before the base.
    pub(super) fn drop_before(&mut self, base: usize) {
        let Some(queue) = &mut self.0 else { return };
        if base > 0 {
            queue.drain(..base);
        }
        // Release memory that an earlier, longer log needed.
        if queue.capacity() > 4 * queue.len() + 16 {
            queue.shrink_to(2 * queue.len());
        }
    }

    /// Replaces everything by one charge, or by nothing if `cost` is 0.
    pub(super) fn restart(&mut self, time: i64, cost: i64) {
        match &mut self.0 {
            Some(queue) if cost > 0 => {
                queue.clear();
                queue.extend([Entry::new(0, 0), Entry::new(time, cost)]);
                self.drop_before(0);
            }
            None if cost > 0 => *self = Self::one(time, cost),
            _ => self.0 = None,
        }
    }

    /// Adds a charge: to the newest entry if that has the same time, else as a new entry.
    pub(super) fn add(&mut self, base: usize, time: i64, cost: i64) {
        match &mut self.0 {
            Some(queue)
                if queue.len() > base + 1
                    && queue.back().is_some_and(|newest| newest.time() == time) =>
            {
                if let Some(newest) = queue.back_mut() {
                    *newest = Entry::new(time, newest.total() + cost);
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
            // Grow by a quarter instead of doubling: a log may be long, and each caller has one.
            queue.reserve_exact(2 + queue.len() / 4);
        }
        let total = queue.back().map_or(0, |charge| charge.total());
        queue.push_back(Entry::new(time, total + cost));
    }
}

/// Returns two adjacent indices between `near` and `far`: `test` is `false` for the first and
/// `true` for the second. `test` must be monotonic, `false` at `near` and `true` at `far`. Searches
/// in growing steps from `near`, then by bisection, so the time is logarithmic in the distance.
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

    /// Every caller has a log.
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
            assert_eq!(
                len as i64,
                time + 2,
                "charges at the same time share an entry"
            );
            assert!(room <= len + len / 4 + 2, "{room} for {len}");
        }
        charges.drop_before(990);
        assert_eq!(room(&charges), (11, 22));
    }
}
