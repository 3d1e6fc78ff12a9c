//! The span of a count: the period, or the quota, that the count depends on. In a Redis key it
//! follows the strategy.
//!
//! | strategy | span | examples |
//! |---|---|---|
//! | [`FixedWindow`](Strategy::FixedWindow) | period and alignment | `1m`, `1d+22h`, `1m+hit` |
//! | [`FixedWindow`](Strategy::FixedWindow) of a calendar | unit, or name of a function | `month`, `week`, `@billing` |
//! | [`SlidingLog`](Strategy::SlidingLog), [`SlidingCounter`](Strategy::SlidingCounter) | period | `15m` |
//! | [`SlidingWindow`](Strategy::SlidingWindow) | period and number of cells | `1m/10` |
//! | [`TokenBucket`](Strategy::TokenBucket), refilled by the interval | `i` | `i` |
//! | [`Gcra`](Strategy::Gcra), [`LeakyBucket`](Strategy::LeakyBucket), other [`TokenBucket`](Strategy::TokenBucket) | none | |
//! | a pause | its quota | `2147483648/m` |
//! | requests in flight | none | |
//!
//! The limit of a window is not part of its span, so that the count continues if the limit changes. Nor are the first day
//! and the zone of a calendar: its value knows when it ends. That of a bucket
//! continues under any quota: its value names the quota.

use super::{Align, PolicyKind, Quota, Refill, Strategy, duration};

const FIRST_HIT: &str = "hit";
const INTERVAL: &str = "i";

/// Returns the span of a policy's count; empty for requests in flight and for gradual buckets.
pub(super) fn of(kind: PolicyKind, quota: Quota) -> String {
    let PolicyKind::Rate(strategy) = kind else {
        return String::new();
    };
    let period = duration::Text(quota.period());
    match strategy {
        Strategy::FixedWindow(Align::FirstHit) => format!("{period}+{FIRST_HIT}"),
        Strategy::FixedWindow(Align::Clock { offset }) if offset.is_zero() => period.to_string(),
        Strategy::FixedWindow(Align::Clock { offset }) => {
            format!("{period}+{}", duration::Text(offset))
        }
        Strategy::FixedWindow(Align::Calendar(calendar)) => calendar.span(),
        Strategy::SlidingLog | Strategy::SlidingCounter => period.to_string(),
        Strategy::SlidingWindow { cells } => format!("{period}/{cells}"),
        Strategy::TokenBucket(Refill::Interval) => INTERVAL.to_owned(),
        Strategy::TokenBucket(Refill::Greedy) | Strategy::LeakyBucket | Strategy::Gcra => {
            String::new()
        }
    }
}

/// Returns the span of a pause: its level is a time under its own quota only.
pub(super) fn of_pause(quota: Quota) -> String {
    quota.to_string()
}

/// A strategy, a quota, and their span.
#[cfg(test)]
pub(crate) fn examples() -> [(Strategy, &'static str, &'static str); 12] {
    let window = |offset| {
        Strategy::FixedWindow(Align::Clock {
            offset: std::time::Duration::from_secs(offset),
        })
    };
    let calendar = |text: &str| Strategy::FixedWindow(Align::Calendar(text.parse().unwrap()));
    [
        (calendar("month from 15, +02:00"), "10/month", "month"),
        (calendar("week"), "10/week", "week"),
        (window(0), "10/m", "1m"),
        (window(22 * 3_600), "10/d", "1d+22h"),
        (Strategy::FixedWindow(Align::FirstHit), "10/90s", "90s+hit"),
        (Strategy::SlidingLog, "5/15m", "15m"),
        (Strategy::SlidingCounter, "5/60m", "1h"),
        (Strategy::SlidingWindow { cells: 60 }, "5/m", "1m/60"),
        (Strategy::TokenBucket(Refill::Greedy), "5/m", ""),
        (Strategy::TokenBucket(Refill::Interval), "5/m burst 7", "i"),
        (Strategy::LeakyBucket, "1000/h burst 1000", ""),
        (Strategy::Gcra, "100/s burst 200", ""),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Policy;

    #[test]
    fn a_span_is_what_the_count_depends_on() {
        for (strategy, quota, span) in examples() {
            let policy = Policy::new("api", strategy, quota).unwrap();
            assert_eq!(policy.span(), span);
        }
        assert_eq!(Policy::in_flight("up", 3).unwrap().span(), "");
    }
}
