//! redis_rate before GCRA, Redisson, and Istio.

use super::*;

/// The slots of redis_rate v6 and v7: `AllowN(name, 10, minute, n)` returns a count, the time until
/// the slot ends, and whether it is allowed. There, denied requests count too, and the time is in
/// whole seconds.
#[test]
fn clock_aligned_windows_match_redis_rate_slots() {
    let mut caller = Caller::new(
        Strategy::FixedWindow(Align::default()),
        Quota::per_minute(10),
    );
    for (at, n, count, delay, allow) in [
        (20 * S, 4, 4, 40 * S, true),
        (20 * S, 7, 4, 40 * S, false),
        (30 * S, 6, 10, 30 * S, true),
        (30 * S, 1, 10, 30 * S, false),
        (30 * S, 0, 10, 30 * S, true),
        (MINUTE - 1, 1, 10, 1, false),
        // The next slot starts on the minute, independent of the caller's charges in the previous
        // one.
        (MINUTE, 10, 10, MINUTE, true),
        (MINUTE, 1, 10, MINUTE, false),
        (3 * MINUTE + 50 * S, 1, 1, 10 * S, true),
    ] {
        let decision = caller.take(at, n);
        let answer = (
            decision.capacity() - decision.remaining(),
            micros(decision.reset_after()),
            decision.is_allowed(),
        );
        assert_eq!(answer, (count, delay, allow), "{n} at {at} us");
        if !allow {
            assert_eq!(retry(&decision), delay, "{n} at {at} us");
        }
    }
}

/// `RRateLimiter` with a rate of 2 in 5 seconds: a permit is free again once it is one interval
/// old.
#[test]
fn sliding_log_expiry_matches_redisson() {
    let mut caller = Caller::new(Strategy::SlidingLog, Quota::per(2, Duration::from_secs(5)));
    for (at, available, wait) in [
        (0, 1, -1),
        (4_000, 0, -1),
        (4_000, 0, 1_000),
        (4_999, 0, 1),
        (5_000, 0, -1),
        (5_050, 0, 3_950),
        (9_000, 0, -1),
        (15_000, 1, -1),
    ] {
        let decision = caller.take(at * MS, 1);
        let answer = (decision.remaining(), retry(&decision));
        assert_eq!(
            answer,
            (available, if wait < 0 { wait } else { wait * MS }),
            "at {at} ms"
        );
    }
}

/// Weighted permits with a rate of 10 in 10 seconds. The wait lasts until enough of the oldest
/// permits have expired, whereas Redisson reports the expiry of the first one, plus 3 ms. A cost
/// above the rate is never allowed, whereas Redisson's script raises an error.
#[test]
fn sliding_log_weights_match_redisson() {
    let mut caller = Caller::new(
        Strategy::SlidingLog,
        Quota::per(10, Duration::from_secs(10)),
    );
    for (at, permits, available) in [(0, 3, 7), (2, 4, 3), (4, 3, 0)] {
        assert_eq!(caller.take(at * S, permits).remaining(), available);
    }
    for (permits, seconds) in [(1, 5), (3, 5), (4, 7), (7, 7), (8, 9), (10, 9)] {
        assert_eq!(
            retry(&caller.take(5 * S, permits)),
            seconds * S,
            "{permits} permits"
        );
    }
    assert_eq!(caller.take(5 * S, 11).outcome(), Outcome::ExceedsCapacity);
    assert_eq!(
        caller.take(12 * S, 8).retry_after(),
        Some(Duration::from_secs(2))
    );
    assert_eq!(
        caller.take(12 * S, 7).remaining(),
        0,
        "denials charged nothing"
    );
}

/// Istio's redisquota, `FIXED_WINDOW` of 10 in 2 seconds: the allocated amount, and its validity. A
/// denial also reports a wait, which Istio does not.
#[test]
fn first_hit_window_matches_istio() {
    let mut caller = Caller::new(
        Strategy::FixedWindow(Align::FirstHit),
        Quota::per(10, Duration::from_secs(2)),
    );
    for (at, amount, best_effort, allocated, wait, valid) in [
        (0, 10, false, 10, -1, 2_000),
        (1_000, 10, false, 0, 1_000, 1_000),
        (3_000, 10, false, 10, -1, 2_000),
        // A window that ends at this moment has ended.
        (5_000, 100, true, 10, -1, 2_000),
        (6_000, 10, false, 0, 1_000, 1_000),
        (7_500, 8, false, 8, -1, 2_000),
        // The rest, valid until the end of the window.
        (8_000, 5, true, 2, -1, 1_500),
        (8_000, 1, true, 0, 1_500, 1_500),
        (8_000, 0, true, 0, -1, 1_500),
    ] {
        let decision = caller.check(
            at * MS,
            if best_effort {
                Check::up_to
            } else {
                Check::take
            },
            amount,
        );
        let retry = retry(&decision);
        let retry = if retry < 0 { retry } else { retry / MS };
        let answer = (
            decision.granted(),
            retry,
            micros(decision.reset_after()) / MS,
        );
        assert_eq!(answer, (allocated, wait, valid), "{amount} at {at} ms");
    }
}

/// Istio's release: returns at most the allocated amount.
#[test]
fn an_allocation_is_refunded_as_in_istio() {
    let mut caller = Caller::new(Strategy::FixedWindow(Align::FirstHit), Quota::per_day(10));
    for amount in [2, 6, 2] {
        assert_eq!(caller.take(0, amount).granted(), amount);
    }
    assert_eq!(caller.check(0, Check::up_to, 1).granted(), 0);
    assert_eq!(caller.check(0, Check::refund, 5).granted(), 5);
    assert_eq!(caller.check(0, Check::refund, 15).granted(), 5);
    assert_eq!(caller.check(0, Check::refund, 15).granted(), 0);
    assert_eq!(caller.take(0, 10).granted(), 10);
}

/// Istio's redisquota, `ROLLING_WINDOW` of 10 in 60 seconds with buckets of one second. Istio drops
/// a bucket when its start is one window old, which is up to one bucket too early; this crate drops
/// a cell when its end is.
#[test]
fn rolling_window_of_cells_matches_istio() {
    let mut caller = Caller::new(Strategy::SlidingWindow { cells: 60 }, Quota::per_minute(10));
    for (at, amount, best_effort, allocated, wait) in [
        (1_000, 10, false, 10, -1),
        (2_000, 10, false, 0, 60_000),
        (60_000, 10, false, 0, 2_000),
        // Istio would already allocate here.
        (61_000, 10, false, 0, 1_000),
        (62_000, 10, false, 10, -1),
        (179_000, 100, true, 10, -1),
        (181_000, 10, false, 0, 59_000),
        // The buckets expire one after the other.
        (300_500, 6, false, 6, -1),
        (330_900, 3, false, 3, -1),
        (330_900, 5, true, 1, -1),
        (360_999, 6, true, 0, 1),
        (361_000, 5, false, 5, -1),
        (361_000, 5, true, 1, -1),
        (361_000, 1, false, 0, 30_000),
        (391_000, 5, true, 4, -1),
    ] {
        let decision = caller.check(
            at * MS,
            if best_effort {
                Check::up_to
            } else {
                Check::take
            },
            amount,
        );
        let retry = retry(&decision);
        let retry = if retry < 0 { retry } else { retry / MS };
        assert_eq!(
            (decision.granted(), retry),
            (allocated, wait),
            "{amount} at {at} ms"
        );
    }
}

/// A plan of 10 a month from the 31st: the last day of a shorter month begins a window.
#[test]
fn months_are_as_long_as_the_calendar_has_them() {
    const DAY: i64 = 86_400_000_000;
    let months = "fixed-window(month from 31)".parse().unwrap();
    let mut caller = Caller::new(months, Quota::per_month(10));
    // Days since January 1, 2027, the amount, and the answer with the days until the next window.
    let new_year = 20_819 * DAY - super::START;
    for (day, amount, allocated, rest) in [
        (0, 10, 10, 30),
        (29, 1, 0, 1),
        // January 31 to February 28.
        (30, 10, 10, 28),
        (57, 1, 0, 1),
        // February 28 to March 31.
        (58, 4, 4, 31),
        (88, 7, 6, 1),
        (89, 3, 3, 30),
    ] {
        let decision = caller.check(new_year + day * DAY, Check::up_to, amount);
        let reset = micros(decision.reset_after()) / DAY;
        assert_eq!((decision.granted(), reset), (allocated, rest), "day {day}");
    }
}
