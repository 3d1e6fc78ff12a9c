//! What other limiters publish, said by ours: tables on a scripted clock.

use std::time::Duration;

use super::{
    Align, Check, ConfigError, Decision, Key, Outcome, Policies, Policy, Quota, Refill, Source, State, Strategy,
};

const MS: i64 = 1_000;
const S: i64 = 1_000_000;
const MINUTE: i64 = 60 * S;

/// Where every script begins: a full hour, so that windows of the clock begin there too.
const START: i64 = 1_789_999_200 * S;

/// One caller, and what is remembered of it.
struct Caller {
    policies: Policies,
    state: [State; 1],
}

impl Caller {
    fn new(strategy: Strategy, quota: Quota) -> Self {
        Self { policies: Policy::new("p", strategy, quota).unwrap().into(), state: [State::fresh(strategy)] }
    }

    /// Asks, so many microseconds after the start.
    fn ask(&mut self, at: i64, check: fn(Key, &Policies, u32) -> Check, cost: u32) -> Decision {
        self.decide(at, check(Key::GLOBAL, &self.policies, cost))
    }

    fn take(&mut self, at: i64, cost: u32) -> Decision {
        self.ask(at, Check::take, cost)
    }

    fn decide(&mut self, at: i64, check: Check) -> Decision {
        let verdicts = check.decide(&mut self.state, START + at);
        check.answer(verdicts, Source::Local)
    }
}

fn micros(time: Duration) -> i64 {
    time.as_micros() as i64
}

/// How long a denied caller has to wait, in microseconds; -1 where there is no wait, or none would help.
fn retry(decision: &Decision) -> i64 {
    decision.retry_after().map_or(-1, micros)
}

/// The reply of `CL.THROTTLE`: limited, limit, remaining, and the seconds until a retry and a reset, rounded up.
///
/// Ours rounds up from a microsecond on, where redis-cell drops what is below a millisecond; and a quantity of 0 writes
/// nothing.
fn throttle(caller: &mut Caller, at: i64, quantity: u32) -> [i64; 5] {
    let decision = caller.take(at, quantity);
    let seconds = |micros: i64| if micros < 0 { -1 } else { (micros as u64).div_ceil(S as u64) as i64 };
    [
        i64::from(!decision.is_allowed()),
        decision.capacity().into(),
        decision.remaining().into(),
        seconds(retry(&decision)),
        seconds(micros(decision.reset_after())),
    ]
}

/// The table that redis-cell is tested with: a `max_burst` of 4, one per second.
#[test]
fn gcra_gives_the_five_replies_of_redis_cell() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(1).burst(5));
    for (row, (at, quantity, reply)) in [
        // More than the limit never passes.
        (0, 6, [1, 5, 5, -1, 0]),
        // Filling up.
        (0, 1, [0, 5, 4, -1, 1]),
        (0, 1, [0, 5, 3, -1, 2]),
        (0, 1, [0, 5, 2, -1, 3]),
        (0, 1, [0, 5, 1, -1, 4]),
        (0, 1, [0, 5, 0, -1, 5]),
        (0, 1, [1, 5, 0, 1, 5]),
        // Time goes on; a reset in 3.9 s is one in 4.
        (3_000, 1, [0, 5, 2, -1, 3]),
        (3_100, 1, [0, 5, 1, -1, 4]),
        (4_000, 1, [0, 5, 1, -1, 4]),
        (8_000, 1, [0, 5, 4, -1, 1]),
        (9_500, 1, [0, 5, 4, -1, 1]),
        // Nothing is asked for: a peek.
        (9_500, 0, [0, 5, 4, -1, 1]),
        // More than one at once.
        (9_500, 2, [0, 5, 2, -1, 3]),
        (9_500, 5, [1, 5, 2, 3, 3]),
        // A wait of 0.9 s is one of 1: a client that waits so long is not denied again.
        (9_600, 3, [1, 5, 2, 1, 3]),
        (9_600, 6, [1, 5, 2, -1, 3]),
        (10_600, 3, [0, 5, 0, -1, 5]),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(throttle(&mut caller, at * MS, quantity), reply, "row {row}: {quantity} at {at} ms");
    }
}

/// `CL.THROTTLE user123 15 30 60 1`, of its README.
#[test]
fn gcra_gives_the_reply_in_the_readme_of_redis_cell() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_minute(30).burst(16));
    assert_eq!(throttle(&mut caller, 0, 1), [0, 16, 15, -1, 2]);
}

/// A result of redis_rate since v9: allowed, remaining, and the milliseconds until a retry, -1 if allowed, and a reset.
fn result(decision: &Decision) -> [i64; 4] {
    let retry = if decision.is_allowed() { -1 } else { retry(decision) / MS };
    [decision.granted().into(), decision.remaining().into(), retry, micros(decision.reset_after()) / MS]
}

/// `Allow` and `AllowN` under `PerSecond(10)`, and `Reset`. A cost above the burst never fits, where redis_rate tells a
/// wait that comes to nothing.
#[test]
fn gcra_allows_as_redis_rate_does() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(10));
    assert_eq!(result(&caller.take(0, 0)), [0, 10, -1, 0], "nothing is a peek at a caller who is not there");
    assert_eq!(result(&caller.take(0, 1)), [1, 9, -1, 100]);
    assert_eq!(result(&caller.take(0, 0)), [0, 9, -1, 100]);
    let reset = Check::reset(Key::GLOBAL, &caller.policies);
    let _ = caller.decide(0, reset);
    assert_eq!(result(&caller.take(0, 1)), [1, 9, -1, 100]);
    assert_eq!(result(&caller.take(0, 2)), [2, 7, -1, 300]);
    assert_eq!(result(&caller.take(0, 7)), [7, 0, -1, 1_000]);
    assert_eq!(result(&caller.take(0, 10)), [0, 0, 1_000, 1_000]);
    let never = caller.take(0, 1_000);
    assert_eq!((never.outcome(), result(&never)), (Outcome::NeverFits, [0, 0, 0, 1_000]));
}

/// `AllowAtMost` under `PerSecond(10)`: all that is left, and a wait only if there is not even one.
#[test]
fn gcra_allows_at_most_as_redis_rate_does() {
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
        assert_eq!(result(&caller.ask(0, Check::up_to, most)), expected, "at most {most}");
    }
}

/// Of 1.5 that are left, redis_rate says 1 and takes all.
#[test]
fn at_most_charges_no_more_than_it_grants() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per_second(10));
    let _ = caller.take(0, 9);
    assert_eq!(result(&caller.ask(50 * MS, Check::up_to, 5)), [1, 0, -1, 950]);
    assert_eq!(result(&caller.ask(50 * MS, Check::up_to, 5)), [0, 0, 50, 950]);
    assert_eq!(result(&caller.ask(100 * MS, Check::up_to, 5)), [1, 0, -1, 1_000]);
}

/// One per millisecond: no wait is longer than that, and none is rounded away.
#[test]
fn waits_below_a_millisecond_are_told() {
    let mut caller = Caller::new(Strategy::Gcra, Quota::per(1, Duration::from_millis(1)));
    for (at, wait) in [(0, -1), (0, 1_000), (1, 999), (999, 1), (1_000, -1)] {
        assert_eq!(retry(&caller.take(at, 1)), wait, "at {at} us");
    }
}

/// The slots of redis_rate v6 and v7: `AllowN(name, 10, minute, n)` gives a count, the time until the slot ends, and
/// whether it passed. There, what is denied counts too, and the time is in whole seconds.
#[test]
fn fixed_windows_of_the_clock_are_the_slots_of_redis_rate() {
    let mut caller = Caller::new(Strategy::FixedWindow(Align::default()), Quota::per_minute(10));
    for (at, n, count, delay, allow) in [
        (20 * S, 4, 4, 40 * S, true),
        (20 * S, 7, 4, 40 * S, false),
        (30 * S, 6, 10, 30 * S, true),
        (30 * S, 1, 10, 30 * S, false),
        (30 * S, 0, 10, 30 * S, true),
        (MINUTE - 1, 1, 10, 1, false),
        // The next slot, whenever the caller came in the last one.
        (MINUTE, 10, 10, MINUTE, true),
        (MINUTE, 1, 10, MINUTE, false),
        (3 * MINUTE + 50 * S, 1, 1, 10 * S, true),
    ] {
        let decision = caller.take(at, n);
        let answer =
            (decision.capacity() - decision.remaining(), micros(decision.reset_after()), decision.is_allowed());
        assert_eq!(answer, (count, delay, allow), "{n} at {at} us");
        if !allow {
            assert_eq!(retry(&decision), delay, "{n} at {at} us");
        }
    }
}

/// `RRateLimiter`, with a rate of 2 in 5 seconds: a permit is free again when it is one interval old.
#[test]
fn a_sliding_log_frees_permits_as_redisson_does() {
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
        assert_eq!(answer, (available, if wait < 0 { wait } else { wait * MS }), "at {at} ms");
    }
}

/// Weighted permits, with a rate of 10 in 10 seconds: the wait is until enough of the oldest permits have left,
/// where Redisson tells when the first does, and 3 ms more. More than the rate never fits, where Redisson's script
/// raises an error.
#[test]
fn a_sliding_log_weighs_permits_as_redisson_does() {
    let mut caller = Caller::new(Strategy::SlidingLog, Quota::per(10, Duration::from_secs(10)));
    for (at, permits, available) in [(0, 3, 7), (2, 4, 3), (4, 3, 0)] {
        assert_eq!(caller.take(at * S, permits).remaining(), available);
    }
    for (permits, seconds) in [(1, 5), (3, 5), (4, 7), (7, 7), (8, 9), (10, 9)] {
        assert_eq!(retry(&caller.take(5 * S, permits)), seconds * S, "{permits} permits");
    }
    assert_eq!(caller.take(5 * S, 11).outcome(), Outcome::NeverFits);
    assert_eq!(caller.take(12 * S, 8).retry_after(), Some(Duration::from_secs(2)));
    assert_eq!(caller.take(12 * S, 7).remaining(), 0, "what was denied took nothing");
}

/// `RedisRateLimiter` with a `replenishRate` of 10 and a `burstCapacity` of 20. Tokens come one by one, where Spring's
/// come with the full second.
#[test]
fn a_token_bucket_bursts_and_refills_as_spring_does() {
    let mut caller = Caller::new(Strategy::TokenBucket(Refill::Greedy), Quota::per_second(10).burst(20));
    let mut spend = |at: i64, tokens: u32| {
        for left in (0..tokens).rev() {
            let decision = caller.take(at, 1);
            assert_eq!((decision.is_allowed(), decision.remaining()), (true, left), "at {at} us");
        }
        let denied = caller.take(at, 1);
        assert_eq!((denied.is_allowed(), denied.remaining()), (false, 0), "at {at} us");
    };
    spend(0, 20);
    spend(S, 10);
    spend(S + 100 * MS, 1);
    spend(2 * S - 1, 8);
    spend(2 * S, 1);
    spend(MINUTE, 20);
}

/// Rates below one per second by `requestedTokens`: 60 of 60 at one per second are one request per minute.
#[test]
fn a_token_bucket_takes_several_tokens_as_spring_does() {
    for tokens in [3, 60] {
        let seconds = i64::from(tokens);
        let mut caller = Caller::new(Strategy::TokenBucket(Refill::Greedy), Quota::per_second(1).burst(tokens));
        for (at, allowed, remaining) in [
            (0, true, 0),
            (0, false, 0),
            (S, false, 1),
            (seconds * S - 1, false, tokens - 1),
            (seconds * S, true, 0),
            (2 * seconds * S - 1, false, tokens - 1),
            (3 * seconds * S, true, 0),
        ] {
            let decision = caller.take(at, tokens);
            assert_eq!((decision.is_allowed(), decision.remaining()), (allowed, remaining), "{tokens} at {at} us");
        }
    }
}

/// A `burstCapacity` of 0 blocks every request in Spring; here it is no policy.
#[test]
fn a_bucket_that_holds_nothing_is_refused() {
    let none = Policy::new("p", Strategy::TokenBucket(Refill::Greedy), Quota::per_second(10).burst(0));
    assert_eq!(none.unwrap_err(), ConfigError::Zero("a quota's burst"));
}

/// Istio's redisquota, `FIXED_WINDOW` of 10 in 2 seconds: what is allocated, and for how long. What is not allocated is
/// told a wait, which Istio does not tell.
#[test]
fn a_fixed_window_from_the_first_hit_allocates_as_istio_does() {
    let mut caller = Caller::new(Strategy::FixedWindow(Align::FirstHit), Quota::per(10, Duration::from_secs(2)));
    for (at, amount, best_effort, allocated, wait, valid) in [
        (0, 10, false, 10, -1, 2_000),
        (1_000, 10, false, 0, 1_000, 1_000),
        (3_000, 10, false, 10, -1, 2_000),
        // A window that is over at this moment is over.
        (5_000, 100, true, 10, -1, 2_000),
        (6_000, 10, false, 0, 1_000, 1_000),
        (7_500, 8, false, 8, -1, 2_000),
        // All that is left, for what is left of the window.
        (8_000, 5, true, 2, -1, 1_500),
        (8_000, 1, true, 0, 1_500, 1_500),
        (8_000, 0, true, 0, -1, 1_500),
    ] {
        let decision = caller.ask(at * MS, if best_effort { Check::up_to } else { Check::take }, amount);
        let retry = retry(&decision);
        let retry = if retry < 0 { retry } else { retry / MS };
        let answer = (decision.granted(), retry, micros(decision.reset_after()) / MS);
        assert_eq!(answer, (allocated, wait, valid), "{amount} at {at} ms");
    }
}

/// Istio's release: as much as was allocated, at most.
#[test]
fn an_allocation_is_given_back_as_in_istio() {
    let mut caller = Caller::new(Strategy::FixedWindow(Align::FirstHit), Quota::per_day(10));
    for amount in [2, 6, 2] {
        assert_eq!(caller.take(0, amount).granted(), amount);
    }
    assert_eq!(caller.ask(0, Check::up_to, 1).granted(), 0);
    assert_eq!(caller.ask(0, Check::give_back, 5).granted(), 5);
    assert_eq!(caller.ask(0, Check::give_back, 15).granted(), 5);
    assert_eq!(caller.ask(0, Check::give_back, 15).granted(), 0);
    assert_eq!(caller.take(0, 10).granted(), 10);
}

/// Istio's redisquota, `ROLLING_WINDOW` of 10 in 60 seconds by buckets of one. A bucket of Istio's leaves when its
/// start is one window old, which is up to a bucket too early; a cell leaves when its end is.
#[test]
fn a_window_of_cells_rolls_as_istio_does() {
    let mut caller = Caller::new(Strategy::SlidingWindow { cells: 60 }, Quota::per_minute(10));
    for (at, amount, best_effort, allocated, wait) in [
        (1_000, 10, false, 10, -1),
        (2_000, 10, false, 0, 60_000),
        (60_000, 10, false, 0, 2_000),
        // Istio allocates here already.
        (61_000, 10, false, 0, 1_000),
        (62_000, 10, false, 10, -1),
        (179_000, 100, true, 10, -1),
        (181_000, 10, false, 0, 59_000),
        // Bucket after bucket leaves.
        (300_500, 6, false, 6, -1),
        (330_900, 3, false, 3, -1),
        (330_900, 5, true, 1, -1),
        (360_999, 6, true, 0, 1),
        (361_000, 5, false, 5, -1),
        (361_000, 5, true, 1, -1),
        (361_000, 1, false, 0, 30_000),
        (391_000, 5, true, 4, -1),
    ] {
        let decision = caller.ask(at * MS, if best_effort { Check::up_to } else { Check::take }, amount);
        let retry = retry(&decision);
        let retry = if retry < 0 { retry } else { retry / MS };
        assert_eq!((decision.granted(), retry), (allocated, wait), "{amount} at {at} ms");
    }
}
