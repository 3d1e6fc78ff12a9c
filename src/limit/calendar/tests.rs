use std::time::Duration;

use super::*;

fn calendar(text: &str) -> Calendar {
    text.parse().unwrap()
}

fn error(text: &str) -> String {
    text.parse::<Calendar>().unwrap_err().to_string()
}

#[test]
fn texts_round_trip() {
    for (text, canonical, span) in [
        ("day", "day", "day"),
        ("week", "week", "week"),
        ("week from monday", "week", "week"),
        ("week from sunday, UTC", "week from sunday", "week"),
        (" month  from 1 ", "month", "month"),
        ("month from 15, +02:00", "month from 15, +02:00", "month"),
        ("month,-0330", "month, -03:30", "month"),
        ("day, +14", "day, +14:00", "day"),
        ("year from january 1, +00:00", "year", "year"),
        ("year from february 29", "year from february 29", "year"),
    ] {
        let calendar = calendar(text);
        assert_eq!(calendar.to_string(), canonical);
        assert_eq!(canonical.parse(), Ok(calendar));
        assert_eq!(calendar.span(), span);
        assert!(Calendar::is_span(span));
    }
}

#[test]
fn errors_name_value_and_fix() {
    for (text, problem) in [
        (
            "",
            "its unit is not one of `day`, `week`, `month` and `year`",
        ),
        ("fortnight", "its unit is not one of"),
        ("month 15", "only `from` and a day may follow"),
        ("month from", "only `from` and a day may follow"),
        (
            "month from 0",
            "\"month from 0\" is not a valid calendar: a month starts on a day from 1 to 31",
        ),
        ("month from 32", "a month starts on a day from 1 to 31"),
        ("month from +5", "a month starts on a day from 1 to 31"),
        (
            "week from Monday",
            "from `monday` to `sunday`, in lower case",
        ),
        ("year from april", "a date such as `april 6`"),
        ("year from april 31", "a date such as `april 6`"),
        ("day from 3", "a day has no first day"),
        (
            "day, +14:01",
            "\"+14:01\" is not a valid time zone: an offset is at most 14 hours; use",
        ),
        ("day, -15:00", "an offset is at most 14 hours; use"),
        ("day, +2", "use the form `+02:00`"),
        ("day, +02:60", "use the form `+02:00`"),
        ("day, +é:00", "use the form `+02:00`"),
    ] {
        let error = error(text);
        assert!(error.contains(problem), "{text:?} gave {error:?}");
    }
    for anchor in [0, 32] {
        let error = Calendar::month_from(anchor).unwrap_err().to_string();
        let expected = format!("\"{anchor}\" is not a valid day of a month: use 1 to 31");
        assert!(error.starts_with(&expected), "{error}");
    }
    for (month, day) in [(0, 1), (13, 1), (2, 30), (4, 0)] {
        assert!(Calendar::year_from(month, day).is_err());
    }
}

#[cfg(not(feature = "time-zones"))]
#[test]
fn names_need_the_feature() {
    assert_eq!(
        error("month, Europe/Berlin"),
        "\"Europe/Berlin\" is not a valid time zone: names need the feature `time-zones`; enable it, or use an offset \
         such as `+02:00`"
    );
}

#[test]
fn borders_are_the_window_and_the_nearer_one() {
    let hour = 3_600_000_000;
    let day = |number: i64| number * 24 * hour;
    let calendar = calendar("day");
    assert_eq!(
        calendar.borders(day(5) + 11 * hour),
        Some([day(4), day(5), day(6)])
    );
    assert_eq!(
        calendar.borders(day(5) + 12 * hour),
        Some([day(5), day(6), day(7)])
    );
    // No instant overflows.
    for now in [i64::MIN, -1, i64::MAX] {
        let [start, between, end] = calendar.borders(now).unwrap();
        assert!(start < between && between < end);
    }
}

fn seconds(count: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(count as u64)
}

/// Returns whole seconds since the Unix epoch.
fn since_epoch(now: SystemTime) -> i64 {
    let since = now.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(-1, |since| since.as_secs() as i64)
}

/// Windows of 100 s.
fn hundreds(now: SystemTime) -> Range<SystemTime> {
    let start = since_epoch(now) / 100 * 100;
    seconds(start)..seconds(start + 100)
}

#[test]
fn a_function_has_the_windows() {
    let custom = Calendar::custom("hundreds", hundreds).unwrap();
    assert_eq!(
        (custom.to_string(), custom.span()),
        ("hundreds".to_owned(), "@hundreds".to_owned())
    );
    assert!(Calendar::is_span("@hundreds") && "hundreds".parse::<Calendar>().is_err());
    assert_eq!(Calendar::custom("hundreds", hundreds).unwrap(), custom);
    assert_ne!(Calendar::custom("others", hundreds).unwrap(), custom);
    assert!(Calendar::custom("two words", hundreds).is_err());
    let error = custom.in_zone("UTC").unwrap_err().to_string();
    assert_eq!(
        error,
        "\"UTC\" is not a valid time zone: the windows of a function have none: remove it"
    );

    let now = 1_000_250 * 1_000_000;
    assert_eq!(
        (custom.window(now), custom.borders(now)),
        (None, None),
        "not prepared"
    );
    custom.prepare(now).unwrap();
    let window = Window {
        start: 1_000_200_000_000,
        end: 1_000_300_000_000,
    };
    assert_eq!(custom.window(now), Some(window));
    assert_eq!(custom.window(window.end).unwrap().start, window.end);
    assert_eq!(
        custom.borders(now - 1),
        Some([1_000_100_000_000, 1_000_200_000_000, 1_000_300_000_000])
    );
    assert_eq!(
        custom.borders(now),
        Some([1_000_200_000_000, 1_000_300_000_000, 1_000_400_000_000])
    );
    // Instants of several clocks.
    for number in 1..1_000 {
        for now in [now + number * 50_000_000, now - number * 170_000_000] {
            custom.prepare(now).unwrap();
            assert!(custom.window(now).is_some() && custom.borders(now).is_some());
        }
    }
}

#[test]
fn wrong_windows_are_errors() {
    let shifted: fn(SystemTime) -> Range<SystemTime> = |now| {
        let Range { start, end } = hundreds(now);
        start + Duration::from_secs(100)..end + Duration::from_secs(100)
    };
    let overlapping: fn(SystemTime) -> Range<SystemTime> = |now| {
        let Range { start, end } = hundreds(now);
        start..end + Duration::from_micros(1)
    };
    let short: fn(SystemTime) -> Range<SystemTime> = |now| now..now + Duration::from_millis(999);
    let long: fn(SystemTime) -> Range<SystemTime> =
        |_| SystemTime::UNIX_EPOCH..seconds(366 * 86_400 + 1);
    let reversed: fn(SystemTime) -> Range<SystemTime> = |now| seconds(since_epoch(now) + 1)..now;
    for (name, window_of, problem) in [
        (
            "shifted",
            shifted,
            "its window for the instant 250 s does not contain it, but starts 300 s and ends 400 s",
        ),
        (
            "overlapping",
            overlapping,
            "the window that ends 200.000001 s and the next one, which starts 200 s, do not touch",
        ),
        (
            "short",
            short,
            "its window that starts 250 s lasts 999ms, but must last 1 second to 366 days",
        ),
        (
            "long",
            long,
            "its window that starts 0 s lasts 31622401s, but must last 1 second to 366 days",
        ),
        (
            "reversed",
            reversed,
            "its window for the instant 250 s does not contain it, but starts 251 s and ends 250 s",
        ),
    ] {
        let custom = Calendar::custom(name, window_of).unwrap();
        assert_eq!(custom.prepare(250_000_000), Err(problem.to_owned()));
        assert_eq!(custom.window(250_000_000), None);
    }
}

#[cfg(feature = "time-zones")]
mod against_jiff {
    use fastrand::Rng;
    use jiff::civil::{Date, DateTime, Weekday as JiffWeekday};
    use jiff::tz::{Offset, TimeZone};
    use jiff::{Timestamp, ToSpan};

    use super::super::dates::Unit;
    use super::*;

    /// Returns the first local instant of a date: the definition of a border.
    fn start_of(date: Date, zone: &TimeZone) -> i64 {
        let starts = date.to_datetime(jiff::civil::Time::midnight());
        let earliest = |from: DateTime| zone.to_ambiguous_timestamp(from).earlier().unwrap();
        // The first instant from 26 hours before whose local date is this one or later.
        let mut low = earliest(starts).as_second() - 26 * 3_600;
        let mut high = low + 52 * 3_600;
        while low < high {
            let middle = low + (high - low) / 2;
            let at = Timestamp::from_second(middle).unwrap();
            if zone.to_datetime(at).date() >= date {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low * 1_000_000
    }

    fn clipped(year: i16, month: i8, day: u8) -> Date {
        let first = Date::new(year, month, 1).unwrap();
        Date::new(year, month, (day as i8).min(first.days_in_month())).unwrap()
    }

    /// Returns the date on which the window of a local date begins.
    fn first_date(calendar: &Calendar, date: Date) -> Date {
        match unit_of(calendar) {
            Unit::Day => date,
            Unit::Week { from } => {
                let from = JiffWeekday::from_monday_zero_offset(from as i8).unwrap();
                let after = i64::from(date.weekday().since(from));
                date.checked_sub(after.days()).unwrap()
            }
            Unit::Month { from } => {
                let this = clipped(date.year(), date.month(), from);
                if this <= date {
                    return this;
                }
                let before = date.first_of_month().yesterday().unwrap();
                clipped(before.year(), before.month(), from)
            }
            Unit::Year { month, day } => {
                let this = clipped(date.year(), month as i8, day);
                if this <= date {
                    return this;
                }
                clipped(date.year() - 1, month as i8, day)
            }
        }
    }

    fn unit_of(calendar: &Calendar) -> Unit {
        let Windows::Dates(dates) = calendar.windows else {
            panic!("{calendar} has no unit")
        };
        dates.unit
    }

    fn next_date(calendar: &Calendar, first: Date) -> Date {
        let days = match unit_of(calendar) {
            Unit::Day => 1,
            Unit::Week { .. } => 7,
            Unit::Month { .. } => 35,
            Unit::Year { .. } => 370,
        };
        first_date(calendar, first.checked_add(days.days()).unwrap())
    }

    fn any_calendar(rng: &mut Rng) -> Calendar {
        let (_, weekday) = rng.choice(super::super::text::WEEKDAYS).unwrap();
        match rng.u32(..4) {
            0 => Calendar::day(),
            1 => Calendar::week_from(weekday),
            2 => Calendar::month_from(rng.u8(1..=31)).unwrap(),
            _ => {
                let month = rng.u8(1..=12);
                let days = civil::days_in(2000, month.into()) as u8;
                Calendar::year_from(month, rng.u8(1..=days)).unwrap()
            }
        }
    }

    const ZONES: [&str; 12] = [
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "America/Sao_Paulo",
        "America/Havana",
        "Africa/Cairo",
        "Asia/Beirut",
        "America/Santiago",
        "Asia/Kathmandu",
        "Pacific/Apia",
        "Asia/Gaza",
        "America/Asuncion",
    ];

    /// Returns a random zone, and jiff's.
    fn any_zone(rng: &mut Rng) -> (String, TimeZone) {
        if rng.bool() {
            let name = rng.choice(ZONES).unwrap();
            return (name.to_owned(), TimeZone::get(name).unwrap());
        }
        let minutes = rng.i32(-840..=840);
        let sign = if minutes < 0 { '-' } else { '+' };
        let text = format!("{sign}{:02}:{:02}", minutes.abs() / 60, minutes.abs() % 60);
        let offset = Offset::from_seconds(60 * minutes).unwrap();
        (text, TimeZone::fixed(offset))
    }

    /// The day-wise definition: windows of local dates begin with the first instant of their first date.
    #[test]
    fn random_instants_are_in_their_windows() {
        let mut rng = Rng::with_seed(1);
        // Until 2100.
        let last = 4_102_444_800_000_000;
        for _ in 0..100_000 {
            let (zone_text, zone) = any_zone(&mut rng);
            let calendar = any_calendar(&mut rng).in_zone(&zone_text).unwrap();
            let now = rng.i64(400 * 86_400_000_000..last);
            let window = calendar.window(now).unwrap();
            assert!(
                window.start <= now && now < window.end,
                "{calendar} at {now}"
            );
            let at = Timestamp::from_microsecond(now).unwrap();
            let first = first_date(&calendar, zone.to_datetime(at).date());
            let expected = Window {
                start: start_of(first, &zone),
                end: start_of(next_date(&calendar, first), &zone),
            };
            // In an hour that is repeated before midnight, the next window has already begun.
            if now < expected.end {
                assert_eq!(window, expected, "{calendar} at {now}");
            }
            assert!(window.end - window.start <= calendar.longest());
        }
    }

    fn instant(text: &str) -> i64 {
        text.parse::<Timestamp>().unwrap().as_microsecond()
    }

    /// Asserts that these instants are the borders that follow each other.
    #[track_caller]
    fn assert_borders(calendar: &str, borders: &[&str]) {
        let calendar = super::calendar(calendar);
        for (pair, text) in borders.windows(2).zip(borders) {
            let (start, end) = (instant(pair[0]), instant(pair[1]));
            for now in [start, start + 1, end - 1] {
                assert_eq!(
                    calendar.window(now),
                    Some(Window { start, end }),
                    "{calendar} {text}"
                );
            }
        }
    }

    #[test]
    fn months_of_a_leap_year() {
        let mut months: Vec<String> = (1..=12)
            .map(|month| format!("2028-{month:02}-01T00:00Z"))
            .collect();
        months.push("2029-01-01T00:00Z".to_owned());
        let months: Vec<&str> = months.iter().map(String::as_str).collect();
        assert_borders("month", &months);
        for (anchor, dates) in [
            (29, ["01-29", "02-29", "03-29", "04-29", "05-29", "06-29"]),
            (30, ["01-30", "02-29", "03-30", "04-30", "05-30", "06-30"]),
            (31, ["01-31", "02-29", "03-31", "04-30", "05-31", "06-30"]),
        ] {
            let dates = dates.map(|date| format!("2028-{date}T00:00:00Z"));
            let dates = dates.each_ref().map(String::as_str);
            assert_borders(&format!("month from {anchor}"), &dates);
        }
        assert_borders(
            "month from 31",
            &[
                "2027-01-31T00:00Z",
                "2027-02-28T00:00Z",
                "2027-03-31T00:00Z",
            ],
        );
    }

    #[test]
    fn year_from_a_leap_day() {
        assert_borders(
            "year from february 29",
            &[
                "2027-02-28T00:00Z",
                "2028-02-29T00:00Z",
                "2029-02-28T00:00Z",
            ],
        );
    }

    #[test]
    fn weeks_begin_on_their_day() {
        // A Monday and a Sunday.
        assert_borders("week", &["2026-11-30T00:00Z", "2026-12-07T00:00Z"]);
        assert_borders(
            "week from sunday",
            &["2026-11-29T00:00Z", "2026-12-06T00:00Z"],
        );
    }

    #[test]
    fn midnight_stays_midnight_in_summer() {
        for (zone, borders) in [
            (
                "Europe/Berlin",
                [
                    "2026-03-28T23:00Z",
                    "2026-03-29T22:00Z",
                    "2026-03-30T22:00Z",
                ],
            ),
            (
                "Europe/Berlin",
                [
                    "2026-10-24T22:00Z",
                    "2026-10-25T23:00Z",
                    "2026-10-26T23:00Z",
                ],
            ),
            (
                "America/New_York",
                [
                    "2026-03-08T05:00Z",
                    "2026-03-09T04:00Z",
                    "2026-03-10T04:00Z",
                ],
            ),
            (
                "America/New_York",
                [
                    "2026-11-01T04:00Z",
                    "2026-11-02T05:00Z",
                    "2026-11-03T05:00Z",
                ],
            ),
            (
                "Australia/Lord_Howe",
                [
                    "2026-04-04T13:00Z",
                    "2026-04-05T13:30Z",
                    "2026-04-06T13:30Z",
                ],
            ),
            (
                "Australia/Lord_Howe",
                [
                    "2026-10-03T13:30Z",
                    "2026-10-04T13:00Z",
                    "2026-10-05T13:00Z",
                ],
            ),
        ] {
            assert_borders(&format!("day, {zone}"), &borders);
        }
    }

    /// In Brazil summer began at midnight, which it skipped, and ended at midnight, back to 23:00. In Havana it ends at
    /// 01:00, back to midnight.
    #[test]
    fn skipped_and_repeated_midnights() {
        assert_borders(
            "day, America/Sao_Paulo",
            &[
                "2017-10-14T03:00Z",
                "2017-10-15T03:00Z",
                "2017-10-16T02:00Z",
            ],
        );
        assert_borders(
            "day, America/Sao_Paulo",
            &[
                "2018-02-17T02:00Z",
                "2018-02-18T03:00Z",
                "2018-02-19T03:00Z",
            ],
        );
        assert_borders(
            "day, America/Havana",
            &[
                "2026-10-31T04:00Z",
                "2026-11-01T04:00Z",
                "2026-11-02T05:00Z",
            ],
        );
        // Samoa skipped the whole day of December 30.
        assert_borders(
            "day, Pacific/Apia",
            &[
                "2011-12-29T10:00Z",
                "2011-12-30T10:00Z",
                "2011-12-31T10:00Z",
            ],
        );
    }

    #[test]
    fn zones_have_the_name_of_the_database() {
        let berlin = calendar("week, Europe/Berlin");
        assert_eq!(calendar("week from monday, europe/berlin"), berlin);
        assert_eq!(berlin.to_string(), "week, Europe/Berlin");
        assert_eq!(berlin.span(), "week");
        assert_eq!(calendar("week, utc"), Calendar::week());
        assert_eq!(
            error("week, Europe/Berlim"),
            "\"Europe/Berlim\" is not a valid time zone: the time zone database has no such name; use one such as \
             `Europe/Berlin`, or an offset such as `+02:00`"
        );
    }
}
