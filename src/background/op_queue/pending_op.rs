use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Reply;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Charge, Check, Decision, Key, Mode, Policies, Policy, SentBy};
use crate::util::instant;

/// An operation for a store, and a callback for its result.
pub(crate) struct PendingOp {
    kind: OpKind,
    callback: CallOnce,
    created_at: Instant,
    retry_count: u32,
    /// Number of times that it is sent again after a reply; see [`repeated`](Self::repeated).
    repeats_left: u8,
    /// Whether it was sent before.
    is_repeat: bool,
    /// Set while a flush waits for it.
    owed: Option<Owed>,
}

/// Counts an operation until it is dropped.
pub(super) struct Owed(Arc<AtomicUsize>);

/// The end of an operation, or its next attempt.
pub(super) enum AfterReply {
    /// Its callback gets the result.
    Finish(Reply),
    /// Its callback gets the error, and the observer is notified.
    Report(StoreError),
    /// It is sent again after this delay.
    Retry(Duration),
}

/// First and longest delay of a retry.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Number of repeats of the release of a slot; see [`PendingOp::repeated`]. The last one is sent after a second, which is
/// longer than the usual timeouts of stores. A check that arrives even later takes a slot that expires.
const RELEASE_REPEATS: u8 = 2;
/// Delay of a repeat after the reply before it. Short, because the slot of a late check counts until the next repeat.
const RELEASE_REPEAT_DELAY: Duration = Duration::from_millis(500);

/// Calls the callback exactly once: with an error if the operation is dropped without a reply.
struct CallOnce(Option<Box<Callback>>);

type Callback = dyn FnOnce(Result<Decision, StoreError>) + Send;

enum OpKind {
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
        Self::new(OpKind::Check(check))
    }

    fn new(kind: OpKind) -> Self {
        Self {
            kind,
            callback: CallOnce(None),
            created_at: instant(),
            retry_count: 0,
            repeats_left: 0,
            is_repeat: false,
            owed: None,
        }
    }

    /// Counts the operation in `owed` until it is finished. A flush waits for all but renewals and blocks.
    pub(super) fn owed_in(mut self, owed: &Arc<AtomicUsize>) -> Self {
        let is_owed = match &self.kind {
            // A take may be refunded after its reply.
            OpKind::Check(check) => !matches!(check.mode(), Mode::Renew | Mode::UpTo),
            OpKind::Refund { .. } => true,
        };
        if is_owed {
            self.owed = Some(Owed::new(owed));
        }
        self
    }

    /// Returns `true` while a flush waits for it.
    pub(super) fn is_owed(&self) -> bool {
        self.owed.is_some()
    }

    /// Calls `callback` with the result, without holding a lock: on the task that puts the operation, or on the one
    /// that awaits the reply. If the operation failed, the error says whether it was certainly [not
    /// sent](StoreError::is_not_sent).
    pub(crate) fn then(
        self,
        callback: impl FnOnce(Result<Decision, StoreError>) + Send + 'static,
    ) -> Self {
        Self {
            callback: CallOnce(Some(Box::new(callback))),
            ..self
        }
    }

    /// Repeats the operation [twice](RELEASE_REPEATS) after the reply, in case an earlier check of its slot arrives late.
    pub(crate) fn repeated(self) -> Self {
        Self {
            repeats_left: RELEASE_REPEATS,
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
        Self::new(OpKind::Refund { charge, part })
    }

    /// The caller whose counts it changes.
    pub(super) fn key(&self) -> &Key {
        match &self.kind {
            OpKind::Check(check) => check.key(),
            OpKind::Refund { charge, .. } => charge.key(),
        }
    }

    /// Returns `false` once the charged units no longer count. Always `true` for a refund: after that time, it has no
    /// [`check`](Self::check).
    pub(super) fn still_counts(&self, now: Instant) -> bool {
        let OpKind::Check(check) = &self.kind else {
            return true;
        };
        let each = check.policies().iter().map(Policy::counts_for);
        let longest = each.max().unwrap_or(0);
        let age = now.saturating_duration_since(self.created_at);
        i64::try_from(age.as_micros()).is_ok_and(|age| age < longest)
    }

    /// Decides what happens after a reply.
    pub(super) fn after_reply(&mut self, reply: Reply, now: Instant) -> AfterReply {
        let error = match reply {
            Ok(_) if self.repeats_left > 0 => {
                self.repeats_left -= 1;
                self.is_repeat = true;
                // The slot of a late check may be as young as this reply.
                self.created_at = now;
                // The first release counts: no flush waits for the repeats.
                self.owed = None;
                return AfterReply::Retry(RELEASE_REPEAT_DELAY);
            }
            Ok(decision) => return AfterReply::Finish(Ok(decision)),
            Err(error) => error,
        };
        // A release may be executed twice.
        let may_repeat = error.is_not_sent() || self.is_release();
        if may_repeat && !self.is_never_retried() && self.still_counts(now) {
            self.is_repeat = true;
            AfterReply::Retry(self.next_retry_delay())
        } else if self.is_release() || error.is_not_sent() && self.is_never_retried() {
            AfterReply::Finish(Err(error))
        } else {
            AfterReply::Report(error)
        }
    }

    /// Counts a retry, and returns the delay before it.
    fn next_retry_delay(&mut self) -> Duration {
        self.retry_count += 1;
        MIN_RETRY_DELAY
            .saturating_mul(1 << (self.retry_count - 1).min(8))
            .min(MAX_RETRY_DELAY)
    }

    /// Returns `true` for the release of a slot.
    pub(super) fn is_release(&self) -> bool {
        matches!(&self.kind, OpKind::Check(check) if check.mode() == Mode::Release)
    }

    /// Returns `true` for the renewal of a slot.
    pub(super) fn is_renewal(&self) -> bool {
        matches!(&self.kind, OpKind::Check(check) if check.mode() == Mode::Renew)
    }

    /// Returns `true` if its owner sends it again when it is unsent: a renewal at the next tick, a block (`UpTo`) for the
    /// next request, a take by the request that waits for it.
    fn is_never_retried(&self) -> bool {
        matches!(&self.kind, OpKind::Check(check) if matches!(check.mode(), Mode::Renew | Mode::Take | Mode::UpTo))
    }

    /// Returns the check to send at `now`. `None` if there is nothing left to do.
    pub(super) fn check(&self, now: Instant) -> Option<Check> {
        let mut check = match &self.kind {
            OpKind::Check(check) => check.clone(),
            OpKind::Refund { charge, part } => charge.refund(*part, now)?,
        };
        // A request or a block may wait for a take.
        let is_awaited = matches!(check.mode(), Mode::Take | Mode::UpTo);
        if !is_awaited {
            check.sending_mut().by = if self.is_repeat {
                SentBy::Retry
            } else {
                SentBy::Background
            };
        }
        Some(check)
    }

    /// Passes the result to the callback.
    pub(super) fn finish(mut self, result: Result<Decision, StoreError>) {
        if let Some(callback) = self.callback.0.take() {
            callback(result);
        }
    }
}

impl Owed {
    pub(super) fn new(owed: &Arc<AtomicUsize>) -> Self {
        owed.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(owed))
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for CallOnce {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback(Err(StoreError::new(ErrorKind::NoRuntime)));
        }
    }
}
