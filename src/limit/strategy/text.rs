//! Strategies as text.

use std::fmt;
use std::str::FromStr;

use super::{Align, Params, Strategy};
use crate::error::ConfigError;
use crate::limit::{Calendar, Quota};

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parameter() {
            None => f.write_str(self.name()),
            Some(parameter) => write!(f, "{}({parameter})", self.name()),
        }
    }
}

impl FromStr for Strategy {
    type Err = ConfigError;

    /// # Errors
    ///
    /// Returns an error for text of another form, and for a sliding window with too few or too many
    /// cells.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |problem| {
            let all = Self::ALL
                .iter()
                .map(|strategy| format!("`{strategy}`, "))
                .collect::<String>();
            ConfigError::invalid(
                "strategy",
                text,
                format_args!("{problem}; use {all}or in a policy `in-flight`"),
            )
        };
        let (name, parameter) = match text.trim().split_once('(') {
            None => (text.trim(), None),
            Some((name, rest)) => {
                let parameter = rest
                    .strip_suffix(')')
                    .ok_or_else(|| wrong("there is no `)` at its end"))?;
                (name.trim_end(), Some(parameter.trim()))
            }
        };
        let mut all = Self::ALL.iter().copied();
        let named = all
            .find(|strategy| strategy.name() == name)
            .ok_or_else(|| wrong("no strategy has this name (names are in lower case)"))?;
        if let (Self::FixedWindow(_), Some(parameter)) = (named, parameter)
            && Calendar::is_named_in(parameter)
        {
            return Ok(Self::FixedWindow(Align::Calendar(parameter.parse()?)));
        }
        let strategy = parameter
            .map_or(Ok(named), |parameter| named.with_parameter(parameter))
            .map_err(wrong)?;
        // Reject parameters that are out of bounds for every quota.
        Params::new(strategy.into(), Quota::per(1, Quota::MAX_PERIOD)).map(|_| strategy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Refill;
    use proptest::prelude::{prop_assert_eq, proptest};
    use proptest::strategy::Strategy as Generate;
    use std::time::Duration;

    fn any_strategy() -> impl Generate<Value = Strategy> {
        let offset = (0..366 * 86_400u64, 0u32..1_000_000_000, 0u32..3);
        (proptest::sample::select(Strategy::ALL), offset, 1u16..=1000).prop_map(
            |(strategy, offset, cells)| {
                let (secs, nanos, kind) = offset;
                let offset = [
                    Duration::from_secs(secs),
                    Duration::from_secs(secs % 30 * 3_600),
                    Duration::new(secs, nanos),
                ];
                match strategy {
                    Strategy::FixedWindow(Align::Clock { .. }) => {
                        Strategy::FixedWindow(Align::Clock {
                            offset: offset[kind as usize],
                        })
                    }
                    Strategy::SlidingWindow { .. } => Strategy::SlidingWindow { cells },
                    other => other,
                }
            },
        )
    }

    #[test]
    fn text_forms() {
        let utc_plus_2 = Strategy::FixedWindow(Align::Clock {
            offset: Duration::from_secs(22 * 3_600),
        });
        for (text, strategy, canonical) in [
            ("gcra", Strategy::Gcra, "gcra"),
            (" leaky-bucket ", Strategy::LeakyBucket, "leaky-bucket"),
            (
                "fixed-window",
                Strategy::FixedWindow(Align::default()),
                "fixed-window",
            ),
            (
                "fixed-window(clock)",
                Strategy::FixedWindow(Align::default()),
                "fixed-window",
            ),
            (
                "fixed-window( clock + 22 hours )",
                utc_plus_2,
                "fixed-window(clock+22h)",
            ),
            (
                "fixed-window(first-hit)",
                Strategy::FixedWindow(Align::FirstHit),
                "fixed-window(first-hit)",
            ),
            (
                "fixed-window( month  from 15 , +02:00 )",
                Strategy::FixedWindow(Align::Calendar(
                    Calendar::month_from(15).unwrap().in_zone("+02:00").unwrap(),
                )),
                "fixed-window(month from 15, +02:00)",
            ),
            (
                "fixed-window(week from monday)",
                Strategy::FixedWindow(Align::Calendar(Calendar::week())),
                "fixed-window(week)",
            ),
            (
                "sliding-window",
                Strategy::SlidingWindow { cells: 10 },
                "sliding-window(10 cells)",
            ),
            (
                "sliding-window (60cells)",
                Strategy::SlidingWindow { cells: 60 },
                "sliding-window(60 cells)",
            ),
            (
                "sliding-window(1 cell)",
                Strategy::SlidingWindow { cells: 1 },
                "sliding-window(1 cells)",
            ),
            (
                "token-bucket(greedy)",
                Strategy::TokenBucket(Refill::Greedy),
                "token-bucket",
            ),
            (
                "token-bucket(interval)",
                Strategy::TokenBucket(Refill::Interval),
                "token-bucket(interval)",
            ),
        ] {
            assert_eq!(text.parse(), Ok(strategy), "{text}");
            assert_eq!(strategy.to_string(), canonical);
        }
    }

    #[test]
    fn strategies_round_trip_as_text() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse(), Ok(*strategy));
        }
    }

    #[test]
    fn errors_name_what_was_wrong() {
        for (text, part) in [
            ("", "no strategy has this name"),
            ("GCRA", "(names are in lower case)"),
            ("fixed_window", "no strategy has this name"),
            ("gcra(2)", "has no parameter"),
            ("gcra()", "has no parameter"),
            ("sliding-log(60)", "has no parameter"),
            ("in-flight", "no strategy has this name"),
            ("gcra(", "no `)`"),
            ("token-bucket(interval) x", "no `)`"),
            ("token-bucket(eager)", "neither `greedy` nor `interval`"),
            (
                "fixed-window(60)",
                "not one of `clock`, `clock+22h`, `first-hit` and `month`",
            ),
            (
                "fixed-window(hour+2h)",
                "not one of `clock`, `clock+22h`, `first-hit` and `month`",
            ),
            (
                "fixed-window(clock-2h)",
                "not one of `clock`, `clock+22h`, `first-hit` and `month`",
            ),
            ("fixed-window(clock+2)", "the duration has no unit"),
            ("fixed-window(month from 32)", "from 1 to 31"),
            ("gcra(month)", "has no parameter"),
            (
                "sliding-window(60)",
                "not a number of cells, such as `10 cells`",
            ),
            (
                "sliding-window(60s)",
                "not a number of cells, such as `10 cells`",
            ),
            (
                "sliding-window()",
                "not a number of cells, such as `10 cells`",
            ),
            ("sliding-window(0 cells)", "0 cells: use 1 to 1000"),
            ("sliding-window(1001 cells)", "1001 cells: use 1 to 1000"),
            ("sliding-window(100000 cells)", "use 1 to 1000"),
        ] {
            let error = text.parse::<Strategy>().unwrap_err().to_string();
            assert!(
                error.contains(part),
                "{text:?} gave {error:?}, which lacks {part:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn display_parses_back(strategy in any_strategy()) {
            prop_assert_eq!(strategy.to_string().parse(), Ok(strategy));
        }

        #[test]
        fn any_text_is_strategy_or_error(text in "\\PC{0,40}|(fixed|sliding)-window\\(\\PC{0,20}\\)") {
            let _ = text.parse::<Strategy>();
        }
    }
}
