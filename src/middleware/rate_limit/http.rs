use std::mem;
use std::sync::Arc;

use http::request::Parts;
use http::{Request, Response, response};
use tower_service::Service;

use crate::gate::{Grant, Notifier, Refusal};
use crate::middleware::DryRun;
use crate::middleware::headers::Headers;
use crate::middleware::machine::{Protocol, Serve};
use crate::middleware::reject::{HttpReject, Reason, Reject, Rejection, challenge, is_grpc};
use crate::settle::Settlement;

/// HTTP requests, whose refusals are responses.
pub(in crate::middleware) struct Http<R = HttpReject> {
    reject: Arc<R>,
    pub(super) answer: AnswerSettings,
    /// Settles requests by their responses. `None` if only a request's [`RequestCost`](crate::settle::RequestCost) does, or
    /// nothing.
    rule: Option<Arc<HeadRule>>,
}

/// Returns the settlement of a request from the head of its response.
pub(super) type HeadRule = Arc<dyn Fn(&response::Parts) -> Settlement + Send + Sync>;

/// The settings of responses, and of the decision in extensions, which are copied whole.
#[derive(Clone, Copy)]
pub(super) struct AnswerSettings {
    /// The header fields of responses.
    pub(super) headers: Headers,
    /// Whether a request that passes has the decision in its extensions.
    pub(super) decision_in_request: bool,
    /// Whether the response to a request that passes has the decision in its extensions.
    pub(super) decision_in_response: bool,
    /// Whether denials may have a status of success.
    pub(super) denies_with_success: bool,
}

impl Default for AnswerSettings {
    fn default() -> Self {
        Self {
            headers: Headers::default(),
            decision_in_request: true,
            decision_in_response: false,
            denies_with_success: false,
        }
    }
}

/// A response over gRPC has a `grpc-status`, and the HTTP status 200.
fn is_of_grpc<B>(response: &Response<B>) -> bool {
    response.headers().contains_key("grpc-status")
}

/// Calls `read` with the head of a response, which is taken apart for it.
fn with_parts<B, T>(response: &mut Response<B>, read: impl FnOnce(&response::Parts) -> T) -> T {
    let mut head = Response::new(());
    *head.status_mut() = response.status();
    *head.version_mut() = response.version();
    *head.headers_mut() = mem::take(response.headers_mut());
    *head.extensions_mut() = mem::take(response.extensions_mut());
    let (parts, ()) = head.into_parts();
    let result = read(&parts);
    *response.headers_mut() = parts.headers;
    *response.extensions_mut() = parts.extensions;
    result
}

/// Settles and annotates a response.
pub(in crate::middleware) struct Noted {
    answer: AnswerSettings,
    /// Whether the decision changes the response.
    is_annotated: bool,
    rule: Option<Arc<HeadRule>>,
}

impl<R, ReqBody> Protocol<Request<ReqBody>> for Http<R> {
    type Head = Parts;
    type Body = ReqBody;
    type Noted = Noted;
    type Error<E> = E;

    #[inline]
    fn split(request: Request<ReqBody>) -> (Parts, ReqBody) {
        request.into_parts()
    }

    /// The handler finds the decision and the [`RequestCost`](crate::settle::RequestCost) in the request's extensions.
    #[inline(always)]
    fn note<D>(&self, notifier: &Notifier, head: &mut Parts, grant: &mut Grant<D>) -> Noted {
        let AnswerSettings {
            headers,
            decision_in_request,
            decision_in_response,
            ..
        } = self.answer;
        let mut is_annotated = decision_in_response || headers != Headers::NONE;
        if let Some(charge) = grant.charge() {
            // The handler may respond with a denial, which has header fields to remove.
            is_annotated = true;
            // The handler sees the innermost one only, so that counts for the outer layers too.
            if let Some(outer) = head.extensions.insert(charge.clone()) {
                charge.count_for(outer);
            }
        }
        if decision_in_request
            && let Some(decision) = grant.show_decision(is_annotated)
            && let Some(outer) = head.extensions.insert(decision)
            && let Some(inner) = head.extensions.get()
        {
            notifier.counted_twice(&outer, inner);
        }
        Noted {
            answer: self.answer,
            is_annotated,
            rule: self.rule.clone(),
        }
    }

    #[inline(always)]
    fn join(head: Parts, body: ReqBody) -> Request<ReqBody> {
        Request::from_parts(head, body)
    }
}

impl<T, R, ReqBody, ResBody> Serve<T, Request<ReqBody>> for Http<R>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: Reject<ResBody>,
{
    #[inline]
    fn error(error: T::Error) -> T::Error {
        error
    }

    fn refuse(
        &self,
        notifier: &Notifier,
        head: &Parts,
        refusal: Refusal,
    ) -> Result<Response<ResBody>, T::Error> {
        let reason = match &refusal {
            Refusal::Denied(decision) => Reason::Denied(decision),
            Refusal::Unavailable(error) => Reason::Unavailable(error),
            Refusal::MissingKey(missing) => Reason::MissingKey(missing),
        };
        let mut response = self.reject.reject(Rejection::new(reason, head));
        self.check_rejection(notifier, head, &response);
        match refusal {
            Refusal::Denied(decision) => {
                self.answer.headers.annotate(decision, &mut response, true)
            }
            Refusal::Unavailable(_) => {}
            Refusal::MissingKey(missing) => challenge(&missing, &mut response),
        }
        Ok(response)
    }

    #[inline(always)]
    fn settle<D>(
        noted: &mut Noted,
        result: &mut Result<Response<ResBody>, T::Error>,
        grant: &mut Grant<D>,
    ) {
        let Ok(response) = result else {
            return;
        };
        if let Some(rule) = &noted.rule {
            grant.settle(with_parts(response, |parts| rule(parts)));
        }
        if noted.is_annotated
            && let Some(decision) = grant.take_decision()
        {
            let AnswerSettings {
                headers,
                decision_in_response,
                ..
            } = noted.answer;
            headers.annotate(decision, response, decision_in_response);
        }
    }

    #[inline(always)]
    fn finish<D>(result: &mut Result<Response<ResBody>, T::Error>, grant: &mut Grant<D>) {
        match result {
            Ok(response) => {
                if let Some(decisions) = grant.take_shadows() {
                    response
                        .extensions_mut()
                        .get_or_insert_default::<DryRun>()
                        .extend(decisions);
                }
            }
            // End the request even if its completed future is kept.
            Err(_) => *grant = Grant::default(),
        }
    }
}

impl<R> Http<R> {
    /// Reports a rejection that its client does not recognize.
    fn check_rejection<B>(&self, notifier: &Notifier, head: &Parts, response: &Response<B>) {
        // Clients and caches would take the rejection for the answer to the request.
        let is_success = response.status().is_success() && !self.answer.denies_with_success;
        let is_call = is_grpc(head);
        // Read last: a header field is the most expensive of these, and rarely needed.
        if !is_success && !is_call || is_of_grpc(response) {
            return;
        }
        if is_success {
            notifier.rejected_with_success(response.status());
        }
        if is_call {
            notifier.grpc_over_http();
        }
    }

    pub(super) fn with_reject<R2>(self, reject: R2) -> Http<R2> {
        Http {
            reject: Arc::new(reject),
            answer: self.answer,
            rule: self.rule,
        }
    }

    /// Settles requests at their end.
    pub(super) fn with_rule(self, rule: Option<HeadRule>) -> Self {
        Self {
            rule: rule.map(Arc::new),
            ..self
        }
    }
}

impl Default for Http {
    fn default() -> Self {
        Self {
            reject: Arc::new(HttpReject::new()),
            answer: AnswerSettings::default(),
            rule: None,
        }
    }
}

/// With a fresh `Arc` of the rule, which each request clones, to avoid contention.
impl<R> Clone for Http<R> {
    fn clone(&self) -> Self {
        Self {
            reject: Arc::clone(&self.reject),
            answer: self.answer,
            rule: self
                .rule
                .as_ref()
                .map(|rule| Arc::new(HeadRule::clone(rule))),
        }
    }
}
