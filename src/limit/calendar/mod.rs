//! Calendar windows: days, weeks, months and years in a time zone.

mod civil;
mod custom;
mod dates;
#[cfg(test)]
mod tests;
mod text;
mod zone;

use std::fmt;
use std::ops::Range;
use std::time::SystemTime;

use super::policy::check_name;
use super::{Quota, micros};
use crate::error::ConfigError;
use custom::CustomWindows;
use dates::{Dates, Unit};
use zone::Zone;

/// Days, weeks, months or years in a time zone: the windows of
/// [`Align::Calendar`](super::Align::Calendar).
///
/// A count belongs to the policy's name and the unit, and ends with the window in which it began. So another first day or time
/// zone under the same name begins no second window while that count lasts. If the count ends in the second half of the other
/// calendar's window, it lasts until the end of that window.
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
    windows: Windows,
}

/// The source of the windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Windows {
    Dates(Dates),
    Custom(CustomWindows),
    /// Unknown: the key of a count in Redis does not name its calendar. The count ends as its value says.
    OfKey,
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

/// A window, in microseconds since the Unix epoch. It contains `start`, but not `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: i64,
    pub(crate) end: i64,
}

/// The latest instant in microseconds, in the year 2255: a larger number is not exact in Lua.
const LATEST: i64 = 1 << 53;
/// The longest window, in microseconds, without changes of a zone: 366 days.
const LONGEST: i64 = 366 * 86_400_000_000;
/// Upper bound of the time that a zone's change adds to a window, in microseconds. Moving the date line adds a day.
const LONGEST_CHANGE: i64 = 2 * 86_400_000_000;

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

    /// Windows of your own, such as the periods of a contract: `window_of` returns the window that contains an instant. Windows
    /// must touch, contain their instant, and last 1 second to 366 days. Otherwise the check of a store fails with an
    /// error that names the window, and nothing is granted.
    ///
    /// The function must always return the same windows, in all instances. It is called for the window at the time of
    /// a check, the one before and the one after, once for each of them, and never under a lock. The name is part of the key instead of the unit, and two
    /// calendars of one name are equal. There is no text form, so settings cannot name such a calendar. The period of the quota
    /// is not used, except in messages.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use tower_redis_ratelimit::strategy::{Align, Calendar};
    /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
    ///
    /// /// Four weeks each, such as from January 5, 2026.
    /// let billing = Calendar::custom("billing", |now| {
    ///     // Long before the first contract.
    ///     let first = SystemTime::UNIX_EPOCH + Duration::from_secs(1_555_200);
    ///     let period = Duration::from_secs(28 * 86_400);
    ///     let since = now.duration_since(first).unwrap_or_default();
    ///     let number = since.as_secs() / period.as_secs();
    ///     let start = first + period * number as u32;
    ///     start..start + period
    /// })?;
    /// let periods = Strategy::FixedWindow(Align::Calendar(billing));
    /// let plan = Policy::new("plan", periods, Quota::per_month(10_000))?;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error for a name that is no [name of a policy](crate::Policy::new).
    pub fn custom(
        name: &'static str,
        window_of: fn(SystemTime) -> Range<SystemTime>,
    ) -> Result<Self, ConfigError> {
        check_name(name)?;
        let windows = Windows::Custom(CustomWindows::new(name, window_of));
        Ok(Self { windows })
    }

    /// Returns the calendar of a count found in Redis.
    pub(crate) const fn of_key() -> Self {
        Self {
            windows: Windows::OfKey,
        }
    }

    const fn of(unit: Unit) -> Self {
        let zone = Zone::UTC;
        Self {
            windows: Windows::Dates(Dates { unit, zone }),
        }
    }

    /// Sets the time zone; defaults to UTC. It is an offset of at most 14 hours, such as `+02:00` or
    /// `-03:30`, or with the feature `time-zones` a name of the IANA database, such as
    /// `Europe/Berlin`, whose midnight stays midnight in summer.
    ///
    /// Names come from the machine's database; without one, the crate `jiff` brings its own. A process keeps the rules with which it first used a zone. Instances with other rules
    /// may disagree about a border: a count then ends at that of the instance that began it.
    ///
    /// # Errors
    ///
    /// Returns an error for an offset beyond 14 hours, for a name that the database does not have,
    /// for any name without the feature, and for [`custom`](Self::custom) windows, which have no zone.
    pub fn in_zone(self, zone: &str) -> Result<Self, ConfigError> {
        let Windows::Dates(Dates { unit, .. }) = self.windows else {
            let fix = "the windows of a function have none: remove it";
            return Err(ConfigError::invalid("time zone", zone, fix));
        };
        let zone = Zone::read(zone)?;
        Ok(Self {
            windows: Windows::Dates(Dates { unit, zone }),
        })
    }

    /// Returns the quota of this limit in every window. `None` if the windows have no unit: any quota is valid.
    pub(crate) const fn quota(&self, limit: u32) -> Option<Quota> {
        match self.windows {
            Windows::Dates(dates) => Some(dates.unit.quota(limit)),
            Windows::Custom(_) | Windows::OfKey => None,
        }
    }

    /// Returns an upper bound of a window's length, in microseconds.
    pub(super) fn longest(&self) -> i64 {
        match self.windows {
            Windows::Dates(dates) if dates.zone.changes() => {
                micros(dates.unit.quota(1).period()) + LONGEST_CHANGE
            }
            Windows::Dates(dates) => micros(dates.unit.quota(1).period()),
            Windows::Custom(_) | Windows::OfKey => LONGEST,
        }
    }

    /// Calls the function of [custom](Self::custom) windows for those around an instant. Call it under no lock.
    ///
    /// # Errors
    ///
    /// Names the problem of a window.
    pub(super) fn prepare(&self, now: i64) -> Result<(), String> {
        match self.windows {
            Windows::Custom(windows) => windows.prepare(now.clamp(0, LATEST)),
            Windows::Dates(_) | Windows::OfKey => Ok(()),
        }
    }

    /// Returns the window that contains an instant, in microseconds since the Unix epoch. `None` for a [custom](Self::custom)
    /// window that is invalid or not [prepared](Self::prepare).
    pub(crate) fn window(&self, now: i64) -> Option<Window> {
        match self.windows {
            Windows::Dates(dates) => Some(dates.window(now)),
            Windows::Custom(windows) => windows.window(now.clamp(0, LATEST)),
            Windows::OfKey => Some(around(now)),
        }
    }

    /// Returns the rest of the window that contains an instant, in microseconds; of an invalid one, 0.
    pub(crate) fn rest(&self, now: i64) -> i64 {
        match self.window(now) {
            Some(window) => window.end - now,
            None => 0,
        }
    }

    /// Returns the borders of two windows that touch: the window of `now`, and the nearer neighbor. `None` as for
    /// [`window`](Self::window).
    pub(crate) fn borders(&self, now: i64) -> Option<[i64; 3]> {
        match self.windows {
            Windows::Dates(dates) => Some(dates.borders(now)),
            Windows::Custom(windows) => windows.borders(now.clamp(0, LATEST)),
            Windows::OfKey => {
                let Window { start, end } = around(now);
                Some([start - 1, start, end])
            }
        }
    }
}

/// Returns a window in which any count ends in the first half, so that the end in its value stays.
fn around(now: i64) -> Window {
    Window {
        start: now.saturating_sub(LONGEST),
        end: now.saturating_add(4 * LONGEST),
    }
}

/// As text: [`FromStr`](std::str::FromStr) reads it back, except a [custom](Calendar::custom) calendar's name.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}
