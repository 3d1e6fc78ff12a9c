use std::time::Duration;

use tracing::{debug, info, trace, warn};

use super::Observer;
use crate::limit::Decision;
use crate::store::Error;

/// Tells `tracing`: a degraded store as a warning, a recovery and a settlement as information, failures for debugging,
/// and decisions as traces. No key is ever told.
#[derive(Debug, Clone, Copy, Default)]
pub struct TracingObserver;

impl Observer for TracingObserver {
    fn decided(&self, decision: &Decision, took: Duration) {
        trace!(
            policy = decision.policy().name(),
            allowed = decision.is_allowed(),
            remaining = decision.remaining(),
            source = ?decision.source(),
            ?took,
            "rate limit decided"
        );
    }

    fn failed(&self, error: &Error) {
        debug!(kind = ?error.kind(), error = error as &dyn std::error::Error, "rate limit check failed");
    }

    fn degraded(&self, error: &Error) {
        warn!(
            kind = ?error.kind(),
            error = error as &dyn std::error::Error,
            "rate limits are local: the shared store has failed too often"
        );
    }

    fn recovered(&self, after: Duration) {
        info!(?after, "rate limits are shared again");
    }

    fn settled(&self, charged: u64, dropped: u64) {
        info!(charged, dropped, "charged what was granted locally to the shared store");
    }

    fn sends(&self, checks: usize, waiting: usize) {
        trace!(checks, waiting, "rate limit checks sent");
    }
}
