//! Admission: decides whether a request of any type may proceed. This file has the whole path of a
//! request:
//!
//! 1. [`Gate::admit`] extracts the key ([`KeyExtractor`]), selects the policies
//!    ([`PolicySelector`]) and sends the check. A request that is skipped or has no policies is
//!    admitted uncounted.
//! 2. Until the store has replied, and while the request waits in a queue, it is [`Pending`].
//! 3. An admitted request owns a [`Grant`]. Dropping it settles the charge and releases the
//!    in-flight slot.
//! 4. A rejected request yields a [`Refusal`], which becomes an HTTP response or the error of a
//!    call.
//!
//! | file | contents |
//! |---|---|
//! | `extract`, `missing` | the key of a request, or the reason for a missing key |
//! | `select` | what finds the policies of a request |
//! | `joint` | requests with several keys, which are allowed together or not at all |
//! | `blocking` | blocked callers, and the denials that block them |
//! | `settings` | the plain settings of a layer, such as [`OnError`] |
//! | `wait` | how long requests wait in a queue instead of being denied |
//! | `shadows` | checks that are not enforced |
//! | `notifier` | reports of decisions and misconfigurations to the observer |
//!
//! The tests use it through the layers: `tests/layer`, `tests/policies`, `tests/calls`, `tests/waiting` and the other features.
//!
//! **Dry runs and shadows** never reject. [`Gate::try_shadows`] sends their checks after the
//! request is admitted. The checks run concurrently with the inner call, and belong to the grant. A
//! shadow is checked in addition to the enforced policies, under a separate key. In a dry run the
//! layer's own policies are checked only in this way, under the caller's key.

mod blocking;
mod extract;
mod joint;
mod missing;
mod notifier;
mod select;
mod settings;
mod shadows;
pub mod wait;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::request::Parts;
use pin_project_lite::pin_project;
use tokio::time::Instant;

pub use extract::{Global, KeyExtractor, Or, key_fn};
pub use missing::{MissingKey, OnMissingKey};
pub use select::{PolicySelector, policies_fn};
pub use settings::OnError;
pub(crate) use wait::Wait;

pub(crate) use blocking::{Blocking, denial};
pub(crate) use notifier::Notifier;
pub(crate) use settings::Enforcement;

use self::blocking::KeyOf;
use self::joint::{JointQuestion, OtherKey};
use self::settings::Settings;
use self::shadows::Shadows;
use crate::background::{OpQueue, PendingOp};
use crate::error::StoreError;
use crate::held_slots::{InFlightTracker, Slot};
use crate::limit::{
    BlockAfter, Charge, Check, Decision, Extra, Key, KeyForms, Mode, Policies, RateLimited,
};
use crate::observe::Observer;
use crate::observe::UncountedReason;
use crate::observe::mistakes::IN_FLIGHT_WITHOUT_END;
use crate::settle::{RequestCost, Settlement};
use crate::store::{Answer, JointFuture, Store};
use crate::util::{instant, own_list, polled_after_completion};
use crate::wait_queues::{Acquire, NoPermit, Permit, Spent, WaitQueues};
use crate::waiters::Waiters;

/// Decides the requests of the type `R` of a layer.
pub(crate) struct Gate<S, R> {
    store: S,
    /// The waiters of the store, which list the layers over it. `None` if the store has no waiters.
    waiters: Option<Waiters>,
    policies: Selector<R>,
    /// Further keys, which must allow a request too.
    others: Vec<OtherKey<R>>,
    pub(crate) settings: Settings<R>,
    /// How long requests wait instead of being denied, and in which queues. `None` if requests do
    /// not wait.
    wait: Option<(Duration, WaitQueues)>,
    pub(crate) notifier: Notifier,
    holds: Holds,
    /// Tracks requests in flight, including queued ones.
    in_flight: InFlightTracker,
    ops: OpQueue,
}

/// The policies of requests, in the form that a layer keeps.
pub(crate) enum Selector<R = Parts> {
    Fixed(Policies),
    ByRequest(Arc<dyn PolicySelector<R>>),
}

/// The resources that a request owns until it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// None: this layer does not see requests end.
    Nothing,
    /// Its in-flight slot.
    InFlight,
    /// Its in-flight slot, and its reservation, which is settled at the end.
    Charge,
}

/// The state of a request's admission.
pub(crate) enum Admission<D> {
    /// The request passes, with the resources that it owns.
    Granted(Grant<D>),
    Refused(Refusal),
    /// The check is in progress, or the request waits for its turn.
    Undecided(Pending<D>),
}

/// Why a request does not pass.
pub(crate) enum Refusal {
    Denied(Decision),
    /// No store could decide.
    Unavailable(StoreError),
    MissingKey(MissingKey),
}

/// The problem of a layer that does not see requests end, and has a policy of requests in flight.
const NEVER_ENDS: &str = "a policy that counts requests in flight cannot hold, since the layer does not know when they end: add `.until_body_end()` to it";

/// The settings.
impl<S: Store, R: 'static> Gate<S, R> {
    pub(crate) fn new(store: S, policies: impl PolicySelector<R>, holds: Holds) -> Self {
        let in_flight = InFlightTracker::new(&store, None);
        Self {
            waiters: store.backend().waiters(),
            store,
            policies: Selector::new(policies),
            others: vec![],
            settings: Settings::default(),
            wait: None,
            notifier: Notifier::default(),
            holds,
            ops: in_flight.ops().clone(),
            in_flight,
        }
    }

    /// Makes requests wait that would be denied.
    pub(crate) fn wait(&mut self, wait: Wait) {
        let queues = WaitQueues::new(self.store.clone(), wait.bounds);
        self.wait = Some((wait.max, queues.with_tracker(self.in_flight.clone())));
    }

    pub(crate) fn observe(&mut self, observer: Arc<dyn Observer>) {
        self.store.backend().observe(&observer);
        for selector in self.settings.shadows.iter().chain([&self.policies]) {
            selector.observe(&observer);
        }
        for other in &self.others {
            other.observe(&observer);
        }
        // The tracker first: its operation queue reports to the observer, and the rest uses that queue.
        self.in_flight = InFlightTracker::new(&self.store, Some(Arc::clone(&observer)));
        self.ops = self.in_flight.ops().clone();
        if let Some((_, queues)) = &mut self.wait {
            *queues = queues.with_tracker(self.in_flight.clone());
        }
        self.notifier = Notifier::new(observer);
    }
}

impl<S, R> Gate<S, R> {
    /// Adds policies that are checked but not enforced.
    pub(crate) fn shadow(&mut self, policies: impl PolicySelector<R>)
    where
        R: 'static,
    {
        let selector = Selector::new(policies);
        if let Some(observer) = self.notifier.observer() {
            selector.observe(observer);
        }
        self.settings.shadows.push(selector);
    }

    /// Enforces blocks, which `rule` begins. `key_of` returns the blocked key; `None` for the counted key.
    pub(crate) fn block(&mut self, rule: Option<BlockAfter>, key_of: Option<Arc<KeyOf<R>>>)
    where
        S: Store,
    {
        let blocking = Blocking::new(&self.store, rule);
        self.settings.blocking = Some(match key_of {
            Some(key_of) => blocking.by(key_of),
            None => blocking,
        });
        if self.settings.enforcement != Enforcement::DryRun {
            self.settings.enforcement = Enforcement::WithBlocks;
        }
    }

    /// Returns `true` if the layer rejects nothing.
    fn is_dry_run(&self) -> bool {
        self.settings.enforcement == Enforcement::DryRun
    }

    /// Enables settlement of the requests' reservations.
    pub(crate) fn settle(&mut self) {
        self.holds = Holds::Charge;
    }

    #[inline]
    fn settles(&self) -> bool {
        self.holds == Holds::Charge
    }

    /// Returns `true` if the layer has checks that are not enforced. Most layers have none.
    fn has_shadows(&self) -> bool {
        self.is_dry_run() || !self.settings.shadows.is_empty()
    }

    /// Checks that this layer can enforce the policies that are set at startup.
    ///
    /// # Panics
    ///
    /// If the layer does not see requests end, and a policy limits requests in flight; if the policies of several keys do
    /// not fit together, or their requests wait. Failing at startup is better than running without that limit until
    /// someone reads the log.
    pub(crate) fn assert_countable(&self)
    where
        R: 'static,
    {
        self.assert_joint();
        let others = self.others.iter().map(|other| &other.policies);
        let shadows = self.settings.shadows.iter();
        for selector in shadows.chain([&self.policies]).chain(others) {
            let in_flight =
                matches!(selector, Selector::Fixed(policies) if policies.in_flight().is_some());
            assert!(
                self.holds != Holds::Nothing || !in_flight,
                "{NEVER_ENDS}{IN_FLIGHT_WITHOUT_END}"
            );
        }
    }

    /// Reports a fixed policy if another layer sets another limit for its count.
    pub(crate) fn report_shared_count(&self)
    where
        R: 'static,
    {
        if let (Some(Ok(policies)), Some(waiters)) = (self.fixed_policies(), &self.waiters) {
            self.notifier
                .shared_count(|| Some(waiters.clone()), &policies);
        }
    }
}

/// The path of a request.
impl<S: Store, R: 'static> Gate<S, R> {
    /// Finds the key and the policies, and sends the check.
    #[inline]
    pub(crate) fn admit(
        &self,
        extractor: &impl KeyExtractor<R>,
        request: &R,
    ) -> Admission<S::Future> {
        if let Some(skip) = &self.settings.skip
            && skip(request)
        {
            self.notifier.uncounted(UncountedReason::Skipped, true);
            return self.uncounted(request, None);
        }
        if self.notifier.examines_requests() {
            self.examine(extractor, request);
        }
        let extracted = extractor.extract(request);
        match self.settings.enforcement {
            Enforcement::Plain => {}
            Enforcement::SeveralKeys => {
                let selected = self.policies.find(request, extracted.as_ref().ok());
                return self.admit_all(request, extracted, selected);
            }
            Enforcement::WithBlocks => return self.admit_unless_blocked(request, extracted),
            Enforcement::DryRun if !self.others.is_empty() => {
                return self.dry_run_all(request, extracted);
            }
            Enforcement::DryRun => return self.exempt(request, &extracted),
        }
        // Before the key is required: the selector may exempt a request without a key.
        let selected = self.policies.find(request, extracted.as_ref().ok());
        self.admit_under(request, &extracted, selected)
    }

    /// Denies a blocked caller, and admits others as usual.
    #[inline(never)]
    fn admit_unless_blocked(
        &self,
        request: &R,
        extracted: Result<Key, MissingKey>,
    ) -> Admission<S::Future> {
        let selected = self.policies.find(request, extracted.as_ref().ok());
        // Also starts the task again if its runtime has shut down.
        self.store.backend().sync_blocks();
        if let (Some(policies), Ok(key)) = (&selected, &extracted)
            && let Some(blocking) = &self.settings.blocking
            && let Some(rest) = blocking.rest(request, key, policies)
        {
            if self.settings.extends_blocks {
                blocking.extend(request, key, policies, rest);
            }
            return self.deny_blocked(request, *key, policies, Some(rest));
        }
        if self.others.is_empty() {
            self.admit_under(request, &extracted, selected)
        } else {
            self.admit_all(request, extracted, selected)
        }
    }

    /// Denies a request without a check: its caller is blocked for `rest`, or its policies are
    /// [blocked](Policies::blocked).
    #[cold]
    fn deny_blocked(
        &self,
        request: &R,
        key: Key,
        policies: &Policies,
        rest: Option<Duration>,
    ) -> Admission<S::Future> {
        let question = self.question(key, policies.clone(), request, None);
        let denied = denial(&question.check, rest, self.settings.forbids_blocked);
        self.deny(&question, denied)
    }

    /// Sends the check under the policies of a request, if it has any.
    #[inline(always)]
    fn admit_under(
        &self,
        request: &R,
        extracted: &Result<Key, MissingKey>,
        selected: Option<Policies>,
    ) -> Admission<S::Future> {
        let Some(selected) = selected else {
            return self.exempt(request, extracted);
        };
        if selected.are_blocked() {
            // Also without a key, which may be optional.
            let key = extracted.as_ref().unwrap_or(&Key::GLOBAL);
            return self.deny_blocked(request, *key, &selected, None);
        }
        let key = match extracted {
            Ok(key) => *key,
            Err(missing) => return self.admit_without_key(request, missing),
        };
        let Some(policies) = self.countable(selected) else {
            return self.exempt(request, extracted);
        };
        let id = self.id(request);
        let mut question = self.question(key, policies, request, id);
        if let Some((max, queues)) = &self.wait
            && queues.has_queue(&question.check)
        {
            if id.is_none() {
                return self.wait_for(request, question, (*max, queues), None);
            }
            // Only the store knows whether the id repeats an earlier one.
            question.turn = Turn::OnlyIfRepeated;
        }
        // Before the check is sent: a request that is dropped before the reply must release its slot.
        question.slot = self.hold(&question.check);
        self.notifier.examine_lease(&self.store, &question.check);
        match self.store.check(question.sent()) {
            Answer::Ready { answer } => self.on_reply(request, &mut question, answer),
            Answer::Pending { future } => {
                let question = Some(question);
                Admission::Undecided(Pending::Asked { future, question })
            }
        }
    }

    /// Looks for the mistakes that one of the first requests shows: in the order of layers, the trusted proxies, and the
    /// keys of callers.
    #[cold]
    fn examine(&self, extractor: &impl KeyExtractor<R>, request: &R) {
        if self.notifier.examined() {
            let forms = extractor.forms();
            if let Some(caller) = self.policies.caller_without(forms) {
                self.notifier.impossible_caller(&caller, forms);
            }
            for other in &self.others {
                let forms = other.extractor().forms();
                if let Some(caller) = other.policies.caller_without(forms) {
                    self.notifier.impossible_caller(&caller, forms);
                }
            }
        }
        extractor.examine(request, &self.notifier);
        for other in &self.others {
            other.extractor().examine(request, &self.notifier);
        }
    }

    /// Returns the policies that this layer can count: all, unless it does not see requests end.
    #[inline]
    fn countable(&self, policies: Policies) -> Option<Policies> {
        if self.holds == Holds::Nothing && policies.in_flight().is_some() {
            self.notifier
                .misconfigured(format_args!("{NEVER_ENDS}{IN_FLIGHT_WITHOUT_END}"));
            return policies.without_in_flight().cloned();
        }
        Some(policies)
    }

    #[inline(always)]
    fn question(&self, key: Key, policies: Policies, request: &R, id: Option<Key>) -> Question {
        let cost = self.cost(request, &policies);
        let extra = match id {
            Some(id) => Some(Extra::Id(id)),
            // A block cannot be settled.
            None if self.settles() && policies.have_lease() => Some(Extra::Unleased),
            None => None,
        };
        Question {
            check: Check::take_with(key, policies, cost, extra),
            since: self.since(),
            turn: Turn::Next,
            slot: None,
        }
    }

    /// Returns the cost of a request under these policies.
    #[inline]
    fn cost(&self, request: &R, policies: &Policies) -> u32 {
        match &self.settings.cost {
            Some(cost_of) => self.noticed(cost_of(request, policies), policies),
            None => 1,
        }
    }

    /// Notices that requests are never charged. A settled one may be charged later, and a request in flight counts
    /// without a cost.
    #[inline]
    fn noticed(&self, cost: u32, policies: &Policies) -> u32 {
        if !self.settles() && policies.in_flight().is_none() {
            self.notifier.costs(cost);
        }
        cost
    }

    /// Call it once for a request: a random id is another one each time.
    #[inline]
    fn id(&self, request: &R) -> Option<Key> {
        let id_of = self.settings.id.as_ref()?;
        let id = id_of(request)?;
        self.notifier.has_id(&id);
        Some(id)
    }

    /// Returns the send time if an observer needs the duration, or if the charge will be settled.
    #[inline]
    fn since(&self) -> Option<Instant> {
        if self.settles() {
            Some(instant())
        } else {
            self.notifier.since()
        }
    }

    /// Creates the in-flight slot that the check takes. Call it before the check is sent.
    #[inline]
    fn hold(&self, check: &Check) -> Option<Slot> {
        if self.holds == Holds::Nothing {
            None
        } else {
            self.in_flight.track(check)
        }
    }

    /// Admits or rejects a request by the store's reply. If the layer has queues, a denied request
    /// waits.
    #[inline(always)]
    fn on_reply(
        &self,
        request: &R,
        question: &mut Question,
        answer: Result<Decision, StoreError>,
    ) -> Admission<S::Future> {
        question.pass_to_slot(&answer);
        if let Some((max, queues)) = &self.wait
            && let Ok(decision) = &answer
            && question.must_queue(decision)
        {
            let denied = match question.turn {
                Turn::Next => Some(decision.clone()),
                // It was a peek.
                Turn::OnlyIfRepeated => None,
            };
            let question = question.without_slot();
            return self.wait_for(request, question, (*max, queues), denied);
        }
        self.conclude(request, question, None, answer)
    }

    /// Puts a request into its queue, or concludes it if the queue refuses it: the queue is full,
    /// or the turn is certain to be too late. `denied` is the denial of the store, if the request
    /// was checked.
    #[cold]
    fn wait_for(
        &self,
        request: &R,
        question: Question,
        (max, queues): (Duration, &WaitQueues),
        denied: Option<Decision>,
    ) -> Admission<S::Future> {
        let mut within = max;
        if let Some(wait_of) = self.settings.client_wait
            && let Some(wait) = wait_of(request)
        {
            within = within.min(wait);
        }
        let deadline = instant().checked_add(within);
        match queues.join(&question.check, deadline, denied) {
            Ok(acquire) => Admission::Undecided(Pending::Queued {
                acquire: Box::new(acquire),
                question: Some(question),
            }),
            Err(no_permit) => self.conclude_without_permit(request, question, no_permit),
        }
    }

    /// Admits a request whose turn has come.
    fn conclude_turn(
        &self,
        request: &R,
        mut question: Question,
        permit: Permit,
    ) -> Admission<S::Future> {
        let Spent {
            decision,
            charge,
            slot,
        } = permit.spend();
        question.slot = slot;
        let check = &question.check;
        if let Some(id) = check.id() {
            // The permit was charged without the id, since any waiter may get it.
            let record = Check::charge(*check.key(), check.policies(), 0)
                .with_extra(Extra::Recorded(*id, check.cost()));
            self.ops.put(PendingOp::of_check(record));
        }
        self.conclude(request, &mut question, Some(&charge), Ok(decision))
    }

    /// Concludes a request that gets no permit.
    fn conclude_without_permit(
        &self,
        request: &R,
        mut question: Question,
        no_permit: NoPermit,
    ) -> Admission<S::Future> {
        if let NoPermit::Full(denied) = no_permit {
            // The store may allow it, so this is no strike.
            return self.deny(&question, denied);
        }
        let answer = no_permit.into_answer();
        if answer.is_err() && self.settings.on_error.passes_undecided() {
            // The request passes uncounted. The renewals take its slot, a new one: the former may have been released.
            let check = &question.check;
            let take = Check::take(*check.key(), check.policies(), check.cost());
            question.slot = self.hold(&take);
            question.pass_to_slot(&answer);
        }
        self.conclude(request, &mut question, None, answer)
    }

    /// Rejects a request that the store has not denied, and notifies the observer.
    #[cold]
    fn deny(&self, question: &Question, denied: Decision) -> Admission<S::Future> {
        self.report(question, &Ok(denied.clone()));
        Admission::Refused(Refusal::Denied(denied))
    }

    /// Notifies the observer.
    fn report(&self, question: &Question, answer: &Result<Decision, StoreError>) {
        let Question { check, since, .. } = question;
        self.notifier
            .answered(check.key(), check.cost(), *since, answer, false);
    }

    /// Admits or rejects by the final decision, and notifies the observer. A request that has waited was `charged` by its
    /// permit.
    #[inline(always)]
    fn conclude(
        &self,
        request: &R,
        question: &mut Question,
        charged: Option<&Charge>,
        answer: Result<Decision, StoreError>,
    ) -> Admission<S::Future> {
        let is_allowed = matches!(&answer, Ok(decision) if decision.is_allowed());
        if self.notifier.notifies(is_allowed) {
            self.report(question, &answer);
        }
        match answer {
            Ok(decision) if is_allowed => {
                Admission::Granted(self.grant(request, question, charged, Some(decision)))
            }
            Ok(denied) => {
                if let Some(blocking) = &self.settings.blocking {
                    blocking.denied(request, question.check.key(), &denied, &self.ops);
                }
                Admission::Refused(Refusal::Denied(denied))
            }
            Err(error) => self.on_failure(request, question, error),
        }
    }

    /// Admits a request that no store could decide, uncounted, or rejects it.
    #[cold]
    fn on_failure(
        &self,
        request: &R,
        question: &mut Question,
        error: StoreError,
    ) -> Admission<S::Future> {
        if !self.settings.on_error.passes_undecided() {
            return Admission::Refused(Refusal::Unavailable(error));
        }
        self.notifier.uncounted(UncountedReason::Failed, true);
        if let Some(slot) = question.slot.take() {
            question.slot = Some(slot.admitted_after_error());
        }
        Admission::Granted(self.grant(request, question, None, None))
    }

    /// Returns what an admitted request owns.
    #[inline(always)]
    fn grant(
        &self,
        request: &R,
        question: &mut Question,
        charged: Option<&Charge>,
        decision: Option<Decision>,
    ) -> Grant<S::Future> {
        // The slot is held as long as the charge, which the handler may clone.
        let charge = if self.settles() || question.slot.is_some() {
            let reserved = match &decision {
                Some(decision) if self.settles() => question.reserved(charged, decision),
                _ => None,
            };
            Some(self.charge(reserved, question.slot.take()))
        } else {
            None
        };
        // Last, since the checks of shadows add their charges to that of the request.
        let shadows = if self.has_shadows() {
            let key = *question.check.key();
            Some(self.try_shadows(request, charge.as_ref(), key, question.id()))
        } else {
            None
        };
        Grant {
            decision,
            charge,
            shadows,
        }
    }

    /// Starts the checks of an admitted request that are not enforced.
    #[cold]
    fn try_shadows(
        &self,
        request: &R,
        charge: Option<&RequestCost>,
        key: Key,
        id: Option<Key>,
    ) -> Box<Shadows<S::Future>> {
        let mut shadows = Shadows::new(self, charge);
        shadows.try_each(self, request, key, id);
        Box::new(shadows)
    }

    #[inline(never)]
    fn charge(
        &self,
        reserved: impl IntoIterator<Item = Charge>,
        slots: impl IntoIterator<Item = Slot>,
    ) -> RequestCost {
        // Restart the sender if its runtime has shut down.
        self.ops.wake();
        RequestCost::new(self.ops.clone(), reserved, slots)
    }

    /// Admits a request that no policy limits, or any request in a dry run. Only the unenforced
    /// checks need its key.
    #[cold]
    fn exempt(&self, request: &R, key: &Result<Key, MissingKey>) -> Admission<S::Future> {
        if let Err(missing) = key
            && self.has_shadows()
        {
            self.notifier.missing(missing);
        }
        match key {
            // The decision of a dry run is reported.
            Ok(_) if self.is_dry_run() => {}
            Err(missing) if self.is_dry_run() => {
                self.notifier.uncounted(missing.reason(), true);
            }
            _ => self.notifier.uncounted(UncountedReason::Exempt, true),
        }
        self.uncounted(request, key.as_ref().ok().copied())
    }

    /// Admits or rejects a request without a key.
    #[cold]
    fn admit_without_key(&self, request: &R, missing: &MissingKey) -> Admission<S::Future> {
        self.notifier.missing(missing);
        let passes = self.settings.on_missing_key == OnMissingKey::Allow && missing.is_absent();
        self.notifier.uncounted(missing.reason(), passes);
        if passes {
            self.uncounted(request, None)
        } else {
            Admission::Refused(Refusal::MissingKey(missing.clone()))
        }
    }

    /// Admits a request without a check. If it has a key, starts the unenforced checks.
    #[cold]
    fn uncounted(&self, request: &R, key: Option<Key>) -> Admission<S::Future> {
        let mut grant = Grant::default();
        if self.settles() {
            grant.charge = Some(self.charge(None, None));
        }
        if let Some(key) = key
            && self.has_shadows()
        {
            let id = self.id(request);
            grant.shadows = Some(self.try_shadows(request, grant.charge.as_ref(), key, id));
        }
        Admission::Granted(grant)
    }
}

impl<R: 'static> Selector<R> {
    pub(crate) fn new(selector: impl PolicySelector<R>) -> Self {
        // Fixed policies cost a request no virtual call.
        match selector.fixed() {
            Some(policies) => Self::Fixed(policies),
            None => Self::ByRequest(Arc::new(selector)),
        }
    }

    /// Returns the policies of this request, like [`PolicySelector::policies`].
    #[inline]
    pub(crate) fn find(&self, request: &R, key: Option<&Key>) -> Option<Policies> {
        match self {
            Self::Fixed(policies) => Some(policies.clone()),
            Self::ByRequest(selector) => selector.policies(request, key),
        }
    }

    /// Returns the first caller with its own policies whose key is of none of these forms.
    pub(crate) fn caller_without(&self, forms: KeyForms) -> Option<String> {
        match self {
            Self::Fixed(_) => None,
            Self::ByRequest(selector) => selector.caller_without(forms),
        }
    }

    /// Passes an observer on.
    pub(crate) fn observe(&self, observer: &Arc<dyn Observer>) {
        if let Self::ByRequest(selector) = self {
            selector.observe(observer);
        }
    }
}

/// Creates a fresh `Arc` around fixed policies, to avoid contention.
impl<R> Clone for Selector<R> {
    fn clone(&self) -> Self {
        match self {
            Self::Fixed(policies) => Self::Fixed(own_list(policies)),
            Self::ByRequest(selector) => Self::ByRequest(Arc::clone(selector)),
        }
    }
}

impl<R> fmt::Debug for Selector<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(policies) => policies.fmt(f),
            Self::ByRequest(_) => f.write_str("by request"),
        }
    }
}

/// Creates fresh `Arc`s where requests clone them, to avoid contention: each thread uses a copy of a
/// layer's settings, see `util/copies.rs`. Any state that decides requests must be shared.
impl<S: Clone, R: 'static> Clone for Gate<S, R> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            waiters: self.waiters.clone(),
            policies: self.policies.clone(),
            others: self.others.clone(),
            settings: self.settings.clone(),
            wait: self.wait.clone(),
            notifier: self.notifier.clone(),
            holds: self.holds,
            in_flight: self.in_flight.clone(),
            ops: self.ops.copy(),
        }
    }
}

impl<S: fmt::Debug, R> Gate<S, R> {
    /// Formats the layer or service `name` that has these settings.
    pub(crate) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("store", &self.store)
            .field("policies", &self.policies)
            .finish_non_exhaustive()
    }
}

/// The check of a request, and the slot that the request owns until it is admitted.
struct Question {
    check: Check,
    /// Time at which the check was sent. `None` if it is not needed.
    since: Option<Instant>,
    turn: Turn,
    /// The slot under the policies that limit requests in flight. It exists before the check is
    /// sent.
    slot: Option<Slot>,
}

/// The turn of a request, if others may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// No other request waits: its turn is now.
    Next,
    /// Others wait, so it may pass them only if it repeats an id. Its check is a peek.
    OnlyIfRepeated,
}

impl Question {
    /// The check that is sent.
    #[inline(always)]
    fn sent(&self) -> Check {
        match self.turn {
            Turn::Next => self.check.clone(),
            Turn::OnlyIfRepeated => self.check.clone().with_mode(Mode::Peek),
        }
    }

    /// The question of a request that waits. Drops the slot, since the queue takes another one. If a fallback has denied the
    /// check after a lost reply, Redis may have granted the slot: dropping it releases it there.
    fn without_slot(&mut self) -> Self {
        self.slot = None;
        Self {
            check: self.check.clone(),
            slot: None,
            ..*self
        }
    }

    /// The id of the request. A check that takes a slot ignores it, but not the shadows.
    fn id(&self) -> Option<Key> {
        match self.check.extra() {
            Some(Extra::Id(id)) => Some(*id),
            _ => None,
        }
    }

    /// Returns `true` if the request waits after this decision, under a layer with queues.
    #[inline]
    fn must_queue(&self, decision: &Decision) -> bool {
        match self.turn {
            Turn::Next => decision.retry_after().is_some(),
            Turn::OnlyIfRepeated => !decision.is_repeated(),
        }
    }

    /// Passes the store's reply to the in-flight slot.
    #[inline]
    fn pass_to_slot(&mut self, answer: &Result<Decision, StoreError>) {
        if let Some(slot) = &mut self.slot {
            slot.on_reply(answer.as_ref());
        }
    }

    /// The reservation that the decision granted. `None` if the send time was not recorded, or if
    /// the decision repeats an earlier one: the first request under an id settles its charge.
    #[inline]
    fn reserved(&self, charged: Option<&Charge>, decision: &Decision) -> Option<Charge> {
        if decision.is_repeated() {
            return None;
        }
        if charged.is_some() {
            return charged.cloned();
        }
        let since = self.since?;
        let decision = decision.clone();
        let key = *self.check.key();
        let cost = self.check.cost();
        Some(Charge::new(key, decision, cost, since, instant()))
    }
}

pin_project! {
    /// A request that is not decided yet.
    #[project = PendingProj]
    pub(crate) enum Pending<D> {
        /// The check is in progress.
        Asked {
            #[pin]
            future: D,
            // `None` once the store has replied.
            question: Option<Question>,
        },
        /// The check of several keys is in progress.
        Joint {
            future: JointFuture,
            // `None` once the store has replied.
            question: Option<Box<JointQuestion>>,
        },
        /// The request waits for its turn.
        Queued {
            acquire: Box<Acquire>,
            // `None` once it is decided.
            question: Option<Question>,
        },
    }
}

impl<D> Pending<D> {
    /// Returns `true` if the request waits for its turn. Its service need not be ready.
    pub(crate) fn is_queued(&self) -> bool {
        matches!(self, Self::Queued { .. })
    }

    /// Resolves to whether the request passes, or has to wait for its turn. `is_ready` polls the service for readiness,
    /// once the turn of a request that [waits](Self::is_queued) has come: a turn is not spent before.
    ///
    /// # Errors
    ///
    /// The error of a service that does not become ready.
    ///
    /// It must not be polled again after it is ready.
    pub(crate) fn poll<S, R, E>(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        gate: &Gate<S, R>,
        request: &R,
        is_ready: impl FnMut(&mut Context<'_>) -> Poll<Result<(), E>>,
    ) -> Poll<Result<Admission<D>, E>>
    where
        D: Future<Output = Result<Decision, StoreError>>,
        S: Store<Future = D>,
        R: 'static,
    {
        if let PendingProj::Asked { future, question } = self.as_mut().project() {
            let answer = ready!(future.poll(cx));
            let Some(mut question) = question.take() else {
                polled_after_completion("Pending");
            };
            return Poll::Ready(Ok(gate.on_reply(request, &mut question, answer)));
        }
        if let PendingProj::Joint { future, question } = self.as_mut().project() {
            let answer = ready!(Pin::new(future).poll(cx));
            let Some(question) = question.take() else {
                polled_after_completion("Pending");
            };
            return Poll::Ready(Ok(gate.conclude_joint(request, *question, answer)));
        }
        let PendingProj::Queued { acquire, question } = self.project() else {
            polled_after_completion("Pending");
        };
        let turn = ready!(acquire.poll_with(cx, is_ready))?;
        let Some(question) = question.take() else {
            polled_after_completion("Pending");
        };
        Poll::Ready(Ok(match turn {
            Ok(permit) => gate.conclude_turn(request, question, permit),
            Err(no_permit) => gate.conclude_without_permit(request, question, no_permit),
        }))
    }
}

/// The resources of an admitted request. Dropping it settles the charge, unless a clone of the
/// [`RequestCost`] is alive (in the response body or the handler), and releases the in-flight slot.
pub(crate) struct Grant<D> {
    /// `None` for an uncounted request, and once it is [taken](Self::take_decision).
    decision: Option<Decision>,
    /// The reservation and the in-flight slot. `None` if there is neither.
    charge: Option<RequestCost>,
    /// The dry-run and shadow checks. `None` in most layers, which have no such policies.
    shadows: Option<Box<Shadows<D>>>,
}

impl<D> Grant<D> {
    /// The decision, for the handler. If the response `reports` it, the grant keeps one.
    #[inline]
    pub(crate) fn show_decision(&mut self, reports: bool) -> Option<Decision> {
        if reports {
            self.decision.clone()
        } else {
            self.decision.take()
        }
    }

    /// Moves the decision out of the grant, adjusted by the amounts that the handler has reserved.
    #[inline]
    pub(crate) fn take_decision(&mut self) -> Option<Decision> {
        let decision = self.decision.take()?;
        match &self.charge {
            Some(charge) => Some(charge.charges().update(decision)),
            None => Some(decision),
        }
    }

    pub(crate) fn charge(&self) -> Option<&RequestCost> {
        self.charge.as_ref()
    }

    /// Settles the charge after the response head, if the cost is final, and adjusts the decision.
    pub(crate) fn settle(&mut self, settlement: Settlement) {
        let Some(charge) = &self.charge else {
            return;
        };
        if let Some(settled) = charge.charges().apply_rule(settlement)
            && settled.cost != settled.reserved
            && let Some(decision) = self.decision.take()
        {
            self.decision = Some(settled.update(decision));
        }
    }

    pub(crate) fn has_shadows(&self) -> bool {
        self.shadows.is_some()
    }

    /// Returns the decisions of shadows and dry runs, or `None` if there are no such checks.
    pub(crate) fn take_shadows(&mut self) -> Option<impl Iterator<Item = Decision> + use<D>> {
        Some(self.shadows.take()?.into_decisions())
    }

    /// Moves the charge out of the grant: the response body owns it until its end.
    pub(crate) fn take_charge(&mut self) -> Option<RequestCost> {
        self.charge.take()
    }

    /// Ends the call before the grant is dropped. Drops the charge, which settles it unless a clone
    /// is alive, and releases the slots in any case. The charges of pending shadow checks are
    /// settled after their replies.
    pub(crate) fn end(&mut self) {
        // A clone of the charge may keep it open, but the request is no longer in flight.
        if let Some(charge) = self.charge.take() {
            charge.charges().end();
        }
        if let Some(shadows) = &mut self.shadows {
            shadows.end();
        }
    }
}

impl<D: Future<Output = Result<Decision, StoreError>>> Grant<D> {
    /// Polls the shadow checks; ready when all are decided.
    #[inline]
    pub(crate) fn poll_shadows(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.shadows {
            Some(shadows) => shadows.poll(cx),
            None => Poll::Ready(()),
        }
    }
}

/// The grant of an uncounted request.
impl<D> Default for Grant<D> {
    fn default() -> Self {
        Self {
            decision: None,
            charge: None,
            shadows: None,
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
