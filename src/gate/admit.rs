//! From a request to its admission.
//!
//! The methods of [`Gate`] for one request are here, apart from those that configure it.

use std::borrow::Cow;

use super::wait::{QueuedRequest, Waiting};
use super::{
    Gate, Grant, Holds, KeyExtractor, MissingKey, OnError, OnMissingKey, Pending, Question,
};
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Check, Decision, Key, Policies, RateLimited};
use crate::observe::mistakes::IN_FLIGHT_WITHOUT_END;
use crate::store::{Answer, Store};
use crate::util::instant;
use crate::wait_queues::{self, Permit, Spent};

/// The admission of a request, as far as it is known.
pub(crate) enum Admission<D> {
    /// It passes: by a decision, or uncounted.
    Pass(Grant<D>, Option<Decision>),
    Refuse(Refusal),
    /// The check is under way, or the request waits for its turn.
    Undecided(Pending<D>),
}

/// Whether a request passes: what it holds from here on, and the decision if it was counted.
pub(crate) type Admitted<D> = Result<(Grant<D>, Option<Decision>), Refusal>;

/// What follows when the store has answered.
#[allow(
    clippy::large_enum_variant,
    reason = "it stays on the stack, and most requests do not wait"
)]
pub(super) enum Next<D> {
    Admitted(Admitted<D>),
    /// It waits for its turn.
    Wait(Box<QueuedRequest>),
}

/// Why a request does not pass.
#[derive(Debug)]
pub enum Refusal {
    Denied(Decision),
    /// No store could decide.
    Unavailable(StoreError),
    MissingKey(MissingKey),
}

/// The problem of a layer with a policy of requests in flight that does not know when a request ends.
pub(super) const NEVER_ENDS: &str = "a policy that counts requests in flight cannot hold, since the layer does not know when they end: add `.until_body_end()` to it";

impl<S: Store, R: 'static> Gate<S, R> {
    /// Finds the key and the policies, and sends the check.
    #[inline]
    pub(crate) fn admit(
        &self,
        extractor: &impl KeyExtractor<R>,
        request: &R,
    ) -> Admission<S::Future> {
        if self.skip.as_ref().is_some_and(|skip| skip(request)) {
            return self.uncounted(request, None);
        }
        let key = extractor.extract(request);
        if self.dry_run {
            return self.exempt(request, key);
        }
        let Some(policies) = self.policies.find(request, key.as_ref().ok()) else {
            return self.exempt(request, key);
        };
        let key = match key {
            Ok(key) => key,
            Err(missing) => return self.admit_without_key(request, missing),
        };
        let Some(policies) = self.countable(policies) else {
            return self.exempt(request, Ok(key));
        };
        let check = self.check(key, &policies, request);
        let mut question = self.question(&check);
        if let Some(wait) = &self.wait
            && wait.queues.has_line(&key, &policies, check.cost())
        {
            let policies = policies.into_owned();
            let next = self.wait_for(request, &mut question, wait, policies, None);
            return next.admission(question);
        }
        question.hold(self.hold(&check));
        match self.notifier.send(&self.store, check) {
            Answer::Ready { answer } => self
                .answered(request, &mut question, answer)
                .admission(question),
            Answer::Pending { future } => Admission::Undecided(Pending::asked(future, question)),
        }
    }

    /// The policies that this layer can count: all, unless it does not know when a request ends.
    #[inline]
    pub(super) fn countable<'a>(&self, policies: Cow<'a, Policies>) -> Option<Cow<'a, Policies>> {
        if self.holds == Holds::Nothing && policies.in_flight().is_some() {
            self.notifier
                .misconfigured(format_args!("{NEVER_ENDS}{IN_FLIGHT_WITHOUT_END}"));
            return policies.without_in_flight().cloned().map(Cow::Owned);
        }
        Some(policies)
    }

    pub(super) fn check(&self, key: Key, policies: &Policies, request: &R) -> Check {
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request, policies));
        let check = Check::take(key, policies, cost).reserving(self.settles());
        match self.id.as_ref().and_then(|id| id(request)) {
            Some(id) => check.identified(id),
            None => check,
        }
    }

    /// Notes the time, if there is an observer to be notified, or something to settle.
    pub(super) fn question(&self, check: &Check) -> Question {
        let since = if self.settles() {
            Some(instant())
        } else {
            self.notifier.since()
        };
        Question::new(*check.key(), check.cost(), since)
    }

    /// The slot that the check takes, before it is sent.
    #[inline]
    pub(super) fn hold(&self, check: &Check) -> Option<Slot> {
        if self.holds == Holds::Nothing {
            None
        } else {
            self.in_flight.hold(check)
        }
    }

    /// Admission by the store's answer.
    #[inline]
    pub(super) fn answered(
        &self,
        request: &R,
        question: &mut Question,
        answer: Result<Decision, StoreError>,
    ) -> Next<S::Future> {
        question.answered(&answer);
        match (answer, &self.wait) {
            (Ok(denied), Some(wait)) if denied.retry_after().is_some() => {
                let policies = denied.policies().whole();
                // A denial without a reply of Redis may have taken it; the queue takes another one.
                question.hold(None);
                self.wait_for(request, question, wait, policies, Some(denied))
            }
            (answer, _) => Next::Admitted(self.conclude(request, question, answer)),
        }
    }

    /// Admission of a request that waits, if there is a place for it. `denied` is what the store has said, if it was asked.
    fn wait_for(
        &self,
        request: &R,
        question: &mut Question,
        wait: &Waiting,
        policies: Policies,
        denied: Option<Decision>,
    ) -> Next<S::Future> {
        let wanted = wait.request(question, policies.clone());
        match wait.queues.join(wanted, denied) {
            Ok(turn) => Next::Wait(Box::new(QueuedRequest {
                turn,
                policies,
                permit: None,
            })),
            Err(refusal) => {
                Next::Admitted(self.conclude_turn(request, question, &policies, Err(refusal)))
            }
        }
    }

    /// Admission of a request whose turn has come, or will not come in time.
    pub(super) fn conclude_turn(
        &self,
        request: &R,
        question: &mut Question,
        policies: &Policies,
        turn: Result<Permit, wait_queues::Refusal>,
    ) -> Admitted<S::Future> {
        let answer = match turn {
            Ok(permit) => {
                let Spent {
                    decision,
                    taken,
                    slot,
                } = permit.spend();
                question.spend(Some(taken), slot);
                Ok(decision)
            }
            Err(refusal) => refusal.into_answer(),
        };
        if answer.is_err() {
            // It may pass although no store has counted it.
            question.hold(self.hold(&Check::take(*question.key(), policies, question.cost())));
            question.answered(&answer);
        }
        self.conclude(request, question, answer)
    }

    /// Admission of a request that no longer waits.
    #[inline]
    fn conclude(
        &self,
        request: &R,
        question: &mut Question,
        answer: Result<Decision, StoreError>,
    ) -> Admitted<S::Future> {
        self.notifier
            .answered(question.key(), question, &answer, false);
        match answer {
            Ok(decision) if decision.is_allowed() => Ok((
                self.pass(request, question, Some(&decision)),
                Some(decision),
            )),
            Ok(decision) => Err(Refusal::Denied(decision)),
            Err(error) => match self.on_error {
                OnError::Allow => Ok((self.pass(request, question, None), None)),
                OnError::Reject => Err(Refusal::Unavailable(error)),
            },
        }
    }

    #[inline]
    fn pass(
        &self,
        request: &R,
        question: &mut Question,
        decision: Option<&Decision>,
    ) -> Grant<S::Future> {
        let slot = question.take_slot();
        let slot = if decision.is_some() {
            slot
        } else {
            slot.map(Slot::passed)
        };
        self.grant(request, Some(question.key()), slot, || {
            question.reserved(decision?)
        })
    }

    /// Admission of an unlimited request.
    fn exempt(&self, request: &R, key: Result<Key, MissingKey>) -> Admission<S::Future> {
        if let Err(missing) = &key
            && self.has_shadows()
        {
            self.notifier.missing(missing);
        }
        self.uncounted(request, key.as_ref().ok())
    }

    /// Admission of a request without a key.
    fn admit_without_key(&self, request: &R, missing: MissingKey) -> Admission<S::Future> {
        self.notifier.missing(&missing);
        match self.on_missing_key {
            OnMissingKey::Allow if missing.is_absent() => self.uncounted(request, None),
            _ => Admission::Refuse(Refusal::MissingKey(missing)),
        }
    }

    fn uncounted(&self, request: &R, key: Option<&Key>) -> Admission<S::Future> {
        Admission::Pass(self.grant(request, key, None, || None), None)
    }
}

impl<D> Next<D> {
    #[inline]
    fn admission(self, question: Question) -> Admission<D> {
        match self {
            Self::Admitted(Ok((grant, decision))) => Admission::Pass(grant, decision),
            Self::Admitted(Err(refusal)) => Admission::Refuse(refusal),
            Self::Wait(request) => Admission::Undecided(Pending::queued(request, question)),
        }
    }
}

impl From<Refusal> for Box<dyn std::error::Error + Send + Sync> {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Denied(decision) => RateLimited::new(decision).into(),
            Refusal::Unavailable(error) => error.into(),
            Refusal::MissingKey(missing) => missing.into(),
        }
    }
}
