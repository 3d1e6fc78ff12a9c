//! The strategies: a pair of twins for each variant of [`Strategy`].
//!
//! A twin is one strategy written twice, in Lua for Redis (`lua/<strategy>.lua`) and in Rust (here). Both have the same
//! functions with the same operations in the same order, on whole numbers below 2^53, so that they agree bit for bit.
//! The Rust twin decides in the local store, is the reference for the Lua one in the tests, and is where a strategy is
//! explained, with all that the rest of the crate needs from it: see [`Algorithm`](algorithm::Algorithm).
//!
//! To add one: its Lua file, its Rust twin, and here its module, its variant and its entry in the list.

mod algorithm;
mod ask;
mod charges;
mod fixed_window;
mod frees;
mod gcra;
mod leaky_bucket;
mod meter;
mod params;
mod sliding_counter;
mod sliding_log;
mod sliding_window;
#[cfg(test)]
mod tests;
mod text;
mod token_bucket;

#[cfg(test)]
pub(crate) use tests::{Model, most_spent};

pub use fixed_window::Align;
pub use token_bucket::Refill;

pub(super) use algorithm::Algorithm;
pub(crate) use algorithm::Snapshot;
pub(super) use ask::{Ask, Preview};
pub(crate) use frees::Frees;
pub(crate) use params::LONGEST_WAIT;
pub(super) use params::Params;

use std::time::Duration;

use super::Quota;
use crate::error::ConfigError;

/// Calls a macro with the list: one entry for each strategy, in the order of its variants. An entry has
/// - the variant of `Strategy`,
/// - the name of both halves: the module here, and the file in `lua`,
/// - its name as text,
/// - the letter in Redis keys, and the number in a script's arguments,
/// - one of each of its kinds, for `Strategy::ALL`. The first is the default.
macro_rules! strategies {
    ($with:ident) => {
        $with! {
            FixedWindow: fixed_window, "fixed-window", "f", 1, [
                Self::FixedWindow(Align::Clock { offset: Duration::ZERO }),
                Self::FixedWindow(Align::FirstHit),
            ];
            SlidingLog: sliding_log, "sliding-log", "o", 2, [Self::SlidingLog];
            SlidingWindow: sliding_window, "sliding-window", "w", 3, [Self::SlidingWindow { cells: 10 }];
            SlidingCounter: sliding_counter, "sliding-counter", "c", 4, [Self::SlidingCounter];
            TokenBucket: token_bucket, "token-bucket", "t", 5, [
                Self::TokenBucket(Refill::Greedy),
                Self::TokenBucket(Refill::Interval),
            ];
            LeakyBucket: leaky_bucket, "leaky-bucket", "b", 6, [Self::LeakyBucket];
            Gcra: gcra, "gcra", "g", 7, [Self::Gcra];
        }
    };
}

pub(crate) use strategies;

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
    /// up to one cell longer, in memory that grows with the cells: 12 bytes each in Redis, so at most 12 KB for a caller,
    /// which every check reads and every charge writes.
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
}

/// What is asked of a strategy, whichever it is.
macro_rules! asked {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, [$($kind:expr),* $(,)?];)*) => {
        $(pub(super) use $module::State as $variant;)*

        impl Strategy {
            /// One of each: both alignments of a fixed window, both refills of a token bucket, and a sliding window of 10
            /// cells. For tests and comparisons of all of them; there may be more in a later version.
            ///
            /// ```
            /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
            ///
            /// for &strategy in Strategy::ALL {
            ///     assert!(Policy::new("api", strategy, Quota::per_second(50)).is_ok());
            /// }
            /// ```
            pub const ALL: &'static [Self] = &[$($($kind,)*)*];

            /// Its name as text, without a parameter.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Self::$variant { .. } => $name,)* }
            }

            /// The letter that stands for it in a key.
            pub(super) const fn letter(self) -> &'static str {
                match self { $(Self::$variant { .. } => $letter,)* }
            }

            /// The number that stands for it in an argument of the script.
            pub(crate) const fn number(self) -> u8 {
                match self { $(Self::$variant { .. } => $number,)* }
            }

            /// See [`Algorithm::frees`].
            pub(crate) fn frees(self) -> Frees {
                match self { $(Self::$variant { .. } => $variant::frees(self),)* }
            }

            /// See [`Algorithm::adapt`].
            fn adapt(self, params: &mut Params, quota: Quota) -> Result<(), ConfigError> {
                match self { $(Self::$variant { .. } => $variant::adapt(self, params, quota),)* }
            }

            /// See [`Algorithm::parameter`].
            fn parameter(self) -> Option<String> {
                match self { $(Self::$variant { .. } => $variant::parameter(self),)* }
            }

            /// See [`Algorithm::with_parameter`].
            fn with_parameter(self, text: &str) -> Result<Self, &'static str> {
                match self { $(Self::$variant { .. } => $variant::with_parameter(self, text),)* }
            }
        }
    };
}

strategies!(asked);
