//! Calendars as text: for people, and in Redis keys.

use std::fmt;
use std::str::FromStr;

use super::zone::Zone;
use super::{Calendar, Unit, Weekday};
use crate::error::ConfigError;
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

    /// Returns the first day of the windows, with `between` its words; `None` for the default.
    fn anchor(self, between: &str) -> Option<String> {
        match self {
            Self::Day => None,
            Self::Week { from } => {
                let (name, _) = WEEKDAYS[from as usize];
                (from != Weekday::Monday).then(|| name.to_owned())
            }
            Self::Month { from } => (from != 1).then(|| from.to_string()),
            Self::Year { month, day } => {
                let name = MONTHS[usize::from(month) - 1];
                ((month, day) != (1, 1)).then(|| format!("{name}{between}{day}"))
            }
        }
    }
}

impl Calendar {
    /// Returns the name of the unit: `day`, `week`, `month` or `year`.
    pub(in crate::limit) const fn unit_name(&self) -> &'static str {
        self.unit.name()
    }

    /// Returns `true` if a text begins with the name of a unit.
    pub(in crate::limit) fn is_named_in(text: &str) -> bool {
        let end = text.find(|c: char| !c.is_ascii_lowercase());
        let name = &text[..end.unwrap_or(text.len())];
        ["day", "week", "month", "year"].contains(&name)
    }

    /// Returns the calendar in a Redis key, such as `month-15@+0200`: without the `:` that separates the parts of a key.
    pub(in crate::limit) fn span(&self) -> String {
        let mut span = self.unit.name().to_owned();
        if let Some(anchor) = self.unit.anchor("-") {
            span = span + "-" + &anchor;
        }
        if self.zone != Zone::UTC {
            span = span + "@" + &self.zone.text("");
        }
        span
    }

    /// Parses a [`span`](Self::span). `None` for other text.
    pub(crate) fn of_span(span: &str) -> Option<Self> {
        let (unit, zone) = span.split_once('@').unwrap_or((span, "UTC"));
        let words: Vec<&str> = unit.split('-').collect();
        let (name, anchor) = words.split_first()?;
        let calendar = of_words(name, anchor).ok()?.in_zone(zone).ok()?;
        (calendar.span() == span).then_some(calendar)
    }
}

pub(super) fn write(calendar: &Calendar, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(calendar.unit.name())?;
    if let Some(anchor) = calendar.unit.anchor(" ") {
        write!(f, " from {anchor}")?;
    }
    if calendar.zone != Zone::UTC {
        write!(f, ", {}", calendar.zone.text(":"))?;
    }
    Ok(())
}

impl FromStr for Calendar {
    type Err = ConfigError;

    /// # Errors
    ///
    /// Returns an error for text of another form, for a day that no such window has, and for an
    /// unknown time zone.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |problem: &str| {
            let fix = "use the form `month`, `month from 15, +02:00` or `week from sunday, Europe/Berlin`";
            ConfigError::invalid("calendar", text, format_args!("{problem}; {fix}"))
        };
        let (unit, zone) = match text.split_once(',') {
            Some((unit, zone)) => (unit, zone.trim()),
            None => (text, "UTC"),
        };
        let words: Vec<&str> = unit.split_whitespace().collect();
        let calendar = match words.as_slice() {
            [] => of_words("", &[]),
            [name] => of_words(name, &[]),
            [name, "from", anchor @ ..] if !anchor.is_empty() => of_words(name, anchor),
            _ => Err("only `from` and a day may follow the unit"),
        };
        calendar.map_err(wrong)?.in_zone(zone)
    }
}

/// Returns the calendar of a unit and the words of its first day. The error names the problem.
fn of_words(name: &str, anchor: &[&str]) -> Result<Calendar, &'static str> {
    let day_of = |text: &str| u8::try_from(whole(text)?).ok();
    match (name, anchor) {
        ("day", []) => Ok(Calendar::day()),
        ("day", _) => Err("a day has no first day"),
        ("week", []) => Ok(Calendar::week()),
        ("week", [weekday]) => {
            let mut all = WEEKDAYS.iter();
            let found = all.find(|(name, _)| name == weekday);
            let (_, from) =
                found.ok_or("a week starts on a day from `monday` to `sunday`, in lower case")?;
            Ok(Calendar::week_from(*from))
        }
        ("week", _) => Err("a week starts on one day"),
        ("month", []) => Ok(Calendar::month()),
        ("month", [day]) => day_of(day)
            .and_then(|day| Calendar::month_from(day).ok())
            .ok_or(
                "a month starts on a day from 1 to 31, where 31 is the last day of shorter ones",
            ),
        ("month", _) => Err("a month starts on one day"),
        ("year", []) => Ok(Calendar::year()),
        ("year", [month, day]) => {
            let month = MONTHS.iter().position(|name| name == month);
            let date = month.zip(day_of(day));
            date.and_then(|(month, day)| Calendar::year_from(month as u8 + 1, day).ok())
                .ok_or("a year starts on a date such as `april 6`, in lower case")
        }
        ("year", _) => Err("a year starts on a date such as `april 6`, in lower case"),
        _ => Err("its unit is not one of `day`, `week`, `month` and `year`"),
    }
}
