//! How a limit is counted: one enum, and behind each variant a pair of twins.
//!
//! A twin is one strategy written twice, in Lua for Redis (`lua/<strategy>.lua`) and in Rust (here). Both have the
//! same functions with the same operations in the same order, on whole numbers below 2^53, so that they agree bit
//! for bit. The Rust twin decides in the local store, is the reference for the Lua one in the tests, and is where
//! a strategy is explained.
//!
//! | strategy | allowed iff (L limit, P period, B burst, c cost) |
//! |---|---|
//! | [`FixedWindow`](Strategy::FixedWindow) | granted in this window + c <= L |
//! | [`SlidingLog`](Strategy::SlidingLog) | granted in (now-P, now] + c <= L |
//! | [`SlidingWindow`](Strategy::SlidingWindow) | granted in cells not wholly older than P + c <= L |
//! | [`SlidingCounter`](Strategy::SlidingCounter) | previous window * (1 - elapsed/P) + current window + c <= L |
//! | [`TokenBucket`](Strategy::TokenBucket) | min(B, tokens + refill) >= c |
//! | [`LeakyBucket`](Strategy::LeakyBucket) | max(0, level - leaked) + c <= B |
//! | [`Gcra`](Strategy::Gcra) | max(TAT, now) + c*P/L - B*P/L <= now |
//!
//! To add one: its Lua file, its Rust twin, its variant of [`Strategy`], and its line in `src/twins.rs`.

mod charges;
mod fixed_window;
mod gcra;
mod leaky_bucket;
mod sliding_counter;
mod sliding_log;
mod sliding_window;
#[cfg(test)]
mod tests;
mod token_bucket;
#[cfg(test)]
mod two_quotas;

use std::time::Duration;

use super::check::{Ask, Look};
use super::{ConfigError, Quota, Verdict};
use crate::twins::twins;

/// How a limit is counted. Take [`Gcra`](Self::Gcra) unless you have a reason.
///
/// The page `docs/choosing.md` of this crate compares them: a table, a picture of each, and what other systems call
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// A counter that starts again at every window. Up to twice the limit can pass around the border of two
    /// windows; the wait of a denied caller is until the window ends.
    ///
    /// As in redis_rate v6 ([`Align::Clock`]) and Istio's redisquota ([`Align::FirstHit`]).
    FixedWindow(Align),
    /// The time of every charge: exact at every moment, in memory that grows with the limit, which is at most 100,000: a
    /// caller then has up to 1.1 MB in Redis, and up to 1.5 MB in a [`LocalStore`](crate::LocalStore); in full debt twice
    /// that. However long the log, no check costs more than 20 times a granted one.
    ///
    /// As the ZSET recipe, and Redisson's `RRateLimiter`.
    SlidingLog,
    /// Counts per cell of time. Never admits more than [`SlidingLog`](Self::SlidingLog) would, and lets a caller wait
    /// up to one cell longer, in memory that grows with the cells: 12 bytes each in Redis, so at most 12 KB for a caller
    /// and each quota of that name, which every check reads and every charge writes.
    ///
    /// As hashes of timestamps to counts, and Istio's rolling windows.
    SlidingWindow {
        /// Into how many cells the period is cut, from 1 to 1000. 10 is a good start.
        cells: u16,
    },
    /// The count of this window of the clock, and of the one before as far as the sliding window overlaps it: an
    /// estimate, in little memory.
    SlidingCounter,
    /// A stock of tokens that requests take from and time refills.
    ///
    /// As Spring Cloud Gateway's `RedisRateLimiter` and bucket4j.
    TokenBucket(Refill),
    /// A level that requests raise and time lowers. Decides as [`Gcra`](Self::Gcra) does.
    LeakyBucket,
    /// The generic cell rate algorithm: the limit spread evenly over the period, with a burst. Never more than the
    /// burst at once, and from then on one per `period / limit`.
    ///
    /// As redis-cell's `CL.THROTTLE` and redis_rate since v9.
    Gcra,
}

/// How tokens come into a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Refill {
    /// One by one, each after `period / limit`.
    #[default]
    Greedy,
    /// The whole limit at once, after each period; the period begins with the first charge of a full bucket.
    Interval,
}

/// Where fixed windows begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Align {
    /// On the clock: windows follow each other without a gap, and one of them begins at the Unix epoch plus
    /// `offset`. `Quota::per_day` with an offset of 22 hours starts at midnight of UTC+2.
    Clock {
        /// How long after the Unix epoch a window begins; only its rest modulo the period matters.
        offset: Duration,
    },
    /// At a caller's first charge, for one period; the next charge after that begins another.
    FirstHit,
}

/// On the clock, with no offset.
impl Default for Align {
    fn default() -> Self {
        Self::Clock { offset: Duration::ZERO }
    }
}

/// The Rust half of a twin: a state as it is stored, with the functions of its Lua half.
///
/// Times are microseconds since the Unix epoch, durations microseconds, and costs whole numbers. A check loads the
/// state, reckons with what is loaded, and saves only what was charged.
pub(crate) trait Twin: Default {
    /// What the Lua half is told of a policy, in the order of its `policy` function.
    fn arguments(params: &Params) -> [i64; 4];
    /// The state as it is at `now`: what has lapsed is gone, and what no policy of these terms could have made is
    /// clamped to the furthest that it could. If it is of a time to come, `true`: it must be saved even if nothing is
    /// charged, or its caller might be locked out for as long as the clock has gone back.
    fn load(&self, params: &Params, now: i64) -> (Loaded, bool);
    /// The largest cost that would pass now; below zero for a caller in debt.
    fn room(params: &Params, now: i64, loaded: Loaded) -> i64;
    /// How long until `cost` would pass, where it would not now. It is never more than the capacity.
    fn wait(&self, params: &Params, now: i64, cost: i64, loaded: Loaded) -> i64;
    /// Counts `cost`, whether there is room or not; below zero gives back.
    fn charge(&mut self, params: &Params, now: i64, cost: i64, loaded: Loaded) -> Loaded;
    /// How long until the state is as if nothing had been charged.
    fn reset_after(params: &Params, now: i64, loaded: Loaded) -> i64;
    /// Stores a state in which `cost` was charged.
    fn save(&mut self, params: &Params, now: i64, cost: i64, loaded: Loaded);
    /// The state to go on from, of a caller that another store counted. At least as much counts as there did.
    fn resume(params: &Params, now: i64, followed: Followed) -> Self;
}

/// What is known of a caller that another store counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Followed {
    /// How much of the capacity is used.
    pub(crate) used: i64,
    /// When nothing is, in microseconds.
    pub(crate) until: i64,
}

/// A state while it is decided on: up to three numbers, as the Lua halves pass them.
pub(crate) type Loaded = [i64; 3];

/// A state that need not be saved.
fn clean(loaded: Loaded) -> (Loaded, bool) {
    (loaded, false)
}

/// A policy in the numbers that the twins reckon with. Everything stays below 2^53, so that Lua's doubles are exact.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Params {
    /// The largest cost that a fresh caller can pay.
    pub(crate) capacity: i64,
    /// The period in microseconds.
    pub(crate) period: i64,
    /// Ticks in a microsecond.
    pub(crate) ticks: i64,
    /// What a unit of cost takes to flow back, in ticks.
    pub(crate) interval: i64,
    /// What the capacity takes to flow back, in ticks.
    pub(crate) full: i64,
    /// A time in microseconds that no debt of this policy reaches.
    pub(crate) furthest: i64,
    /// Where windows of the clock begin, in microseconds within a period.
    pub(crate) offset: Option<i64>,
    /// The width of a cell, in microseconds.
    pub(crate) width: i64,
    /// Whether ticks come at once, after every period, and not in every microsecond.
    pub(crate) batches: bool,
}

/// The highest limit of a sliding log: one key is then at most 1.1 MB in Redis and 1.5 MB here, twice that in full debt.
const MAX_LOG: u32 = 100_000;

/// A full debt, twice the capacity, has at most as many ticks.
const MAX_TICKS: i64 = 1 << 52;

/// A unit has at least as many ticks, so that another quota takes over a part of one exactly enough. With the highest
/// capacity, 2^32, and less than twice as many ticks a full debt stays far below [`MAX_TICKS`].
const MIN_TICKS: u128 = 1 << 16;

impl Params {
    pub(super) fn new(strategy: Strategy, quota: Quota) -> Result<Self, ConfigError> {
        let capacity = quota.capacity();
        if capacity != quota.limit() && !strategy.has_burst() {
            return Err(ConfigError::BurstOfWindow { burst: capacity, limit: quota.limit() });
        }
        if strategy == Strategy::SlidingLog && quota.limit() > MAX_LOG {
            return Err(ConfigError::LogTooLong(quota.limit()));
        }
        let period = quota.period().as_micros();
        let batches = strategy == Strategy::TokenBucket(Refill::Interval);
        let (ticks, interval) = match batches {
            true => (u128::from(quota.limit()), 1),
            false => rate(period, u128::from(quota.limit()), u128::from(capacity)),
        };
        let finer = MIN_TICKS.div_ceil(interval);
        let (ticks, interval) = (finer * ticks, finer * interval);
        let full = u128::from(capacity) * interval;
        let offset = match strategy {
            Strategy::FixedWindow(Align::Clock { offset }) => Some((offset.as_micros() % period) as i64),
            _ => None,
        };
        let cells = match strategy {
            Strategy::SlidingWindow { cells } if !(1..=1000).contains(&cells) => return Err(ConfigError::Cells(cells)),
            Strategy::SlidingWindow { cells } => cells,
            _ => 1,
        };
        // The quota has been checked: no period is longer than 2^45 us, no refill than 2^49 us, no `full` than 2^51
        // ticks.
        Ok(Self {
            capacity: i64::from(capacity),
            period: period as i64,
            ticks: ticks as i64,
            interval: interval as i64,
            full: full as i64,
            furthest: (2 * full / ticks + 1) as i64,
            offset,
            width: period.div_ceil(u128::from(cells)) as i64,
            batches,
        })
    }
}

impl Strategy {
    /// Whether its quota may have a burst other than its limit: a window's burst is its limit.
    pub(crate) fn has_burst(self) -> bool {
        match self {
            Self::FixedWindow(_) | Self::SlidingLog | Self::SlidingWindow { .. } | Self::SlidingCounter => false,
            Self::TokenBucket(_) | Self::LeakyBucket | Self::Gcra => true,
        }
    }

    /// Whether it refills little by little, and not with the end of a window or an interval.
    pub(crate) fn is_steady(self) -> bool {
        match self {
            Self::FixedWindow(_) | Self::SlidingLog | Self::SlidingWindow { .. } | Self::SlidingCounter => false,
            Self::TokenBucket(refill) => refill == Refill::Greedy,
            Self::LeakyBucket | Self::Gcra => true,
        }
    }
}

/// Ticks per microsecond and ticks per unit of cost, so that `interval / ticks` is `period / limit`.
///
/// Exact where the numbers allow; else the interval is rounded up, by less than one part in 500,000.
fn rate(period: u128, limit: u128, capacity: u128) -> (u128, u128) {
    let divisor = gcd(period, limit);
    let (ticks, interval) = (limit / divisor, period / divisor);
    let max = MAX_TICKS as u128;
    if 2 * capacity * interval <= max {
        return (ticks, interval);
    }
    // Rounding up adds at most one tick to the interval, `2 * capacity` to a full debt.
    let ticks = (max - 2 * capacity) * limit / (2 * capacity * period);
    (ticks, (period * ticks).div_ceil(limit))
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// `a / b`, rounded up. `b` is above zero.
pub(crate) fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}

/// What is still owed at `now`, in ticks, where at a time it was so much in ticks of which `interval` made a unit: it flows
/// back at the rate of these terms. Of another quota as many units are owed, and the same part of a unit, rounded up.
/// And whether the time is to come: then nothing has flowed back.
fn drained(params: &Params, now: i64, at: i64, ticks: i64, interval: i64) -> (i64, bool) {
    let elapsed = now - at;
    if elapsed >= params.furthest {
        return (0, false);
    }
    let ticks = if interval == params.interval { ticks } else { converted(params, ticks, interval) };
    let ticks = ticks.min(2 * params.full);
    if elapsed < 0 {
        return (ticks, true);
    }
    ((ticks - elapsed * params.ticks).max(0), false)
}

/// Ticks of which `interval` made a unit, in ticks of these terms.
#[cold]
fn converted(params: &Params, ticks: i64, interval: i64) -> i64 {
    let interval = interval.max(1);
    let (units, rest) = (ticks.div_euclid(interval), ticks.rem_euclid(interval));
    units.min(2 * params.capacity) * params.interval + share(params.interval, rest, interval)
}

/// How much of a count came at `border` or later, where all of it came from `start` to `last`: as if it had come evenly,
/// rounded up. All of it if it went on for a period from there.
fn late(params: &Params, count: i64, start: i64, last: i64, border: i64) -> i64 {
    if last - border >= params.period {
        return count;
    }
    share(count, last - border + 1, last - start + 1)
}

/// The part `x / d` of a number, rounded up. In doubles, where Lua and Rust are off alike.
fn share(number: i64, x: i64, d: i64) -> i64 {
    (x as f64 / d as f64 * number as f64).ceil() as i64
}

/// Binds the twins.
macro_rules! bind {
    ($($variant:ident: $module:ident, $letter:literal, $number:literal, [$($kind:expr),* $(,)?];)*) => {
        /// What a strategy remembers of one caller.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) enum State {
            $($variant($module::State),)*
        }

        impl Strategy {
            /// One of each: both alignments of a fixed window, both refills of a token bucket, and a sliding window of
            /// 10 cells. For tests and comparisons of all of them; there may be more in a later version.
            ///
            /// ```
            /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
            ///
            /// for &strategy in Strategy::ALL {
            ///     assert!(Policy::new("api", strategy, Quota::per_second(50)).is_ok());
            /// }
            /// ```
            pub const ALL: &'static [Self] = &[$($($kind,)*)*];

            /// The letter that stands for it in Redis keys.
            pub(crate) const fn code(self) -> &'static str {
                match self { $(Self::$variant { .. } => $letter,)* }
            }

            /// The number that stands for it in a script's arguments.
            pub(crate) const fn number(self) -> u8 {
                match self { $(Self::$variant { .. } => $number,)* }
            }

            /// What its Lua half is told of a policy.
            pub(crate) fn arguments(self, params: &Params) -> [i64; 4] {
                match self { $(Self::$variant { .. } => <$module::State as Twin>::arguments(params),)* }
            }
        }

        /// The script that decides in Redis: what the call asks, the prelude, the Lua halves, the driver.
        pub(crate) const SCRIPT: &str = concat!(
            include_str!("../../../lua/call.lua"),
            "\n",
            include_str!("../../../lua/prelude.lua"),
            $(
                "\nif strategies[", $number, "] then\nstrategies[", $number, "] = (function()\n",
                include_str!(concat!("../../../lua/", stringify!($module), ".lua")),
                "end)()\nend\n",
            )*
            "\n",
            include_str!("../../../lua/check.lua"),
        );

        impl State {
            /// The state of a caller that has not been seen.
            pub(crate) fn fresh(strategy: Strategy) -> Self {
                match strategy { $(Strategy::$variant { .. } => Self::$variant(Default::default()),)* }
            }

            /// The state to go on from, of a caller that another store counted.
            pub(crate) fn resume(strategy: Strategy, params: &Params, now: i64, followed: Followed) -> Self {
                match strategy {
                    $(Strategy::$variant { .. } => Self::$variant(Twin::resume(params, now, followed)),)*
                }
            }

            pub(crate) fn look(&self, params: &Params, ask: &Ask) -> Look {
                match self { $(Self::$variant(state) => ask.look(state, params),)* }
            }

            pub(crate) fn decide(&mut self, params: &Params, ask: &Ask, max: i64) -> (Verdict, i64) {
                match self { $(Self::$variant(state) => ask.decide(state, params, max),)* }
            }
        }
    };
}

twins!(bind);
