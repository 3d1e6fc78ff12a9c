use std::time::Duration;

use crate::limit::{Check, Extra, Key, Policies, micros};

/// Charges a debt that takes `time` to refill, or nothing if the debt is already larger, so
/// that repeated and concurrent charges do not add up. Only for policies of buckets. The
/// debt is at most the capacity.
pub(crate) fn charge_debt_of(key: Key, policies: &Policies, time: Duration) -> Check {
    Check::charge(key, policies, u32::MAX).with_extra(Extra::Within(micros(time)))
}
