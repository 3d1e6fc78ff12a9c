//! Sliding log: the time of every charge.
//!
//! **Idea.** A check of cost `c` is allowed while the charges in `(now - P, now]` and `c` make no more than `L`. A
//! charge that is exactly one period old is gone.
//!
//! **Cost.** The only strategy that is exact at every moment, and the only one whose memory grows with the limit: in
//! Redis about 10 bytes per charge of 1, 14 per larger one. A check takes the same time however long the log is, but a
//! denial looks at as many charges as must leave: about 0.3 us for each unit of a cost that is denied.
//!
//! **When not.** For high limits.
//!
//! **Source.** The ZSET recipe (`ZREMRANGEBYSCORE key 0 now-P`, `ZCARD`, `ZADD`); Redisson's `RRateLimiter`, whose
//! permits have weights. A list does it in constant time, since charges come in the order of time.

use super::charges::Charges;
use super::{Followed, Loaded, Terms, Twin, clean, dirty};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The sum of the charges.
    sum: i64,
    /// The time of the newest charge.
    newest: i64,
    /// Times and costs, oldest first.
    charges: Charges,
}

/// Loaded: the sum of the charges within the period; one more than the charges at the front that are to go, or 0 if all
/// are; the time of the newest charge.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.period, 0, 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        if self.newest <= now - terms.period {
            return clean([0, 0, now]);
        } else if self.newest > now {
            // Of a clock that has gone back: all that counts is as if it had been charged now.
            return dirty([self.sum.clamp(0, 2 * terms.capacity), 0, now]);
        }
        let old = self.charges.iter().take_while(|(time, _)| *time <= now - terms.period);
        let (gone, cost) = old.fold((0, 0), |(gone, sum), (_, cost)| (gone + 1, sum + cost));
        clean([self.sum - cost, 1 + gone, self.newest])
    }

    fn room(terms: &Terms, _now: i64, [sum, ..]: Loaded) -> i64 {
        terms.capacity - sum
    }

    fn wait(&self, terms: &Terms, now: i64, cost: i64, [sum, head, _]: Loaded) -> i64 {
        let mut wait = terms.period;
        if head > 0 {
            let mut over = sum + cost - terms.capacity;
            for (time, charge) in self.charges.iter().skip(head as usize - 1) {
                over -= charge;
                wait = time + terms.period - now;
                if over <= 0 {
                    break;
                }
            }
        }
        wait
    }

    fn charge(&mut self, _terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) -> Loaded {
        let sum = (sum + cost).max(0);
        if cost > 0 {
            [sum, head, now]
        } else if sum > 0 && head > 0 {
            [sum, head, self.charges.give_back(-cost).unwrap_or(newest)]
        } else {
            [sum, head, newest]
        }
    }

    fn reset(terms: &Terms, now: i64, [sum, _, newest]: Loaded) -> i64 {
        if sum == 0 { 0 } else { newest + terms.period - now }
    }

    fn save(&mut self, _terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) {
        if head == 0 || sum == 0 {
            // A new log, of one charge of everything that counts.
            self.charges.clear();
            if sum > 0 {
                self.charges.push_back((newest, sum));
            }
        } else {
            self.charges.drain(..head as usize - 1);
            if cost > 0 {
                self.charges.push_back((now, cost));
            }
        }
        (self.sum, self.newest) = (sum, newest);
        // A log that was long once does not keep its memory.
        let length = self.charges.len();
        if self.charges.capacity() > 4 * length + 16 {
            self.charges.shrink_to(2 * length);
        }
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        // All that is used goes with the newest charge: some of it may have gone before.
        let newest = (until - terms.period).min(now);
        Self { sum: used, newest, charges: Charges::one(newest, used) }
    }
}
