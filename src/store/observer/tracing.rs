use tracing::{debug, info, trace, warn};

use super::{Observer, event};

/// Tells `tracing`: a degraded store as a warning, a recovery and a settlement as information, failures for debugging,
/// and decisions as traces. No key is ever told.
///
/// ```
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore, TracingObserver};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store = Fallback::new(redis, LocalStore::default()).observer(TracingObserver);
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct TracingObserver;

impl Observer for TracingObserver {
    fn decided(&self, &event::Decided { decision, elapsed, .. }: &event::Decided<'_>) {
        trace!(
            policy = decision.policy().name(),
            allowed = decision.is_allowed(),
            remaining = decision.remaining(),
            source = ?decision.source(),
            ?elapsed,
            "rate limit decided"
        );
    }

    fn failed(&self, &event::Failed { error, .. }: &event::Failed<'_>) {
        debug!(kind = ?error.kind(), error = error as &dyn std::error::Error, "rate limit check failed");
    }

    fn degraded(&self, &event::Degraded { error }: &event::Degraded<'_>) {
        warn!(
            kind = ?error.kind(),
            error = error as &dyn std::error::Error,
            "rate limits are local: the shared store has failed too often"
        );
    }

    fn recovered(&self, &event::Recovered { after }: &event::Recovered) {
        info!(?after, "rate limits are shared again");
    }

    fn settled(&self, &event::Settled { charged, dropped }: &event::Settled) {
        info!(charged, dropped, "charged what was granted locally to the shared store");
    }

    fn sends(&self, &event::Sends { checks, waiting }: &event::Sends) {
        trace!(checks, waiting, "rate limit checks sent");
    }
}
