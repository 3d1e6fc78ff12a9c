//! Documented behavior of other limiters, reproduced with this crate: tables on a scripted clock.

mod buckets;
mod gcra;
mod windows;

use std::time::Duration;

use super::{
    Align, Check, Decision, Key, Outcome, Policies, Policy, Quota, Refill, Source, State, Strategy,
};

const MS: i64 = 1_000;
const S: i64 = 1_000_000;
const MINUTE: i64 = 60 * S;

/// The start of every script: a full hour, so that windows of the clock also start there.
const START: i64 = 1_789_999_200 * S;

/// One caller and its state.
struct Caller {
    policies: Policies,
    state: [State; 1],
}

impl Caller {
    fn new(strategy: Strategy, quota: Quota) -> Self {
        Self {
            policies: Policy::new("p", strategy, quota).unwrap().into(),
            state: [State::fresh(strategy)],
        }
    }

    /// Decides a check `at` microseconds after the start.
    fn check(&mut self, at: i64, make: fn(Key, &Policies, u32) -> Check, cost: u32) -> Decision {
        self.decide(at, make(Key::GLOBAL, &self.policies, cost))
    }

    fn take(&mut self, at: i64, cost: u32) -> Decision {
        self.check(at, Check::take, cost)
    }

    fn decide(&mut self, at: i64, check: Check) -> Decision {
        let verdicts = check.decide(&mut self.state, START + at);
        check.answer(verdicts, Source::Local)
    }
}

fn micros(time: Duration) -> i64 {
    time.as_micros() as i64
}

/// Returns a denied caller's wait in microseconds; -1 if it is allowed, or if waiting does not
/// help.
fn retry(decision: &Decision) -> i64 {
    decision.retry_after().map_or(-1, micros)
}
