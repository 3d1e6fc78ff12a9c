//! Checks that are made and told, and reject nothing.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Response;

use super::asked::Asked;
use crate::leases::Lease;
use crate::limit::Decision;
use crate::settle::Account;
use crate::store::{Answer, Error, Observer};

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
    D: Future<Output = Result<Decision, Error>>,
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
    fn tell(&self, by: Option<Asked>, mut lease: Option<Lease>, answer: Result<Decision, Error>) -> Option<Decision> {
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
