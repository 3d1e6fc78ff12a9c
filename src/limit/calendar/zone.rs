//! Time zones: a fixed offset, or a name of the IANA database.

use std::fmt;

use crate::error::ConfigError;

#[cfg(feature = "time-zones")]
use named::NamedZone;

const MICROS_PER_DAY: i64 = 86_400_000_000;
const MICROS_PER_MINUTE: i64 = 60_000_000;
/// Maximum offset in minutes: that of Kiribati.
const MAX_OFFSET: i16 = 14 * 60;

/// The time zone of a calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Zone {
    /// Minutes ahead of UTC.
    Offset(i16),
    #[cfg(feature = "time-zones")]
    Named(NamedZone),
}

impl Zone {
    pub(super) const UTC: Self = Self::Offset(0);

    /// Parses `UTC`, an offset such as `+02:00`, or a name. The error names the problem and the fix.
    pub(super) fn read(text: &str) -> Result<Self, ConfigError> {
        if text.eq_ignore_ascii_case("UTC") || text == "Z" {
            return Ok(Self::UTC);
        }
        let sign = match text.as_bytes().first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            _ => return Self::named(text),
        };
        let fix = match read_minutes(&text[1..]) {
            Some(minutes @ 0..=MAX_OFFSET) => return Ok(Self::Offset(sign * minutes)),
            Some(_) => "an offset is at most 14 hours; use `-14:00` to `+14:00`",
            None => "an offset has hours and minutes; use the form `+02:00`",
        };
        Err(ConfigError::invalid("time zone", text, fix))
    }

    #[cfg(feature = "time-zones")]
    fn named(name: &str) -> Result<Self, ConfigError> {
        match NamedZone::get(name) {
            Some(zone) => Ok(Self::Named(zone)),
            None => {
                let fix = "the time zone database has no such name; use one such as `Europe/Berlin`, or an \
                           offset such as `+02:00`";
                Err(ConfigError::invalid("time zone", name, fix))
            }
        }
    }

    #[cfg(not(feature = "time-zones"))]
    fn named(name: &str) -> Result<Self, ConfigError> {
        let fix =
            "names need the feature `time-zones`; enable it, or use an offset such as `+02:00`";
        Err(ConfigError::invalid("time zone", name, fix))
    }

    /// Returns `true` if some days of the zone may be longer or shorter than 24 hours.
    pub(super) fn changes(self) -> bool {
        match self {
            Self::Offset(_) => false,
            #[cfg(feature = "time-zones")]
            Self::Named(_) => true,
        }
    }

    /// Returns the day, counted from the Unix epoch, of an instant in microseconds.
    pub(super) fn day_at(self, now: i64) -> i64 {
        let ahead = match self {
            Self::Offset(minutes) => i64::from(minutes) * MICROS_PER_MINUTE,
            #[cfg(feature = "time-zones")]
            Self::Named(zone) => zone.offset_at(now),
        };
        (now + ahead).div_euclid(MICROS_PER_DAY)
    }

    /// Returns the first instant of a day, in microseconds: the first midnight, or if the zone skips
    /// it, the first instant after.
    pub(super) fn start_of(self, day: i64) -> i64 {
        match self {
            Self::Offset(minutes) => day * MICROS_PER_DAY - i64::from(minutes) * MICROS_PER_MINUTE,
            #[cfg(feature = "time-zones")]
            Self::Named(zone) => zone.start_of(day),
        }
    }
}

/// As text, which [`read`](Zone::read) parses.
impl fmt::Display for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::UTC => f.write_str("UTC"),
            Self::Offset(minutes) => {
                let sign = if minutes < 0 { '-' } else { '+' };
                let minutes = minutes.abs();
                write!(f, "{sign}{:02}:{:02}", minutes / 60, minutes % 60)
            }
            #[cfg(feature = "time-zones")]
            Self::Named(zone) => f.write_str(zone.name()),
        }
    }
}

/// Parses the minutes of `02:00`, `0200` or `02`.
fn read_minutes(digits: &str) -> Option<i16> {
    let [a, b, c, d] = match *digits.as_bytes() {
        [a, b] => [a, b, b'0', b'0'],
        [a, b, c, d] | [a, b, b':', c, d] => [a, b, c, d],
        _ => return None,
    };
    let minutes = read_two([c, d])?;
    if minutes >= 60 {
        return None;
    }
    Some(60 * read_two([a, b])? + minutes)
}

fn read_two(digits: [u8; 2]) -> Option<i16> {
    let mut number = 0;
    for digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        number = 10 * number + i16::from(digit - b'0');
    }
    Some(number)
}

#[cfg(feature = "time-zones")]
mod named {
    use std::collections::HashMap;
    use std::fmt;
    use std::hash::{Hash, Hasher};
    use std::sync::{LazyLock, Mutex, PoisonError};

    use jiff::civil::Date;
    use jiff::tz::{AmbiguousOffset, TimeZone};
    use jiff::{Timestamp, ToSpan};

    use super::MICROS_PER_DAY;

    /// A zone of the IANA database, with the rules that it had when the process first used it.
    ///
    /// The process keeps each used zone, so that a calendar is `Copy`. The database has some hundreds.
    #[derive(Clone, Copy)]
    pub(in crate::limit) struct NamedZone(&'static TimeZone);

    static ZONES: LazyLock<Mutex<HashMap<String, NamedZone>>> = LazyLock::new(Mutex::default);

    impl NamedZone {
        /// Returns the zone with this name, in any case of letters. `None` for an unknown name.
        pub(super) fn get(name: &str) -> Option<Self> {
            let zone = TimeZone::get(name).ok()?;
            let name = zone.iana_name()?.to_owned();
            let mut zones = ZONES.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = zones.get(&name) {
                return Some(*known);
            }
            let kept = Self(Box::leak(Box::new(zone)));
            zones.insert(name, kept);
            Some(kept)
        }

        pub(super) fn name(self) -> &'static str {
            // Never empty: `get` has read it.
            self.0.iana_name().unwrap_or_default()
        }

        /// Returns the microseconds that local time is ahead of UTC at an instant.
        pub(super) fn offset_at(self, now: i64) -> i64 {
            let now = Timestamp::from_microsecond(now).unwrap_or(Timestamp::MAX);
            i64::from(self.0.to_offset(now).seconds()) * 1_000_000
        }

        /// Returns the first instant of a day, in microseconds.
        pub(super) fn start_of(self, day: i64) -> i64 {
            // Only days beyond the year 9999 have no instant here.
            self.start_within_range(day)
                .unwrap_or(day.saturating_mul(MICROS_PER_DAY))
        }

        fn start_within_range(self, day: i64) -> Option<i64> {
            let epoch = Date::constant(1970, 1, 1);
            let midnight = epoch.checked_add(day.days()).ok()?.at(0, 0, 0, 0);
            let starts = self.0.to_ambiguous_timestamp(midnight);
            let is_skipped = matches!(starts.offset(), AmbiguousOffset::Gap { .. });
            if !is_skipped {
                return Some(starts.earlier().ok()?.as_microsecond());
            }
            // The later reading of a skipped midnight is at or after the change that skips it.
            let after = starts.later().ok()?.as_microsecond();
            let after = Timestamp::from_microsecond(after + 1).ok()?;
            let change = self.0.preceding(after).next()?;
            Some(change.timestamp().as_microsecond())
        }
    }

    impl fmt::Debug for NamedZone {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.name())
        }
    }

    impl PartialEq for NamedZone {
        fn eq(&self, other: &Self) -> bool {
            std::ptr::eq(self.0, other.0)
        }
    }

    impl Eq for NamedZone {}

    impl Hash for NamedZone {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.name().hash(state);
        }
    }
}
