//! The span of a count: the period, or the quota, that the count depends on. In a Redis key it
//! follows the strategy.
//!
//! | strategy | span | examples |
//! |---|---|---|
//! | [`FixedWindow`](Strategy::FixedWindow) | period and alignment | `1m`, `1d+22h`, `1m+hit` |
//! | [`SlidingLog`](Strategy::SlidingLog), [`SlidingCounter`](Strategy::SlidingCounter) | period | `15m` |
//! | [`SlidingWindow`](Strategy::SlidingWindow) | period and number of cells | `1m/10` |
//! | [`TokenBucket`](Strategy::TokenBucket), refilled by the interval | `i` | `i` |
//! | [`Gcra`](Strategy::Gcra), [`LeakyBucket`](Strategy::LeakyBucket), other [`TokenBucket`](Strategy::TokenBucket) | none | |
//! | a pause | its quota | `2147483648/m` |
//! | requests in flight | none | |
//!
//! The limit of a window is not part of its span, so that the count continues if the limit changes. That of a bucket
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

/// Parses a span, given the kind's letter in keys. A span contains neither the limit of a window nor the quota of a
/// bucket, so that is 1. `None` if no policy has this span.
pub(super) fn read(letter: &str, span: &str) -> Option<(PolicyKind, Quota)> {
    let kind = PolicyKind::of_letter(letter)?;
    let PolicyKind::Rate(strategy) = kind else {
        return span.is_empty().then_some((kind, Quota::per_second(1)));
    };
    let (strategy, quota) = match strategy {
        Strategy::FixedWindow(_) => read_fixed_window(span)?,
        Strategy::SlidingWindow { .. } => read_sliding_window(span)?,
        Strategy::SlidingLog | Strategy::SlidingCounter => (strategy, read_period(span)?),
        Strategy::TokenBucket(_) if span == INTERVAL => (
            Strategy::TokenBucket(Refill::Interval),
            Quota::per_second(1),
        ),
        Strategy::TokenBucket(_) => (Strategy::TokenBucket(Refill::Greedy), Quota::per_second(1)),
        Strategy::LeakyBucket | Strategy::Gcra => (strategy, Quota::per_second(1)),
    };
    let kind = PolicyKind::Rate(strategy);
    // Reject text that `of` would not write: two spans of one count would be two keys.
    if !quota.is_valid() || of(kind, quota) != span {
        return None;
    }
    Some((kind, quota))
}

fn read_fixed_window(span: &str) -> Option<(Strategy, Quota)> {
    let (period, align) = match span.split_once('+') {
        None => (span, Align::default()),
        Some((period, FIRST_HIT)) => (period, Align::FirstHit),
        Some((period, offset)) => {
            let offset = duration::parse(offset).ok()?;
            (period, Align::Clock { offset })
        }
    };
    Some((Strategy::FixedWindow(align), read_period(period)?))
}

fn read_sliding_window(span: &str) -> Option<(Strategy, Quota)> {
    let (period, cells) = span.split_once('/')?;
    let cells = cells.parse().ok()?;
    Some((Strategy::SlidingWindow { cells }, read_period(period)?))
}

/// Returns a quota of this period. Its limit is 1, since the span does not contain it.
fn read_period(text: &str) -> Option<Quota> {
    let period = duration::parse(text).ok()?;
    Some(Quota::per(1, period))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::Policy;

    #[test]
    fn spans_are_read_as_written() {
        let window = |offset| {
            Strategy::FixedWindow(Align::Clock {
                offset: Duration::from_secs(offset),
            })
        };
        for (strategy, quota, span) in [
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
        ] {
            let policy = Policy::new("api", strategy, quota.parse().unwrap()).unwrap();
            assert_eq!(policy.span(), span);
            let (kind, quota) = read(strategy.letter(), span).unwrap();
            let again = Policy::of_kind("api", kind, quota).unwrap();
            assert_eq!((again.span(), again.id()), (span, policy.id()));
        }
        assert_eq!(Policy::in_flight("up", 3).unwrap().span(), "");
    }

    #[test]
    fn other_texts_are_no_span() {
        for (letter, span) in [
            ("g", "5/m"),
            ("g", "5/60s"),
            ("g", "5/m+5"),
            ("g", "i"),
            ("g", "0/m"),
            ("g", "5/m:x"),
            ("g", "5/m burst 7"),
            ("o", "60s"),
            ("o", "1m/10"),
            ("f", "1m+60s"),
            ("f", "1m+"),
            ("w", "1m/010"),
            ("w", "1m"),
            ("s", "1m"),
            ("?", "1m"),
        ] {
            assert_eq!(read(letter, span), None, "{letter}:{span}");
        }
        assert_eq!(
            read(PolicyKind::InFlight.letter(), ""),
            Some((PolicyKind::InFlight, Quota::per_second(1)))
        );
    }
}
