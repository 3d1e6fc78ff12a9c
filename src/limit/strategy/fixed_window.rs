//! Fixed windows: a counter that restarts with every window.
//!
//! **Idea.** Count the grants since the window started; a check of cost `c` is allowed while `count
//! + c <= L`. With [`Align::Clock`](super::Align::Clock) all callers have the same windows; with
//! [`Align::FirstHit`](super::Align::FirstHit) a caller's window starts with its first charge.
//!
//! **Cost.** One key, two numbers, one read and one write.
//!
//! **When not.** If twice the limit within a short time is too much: that can be granted around the
//! border of two windows.
//!
//! **Source.** redis_rate v6 (slots of the clock); Istio's redisquota `FIXED_WINDOW` (from the first hit).

use std::time::Duration;

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::{Frees, Params, Snapshot, Strategy};
use crate::error::ConfigError;
use crate::limit::{PolicyCharge, Quota, duration};

/// When fixed windows start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Align {
    /// On the clock: windows follow each other without a gap, and one of them starts at the Unix
    /// epoch plus `offset`. `Quota::per_day` with an offset of 22 hours starts at midnight of
    /// UTC+2.
    Clock {
        /// The start of a window after the Unix epoch; shorter than the period.
        offset: Duration,
    },
    /// Each caller's window starts with its first charge and lasts one period. The next charge
    /// after that starts another window.
    FirstHit,
}

/// On the clock, without an offset.
impl Default for Align {
    fn default() -> Self {
        Self::Clock {
            offset: Duration::ZERO,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The start of the caller's last window.
    start: i64,
    /// The amount granted in that window.
    count: i64,
}

/// Registers: the start of the current window, and the amount granted in it.
impl Algorithm for State {
    fn frees(_: Strategy) -> Frees {
        Frees::WithWindow
    }

    fn adapt(strategy: Strategy, params: &mut Params, quota: Quota) -> Result<(), ConfigError> {
        let Strategy::FixedWindow(Align::Clock { offset }) = strategy else {
            return Ok(());
        };
        let period = quota.period();
        if offset >= period {
            let same = Duration::from_micros((offset.as_micros() % period.as_micros()) as u64);
            let [offset, period, same] = [offset, period, same].map(duration::Text);
            return Err(ConfigError::new(format!(
                "an offset of {offset} for a window of {period}: use `{same}`, which starts the same windows"
            )));
        }
        params.offset = Some(offset.as_micros() as i64);
        Ok(())
    }

    fn parameter(strategy: Strategy) -> Option<String> {
        match strategy {
            Strategy::FixedWindow(Align::FirstHit) => Some("first-hit".to_owned()),
            Strategy::FixedWindow(Align::Clock { offset }) if !offset.is_zero() => {
                Some(format!("clock+{}", duration::Text(offset)))
            }
            _ => None,
        }
    }

    fn with_parameter(_: Strategy, text: &str) -> Result<Strategy, &'static str> {
        let align = match text.split_once('+') {
            None if text == "first-hit" => Align::FirstHit,
            None if text == "clock" => Align::default(),
            Some((clock, offset)) if clock.trim_end() == "clock" => Align::Clock {
                offset: duration::parse(offset)?,
            },
            _ => return Err("its alignment is not one of `clock`, `clock+22h` and `first-hit`"),
        };
        Ok(Strategy::FixedWindow(align))
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let Self { start, count } = *self;
        if start > now {
            return ([window_start(params, now), count, 0], true);
        } else if count > 0 && now - start < params.period {
            return clean([start, count, 0]);
        }
        clean([window_start(params, now), 0, 0])
    }

    fn room(params: &Params, _now: i64, [_, count, _]: Registers) -> i64 {
        params.capacity - count
    }

    fn wait(&self, params: &Params, now: i64, _cost: i64, [start, ..]: Registers) -> i64 {
        start + params.period - now
    }

    fn charge(
        &mut self,
        _params: &Params,
        _now: i64,
        cost: i64,
        [start, count, _]: Registers,
    ) -> Registers {
        [start, count + cost, 0]
    }

    /// Refunds only if the current window contains the charge: that window ends when the charge was
    /// to expire. Any other window ends at least a period later. The tolerance of half a period
    /// covers the time that a check takes to arrive.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        registers: Registers,
    ) -> Refunded {
        let [start, count, _] = registers;
        if 2 * (start + params.period - now - of.left()) >= params.period {
            return (registers, 0);
        }
        ([start, (count - cost).max(0), 0], cost.min(count))
    }

    fn reset_after(&self, params: &Params, now: i64, [start, count, _]: Registers) -> i64 {
        if count == 0 {
            0
        } else {
            start + params.period - now
        }
    }

    fn save(&mut self, _params: &Params, _now: i64, _cost: i64, [start, count, _]: Registers) {
        *self = Self { start, count };
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until, .. }: Snapshot) -> Self {
        let start = match params.offset {
            Some(_) => window_start(params, now),
            None => until - params.period,
        };
        Self { start, count: used }
    }

    fn to_numbers(&self) -> Vec<i64> {
        vec![self.start, self.count]
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let &[start, count] = numbers else {
            return None;
        };
        Some(Self { start, count })
    }
}

/// Returns the start of a window that contains `now`: the previous border of the clock, or `now`.
fn window_start(params: &Params, now: i64) -> i64 {
    match params.offset {
        Some(offset) => now - (now - offset).rem_euclid(params.period),
        None => now,
    }
}

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let period = model.period;
    match model.strategy {
        Strategy::FixedWindow(Align::Clock { offset }) => {
            let window = |time: i128| (time - offset.as_micros() as i128).div_euclid(period);
            model.granted(|time| window(time) == window(now)) + cost <= model.limit
        }
        _ => {
            let mut start = i128::MIN / 2;
            for (time, _) in &model.grants {
                start = if *time >= start + period {
                    *time
                } else {
                    start
                };
            }
            model.granted(|time| time >= start && now < start + period) + cost <= model.limit
        }
    }
}
