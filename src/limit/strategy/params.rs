use std::num::NonZeroU32;

use super::{Align, Frees, Strategy, Writer};
use crate::error::ConfigError;
use crate::limit::{Calendar, PolicyKind, Quota, duration};

/// A policy as numbers, for both halves. Everything stays below 2^53, so that Lua's doubles are
/// exact.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Params {
    /// The largest cost that a fresh caller can pay.
    pub(crate) capacity: i64,
    /// The period in microseconds.
    pub(crate) period: i64,
    /// Ticks per microsecond.
    pub(crate) ticks: i64,
    /// The time in which a unit of cost refills, in ticks.
    pub(crate) interval: i64,
    /// The time in which the capacity refills, in ticks.
    pub(crate) full: i64,
    /// The highest level of a meter that only this quota has charged, in ticks: twice the capacity, or the turns of a day
    /// ahead.
    pub(crate) deepest: i64,
    /// The highest level of a meter, in ticks: another quota may have charged more. No time until it has drained reaches
    /// 2^53.
    pub(crate) highest: i64,
    /// The longest wait of a take ahead, in microseconds.
    pub(crate) longest: i64,
    /// A time in microseconds that is longer than any debt of this policy takes to refill.
    pub(crate) furthest: i64,
    /// The start of windows aligned to the clock, in microseconds within a period.
    pub(crate) offset: Option<i64>,
    /// The windows of a calendar. Then `period` is an upper bound of their lengths.
    pub(crate) calendar: Option<Calendar>,
    /// The width of a cell, in microseconds.
    pub(crate) width: i64,
    pub(crate) frees: Frees,
    /// The quota as the value of a meter names it. A share has that of the whole policy: their levels are the same time.
    pub(crate) writer: Writer,
    /// Ticks of a unit in the value of a meter: the interval of the whole policy.
    pub(crate) unit: i64,
    /// Units of the whole policy that a meter drains per microsecond.
    pub(crate) rate: f64,
}

/// Maximum time for which a turn is reserved ahead, in microseconds: a day.
const LONGEST_WAIT: i64 = 86_400_000_000;

/// The most ticks of a debt.
pub(super) const MAX_TICKS: i64 = 1 << 52;

impl Params {
    pub(in crate::limit) fn new(kind: PolicyKind, quota: Quota) -> Result<Self, ConfigError> {
        check_calendar(kind, quota)?;
        let capacity = quota.capacity();
        let frees = kind.frees();
        if capacity != quota.limit() && !frees.has_burst() {
            return Err(ConfigError::new(format!(
                "a burst of {capacity} for a window of {}: remove the burst, which is always the limit, or use a strategy \
                 with a burst, such as GCRA",
                quota.limit()
            )));
        }
        let period = quota.period().as_micros();
        let (ticks, interval) = match frees {
            Frees::InBatches => (u128::from(quota.limit()), 1),
            Frees::Gradually
            | Frees::WithWindow
            | Frees::WithCell
            | Frees::OneByOne
            | Frees::Fading
            | Frees::OnRelease => rate(period, u128::from(quota.limit()), u128::from(capacity)),
        };
        let full = u128::from(capacity) * interval;
        // A checked quota has a period of at most 2^45 us and refills within 2^49 us, so `full` is
        // at most 2^51 ticks.
        let mut params = Self {
            capacity: i64::from(capacity),
            period: period as i64,
            ticks: ticks as i64,
            interval: interval as i64,
            full: full as i64,
            deepest: 0,
            highest: 0,
            longest: 0,
            furthest: 0,
            offset: None,
            calendar: None,
            width: period as i64,
            frees,
            writer: Writer::default(),
            unit: interval as i64,
            rate: 0.0,
        }
        .with_debt()
        .named();
        if let PolicyKind::Rate(strategy) = kind {
            strategy.adapt(&mut params, quota)?;
        }
        Ok(params)
    }

    /// Returns the numbers of the quota that wrote the level of a meter. `None` if no quota has this code.
    pub(super) fn of_writer(writer: Writer, frees: Frees) -> Option<Self> {
        let [interval, ticks, capacity] = writer.numbers()?;
        let (interval, period) = if frees == Frees::InBatches {
            (1, interval)
        } else {
            (interval, 1)
        };
        let full = capacity.saturating_mul(interval);
        if full > MAX_TICKS / 2 {
            return None;
        }
        let params = Self {
            capacity,
            period,
            ticks,
            interval,
            full,
            deepest: 0,
            highest: 0,
            longest: 0,
            furthest: 0,
            offset: None,
            calendar: None,
            width: period,
            frees,
            writer,
            unit: interval,
            rate: 0.0,
        };
        Some(params.with_debt().named())
    }

    /// Sets the name of the quota in values.
    fn named(mut self) -> Self {
        let interval = if self.frees == Frees::InBatches {
            self.period
        } else {
            self.interval
        };
        self.writer = Writer::new(interval, self.ticks, self.capacity);
        self.rate = self.ticks as f64 / interval as f64;
        self
    }

    /// Names the quota in values as the whole policy does.
    pub(in crate::limit) fn part_of(self, whole: &Self) -> Self {
        Self {
            writer: whole.writer,
            unit: whole.unit,
            rate: whole.rate,
            ..self
        }
    }

    /// Sets the debt that the full count and the ticks allow.
    fn with_debt(mut self) -> Self {
        self.deepest = 2 * self.full;
        self.highest = (MAX_TICKS / self.period)
            .saturating_mul(self.ticks)
            .min(MAX_TICKS);
        if self.frees.is_gradual() {
            let ahead = self.full + LONGEST_WAIT.saturating_mul(self.ticks).min(MAX_TICKS);
            self.deepest = self.deepest.max(ahead.min(MAX_TICKS));
            self.highest = MAX_TICKS;
            self.longest = (self.deepest - self.full) / self.ticks;
        }
        self.furthest = self.deepest / self.ticks + 1;
        self
    }

    /// Divides a meter that drains after each period as this share is divided. Other shares keep the drain of the whole
    /// policy, and have larger units.
    pub(super) fn shared_as(self, share: &Self) -> Self {
        let Some([_, whole, _]) = share.writer.numbers() else {
            return self;
        };
        if self.frees != Frees::InBatches || share.ticks == whole {
            return self;
        }
        let ticks = (i128::from(self.ticks) * i128::from(share.ticks) / i128::from(whole)) as i64;
        let ticks = ticks.max(1);
        Self { ticks, ..self }.with_debt()
    }

    /// Returns a time by the clock that decides the policy. That of calendars is `ahead`.
    #[inline]
    pub(crate) fn time(&self, now: i64, ahead: i64) -> i64 {
        match self.calendar {
            Some(_) => now + ahead,
            None => now,
        }
    }

    /// Converts the cost of a take to ticks of a meter. A cost above the capacity is lowered to just above it, so that it
    /// cannot overflow: it is denied in both cases.
    pub(crate) fn ticks_of_take(&self, cost: u32) -> i64 {
        i64::from(cost).min(self.capacity + 1) * self.interval
    }

    /// Returns the units of a meter that refill in `time` microseconds, rounded up.
    pub(in crate::limit) fn units_in(&self, time: i64) -> i64 {
        time.saturating_mul(self.ticks)
            .saturating_add(self.interval - 1)
            / self.interval
    }

    /// Returns the microseconds in which a meter refills `units`, rounded down.
    pub(in crate::limit) fn time_for(&self, units: u32) -> i64 {
        i64::from(units) * self.interval / self.ticks
    }

    /// Rescales a share so that its level drains per microsecond as fast as that of the whole
    /// policy. So a level means the same time for every number of instances.
    pub(in crate::limit) fn share_of(self, whole: &Self, instances: NonZeroU32) -> Self {
        let interval = whole.interval.saturating_mul(instances.get().into());
        let full = self.capacity.saturating_mul(interval);
        if !self.frees.is_gradual() || full > MAX_TICKS / 2 {
            return self;
        }
        Self {
            ticks: whole.ticks,
            interval,
            full,
            ..self
        }
        .with_debt()
    }
}

/// Returns an error if a kind of limit does not count this month or year.
fn check_calendar(kind: PolicyKind, quota: Quota) -> Result<(), ConfigError> {
    let Some(calendar) = quota.calendar() else {
        return Ok(());
    };
    if let PolicyKind::Rate(Strategy::FixedWindow(Align::Calendar(_))) = kind {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "the quota `{quota}` under {kind}, which counts no calendar: use the strategy `fixed-window({calendar})`, or a \
         period such as `{}`",
        duration::Text(quota.period())
    )))
}

/// Returns the ticks per microsecond and per unit of cost, so that `interval / ticks` is `period /
/// limit`.
///
/// The result is exact if the numbers allow; otherwise the interval is rounded up, by less than one
/// part in 500,000.
fn rate(period: u128, limit: u128, capacity: u128) -> (u128, u128) {
    let divisor = gcd(period, limit);
    let interval = period / divisor;
    let max = MAX_TICKS as u128;
    if 2 * capacity * interval <= max {
        return (limit / divisor, interval);
    }
    // Rounding up adds at most one tick to the interval, `2 * capacity` to a full debt.
    let ticks = (max - 2 * capacity) * limit / (2 * capacity * period);
    (ticks, (period * ticks).div_ceil(limit))
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}
