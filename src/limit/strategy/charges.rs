use std::collections::VecDeque;
use std::fmt;

/// A queue of charges, oldest first. The first entry is the base, which does not count: its running
/// sum is subtracted from the sums of the others. Times and sums are sorted, so both are found by
/// binary search.
///
/// ```text
///             base                                newest
/// time        8       10      14      15        20
/// total       7        9      12      13        18
/// charged     -        2       3       1         5    its total minus the one before
/// ```
///
/// When the charges at 10 and 14 have expired, the entry at 14 is the base, and no sum changes.
///
/// A single pointer, which is null before the first charge: a state is as large as the largest
/// strategy's, and a store holds one per caller.
#[allow(
    clippy::box_collection,
    reason = "a `Box` has a quarter of the size of a `VecDeque`"
)]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Charges(Option<Box<VecDeque<LogEntry>>>);

/// A time, and the running sum of all costs up to it. Sums wrap at 2^40, so only differences are
/// meaningful.
///
/// 12 bytes, since a log may be long.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, packed(4))]
struct LogEntry {
    /// The time in the upper 56 bits, and bits 32 to 39 of the sum in the lower 8.
    upper: i64,
    /// The lower 32 bits of the sum.
    lower: u32,
}

const WRAP: i64 = 1 << 40;

impl LogEntry {
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

impl fmt::Debug for LogEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.time(), self.total()).fmt(f)
    }
}

impl Charges {
    /// Creates a queue with one charge.
    pub(super) fn one(time: i64, cost: i64) -> Self {
        Self(Some(Box::new(
            [LogEntry::new(0, 0), LogEntry::new(time, cost)].into(),
        )))
    }

    /// Returns the time of each entry, and its running sum counted from the base.
    pub(super) fn to_numbers(&self) -> Vec<i64> {
        let Some(queue) = self.queue() else {
            return vec![];
        };
        let mut numbers = Vec::with_capacity(2 * queue.len());
        for entry in queue {
            numbers.extend([entry.time(), entry.since(queue[0])]);
        }
        numbers
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
            [] => return Some(Self(None)),
            [_] => false,
            [[_, base], .., [_, sum]] => *base == 0 && *sum < WRAP,
        };
        if !is_sorted || !is_queue {
            return None;
        }
        let mut queue = VecDeque::with_capacity(entries.len());
        for [time, sum] in entries {
            queue.push_back(LogEntry::new(*time, *sum));
        }
        Some(Self(Some(Box::new(queue))))
    }

    /// Returns the base and at least one charge. `None` if there is no charge.
    fn queue(&self) -> Option<&VecDeque<LogEntry>> {
        self.0.as_deref()
    }

    /// Returns the time of the newest charge.
    pub(super) fn newest(&self) -> Option<i64> {
        Some(self.queue()?.back()?.time())
    }

    /// Returns the index of the last entry at or before `start`, the sum of the charges after it,
    /// and the time of the newest. `None` if there is no charge after `start`.
    #[inline]
    pub(super) fn after(&self, start: i64) -> Option<(usize, i64, i64)> {
        let queue = self.queue()?;
        let newest = queue.back()?;
        if newest.time() <= start {
            return None;
        }
        let base = search(0, queue.len() - 1, |place| queue[place].time() > start).before;
        Some((base, newest.since(queue[base]), newest.time()))
    }

    /// Returns the time of the charge whose expiry makes a total of `over` units expire, counted
    /// from the base.
    #[inline]
    pub(super) fn freeing(&self, base: usize, over: i64) -> Option<i64> {
        let queue = self.queue()?;
        let boundary = search(base, queue.len(), |place| {
            queue[place].since(queue[base]) >= over
        });
        Some(queue.get(boundary.after)?.time())
    }

    /// Returns the index of the first charge after `time`. The newest must be after `time`.
    #[cold]
    pub(super) fn first_after(&self, base: usize, time: i64) -> usize {
        let Some(queue) = self.queue() else {
            return base;
        };
        // From the newest: after a small step of the clock, few charges are later.
        search(queue.len() - 1, base, |place| queue[place].time() <= time).before
    }

    /// Removes `cost` units, oldest first, from the charges after `time`; if these hold fewer, also
    /// the newest units before them. The charges after the base must hold more than `cost`.
    ///
    /// Numbered from the base in order of time, the removed units are `start..start + cost`. The sum of
    /// a charge that ends within that range becomes `start`, and that of a later one falls by `cost`:
    ///
    /// ```text
    /// sums before   2     5  6       11    of which the units 3..7 are removed
    ///               |     |  |        |
    /// sums after    2     3  -        7    the third charge is gone
    /// ```
    pub(super) fn take_out(&mut self, base: usize, time: i64, cost: i64) {
        let Some(queue) = &mut self.0 else { return };
        let origin = queue[base];
        let total = queue[queue.len() - 1].since(origin);
        let before = search(base, queue.len(), |place| queue[place].time() > time).before;
        let start = queue[before].since(origin).min(total - cost);
        let lowered = search(base, queue.len(), |place| {
            queue[place].since(origin) > start
        });
        let mut last_kept = lowered.before;
        let mut kept_sum = queue[last_kept].since(origin);
        for place in lowered.after..queue.len() {
            let charge = queue[place];
            let sum = start.max(charge.since(origin) - cost);
            // A charge that adds nothing to the sum is removed entirely.
            if sum > kept_sum {
                last_kept += 1;
                kept_sum = sum;
                queue[last_kept] = LogEntry::new(charge.time(), origin.total() + sum);
            }
        }
        queue.truncate(last_kept + 1);
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
                queue.extend([LogEntry::new(0, 0), LogEntry::new(time, cost)]);
                self.drop_before(0);
            }
            None if cost > 0 => *self = Self::one(time, cost),
            _ => self.0 = None,
        }
    }

    /// Adds a charge: to the newest entry if that has the same time, else as a new entry.
    pub(super) fn add(&mut self, base: usize, time: i64, cost: i64) {
        let newest = match &mut self.0 {
            // A charge that is added to the base would not count.
            Some(queue) if queue.len() > base + 1 => queue.back_mut(),
            _ => None,
        };
        match newest {
            Some(newest) if newest.time() == time => {
                *newest = LogEntry::new(time, newest.total() + cost);
            }
            _ => self.push(time, cost),
        }
    }

    fn push(&mut self, time: i64, cost: i64) {
        let Some(queue) = &mut self.0 else {
            *self = Self::one(time, cost);
            return;
        };
        if queue.len() == queue.capacity() {
            // Grow by a quarter instead of doubling: a log may be long, and each caller has one.
            queue.reserve_exact(2 + queue.len() / 4);
        }
        let total = queue.back().map_or(0, |charge| charge.total());
        queue.push_back(LogEntry::new(time, total + cost));
    }
}

/// Two adjacent indices: a test is `false` for the first and `true` for the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Boundary {
    before: usize,
    after: usize,
}

/// Returns where `test` changes between `near` and `far`. It must be monotonic, `false` at `near` and `true` at `far`,
/// and is not called for these.
///
/// An exponential search: in steps that double, from `near`, then by bisection. So the time is
/// logarithmic in the distance from `near`, not in the length of the queue.
#[inline]
fn search(mut near: usize, mut far: usize, test: impl Fn(usize) -> bool) -> Boundary {
    let mut step = 1_usize;
    while near.abs_diff(far) > 1 {
        let ahead = step.min(near.abs_diff(far) / 2);
        let place = if far > near {
            near + ahead
        } else {
            near - ahead
        };
        if test(place) {
            far = place;
            // Halve the distance in each further step.
            step = usize::MAX;
        } else {
            near = place;
            step = step.saturating_mul(2);
        }
    }
    Boundary {
        before: near,
        after: far,
    }
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
