use crate::limit::{Check, Extra, Mode};

/// Returns `true` if a block may decide the check: a plain take, whose time no [`Fallback`](crate::Fallback) limits, under
/// leased policies.
#[inline]
pub(crate) fn is_leasable(check: &Check) -> bool {
    let takes = check.mode() == Mode::Take && check.cost() > 0;
    let is_plain = check.extra().is_none() && !check.sending().sender_limits_time;
    takes && is_plain && check.policies().lease_time().is_some()
}

/// Turns a check into the charge of a block. Checks in the queue of a store are dropped by age, but not this one: its time is
/// that of the lease.
pub(super) fn of_block(check: Check) -> Check {
    let mut check = check.with_extra(Extra::Block);
    check.sending_mut().sender_limits_time = true;
    check
}
