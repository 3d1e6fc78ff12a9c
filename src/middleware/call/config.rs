use std::fmt;
use std::sync::Arc;

use super::BoxError;
use crate::in_flight::{InFlightTracker, Lease};
use crate::limit::{Check, Decision, Policies, RateLimited};
use crate::middleware::asked::Asked;
use crate::middleware::misconfiguration::Misconfiguration;
use crate::middleware::select::Selector;
use crate::middleware::wait::{Place, QueuedRequest, Waiting};
use crate::middleware::{KeyExtractor, MissingKey, OnError, OnMissingKey, PolicySelector};
use crate::store::{Answer, Observer, Store, StoreError};
use crate::wait_queues::WaitRequest;

/// The settings of a layer, and what they decide.
pub(super) struct Config<S, K, R> {
    pub(super) store: S,
    pub(super) extractor: Arc<K>,
    pub(super) policies: Selector<R>,
    /// Which requests are let through at once.
    pub(super) skip: Option<Skip<R>>,
    pub(super) cost: Option<Cost<R>>,
    /// For how long requests wait that would be denied, if they do.
    pub(super) wait: Option<Waiting>,
    pub(super) on_error: OnError,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) observer: Option<Arc<dyn Observer>>,
    /// What is in flight.
    pub(super) in_flight: InFlightTracker,
    /// One for all copies.
    pub(super) misconfiguration: Arc<Misconfiguration>,
}

/// Whether a request is let through at once.
pub(super) type Skip<R> = Arc<dyn Fn(&R) -> bool + Send + Sync>;

/// What a request costs under its policies.
pub(super) type Cost<R> = Arc<dyn Fn(&R, &Policies) -> u32 + Send + Sync>;

/// What is known of a request at once.
pub(super) enum Start<D> {
    /// What becomes of it.
    Decided(Admission),
    /// That the store has been asked; what waits if it says no, and what is held if it says yes.
    Deciding(D, Option<Asked>, Option<Box<WaitRequest>>, Option<Lease>),
}

/// What becomes of a request.
pub(super) enum Admission {
    /// It passes, by a decision or uncounted, and holds this until it is answered.
    Pass(Option<Lease>),
    /// It waits for its turn.
    Wait(Box<QueuedRequest>, Option<Asked>),
    Fail(BoxError),
}

impl<S, K, R> Config<S, K, R> {
    /// Finds out who asks, and under which policies, and asks the store.
    pub(super) fn start(&self, request: &R) -> Start<S::Future>
    where
        S: Store,
        K: KeyExtractor<R>,
        R: 'static,
    {
        if self.skip.as_ref().is_some_and(|skip| skip(request)) {
            return Start::Decided(Admission::Pass(None));
        }
        let key = self.extractor.extract(request);
        let Some(policies) = self.policies.policies(request, key.as_ref().ok()) else {
            return Start::Decided(Admission::Pass(None));
        };
        let key = match key {
            Ok(key) => key,
            Err(missing) => return Start::Decided(self.admit_without_key(missing)),
        };
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request, &policies));
        let asked = self.observer.as_ref().map(|_| Asked::now(key, cost));
        let check = Check::take(key, &policies, cost);
        let wanted = match &self.wait {
            None => None,
            Some(wait) => {
                let wanted = wait.wanted(&check);
                if let Some(place) = wait.queue_behind(&wanted) {
                    return Start::Decided(self.admit_to_queue(place, asked));
                }
                Some(Box::new(wanted))
            }
        };
        let lease = self.in_flight.hold(key, &policies);
        match self.store.check(check) {
            Answer::Ready { answer } => Start::Decided(self.admit(answer, asked, wanted, lease)),
            Answer::Pending { future } => Start::Deciding(future, asked, wanted, lease),
        }
    }

    /// What becomes of a request by the store's answer.
    pub(super) fn admit(
        &self,
        answer: Result<Decision, StoreError>,
        asked: Option<Asked>,
        wanted: Option<Box<WaitRequest>>,
        mut lease: Option<Lease>,
    ) -> Admission {
        if let Some(lease) = &mut lease {
            lease.answered(answer.as_ref());
        }
        match (answer, &self.wait, wanted) {
            (Ok(denied), Some(wait), Some(wanted)) if denied.retry_after().is_some() => {
                self.admit_to_queue(wait.enqueue(&wanted, denied), asked)
            }
            (answer, ..) => self.conclude(answer, asked, lease),
        }
    }

    /// What becomes of a request that waits if it has a place.
    fn admit_to_queue(&self, place: Place, asked: Option<Asked>) -> Admission {
        match place {
            Place::QueuedRequest(place) => Admission::Wait(place, asked),
            Place::Refused(answer, lease) => self.conclude(answer, asked, lease),
        }
    }

    /// What becomes of a request that does not wait any more.
    pub(super) fn conclude(
        &self,
        answer: Result<Decision, StoreError>,
        asked: Option<Asked>,
        lease: Option<Lease>,
    ) -> Admission {
        if let (Some(observer), Some(asked)) = (&self.observer, asked) {
            asked.tell(&**observer, &answer, false);
        }
        match answer {
            Ok(decision) if decision.is_allowed() => Admission::Pass(lease),
            Ok(decision) => Admission::Fail(RateLimited::new(decision).into()),
            Err(error) => match self.on_error {
                OnError::Allow => Admission::Pass(lease.map(Lease::passed)),
                OnError::Reject => Admission::Fail(error.into()),
            },
        }
    }

    /// What becomes of a request without a key.
    fn admit_without_key(&self, missing: MissingKey) -> Admission {
        self.misconfiguration.tell(&missing, self.observer.as_deref());
        match self.on_missing_key {
            OnMissingKey::Allow if missing.is_absent() => Admission::Pass(None),
            _ => Admission::Fail(missing.into()),
        }
    }
}

impl<S: Clone, K, R> Clone for Config<S, K, R> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            extractor: Arc::clone(&self.extractor),
            policies: self.policies.clone(),
            skip: self.skip.clone(),
            cost: self.cost.clone(),
            wait: self.wait.clone(),
            on_error: self.on_error,
            on_missing_key: self.on_missing_key,
            observer: self.observer.clone(),
            in_flight: self.in_flight.clone(),
            misconfiguration: Arc::clone(&self.misconfiguration),
        }
    }
}

impl<S: fmt::Debug, K, R> Config<S, K, R> {
    /// Shows the layer or service of this name that has these settings.
    pub(super) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name).field("store", &self.store).field("policies", &self.policies).finish_non_exhaustive()
    }
}
