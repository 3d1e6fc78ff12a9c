//! Checks that are reported, but reject nothing.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::{Gate, Notifier, Question, Selector};
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Decision, Key};
use crate::settle::Charge;
use crate::store::{Answer, Store};

impl<S: Store, R: 'static> Gate<S, R> {
    /// Most layers have none.
    pub(super) fn has_shadows(&self) -> bool {
        self.dry_run || !self.shadows.is_empty()
    }

    /// The checks that reject nothing, for a request that passes. What they charge is settled with the request's.
    pub(super) fn shadows(
        &self,
        request: &R,
        key: Key,
        charge: Option<&Charge>,
    ) -> Box<Shadows<S::Future>> {
        // What is enforced later goes on from what a dry run has counted. A shadow counts apart: it may have a policy of a
        // name that is enforced, which it must not charge.
        let own = self.dry_run.then_some((key, &self.policies));
        let shadows = self
            .shadows
            .iter()
            .map(|selector| (Key::tuple(&[key, Key::SHADOW]), selector));
        let mut told = Told {
            key,
            notifier: self.notifier.clone(),
            charge: charge.cloned(),
            slots: Vec::new(),
            has_ended: false,
        };
        let ask = |(counted_by, selector): (Key, &Selector<R>)| {
            let policies = self.countable(selector.find(request, Some(&key))?)?;
            let check = self.check(counted_by, &policies, request);
            if let Some(charge) = charge.filter(|_| counted_by == key) {
                charge.account().reserves(check.cost());
            }
            let mut question = self.question(&check);
            question.hold(self.hold(&check));
            Some(match self.notifier.send(&self.store, check) {
                Answer::Ready { answer } => Shadow::Told(told.tell(&mut question, answer)),
                Answer::Pending { future } => Shadow::Asked(Box::pin(future), question),
            })
        };
        let checks = own.into_iter().chain(shadows).filter_map(ask).collect();
        Box::new(Shadows { checks, told })
    }
}

/// The checks of one request that reject nothing, under way beside the inner call.
pub(super) struct Shadows<D> {
    checks: Vec<Shadow<D>>,
    told: Told,
}

enum Shadow<D> {
    Asked(Pin<Box<D>>, Question),
    Told(Option<Decision>),
}

/// Where their answers are reported.
struct Told {
    /// The caller.
    key: Key,
    notifier: Notifier,
    /// Where what is granted is settled.
    charge: Option<Charge>,
    /// What is held in flight where nothing is settled, until the call has ended.
    slots: Vec<Slot>,
    has_ended: bool,
}

impl<D: Future<Output = Result<Decision, StoreError>>> Shadows<D> {
    /// Ready when all are answered.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self { checks, told } = self;
        let mut all = Poll::Ready(());
        for check in checks {
            if let Shadow::Asked(future, question) = check {
                match future.as_mut().poll(cx) {
                    Poll::Ready(answer) => *check = Shadow::Told(told.tell(question, answer)),
                    Poll::Pending => all = Poll::Pending,
                }
            }
        }
        all
    }
}

impl<D> Shadows<D> {
    /// The call has ended: nothing of it is in flight.
    pub(super) fn end(&mut self) {
        self.told.slots.clear();
        self.told.has_ended = true;
    }

    /// The decisions, without the checks that no store could decide.
    pub(super) fn into_decisions(self) -> impl Iterator<Item = Decision> {
        self.checks.into_iter().filter_map(|check| match check {
            Shadow::Told(decision) => decision,
            Shadow::Asked(..) => None,
        })
    }
}

impl Told {
    fn tell(
        &mut self,
        question: &mut Question,
        answer: Result<Decision, StoreError>,
    ) -> Option<Decision> {
        question.answered(&answer);
        self.notifier.answered(&self.key, question, &answer, true);
        let decision = answer.ok()?;
        if !decision.is_allowed() {
            return Some(decision);
        }
        let slot = question.take_slot().filter(|_| !self.has_ended);
        match &self.charge {
            None => self.slots.extend(slot),
            Some(charge) => {
                if let Some(reserved) = question.reserved(&decision) {
                    charge.account().add(reserved, slot);
                }
            }
        }
        Some(decision)
    }
}
