use http::Response;
use http::request::Parts;

use super::Headers;
use crate::limit::Decision;
use crate::settle::Settled;

/// A decision, for the request that passes by it, and for the response.
#[derive(Debug)]
pub struct Annotation {
    pub(super) decision: Decision,
    /// The header fields that the response gets.
    pub(super) headers: Headers,
}

impl Annotation {
    /// Puts the decision into the request's extensions, where the inner service finds it. Refunds that of a layer around
    /// this one.
    pub(super) fn annotate_request(&self, request: &mut Parts) -> Option<Decision> {
        request.extensions.insert(self.decision.clone())
    }

    /// The same after the request's cost became known.
    pub(super) fn settled(self, cost: Option<Settled>) -> Self {
        match cost {
            Some(Settled { reserved, cost }) if cost != reserved => {
                Self { decision: self.decision.settled(reserved, cost), ..self }
            }
            _ => self,
        }
    }

    /// Puts the decision into the response's extensions, and adds its header fields.
    pub(super) fn annotate_response<B>(self, response: &mut Response<B>) {
        let within = response.extensions().get().map(Decision::is_allowed);
        self.headers.append_around(&self.decision, response.headers_mut(), within == Some(false));
        // Where layers wrap each other, the innermost decision is kept: it is why the response is what it is.
        if within.is_none() {
            response.extensions_mut().insert(self.decision);
        }
    }
}
