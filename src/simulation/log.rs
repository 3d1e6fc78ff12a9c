//! The log of a run, step by step.

use std::fmt;

use crate::limit::{Check, Decision, Mode, Outcome};

/// The lines of a run. Most runs are never read, so by default the lines are only counted.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) lines: Vec<Line>,
    pub(crate) count: usize,
    pub(crate) kept: bool,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Milliseconds since the start.
    at: u64,
    /// The caller that the step is about; `None` if it is about no single caller.
    caller: Option<usize>,
    text: String,
}

impl Log {
    pub(crate) fn say(&mut self, at: u64, caller: Option<usize>, text: impl FnOnce() -> String) {
        self.count += 1;
        if self.kept {
            self.lines.push(Line {
                at,
                caller,
                text: text(),
            });
        }
    }
}

impl Line {
    /// Returns `true` if the step is about this caller, or about no single one.
    pub(crate) fn concerns(&self, caller: Option<usize>) -> bool {
        caller.is_none() || self.caller.is_none() || self.caller == caller
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6} ms  {}", self.at, self.text)
    }
}

pub(crate) fn shown(check: &Check) -> String {
    let (cost, key) = (
        check.cost(),
        String::from_utf8_lossy(check.key().as_bytes()),
    );
    let id = check
        .id()
        .map(|id| format!(" with id {}", String::from_utf8_lossy(id.as_bytes())));
    let id = id.unwrap_or_default();
    let within = check.within() / 1000;
    match check.mode() {
        Mode::Take => format!("take {cost} of {key}{id}"),
        Mode::TakeAhead => format!("take {cost} of {key} within {within} ms"),
        Mode::UpTo => format!("take up to {cost} of {key}{id}"),
        Mode::Peek => format!("peek {cost} of {key}{id}"),
        Mode::Charge => format!("charge {cost} to {key}{id}"),
        Mode::Refund => format!("refund {cost} to {key}{id}"),
        Mode::Reset => format!("reset {key}{id}"),
        Mode::Renew => format!("renew a slot of {key}"),
        Mode::Release => format!("release a slot of {key}"),
    }
}

pub(crate) fn verdict(decision: &Decision) -> String {
    let left = format!("{} left of {}", decision.remaining(), decision.capacity());
    match decision.outcome() {
        Outcome::Allowed => format!("{} granted, {left}", decision.granted()),
        Outcome::Later { due_in } => {
            format!("{} granted, due in {due_in:?}, {left}", decision.granted())
        }
        Outcome::Denied { retry_after } => format!("denied for {retry_after:?}, {left}"),
        Outcome::ExceedsCapacity => format!("never fits, {left}"),
    }
}
