use std::time::Duration;

use crate::limit::{Check, Extra, Mode, Policies};

/// Returns the [lease](crate::Policy::leased) time of a list: the shortest of its policies. `None` unless all are leased.
#[inline]
pub(super) fn lease_time(policies: &Policies) -> Option<Duration> {
    let mut shortest = Duration::MAX;
    for policy in policies {
        shortest = shortest.min(policy.lease()?);
    }
    Some(shortest)
}

/// Returns `true` if a policy of the list is leased.
#[inline]
pub(crate) fn has_lease(policies: &Policies) -> bool {
    policies.iter().any(|policy| policy.lease().is_some())
}

/// Returns `true` if a block may decide the check: a plain take, whose time no [`Fallback`](crate::Fallback) limits, under
/// leased policies.
#[inline]
pub(crate) fn is_leasable(check: &Check) -> bool {
    let takes = check.mode() == Mode::Take && check.cost() > 0;
    let is_plain = check.extra().is_none() && !check.sending().sender_limits_time;
    takes && is_plain && lease_time(check.policies()).is_some()
}

/// Turns a check into the charge of a block. Checks in the queue of a store are dropped by age, but not this one: its time is
/// that of the lease.
pub(super) fn of_block(check: Check) -> Check {
    let mut check = check.with_extra(Extra::Block);
    check.sending_mut().sender_limits_time = true;
    check
}
