//! The strategies: each variant of [`Strategy`] has two implementations.
//!
//! Each strategy is written twice, in Lua for Redis (`lua/<strategy>.lua`) and in Rust (here). Both
//! halves have the same functions with the same operations in the same order, on integers below
//! 2^53, so they agree bit for bit. The Rust half decides in the local store, is the reference for
//! the Lua half in tests, and documents the strategy: see [`Algorithm`](algorithm::Algorithm).
//!
//! To add a strategy, add its Lua file, its Rust half, and here its module, its variant and its
//! entry in the list.

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
mod writer;

#[cfg(test)]
pub(crate) use tests::{Model, most_spent, quota as any_quota, room, vary};

pub use ask::Mode;
pub use fixed_window::Align;
pub use token_bucket::Refill;

pub(super) use algorithm::Algorithm;
pub(crate) use algorithm::Snapshot;
pub(crate) use ask::State;
pub(super) use ask::{Ask, Preview};
pub(crate) use frees::Frees;
pub(super) use params::Params;
pub(crate) use writer::Writer;

use std::time::Duration;

use super::Quota;
use crate::error::ConfigError;

/// Calls a macro with the list: one entry for each strategy, in the order of the variants. An entry
/// has
/// - the variant of `Strategy`,
/// - the name of both halves: the module here, and the file in `lua`,
/// - its name as text,
/// - its letter in Redis keys, and its number in a script's arguments,
/// - its values in `Strategy::ALL`. The first is the default.
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

/// The algorithm that counts. Use [`Gcra`](Self::Gcra) unless you have a reason.
///
/// [Strategies](crate::guide::choosing) compares them: a table, pictures, and
/// their names in other systems.
///
/// # As text
///
/// | text | strategy |
/// |---|---|
/// | `gcra` | [`Gcra`](Self::Gcra), the default |
/// | `token-bucket`, `token-bucket(interval)` | [`TokenBucket`](Self::TokenBucket), refilled greedily or by the interval |
/// | `leaky-bucket` | [`LeakyBucket`](Self::LeakyBucket) |
/// | `fixed-window`, `fixed-window(clock+22h)` | [`FixedWindow`](Self::FixedWindow) aligned to the clock, with an offset |
/// | `fixed-window(first-hit)` | [`FixedWindow`](Self::FixedWindow) that starts with a caller's first charge |
/// | `fixed-window(month from 15, +02:00)` | [`FixedWindow`](Self::FixedWindow) of a [`Calendar`](crate::strategy::Calendar) |
/// | `sliding-log` | [`SlidingLog`](Self::SlidingLog) |
/// | `sliding-window(60 cells)` | [`SlidingWindow`](Self::SlidingWindow); the default is 10 cells |
/// | `sliding-counter` | [`SlidingCounter`](Self::SlidingCounter) |
///
/// `fixed-window(clock)` and `token-bucket(greedy)` name the default. A number without a unit, as
/// in `sliding-window(60)`, is rejected: it could be seconds. The feature `serde` uses the same
/// text.
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
    #[cfg_attr(doc, doc = include_str!("../../../docs/pictures.md"))]
    /// The generic cell rate algorithm: the limit spread evenly over the period, with a burst.
    /// After a full burst it allows one per `period / limit`.
    ///
    /// As redis-cell's `CL.THROTTLE` and redis_rate since v9.
    ///
    /// ![Gcra grants at most 19 requests in 10 s of this trace][gcra]
    #[default]
    Gcra,
    #[cfg_attr(doc, doc = include_str!("../../../docs/pictures.md"))]
    /// A counter per window. Up to twice the limit can be granted around the border of two windows.
    /// A denied caller waits until the window ends.
    ///
    /// As in redis_rate v6 ([`Align::Clock`]) and Istio's redisquota ([`Align::FirstHit`]). With
    /// [`Align::Calendar`], as the plans of most APIs, such as 10,000 requests a month.
    ///
    /// ![Aligned to the clock, it grants 20 requests in 10 s around a border][fixed_window]
    ///
    /// ![Aligned to the first hit, it grants 19][fixed_window_first_hit]
    FixedWindow(Align),
    #[cfg_attr(doc, doc = include_str!("../../../docs/pictures.md"))]
    /// The time of every charge: exact at every moment. Its memory grows with the limit, which is
    /// at most 100,000: a caller then uses up to 1.3 MB in Redis, and up to 1.5 MB in a
    /// [`LocalStore`](crate::LocalStore); twice that if fully in debt. Independent of the log's
    /// length, no check costs more than 20 times a granted one.
    ///
    /// As the ZSET recipe, and Redisson's `RRateLimiter`.
    ///
    /// ![SlidingLog never grants more than 10 in 10 s][sliding_log]
    SlidingLog,
    #[cfg_attr(doc, doc = include_str!("../../../docs/pictures.md"))]
    /// Counts per cell of time. Never grants more than [`SlidingLog`](Self::SlidingLog) would, but
    /// a caller may wait up to one cell longer. Its memory grows with the cells: 12 bytes each in
    /// Redis, so at most 12 KB per caller, which every check reads and every charge writes.
    ///
    /// As hashes of timestamps to counts, and Istio's rolling windows.
    ///
    /// ![SlidingWindow never grants more than 10 in 10 s][sliding_window]
    SlidingWindow {
        /// The number of cells per period, from 1 to 1000. 10 is a good start.
        cells: u16,
    },
    #[cfg_attr(doc, doc = include_str!("../../../docs/pictures.md"))]
    /// Estimates a sliding window from two fixed windows, in little memory: the current count plus
    /// the overlapping fraction of the previous one.
    ///
    /// ![SlidingCounter grants at most 14 requests in 10 s of this trace][sliding_counter]
    SlidingCounter,
    #[cfg_attr(doc, doc = include_str!("../../../docs/pictures.md"))]
    /// A stock of tokens, which requests take and time refills.
    ///
    /// As Spring Cloud Gateway's `RedisRateLimiter` and bucket4j.
    ///
    /// ![Refilled by the interval, it grants 19 requests in 10 s][token_bucket_interval]
    TokenBucket(Refill),
    /// A level that requests raise and time lowers. Decides as [`Gcra`](Self::Gcra) does.
    LeakyBucket,
}

impl Strategy {
    /// Returns the default strategy for a quota: for one per month or year, the months or years in UTC;
    /// otherwise [`Gcra`](Self::Gcra).
    ///
    /// ```
    /// use tower_redis_ratelimit::{Quota, Strategy};
    ///
    /// let of = |quota| Strategy::default_for(quota).to_string();
    /// assert_eq!(of(Quota::per_second(10)), "gcra");
    /// assert_eq!(of(Quota::per_month(10_000)), "fixed-window(month)");
    /// ```
    pub const fn default_for(quota: Quota) -> Self {
        match quota.calendar() {
            Some(calendar) => Self::FixedWindow(Align::Calendar(calendar)),
            None => Self::Gcra,
        }
    }
}

/// Implements the methods that differ between strategies.
macro_rules! dispatch {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, [$($kind:expr),* $(,)?];)*) => {
        $(pub(super) use $module::State as $variant;)*

        impl Strategy {
            /// Every strategy: fixed windows on the clock and from the first hit, both refills of a
            /// token bucket, and a sliding window of 10 cells. For tests and comparisons of all
            /// strategies; a later version may add some. Each counts any period, so a calendar, which
            /// counts only its unit, is not among them.
            ///
            /// ```
            /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
            ///
            /// for &strategy in Strategy::ALL {
            ///     assert!(Policy::new("api", strategy, Quota::per_second(50)).is_ok());
            /// }
            /// ```
            pub const ALL: &'static [Self] = &[$($($kind,)*)*];

            /// Returns the name as text, without a parameter.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Self::$variant { .. } => $name,)* }
            }

            /// Returns the letter of the strategy in Redis keys.
            pub(super) const fn letter(self) -> &'static str {
                match self { $(Self::$variant { .. } => $letter,)* }
            }

            /// Returns the number of the strategy in the script's arguments.
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

strategies!(dispatch);
