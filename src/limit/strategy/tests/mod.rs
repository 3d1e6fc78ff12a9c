//! Every strategy against its definition: a naive model that keeps every grant and reckons in fractions.

mod back;
mod clock;
mod definition;
mod leased;
mod quotas;

pub(crate) use leased::most_spent;

use std::time::Duration;

use fastrand::Rng;

use super::ask::{Ask, Preview};
use super::{Align, Params, Snapshot, Strategy, sliding_log, strategies};
use crate::limit::{Charged, Check, Key, Mode, Outcome, Policies, Policy, Quota, Refill, State};

/// A state at a moment.
fn preview(state: &State, params: &Params, now: i64) -> Preview {
    state.preview(
        params,
        &Ask {
            mode: Mode::Peek,
            cost: 0,
            within: 0,
            of: Charged::just_now(0),
            slot: None,
            now,
        },
    )
}

/// All that was granted, and what the definition says of one more.
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

    /// The sum of what was granted at times that `counts`.
    pub(super) fn granted(&self, counts: impl Fn(i128) -> bool) -> i128 {
        self.grants
            .iter()
            .filter(|(time, _)| counts(*time))
            .map(|(_, cost)| cost)
            .sum()
    }
}

/// Whether a strategy would grant a cost now, by its definition.
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

// What differs between strategies for the tests. Of one that is not named, the last line of each holds.

/// The same strategy, with other parameters.
pub(super) fn vary(rng: &mut Rng, strategy: Strategy) -> Strategy {
    match strategy {
        Strategy::FixedWindow(Align::Clock { .. }) => Strategy::FixedWindow(Align::Clock {
            offset: Duration::from_micros(rng.u64(..100_000_000)),
        }),
        Strategy::SlidingWindow { .. } => Strategy::SlidingWindow {
            cells: rng.u16(1..=20),
        },
        same => same,
    }
}

/// Whether a charge can never leave more room later: not where it begins a window or an interval that begins later without
/// it. There the windows of the caller are as long as ever, but others.
fn is_monotone(strategy: Strategy) -> bool {
    !matches!(
        strategy,
        Strategy::FixedWindow(Align::FirstHit) | Strategy::TokenBucket(Refill::Interval)
    )
}

/// Quotas whose intervals are whole in ticks, which most are.
fn quota(rng: &mut Rng, strategy: Strategy) -> Quota {
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
