use super::{Frees, Params, Strategy};
use crate::error::ConfigError;
use crate::limit::{Charged, Quota};

/// The Rust half of a twin: a state as it is stored, with the functions of its Lua half.
///
/// Times are microseconds since the Unix epoch, durations microseconds, and costs whole numbers. A check loads the
/// state into registers, computes with these, and saves them only if something was charged.
pub(crate) trait Algorithm: Default {
    /// How what was charged is freed again.
    fn frees(strategy: Strategy) -> Frees;
    /// Completes the numbers of a policy.
    ///
    /// # Errors
    ///
    /// If the strategy cannot have this parameter or quota.
    fn adapt(_: Strategy, _: &mut Params, _: Quota) -> Result<(), ConfigError> {
        Ok(())
    }
    /// The parameter of the strategy as text, unless it is the default.
    fn parameter(_: Strategy) -> Option<String> {
        None
    }
    /// This strategy with another parameter, in or out of bounds.
    ///
    /// # Errors
    ///
    /// What is wrong with the text.
    fn with_parameter(_: Strategy, _: &str) -> Result<Strategy, &'static str> {
        Err(NO_PARAMETER)
    }

    /// The state as it is at `now`: what has expired is gone, and what this policy could not have made is lowered to the
    /// most that it could.
    ///
    /// And whether it must be saved even if nothing is charged. It must if the clock has gone back: a caller who was
    /// charged at 12:00 would otherwise be locked out from 11:00 on, for an hour.
    fn load(&self, params: &Params, now: i64) -> (Registers, bool);
    /// The largest cost that would pass now; below zero for a caller in debt.
    fn room(params: &Params, now: i64, registers: Registers) -> i64;
    /// How long until `cost` would pass, where it would not now. It is never more than the capacity.
    fn wait(&self, params: &Params, now: i64, cost: i64, registers: Registers) -> i64;
    /// Counts `cost`, whether there is room or not.
    fn charge(&mut self, params: &Params, now: i64, cost: i64, registers: Registers) -> Registers;
    /// Refunds up to `cost` of a charge, so that from then on there is never more room than if only the rest of it had
    /// been charged. Returns the amount actually refunded, as a lower bound; if it is 0, nothing has changed.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &Charged,
        registers: Registers,
    ) -> Refunded;
    /// How long until the state is as if nothing had been charged, with all that it remembers beyond the count. Its key
    /// expires then, and a [refund](Self::refund) recognizes by it which charge is meant.
    fn reset_after(params: &Params, now: i64, registers: Registers) -> i64;
    /// Stores a state in which `cost` was charged.
    fn save(&mut self, params: &Params, now: i64, cost: i64, registers: Registers);
    /// The state of a caller that another store has counted so far. It counts at least as much as that store did. The
    /// policy may be an instance's share: then `used` is a part too, rounded up, and does not say whether the whole is
    /// used up.
    fn resume(params: &Params, now: i64, followed: Snapshot) -> Self;
}

pub(super) const NO_PARAMETER: &str = "this strategy has no parameter";

/// What is known of a caller that another store counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// How much of the capacity is used.
    pub(crate) used: i64,
    /// When nothing is, in microseconds.
    pub(crate) until: i64,
}

/// A state while it is decided on: up to three numbers, as the Lua halves pass them.
pub(crate) type Registers = [i64; 3];

/// A state after a refund, and a lower bound of the amount actually refunded.
pub(crate) type Refunded = (Registers, i64);

/// A state that need not be saved.
pub(super) fn clean(registers: Registers) -> (Registers, bool) {
    (registers, false)
}
