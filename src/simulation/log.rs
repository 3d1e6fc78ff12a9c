//! The log of a run, step by step.

use std::{fmt, mem};

use super::{Broken, Rule};
use crate::limit::{Check, Decision, Mode, Outcome};

/// The steps of a run, and the rules that it has broken. Most runs are never read, so the lines are
/// only counted unless they are kept.
#[derive(Debug)]
pub(crate) struct Log<R> {
    pub(super) lines: Vec<Line>,
    /// The number of lines, kept or not.
    pub(super) count: usize,
    is_kept: bool,
    /// The first break of each rule.
    pub(super) broken: Vec<Broken<R>>,
    /// The rules that were checked on a case that could have broken them.
    pub(super) checked: Vec<R>,
    /// The number of breaks that are already among the lines.
    logged: usize,
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

impl<R: Rule> Log<R> {
    pub(crate) fn new(is_kept: bool) -> Self {
        Self {
            lines: vec![],
            count: 0,
            is_kept,
            broken: vec![],
            checked: vec![],
            logged: 0,
        }
    }

    /// Adds a step, after the breaks since the previous one.
    pub(crate) fn say(&mut self, at: u64, caller: Option<usize>, text: impl FnOnce() -> String) {
        self.say_broken(at);
        self.push(at, caller, text);
    }

    /// Adds new breaks, so that they appear at the step that caused them.
    pub(crate) fn say_broken(&mut self, at: u64) {
        while let Some(broken) = self.broken.get(self.logged) {
            let (caller, text) = (broken.caller, format!("*** {broken}"));
            self.push(at, caller, || text);
            self.logged += 1;
        }
    }

    /// Records a broken rule. Only the first break of each rule is kept.
    pub(crate) fn breaks(&mut self, rule: R, caller: Option<usize>, problem: String) {
        if self.broken.iter().all(|broken| broken.rule != rule) {
            self.broken.push(Broken {
                rule,
                caller,
                problem,
            });
        }
    }

    /// Records that a rule is checked on a case that may break it.
    pub(crate) fn checks(&mut self, rule: R) {
        if !self.checked.contains(&rule) {
            self.checked.push(rule);
        }
    }

    /// Takes all out of it.
    pub(crate) fn take(&mut self) -> Self {
        mem::replace(self, Self::new(false))
    }

    fn push(&mut self, at: u64, caller: Option<usize>, text: impl FnOnce() -> String) {
        self.count += 1;
        if self.is_kept {
            let text = text();
            self.lines.push(Line { at, caller, text });
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
