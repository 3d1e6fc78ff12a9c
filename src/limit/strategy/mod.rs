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
//! | [`Gcra`](Strategy::Gcra) | TAT + c*P/L - B*P/L <= now |
//!
//! To add one: its Lua file, its Rust twin, its variant of [`Strategy`], and its line in `twins!`.

mod fixed_window;
mod gcra;

use std::time::Duration;

use super::{ConfigError, Quota};

/// How a limit is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// A counter that starts again at every window. Up to twice the limit can pass around the border of two
    /// windows; the wait of a denied caller is until the window ends.
    ///
    /// As in redis_rate v6 ([`Align::Clock`]) and Istio's redisquota ([`Align::FirstHit`]).
    FixedWindow(Align),
    /// The generic cell rate algorithm: the limit spread evenly over the period, with a burst. Never more than the
    /// burst at once, and from then on one per `period / limit`.
    ///
    /// As in redis-cell's `CL.THROTTLE` and redis_rate since v9.
    Gcra,
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
    fn arguments(terms: &Terms) -> [i64; 3];
    /// The state as it is at `now`: what has lapsed is gone, and what no policy of these terms could have made is
    /// clamped to the furthest that it could.
    fn load(&self, terms: &Terms, now: i64) -> Loaded;
    /// The largest cost that would pass now; below zero for a caller in debt.
    fn room(terms: &Terms, now: i64, loaded: Loaded) -> i64;
    /// How long until `cost` would pass, where it would not now. It is never more than the capacity.
    fn wait(&self, terms: &Terms, now: i64, cost: i64, loaded: Loaded) -> i64;
    /// Counts `cost`, whether there is room or not; below zero gives back.
    fn charge(terms: &Terms, now: i64, cost: i64, loaded: Loaded) -> Loaded;
    /// How long until the state is as if nothing had been charged.
    fn reset(&self, terms: &Terms, now: i64, loaded: Loaded) -> i64;
    /// Stores what was charged.
    fn save(&mut self, terms: &Terms, now: i64, loaded: Loaded);
}

/// A state while it is decided on: up to three numbers, as the Lua halves pass them.
pub(crate) type Loaded = [i64; 3];

/// A policy in the numbers that the twins reckon with. Everything stays below 2^53, so that Lua's doubles are exact.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
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
}

/// A full debt, twice the capacity, has at most as many ticks.
const MOST_TICKS: u128 = 1 << 52;

impl Terms {
    pub(super) fn new(strategy: Strategy, quota: Quota) -> Result<Self, ConfigError> {
        let capacity = quota.capacity();
        if let Strategy::FixedWindow(_) = strategy
            && capacity != quota.limit()
        {
            return Err(ConfigError::BurstOfWindow { burst: capacity, limit: quota.limit() });
        }
        let period = quota.period().as_micros();
        let (ticks, interval) = rate(period, u128::from(quota.limit()), u128::from(capacity));
        let full = u128::from(capacity) * interval;
        let offset = match strategy {
            Strategy::FixedWindow(Align::Clock { offset }) => Some((offset.as_micros() % period) as i64),
            _ => None,
        };
        // The quota has been checked: no period is longer than 2^45 us, no refill than 2^49 us, no `full` than 2^51 ticks.
        Ok(Self {
            capacity: i64::from(capacity),
            period: period as i64,
            ticks: ticks as i64,
            interval: interval as i64,
            full: full as i64,
            furthest: (2 * full / ticks + 1) as i64,
            offset,
        })
    }
}

/// Ticks per microsecond and ticks per unit of cost, so that `interval / ticks` is `period / limit`.
///
/// Exact where the numbers allow; else the interval is rounded up, by less than one part in 500,000.
fn rate(period: u128, limit: u128, capacity: u128) -> (u128, u128) {
    let divisor = gcd(period, limit);
    let (ticks, interval) = (limit / divisor, period / divisor);
    if 2 * capacity * interval <= MOST_TICKS {
        return (ticks, interval);
    }
    // Rounding up adds at most one tick to the interval, `2 * capacity` to a full debt.
    let ticks = (MOST_TICKS - 2 * capacity) * limit / (2 * capacity * period);
    (ticks, (period * ticks).div_ceil(limit))
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// `a / b`, rounded up. `b` is above zero.
pub(crate) fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}

/// Binds the twins: for each, its variant, its module, its letter in Redis keys, and its Lua half.
macro_rules! twins {
    ($($variant:ident $pattern:tt => $module:ident, $code:literal, $number:literal, $lua:literal;)*) => {
        /// What a strategy remembers of one caller.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) enum State {
            $($variant($module::State),)*
        }

        impl Strategy {
            /// The letter that stands for it in Redis keys.
            pub(crate) const fn code(self) -> &'static str {
                match self { $(twins!(@pattern $variant $pattern) => $code,)* }
            }

            /// The number that stands for it in a script's arguments.
            pub(crate) const fn number(self) -> i64 {
                match self { $(twins!(@pattern $variant $pattern) => $number,)* }
            }

            /// What its Lua half is told of a policy.
            pub(crate) fn arguments(self, terms: &Terms) -> [i64; 3] {
                match self { $(twins!(@pattern $variant $pattern) => <$module::State as Twin>::arguments(terms),)* }
            }
        }

        /// The script that decides in Redis: the prelude, the Lua halves, the driver.
        pub(crate) const SCRIPT: &str = concat!(
            include_str!("../../../lua/prelude.lua"),
            $("\nstrategies[", $number, "] = (function()\n", include_str!(concat!("../../../lua/", $lua)), "end)()\n",)*
            "\n",
            include_str!("../../../lua/check.lua"),
        );

        impl State {
            /// The state of a caller that has not been seen.
            pub(crate) fn fresh(strategy: Strategy) -> Self {
                match strategy { $(twins!(@pattern $variant $pattern) => Self::$variant(Default::default()),)* }
            }

            pub(crate) fn load(&self, terms: &Terms, now: i64) -> Loaded {
                match self { $(Self::$variant(state) => state.load(terms, now),)* }
            }

            pub(crate) fn room(&self, terms: &Terms, now: i64, loaded: Loaded) -> i64 {
                match self { $(Self::$variant(_) => $module::State::room(terms, now, loaded),)* }
            }

            pub(crate) fn wait(&self, terms: &Terms, now: i64, cost: i64, loaded: Loaded) -> i64 {
                match self { $(Self::$variant(state) => state.wait(terms, now, cost, loaded),)* }
            }

            pub(crate) fn charge(&self, terms: &Terms, now: i64, cost: i64, loaded: Loaded) -> Loaded {
                match self { $(Self::$variant(_) => $module::State::charge(terms, now, cost, loaded),)* }
            }

            pub(crate) fn reset(&self, terms: &Terms, now: i64, loaded: Loaded) -> i64 {
                match self { $(Self::$variant(state) => state.reset(terms, now, loaded),)* }
            }

            pub(crate) fn save(&mut self, terms: &Terms, now: i64, loaded: Loaded) {
                match self { $(Self::$variant(state) => state.save(terms, now, loaded),)* }
            }
        }
    };
    (@pattern $variant:ident ()) => { Strategy::$variant };
    (@pattern $variant:ident (_)) => { Strategy::$variant(_) };
}

twins! {
    FixedWindow(_) => fixed_window, "f", 1, "fixed_window.lua";
    Gcra() => gcra, "g", 2, "gcra.lua";
}
