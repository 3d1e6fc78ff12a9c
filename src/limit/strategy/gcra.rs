//! GCRA, the generic cell rate algorithm.
//!
//! **Idea.** Spread the limit evenly over the period: each unit of cost takes one interval `I = P /
//! L`. The state represents one time, the theoretical arrival time (TAT), at which everything
//! granted so far is paid off. A check of cost `c` is allowed if the TAT is then at most the burst
//! ahead: `max(TAT, now) + c*I - B*I <= now`.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** If clients count "100 per calendar minute": they see denials that a fixed window
//! would not cause.
//!
//! **Source.** ITU-T I.371; it decides as redis-cell's `CL.THROTTLE` (whose `max_burst` is `B - 1`) and
//! redis_rate since v9.
//!
//! The state contains the backlog (how far the TAT was ahead at the last charge) and the time of
//! that charge. An interval is an integer number of ticks, and a microsecond too, so that 3 per
//! second and 300,000 per second are both exact.

pub(crate) type State = super::meter::Meter<'g'>;

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model {
        limit,
        period,
        burst,
        ..
    } = model;
    // Multiply by the limit to keep intervals integral.
    let mut tat = 0;
    for (time, cost) in &model.grants {
        tat = tat.max(time * limit) + cost * period;
    }
    tat.max(now * limit) + cost * period - burst * period <= now * limit
}
