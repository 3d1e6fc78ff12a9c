//! The checks of shadows and of dry runs: decided and reported, but never enforced.

use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::joint::{JointQuestion, joint_charges};
use super::{Gate, Notifier, Question, Selector, denial};
use crate::error::StoreError;
use crate::held_slots::{JointSlots, Slot};
use crate::limit::{Decision, JointDecision, Key};
use crate::settle::RequestCost;
use crate::store::{Answer, JointFuture, Store};

/// The unenforced checks of one request, which run concurrently with the inner call.
pub(super) struct Shadows<D> {
    checks: Vec<Shadow<D>>,
    reporter: Reporter,
}

enum Shadow<D> {
    Pending {
        future: Pin<Box<D>>,
        question: Question,
        /// The caller, in reports: a shadow counts under another key.
        caller: Key,
    },
    /// A check over several keys.
    Joint(JointFuture, Box<JointQuestion>),
    Done(Option<Decision>),
}

/// Handles the replies to these checks.
struct Reporter {
    notifier: Notifier,
    /// The request that settles the charges of these checks. `None` if the layer does not settle.
    charge: Option<RequestCost>,
    /// The in-flight slots of these checks, until the call ends. Empty if the layer settles,
    /// because then `charge` holds them.
    slots: Vec<Slot>,
    has_ended: bool,
}

impl<D: Future<Output = Result<Decision, StoreError>>> Shadows<D> {
    /// Ready when all checks have a reply.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self { checks, reporter } = self;
        let mut all = Poll::Ready(());
        for check in checks {
            let decided = match check {
                Shadow::Pending {
                    future,
                    question,
                    caller,
                } => future
                    .as_mut()
                    .poll(cx)
                    .map(|answer| reporter.report(caller, question, answer)),
                Shadow::Joint(future, question) => Pin::new(future)
                    .poll(cx)
                    .map(|answer| reporter.report_joint(question, answer)),
                Shadow::Done(_) => continue,
            };
            match decided {
                Poll::Ready(decision) => *check = Shadow::Done(decision),
                Poll::Pending => all = Poll::Pending,
            }
        }
        all
    }
}

impl<D> Shadows<D> {
    /// Without checks. The `charge` of the request settles theirs too, if the layer settles.
    pub(super) fn new<S, R>(gate: &Gate<S, R>, charge: Option<&RequestCost>) -> Self {
        Self {
            checks: vec![],
            reporter: Reporter {
                notifier: gate.notifier.clone(),
                charge: charge.filter(|_| gate.settles()).cloned(),
                slots: vec![],
                has_ended: false,
            },
        }
    }

    /// Starts the checks of an admitted request under its own policies in a dry run, and under the layer's shadows.
    pub(super) fn try_each<S: Store<Future = D>, R: 'static>(
        &mut self,
        gate: &Gate<S, R>,
        request: &R,
        caller: Key,
        id: Option<Key>,
    ) {
        // The dry run of several keys has its own path.
        if gate.is_dry_run() && gate.others.is_empty() {
            // The caller's own key, so that enforcement continues its counts.
            self.ask(gate, request, (caller, caller, id), &gate.policies);
        }
        // A separate key: the policy of a shadow may share a name with an enforced one, whose count it must not change.
        let counted_by = Key::tuple(&[caller, Key::SHADOW]);
        for selector in &gate.settings.shadows {
            self.ask(gate, request, (caller, counted_by, id), selector);
        }
    }

    /// Sends the check under the policies of this selector, if it selects any.
    fn ask<S: Store<Future = D>, R: 'static>(
        &mut self,
        gate: &Gate<S, R>,
        request: &R,
        (caller, counted_by, id): (Key, Key, Option<Key>),
        selector: &Selector<R>,
    ) {
        let Some(selected) = selector.find(request, Some(&caller)) else {
            return;
        };
        let Some(policies) = gate.countable(selected) else {
            return;
        };
        let is_blocked = policies.are_blocked();
        let mut question = gate.question(counted_by, policies, request, id);
        // Only a dry run: a shadow is no limit, so its cost is not what the request has reserved.
        if let Some(charge) = &self.reporter.charge
            && counted_by == caller
        {
            charge.charges().set_reserved(question.check.cost());
        }
        question.slot = gate.hold(&question.check);
        let check = &question.check;
        let sent = if is_blocked {
            let forbids = gate.settings.forbids_blocked;
            Answer::ready(Ok(denial(check, None, forbids)))
        } else {
            gate.notifier.examine_lease(&gate.store, check);
            gate.store.check(question.sent())
        };
        let shadow = match sent {
            Answer::Ready { answer } => {
                Shadow::Done(self.reporter.report(&caller, &mut question, answer))
            }
            Answer::Pending { future } => Shadow::Pending {
                future: Box::pin(future),
                question,
                caller,
            },
        };
        self.checks.push(shadow);
    }

    /// Adds the check of a dry run of several keys, which was sent.
    pub(super) fn add_joint(&mut self, mut question: Box<JointQuestion>, answer: JointFuture) {
        if let Some(charge) = &self.reporter.charge {
            charge.charges().set_reserved(question.joint.cost());
        }
        let shadow = match answer.into_ready() {
            Ok(answer) => Shadow::Done(self.reporter.report_joint(&mut question, answer)),
            Err(future) => Shadow::Joint(future, question),
        };
        self.checks.push(shadow);
    }

    /// Releases the slots: the call has ended.
    pub(super) fn end(&mut self) {
        self.reporter.slots.clear();
        self.reporter.has_ended = true;
    }

    /// Returns the decisions, without the checks that no store could decide.
    pub(super) fn into_decisions(self) -> impl Iterator<Item = Decision> {
        self.checks.into_iter().filter_map(|check| match check {
            Shadow::Done(decision) => decision,
            Shadow::Pending { .. } | Shadow::Joint(..) => None,
        })
    }
}

impl Reporter {
    fn report_joint(
        &mut self,
        question: &mut JointQuestion,
        answer: Result<JointDecision, StoreError>,
    ) -> Option<Decision> {
        let mut slots = mem::take(&mut question.slots);
        slots.on_reply(answer.as_ref());
        let JointQuestion { joint, since, .. } = question;
        self.notifier.joint_answered(joint, *since, &answer, true);
        let decided = answer.ok()?;
        if decided.decision().is_allowed() {
            // A reply after the end of the call: nothing else would release the slots.
            if self.has_ended {
                slots = JointSlots::default();
            }
            match &self.charge {
                None => self.slots.extend(slots),
                Some(charge) => {
                    charge.charges().hold(slots);
                    for reserved in joint_charges(joint, &decided, *since) {
                        charge.charges().add(reserved, None);
                    }
                }
            }
        }
        Some(decided.into_decision())
    }

    fn report(
        &mut self,
        caller: &Key,
        question: &mut Question,
        answer: Result<Decision, StoreError>,
    ) -> Option<Decision> {
        question.pass_to_slot(&answer);
        if self.notifier.is_notified(answer.as_ref()) {
            let Question { check, since, .. } = question;
            self.notifier
                .answered(caller, check.cost(), *since, &answer, true);
        }
        let decision = answer.ok()?;
        if !decision.is_allowed() {
            return Some(decision);
        }
        let mut slot = question.slot.take();
        // A reply after the end of the call: nothing else would release the slot.
        if self.has_ended {
            slot = None;
        }
        match &self.charge {
            None => self.slots.extend(slot),
            Some(charge) => {
                if let Some(reserved) = question.reserved(None, &decision) {
                    charge.charges().add(reserved, slot);
                }
            }
        }
        Some(decision)
    }
}
