//! What happened in a run, step by step.

use std::fmt;

/// The lines of a run. Only counts them unless it is asked to keep them: most runs are never read.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) lines: Vec<Line>,
    pub(crate) count: usize,
    pub(crate) kept: bool,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// In milliseconds since the start.
    at: u64,
    /// Whom it is about; of no single caller if none.
    caller: Option<usize>,
    text: String,
}

impl Log {
    pub(crate) fn say(&mut self, at: u64, caller: Option<usize>, text: impl FnOnce() -> String) {
        self.count += 1;
        if self.kept {
            self.lines.push(Line { at, caller, text: text() });
        }
    }
}

impl Line {
    /// Whether it tells something of this caller, or of all.
    pub(crate) fn concerns(&self, caller: Option<usize>) -> bool {
        caller.is_none() || self.caller.is_none() || self.caller == caller
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6} ms  {}", self.at, self.text)
    }
}
