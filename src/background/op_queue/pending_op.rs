use std::time::Duration;

use tokio::time::Instant;

use super::{FIRST_PAUSE, LONGEST_PAUSE};

use crate::error::{ErrorKind, StoreError};
use crate::limit::{Charge, Check, Decision, Key, Mode, Policies};
use crate::util::instant;

/// An operation for a store, and a callback for its result.
pub(crate) struct PendingOp {
    what: What,
    then: Then,
    pub(super) put_at: Instant,
    /// Number of pauses before retries so far.
    pub(super) pauses: u32,
    /// Whether to repeat it once, some time after the reply.
    pub(super) repeats: bool,
}

/// Called exactly once with the result; with an error if the operation is dropped without a reply.
struct Then(Option<Box<Callback>>);

type Callback = dyn FnOnce(Result<Decision, StoreError>) + Send;

enum What {
    Check(Check),
    /// A refund of a part of a charge. Its check is built when it is sent, because the amount to
    /// refund shrinks as the charge expires.
    Refund {
        charge: Box<Charge>,
        part: u32,
    },
}

impl PendingOp {
    /// Creates an operation that sends this check.
    pub(crate) fn of_check(check: Check) -> Self {
        Self::new(What::Check(check))
    }

    fn new(what: What) -> Self {
        Self {
            what,
            then: Then(None),
            put_at: instant(),
            pauses: 0,
            repeats: false,
        }
    }

    /// Calls `then` with the result, without holding a lock: on the sender's task, or on the task that puts or awaits
    /// the operation. If the operation failed, the error says whether it was certainly [not
    /// sent](StoreError::is_not_sent).
    pub(crate) fn then(
        self,
        then: impl FnOnce(Result<Decision, StoreError>) + Send + 'static,
    ) -> Self {
        Self {
            then: Then(Some(Box::new(then))),
            ..self
        }
    }

    /// Repeats the operation once, some time after the reply, in case an earlier check of its slot arrives late.
    pub(crate) fn repeated(self) -> Self {
        Self {
            repeats: true,
            ..self
        }
    }

    /// Creates a charge, which no store denies.
    pub(crate) fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::of_check(Check::charge(key, policies, cost))
    }

    /// Creates a refund of a part of a charge, as far as that still counts when it is sent.
    pub(crate) fn refund(charge: Charge, part: u32) -> Self {
        let charge = Box::new(charge);
        Self::new(What::Refund { charge, part })
    }

    /// The caller whose counts it changes.
    pub(super) fn key(&self) -> &Key {
        match &self.what {
            What::Check(check) => check.key(),
            What::Refund { charge, .. } => charge.key(),
        }
    }

    /// Returns `false` once the charged units no longer count. A refund of such has no
    /// [`check`](Self::check).
    pub(super) fn matters(&self, now: Instant) -> bool {
        let What::Check(check) = &self.what else {
            return true;
        };
        let counts_for = check.policies().longest_count();
        let age = now.saturating_duration_since(self.put_at);
        i64::try_from(age.as_micros()).is_ok_and(|age| age < counts_for)
    }

    /// Counts an attempt, and returns the pause until the next.
    pub(super) fn next_pause(&mut self) -> Duration {
        self.pauses += 1;
        FIRST_PAUSE
            .saturating_mul(1 << (self.pauses - 1).min(8))
            .min(LONGEST_PAUSE)
    }

    /// Returns `true` for the release of a slot, which may be executed twice.
    pub(super) fn is_release(&self) -> bool {
        matches!(&self.what, What::Check(check) if check.mode() == Mode::Release)
    }

    /// Returns `true` if it must not be retried when unsent: renewals and requests for blocks are repeated by their
    /// callers, and a request awaits a take.
    pub(super) fn is_tried_once(&self) -> bool {
        matches!(&self.what, What::Check(check) if matches!(check.mode(), Mode::Renew | Mode::Take | Mode::UpTo))
    }

    /// Returns the check to send at `now`. `None` if there is nothing left to do.
    pub(super) fn check(&self, now: Instant) -> Option<Check> {
        match &self.what {
            What::Check(check) => Some(check.clone()),
            What::Refund { charge, part } => charge.refund(*part, now),
        }
    }

    /// Passes the result to the callback.
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
