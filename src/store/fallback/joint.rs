//! A check of several keys of one partition: decided by the primary store in one step until the deadline, and then key by
//! key by the fallback.

use std::pin::{Pin, pin};
use std::sync::Arc;

use tokio::time::Instant;

use super::check::{FallbackFuture, GRACES, Partition, SentToPrimary};
use crate::error::StoreError;
use crate::limit::{Check, Decision, JointCheck, JointDecision, Mode, Source};
use crate::store::joint::repetition;
use crate::store::{Answer, JointFuture, SettledCost, Store};
use crate::util::{NoOutput, Patient, instant, patient};

/// Reports the outcome of a check to the breaker, also if the check is dropped.
struct PendingJoint<P: Store, F: Store> {
    partition: Arc<Partition<P, F>>,
    /// `None` once it is reported.
    sent: Option<SentToPrimary>,
}

impl<P: Store, F: Store> Drop for PendingJoint<P, F> {
    fn drop(&mut self) {
        if let Some(sent) = self.sent {
            self.partition.abandon(sent);
        }
    }
}

impl<P: Store, F: Store> Partition<P, F> {
    /// Sends a check of several keys of this partition to the primary store, unless the fallback must decide it.
    pub(super) fn check_all(self: &Arc<Self>, joint: JointCheck) -> JointFuture {
        let partition = Arc::clone(self);
        let Some(sent) = self.admit(joint.first()) else {
            return JointFuture::begun(async move { partition.fall_back_all(&joint, false).await });
        };
        // Sent by this call, as a check of one key is.
        let reply = self.primary.check_all(joint.clone().timed());
        let waiting = patient(self.settings.deadline, GRACES, reply);
        let pending = PendingJoint {
            partition,
            sent: Some(sent),
        };
        JointFuture::pending(pending.wait(joint, waiting))
    }

    /// Handles the primary store's decision.
    fn joint_succeeded(
        self: &Arc<Self>,
        joint: &JointCheck,
        decided: &JointDecision,
        sent: SentToPrimary,
    ) {
        let whole = decided.decision();
        if whole.source() == Source::Cached {
            // A cached denial is no evidence about the store.
            return self.breaker.learned_nothing(sent.ticket);
        }
        self.breaker.succeeded(sent.ticket);
        if !self.accounts.is_empty() {
            self.start_recovery();
        }
        for (check, decision) in joint.parts().iter().zip(decided.parts()) {
            if let Some(decision) = decision {
                self.follow(check, decision, sent, whole.is_allowed());
            }
        }
    }

    /// Lets the fallback decide key by key. `in_doubt` is as in [`fall_back`](Self::fall_back).
    async fn fall_back_all(
        self: &Arc<Self>,
        joint: &JointCheck,
        in_doubt: bool,
    ) -> Result<JointDecision, StoreError> {
        if let Some(questions) = joint.questions() {
            let mut known = vec![];
            for question in questions {
                known.push(self.decide_locally(question, in_doubt).await);
            }
            if let Some(repeated) = repetition(joint, &known) {
                return Ok(repeated);
            }
        }
        // Peek first, since an unsure grant is never refunded.
        let mut looks = vec![];
        let mut is_denied = false;
        for check in joint.parts() {
            let look = check.clone().with_mode(Mode::Peek);
            let mut look = self.decide_locally(look, in_doubt).await?;
            if !look.is_allowed() {
                is_denied = true;
                look = self.deny_locally(check, look, in_doubt).await?;
            }
            looks.push(Some(look));
        }
        if is_denied {
            return Ok(joint.combine(looks));
        }
        let mut taken = vec![];
        let mut last = None;
        for check in joint.parts() {
            let sent_at = instant();
            match self.decide_locally(check.clone(), in_doubt).await {
                Ok(decision) if decision.is_allowed() => taken.push((decision, sent_at)),
                // Another thread has taken the rest after the look, or the application's store has failed.
                reply => {
                    last = Some(reply);
                    break;
                }
            }
        }
        let mut parts = vec![];
        let Some(last) = last else {
            for record in joint.records() {
                let _recorded = self.decide_locally(record, in_doubt).await;
            }
            for (decision, _) in taken {
                parts.push(Some(decision));
            }
            return Ok(joint.combine(parts));
        };
        for (check, (decision, sent_at)) in joint.parts().iter().zip(taken) {
            self.refund_locally(check, &decision, sent_at).await;
            // After an error, the owner of the slots releases them.
            if last.is_ok() {
                self.release_locally(check).await;
            }
            parts.push(Some(SettledCost::undo(decision, check.cost())));
        }
        parts.push(Some(last.map_err(StoreError::maybe_sent)?));
        parts.extend(looks.drain(parts.len()..));
        Ok(joint.combine(parts))
    }

    /// Takes under policies that have denied a look, so that a faster quota becomes the writer of its bucket: a look
    /// writes nothing. Returns the denial.
    async fn deny_locally(
        self: &Arc<Self>,
        check: &Check,
        look: Decision,
        in_doubt: bool,
    ) -> Result<Decision, StoreError> {
        let sent_at = instant();
        let decision = self.decide_locally(check.clone(), in_doubt).await?;
        if !decision.is_allowed() {
            return Ok(decision);
        }
        // Another thread has made room since the look. The request is denied nevertheless.
        self.refund_locally(check, &decision, sent_at).await;
        self.release_locally(check).await;
        Ok(look)
    }

    /// Decides one check in the fallback.
    async fn decide_locally(
        self: &Arc<Self>,
        check: Check,
        in_doubt: bool,
    ) -> Result<Decision, StoreError> {
        match self.fall_back(&check, in_doubt) {
            Answer::Ready { answer } => answer,
            Answer::Pending { future: step } => FallbackFuture::new(Arc::clone(self), step).await,
        }
    }

    /// Refunds the grant of a key in the fallback. The refund is lost if no account has the grant.
    async fn refund_locally(
        self: &Arc<Self>,
        check: &Check,
        decision: &Decision,
        sent_at: Instant,
    ) {
        if let Some(refund) = decision.refund(*check.key(), check.cost(), sent_at.elapsed()) {
            let _refunded = self.decide_locally(refund, false).await;
        }
    }

    /// Releases the slot of a check in the fallback.
    async fn release_locally(self: &Arc<Self>, check: &Check) {
        if let (Some(slot), Some(policies)) = (check.slot(), check.policies().in_flight()) {
            let release = Check::release(*check.key(), policies, slot);
            let _elsewhere = self.decide_locally(release, false).await;
        }
    }
}

impl<P: Store, F: Store> PendingJoint<P, F> {
    async fn wait(
        mut self,
        joint: JointCheck,
        waiting: Patient<JointFuture>,
    ) -> Result<JointDecision, StoreError> {
        let mut waiting = pin!(waiting);
        let reply = waiting.as_mut().await;
        let partition = Arc::clone(&self.partition);
        if let Some(by) = waiting.late_by() {
            partition.report_late(by, matches!(reply, Err(NoOutput::RuntimeLate)));
        }
        let Some(sent) = self.sent.take() else {
            return partition.fall_back_all(&joint, true).await;
        };
        let error = match reply {
            Ok(Ok(decided)) => {
                partition.joint_succeeded(&joint, &decided, sent);
                return Ok(decided);
            }
            Ok(Err(error)) => {
                partition.failed(joint.first(), &error, sent);
                error
            }
            Err(notice) => {
                let mut error = partition.timed_out(joint.first().key());
                if Pin::get_mut(waiting.future()).withdraw() {
                    error = error.not_sent();
                }
                match notice {
                    NoOutput::TimeUp => partition.failed(joint.first(), &error, sent),
                    NoOutput::RuntimeLate => partition.abandon(sent),
                }
                error
            }
        };
        partition.fall_back_all(&joint, !error.is_not_sent()).await
    }
}
