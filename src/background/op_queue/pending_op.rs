use std::time::Duration;

use tokio::time::Instant;

use super::{FIRST_PAUSE, LONGEST_PAUSE};

use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::util::instant;

/// What is to be done in a store, and what is called with the answer.
pub(crate) struct PendingOp {
    what: What,
    then: Then,
    pub(super) put_at: Instant,
    /// How often the store has not sent it.
    pub(super) tries: u32,
    /// Whether to send it again a while after the reply.
    pub(super) repeats: bool,
}

/// Called with the answer, once: also if nobody is left to send it.
struct Then(Option<Box<Callback>>);

type Callback = dyn FnOnce(Result<Decision, StoreError>) + Send;

enum What {
    Check(Check),
    /// What is still counted of a charge depends on how long ago that was: the check is made when it is sent.
    Refund {
        key: Key,
        /// For how many microseconds it counts at most.
        counts_for: i64,
        check: Box<CheckAt>,
    },
}

type CheckAt = dyn Fn(Instant) -> Option<Check> + Send;

impl PendingOp {
    /// Asks this check.
    pub(crate) fn of_check(check: Check) -> Self {
        Self {
            what: What::Check(check),
            then: Then(None),
            put_at: instant(),
            tries: 0,
            repeats: false,
        }
    }

    /// The same, which calls `then` with what came of it: on the sender's task, or before this is put, and without a
    /// lock. If it was given up, the error says whether it is certain that it was [not sent](StoreError::is_unsent).
    pub(crate) fn then(
        self,
        then: impl FnOnce(Result<Decision, StoreError>) + Send + 'static,
    ) -> Self {
        Self {
            then: Then(Some(Box::new(then))),
            ..self
        }
    }

    /// Sends it again a while after the reply, in case an earlier check of its slot arrives late.
    pub(crate) fn repeated(self) -> Self {
        Self {
            repeats: true,
            ..self
        }
    }

    /// Charges without asking.
    pub(crate) fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::of_check(Check::charge(key, policies, cost))
    }

    /// Refunds what is still counted of a charge under these policies when it is sent: by the check for that time, if
    /// there is any.
    pub(crate) fn refund(
        key: Key,
        policies: &Policies,
        check: impl Fn(Instant) -> Option<Check> + Send + 'static,
    ) -> Self {
        let what = What::Refund {
            key,
            counts_for: policies.longest_count(),
            check: Box::new(check),
        };
        Self {
            what,
            then: Then(None),
            put_at: instant(),
            tries: 0,
            repeats: false,
        }
    }

    /// The caller whom it is about.
    pub(super) fn key(&self) -> &Key {
        match &self.what {
            What::Check(check) => check.key(),
            What::Refund { key, .. } => key,
        }
    }

    /// Whether it still matters: what is charged and what is refunded counts no more after that.
    pub(super) fn matters(&self, now: Instant) -> bool {
        let counts_for = match &self.what {
            What::Check(check) => check.policies().longest_count(),
            What::Refund { counts_for, .. } => *counts_for,
        };
        let age = now.saturating_duration_since(self.put_at);
        i64::try_from(age.as_micros()).is_ok_and(|age| age < counts_for)
    }

    /// Counts a try, and returns how long to wait for the next.
    pub(super) fn next_pause(&mut self) -> Duration {
        self.tries += 1;
        FIRST_PAUSE
            .saturating_mul(1 << (self.tries - 1).min(8))
            .min(LONGEST_PAUSE)
    }

    /// Whether it releases a slot, which it may do twice.
    pub(super) fn is_release(&self) -> bool {
        matches!(&self.what, What::Check(check) if check.mode() == Mode::Release)
    }

    /// Whether it is not tried again if it was not sent: whoever puts a renewal or asks for a block does so again, and a
    /// request waits for what it takes.
    pub(super) fn is_tried_once(&self) -> bool {
        matches!(&self.what, What::Check(check) if matches!(check.mode(), Mode::Renew | Mode::Take | Mode::UpTo))
    }

    /// What to ask for now. `None` if there is nothing to do any more.
    pub(super) fn check(&self, now: Instant) -> Option<Check> {
        match &self.what {
            What::Check(check) => Some(check.clone()),
            What::Refund { check, .. } => check(now),
        }
    }

    /// It has been answered.
    pub(super) fn answer(mut self, answer: Result<Decision, StoreError>) {
        if let Some(then) = self.then.0.take() {
            then(answer);
        }
    }
}

impl Drop for Then {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Err(StoreError::new(ErrorKind::NoRuntime)));
        }
    }
}
