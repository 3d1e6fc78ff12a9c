use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use super::duration::{self, Text};
use super::{Policy, Quota, Strategy};
use crate::error::ConfigError;

/// The number of denials that block a caller, and the time of the block: the text `20/min for 10m` in a settings file, or
/// `20/min for 10m, extended` if further denials [extend](crate::RateLimitLayer::extend_blocks) the block.
///
/// Pass it to [`block_after`](crate::RateLimitLayer::block_after):
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::reject::BlockAfter;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let rule: BlockAfter = "20/min for 10m".parse()?;
/// assert_eq!((rule.strikes(), rule.time()), (Quota::per_minute(20), Duration::from_secs(600)));
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
///     .block_after(rule.strikes(), rule.time())?
///     .extend_blocks(rule.is_extended());
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
///
/// With the feature `serde` it is read from that text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockAfter {
    strikes: Quota,
    time: Duration,
    is_extended: bool,
}

/// Valid times of a block.
const TIMES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(366 * 86_400);

/// Half of the shortest block.
const SHORTEST_EXTENSION: Duration = Duration::from_millis(500);
const EXTENDED: &str = ", extended";

impl BlockAfter {
    /// Creates a rule: `strikes` denials within the period of that quota block for `time`.
    ///
    /// # Errors
    ///
    /// Returns an error if `time` is not 1 second to 366 days, and if a policy with this quota and
    /// [`Strategy::SlidingLog`] would be invalid: for a limit of 0 or above 100,000, a burst, and a month or a year.
    pub fn new(
        strikes: impl TryInto<Quota, Error: Into<ConfigError>>,
        time: Duration,
    ) -> Result<Self, ConfigError> {
        let strikes = strikes.try_into().map_err(Into::into)?;
        if !TIMES.contains(&time) {
            return Err(ConfigError::new(format!(
                "a block of {} is out of range: use 1 second to 366 days",
                Text(time)
            )));
        }
        Policy::new("strikes", Strategy::SlidingLog, strikes)?;
        Ok(Self {
            strikes,
            time,
            is_extended: false,
        })
    }

    /// Lets denials of a blocked caller extend the block.
    #[must_use]
    pub fn extended(self) -> Self {
        Self {
            is_extended: true,
            ..self
        }
    }

    /// Returns the number of denials that block a caller, and the time in which they are counted.
    pub fn strikes(&self) -> Quota {
        self.strikes
    }

    /// Returns how long a caller is blocked.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// Returns `true` if denials of a blocked caller extend the block.
    pub fn is_extended(&self) -> bool {
        self.is_extended
    }

    /// Returns by how much the rest of a block is shorter than its time, at least, when a denial extends it. So a flood
    /// extends a block rarely.
    pub(crate) fn extension(&self) -> Duration {
        (self.time / 100).max(SHORTEST_EXTENSION)
    }
}

/// As `20/m for 10m`, which [`from_str`](Self::from_str) reads.
impl fmt::Display for BlockAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.strikes, Text(self.time))?;
        if self.is_extended {
            f.write_str(EXTENDED)?;
        }
        Ok(())
    }
}

impl FromStr for BlockAfter {
    type Err = ConfigError;

    /// # Errors
    ///
    /// Returns an error for text of another form, and as [`new`](Self::new).
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let Some((strikes, rest)) = text.split_once(" for ") else {
            return Err(wrong(
                text,
                "there is no `for` between the quota and the time",
            ));
        };
        let rest = rest.trim_end();
        let time = match duration::parse(rest.strip_suffix(EXTENDED).unwrap_or(rest)) {
            Ok(time) => time,
            Err(problem) => return Err(wrong(text, problem)),
        };
        let rule = Self::new(strikes, time)?;
        if rest.ends_with(EXTENDED) {
            Ok(rule.extended())
        } else {
            Ok(rule)
        }
    }
}

fn wrong(text: &str, problem: &str) -> ConfigError {
    let problem = format!("{problem}; use the form `20/min for 10m` or `20/min for 10m, extended`");
    ConfigError::invalid("block", text, problem)
}

#[cfg(feature = "serde")]
super::formats::text!(BlockAfter, "a block such as `20/min for 10m`");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_round_trips() {
        for (text, shown) in [
            ("20/min for 10m", "20/m for 10m"),
            ("3 per 15 minutes for 1 day", "3/15m for 1d"),
            ("1/s for 366d", "1/s for 366d"),
            ("20/min for 10m, extended ", "20/m for 10m, extended"),
        ] {
            let rule: BlockAfter = text.parse().unwrap();
            assert_eq!(rule.to_string(), shown);
            assert_eq!(shown.parse(), Ok(rule));
            assert_eq!(rule.is_extended(), shown.ends_with("extended"));
        }
    }

    #[test]
    fn errors_name_problem_and_fix() {
        for (text, error) in [
            (
                "20/min",
                "there is no `for` between the quota and the time; use the form",
            ),
            (
                "20/min for ",
                "it does not begin with a whole number; use the form",
            ),
            (
                "20/min for 10m, renewed",
                "use the form `20/min for 10m` or `20/min for 10m, extended`",
            ),
            (
                "20/min for 0s",
                "a block of 0s is out of range: use 1 second to 366 days",
            ),
            (
                "20/min for 367d",
                "a block of 367d is out of range: use 1 second to 366 days",
            ),
            ("0/min for 10m", "its limit must be at least 1"),
            ("20/min burst 40 for 10m", "burst"),
            ("20/month for 10m", "month"),
            ("100001/d for 10m", "a limit of 100001 is too high"),
            ("20 in flight for 10m", "there is no `/` and no `per`"),
        ] {
            let found = text.parse::<BlockAfter>().unwrap_err().to_string();
            assert!(found.contains(error), "{text}: {found}");
        }
    }
}
