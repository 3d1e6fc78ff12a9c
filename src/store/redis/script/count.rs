//! The name of a count in Redis: `name:strategy:span`, without a span for requests in flight. The
//! [span](Policy::span) is what the count depends on, so a policy with that count can be restored.

use std::time::Duration;

use crate::limit::{Align, Policy, PolicyKind, Quota, Refill, Strategy};

/// Appends the name of a policy's count.
pub(super) fn write(policy: &Policy, to: &mut Vec<u8>) {
    let between = if policy.span().is_empty() { "" } else { ":" };
    for part in [
        policy.name(),
        ":",
        policy.kind().letter(),
        between,
        policy.span(),
    ] {
        to.extend_from_slice(part.as_bytes());
    }
}

/// Returns a policy with the count of this name, strategy and span. A span does not contain the limit of a window, so that
/// is 1. `None` if no policy has this span.
pub(super) fn read(name: &str, letter: &str, span: &str) -> Option<Policy> {
    let policy = if letter == PolicyKind::InFlight.letter() {
        let shortest_ttl = Duration::from_secs(1);
        Policy::in_flight(name, 1)
            .ok()?
            .slot_ttl(shortest_ttl)
            .ok()?
    } else {
        let (strategy, quota) = read_span(letter, span)?;
        Policy::new(name, strategy, quota).ok()?
    };
    // Reject text that `write` would not write: two spans of one count would be two keys.
    (policy.span() == span).then_some(policy)
}

fn read_span(letter: &str, span: &str) -> Option<(Strategy, Quota)> {
    let mut all = Strategy::ALL.iter();
    let strategy = *all.find(|strategy| PolicyKind::from(**strategy).letter() == letter)?;
    match strategy {
        Strategy::FixedWindow(_) => read_fixed_window(span),
        Strategy::SlidingWindow { .. } => read_sliding_window(span),
        Strategy::SlidingLog | Strategy::SlidingCounter => Some((strategy, read_period(span)?)),
        Strategy::TokenBucket(_) => read_token_bucket(span),
        Strategy::LeakyBucket | Strategy::Gcra => Some((strategy, read_bucket(span)?)),
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

fn read_token_bucket(span: &str) -> Option<(Strategy, Quota)> {
    let (bucket, refill) = match span.strip_suffix(",i") {
        Some(bucket) => (bucket, Refill::Interval),
        None => (span, Refill::Greedy),
    };
    Some((Strategy::TokenBucket(refill), read_bucket(bucket)?))
}

/// Parses the quota of a bucket: a rate, and a burst that differs from its limit.
fn read_bucket(text: &str) -> Option<Quota> {
    let Some((rate, burst)) = text.split_once('+') else {
        return text.parse().ok();
    };
    let rate: Quota = rate.parse().ok()?;
    Some(rate.burst(burst.parse().ok()?))
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
            assert!(
                !policy.frees().has_burst()
                    || again.quota().capacity() == policy.quota().capacity()
            );
        }
    }

    #[test]
    fn other_texts_are_no_span() {
        for (letter, span) in [
            ("g", ""),
            ("g", "5/60s"),
            ("g", "5/m+5"),
            ("g", "5/m,i"),
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
            assert_eq!(read("api", letter, span), None, "{letter}:{span}");
        }
        let slots = read("up", "s", "").unwrap();
        assert_eq!((slots.strategy(), slots.quota().limit()), (None, 1));
    }
}
