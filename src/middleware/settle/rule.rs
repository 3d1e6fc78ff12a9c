use std::fmt;
use std::sync::Arc;

use http::response::Parts;

use crate::settle::Settlement;

/// What becomes of a request's cost, by the head of its response.
#[derive(Clone)]
pub(super) struct Rule(Option<Arc<Settle>>);

type Settle = dyn Fn(&Parts) -> Settlement + Send + Sync;

impl Rule {
    /// As the [`Charge`](crate::Charge) of the request says.
    pub(super) const AT_END: Self = Self(None);

    pub(super) fn new(settle: impl Fn(&Parts) -> Settlement + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(settle)))
    }

    pub(super) fn settlement(&self, response: &Parts) -> Settlement {
        self.0.as_ref().map_or(Settlement::AtEnd, |settle| settle(response))
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").finish_non_exhaustive()
    }
}
