//! Dates of the Gregorian calendar as days since the Unix epoch.
//!
//! Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `days_from_civil` and
//! `civil_from_days`. Years there begin in March, so that a leap day is the last of its year.

/// Days in 400 years, after which the calendar repeats.
const DAYS_PER_ERA: i64 = 146_097;
/// Days from March 1 of the year 0 to the Unix epoch.
const EPOCH: i64 = 719_468;

/// Returns the days from the Unix epoch to a date. `month` is 1 to 12.
pub(super) fn day_number(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let months_since_march = (month + 9) % 12;
    let day_of_year = (153 * months_since_march + 2) / 5 + day - 1;
    let day_of_era = 365 * year_of_era + year_of_era / 4 - year_of_era / 100 + day_of_year;
    DAYS_PER_ERA * era + day_of_era - EPOCH
}

/// Returns the year and the month, 1 to 12, of a day.
pub(super) fn month_of(day_number: i64) -> (i64, i64) {
    let days = day_number + EPOCH;
    let era = days.div_euclid(DAYS_PER_ERA);
    let day_of_era = days.rem_euclid(DAYS_PER_ERA);
    let leap_days = day_of_era / 1_460 - day_of_era / 36_524 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leap_days) / 365;
    let before_year = 365 * year_of_era + year_of_era / 4 - year_of_era / 100;
    let months_since_march = (5 * (day_of_era - before_year) + 2) / 153;
    let month = (months_since_march + 2) % 12 + 1;
    let year = 400 * era + year_of_era;
    (if month <= 2 { year + 1 } else { year }, month)
}

/// Returns the number of days in a month, 1 to 12.
pub(super) fn days_in(year: i64, month: i64) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}
