//! Sliding log: the time of every charge.
//!
//! **Idea.** A check of cost `c` is allowed while the charges in `(now - P, now]` and `c` make no more than `L`. A
//! charge that is exactly one period old is gone.
//!
//! **Cost.** The only strategy that is exact at every moment, and the only one whose memory grows with the limit: in
//! Redis 12 to 16 bytes per charge, here 12 to 15. So a limit is at most 100,000. Each charge is kept with the sum of all
//! up to it: a check looks at a few charges however long the log, and a denial finds those that must leave, or a give
//! back the charge that it is of, by a binary search. A refund lowers the sums after that: here all of them, in Redis
//! those of a block of charges and of the blocks.
//!
//! **A clock that goes back** by 1 ms moves what was charged in that millisecond to now, and nothing else.
//!
//! **When not.** For high limits.
//!
//! **Source.** The ZSET recipe (`ZREMRANGEBYSCORE key 0 now-P`, `ZCARD`, `ZADD`); Redisson's `RRateLimiter`, whose
//! permits have weights. A list does it in constant time, since charges come in the order of time.

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::charges::Charges;
use super::{Frees, Params, Snapshot, Strategy};
use crate::error::ConfigError;
use crate::limit::{Charged, Quota};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    charges: Charges,
}

/// The highest limit: one key is then at most 1.3 MB in Redis and 1.5 MB here, twice that in full debt.
pub(super) const MAX: u32 = 100_000;

/// The place of the base, where nothing counts.
const NOTHING: i64 = -1;

/// Registers: the sum of the charges within the period; the place of the last that has left it, or [`NOTHING`]; the time of
/// the newest charge.
impl Algorithm for State {
    fn frees(_: Strategy) -> Frees {
        Frees::OneByOne
    }

    fn adapt(_: Strategy, _: &mut Params, quota: Quota) -> Result<(), ConfigError> {
        let limit = quota.limit();
        if limit <= MAX {
            return Ok(());
        }
        Err(ConfigError::new(format!(
            "a limit of {limit} for a sliding log, which keeps every charge: write at most {MAX}, or choose a sliding window"
        )))
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        match self.charges.after(now - params.period) {
            // After now it is of a clock that has gone back: as if it had been charged now.
            Some((head, sum, newest)) => ([sum, head as i64, newest.min(now)], newest > now),
            None => clean([0, NOTHING, now]),
        }
    }

    fn room(params: &Params, _now: i64, [sum, ..]: Registers) -> i64 {
        params.capacity - sum
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [sum, head, newest]: Registers) -> i64 {
        let frees = match head {
            NOTHING => None,
            head => self
                .charges
                .freeing(head as usize, sum + cost - params.capacity),
        };
        frees.map_or(newest, |time| time.min(now)) + params.period - now
    }

    fn charge(
        &mut self,
        _params: &Params,
        now: i64,
        cost: i64,
        [sum, head, _]: Registers,
    ) -> Registers {
        [sum + cost, head, now]
    }

    /// Of a charge within the period: from the first that was made at its time or later. From an older one it would free
    /// what is about to leave anyway, and from a newer one what would count for longer than the charge did.
    fn refund(
        &mut self,
        _params: &Params,
        now: i64,
        cost: i64,
        of: &Charged,
        registers: Registers,
    ) -> Refunded {
        let [sum, head, newest] = registers;
        let left = (sum - cost).max(0);
        if of.left() <= 0 {
            return (registers, 0);
        } else if head == NOTHING
            || left == 0
            || self.charges.newest().is_some_and(|newest| newest > now)
        {
            // What is left of a clock that has gone back is as if it had been charged now.
            return ([left, NOTHING, newest], cost);
        }
        self.charges.take_out(head as usize, now - of.age - 1, cost);
        ([left, head, self.charges.newest().unwrap_or(newest)], cost)
    }

    fn reset_after(params: &Params, now: i64, [sum, _, newest]: Registers) -> i64 {
        if sum == 0 {
            0
        } else {
            newest + params.period - now
        }
    }

    fn save(&mut self, _params: &Params, now: i64, cost: i64, [sum, head, newest]: Registers) {
        if head == NOTHING || sum == 0 {
            return self.charges.restart(newest, sum);
        }
        let head = head as usize;
        if self.charges.newest().is_some_and(|newest| newest > now) {
            self.charges.merge(self.charges.first_after(head, now), now);
        }
        if cost > 0 {
            self.charges.add(head, now, cost);
        }
        self.charges.drop_before(head);
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        // All that is used goes with the newest charge: some of it may have gone before.
        Self {
            charges: Charges::one((until - params.period).min(now), used),
        }
    }
}

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    model.granted(|time| time > now - model.period) + cost <= model.limit
}
