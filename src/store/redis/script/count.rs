//! Restores policies from the keys and values in Redis: the [name of a count](Policy::count), and the quota that wrote a bucket.

use std::time::Duration;

use crate::limit::{Align, Calendar, Frees, Policy, PolicyKind, Quota, Refill, Strategy, Writer};

/// Returns a policy with the count of this name, strategy and span. A span does not contain the limit of a window or the
/// quota of a bucket, so that is 1. `None` if no policy has this span.
pub(super) fn read(name: &str, letter: &str, span: &str) -> Option<Policy> {
    let policy = if letter == PolicyKind::InFlight.letter() {
        let shortest_ttl = Duration::from_secs(1);
        Policy::in_flight(name, 1)
            .ok()?
            .slot_ttl(shortest_ttl)
            .ok()?
    } else if letter == PolicyKind::from(Strategy::Gcra).letter() && !span.is_empty() {
        let quota: Quota = span.parse().ok()?;
        Policy::new(name, Strategy::Gcra, quota).ok()?.of_pauses()
    } else if letter == OF_WINDOWS && Calendar::is_span(span) {
        let strategy = Strategy::FixedWindow(Align::Calendar(Calendar::of_key()));
        Policy::new(name, strategy, ANY).ok()?.with_span(span)
    } else {
        let (strategy, quota) = read_span(letter, span)?;
        Policy::new(name, strategy, quota).ok()?
    };
    // Reject other texts of the span: two spans of one count would be two keys.
    (policy.span() == span).then_some(policy)
}

/// Returns the bucket of this name and strategy that the value of a count names. `None` if no quota has this code.
pub(super) fn of_writer(of: &Policy, writer: Writer) -> Option<Policy> {
    if of.is_pause() {
        return Some(of.clone());
    }
    let [interval, ticks, capacity] = writer.numbers()?;
    let quota = match of.frees() {
        Frees::InBatches => {
            let period = Duration::from_micros(interval as u64);
            Quota::per(u32::try_from(ticks).ok()?, period)
        }
        Frees::Gradually => gradual_quota(interval, ticks, capacity)?,
        _ => return None,
    };
    let capacity = u32::try_from(capacity).ok()?;
    let quota = if capacity == quota.limit() {
        quota
    } else {
        quota.burst(capacity)
    };
    Policy::new(of.name(), of.strategy()?, quota).ok()
}

/// In microseconds.
const SECOND: i64 = 1_000_000;
const MINUTE: i64 = 60 * SECOND;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

/// Returns a quota of this rate with a simple text: its limit is the capacity, or its period is a unit of time.
fn gradual_quota(interval: i64, ticks: i64, capacity: i64) -> Option<Quota> {
    const UNITS: [i64; 4] = [SECOND, MINUTE, HOUR, DAY];
    if let Some(period) = whole_ratio(capacity, interval, ticks) {
        let is_per_second = whole_ratio(SECOND, ticks, interval).is_some();
        if UNITS.contains(&period) || period % SECOND == 0 && !is_per_second {
            return quota_of(capacity, period);
        }
    }
    for period in UNITS {
        if let Some(limit) = whole_ratio(period, ticks, interval)
            && let Some(quota) = quota_of(limit, period)
        {
            return Some(quota);
        }
    }
    quota_of(ticks, interval)
}

/// Returns `a * b / c`, if it is a whole number.
fn whole_ratio(a: i64, b: i64, c: i64) -> Option<i64> {
    // The product may exceed 64 bits.
    let product = i128::from(a) * i128::from(b);
    if product % i128::from(c) != 0 {
        return None;
    }
    i64::try_from(product / i128::from(c)).ok()
}

/// Returns a quota of this period in microseconds. `None` if the limit is no limit of a quota.
fn quota_of(limit: i64, period: i64) -> Option<Quota> {
    let limit = u32::try_from(limit).ok()?;
    if limit == 0 {
        return None;
    }
    let period = Duration::from_micros(u64::try_from(period).ok()?);
    Some(Quota::per(limit, period))
}

/// The letter of fixed windows.
const OF_WINDOWS: &str = PolicyKind::Rate(Strategy::FixedWindow(Align::FirstHit)).letter();

/// The quota of a bucket or of a calendar, which is not in its key.
const ANY: Quota = Quota::per_second(1);

fn read_span(letter: &str, span: &str) -> Option<(Strategy, Quota)> {
    let mut all = Strategy::ALL.iter();
    let strategy = *all.find(|strategy| PolicyKind::from(**strategy).letter() == letter)?;
    match strategy {
        Strategy::FixedWindow(_) => read_fixed_window(span),
        Strategy::SlidingWindow { .. } => read_sliding_window(span),
        Strategy::SlidingLog | Strategy::SlidingCounter => Some((strategy, read_period(span)?)),
        Strategy::TokenBucket(_) if span == "i" => {
            Some((Strategy::TokenBucket(Refill::Interval), ANY))
        }
        Strategy::TokenBucket(_) => Some((Strategy::TokenBucket(Refill::Greedy), ANY)),
        Strategy::LeakyBucket | Strategy::Gcra => Some((strategy, ANY)),
    }
}

fn read_fixed_window(span: &str) -> Option<(Strategy, Quota)> {
    let (period, align) = match span.split_once('+') {
        None => (span, Align::default()),
        Some((period, "hit")) => (period, Align::FirstHit),
        Some((period, offset)) => {
            let offset = read_period(offset)?.period();
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

/// Returns a quota of this period.
fn read_period(text: &str) -> Option<Quota> {
    format!("1/{text}").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::span_examples;

    #[test]
    fn spans_are_read_as_written() {
        for (strategy, quota, span) in span_examples() {
            let policy = Policy::new("api", strategy, quota).unwrap();
            let again = read("api", policy.kind().letter(), span).unwrap();
            assert_eq!((again.span(), again.id()), (span, policy.id()));
        }
        let pause = Policy::new("api", Strategy::Gcra, Quota::per_minute(60))
            .unwrap()
            .of_pauses();
        let again = read("api", "g", pause.span()).unwrap();
        assert!(again.is_pause() && again.id() == pause.id());
    }

    #[test]
    fn other_texts_are_no_span() {
        for (letter, span) in [
            ("g", "5/60s"),
            ("g", "5/m+5"),
            ("g", "i"),
            ("t", "5/m,i"),
            ("g", "0/m"),
            ("g", "5/m:x"),
            ("o", "60s"),
            ("o", "1m/10"),
            ("f", "1m+60s"),
            ("f", "1m+"),
            ("f", "month-15"),
            ("f", "calendar"),
            ("f", "@"),
            ("f", "@a:b"),
            ("o", "month"),
            ("w", "1m/010"),
            ("w", "1m"),
            ("s", "1m"),
            ("?", "1m"),
        ] {
            assert_eq!(read("api", letter, span), None, "{letter}:{span}");
        }
        let slots = read("up", "s", "").unwrap();
        assert_eq!((slots.strategy(), slots.quota().limit()), (None, 1));
    }
}
