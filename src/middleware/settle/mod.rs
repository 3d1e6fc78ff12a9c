//! Until when a layer holds what a request has taken.

mod body;
mod layer;
mod rule;

use std::fmt;
use std::sync::Arc;

use http::Response;
use http::request::Parts;

pub use body::TrackedBody;
use rule::Rule;

use super::annotation::Annotation;
use super::asked::Asked;
use crate::in_flight::{InFlightTracker, Lease};
use crate::limit::{Decision, Key, Policies};
use crate::settle::{Account, Charge, RefundQueue, Settled};
use crate::store::StoreError;

/// Until when a [`RateLimitLayer`](crate::RateLimitLayer) holds what a request has taken, and what follows for the body of the
/// response: [`AsIs`] or [`UntilBodyEnd`].
pub trait Ending: sealed::Ending {
    /// The body of the layer's responses, where `B` is that of the inner service's.
    type Body<B>;
}

/// What a request has taken is charged, and that is all: the response is the inner service's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AsIs;

/// What a request has taken is held until the body of the response has ended, and no [`Charge`] of it is left. Then it is
/// settled. The response is a `Response<TrackedBody<B>>`.
///
/// [`RateLimitLayer::settle`](crate::RateLimitLayer::settle) and
/// [`RateLimitLayer::until_body_end`](crate::RateLimitLayer::until_body_end) make such layers.
pub struct UntilBodyEnd {
    rule: Arc<Rule>,
    refunds: Arc<dyn RefundQueue>,
    in_flight: InFlightTracker,
}

/// Who has asked and when, for a request that passes, and what it holds while it runs.
#[derive(Debug, Default)]
pub struct By {
    asked: Option<Asked>,
    lease: Option<Lease>,
}

pub(super) mod sealed {
    use super::*;

    /// How a request is accounted for. Each does nothing with [`AsIs`].
    pub trait Ending: Sized + Send + Sync + 'static {
        /// What is held while a request runs, from before the store is asked on.
        type Lease: Send + Default;
        /// Who has asked and when, for a request that passes.
        type By: Send + Default;
        type Account: Send + Default;

        /// Whether there are accounts.
        const SETTLES: bool;

        /// The same with an `Arc` of its own; see [`Copies`](crate::middleware::copies::Copies).
        fn copy(&self) -> Self;

        /// Holds and settles by these.
        fn set_in_flight(&mut self, in_flight: &InFlightTracker);

        /// What a request holds that the store is about to be asked about.
        fn hold(&self, key: Key, policies: &Policies) -> Self::Lease;

        /// The store has answered.
        fn answered(lease: &mut Self::Lease, answer: &Result<Decision, StoreError>);

        /// A request passes, also one that the store could not decide.
        fn by(asked: Option<Asked>, lease: Self::Lease) -> Self::By;

        /// Opens the account of a request that passes, and gives the handler its [`Charge`].
        fn open(&self, request: &mut Parts, annotation: Option<&Annotation>, by: Self::By) -> Self::Account;

        /// Where more that was reserved is added.
        fn account(account: &Self::Account) -> Option<Arc<Account>>;

        /// What a request holds that has waited for its turn.
        fn lease(lease: Option<Lease>) -> Self::Lease;

        /// The lease of a check that rejects nothing.
        fn into_lease(lease: Self::Lease) -> Option<Lease>;

        /// Settles by the head of the response, as far as that tells. The cost of the request, if it is known.
        fn settle<B>(account: &Self::Account, response: Response<B>) -> (Response<B>, Option<Settled>);

        /// Holds the account until the body ends.
        fn wrap<B>(response: Response<B>, account: Self::Account) -> Response<<Self as super::Ending>::Body<B>>
        where
            Self: super::Ending;
    }
}

impl Ending for AsIs {
    type Body<B> = B;
}

impl sealed::Ending for AsIs {
    type Lease = ();
    type By = ();
    type Account = ();

    const SETTLES: bool = false;

    fn copy(&self) -> Self {
        Self
    }

    fn set_in_flight(&mut self, _: &InFlightTracker) {}

    #[inline]
    fn hold(&self, _: Key, _: &Policies) {}

    #[inline]
    fn answered((): &mut (), _: &Result<Decision, StoreError>) {}

    #[inline]
    fn by(_: Option<Asked>, (): ()) {}

    #[inline]
    fn open(&self, _: &mut Parts, _: Option<&Annotation>, (): ()) {}

    #[inline]
    fn account((): &()) -> Option<Arc<Account>> {
        None
    }

    #[inline]
    fn lease(_: Option<Lease>) {}

    fn into_lease((): ()) -> Option<Lease> {
        None
    }

    #[inline]
    fn settle<B>((): &(), response: Response<B>) -> (Response<B>, Option<Settled>) {
        (response, None)
    }

    #[inline]
    fn wrap<B>(response: Response<B>, (): ()) -> Response<B> {
        response
    }
}

impl UntilBodyEnd {
    fn new(rule: Rule, in_flight: &InFlightTracker) -> Self {
        Self { rule: Arc::new(rule), refunds: Arc::clone(in_flight.refunds()), in_flight: in_flight.clone() }
    }
}

impl Ending for UntilBodyEnd {
    type Body<B> = TrackedBody<B>;
}

/// A request's account, and the rule that settles it.
#[derive(Debug)]
pub struct Open {
    account: Arc<Account>,
    rule: Arc<Rule>,
}

impl sealed::Ending for UntilBodyEnd {
    type Lease = Option<Lease>;
    type By = By;
    type Account = Option<Open>;

    const SETTLES: bool = true;

    fn copy(&self) -> Self {
        Self {
            rule: Arc::new(self.rule.as_ref().clone()),
            refunds: self.refunds.copy(),
            in_flight: self.in_flight.clone(),
        }
    }

    fn set_in_flight(&mut self, in_flight: &InFlightTracker) {
        (self.refunds, self.in_flight) = (Arc::clone(in_flight.refunds()), in_flight.clone());
    }

    fn hold(&self, key: Key, policies: &Policies) -> Option<Lease> {
        self.in_flight.hold(key, policies)
    }

    fn answered(lease: &mut Option<Lease>, answer: &Result<Decision, StoreError>) {
        if let Some(lease) = lease {
            lease.answered(answer.as_ref());
        }
    }

    fn by(asked: Option<Asked>, lease: Option<Lease>) -> By {
        By { asked, lease: lease.map(Lease::passed) }
    }

    fn open(&self, request: &mut Parts, annotation: Option<&Annotation>, by: By) -> Option<Open> {
        // In case nobody else has come since a runtime ended.
        self.refunds.wake();
        let By { asked, lease } = by;
        let reserved = annotation.zip(asked).map(|(annotation, asked)| asked.reserved(annotation.decision.clone()));
        let outer = request.extensions.remove();
        let account = Arc::new(Account::new(Arc::clone(&self.refunds), reserved, lease, outer));
        request.extensions.insert(Charge::new(Arc::clone(&account)));
        Some(Open { account, rule: Arc::clone(&self.rule) })
    }

    fn account(account: &Option<Open>) -> Option<Arc<Account>> {
        account.as_ref().map(|open| Arc::clone(&open.account))
    }

    fn lease(lease: Option<Lease>) -> Option<Lease> {
        lease
    }

    fn into_lease(lease: Option<Lease>) -> Option<Lease> {
        lease
    }

    fn settle<B>(account: &Option<Open>, response: Response<B>) -> (Response<B>, Option<Settled>) {
        let Some(open) = account else { return (response, None) };
        let (parts, body) = response.into_parts();
        let cost = open.account.settle(open.rule.settlement(&parts));
        (Response::from_parts(parts, body), cost)
    }

    fn wrap<B>(response: Response<B>, account: Option<Open>) -> Response<TrackedBody<B>> {
        response.map(|body| TrackedBody::new(body, account.map(|open| open.account)))
    }
}

impl fmt::Debug for UntilBodyEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UntilBodyEnd").finish_non_exhaustive()
    }
}
