//! Compares every strategy with its definition: a naive model that stores every grant and computes
//! with fractions.

mod back;
mod changes;
mod clock;
mod definition;
mod leased;
mod quotas;
mod replay;
mod turns;

pub(crate) use leased::most_spent;

use std::time::Duration;

use fastrand::Rng;

use super::ask::{Ask, Preview};
use super::{Align, Params, Strategy, sliding_log, strategies};
use crate::limit::{Check, Key, Mode, Outcome, Policies, Policy, Quota, Refill, State};

/// Previews a state at a time.
fn preview(state: &State, params: &Params, now: i64) -> Preview {
    state.preview(params, &Ask::new(Mode::Peek, 0, now))
}

/// Returns the largest cost that a state allows at a time.
pub(crate) fn room(state: &State, params: &Params, now: i64) -> i64 {
    preview(state, params, now).room
}

/// All grants, from which a strategy's definition decides on another one.
#[derive(Clone)]
pub(crate) struct Model {
    pub(super) strategy: Strategy,
    pub(crate) limit: i128,
    pub(super) period: i128,
    pub(super) burst: i128,
    /// Times and costs.
    pub(crate) grants: Vec<(i128, i128)>,
}

impl Model {
    pub(crate) fn new(strategy: Strategy, quota: Quota) -> Self {
        Self {
            strategy,
            limit: quota.limit().into(),
            period: quota.period().as_micros() as i128,
            burst: quota.capacity().into(),
            grants: vec![],
        }
    }

    /// Returns the total cost granted at times for which `counts` is `true`.
    pub(super) fn granted(&self, counts: impl Fn(i128) -> bool) -> i128 {
        self.grants
            .iter()
            .filter(|(time, _)| counts(*time))
            .map(|(_, cost)| cost)
            .sum()
    }
}

/// Implements the decision of each strategy's definition.
macro_rules! define {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, $kinds:tt;)*) => {
        impl Model {
            pub(crate) fn allows(&self, cost: i128, now: i128) -> bool {
                match self.strategy { $(Strategy::$variant { .. } => super::$module::allows(self, cost, now),)* }
            }
        }
    };
}

strategies!(define);

// Differences between strategies for the tests. The last arm of each function is the default.

/// Returns the strategy with random parameters, for a quota of this period.
pub(crate) fn vary(rng: &mut Rng, strategy: Strategy, period: Duration) -> Strategy {
    match strategy {
        Strategy::FixedWindow(Align::Clock { .. }) => Strategy::FixedWindow(Align::Clock {
            offset: Duration::from_micros(rng.u64(..period.as_micros() as u64)),
        }),
        Strategy::SlidingWindow { .. } => Strategy::SlidingWindow {
            cells: rng.u16(1..=20),
        },
        same => same,
    }
}

/// Returns `true` if a charge can never increase the capacity that remains later. It can if it
/// starts a window or an interval that would otherwise start later: the caller's windows keep their
/// length, but are shifted.
fn is_monotone(strategy: Strategy) -> bool {
    !matches!(
        strategy,
        Strategy::FixedWindow(Align::FirstHit) | Strategy::TokenBucket(Refill::Interval)
    )
}

/// Returns a random quota that `Params` represents without rounding its interval, like most quotas.
pub(crate) fn quota(rng: &mut Rng, strategy: Strategy) -> Quota {
    let quota = match rng.u8(..8) {
        0 => Quota::per_second(3),
        1 => Quota::per(7, Duration::from_secs(10)),
        2 => Quota::per_day(1),
        3 => Quota::per_second(300_000),
        4 => Quota::per(rng.u32(1..10), Duration::from_micros(rng.u64(1..50))),
        5 => Quota::per_day(1_000_000),
        _ => Quota::per(
            rng.u32(1..100),
            Duration::from_micros(rng.u64(1..10_000_000)),
        ),
    };
    match strategy {
        Strategy::SlidingLog => Quota::per(quota.limit().min(sliding_log::MAX), quota.period()),
        _ if strategy.frees().has_burst() && rng.bool() => {
            quota.burst(rng.u32(1..=2 * quota.limit()))
        }
        _ => quota,
    }
}
