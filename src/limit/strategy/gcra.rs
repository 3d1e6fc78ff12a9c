//! GCRA, the generic cell rate algorithm.
//!
//! **Idea.** Spread the limit evenly over the period: each unit of cost takes one interval `I = P / L`. The state
//! stands for one time, the theoretical arrival time (TAT): when everything granted so far will have been paid off. A
//! check of cost `c` is allowed while the TAT would run ahead of now by no more than the burst: `max(TAT, now) + c*I -
//! B*I <= now`.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** A client that counts "100 per calendar minute" sees denials that a fixed window would not make.
//!
//! **Source.** ITU-T I.371; the semantics are those of redis-cell's `CL.THROTTLE` (its `max_burst` is `B - 1`) and
//! of redis_rate since v9.
//!
//! Kept is how far the TAT was ahead at the last charge, the backlog, and when that was. An interval is a whole number of
//! ticks, and some ticks make a microsecond, so that 3 per second and 300,000 per second are both exact.

pub(crate) type State = super::meter::Meter<'g'>;

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model {
        limit,
        period,
        burst,
        ..
    } = model;
    // Times by the limit, so that an interval is whole.
    let mut tat = 0;
    for (time, cost) in &model.grants {
        tat = tat.max(time * limit) + cost * period;
    }
    tat.max(now * limit) + cost * period - burst * period <= now * limit
}
