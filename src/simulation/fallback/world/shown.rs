//! Checks and their answers, as the log shows them.

use super::*;

/// Describes what is inconsistent in a decision; `None` if nothing is.
pub(super) fn nonsense(caller: &Caller, check: &Check, decision: &Decision) -> Option<String> {
    let (granted, cost) = (decision.granted(), check.cost());
    for each in decision.each() {
        if each.remaining() > each.capacity() {
            return Some(format!("{} left of {}", each.remaining(), each.capacity()));
        }
    }
    let whole = caller.capacities().min().unwrap_or(0);
    match decision.outcome() {
        Outcome::Denied { retry_after } if retry_after.is_zero() => {
            Some("denied, and need not wait".to_owned())
        }
        Outcome::ExceedsCapacity if i64::from(cost) <= whole => {
            Some(format!("{cost} is reported as never fitting into {whole}"))
        }
        Outcome::Denied { .. } | Outcome::ExceedsCapacity if granted > 0 => {
            Some(format!("denied, and granted {granted}"))
        }
        Outcome::Allowed if check.mode() == Mode::Take && granted != cost => {
            Some(format!("allowed {cost}, and granted {granted}"))
        }
        _ if check.mode() != Mode::Reset && granted > cost => {
            Some(format!("granted {granted} of {cost}"))
        }
        _ => None,
    }
}

pub(super) fn answered(answer: &Result<Decision, StoreError>) -> String {
    match answer {
        Ok(decision) => format!("{} ({:?})", verdict(decision), decision.source()),
        Err(error) => format!("error: {error}"),
    }
}
