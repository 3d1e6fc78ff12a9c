//! redis-cell and redis_rate.

use super::*;

/// The reply of `CL.THROTTLE`: limited, limit, remaining, and the seconds until a retry and a
/// reset, rounded up.
///
/// Differences: this crate rounds up fractions of a second from a microsecond, redis-cell only from
/// a millisecond; and a quantity of 0 writes nothing.
fn throttle(caller: &mut Caller, at: i64, quantity: u32) -> [i64; 5] {
    let decision = caller.take(at, quantity);
    let seconds = |micros: i64| {
        if micros < 0 {
            -1
        } else {
            (micros as u64).div_ceil(S as u64) as i64
        }
    };
    [
        i64::from(!decision.is_allowed()),
        decision.capacity().into(),
        decision.remaining().into(),
        seconds(retry(&decision)),
        seconds(micros(decision.reset_after())),
    ]
}

/// The table of redis-cell's own tests: a `max_burst` of 4, one per second.
#[test]
fn gcra_matches_the_tests_of_redis_cell() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(1).burst(5));
    for (row, (at, quantity, reply)) in [
        // A cost above the limit is never allowed.
        (0, 6, [1, 5, 5, -1, 0]),
        // Fill the bucket.
        (0, 1, [0, 5, 4, -1, 1]),
        (0, 1, [0, 5, 3, -1, 2]),
        (0, 1, [0, 5, 2, -1, 3]),
        (0, 1, [0, 5, 1, -1, 4]),
        (0, 1, [0, 5, 0, -1, 5]),
        (0, 1, [1, 5, 0, 1, 5]),
        // Time passes; a reset in 3.9 s is reported as 4.
        (3_000, 1, [0, 5, 2, -1, 3]),
        (3_100, 1, [0, 5, 1, -1, 4]),
        (4_000, 1, [0, 5, 1, -1, 4]),
        (8_000, 1, [0, 5, 4, -1, 1]),
        (9_500, 1, [0, 5, 4, -1, 1]),
        // A cost of 0 is a peek.
        (9_500, 0, [0, 5, 4, -1, 1]),
        // A cost above 1.
        (9_500, 2, [0, 5, 2, -1, 3]),
        (9_500, 5, [1, 5, 2, 3, 3]),
        // A wait of 0.9 s is reported as 1: a client that waits that long is not denied again.
        (9_600, 3, [1, 5, 2, 1, 3]),
        (9_600, 6, [1, 5, 2, -1, 3]),
        (10_600, 3, [0, 5, 0, -1, 5]),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(
            throttle(&mut caller, at * MS, quantity),
            reply,
            "row {row}: {quantity} at {at} ms"
        );
    }
}

/// `CL.THROTTLE user123 15 30 60 1`, from its README.
#[test]
fn gcra_matches_the_readme_of_redis_cell() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_minute(30).burst(16));
    assert_eq!(throttle(&mut caller, 0, 1), [0, 16, 15, -1, 2]);
}

/// A result of redis_rate since v9: allowed, remaining, and the milliseconds until a retry, -1 if allowed, and a reset.
fn result(decision: &Decision) -> [i64; 4] {
    let retry = if decision.is_allowed() {
        -1
    } else {
        retry(decision) / MS
    };
    [
        decision.granted().into(),
        decision.remaining().into(),
        retry,
        micros(decision.reset_after()) / MS,
    ]
}

/// `Allow` and `AllowN` under `PerSecond(10)`, and `Reset`. A cost above the burst is never
/// allowed, whereas redis_rate reports a wait after which it is denied again.
#[test]
fn gcra_allows_as_redis_rate_does() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(10));
    assert_eq!(
        result(&caller.take(0, 0)),
        [0, 10, -1, 0],
        "a cost of 0 peeks at a new caller"
    );
    assert_eq!(result(&caller.take(0, 1)), [1, 9, -1, 100]);
    assert_eq!(result(&caller.take(0, 0)), [0, 9, -1, 100]);
    let reset = Check::reset(Key::GLOBAL, &caller.policies);
    let _ = caller.decide(0, reset);
    assert_eq!(result(&caller.take(0, 1)), [1, 9, -1, 100]);
    assert_eq!(result(&caller.take(0, 2)), [2, 7, -1, 300]);
    assert_eq!(result(&caller.take(0, 7)), [7, 0, -1, 1_000]);
    assert_eq!(result(&caller.take(0, 10)), [0, 0, 1_000, 1_000]);
    let never = caller.take(0, 1_000);
    assert_eq!(
        (never.outcome(), result(&never)),
        (Outcome::ExceedsCapacity, [0, 0, 0, 1_000])
    );
}

/// `AllowAtMost` under `PerSecond(10)`: grants the rest, and reports a wait only if nothing
/// remains.
#[test]
fn at_most_matches_redis_rate() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(10));
    for (most, expected) in [
        (0, [0, 10, -1, 0]),
        (1, [1, 9, -1, 100]),
        (2, [2, 7, -1, 300]),
        (0, [0, 7, -1, 300]),
        (10, [7, 0, -1, 1_000]),
        (0, [0, 0, -1, 1_000]),
        (1_000, [0, 0, 100, 1_000]),
    ] {
        assert_eq!(
            result(&caller.check(0, Check::up_to, most)),
            expected,
            "at most {most}"
        );
    }
}

/// If 1.5 remain, redis_rate grants 1 but charges 1.5.
#[test]
fn at_most_charges_only_the_granted_cost() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(10));
    let _ = caller.take(0, 9);
    assert_eq!(
        result(&caller.check(50 * MS, Check::up_to, 5)),
        [1, 0, -1, 950]
    );
    assert_eq!(
        result(&caller.check(50 * MS, Check::up_to, 5)),
        [0, 0, 50, 950]
    );
    assert_eq!(
        result(&caller.check(100 * MS, Check::up_to, 5)),
        [1, 0, -1, 1_000]
    );
}

/// With one per millisecond, no wait is longer than a millisecond, and none is rounded down to
/// zero.
#[test]
fn waits_below_a_millisecond_are_returned() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per(1, Duration::from_millis(1)));
    for (at, wait) in [(0, -1), (0, 1_000), (1, 999), (999, 1), (1_000, -1)] {
        assert_eq!(retry(&caller.take(at, 1)), wait, "at {at} us");
    }
}
