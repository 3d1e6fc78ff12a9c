//! Checks and their answers, as the log shows them.

use super::*;

/// What is wrong with a decision, if anything is.
pub(super) fn nonsense(caller: &Caller, check: &Check, decision: &Decision) -> Option<String> {
    let (granted, cost) = (decision.granted(), check.cost());
    for each in decision.each() {
        if each.remaining() > each.capacity() {
            return Some(format!("{} left of {}", each.remaining(), each.capacity()));
        }
    }
    let whole = caller.capacities().min().unwrap_or(0);
    match decision.outcome() {
        Outcome::Denied { retry_after } if retry_after.is_zero() => Some("denied, and need not wait".to_owned()),
        Outcome::NeverFits if i64::from(cost) <= whole => Some(format!("{cost} is said never to fit into {whole}")),
        Outcome::Denied { .. } | Outcome::NeverFits if granted > 0 => Some(format!("denied, and granted {granted}")),
        Outcome::Allowed if check.mode() == Mode::Take && granted != cost => {
            Some(format!("allowed {cost}, and granted {granted}"))
        }
        _ if check.mode() != Mode::Reset && granted > cost => Some(format!("granted {granted} of {cost}")),
        _ => None,
    }
}

pub(super) fn shown(check: &Check) -> String {
    let (cost, key) = (check.cost(), String::from_utf8_lossy(check.key().as_bytes()));
    let id = check.id().map(|id| format!(" with id {}", String::from_utf8_lossy(id.as_bytes())));
    let id = id.unwrap_or_default();
    match check.mode() {
        Mode::Take => format!("take {cost} of {key}{id}"),
        Mode::TakeAhead => format!("take {cost} of {key} ahead"),
        Mode::UpTo => format!("take up to {cost} of {key}{id}"),
        Mode::Peek => format!("peek {cost} of {key}{id}"),
        Mode::Charge => format!("charge {cost} to {key}{id}"),
        Mode::GiveBack => format!("give {cost} back to {key}{id}"),
        Mode::Reset => format!("reset {key}{id}"),
        Mode::Renew => format!("renew {cost} of {key}"),
        Mode::Hold => format!("hold {cost} of {key}"),
    }
}

pub(super) fn verdict(decision: &Decision) -> String {
    let left = format!("{} left of {}", decision.remaining(), decision.capacity());
    match decision.outcome() {
        Outcome::Allowed => format!("{} granted, {left}", decision.granted()),
        Outcome::Later { due_in } => format!("{} granted, due in {due_in:?}, {left}", decision.granted()),
        Outcome::Denied { retry_after } => format!("denied for {retry_after:?}, {left}"),
        Outcome::NeverFits => format!("never fits, {left}"),
    }
}

pub(super) fn answered(answer: &Result<Decision, Error>) -> String {
    match answer {
        Ok(decision) => format!("{} ({:?})", verdict(decision), decision.source()),
        Err(error) => format!("error: {error}"),
    }
}
