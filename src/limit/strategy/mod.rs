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
//! | [`InFlight`](Strategy::InFlight) | held + 1 <= L |
//!
//! To add one: its Lua file, its Rust twin, its variant of [`Strategy`], and its line in `src/strategies.rs`.

mod algorithm;
mod arithmetic;
mod ask;
mod charges;
mod fixed_window;
mod gcra;
mod in_flight;
mod leaky_bucket;
mod meter;
mod params;
mod sliding_counter;
mod sliding_log;
mod sliding_window;
mod state;
#[cfg(test)]
mod tests;
mod text;
mod token_bucket;
#[cfg(test)]
mod two_quotas;

use std::time::Duration;

use crate::strategies::strategies;

pub(crate) use algorithm::Snapshot;
pub(super) use ask::Ask;
pub(super) use params::Params;
pub(crate) use state::State;

/// How a limit is counted. Take [`Gcra`](Self::Gcra) unless you have a reason.
///
/// The page `docs/choosing.md` of this crate compares them: a table, a picture of each, and what other systems call
/// them.
///
/// # As text
///
/// | text | is |
/// |---|---|
/// | `gcra` | [`Gcra`](Self::Gcra), the default |
/// | `token-bucket`, `token-bucket(interval)` | [`TokenBucket`](Self::TokenBucket), refilled greedily or by the interval |
/// | `leaky-bucket` | [`LeakyBucket`](Self::LeakyBucket) |
/// | `fixed-window`, `fixed-window(clock+22h)` | [`FixedWindow`](Self::FixedWindow) on the clock, with this offset |
/// | `fixed-window(first-hit)` | [`FixedWindow`](Self::FixedWindow) from a caller's first charge on |
/// | `sliding-log` | [`SlidingLog`](Self::SlidingLog) |
/// | `sliding-window(60 cells)` | [`SlidingWindow`](Self::SlidingWindow); 10 cells if it does not say |
/// | `sliding-counter` | [`SlidingCounter`](Self::SlidingCounter) |
/// | `in-flight` | [`InFlight`](Self::InFlight), with a quota such as `10/30s`: 10 at once, with a lease time of 30 s |
///
/// `fixed-window(clock)` and `token-bucket(greedy)` name the default. A number alone, as in `sliding-window(60)`, is
/// refused: it could as well be seconds. With the feature `serde` it is read and written so.
///
/// ```
/// use tower_redis_ratelimit::Strategy;
///
/// assert_eq!("sliding-window(60 cells)".parse(), Ok(Strategy::SlidingWindow { cells: 60 }));
/// assert_eq!(Strategy::default().to_string(), "gcra");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Strategy {
    /// A counter that starts again at every window. Up to twice the limit can pass around the border of two
    /// windows; the wait of a denied caller is until the window ends.
    ///
    /// As in redis_rate v6 ([`Align::Clock`]) and Istio's redisquota ([`Align::FirstHit`]).
    FixedWindow(Align),
    /// The time of every charge: exact at every moment, in memory that grows with the limit, which is at most 100,000: a
    /// caller then has up to 1.3 MB in Redis, and up to 1.5 MB in a [`LocalStore`](crate::LocalStore); in full debt twice
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
    #[default]
    Gcra,
    /// How many requests of a caller run at the same moment, over all instances: each holds one until it is released. A
    /// request is one whatever it costs, so that this can stand beside a policy that counts bytes or tokens.
    ///
    /// The quota's limit is how many, from 1 to 1,000,000, and its period the lease time, from 1 second to 1 hour: what an
    /// instance that has died held is free again after that. [`Policy::in_flight`](super::Policy::in_flight) makes it 30
    /// seconds. A layer renews what is held longer, a third of the lease time before it ends or sooner.
    ///
    /// Nothing flows back with time but leases that were not renewed. So [`Decision::retry_after`](super::Decision::retry_after)
    /// is no promise, but 100 ms: when to ask again.
    ///
    /// As semaphores with leases, such as Redisson's `RPermitExpirableSemaphore`.
    InFlight,
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

impl Strategy {
    /// Whether its quota may have a burst other than its limit: a window's burst is its limit.
    pub(crate) fn has_burst(self) -> bool {
        match self {
            Self::FixedWindow(_) | Self::SlidingLog | Self::SlidingWindow { .. } | Self::SlidingCounter => false,
            Self::InFlight => false,
            Self::TokenBucket(_) | Self::LeakyBucket | Self::Gcra => true,
        }
    }

    /// Whether it refills little by little, and not with the end of a window or an interval.
    pub(crate) fn is_steady(self) -> bool {
        match self {
            Self::FixedWindow(_) | Self::SlidingLog | Self::SlidingWindow { .. } | Self::SlidingCounter => false,
            Self::InFlight => false,
            Self::TokenBucket(refill) => refill == Refill::Greedy,
            Self::LeakyBucket | Self::Gcra => true,
        }
    }
}

/// Lists the strategies.
macro_rules! list {
    ($($variant:ident: $module:ident, $letter:literal, $number:literal, [$($kind:expr),* $(,)?];)*) => {
        impl Strategy {
            /// One of each that counts over time: both alignments of a fixed window, both refills of a token bucket, and a
            /// sliding window of 10 cells. For tests and comparisons of all of them; there may be more in a later version.
            /// [`InFlight`](Self::InFlight) answers another question, and is not among them.
            ///
            /// ```
            /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
            ///
            /// for &strategy in Strategy::ALL {
            ///     assert!(Policy::new("api", strategy, Quota::per_second(50)).is_ok());
            /// }
            /// ```
            pub const ALL: &'static [Self] = &[$($($kind,)*)*];
        }
    };
}

strategies!(list);
