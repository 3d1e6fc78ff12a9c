//! Layers of several keys: a request passes if all keys allow it.

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::shadows::Shadows;
use super::{
    Admission, Enforcement, Gate, Grant, Holds, KeyExtractor, MissingKey, OnMissingKey, Pending,
    PolicySelector, Question, Refusal, Selector, denial,
};
use crate::error::{ConfigError, StoreError};
use crate::held_slots::JointSlots;
use crate::limit::{Charge, JointCheck, JointDecision, Key, Policies};
use crate::observe::Observer;
use crate::observe::UncountedReason;
use crate::store::Store;
use crate::util::instant;

/// Another key of a layer's requests, with its policies.
pub(super) struct OtherKey<R> {
    extractor: Arc<dyn KeyExtractor<R>>,
    pub(super) policies: Selector<R>,
}

/// The keys of a request, and the policies of each. A part without policies is left out.
#[derive(Default)]
pub(super) struct JointParts {
    each: SmallVec<[(Key, Policies); 3]>,
    /// The layer's first key, which its shadows count by. `None` if the request lacks it.
    caller: Option<Key>,
    /// Whether the first part is of the layer's first key.
    has_first: bool,
    /// The last key that the request lacks.
    missing: Option<MissingKey>,
    /// The first key whose policies are [blocked](Policies::blocked), which denies the request.
    blocked: Option<(Key, Policies)>,
}

/// A check of several keys that is not decided yet.
pub(super) struct JointQuestion {
    pub(super) joint: JointCheck,
    /// Time at which the check was sent. `None` if it is not needed.
    pub(super) since: Option<Instant>,
    /// The slots under the policies that limit requests in flight. They exist before the check is sent.
    pub(super) slots: JointSlots,
    /// The id of the request. A check that takes slots ignores it.
    id: Option<Key>,
    /// As in [`JointParts`].
    caller: Option<Key>,
    has_first: bool,
}

/// The problem of a layer of several keys whose requests wait.
const NO_TURNS: &str = "a layer of several keys cannot make requests wait, since a turn is that of one key: remove `.wait(..)` \
                        or `.and(..)`, or let an outer layer of one key wait";

impl<R: 'static> OtherKey<R> {
    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.extractor.observe(observer);
        self.policies.observe(observer);
    }

    pub(super) fn extractor(&self) -> &dyn KeyExtractor<R> {
        &*self.extractor
    }
}

impl<R> Clone for OtherKey<R> {
    fn clone(&self) -> Self {
        Self {
            extractor: Arc::clone(&self.extractor),
            policies: self.policies.clone(),
        }
    }
}

impl<S, R: 'static> Gate<S, R> {
    /// Adds a key, which must allow each request too.
    pub(crate) fn and(
        &mut self,
        extractor: impl KeyExtractor<R>,
        policies: impl PolicySelector<R>,
    ) {
        let other = OtherKey {
            extractor: Arc::new(extractor),
            policies: Selector::new(policies),
        };
        if let Some(observer) = self.notifier.observer() {
            other.observe(observer);
        }
        self.others.push(other);
        if self.settings.enforcement == Enforcement::Plain {
            self.settings.enforcement = Enforcement::SeveralKeys;
        }
    }

    /// # Panics
    ///
    /// If there are too many keys, if policies that are set at startup do not fit together, or if requests wait.
    pub(super) fn assert_joint(&self) {
        if self.others.is_empty() {
            return;
        }
        assert!(self.wait.is_none(), "{NO_TURNS}");
        let keys = self.others.len() + 1;
        assert!(
            keys <= JointCheck::MAX_KEYS,
            "{keys} keys for one layer: use at most {}",
            JointCheck::MAX_KEYS
        );
        let problem = match self.fixed_policies() {
            Some(Err(error)) => error.to_string(),
            Some(Ok(_)) | None => String::new(),
        };
        assert!(problem.is_empty(), "{problem}");
    }

    /// Returns the policies of all keys whose policies are set at startup.
    pub(super) fn fixed_policies(&self) -> Option<Result<Policies, ConfigError>> {
        let others = self.others.iter().map(|other| &other.policies);
        let mut lists = SmallVec::<[&Policies; 3]>::new();
        for selector in [&self.policies].into_iter().chain(others) {
            if let Selector::Fixed(policies) = selector
                && !policies.are_blocked()
            {
                lists.push(policies);
            }
        }
        if lists.is_empty() {
            return None;
        }
        Some(Policies::joined(&lists))
    }
}

impl<S: Store, R: 'static> Gate<S, R> {
    /// Sends the check of all keys of a request. `selected` are the policies of the first one.
    pub(super) fn admit_all(
        &self,
        request: &R,
        first: Result<Key, MissingKey>,
        selected: Option<Policies>,
    ) -> Admission<S::Future> {
        let parts = match self.parts(request, first, selected) {
            Ok(parts) => parts,
            Err(missing) => {
                self.notifier.uncounted(missing.reason(), false);
                return Admission::Refused(Refusal::MissingKey(missing));
            }
        };
        if let Some((key, policies)) = &parts.blocked {
            return self.deny_blocked(request, *key, policies, None);
        }
        match parts.each.as_slice() {
            [] => self.without_parts(request, &parts),
            // Only the first key is left: the plain path. The denials of another one are no strikes.
            [(key, policies)] if parts.has_first => {
                self.admit_under(request, &Ok(*key), Some(policies.clone()))
            }
            _ => match self.joint(request, &parts) {
                Ok(joint) => self.send_joint(request, joint, &parts),
                Err(error) => self.unjoinable(request, &parts, error),
            },
        }
    }

    /// Admits a request that has no policies for any of its keys.
    fn without_parts(&self, request: &R, parts: &JointParts) -> Admission<S::Future> {
        let reason = match &parts.missing {
            Some(missing) => missing.reason(),
            None => UncountedReason::Exempt,
        };
        self.notifier.uncounted(reason, true);
        self.uncounted(request, parts.caller)
    }

    /// Returns the keys and the policies of a request.
    ///
    /// # Errors
    ///
    /// The key for whose lack the request is rejected. A dry run rejects nothing.
    fn parts(
        &self,
        request: &R,
        first: Result<Key, MissingKey>,
        selected: Option<Policies>,
    ) -> Result<JointParts, MissingKey> {
        let mut parts = JointParts {
            caller: first.as_ref().ok().copied(),
            ..JointParts::default()
        };
        self.add_part(&mut parts, first, selected)?;
        parts.has_first = !parts.each.is_empty();
        for other in &self.others {
            let key = other.extractor.extract(request);
            let selected = other.policies.find(request, key.as_ref().ok());
            self.add_part(&mut parts, key, selected)?;
        }
        Ok(parts)
    }

    fn add_part(
        &self,
        parts: &mut JointParts,
        key: Result<Key, MissingKey>,
        selected: Option<Policies>,
    ) -> Result<(), MissingKey> {
        let Some(selected) = selected else {
            return Ok(());
        };
        if selected.are_blocked() {
            // Also without a key, which may be optional.
            let key = key.unwrap_or(Key::GLOBAL);
            parts.blocked.get_or_insert((key, selected));
            return Ok(());
        }
        match key {
            Ok(key) => {
                if let Some(policies) = self.countable(selected) {
                    parts.each.push((key, policies));
                }
            }
            Err(missing) => {
                self.notifier.missing(&missing);
                let is_allowed =
                    self.settings.on_missing_key == OnMissingKey::Allow && missing.is_absent();
                let passes = is_allowed || self.is_dry_run();
                if !passes {
                    return Err(missing);
                }
                parts.missing = Some(missing);
            }
        }
        Ok(())
    }

    /// Returns the check of these keys. Its cost is that under the policies of the first one.
    fn joint(&self, request: &R, parts: &JointParts) -> Result<JointCheck, ConfigError> {
        let cost = match parts.each.first() {
            Some((_, policies)) => self.cost(request, policies),
            None => 0,
        };
        let each = parts.each.iter().map(|(key, policies)| (*key, policies));
        JointCheck::take(each, cost)
    }

    fn joint_question(
        &self,
        joint: JointCheck,
        parts: &JointParts,
        id: Option<Key>,
    ) -> JointQuestion {
        let slots = if self.holds == Holds::Nothing {
            JointSlots::default()
        } else {
            self.in_flight.track_all(&joint)
        };
        JointQuestion {
            joint,
            since: self.since(),
            slots,
            id,
            caller: parts.caller,
            has_first: parts.has_first,
        }
    }

    fn send_joint(
        &self,
        request: &R,
        joint: JointCheck,
        parts: &JointParts,
    ) -> Admission<S::Future> {
        let id = self.id(request);
        let joint = joint.with_key_as_id(id);
        // Before the check is sent: a request that is dropped before the reply must release its slots.
        let question = self.joint_question(joint.clone(), parts, id);
        match self.notifier.send_all(&self.store, joint).into_ready() {
            Ok(answer) => self.conclude_joint(request, question, answer),
            Err(future) => Admission::Undecided(Pending::Joint {
                future,
                question: Some(Box::new(question)),
            }),
        }
    }

    /// Handles policies of a request that do not fit together, as when two keys have a policy of the same name.
    #[cold]
    fn unjoinable(
        &self,
        request: &R,
        parts: &JointParts,
        error: ConfigError,
    ) -> Admission<S::Future> {
        let error = StoreError::from(error);
        if let Some((key, _)) = parts.each.first() {
            let answer = Err(error.clone());
            self.notifier.answered(key, 0, None, &answer, false);
        }
        if !self.settings.on_error.passes_undecided() {
            return Admission::Refused(Refusal::Unavailable(error));
        }
        self.notifier.uncounted(UncountedReason::Failed, true);
        self.uncounted(request, parts.caller)
    }

    /// Admits or rejects by the decision on all keys, and notifies the observer.
    pub(super) fn conclude_joint(
        &self,
        request: &R,
        question: JointQuestion,
        answer: Result<JointDecision, StoreError>,
    ) -> Admission<S::Future> {
        let JointQuestion {
            joint,
            since,
            mut slots,
            id,
            caller,
            has_first,
        } = question;
        slots.on_reply(answer.as_ref());
        self.notifier.joint_answered(&joint, since, &answer, false);
        let decided = match answer {
            Ok(decided) if decided.decision().is_allowed() => Some(decided),
            Ok(denied) => {
                // The denial of another key is not the fault of the first one.
                if let Some(blocking) = &self.settings.blocking
                    && let Some(Some(first)) = denied.parts().first()
                    && has_first
                {
                    blocking.denied(request, joint.first().key(), first, &self.ops);
                }
                return Admission::Refused(Refusal::Denied(denied.into_decision()));
            }
            Err(error) if !self.settings.on_error.passes_undecided() => {
                return Admission::Refused(Refusal::Unavailable(error));
            }
            Err(_) => {
                self.notifier.uncounted(UncountedReason::Failed, true);
                slots = slots.admitted_after_error();
                None
            }
        };
        let mut grant = Grant::default();
        if self.settles() || !slots.is_empty() {
            let reserved = match &decided {
                Some(decided) if self.settles() => joint_charges(&joint, decided, since),
                _ => SmallVec::new(),
            };
            grant.charge = Some(self.charge(reserved, slots));
        }
        grant.decision = decided.map(JointDecision::into_decision);
        // Last, since the checks of shadows add their charges to that of the request.
        if let Some(caller) = caller
            && self.has_shadows()
        {
            grant.shadows = Some(self.try_shadows(request, grant.charge.as_ref(), caller, id));
        }
        Admission::Granted(grant)
    }

    /// Admits any request, and checks all of its keys in a dry run.
    pub(super) fn dry_run_all(
        &self,
        request: &R,
        first: Result<Key, MissingKey>,
    ) -> Admission<S::Future> {
        let selected = self.policies.find(request, first.as_ref().ok());
        // A dry run rejects nothing.
        let parts = self.parts(request, first, selected).unwrap_or_default();
        if let Some((key, policies)) = &parts.blocked {
            let Question { check, .. } = self.question(*key, policies.clone(), request, None);
            let denied = denial(&check, None, self.settings.forbids_blocked);
            self.notifier
                .answered(key, check.cost(), None, &Ok(denied), true);
            return self.uncounted(request, parts.caller);
        }
        let Some((first_key, _)) = parts.each.first() else {
            return self.without_parts(request, &parts);
        };
        let mut grant = Grant::default();
        if self.settles() {
            grant.charge = Some(self.charge(None, None));
        }
        let id = self.id(request);
        let mut shadows = Shadows::new(self, grant.charge.as_ref());
        match self.joint(request, &parts) {
            Ok(joint) => {
                let joint = joint.with_key_as_id(id);
                let question = self.joint_question(joint.clone(), &parts, id);
                let answer = self.notifier.send_all(&self.store, joint);
                shadows.add_joint(Box::new(question), answer);
            }
            Err(error) => {
                let answer = Err(StoreError::from(error));
                self.notifier.answered(first_key, 0, None, &answer, true);
            }
        }
        if let Some(caller) = parts.caller {
            shadows.try_each(self, request, caller, id);
        }
        grant.shadows = Some(Box::new(shadows));
        Admission::Granted(grant)
    }
}

/// Returns the charges of a granted check. None if the decision repeats an earlier one: the first request under an id
/// settles its charges.
pub(super) fn joint_charges(
    joint: &JointCheck,
    decided: &JointDecision,
    since: Option<Instant>,
) -> SmallVec<[Charge; 1]> {
    match since {
        Some(since) if !decided.decision().is_repeated() => {
            decided.charges(joint, since, instant())
        }
        _ => SmallVec::new(),
    }
}
