use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{Calendar, duration};
use crate::error::ConfigError;

const MONTH: &str = "month";
const YEAR: &str = "year";

/// An amount: a limit per period, and a maximum burst.
///
/// `Quota::per_second(60)` means 60 per second. The burst defaults to the limit;
/// [`burst`](Self::burst) sets another for strategies that refill. A window's burst is always its
/// limit.
///
/// A quota is plain data and can be a `const`. [`Policy::new`](super::Policy::new) rejects an
/// invalid quota, such as one with a limit or a period of 0: the bounds depend on the strategy, and
/// a policy is fallible anyway. [`is_valid`](Self::is_valid) checks a constant at compile time.
///
/// # Changes
///
/// Another quota under the name and strategy of a [`Policy`](super::Policy) continues its count: see
/// there. Only another period of a window, a log or a counter starts a new count.
///
/// # As text
///
/// `100/s`, `10/min`, `5 per 15m`, `1000 per hour burst 50`:
///
/// ```text
/// quota  = limit ( "/" | " per " ) period [ " burst " number ]
/// period = unit | number unit | number " " unit | "month" | "year"
/// unit   = week weeks | d day days | h hour hours | m min minute minutes | s sec second seconds | ms | us | ns
/// ```
///
/// Numbers are integers in decimal digits. Ambiguous text is rejected: a period without a unit
/// (`10/60`), units in capitals (`10/M`), several months (`10/3 months`), grouped digits (`1,000/h`).
/// Output uses the shortest of these forms, such as `10/m` or `5/15m`. The feature `serde` uses the
/// same text.
///
/// Only [`Align::Calendar`](crate::strategy::Align::Calendar) counts a `month` or a `year`. A `week` is
/// 7 days.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::Quota;
///
/// const API: Quota = Quota::per_second(50).burst(100);
/// assert_eq!(API.to_string(), "50/s burst 100");
/// assert_eq!("10/60s".parse(), Ok(Quota::per(10, Duration::from_secs(60))));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u32,
    period: Period,
    burst: Option<u32>,
}

/// The period of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Period {
    Fixed(Duration),
    Month,
    Year,
}

impl Quota {
    /// `limit` in every `period`.
    pub const fn per(limit: u32, period: Duration) -> Self {
        Self::of(limit, Period::Fixed(period))
    }

    const fn of(limit: u32, period: Period) -> Self {
        Self {
            limit,
            period,
            burst: None,
        }
    }

    /// `limit` in every second.
    pub const fn per_second(limit: u32) -> Self {
        Self::per(limit, Duration::from_secs(1))
    }

    /// `limit` in every minute.
    pub const fn per_minute(limit: u32) -> Self {
        Self::per(limit, Duration::from_secs(60))
    }

    /// `limit` in every hour.
    pub const fn per_hour(limit: u32) -> Self {
        Self::per(limit, Duration::from_secs(3_600))
    }

    /// `limit` in every 24 hours.
    pub const fn per_day(limit: u32) -> Self {
        Self::per(limit, Duration::from_secs(86_400))
    }

    /// `limit` in every 7 days.
    pub const fn per_week(limit: u32) -> Self {
        Self::per(limit, Duration::from_secs(7 * 86_400))
    }

    /// `limit` in every month of a calendar. Only a strategy of
    /// [`Calendar::month`](crate::strategy::Calendar::month) counts it.
    ///
    /// ```
    /// use tower_redis_ratelimit::strategy::{Align, Calendar};
    /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
    ///
    /// let months = Strategy::FixedWindow(Align::Calendar(Calendar::month()));
    /// let plan = Policy::new("plan", months, Quota::per_month(10_000))?;
    /// assert_eq!(plan.quota().to_string(), "10000/month");
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub const fn per_month(limit: u32) -> Self {
        Self::of(limit, Period::Month)
    }

    /// `limit` in every year of a calendar. Only a strategy of
    /// [`Calendar::year`](crate::strategy::Calendar::year) counts it.
    pub const fn per_year(limit: u32) -> Self {
        Self::of(limit, Period::Year)
    }

    /// Sets the limit, and the burst to the same.
    pub(crate) const fn with_limit(self, limit: u32) -> Self {
        Self::of(limit, self.period)
    }

    /// Returns the calendar that counts this quota if no other is named. `None` unless the period is a
    /// month or a year.
    pub(super) const fn calendar(&self) -> Option<Calendar> {
        match self.period {
            Period::Fixed(_) => None,
            Period::Month => Some(Calendar::month()),
            Period::Year => Some(Calendar::year()),
        }
    }

    /// Sets the maximum burst: the largest cost that is allowed in one moment. Defaults to the
    /// limit.
    #[must_use]
    pub const fn burst(mut self, burst: u32) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Sets the period.
    pub(super) const fn with_period(self, period: Duration) -> Self {
        let period = Period::Fixed(period);
        Self { period, ..self }
    }

    /// Returns the quota as text for clients, who may take the `m` of `10/m` for a month: `10 per minute`.
    pub(crate) fn in_words(&self) -> String {
        let period = match self.period {
            Period::Fixed(period) => duration::in_words(period),
            Period::Month => MONTH.to_owned(),
            Period::Year => YEAR.to_owned(),
        };
        let rate = format!("{} per {period}", self.limit);
        match self.burst {
            Some(burst) => format!("{rate} burst {burst}"),
            None => rate,
        }
    }

    /// Returns the amount granted per period.
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns the period. For a month or a year, the maximum: 31 or 366 days.
    pub const fn period(&self) -> Duration {
        const DAY: u64 = 86_400;
        match self.period {
            Period::Fixed(period) => period,
            Period::Month => Duration::from_secs(31 * DAY),
            Period::Year => Duration::from_secs(366 * DAY),
        }
    }

    /// Returns the time in which `units` refill gradually, rounded down to nanoseconds.
    pub(crate) fn time_for(&self, units: u64) -> Duration {
        let of_all = self.period().as_nanos().saturating_mul(units.into());
        // A limit of 0 is an error only where a policy is created.
        match u64::try_from(of_all / u128::from(self.limit.max(1))) {
            Ok(nanos) => Duration::from_nanos(nanos),
            Err(_) => Duration::MAX,
        }
    }

    /// Returns the units that refill gradually in `time`, rounded up.
    pub(crate) fn units_in(&self, time: Duration) -> u32 {
        let units = time
            .as_nanos()
            .saturating_mul(self.limit.into())
            .div_ceil(self.period().as_nanos().max(1));
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// Returns `true` if the quota is valid: limit, burst and period are above zero, the period is
    /// at most 366 days, and the burst refills within ten years.
    ///
    /// Use it to check constants at compile time:
    ///
    /// ```
    /// # use tower_redis_ratelimit::Quota;
    /// const API: Quota = Quota::per_second(50).burst(100);
    /// const _: () = assert!(API.is_valid());
    /// ```
    pub const fn is_valid(&self) -> bool {
        self.problem().is_none()
    }

    /// Returns the maximum burst.
    pub const fn capacity(&self) -> u32 {
        match self.burst {
            Some(burst) => burst,
            None => self.limit,
        }
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.limit)?;
        match self.period {
            Period::Month => f.write_str(MONTH)?,
            Period::Year => f.write_str(YEAR)?,
            Period::Fixed(period) => match duration::measure(period) {
                (1, unit) => f.write_str(unit)?,
                (count, unit) => write!(f, "{count}{unit}")?,
            },
        }
        match self.burst {
            Some(burst) => write!(f, " burst {burst}"),
            None => Ok(()),
        }
    }
}

/// As [`from_str`](Quota::from_str).
impl TryFrom<&str> for Quota {
    type Error = ConfigError;

    fn try_from(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }
}

/// As [`from_str`](Quota::from_str).
impl TryFrom<String> for Quota {
    type Error = ConfigError;

    fn try_from(text: String) -> Result<Self, ConfigError> {
        text.parse()
    }
}

/// As [`from_str`](Quota::from_str).
impl TryFrom<&String> for Quota {
    type Error = ConfigError;

    fn try_from(text: &String) -> Result<Self, ConfigError> {
        text.parse()
    }
}

impl FromStr for Quota {
    type Err = ConfigError;

    /// # Errors
    ///
    /// Returns an error for text of another form, and for a quota that is not
    /// [valid](Self::is_valid).
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |problem| {
            let fix = "use the form `100/s`, `10/60s` or `1000/h burst 50`";
            ConfigError::invalid("quota", text, format_args!("{problem}; {fix}"))
        };

        let Some((limit, rest)) = split_rate(text.trim()) else {
            return Err(wrong("there is no `/` and no `per`"));
        };
        let Some(limit) = whole(limit) else {
            return Err(wrong("the limit is not an integer up to 4294967295"));
        };
        // Its own error, since the fix is another one.
        if has_another_rate(rest) {
            let problem = "there is more than one quota; use a policy for each, such as \
                           `Policies::new([per_second, per_hour])`, in settings a list of them";
            return Err(ConfigError::invalid("quota", text, problem));
        }
        if rest.contains(',') {
            return Err(wrong("there is a comma after the limit"));
        }

        let mut words = rest.split_whitespace().peekable();
        let Some(first) = words.next() else {
            return Err(wrong("the period is missing"));
        };
        let (count, mut unit) = duration::split(first);
        if unit.is_empty() {
            // It is a separate word, or missing.
            unit = words.next_if(|word| *word != "burst").unwrap_or("");
        }
        let period = match (count, unit) {
            ("" | "1", MONTH) => Period::Month,
            ("" | "1", YEAR) => Period::Year,
            _ => Period::Fixed(duration::times(count, unit).map_err(wrong)?),
        };
        let rate = Self::of(limit, period);
        let quota = match words.next() {
            None => rate,
            Some("burst") => match words.next().and_then(whole) {
                Some(burst) => rate.burst(burst),
                None => return Err(wrong("the burst is not an integer up to 4294967295")),
            },
            Some(_) => return Err(wrong("only `burst` may follow the period")),
        };
        if words.next().is_some() {
            return Err(wrong("there is more text after the burst"));
        }
        quota.check()?;
        Ok(quota)
    }
}

/// Splits the limit from the text after `/` or `per`.
fn split_rate(text: &str) -> Option<(&str, &str)> {
    if let Some((limit, rest)) = text.split_once('/') {
        return Some((limit.trim_end(), rest));
    }
    let (limit, rest) = text.split_once("per")?;
    // It is a word, and not a part of one, such as of `percent`.
    if !limit.ends_with(char::is_whitespace) || !rest.starts_with(char::is_whitespace) {
        return None;
    }
    Some((limit.trim_end(), rest))
}

/// Returns `true` if another rate follows, as in `s,1000/h`.
fn has_another_rate(rest: &str) -> bool {
    let mut parts = rest.split([',', ';']).skip(1);
    parts.any(|part| split_rate(part).is_some())
}

/// Parses digits only: `u32::from_str` would also accept a sign.
pub(super) fn whole(digits: &str) -> Option<u32> {
    // `parse` would accept a sign.
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

impl Quota {
    pub(super) const MAX_PERIOD: Duration = Duration::from_secs(366 * 86_400);
    /// Maximum time in which a burst refills.
    pub(super) const MAX_REFILL: Duration = Duration::from_secs(3_650 * 86_400);

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        match self.problem() {
            Some(problem) => {
                let text = format!("invalid quota `{self}`: {problem}");
                Err(ConfigError::new(text))
            }
            None => Ok(()),
        }
    }

    /// Returns why the quota is invalid, if it is.
    const fn problem(&self) -> Option<&'static str> {
        let period = self.period().as_micros();
        if self.limit == 0 {
            Some("its limit must be at least 1")
        } else if self.capacity() == 0 {
            Some("its burst must be at least 1")
        } else if period == 0
            || period > Self::MAX_PERIOD.as_micros()
            || !self.period().subsec_nanos().is_multiple_of(1_000)
        {
            Some("its period must be a whole number of microseconds, from 1 us to 366 days")
        } else if period * self.capacity() as u128 / self.limit as u128
            > Self::MAX_REFILL.as_micros()
        {
            Some(
                "its burst would take more than ten years to refill; lower the burst or raise the rate",
            )
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_forms() {
        assert_eq!("100/s".parse(), Ok(Quota::per_second(100)));
        assert_eq!(" 10/60s ".parse(), Ok(Quota::per_minute(10)));
        assert_eq!(
            "1000/h burst 50".parse(),
            Ok(Quota::per_hour(1000).burst(50))
        );
        assert_eq!(
            "7/250ms".parse(),
            Ok(Quota::per(7, Duration::from_millis(250)))
        );
        let five = Quota::per(5, Duration::from_secs(900));
        for text in [
            "5/15m",
            "5 / 15 min",
            "5 per 15m",
            "5  per\t15 minutes",
            "5 per 900 seconds",
        ] {
            assert_eq!(text.parse(), Ok(five), "{text}");
        }
        for text in [
            "10/m",
            "10/min",
            "10 per minute",
            "10/1m",
            "10 per 1 minute",
            "10 per 60 sec",
        ] {
            assert_eq!(text.parse(), Ok(Quota::per_minute(10)), "{text}");
        }
        assert_eq!(
            "1000 per hour burst 50".parse(),
            Ok(Quota::per_hour(1000).burst(50))
        );
        assert_eq!(
            "1000 per 1 hour  burst  50".parse(),
            Ok(Quota::per_hour(1000).burst(50))
        );
        assert_eq!(
            "1 per 30 days".parse(),
            Ok(Quota::per(1, Duration::from_secs(30 * 86_400)))
        );
        for text in ["9/month", "9 per month", "9/1 month"] {
            assert_eq!(text.parse(), Ok(Quota::per_month(9)), "{text}");
        }
        assert_eq!("9 / year".parse(), Ok(Quota::per_year(9)));
        assert_eq!("9/week".parse(), Ok(Quota::per_week(9)));
        assert_eq!(
            Quota::per_week(9),
            Quota::per(9, 7 * Quota::per_day(1).period())
        );
        assert_eq!(five.to_string(), "5/15m");
        assert_eq!(Quota::per_minute(10).to_string(), "10/m");
        assert_eq!(
            Quota::per(10, Duration::from_secs(90)).to_string(),
            "10/90s"
        );
    }

    #[test]
    fn words_name_the_unit() {
        for (quota, words) in [
            ("10/m", "10 per minute"),
            ("50/s burst 100", "50 per second burst 100"),
            ("5/15m", "5 per 15 minutes"),
            ("1/90s", "1 per 90 seconds"),
            ("1/h", "1 per hour"),
            ("2/30d", "2 per 30 days"),
            ("1/ms", "1 per ms"),
            ("1/500ms", "1 per 500 ms"),
            ("1/week", "1 per 7 days"),
            ("1/month", "1 per month"),
            ("1/year burst 2", "1 per year burst 2"),
        ] {
            assert_eq!(quota.parse::<Quota>().unwrap().in_words(), words);
        }
    }

    #[test]
    fn a_constant_can_be_checked() {
        const GOOD: Quota = Quota::per_second(50).burst(100);
        const _: () = assert!(GOOD.is_valid());
        let day = Quota::per_day;
        for bad in [
            day(0),
            day(1).burst(0),
            Quota::per(1, Duration::ZERO),
            day(1).burst(4_000_000),
        ] {
            assert!(!bad.is_valid(), "{bad}");
        }
    }

    #[test]
    fn errors_name_what_was_wrong() {
        for (text, part) in [
            ("", "no `/` and no `per`"),
            ("10", "no `/` and no `per`"),
            ("10 s", "no `/` and no `per`"),
            ("10per s", "no `/` and no `per`"),
            ("10 percent", "no `/` and no `per`"),
            ("per second", "no `/` and no `per`"),
            ("ten/s", "the limit is not an integer"),
            ("+5/s", "the limit is not an integer"),
            ("5000000000/s", "the limit is not an integer"),
            ("10/", "the period is missing"),
            ("1,000/h", "the limit is not an integer"),
            ("1.5/s", "the limit is not an integer"),
            ("1e3/s", "the limit is not an integer"),
            ("10/60", "the duration has no unit"),
            ("10/60 burst 5", "the duration has no unit"),
            ("10 per burst", "not one of ns, us, ms, s, m, h, d"),
            ("10/60x", "not one of ns, us, ms, s, m, h, d"),
            ("10/M", "not one of ns, us, ms, s, m, h, d"),
            ("10/mo", "in a quota as `/month` or `/year`"),
            ("10/3 months", "in a quota as `/month` or `/year`"),
            ("10/2years", "in a quota as `/month` or `/year`"),
            ("10/1h30m", "not a whole number with one unit"),
            ("10/0.5s", "not a whole number with one unit"),
            ("10/s/m", "not one of ns, us, ms, s, m, h, d"),
            ("10/1500ns", "a whole number of microseconds"),
            ("10/99999999999999999999s", "too long"),
            ("10/s bust 5", "only `burst` may follow"),
            ("10/s, burst 5", "a comma after the limit; use the form"),
            ("10/1s burst 5,", "a comma after the limit"),
            ("10/s burst=5", "only `burst` may follow"),
            ("10/s burst", "the burst is not an integer"),
            ("10/s burst 5 6", "more text"),
            ("0/s", "invalid quota `0/s`: its limit must be at least 1"),
            (
                "1/s burst 0",
                "invalid quota `1/s burst 0`: its burst must be at least 1",
            ),
            ("1/0s", "invalid quota `1/0s`: its period must be"),
            ("1/367d", "366 days"),
            ("1/d burst 4000000", "more than ten years to refill"),
        ] {
            let error = text.parse::<Quota>().unwrap_err().to_string();
            assert!(
                error.contains(part),
                "{text:?} gave {error:?}, which lacks {part:?}"
            );
        }
    }

    #[test]
    fn errors_name_the_fix() {
        let several = "there is more than one quota; use a policy for each, such as \
                       `Policies::new([per_second, per_hour])`, in settings a list of them";
        let units = "the duration's unit is not one of ns, us, ms, s, m, h, d (seven days are `7d` or `week`); \
                     use the form `100/s`, `10/60s` or `1000/h burst 50`";
        for (text, problem) in [
            ("100/s,1000/h", several),
            ("100/s, 1000 per hour", several),
            ("100/s;1000/h", several),
            ("10/s burst 5, 100/m", several),
            ("10/w", units),
            ("10 per 2 wk", units),
        ] {
            let error = text.parse::<Quota>().unwrap_err().to_string();
            assert_eq!(error, format!("{text:?} is not a valid quota: {problem}"));
        }
    }

    proptest! {
        #[test]
        fn display_parses_back(limit in 1u32.., micros in 1u64..31_000_000_000_000, burst in proptest::option::of(1u32..)) {
            let mut quota = Quota::per(limit, Duration::from_micros(micros));
            quota.burst = burst;
            prop_assume!(quota.check().is_ok());
            prop_assert_eq!(quota.to_string().parse(), Ok(quota));
            prop_assert_eq!(quota.in_words().parse(), Ok(quota));
        }

        #[test]
        fn any_text_is_quota_or_error(text in "\\PC{0,40}") {
            let _ = text.parse::<Quota>();
        }
    }
}
