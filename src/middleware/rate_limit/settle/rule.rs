use std::sync::Arc;

use http::response::Parts;

use crate::settle::Settlement;

/// Settles a request by the head of its response.
#[derive(Clone)]
pub(in crate::middleware) struct Rule(Arc<dyn Fn(&Parts) -> Settlement + Send + Sync>);

impl Rule {
    pub(super) fn new(settle: impl Fn(&Parts) -> Settlement + Send + Sync + 'static) -> Self {
        Self(Arc::new(settle))
    }

    pub(in crate::middleware) fn settlement(&self, response: &Parts) -> Settlement {
        (self.0)(response)
    }
}
