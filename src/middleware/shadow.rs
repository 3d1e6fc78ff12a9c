//! Checks that are made and told, and reject nothing.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Response;
use http::request::Parts;

use super::asked::Asked;
use super::config::Config;
use super::select::Selector;
use super::{Ending, KeyExtractor, PolicySelector};
use crate::in_flight::Lease;
use crate::limit::{Decision, Key};
use crate::settle::Account;
use crate::store::{Answer, Observer, Store, StoreError};

/// What policies that reject nothing have decided: in the extensions of a response.
///
/// It is there behind a layer in [dry run](crate::RateLimitLayer::dry_run), or with a
/// [shadow](crate::RateLimitLayer::shadow).
#[derive(Clone, Default)]
pub struct DryRun {
    decisions: Vec<Decision>,
}

impl DryRun {
    /// The decisions, one for each such list of policies: of a layer's own policies first, then of its shadows in their
    /// order. Those that no store could make are left out.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Whether all of them allow the request.
    pub fn is_allowed(&self) -> bool {
        self.decisions.iter().all(Decision::is_allowed)
    }
}

impl fmt::Debug for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.decisions).finish()
    }
}

impl<S, K, R, E: Ending> Config<S, K, R, E> {
    /// The checks that reject nothing, for a request that passes.
    #[inline]
    pub(super) fn shadows(&self, request: &Parts, account: &E::Account) -> Option<Box<Shadows<S::Future>>>
    where
        S: Store,
        K: KeyExtractor,
    {
        // Most layers have none.
        if self.dry_run || !self.shadows.is_empty() { self.ask_shadows(request, account) } else { None }
    }

    fn ask_shadows(&self, request: &Parts, account: &E::Account) -> Option<Box<Shadows<S::Future>>>
    where
        S: Store,
        K: KeyExtractor,
    {
        if self.skips(request) {
            return None;
        }
        let key = self.extractor.extract(request);
        let key = key.inspect_err(|missing| self.misconfiguration.tell(missing, self.observer.as_deref())).ok()?;
        // What is enforced later goes on from what a dry run has counted. A shadow counts apart: it may have a policy of a
        // name that is enforced, which it must not charge.
        let own = self.dry_run.then_some((key, &self.policies));
        let account = E::account(account);
        let shadows = self.shadows.iter().map(|selector| (Key::tuple(&[key, Key::SHADOW]), selector));
        let ask = |(counted_by, selector): (Key, &Selector)| {
            let policies = selector.policies(request, Some(&key))?;
            let policies = self.countable(&policies)?;
            let check = self.check(counted_by, policies, request);
            if let Some(account) = account.as_ref().filter(|_| counted_by == key) {
                account.reserves(check.cost());
            }
            let by = self.asked(&check);
            let lease = E::into_lease(self.ending.hold(counted_by, policies));
            Some((self.store.check(check), by, lease))
        };
        let asked = self.observer.clone().map(|observer| (observer, Asked::now(key, 0)));
        let checks = own.into_iter().chain(shadows).filter_map(ask);
        Some(Box::new(Shadows::new(checks.collect(), asked, account.clone())))
    }
}

/// The checks of one request that reject nothing, under way beside the inner call.
pub(super) struct Shadows<D> {
    checks: Vec<Shadow<D>>,
    told: Told,
}

enum Shadow<D> {
    Asked(Pin<Box<D>>, Option<Asked>, Option<Lease>),
    Told(Option<Decision>),
}

/// Who is told of their answers.
struct Told {
    observer: Option<(Arc<dyn Observer>, Asked)>,
    /// Where what is granted is settled.
    account: Option<Arc<Account>>,
}

impl<D> Shadows<D>
where
    D: Future<Output = Result<Decision, StoreError>>,
{
    /// With the store's first answers, some of which are still to come.
    pub(super) fn new(
        answers: Vec<(Answer<D>, Option<Asked>, Option<Lease>)>,
        observer: Option<(Arc<dyn Observer>, Asked)>,
        account: Option<Arc<Account>>,
    ) -> Self {
        let told = Told { observer, account };
        let checks = answers.into_iter().map(|(answer, by, lease)| match answer {
            Answer::Ready { answer } => Shadow::Told(told.tell(by, lease, answer)),
            Answer::Pending { future } => Shadow::Asked(Box::pin(future), by, lease),
        });
        Self { checks: checks.collect(), told }
    }

    /// Ready when all are answered.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut all = Poll::Ready(());
        for check in &mut self.checks {
            if let Shadow::Asked(future, by, lease) = check {
                match future.as_mut().poll(cx) {
                    Poll::Ready(answer) => *check = Shadow::Told(self.told.tell(*by, lease.take(), answer)),
                    Poll::Pending => all = Poll::Pending,
                }
            }
        }
        all
    }

    /// Puts what was decided into the response's extensions.
    pub(super) fn annotate<B>(self, response: &mut Response<B>) {
        let told = self.checks.into_iter().filter_map(|check| match check {
            Shadow::Told(decision) => decision,
            Shadow::Asked(..) => None,
        });
        response.extensions_mut().get_or_insert_default::<DryRun>().decisions.extend(told);
    }
}

impl Told {
    fn tell(
        &self,
        by: Option<Asked>,
        mut lease: Option<Lease>,
        answer: Result<Decision, StoreError>,
    ) -> Option<Decision> {
        if let Some(lease) = &mut lease {
            lease.answered(answer.as_ref());
        }
        if let Some((observer, asked)) = &self.observer {
            asked.tell(&**observer, &answer, true);
        }
        let decision = answer.ok()?;
        if let (Some(account), Some(by)) = (&self.account, by)
            && decision.is_allowed()
        {
            account.add(by.reserved(decision.clone()), lease);
        }
        Some(decision)
    }
}
