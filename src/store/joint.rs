//! Checks over several keys in a store that decides one key at a time. A denial refunds the keys that were charged.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::{Answer, Store, op_queue};
use crate::background::PendingOp;
use crate::error::StoreError;
use crate::limit::{Charge, Check, Decision, JointCheck, JointDecision, MadeBy, Mode};
use crate::util::{instant, polled_after_completion};

/// Resolves to the decision of a [`Store`] on several keys.
///
/// # Panics
///
/// If it is polled after it has resolved.
#[must_use = "a check may be withdrawn when its answer is dropped"]
pub struct JointFuture(JointState);

type JointAnswer = Result<JointDecision, StoreError>;

enum JointState {
    /// `None` once it has resolved.
    Ready(Option<JointAnswer>),
    /// Never locked: the lock makes the future of a request `Sync`.
    Pending(Mutex<Pin<Box<dyn JointReply>>>),
}

/// A pending reply.
pub(in crate::store) trait JointReply:
    Future<Output = JointAnswer> + Send
{
    /// See [`Withdraw`](super::Withdraw).
    fn withdraw(self: Pin<&mut Self>) -> bool {
        false
    }
}

/// A reply that cannot be withdrawn.
struct SentJoint<F>(Pin<Box<F>>);

impl JointFuture {
    /// A ready reply.
    pub fn ready(answer: Result<JointDecision, StoreError>) -> Self {
        Self(JointState::Ready(Some(answer)))
    }

    /// A pending reply.
    pub fn pending(
        future: impl Future<Output = Result<JointDecision, StoreError>> + Send + 'static,
    ) -> Self {
        Self::of(SentJoint(Box::pin(future)))
    }

    /// A reply that is polled once by this call, so that its first check is sent.
    pub(in crate::store) fn begun(
        future: impl Future<Output = JointAnswer> + Send + 'static,
    ) -> Self {
        let mut future = Box::pin(future);
        match (&mut future).now_or_never() {
            Some(answer) => Self::ready(answer),
            None => Self::of(SentJoint(future)),
        }
    }

    pub(in crate::store) fn of(reply: impl JointReply + 'static) -> Self {
        Self(JointState::Pending(Mutex::new(Box::pin(reply))))
    }

    /// Returns the reply if it is ready.
    pub(crate) fn into_ready(self) -> Result<JointAnswer, Self> {
        match self.0 {
            JointState::Ready(Some(answer)) => Ok(answer),
            state => Err(Self(state)),
        }
    }

    /// Returns `true` if it is certain that nothing was sent, and never will be. It is not polled after this.
    pub(in crate::store) fn withdraw(&mut self) -> bool {
        match &mut self.0 {
            JointState::Ready(_) => false,
            JointState::Pending(reply) => inner(reply).withdraw(),
        }
    }
}

impl Future for JointFuture {
    type Output = Result<JointDecision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            JointState::Ready(answer) => match answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => polled_after_completion("JointFuture"),
            },
            JointState::Pending(reply) => inner(reply).poll(cx),
        }
    }
}

fn inner(reply: &mut Mutex<Pin<Box<dyn JointReply>>>) -> Pin<&mut dyn JointReply> {
    let reply = reply.get_mut().unwrap_or_else(PoisonError::into_inner);
    reply.as_mut()
}

impl fmt::Debug for JointFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JointFuture").finish_non_exhaustive()
    }
}

impl<F: Future> Future for SentJoint<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl<F: Future<Output = JointAnswer> + Send> JointReply for SentJoint<F> {}

/// Checks the keys one after the other. After a denial, refunds what was taken, and only looks at the other keys, so that
/// the decision lists all policies.
pub(in crate::store) fn one_by_one<S: Store>(store: &S, joint: JointCheck) -> JointFuture {
    let store = store.clone();
    JointFuture::begun(async move {
        if let Some(questions) = joint.questions() {
            let mut known = vec![];
            for question in questions {
                known.push(store.check(question).await);
            }
            if let Some(repeated) = repetition(&joint, &known) {
                return Ok(repeated);
            }
        }
        let sent_at = instant();
        let mut replies = vec![];
        let mut taken = 0;
        let mut is_denied = false;
        for part in joint.parts() {
            let mut check = part.clone();
            if is_denied {
                check = check.with_mode(Mode::Peek);
            } else {
                taken += 1;
            }
            let reply = store.check(check).await;
            let has_failed = reply.is_err();
            is_denied |= matches!(&reply, Ok(decision) if !decision.is_allowed());
            replies.push(reply);
            if has_failed {
                break;
            }
        }
        conclude(&store, &joint, replies, taken, sent_at)
    })
}

/// Returns the denial by the keys whose denials the store has cached. A request with an id may be a repetition, which a
/// denial must not answer.
pub(in crate::store) fn remembered_denial<S: Store>(
    store: &S,
    joint: &JointCheck,
) -> Option<JointDecision> {
    if joint.id().is_some() {
        return None;
    }
    remembered(store, joint)
}

fn remembered<S: Store>(store: &S, joint: &JointCheck) -> Option<JointDecision> {
    let mut parts = Vec::with_capacity(joint.parts().len());
    for part in joint.parts() {
        parts.push(store.backend().remembered(part));
    }
    if parts.iter().all(Option::is_none) {
        return None;
    }
    Some(joint.combine(parts))
}

/// Checks all keys concurrently. After a denial, refunds what was taken immediately.
pub(in crate::store) fn together<S: Store>(store: &S, joint: JointCheck) -> JointFuture {
    if let Some(denied) = remembered_denial(store, &joint) {
        return JointFuture::ready(Ok(denied));
    }
    let store = store.clone();
    // Sent by this call, as a check of one key is.
    let (asks_id, first) = match joint.questions() {
        Some(questions) => (true, send_all(&store, &questions)),
        None => (false, send_all(&store, joint.parts())),
    };
    let mut sent_at = instant();
    JointFuture::pending(async move {
        let mut replies = join_all(first).await;
        if asks_id {
            if let Some(repeated) = repetition(&joint, &replies) {
                return Ok(repeated);
            }
            if let Some(denied) = remembered(&store, &joint) {
                return Ok(denied);
            }
            sent_at = instant();
            replies = join_all(send_all(&store, joint.parts())).await;
        }
        let taken = replies.len();
        conclude(&store, &joint, replies, taken, sent_at)
    })
}

fn send_all<S: Store>(store: &S, checks: &[Check]) -> Vec<Answer<S::Future>> {
    let mut answers = Vec::with_capacity(checks.len());
    for check in checks {
        answers.push(store.check(check.clone()));
    }
    answers
}

/// Returns the repeated decision if all parts know the id.
pub(in crate::store) fn repetition(
    joint: &JointCheck,
    known: &[Result<Decision, StoreError>],
) -> Option<JointDecision> {
    let mut parts = Vec::with_capacity(known.len());
    for reply in known {
        match reply {
            Ok(decision) if decision.is_repeated() => parts.push(Some(decision.clone())),
            _ => return None,
        }
    }
    Some(joint.combine(parts))
}

/// Combines the replies to the parts. The first `taken` parts were takes, sent since `sent_at`. Unless all parts allow
/// the request, refunds and releases what was taken.
fn conclude<S: Store>(
    store: &S,
    joint: &JointCheck,
    replies: Vec<Result<Decision, StoreError>>,
    taken: usize,
    sent_at: Instant,
) -> JointAnswer {
    let mut failure: Option<StoreError> = None;
    let mut parts = Vec::with_capacity(joint.parts().len());
    for reply in replies {
        match reply {
            Ok(decision) => parts.push(Some(decision)),
            Err(error) => {
                parts.push(None);
                // A check that may have been sent is the least certain.
                if failure.as_ref().is_none_or(StoreError::is_not_sent) {
                    failure = Some(error);
                }
            }
        }
    }
    parts.resize(joint.parts().len(), None);
    let mut decided = parts.iter().flatten();
    let is_denied = decided.any(|decision| !decision.is_allowed());
    match failure {
        None if !is_denied => {
            let records = joint.records();
            if !records.is_empty() {
                let ops = op_queue(store.clone(), None);
                for record in records {
                    ops.put(PendingOp::of_check(record));
                }
            }
            Ok(joint.combine(parts))
        }
        Some(error) if !is_denied => {
            give_back(store, joint, &parts[..taken], sent_at);
            Err(error)
        }
        // A denial by one key is final, even if the check of another key has failed.
        _ => {
            give_back(store, joint, &parts[..taken], sent_at);
            Ok(joint.combine(parts))
        }
    }
}

/// Refunds and releases what parts have taken. A part without a decision may have taken a slot, and its charge is unknown.
fn give_back<S: Store>(
    store: &S,
    joint: &JointCheck,
    parts: &[Option<Decision>],
    sent_at: Instant,
) {
    // Its task keeps it until the store has replied.
    let ops = op_queue(store.clone(), None);
    for (check, decision) in joint.parts().iter().zip(parts) {
        let has_taken = decision.as_ref().is_none_or(Decision::is_allowed);
        if let (Some(slot), Some(policies)) = (check.slot(), check.policies().in_flight())
            && has_taken
        {
            let release = PendingOp::of_check(Check::release(*check.key(), policies, slot));
            let is_answered =
                matches!(decision, Some(decision) if decision.made_by() != MadeBy::Unsure);
            ops.put(if is_answered {
                release
            } else {
                release.repeated()
            });
        }
        if let Some(decision) = decision
            && decision.is_allowed()
            && check.cost() > 0
        {
            let cost = check.cost();
            let charge = Charge::new(*check.key(), decision.clone(), cost, sent_at, instant());
            ops.put(PendingOp::refund(charge, cost));
        }
    }
}
