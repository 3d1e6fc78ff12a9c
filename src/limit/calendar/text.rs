//! Calendars as text: for people, and in Redis keys.

use std::fmt;
use std::str::FromStr;

use super::dates::{Dates, Unit};
use super::zone::Zone;
use super::{Calendar, Weekday, Windows};
use crate::error::ConfigError;
use crate::limit::policy::check_name;
use crate::limit::quota::whole;

pub(super) const WEEKDAYS: [(&str, Weekday); 7] = [
    ("monday", Weekday::Monday),
    ("tuesday", Weekday::Tuesday),
    ("wednesday", Weekday::Wednesday),
    ("thursday", Weekday::Thursday),
    ("friday", Weekday::Friday),
    ("saturday", Weekday::Saturday),
    ("sunday", Weekday::Sunday),
];

const MONTHS: [&str; 12] = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
];

const UNITS: [&str; 4] = ["day", "week", "month", "year"];

impl Unit {
    /// Returns the name of the unit.
    const fn name(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week { .. } => "week",
            Self::Month { .. } => "month",
            Self::Year { .. } => "year",
        }
    }

    /// Writes the first day of the windows, unless it is the default.
    fn write_from(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Day
            | Self::Week {
                from: Weekday::Monday,
            }
            | Self::Month { from: 1 }
            | Self::Year { month: 1, day: 1 } => Ok(()),
            Self::Week { from } => {
                let name = WEEKDAYS[from as usize].0;
                write!(f, " from {name}")
            }
            Self::Month { from } => write!(f, " from {from}"),
            Self::Year { month, day } => {
                let name = MONTHS[usize::from(month) - 1];
                write!(f, " from {name} {day}")
            }
        }
    }
}

impl Calendar {
    /// Returns the name of the unit, such as `month`, or that of a function.
    pub(in crate::limit) const fn name(&self) -> &'static str {
        match self.windows {
            Windows::Dates(dates) => dates.unit.name(),
            Windows::Custom(windows) => windows.name(),
            Windows::OfKey => "calendar",
        }
    }

    /// Returns `true` if a text begins with the name of a unit.
    pub(in crate::limit) fn is_named_in(text: &str) -> bool {
        UNITS.iter().any(|unit| match text.strip_prefix(unit) {
            Some(rest) => !rest.starts_with(|c: char| c.is_ascii_lowercase()),
            None => false,
        })
    }

    /// Returns the calendar in a Redis key: its unit, or `@` and the name of a function. Neither the first day nor the
    /// zone, so that another one is no other count.
    pub(in crate::limit) fn span(&self) -> String {
        match self.windows {
            Windows::Custom(windows) => format!("@{}", windows.name()),
            Windows::Dates(_) | Windows::OfKey => self.name().to_owned(),
        }
    }

    /// Returns `true` for the [span](Self::span) of a calendar.
    pub(crate) fn is_span(text: &str) -> bool {
        match text.strip_prefix('@') {
            Some(name) => check_name(name).is_ok(),
            None => UNITS.contains(&text),
        }
    }
}

pub(super) fn write(calendar: &Calendar, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(calendar.name())?;
    let Windows::Dates(Dates { unit, zone }) = calendar.windows else {
        return Ok(());
    };
    unit.write_from(f)?;
    match zone {
        Zone::UTC => Ok(()),
        zone => write!(f, ", {zone}"),
    }
}

impl FromStr for Calendar {
    type Err = ConfigError;

    /// # Errors
    ///
    /// Returns an error for text of another form, for a day that no such window has, and for an
    /// unknown time zone.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut unit = text;
        let mut zone = "UTC";
        if let Some((before, after)) = text.split_once(',') {
            unit = before;
            zone = after.trim();
        }
        match read_unit(unit) {
            Ok(calendar) => calendar.in_zone(zone),
            Err(problem) => {
                let fix = "use the form `month`, `month from 15, +02:00` or `week from sunday, Europe/Berlin`";
                Err(ConfigError::invalid(
                    "calendar",
                    text,
                    format_args!("{problem}; {fix}"),
                ))
            }
        }
    }
}

const UNKNOWN_UNIT: &str = "its unit is not one of `day`, `week`, `month` and `year`";
const NO_WEEKDAY: &str = "a week starts on a day from `monday` to `sunday`, in lower case";
const NO_DAY: &str =
    "a month starts on a day from 1 to 31, where 31 is the last day of shorter ones";
const NO_DATE: &str = "a year starts on a date such as `april 6`, in lower case";

/// Returns the calendar of a unit and its first day, such as `month from 15`. The error names the problem.
fn read_unit(text: &str) -> Result<Calendar, &'static str> {
    let words: Vec<&str> = text.split_whitespace().collect();
    match words.as_slice() {
        [] => Err(UNKNOWN_UNIT),
        ["day"] => Ok(Calendar::day()),
        ["week"] => Ok(Calendar::week()),
        ["month"] => Ok(Calendar::month()),
        ["year"] => Ok(Calendar::year()),
        ["day", "from", _, ..] => Err("a day has no first day"),
        ["week", "from", weekday] => read_week(weekday),
        ["week", "from", _, _, ..] => Err("a week starts on one day"),
        ["month", "from", day] => read_month(day),
        ["month", "from", _, _, ..] => Err("a month starts on one day"),
        ["year", "from", month, day] => read_year(month, day),
        ["year", "from", _, ..] => Err(NO_DATE),
        [unit, ..] if !UNITS.contains(unit) => Err(UNKNOWN_UNIT),
        _ => Err("only `from` and a day may follow the unit"),
    }
}

fn read_week(weekday: &str) -> Result<Calendar, &'static str> {
    for (name, from) in WEEKDAYS {
        if name == weekday {
            return Ok(Calendar::week_from(from));
        }
    }
    Err(NO_WEEKDAY)
}

fn read_month(day: &str) -> Result<Calendar, &'static str> {
    let Some(day) = read_day(day) else {
        return Err(NO_DAY);
    };
    Calendar::month_from(day).map_err(|_| NO_DAY)
}

fn read_year(month: &str, day: &str) -> Result<Calendar, &'static str> {
    let Some(day) = read_day(day) else {
        return Err(NO_DATE);
    };
    for (number, name) in (1..).zip(MONTHS) {
        if name == month {
            return Calendar::year_from(number, day).map_err(|_| NO_DATE);
        }
    }
    Err(NO_DATE)
}

fn read_day(text: &str) -> Option<u8> {
    u8::try_from(whole(text)?).ok()
}
