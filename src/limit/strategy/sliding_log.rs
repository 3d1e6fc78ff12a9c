//! Sliding log: the time of every charge.
//!
//! **Idea.** A check of cost `c` is allowed while the charges in `(now - P, now]` plus `c` are at
//! most `L`. A charge that is exactly one period old has expired.
//!
//! **Cost.** The only strategy that is exact at every moment, and the only one whose memory grows
//! with the limit: 12 to 16 bytes per charge in Redis, 12 to 15 here. The limit is therefore at
//! most 100,000. Each charge is stored with the running sum of all charges up to it. So a check
//! reads a few charges, independent of the log's length, and binary search finds the charges that
//! must expire after a denial, and the charge of a refund. A refund lowers all later sums: here
//! those of the charges, in Redis those of one block of charges and of the later blocks.
//!
//! **A clock that goes back** by 1 ms moves the charges of that millisecond to now, and no others.
//!
//! **When not.** For high limits.
//!
//! **Source.** The ZSET recipe (`ZREMRANGEBYSCORE key 0 now-P`, `ZCARD`, `ZADD`); Redisson's
//! `RRateLimiter`, whose permits have weights. Charges arrive in order of time, so a list needs
//! constant time per charge.

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::charges::Charges;
use super::{Frees, Params, Snapshot, Strategy};
use crate::error::ConfigError;
use crate::limit::{PolicyCharge, Quota};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    charges: Charges,
}

/// Maximum limit: one key then takes up to 1.3 MB in Redis and 1.5 MB here, and twice that if fully
/// in debt.
pub(super) const MAX: u32 = 100_000;

/// The index of the base if no charge counts.
const NOTHING: i64 = -1;

/// Registers: the sum of the charges within the period; the index of the last expired one, or
/// [`NOTHING`]; the time of the newest charge.
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
            "a limit of {limit} is too high for a sliding log, which stores every charge: use at most {MAX}, or a sliding window"
        )))
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        match self.charges.after(now - params.period) {
            // A charge in the future was made before the clock went back: treat it as made now.
            Some((head, sum, newest)) => ([sum, head as i64, newest.min(now)], newest > now),
            None => clean([0, NOTHING, now]),
        }
    }

    fn room(params: &Params, _now: i64, [sum, ..]: Registers) -> i64 {
        params.capacity - sum
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [sum, head, newest]: Registers) -> i64 {
        let over = sum + cost - params.capacity;
        let freeing = match head {
            NOTHING => None,
            head => self.charges.freeing(head as usize, over),
        };
        let charged_at = match freeing {
            // A stored charge in the future expires as one made now: see `load`.
            Some(time) => time.min(now),
            None => newest,
        };
        charged_at + params.period - now
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

    /// Refunds a charge within the period, starting at the first charge that is as old or newer.
    /// Refunding from an older charge would free units that are about to expire anyway, and from a
    /// newer one units that count for longer than the charge does.
    fn refund(
        &mut self,
        _params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        registers: Registers,
    ) -> Refunded {
        if of.left() <= 0 {
            return (registers, 0);
        }
        let [sum, head, newest] = registers;
        let refunded = cost.min(sum);
        let left = sum - refunded;
        if head == NOTHING || left == 0 || self.is_from_future(now) {
            // After the clock went back, the rest counts as charged now.
            return ([left, NOTHING, newest], refunded);
        }
        self.charges.take_out(head as usize, now - of.age - 1, cost);
        let newest = self.charges.newest().unwrap_or(newest);
        ([left, head, newest], refunded)
    }

    fn reset_after(&self, params: &Params, now: i64, [sum, _, newest]: Registers) -> i64 {
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
        if self.is_from_future(now) {
            let first = self.charges.first_after(head, now);
            self.charges.merge(first, now);
        }
        if cost > 0 {
            self.charges.add(head, now, cost);
        }
        self.charges.drop_before(head);
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until, .. }: Snapshot) -> Self {
        // All used units expire together with the newest charge, although some may expire earlier.
        Self {
            charges: Charges::one((until - params.period).min(now), used),
        }
    }

    fn to_numbers(&self) -> Vec<i64> {
        self.charges.to_numbers()
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let charges = Charges::of_numbers(numbers)?;
        Some(Self { charges })
    }
}

impl State {
    /// Returns `true` if the newest charge was made before the clock went back.
    fn is_from_future(&self, now: i64) -> bool {
        self.charges.newest().is_some_and(|newest| newest > now)
    }
}

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    model.granted(|time| time > now - model.period) + cost <= model.limit
}
