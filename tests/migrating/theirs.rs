//! The other limiters: their published algorithms, reimplemented for these tests, and not copied. Lua runs in a real Redis. Nothing expires there, since the time of the tests is not Redis's, and none of them decides by it.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::FakeRelativeClock;
use governor::{Quota as GovernorQuota, RateLimiter};
use tower_redis_ratelimit::{Quota, redis};

use crate::replay::Request;

pub(crate) const COUNTERS: &str = include_str!("lua/redis_rate_v6.lua");
pub(crate) const REDIS_RATE: &str = include_str!("lua/redis_rate_v9.lua");
pub(crate) const SPRING: &str = include_str!("lua/spring.lua");
pub(crate) const REDISSON: &str = include_str!("lua/redisson.lua");
pub(crate) const ISTIO_FIXED: &str = include_str!("lua/istio_fixed.lua");
pub(crate) const ISTIO_ROLLING: &str = include_str!("lua/istio_rolling.lua");
pub(crate) const ZSET: &str = include_str!("lua/zset.lua");
pub(crate) const HASH: &str = include_str!("lua/hash.lua");

/// Another limiter, before its first request.
pub(crate) enum Theirs {
    /// A script, and its arguments after the time and the cost.
    Lua(&'static str, Vec<String>),
    /// A function of the time in microseconds and the cost.
    Rust(Box<dyn FnMut(i64, u32) -> bool>),
}

impl Theirs {
    pub(crate) fn lua(script: &'static str, args: &[&dyn ToString]) -> Self {
        Self::Lua(script, args.iter().map(|arg| arg.to_string()).collect())
    }

    fn rust(decide: impl FnMut(i64, u32) -> bool + 'static) -> Self {
        Self::Rust(Box::new(decide))
    }

    /// Which of the requests pass. A script decides under this key.
    pub(crate) fn decide(
        self,
        redis: &mut redis::Connection,
        key: &str,
        requests: &[Request],
    ) -> Vec<bool> {
        match self {
            Self::Lua(script, args) => {
                let mut calls = redis::pipe();
                for request in requests {
                    calls
                        .cmd("EVAL")
                        .arg(script)
                        .arg(1)
                        .arg(key)
                        .arg(request.at)
                        .arg(request.cost)
                        .arg(&args);
                }
                calls.query(redis).unwrap()
            }
            Self::Rust(mut decide) => requests
                .iter()
                .map(|request| decide(request.at, request.cost))
                .collect(),
        }
    }
}

fn nanos(duration: Duration) -> i64 {
    duration.as_nanos() as i64
}

/// redis-cell's GCRA: whole nanoseconds, and the interval rounded down to one.
pub(crate) fn redis_cell(quota: Quota) -> Theirs {
    let interval = (nanos(quota.period()) as f64 / f64::from(quota.limit())) as i64;
    let tolerance = interval * i64::from(quota.capacity());
    let mut tat = 0;
    Theirs::rust(move |now, cost| {
        let now = now * 1_000;
        let next = now.max(tat) + interval * i64::from(cost);
        let allowed = now >= next - tolerance;
        if allowed {
            tat = next;
        }
        allowed
    })
}

/// bucket4j, `refillGreedy` or `refillIntervally`. The bucket is made full at the first request, and periods begin there.
pub(crate) fn bucket4j(quota: Quota, intervally: bool) -> Theirs {
    let (period, tokens, capacity) = (
        nanos(quota.period()),
        i64::from(quota.limit()),
        i64::from(quota.capacity()),
    );
    // How many there are, what they are short of the next one, in tokens times nanoseconds, and since when.
    let (mut size, mut rest, mut refilled) = (capacity, 0, None);
    Theirs::rust(move |now, cost| {
        let now = now * 1_000;
        let since = refilled.unwrap_or(now);
        let until = if intervally {
            now - (now - since) % period
        } else {
            now
        };
        refilled = Some(until);
        let flown = i128::from(tokens) * i128::from(until - since) + i128::from(rest);
        rest = (flown % i128::from(period)) as i64;
        size += (flown / i128::from(period)) as i64;
        if size >= capacity {
            (size, rest) = (capacity, 0);
        }
        let allowed = size >= i64::from(cost);
        if allowed {
            size -= i64::from(cost);
        }
        allowed
    })
}

/// The crate that `tower_governor` decides by.
pub(crate) fn governor(quota: Quota) -> Theirs {
    let rate = GovernorQuota::with_period(quota.period() / quota.limit()).unwrap();
    let burst = NonZeroU32::new(quota.capacity()).unwrap();
    let clock = FakeRelativeClock::default();
    let limiter = RateLimiter::direct_with_clock(rate.allow_burst(burst), clock.clone());
    let mut last = None;
    Theirs::rust(move |now, cost| {
        let elapsed = now - last.replace(now).unwrap_or(now);
        clock.advance(Duration::from_micros(elapsed as u64));
        limiter
            .check_n(NonZeroU32::new(cost).unwrap())
            .is_ok_and(|decided| decided.is_ok())
    })
}

/// The funnel that is common in Java: it leaks whole units only, and notes the time when it does.
pub(crate) fn funnel(quota: Quota) -> Theirs {
    let (period, limit, capacity) = (
        quota.period().as_micros() as i64,
        i64::from(quota.limit()),
        i64::from(quota.capacity()),
    );
    let (mut left, mut leaked) = (capacity, None);
    Theirs::rust(move |now, cost| {
        let units = (now - *leaked.get_or_insert(now)) * limit / period;
        if units >= 1 {
            (left, leaked) = (capacity.min(left + units), Some(now));
        }
        let allowed = left >= i64::from(cost);
        if allowed {
            left -= i64::from(cost);
        }
        allowed
    })
}
