//! Fixed windows: a counter that restarts with every window.
//!
//! **Idea.** Count the grants since the window started; a check of cost `c` is allowed while
//! `count + c <= L`. With [`Align::Clock`](super::Align::Clock) all callers have the same windows; with
//! [`Align::FirstHit`](super::Align::FirstHit) a caller's window starts with its first charge.
//!
//! With [`Align::Calendar`](super::Align::Calendar), windows are the days, weeks, months or years of a
//! calendar.
//!
//! A count of a calendar knows the end of its window, and lasts until then under any other calendar too. So another first day
//! or zone, or another time zone database, begins no second window while the count lasts. If the count ends in the second
//! half of the check's window, it lasts until the end of that window: otherwise the caller would get a whole limit for the
//! short rest.
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
use crate::limit::{Calendar, PolicyCharge, Quota, Window, duration};

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
    /// In the days, weeks, months or years of a calendar, by Redis's clock. The period of the quota is
    /// the same unit: [`per_day`](Quota::per_day), [`per_week`](Quota::per_week),
    /// [`per_month`](Quota::per_month) or [`per_year`](Quota::per_year).
    ///
    /// Instances whose clocks are wrong decide the same. During an outage, a [`Fallback`](crate::Fallback) adds the last
    /// seen difference to Redis's clock, if its [`LocalStore`](crate::LocalStore) has seen a decision of Redis under a
    /// calendar. Without a `Fallback`, a `LocalStore` uses its own clock.
    Calendar(Calendar),
}

/// On the clock, without an offset.
impl Default for Align {
    fn default() -> Self {
        Self::Clock {
            offset: Duration::ZERO,
        }
    }
}

const SECOND: i64 = 1_000_000;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The start of the caller's last window; of a calendar, its end.
    border: i64,
    /// The amount granted in that window.
    count: i64,
}

/// Registers: the end of the current window; the amount granted in it; the length of the window.
impl Algorithm for State {
    fn frees(_: Strategy) -> Frees {
        Frees::WithWindow
    }

    fn adapt(strategy: Strategy, params: &mut Params, quota: Quota) -> Result<(), ConfigError> {
        match strategy {
            Strategy::FixedWindow(Align::Clock { offset }) => {
                check_offset(offset, quota)?;
                params.offset = Some(offset.as_micros() as i64);
            }
            Strategy::FixedWindow(Align::Calendar(calendar)) => {
                check_unit(calendar, quota)?;
                params.calendar = Some(calendar);
                params.period = calendar.longest();
            }
            _ => {}
        }
        Ok(())
    }

    fn parameter(strategy: Strategy) -> Option<String> {
        match strategy {
            Strategy::FixedWindow(Align::FirstHit) => Some("first-hit".to_owned()),
            Strategy::FixedWindow(Align::Clock { offset }) if !offset.is_zero() => {
                Some(format!("clock+{}", duration::Text(offset)))
            }
            Strategy::FixedWindow(Align::Calendar(calendar)) => Some(calendar.to_string()),
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
            _ => {
                return Err(
                    "its alignment is not one of `clock`, `clock+22h`, `first-hit` and `month`",
                );
            }
        };
        Ok(Strategy::FixedWindow(align))
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let Self { border, count } = *self;
        if let Some(calendar) = params.calendar {
            let Some(Window { start, end }) = calendar.window(now) else {
                // A function has returned an invalid window: nothing is granted.
                return clean([now + SECOND, params.capacity, SECOND]);
            };
            let length = end - start;
            if count == 0 || border <= now {
                return clean([end, 0, length]);
            } else if border - now > 2 * length {
                // The clock has gone back.
                return ([end, count, length], true);
            } else if border % 2 == 0 && border < end && 2 * (border - start) > length {
                // Saved, so that the wait of a denial is exact. Ends of windows are even: a count is extended once, also
                // under three calendars that extend each other's.
                return ([end + 1, count, length], true);
            }
            return clean([border, count, length]);
        }
        let period = params.period;
        if border > now {
            return ([window_start(params, now) + period, count, period], true);
        } else if count > 0 && now - border < period {
            return clean([border + period, count, period]);
        }
        clean([window_start(params, now) + period, 0, period])
    }

    fn room(params: &Params, _now: i64, [_, count, _]: Registers) -> i64 {
        params.capacity - count
    }

    fn wait(&self, _params: &Params, now: i64, _cost: i64, [end, ..]: Registers) -> i64 {
        end - now
    }

    fn charge(
        &mut self,
        _params: &Params,
        _now: i64,
        cost: i64,
        [end, count, length]: Registers,
    ) -> Registers {
        [end, count + cost, length]
    }

    /// Refunds only if the current window contains the charge: that window ends when the charge was
    /// to expire. Any other window ends at least a window's length later. The tolerance of half of it
    /// covers the time that a check takes to arrive.
    fn refund(
        &mut self,
        _params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        registers: Registers,
    ) -> Refunded {
        let [end, count, length] = registers;
        if 2 * (end - now - of.left()) >= length {
            return (registers, 0);
        }
        ([end, (count - cost).max(0), length], cost.min(count))
    }

    fn reset_after(&self, _params: &Params, now: i64, [end, count, _]: Registers) -> i64 {
        if count == 0 { 0 } else { end - now }
    }

    fn save(&mut self, params: &Params, _now: i64, _cost: i64, [end, count, _]: Registers) {
        let border = match params.calendar {
            Some(_) => end,
            None => end - params.period,
        };
        *self = Self { border, count };
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until, .. }: Snapshot) -> Self {
        let border = if params.calendar.is_some() {
            until
        } else if params.offset.is_some() {
            window_start(params, now)
        } else {
            until - params.period
        };
        Self {
            border,
            count: used,
        }
    }

    fn to_numbers(&self) -> Vec<i64> {
        vec![self.border, self.count]
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let &[border, count] = numbers else {
            return None;
        };
        Some(Self { border, count })
    }
}

/// Returns an error if an offset is not within the period.
fn check_offset(offset: Duration, quota: Quota) -> Result<(), ConfigError> {
    let period = quota.period();
    if offset < period {
        return Ok(());
    }
    let same = Duration::from_micros((offset.as_micros() % period.as_micros()) as u64);
    let [offset, period, same] = [offset, period, same].map(duration::Text);
    Err(ConfigError::new(format!(
        "an offset of {offset} for a window of {period}: use `{same}`, which starts the same windows"
    )))
}

/// Returns an error if the period of a quota is not the unit of a calendar.
fn check_unit(calendar: Calendar, quota: Quota) -> Result<(), ConfigError> {
    let of_unit = calendar.quota(quota.limit());
    if of_unit.is_none() || of_unit == Some(quota.with_limit(quota.limit())) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "the quota `{quota}` under the calendar `{calendar}`: use `{}/{}`, or another strategy",
        quota.limit(),
        calendar.name()
    )))
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
        Strategy::FixedWindow(Align::Calendar(calendar)) => {
            let window = |time: i128| calendar.window(time as i64).unwrap();
            model.granted(|time| window(time) == window(now)) + cost <= model.limit
        }
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
