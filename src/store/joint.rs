//! Checks over several keys in a store that decides one key at a time. A denial refunds the keys that were charged.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::{Answer, SettledCost, Store, op_queue};
use crate::background::{OpQueue, PendingOp};
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
    #[allow(
        clippy::result_large_err,
        reason = "the error is the future itself, for which the caller has room"
    )]
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
            let check = if is_denied {
                part.clone().with_mode(Mode::Peek)
            } else {
                taken += 1;
                // The store may wrap a `Leased` one.
                part.clone().without_block()
            };
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
    if failure.is_none() && !is_denied {
        let records = joint.records();
        if !records.is_empty() {
            let ops = op_queue(store.clone(), None);
            for record in records {
                ops.put(PendingOp::of_check(record));
            }
        }
        return Ok(joint.combine(parts));
    }
    // Its task keeps it until the store has replied.
    let ops = op_queue(store.clone(), None);
    match failure {
        Some(error) if !is_denied => {
            refund(&ops, joint, &mut parts[..taken], sent_at);
            let mut decided = joint.parts().iter().zip(&parts);
            let has_slot = decided.any(|(check, part)| check.slot().is_some() && part.is_some());
            // The owner of the slots must release them, unless the request passes nevertheless.
            Err(if has_slot { error.maybe_sent() } else { error })
        }
        // A denial by one key is final, even if the check of another key has failed.
        _ => {
            release(&ops, joint, &parts[..taken]);
            refund(&ops, joint, &mut parts[..taken], sent_at);
            Ok(joint.combine(parts))
        }
    }
}

/// Refunds what parts have charged, and updates their decisions. The charge of a part without a decision is unknown.
fn refund(ops: &OpQueue, joint: &JointCheck, parts: &mut [Option<Decision>], sent_at: Instant) {
    for (check, part) in joint.parts().iter().zip(parts) {
        if let Some(decision) = part.take_if(|decision| decision.is_allowed()) {
            let cost = check.cost();
            if cost > 0 {
                let charge = Charge::new(*check.key(), decision.clone(), cost, sent_at, instant());
                ops.put(PendingOp::refund(charge, cost));
            }
            *part = Some(SettledCost::undo(decision, cost));
        }
    }
}

/// Releases the slots that parts have taken. A part without a decision may have taken one.
fn release(ops: &OpQueue, joint: &JointCheck, parts: &[Option<Decision>]) {
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
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use fastrand::Rng;
    use tokio::time::sleep;

    use super::*;
    use crate::error::ErrorKind;
    use crate::limit::{Key, Policies, Policy, Strategy};
    use crate::store::LocalStore;
    use crate::util::lock;

    /// Decides each check after a random time, and replies after another one. Some takes are not sent.
    #[derive(Clone)]
    struct Distant {
        counts: LocalStore,
        rng: Arc<Mutex<Rng>>,
    }

    impl Store for Distant {
        type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

        fn check(&self, check: Check) -> Answer<Self::Future> {
            let mut rng = lock(&self.rng);
            let before = Duration::from_millis(rng.u64(..20));
            let after = Duration::from_millis(rng.u64(..20));
            let is_sent = check.mode() != Mode::Take || rng.u8(..16) > 0;
            let counts = self.counts.clone();
            Answer::pending(Box::pin(async move {
                sleep(before).await;
                if !is_sent {
                    return Err(StoreError::new(ErrorKind::Unreachable).not_sent());
                }
                let decided = counts.check(check).await;
                sleep(after).await;
                decided
            }))
        }
    }

    /// Concurrent checks of random keys, in any order, with costs and ids: afterwards each key has counted exactly what was
    /// granted. So denials, failures and repetitions have charged nothing, and no refund has freed the units of others.
    #[tokio::test(start_paused = true)]
    async fn keys_count_exactly_what_was_granted() {
        let ways: [fn(&Distant, JointCheck) -> JointFuture; 2] = [one_by_one, together];
        let (mut granted, mut denied, mut failed, mut repeated) = (0, 0, 0, 0);
        for seed in 0..300 {
            let mut rng = Rng::with_seed(seed);
            let store = Distant {
                counts: LocalStore::default(),
                rng: Arc::new(Mutex::new(rng.fork())),
            };
            let mut lists = vec![];
            for name in ["user", "org", "region", "all"] {
                let strategy = *rng.choice(Strategy::ALL).unwrap();
                let quota = format!("{}/100d", rng.u32(5..60));
                lists.push(Policies::from(
                    Policy::new(name, strategy, &*quota).unwrap(),
                ));
            }
            let keys = [0, 1, 2].map(|_| Key::from(rng.u64(..)));
            let mut checks = vec![];
            for _ in 0..40 {
                let mut parts = vec![];
                for (place, list) in lists.iter().enumerate() {
                    parts.push(((place, rng.usize(..3)), list));
                }
                rng.shuffle(&mut parts);
                parts.truncate(rng.usize(1..=4));
                let counted: Vec<(usize, usize)> = parts.iter().map(|(place, _)| *place).collect();
                let parts = parts.into_iter().map(|((_, key), list)| (keys[key], list));
                let id = (rng.u8(..4) == 0).then(|| Key::from(rng.u64(..4)));
                let joint = JointCheck::take(parts, rng.u32(..5)).unwrap();
                let joint = joint.with_key_as_id(id);
                let start = Duration::from_millis(rng.u64(..300));
                let way = ways[(seed % 2) as usize];
                let store = store.clone();
                checks.push(async move {
                    sleep(start).await;
                    (counted, way(&store, joint).await)
                });
            }
            let mut sums = [[0; 3]; 4];
            for (counted, decided) in join_all(checks).await {
                match decided {
                    Err(_) => failed += 1,
                    Ok(decided) if decided.decision().is_repeated() => repeated += 1,
                    Ok(decided) if !decided.decision().is_allowed() => {
                        denied += 1;
                        assert_eq!(decided.decision().granted(), 0);
                    }
                    Ok(decided) => {
                        granted += 1;
                        for (place, key) in counted {
                            sums[place][key] += decided.decision().granted();
                        }
                    }
                }
            }
            // Refunds and ids arrive.
            sleep(Duration::from_secs(1)).await;
            for (list, sums) in lists.iter().zip(sums) {
                for (key, sum) in keys.iter().zip(sums) {
                    let peek = Check::peek(*key, list, 0);
                    let used = store.counts.check(peek).await.unwrap().used();
                    assert_eq!(used, sum, "seed {seed}, {list:?}");
                }
            }
        }
        let least = denied.min(failed).min(repeated);
        assert!(
            granted > 3_000 && least > 60,
            "{granted} granted, {denied} denied, {failed} failed, {repeated} repeated"
        );
    }
}
