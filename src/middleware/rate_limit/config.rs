use std::marker::PhantomData;
use std::sync::Arc;

use http::Response;
use http::request::Parts;

use super::settle::Rule;
use crate::gate::{Gate, Refusal};
use crate::middleware::headers::Headers;
use crate::middleware::reject::{Reason, Reject, Rejection, challenge};

/// The settings of a layer: of its gate and of its responses.
pub(super) struct Config<S, R, E> {
    pub(super) gate: Gate<S, Parts>,
    pub(super) reject: Arc<R>,
    /// The header fields of responses.
    pub(super) headers: Headers,
    /// Whether the response to an admitted request has the decision in its extensions.
    pub(super) shows_decision: bool,
    /// The rule that settles requests by their responses. `None` if only their
    /// [`Charge`](crate::settle::Charge) does, or if nothing settles them.
    pub(super) rule: Option<Arc<Rule>>,
    pub(super) ending: PhantomData<fn() -> E>,
}

impl<S, R, E> Config<S, R, E> {
    /// The response to a rejected request.
    pub(super) fn respond<B>(&self, request: &Parts, refusal: Refusal) -> Response<B>
    where
        R: Reject<B>,
    {
        let respond = |reason| self.reject.reject(Rejection::new(reason, request));
        match refusal {
            Refusal::Denied(decision) => {
                let mut response = respond(Reason::Denied(&decision));
                self.headers.annotate(decision, &mut response, true);
                response
            }
            Refusal::Unavailable(error) => respond(Reason::Unavailable(&error)),
            Refusal::MissingKey(missing) => {
                let mut response = respond(Reason::MissingKey(&missing));
                challenge(&missing, &mut response);
                response
            }
        }
    }

    /// Replaces the rejection.
    pub(super) fn with_reject<R2>(self, reject: R2) -> Config<S, R2, E> {
        let Self {
            gate,
            headers,
            shows_decision,
            rule,
            ending,
            ..
        } = self;
        Config {
            gate,
            reject: Arc::new(reject),
            headers,
            shows_decision,
            rule,
            ending,
        }
    }

    /// Enables settlement, by this rule if there is one.
    pub(super) fn with_rule<E2>(self, rule: Option<Rule>) -> Config<S, R, E2> {
        let Self {
            mut gate,
            reject,
            headers,
            shows_decision,
            ..
        } = self;
        gate.settle();
        Config {
            gate,
            reject,
            headers,
            shows_decision,
            rule: rule.map(Arc::new),
            ending: PhantomData,
        }
    }
}

/// Creates fresh `Arc`s where requests clone them, to avoid contention.
impl<S: Clone, R, E> Clone for Config<S, R, E> {
    fn clone(&self) -> Self {
        Self {
            gate: self.gate.clone(),
            reject: Arc::clone(&self.reject),
            headers: self.headers,
            shows_decision: self.shows_decision,
            rule: self.rule.as_ref().map(|rule| Arc::new(Rule::clone(rule))),
            ending: PhantomData,
        }
    }
}
