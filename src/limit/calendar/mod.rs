//! Calendar windows: days, weeks, months and years in a time zone.

mod civil;
#[cfg(test)]
mod tests;
mod text;
mod zone;

use std::fmt;
use std::time::Duration;

use super::{Quota, micros};
use crate::error::ConfigError;
use zone::Zone;

/// Days, weeks, months or years in a time zone: the windows of
/// [`Align::Calendar`](super::Align::Calendar).
///
/// Windows follow each other without a gap. They start at midnight of UTC, unless
/// [`in_zone`](Self::in_zone) sets another time zone. A day whose midnight is skipped starts with its
/// first instant, and one whose midnight occurs twice starts with the first.
///
/// # As text
///
/// | text | windows |
/// |---|---|
/// | `day` | days |
/// | `week`, `week from sunday` | weeks from Monday, or from another day |
/// | `month`, `month from 15` | months from the 1st, or from another day |
/// | `year`, `year from april 6` | years from January 1, or from another date |
/// | `month, +02:00` | any of them at an offset to UTC |
/// | `week from sunday, Europe/Berlin` | any of them in a zone of the IANA database |
///
/// ```
/// use tower_redis_ratelimit::strategy::{Align, Calendar};
/// use tower_redis_ratelimit::{Policy, Quota, Strategy};
///
/// let calendar = Calendar::month_from(15)?.in_zone("+02:00")?;
/// assert_eq!("month from 15, +02:00".parse(), Ok(calendar));
///
/// let months = Strategy::FixedWindow(Align::Calendar(calendar));
/// let plan = Policy::new("plan", months, Quota::per_month(10_000))?;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Calendar {
    unit: Unit,
    zone: Zone,
}

/// A day of the week.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are clear")]
pub enum Weekday {
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

/// The unit of a calendar, with the first day of its windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Unit {
    Day,
    Week { from: Weekday },
    Month { from: u8 },
    Year { month: u8, day: u8 },
}

/// A window, in microseconds since the Unix epoch. It contains `start`, but not `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: i64,
    pub(crate) end: i64,
}

/// The latest instant in microseconds, in the year 2255: a larger number is not exact in Lua.
const LATEST: i64 = 1 << 53;
/// Upper bound of the time that a zone's change adds to a window. Moving the date line adds a day.
const LONGEST_CHANGE: Duration = Duration::from_secs(2 * 86_400);

impl Calendar {
    /// Days.
    pub const fn day() -> Self {
        Self::of(Unit::Day)
    }

    /// Weeks from Monday.
    pub const fn week() -> Self {
        Self::week_from(Weekday::Monday)
    }

    /// Weeks from this day.
    pub const fn week_from(from: Weekday) -> Self {
        Self::of(Unit::Week { from })
    }

    /// Months from the 1st.
    pub const fn month() -> Self {
        Self::of(Unit::Month { from: 1 })
    }

    /// Months from this day. A month that is too short has its window start on its last day: from 31,
    /// windows start on January 31, on February 28 or 29, and on March 31.
    ///
    /// # Errors
    ///
    /// Returns an error for a day that is not from 1 to 31.
    pub fn month_from(day: u8) -> Result<Self, ConfigError> {
        if (1..=31).contains(&day) {
            return Ok(Self::of(Unit::Month { from: day }));
        }
        let fix = "use 1 to 31; 31 is the last day of shorter months";
        Err(ConfigError::invalid(
            "day of a month",
            &day.to_string(),
            fix,
        ))
    }

    /// Years from January 1.
    pub const fn year() -> Self {
        Self::of(Unit::Year { month: 1, day: 1 })
    }

    /// Years from this day of a month from 1 to 12. From February 29, windows start on February 28
    /// if the year has no 29th.
    ///
    /// ```
    /// use tower_redis_ratelimit::strategy::Calendar;
    ///
    /// assert_eq!(Calendar::year_from(4, 6)?.to_string(), "year from april 6");
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error for a date that no year has.
    pub fn year_from(month: u8, day: u8) -> Result<Self, ConfigError> {
        const LEAP_YEAR: i64 = 2000;
        let is_month = (1..=12).contains(&month);
        if is_month && (1..=civil::days_in(LEAP_YEAR, month.into())).contains(&day.into()) {
            return Ok(Self::of(Unit::Year { month, day }));
        }
        let fix = "use a month from 1 to 12 and one of its days, such as 4 and 6 for April 6";
        let date = format!("{month}, {day}");
        Err(ConfigError::invalid("month and day", &date, fix))
    }

    const fn of(unit: Unit) -> Self {
        let zone = Zone::UTC;
        Self { unit, zone }
    }

    /// Sets the time zone; defaults to UTC. It is an offset of at most 14 hours, such as `+02:00` or
    /// `-03:30`, or with the feature `time-zones` a name of the IANA database, such as
    /// `Europe/Berlin`, whose midnight stays midnight in summer.
    ///
    /// Names come from the machine's database; without one, the crate `jiff` brings its own. A process keeps the rules with which it first used a zone. Instances with other rules
    /// may disagree about a border: a count is then kept until the later end.
    ///
    /// # Errors
    ///
    /// Returns an error for an offset beyond 14 hours, for a name that the database does not have,
    /// and for any name without the feature.
    pub fn in_zone(self, zone: &str) -> Result<Self, ConfigError> {
        let zone = Zone::read(zone)?;
        Ok(Self { zone, ..self })
    }

    /// Returns the quota of this limit in every window.
    pub(crate) const fn quota(&self, limit: u32) -> Quota {
        match self.unit {
            Unit::Day => Quota::per_day(limit),
            Unit::Week { .. } => Quota::per_week(limit),
            Unit::Month { .. } => Quota::per_month(limit),
            Unit::Year { .. } => Quota::per_year(limit),
        }
    }

    /// Returns an upper bound of a window's length, in microseconds.
    pub(super) fn longest(&self) -> i64 {
        let change = if self.zone.changes() {
            LONGEST_CHANGE
        } else {
            Duration::ZERO
        };
        micros(self.quota(1).period() + change)
    }

    /// Returns the window that contains an instant, in microseconds since the Unix epoch.
    pub(crate) fn window(&self, now: i64) -> Window {
        let number = self.number_at(now);
        Window {
            start: self.start(number),
            end: self.start(number + 1),
        }
    }

    /// Returns the borders of two windows that touch: the window of `now`, and the nearer neighbor.
    pub(crate) fn borders(&self, now: i64) -> [i64; 3] {
        let number = self.number_at(now);
        let (start, end) = (self.start(number), self.start(number + 1));
        if now.saturating_sub(start) < end.saturating_sub(now) {
            [self.start(number - 1), start, end]
        } else {
            [start, end, self.start(number + 2)]
        }
    }

    /// Returns the number of the window that contains an instant.
    fn number_at(&self, now: i64) -> i64 {
        let now = now.clamp(0, LATEST);
        let mut number = self.number_of(self.zone.day_at(now));
        // A zone that sets its clocks back over midnight has instants of a day after the next one has started.
        while self.start(number) > now {
            number -= 1;
        }
        while self.start(number + 1) <= now {
            number += 1;
        }
        number
    }

    /// Returns the start of a window by its number.
    fn start(&self, number: i64) -> i64 {
        self.zone.start_of(self.first_day(number))
    }

    /// Returns the number of the window that begins on or before this day, or of the next one.
    fn number_of(&self, day: i64) -> i64 {
        match self.unit {
            Unit::Day => day,
            Unit::Week { from } => (day - first_such_day(from)).div_euclid(7),
            Unit::Month { .. } => {
                let (year, month) = civil::month_of(day);
                12 * year + month - 1
            }
            Unit::Year { .. } => civil::month_of(day).0,
        }
    }

    /// Returns the first day of a window by its number.
    fn first_day(&self, number: i64) -> i64 {
        let date = |year, month, day: u8| {
            let day = i64::from(day).min(civil::days_in(year, month));
            civil::day_number(year, month, day)
        };
        match self.unit {
            Unit::Day => number,
            Unit::Week { from } => 7 * number + first_such_day(from),
            Unit::Month { from } => date(number.div_euclid(12), number.rem_euclid(12) + 1, from),
            Unit::Year { month, day } => date(number, month.into(), day),
        }
    }
}

/// Returns the day number of the first such weekday since the Monday before the Unix epoch, a Thursday.
const fn first_such_day(weekday: Weekday) -> i64 {
    weekday as i64 - 3
}

/// As text: [`FromStr`](std::str::FromStr) reads it back.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}
