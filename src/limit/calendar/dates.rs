//! Days, weeks, months and years in a time zone.

use super::zone::Zone;
use super::{LATEST, Weekday, Window, civil};
use crate::limit::Quota;

/// The windows of a unit in a time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Dates {
    pub(super) unit: Unit,
    pub(super) zone: Zone,
}

/// The unit of a calendar, with the first day of its windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Unit {
    Day,
    Week { from: Weekday },
    Month { from: u8 },
    Year { month: u8, day: u8 },
}

impl Dates {
    /// Returns the window that contains an instant.
    pub(super) fn window(&self, now: i64) -> Window {
        let number = self.number_at(now);
        Window {
            start: self.start(number),
            end: self.start(number + 1),
        }
    }

    /// Returns the borders of the window of an instant, and of the nearer neighbor.
    pub(super) fn borders(&self, now: i64) -> [i64; 3] {
        let number = self.number_at(now);
        let start = self.start(number);
        let end = self.start(number + 1);
        if now.saturating_sub(start) < end.saturating_sub(now) {
            [self.start(number - 1), start, end]
        } else {
            [start, end, self.start(number + 2)]
        }
    }

    /// Returns the number of the window that contains an instant.
    fn number_at(&self, now: i64) -> i64 {
        let now = now.clamp(0, LATEST);
        let mut number = self.unit.number_of(self.zone.day_at(now));
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
        self.zone.start_of(self.unit.first_day(number))
    }
}

impl Unit {
    /// Returns the quota of this limit in every window.
    pub(super) const fn quota(self, limit: u32) -> Quota {
        match self {
            Self::Day => Quota::per_day(limit),
            Self::Week { .. } => Quota::per_week(limit),
            Self::Month { .. } => Quota::per_month(limit),
            Self::Year { .. } => Quota::per_year(limit),
        }
    }

    /// Returns the number of the window that begins on or before this day, or of the next one.
    fn number_of(self, day: i64) -> i64 {
        match self {
            Self::Day => day,
            Self::Week { from } => (day - first_such_day(from)).div_euclid(7),
            Self::Month { .. } => {
                let (year, month) = civil::month_of(day);
                12 * year + month - 1
            }
            Self::Year { .. } => civil::month_of(day).0,
        }
    }

    /// Returns the first day of a window by its number.
    fn first_day(self, number: i64) -> i64 {
        match self {
            Self::Day => number,
            Self::Week { from } => 7 * number + first_such_day(from),
            Self::Month { from } => clipped(number.div_euclid(12), number.rem_euclid(12) + 1, from),
            Self::Year { month, day } => clipped(number, month.into(), day),
        }
    }
}

/// Returns the number of a date, whose day is that of a month, or the last one of a shorter month.
fn clipped(year: i64, month: i64, day: u8) -> i64 {
    let day = i64::from(day).min(civil::days_in(year, month));
    civil::day_number(year, month, day)
}

/// Returns the day number of the first such weekday since the Monday before the Unix epoch, a Thursday.
const fn first_such_day(weekday: Weekday) -> i64 {
    weekday as i64 - 3
}
