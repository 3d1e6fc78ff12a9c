use std::fmt;
use std::sync::Arc;

use http::Response;
use http::request::Parts;

use super::annotation::Annotation;
use super::asked::Asked;
use super::misconfiguration::Misconfiguration;
use super::select::Selector;
use super::wait::{Place, QueuedRequest, Waiting};
use super::{Ending, Headers, KeyExtractor, MissingKey, PolicySelector, Reason, Reject, Rejection};
use crate::in_flight::{InFlightTracker, Lease};
use crate::limit::{Check, Decision, Key, Policies};
use crate::store::{Answer, Observer, Store, StoreError};
use crate::wait_queues::WaitRequest;

/// The settings of a layer, and what they decide.
pub(super) struct Config<S, K, R, E> {
    pub(super) store: S,
    pub(super) extractor: Arc<K>,
    pub(super) policies: Selector,
    /// Policies that reject nothing, beside those that do.
    pub(super) shadows: Vec<Selector>,
    /// Whether `policies` reject nothing either.
    pub(super) dry_run: bool,
    /// Which requests are let through at once.
    pub(super) skip: Option<Skip>,
    pub(super) reject: Arc<R>,
    pub(super) cost: Option<Cost>,
    /// For how long requests wait that would be denied, if they do.
    pub(super) wait: Option<Waiting>,
    pub(super) on_error: OnError,
    pub(super) on_missing_key: OnMissingKey,
    /// The header fields of responses.
    pub(super) headers: Headers,
    pub(super) observer: Option<Arc<dyn Observer>>,
    /// Until when what was taken is held.
    pub(super) ending: E,
    /// What is in flight, of the requests that wait too.
    pub(super) in_flight: InFlightTracker,
    /// One for all copies.
    pub(super) misconfiguration: Arc<Misconfiguration>,
}

/// What a request costs under its policies.
pub(super) type Cost = Arc<dyn Fn(&Parts, &Policies) -> u32 + Send + Sync>;

/// Whether a request is let through at once.
pub(super) type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// What becomes of a request that the store could not decide. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnError {
    /// It is rejected: over HTTP with 503.
    #[default]
    Reject,
    /// It passes, uncounted.
    Allow,
}

/// What becomes of a request that has nothing that could be its key. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is rejected: over HTTP with 400, or 401 if the extractor has a [challenge](MissingKey::unauthenticated).
    #[default]
    Reject,
    /// It passes, uncounted.
    Allow,
}

/// What is known of a request at once.
pub(super) enum Start<D, B, E: Ending> {
    /// What becomes of it.
    Decided(Admission<B, E::By>),
    /// That the store has been asked; what waits if it says no, and what is held if it says yes.
    Deciding(D, Option<Asked>, Option<Box<WaitRequest>>, E::Lease),
}

/// What becomes of a request.
pub(super) enum Admission<B, By> {
    /// It passes: by this decision, or uncounted.
    Pass(Option<Annotation>, By),
    /// It waits for its turn.
    Wait(Box<QueuedRequest>, Option<Asked>),
    /// It is answered with this.
    Reject(Response<B>),
}

/// What is wrong with a layer whose policies count requests in flight, and that does not know when one has ended.
const NEVER_ENDS: &str = "a policy that counts requests in flight cannot hold, since the layer does not know when they end: add `.until_body_end()` to it";

impl<S, K, R, E: Ending> Config<S, K, R, E> {
    /// Notes who asks, and that it is now, if there is an observer to be told, or something to settle.
    pub(super) fn asked(&self, check: &Check) -> Option<Asked> {
        (E::SETTLES || self.observer.is_some()).then(|| Asked::now(*check.key(), check.cost()))
    }

    /// Finds out who asks, and under which policies, and asks the store.
    #[inline]
    pub(super) fn start<B>(&self, request: &Parts) -> Start<S::Future, B, E>
    where
        S: Store,
        K: KeyExtractor,
        R: Reject<B>,
    {
        if self.dry_run || self.skips(request) {
            return Start::Decided(Admission::uncounted());
        }
        let key = self.extractor.extract(request);
        let found;
        let policies = match &self.policies {
            Selector::Fixed(policies) => policies,
            Selector::ByRequest(selector) => match selector.policies(request, key.as_ref().ok()) {
                Some(policies) => {
                    found = policies;
                    &found
                }
                None => return Start::Decided(Admission::uncounted()),
            },
        };
        let key = match key {
            Ok(key) => key,
            Err(missing) => return Start::Decided(self.admit_without_key(request, missing)),
        };
        let Some(policies) = self.countable(policies) else { return Start::Decided(Admission::uncounted()) };
        let check = self.check(key, policies, request);
        let asked = self.asked(&check);
        let wanted = match &self.wait {
            None => None,
            Some(wait) => {
                let wanted = wait.wanted(&check);
                if let Some(place) = wait.queue_behind(&wanted) {
                    return Start::Decided(self.admit_to_queue(request, place, asked));
                }
                Some(Box::new(wanted))
            }
        };
        let lease = self.ending.hold(key, policies);
        match self.store.check(check) {
            Answer::Ready { answer } => Start::Decided(self.admit(request, answer, asked, wanted, lease)),
            Answer::Pending { future } => Start::Deciding(future, asked, wanted, lease),
        }
    }

    /// Those of them that this layer can count: all, unless it does not know when a request has ended.
    #[inline]
    pub(super) fn countable<'a>(&self, policies: &'a Policies) -> Option<&'a Policies> {
        if E::SETTLES || policies.in_flight().is_none() {
            return Some(policies);
        }
        self.misconfiguration.tell(&MissingKey::misconfigured(NEVER_ENDS), self.observer.as_deref());
        policies.without_in_flight()
    }

    /// Makes sure that the layer can count by the policies that it has from the start.
    ///
    /// # Panics
    ///
    /// If it cannot. A server that does not start is better than one that goes without a limit until somebody reads its log.
    pub(super) fn assert_countable(&self) {
        for selector in self.shadows.iter().chain([&self.policies]) {
            let in_flight = matches!(selector, Selector::Fixed(policies) if policies.in_flight().is_some());
            assert!(E::SETTLES || !in_flight, "{NEVER_ENDS}");
        }
    }

    pub(super) fn skips(&self, request: &Parts) -> bool {
        self.skip.as_ref().is_some_and(|skip| skip(request))
    }

    pub(super) fn check(&self, key: Key, policies: &Policies, request: &Parts) -> Check {
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request, policies));
        Check::take(key, policies, cost).reserving(E::SETTLES)
    }

    /// What becomes of a request by the store's answer.
    pub(super) fn admit<B>(
        &self,
        request: &Parts,
        answer: Result<Decision, StoreError>,
        asked: Option<Asked>,
        wanted: Option<Box<WaitRequest>>,
        mut lease: E::Lease,
    ) -> Admission<B, E::By>
    where
        R: Reject<B>,
    {
        E::answered(&mut lease, &answer);
        match (answer, &self.wait, wanted) {
            (Ok(denied), Some(wait), Some(wanted)) if denied.retry_after().is_some() => {
                self.admit_to_queue(request, wait.enqueue(&wanted, denied), asked)
            }
            (answer, ..) => self.conclude(request, answer, asked, lease),
        }
    }

    /// What becomes of a request that waits if it has a place.
    fn admit_to_queue<B>(&self, request: &Parts, place: Place, asked: Option<Asked>) -> Admission<B, E::By>
    where
        R: Reject<B>,
    {
        match place {
            Place::QueuedRequest(place) => Admission::Wait(place, asked),
            Place::Refused(answer, lease) => self.conclude_turn(request, answer, asked, lease),
        }
    }

    /// What becomes of a request whose turn has come, or will not come in time.
    pub(super) fn conclude_turn<B>(
        &self,
        request: &Parts,
        answer: Result<Decision, StoreError>,
        asked: Option<Asked>,
        lease: Option<Lease>,
    ) -> Admission<B, E::By>
    where
        R: Reject<B>,
    {
        self.conclude(request, answer, asked, E::lease(lease))
    }

    /// What becomes of a request that does not wait any more.
    fn conclude<B>(
        &self,
        request: &Parts,
        answer: Result<Decision, StoreError>,
        asked: Option<Asked>,
        lease: E::Lease,
    ) -> Admission<B, E::By>
    where
        R: Reject<B>,
    {
        self.tell(&answer, asked);
        match answer {
            Ok(decision) if decision.is_allowed() => {
                Admission::Pass(Some(Annotation { decision, headers: self.headers }), E::by(asked, lease))
            }
            Ok(decision) => {
                let mut response = self.reject.reject(Rejection::new(Reason::Denied(&decision), request));
                Annotation { decision, headers: self.headers }.annotate_response(&mut response);
                Admission::Reject(response)
            }
            Err(error) => match self.on_error {
                OnError::Allow => Admission::Pass(None, E::by(None, lease)),
                OnError::Reject => {
                    Admission::Reject(self.reject.reject(Rejection::new(Reason::Unavailable(&error), request)))
                }
            },
        }
    }

    /// What becomes of a request without a key.
    pub(super) fn admit_without_key<B>(&self, request: &Parts, missing: MissingKey) -> Admission<B, E::By>
    where
        R: Reject<B>,
    {
        self.misconfiguration.tell(&missing, self.observer.as_deref());
        match self.on_missing_key {
            OnMissingKey::Allow if missing.is_absent() => Admission::uncounted(),
            _ => {
                let mut response = self.reject.reject(Rejection::new(Reason::MissingKey(&missing), request));
                missing.annotate(&mut response);
                Admission::Reject(response)
            }
        }
    }

    fn tell(&self, answer: &Result<Decision, StoreError>, asked: Option<Asked>) {
        if let (Some(observer), Some(asked)) = (&self.observer, asked) {
            asked.tell(&**observer, answer, false);
        }
    }

    /// The same settings with another rejection.
    pub(super) fn with_reject<R2>(self, reject: R2) -> Config<S, K, R2, E> {
        let ending = self.ending.copy();
        self.with(Arc::new(reject), ending)
    }

    /// The same settings with another ending.
    pub(super) fn with_ending<E2>(self, ending: E2) -> Config<S, K, R, E2> {
        let reject = Arc::clone(&self.reject);
        self.with(reject, ending)
    }

    fn with<R2, E2>(self, reject: Arc<R2>, ending: E2) -> Config<S, K, R2, E2> {
        Config {
            store: self.store,
            extractor: self.extractor,
            policies: self.policies,
            shadows: self.shadows,
            dry_run: self.dry_run,
            skip: self.skip,
            reject,
            cost: self.cost,
            wait: self.wait,
            on_error: self.on_error,
            on_missing_key: self.on_missing_key,
            headers: self.headers,
            observer: self.observer,
            ending,
            in_flight: self.in_flight,
            misconfiguration: self.misconfiguration,
        }
    }
}

impl<B, By: Default> Admission<B, By> {
    fn uncounted() -> Self {
        Self::Pass(None, By::default())
    }
}

impl<S: Clone, K, R, E: Ending> Config<S, K, R, E> {
    /// The same settings, with `Arc`s of their own where a request clones one. See [`Copies`](super::copies::Copies).
    pub(super) fn copy(&self) -> Self {
        Self {
            store: self.store.clone(),
            extractor: Arc::clone(&self.extractor),
            policies: self.policies.copy(),
            shadows: self.shadows.iter().map(Selector::copy).collect(),
            dry_run: self.dry_run,
            skip: self.skip.clone(),
            reject: Arc::clone(&self.reject),
            cost: self.cost.clone(),
            wait: self.wait.clone(),
            on_error: self.on_error,
            on_missing_key: self.on_missing_key,
            headers: self.headers,
            observer: self.observer.clone(),
            ending: self.ending.copy(),
            in_flight: self.in_flight.clone(),
            misconfiguration: Arc::clone(&self.misconfiguration),
        }
    }
}

impl<S: fmt::Debug, K, R, E> Config<S, K, R, E> {
    /// Shows the layer or service of this name that has these settings.
    pub(super) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name).field("store", &self.store).field("policies", &self.policies).finish_non_exhaustive()
    }
}
