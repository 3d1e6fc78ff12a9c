//! A check of several keys of one partition: decided by the primary store in one step until the deadline, and then key by
//! key by the fallback.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use super::check::{FallbackFuture, GRACES, Partition, SentToPrimary};
use crate::error::StoreError;
use crate::limit::{Check, Decision, JointCheck, JointDecision, Mode, Source};
use crate::store::joint::repetition;
use crate::store::{Answer, JointFuture, Store};
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
        // Peek first, since a grant in doubt is never refunded.
        let mut looks = vec![];
        for check in joint.parts() {
            let look = check.clone().with_mode(Mode::Peek);
            looks.push(Some(self.decide_locally(look, in_doubt).await?));
        }
        if !looks.iter().flatten().all(Decision::is_allowed) {
            return Ok(joint.combine(looks));
        }
        let mut parts = vec![];
        let mut is_denied = false;
        for check in joint.parts() {
            let sent_at = instant();
            let decision = self.decide_locally(check.clone(), in_doubt).await?;
            // Another thread has taken the rest after the look.
            is_denied |= !decision.is_allowed();
            parts.push(Some(decision));
            if is_denied {
                for (check, decision) in joint.parts().iter().zip(parts.iter().flatten()) {
                    if decision.is_allowed() {
                        self.take_back(check, decision, sent_at.elapsed()).await;
                    }
                }
                break;
            }
        }
        if !is_denied {
            for record in joint.records() {
                let _recorded = self.decide_locally(record, in_doubt).await;
            }
        }
        Ok(joint.combine(parts))
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

    /// Refunds and releases the grant of a key in the fallback. The refund is lost if no account has the grant.
    async fn take_back(self: &Arc<Self>, check: &Check, decision: &Decision, age: Duration) {
        let key = *check.key();
        if let (Some(slot), Some(policies)) = (check.slot(), check.policies().in_flight()) {
            let _elsewhere = self
                .decide_locally(Check::release(key, policies, slot), false)
                .await;
        }
        if let Some(refund) = decision.refund(key, check.cost(), age) {
            let _refunded = self.decide_locally(refund, false).await;
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
