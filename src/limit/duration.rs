//! Durations as text, an integer and a unit such as `250ms` or `15 minutes`; and as microseconds.

use std::fmt;
use std::time::Duration;

use super::LONGEST;

/// Converts to microseconds, rounded up.
pub(crate) fn micros(duration: Duration) -> i64 {
    let micros = duration.as_nanos().div_ceil(1_000);
    micros.min(LONGEST as u128) as i64
}

/// A unit of durations as text.
struct DurationUnit {
    /// The name in output.
    name: &'static str,
    /// Other names in input: a short one, the singular and the plural.
    words: &'static [&'static str],
    nanos: u128,
}

const fn unit(name: &'static str, words: &'static [&'static str], nanos: u128) -> DurationUnit {
    DurationUnit { name, words, nanos }
}

/// The units, longest first.
const UNITS: [DurationUnit; 7] = [
    unit("d", &["day", "days"], 86_400_000_000_000),
    unit("h", &["hour", "hours"], 3_600_000_000_000),
    unit("m", &["min", "minute", "minutes"], 60_000_000_000),
    unit("s", &["sec", "second", "seconds"], 1_000_000_000),
    unit("ms", &[], 1_000_000),
    unit("us", &[], 1_000),
    unit("ns", &[], 1),
];

/// A unit of input only: as output, `7d` is part of Redis keys.
const WEEK: DurationUnit = unit("week", &["weeks"], 7 * UNITS[0].nanos);

impl DurationUnit {
    /// Returns the unit with this name, or one of its other names.
    fn named(text: &str) -> Option<&'static Self> {
        UNITS
            .iter()
            .chain([&WEEK])
            .find(|unit| unit.name == text || unit.words.contains(&text))
    }
}

/// Parses a number and a unit, with or without a space between them. The error names the problem.
pub(super) fn parse(text: &str) -> Result<Duration, &'static str> {
    match split(text.trim()) {
        ("", _) => Err("it does not begin with a whole number"),
        (count, unit) => times(count, unit.trim_start()),
    }
}

/// Splits the text after its leading digits.
pub(super) fn split(text: &str) -> (&str, &str) {
    match text.find(|c: char| !c.is_ascii_digit()) {
        Some(end) => text.split_at(end),
        None => (text, ""),
    }
}

/// Multiplies a unit; an empty `count` is 1. The error names the problem.
pub(super) fn times(count: &str, unit: &str) -> Result<Duration, &'static str> {
    const TOO_LONG: &str = "the duration is too long";
    let Some(unit) = DurationUnit::named(unit) else {
        return Err(no_unit(unit));
    };
    let count = match count {
        "" => Ok(1),
        digits => digits.parse::<u128>(),
    };
    let Ok(count) = count else {
        return Err(TOO_LONG);
    };
    let Some(nanos) = count.checked_mul(unit.nanos) else {
        return Err(TOO_LONG);
    };
    match u64::try_from(nanos / 1_000_000_000) {
        Ok(seconds) => Ok(Duration::new(seconds, (nanos % 1_000_000_000) as u32)),
        Err(_) => Err(TOO_LONG),
    }
}

fn no_unit(unit: &str) -> &'static str {
    if unit.is_empty() {
        "the duration has no unit"
    } else if unit.contains(|c: char| c.is_ascii_digit()) {
        "the duration is not a whole number with one unit"
    } else if unit.starts_with("mo") || unit.starts_with('y') {
        "a month or a year has no fixed length, so count it in days, such as `30d`, or in a quota as `/month` or `/year`"
    } else if unit.starts_with('w') {
        "the duration's unit is not one of ns, us, ms, s, m, h, d (seven days are `7d` or `week`)"
    } else {
        "the duration's unit is not one of ns, us, ms, s, m, h, d"
    }
}

/// Returns the duration as a multiple of the largest unit that divides it.
pub(super) fn measure(duration: Duration) -> (u128, &'static str) {
    let nanos = duration.as_nanos();
    for unit in &UNITS {
        if nanos >= unit.nanos && nanos.is_multiple_of(unit.nanos) {
            return (nanos / unit.nanos, unit.name);
        }
    }
    // Nanoseconds divide every duration but zero.
    (0, "s")
}

/// Returns the duration in words, such as `minute` or `90 seconds`.
pub(super) fn in_words(duration: Duration) -> String {
    let (count, name) = measure(duration);
    let words = DurationUnit::named(name).map_or(&[][..], |unit| unit.words);
    match (count, words) {
        (1, [.., one, _]) => (*one).to_owned(),
        (1, _) => name.to_owned(),
        (_, [.., many]) => format!("{count} {many}"),
        (_, []) => format!("{count} {name}"),
    }
}

/// A duration as text that [`parse`] reads.
pub(super) struct Text(pub(super) Duration);

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, unit) = measure(self.0);
        write!(f, "{count}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_forms() {
        for (text, duration) in [
            ("250ms", Duration::from_millis(250)),
            (" 15 minutes ", Duration::from_secs(900)),
            ("1h", Duration::from_secs(3_600)),
            ("0s", Duration::ZERO),
            ("2 weeks", Duration::from_secs(14 * 86_400)),
            ("18446744073709551615s", Duration::from_secs(u64::MAX)),
        ] {
            assert_eq!(parse(text), Ok(duration), "{text}");
        }
    }

    #[test]
    fn invalid_durations_are_refused() {
        for (text, problem) in [
            ("", "begin with a whole number"),
            ("s", "begin with a whole number"),
            ("-5s", "begin with a whole number"),
            ("250", "no unit"),
            ("1.5s", "not a whole number with one unit"),
            ("1h30m", "not a whole number with one unit"),
            ("5x", "not one of ns, us, ms, s, m, h, d"),
            ("5M", "not one of ns, us, ms, s, m, h, d"),
            ("1month", "count it in days"),
            ("18446744073709551616s", "too long"),
            ("340282366920938463463374607431768211456ns", "too long"),
            ("340282366920938463463374607431768211455d", "too long"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.contains(problem),
                "{text:?} gave {error:?}, which lacks {problem:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn durations_round_trip_as_text(secs in any::<u64>(), nanos in 0u32..1_000_000_000, whole: bool) {
            let duration = Duration::new(secs, if whole { 0 } else { nanos });
            prop_assert_eq!(parse(&Text(duration).to_string()), Ok(duration));
        }
    }
}
