use std::fmt;
use std::sync::Arc;

use http::Response;
use http::header::RETRY_AFTER;
use http::request::Parts;
use tokio::time::Instant;

use super::annotation::Annotation;
use super::headers::retry_after_field;
use super::{MissingKey, Reason, Reject, Rejection};
use crate::limit::{Decision, Policies};
use crate::store::{Error, Observers, event, instant};

/// The settings of a layer, and what they decide.
pub(super) struct Config<S, K, R> {
    pub(super) store: S,
    pub(super) extractor: Arc<K>,
    pub(super) policies: Policies,
    pub(super) reject: Arc<R>,
    pub(super) cost: Option<Cost>,
    pub(super) on_error: OnError,
    pub(super) on_missing_key: OnMissingKey,
    /// Whether responses have the header fields.
    pub(super) fields: bool,
    pub(super) observer: Option<Observers>,
}

/// What a request costs.
pub(super) type Cost = Arc<dyn Fn(&Parts) -> u32 + Send + Sync>;

/// What becomes of a request that the store could not decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnError {
    /// It is rejected: over HTTP with 503.
    #[default]
    Reject,
    /// It passes, uncounted.
    Allow,
}

/// What becomes of a request that has nothing that could be its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is rejected: over HTTP with 400.
    #[default]
    Reject,
    /// It passes, uncounted.
    Allow,
}

/// What becomes of a request.
pub(super) enum Admission<B> {
    /// It passes: by this decision, or uncounted.
    Pass(Option<Annotation>),
    /// It is answered with this.
    Reject(Response<B>),
}

impl<S, K, R> Config<S, K, R> {
    /// Now, if an observer is told how long a decision took.
    pub(super) fn now(&self) -> Option<Instant> {
        self.observer.as_ref().map(|_| instant())
    }

    /// What becomes of a request by the store's answer, which was asked for at `since`.
    pub(super) fn admit<B>(
        &self,
        request: &Parts,
        answer: Result<Decision, Error>,
        since: Option<Instant>,
    ) -> Admission<B>
    where
        R: Reject<B>,
    {
        self.tell(&answer, since);
        match answer {
            Ok(decision) if decision.is_allowed() => {
                Admission::Pass(Some(Annotation { decision, fields: self.fields }))
            }
            Ok(decision) => {
                let mut response = self.reject.reject(Rejection::new(Reason::Denied(&decision), request));
                if let Some(wait) = decision.retry_after() {
                    response.headers_mut().entry(RETRY_AFTER).or_insert_with(|| retry_after_field(wait));
                }
                Annotation { decision, fields: self.fields }.annotate_response(&mut response);
                Admission::Reject(response)
            }
            Err(error) => match self.on_error {
                OnError::Allow => Admission::Pass(None),
                OnError::Reject => {
                    Admission::Reject(self.reject.reject(Rejection::new(Reason::Unavailable(&error), request)))
                }
            },
        }
    }

    /// What becomes of a request without a key.
    pub(super) fn admit_without_key<B>(&self, request: &Parts, missing: MissingKey) -> Admission<B>
    where
        R: Reject<B>,
    {
        match self.on_missing_key {
            OnMissingKey::Allow if missing.is_absent() => Admission::Pass(None),
            _ => Admission::Reject(self.reject.reject(Rejection::new(Reason::MissingKey(&missing), request))),
        }
    }

    fn tell(&self, answer: &Result<Decision, Error>, since: Option<Instant>) {
        if let (Some(observer), Some(since)) = (&self.observer, since) {
            match answer {
                Ok(decision) => observer.0.decided(&event::Decided::new(decision, instant() - since)),
                Err(error) => observer.0.failed(&event::Failed::new(error)),
            }
        }
    }

    /// The same settings with another rejection.
    pub(super) fn with_reject<R2>(self, reject: R2) -> Config<S, K, R2> {
        let Self { store, extractor, policies, reject: _, cost, on_error, on_missing_key, fields, observer } = self;
        let reject = Arc::new(reject);
        Config { store, extractor, policies, reject, cost, on_error, on_missing_key, fields, observer }
    }
}

impl<S: Clone, K, R> Config<S, K, R> {
    /// The same settings, with `Arc`s of their own where a request clones one. See [`Copies`](super::copies::Copies).
    pub(super) fn copy(&self) -> Self {
        let Self { store, extractor, policies, reject, cost, on_error, on_missing_key, fields, observer } = self;
        Self {
            store: store.clone(),
            extractor: Arc::clone(extractor),
            policies: policies.copy(),
            reject: Arc::clone(reject),
            cost: cost.clone(),
            on_error: *on_error,
            on_missing_key: *on_missing_key,
            fields: *fields,
            observer: observer.clone(),
        }
    }
}

impl<S: fmt::Debug, K, R> Config<S, K, R> {
    /// Shows the layer or service of this name that has these settings.
    pub(super) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name).field("store", &self.store).field("policies", &self.policies).finish_non_exhaustive()
    }
}
