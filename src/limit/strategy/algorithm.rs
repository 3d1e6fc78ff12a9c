use super::{Frees, Params, Strategy, Writer};
use crate::error::ConfigError;
use crate::limit::{PolicyCharge, Quota};

/// The Rust half of a strategy: a stored state, with the functions of the Lua half.
///
/// Times are microseconds since the Unix epoch, durations microseconds, and costs integers. A check
/// loads the state into registers, computes with these, and saves them only if something was
/// charged.
pub(crate) trait Algorithm: Default {
    /// Returns how the capacity is freed.
    fn frees(strategy: Strategy) -> Frees;
    /// Completes the numbers of a policy.
    ///
    /// # Errors
    ///
    /// If the strategy does not support this parameter or quota.
    fn adapt(_: Strategy, _: &mut Params, _: Quota) -> Result<(), ConfigError> {
        Ok(())
    }
    /// Returns the parameter of the strategy as text, unless it is the default.
    fn parameter(_: Strategy) -> Option<String> {
        None
    }
    /// Returns this strategy with another parameter, which may be out of bounds.
    ///
    /// # Errors
    ///
    /// Names the problem of the text.
    fn with_parameter(_: Strategy, _: &str) -> Result<Strategy, &'static str> {
        Err(NO_PARAMETER)
    }

    /// Returns the state at `now`: expired charges are removed, and a count that this policy cannot
    /// have produced is lowered to the maximum that it can.
    ///
    /// Also returns whether the state must be saved even if nothing is charged, because the clock
    /// has gone back: otherwise a caller who was charged at 12:00 would be locked out for an hour
    /// by a clock that has been set to 11:00.
    fn load(&self, params: &Params, now: i64) -> (Registers, bool);
    /// Returns the largest cost that would be allowed now; negative for a caller in debt.
    fn room(params: &Params, now: i64, registers: Registers) -> i64;
    /// Returns the time until `cost` would be allowed, if it is denied now. `cost` is at most the
    /// capacity.
    fn wait(&self, params: &Params, now: i64, cost: i64, registers: Registers) -> i64;
    /// Returns the registers as if this quota had written the state, as it does when it charges
    /// something.
    fn written(_: &Params, _now: i64, registers: Registers) -> Registers {
        registers
    }
    /// Returns the registers that a denied take saves. `None` unless its quota is faster.
    fn denied(_: &Params, _now: i64, _: Registers) -> Option<Registers> {
        None
    }
    /// Charges `cost`, even beyond the limit.
    fn charge(&mut self, params: &Params, now: i64, cost: i64, registers: Registers) -> Registers;
    /// Refunds up to `cost` of a charge, but never an amount that would let the caller later get
    /// more than if only the rest had been charged. Returns the deducted amount, where a
    /// part of a unit counts as one; 0 means that nothing has changed.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        registers: Registers,
    ) -> Refunded;
    /// Returns the time until the state equals a fresh one in every respect. The key expires then,
    /// and a [refund](Self::refund) recognizes its charge by it.
    fn reset_after(&self, params: &Params, now: i64, registers: Registers) -> i64;
    /// Stores a state in which `cost` was charged.
    fn save(&mut self, params: &Params, now: i64, cost: i64, registers: Registers);
    /// Returns `true` unless another quota wrote the state, so that it counts in other terms.
    fn is_of(&self, _: &Params) -> bool {
        true
    }
    /// Returns the time in microseconds until which the state matters, although it may look fresh
    /// earlier under this quota.
    fn kept_until(&self, _: &Params, _now: i64) -> i64 {
        0
    }
    /// Creates a state that continues the count of another store, and counts at least as much as
    /// that store did. If the policy is an instance's share, `used` is a share too, rounded up, so
    /// it does not show whether the whole is used up.
    fn resume(params: &Params, now: i64, followed: Snapshot) -> Self;
    /// Returns the state as numbers, for a store that keeps bytes.
    fn to_numbers(&self) -> Vec<i64>;
    /// Restores a state from its [numbers](Self::to_numbers), each from 0 to 2^53. `None` for
    /// numbers of no state.
    fn of_numbers(numbers: &[i64]) -> Option<Self>;
}

pub(super) const NO_PARAMETER: &str = "this strategy has no parameter";

/// The last known count of a caller in another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The used part of the capacity.
    pub(crate) used: i64,
    /// When it is fully unused again, in microseconds.
    pub(crate) until: i64,
    /// The quota under which it was counted.
    pub(crate) writer: Writer,
}

/// A loaded state: up to three numbers, as in the Lua halves.
pub(crate) type Registers = [i64; 3];

/// A state after a refund, and the refunded amount.
pub(crate) type Refunded = (Registers, i64);

/// A loaded state that need not be saved.
pub(super) fn clean(registers: Registers) -> (Registers, bool) {
    (registers, false)
}
