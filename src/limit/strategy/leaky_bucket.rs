//! Leaky bucket, used as a meter: charges fill it, and it leaks at the rate of the quota.
//!
//! **Idea.** The state is a level, which falls by `L / P`. A check of cost `c` is allowed if the
//! cost fits: `level - leaked + c <= B`.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** It decides as GCRA does: choose it if you think in levels. It does not delay
//! requests, unlike a leaky bucket that is a queue.
//!
//! **Source.** Turner, "New directions in communications" (1986); the funnel of redis tutorials (capacity, leaking
//! rate).

pub(crate) type State = super::meter::Meter<'b'>;

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model {
        limit,
        period,
        burst,
        ..
    } = model;
    let mut level = 0;
    let mut at = 0;
    for (time, cost) in &model.grants {
        level = 0.max(level - (time - at) * limit) + cost * period;
        at = *time;
    }
    0.max(level - (now - at) * limit) + cost * period <= burst * period
}
