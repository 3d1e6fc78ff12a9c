use std::fmt;
use std::sync::Arc;

use super::{BoxError, RateLimited};
use crate::limit::{Check, Decision, Policies};
use crate::middleware::asked::Asked;
use crate::middleware::misconfiguration::Misconfiguration;
use crate::middleware::select::Selector;
use crate::middleware::{KeyExtractor, MissingKey, OnError, OnMissingKey, PolicySelector};
use crate::store::{Answer, Error, Observer, Store};

/// The settings of a layer, and what they decide.
pub(super) struct Config<S, K, R> {
    pub(super) store: S,
    pub(super) extractor: Arc<K>,
    pub(super) policies: Selector<R>,
    /// Which requests are let through at once.
    pub(super) skip: Option<Skip<R>>,
    pub(super) cost: Option<Cost<R>>,
    pub(super) on_error: OnError,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) observer: Option<Arc<dyn Observer>>,
    /// One for all copies.
    pub(super) misconfiguration: Arc<Misconfiguration>,
}

/// Whether a request is let through at once.
pub(super) type Skip<R> = Arc<dyn Fn(&R) -> bool + Send + Sync>;

/// What a request costs under its policies.
pub(super) type Cost<R> = Arc<dyn Fn(&R, &Policies) -> u32 + Send + Sync>;

/// What is known of a request at once.
pub(super) enum Start<D> {
    /// Whether it passes, by a decision or uncounted.
    Decided(Result<(), BoxError>),
    /// That the store has been asked.
    Deciding(D, Option<Asked>),
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
            return Start::Decided(Ok(()));
        }
        let key = self.extractor.extract(request);
        let Some(policies) = self.policies.policies(request, key.as_ref().ok()) else {
            return Start::Decided(Ok(()));
        };
        let key = match key {
            Ok(key) => key,
            Err(missing) => return Start::Decided(self.admit_without_key(missing)),
        };
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request, &policies));
        let asked = self.observer.as_ref().map(|_| Asked::now(key));
        match self.store.check(Check::take(key, &policies, cost)) {
            Answer::Ready { answer } => Start::Decided(self.admit(answer, asked)),
            Answer::Pending { future } => Start::Deciding(future, asked),
        }
    }

    /// Whether a request passes, by the store's answer.
    pub(super) fn admit(&self, answer: Result<Decision, Error>, asked: Option<Asked>) -> Result<(), BoxError> {
        if let (Some(observer), Some(asked)) = (&self.observer, asked) {
            asked.tell(&**observer, &answer, false);
        }
        match answer {
            Ok(decision) if decision.is_allowed() => Ok(()),
            Ok(decision) => Err(RateLimited::new(decision).into()),
            Err(error) => match self.on_error {
                OnError::Allow => Ok(()),
                OnError::Reject => Err(error.into()),
            },
        }
    }

    /// Whether a request without a key passes.
    fn admit_without_key(&self, missing: MissingKey) -> Result<(), BoxError> {
        self.misconfiguration.tell(&missing, self.observer.as_deref());
        match self.on_missing_key {
            OnMissingKey::Allow if missing.is_absent() => Ok(()),
            _ => Err(missing.into()),
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
            on_error: self.on_error,
            on_missing_key: self.on_missing_key,
            observer: self.observer.clone(),
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
