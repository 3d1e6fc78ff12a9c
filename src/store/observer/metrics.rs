use metrics::{counter, gauge, histogram};

use super::{Observer, event};

/// Tells the recorder of the `metrics` crate.
///
/// | metric | kind | labels |
/// |---|---|---|
/// | `ratelimit_decisions_total` | counter | `policy`, `outcome` (`allowed`, `denied`, `never_fits`), `source` ([`Source::as_str`](crate::Source::as_str)) |
/// | `ratelimit_check_seconds` | histogram | |
/// | `ratelimit_failures_total` | counter | `kind` |
/// | `ratelimit_degraded` | gauge: 1 while the fallback decides | |
/// | `ratelimit_outage_seconds` | histogram | |
/// | `ratelimit_settled_total`, `ratelimit_dropped_total` | counters, in units of cost | |
/// | `ratelimit_batch_checks` | histogram | |
/// | `ratelimit_queue_checks` | gauge | |
///
/// ```
/// use tower_redis_ratelimit::{Fallback, LocalStore, MetricsObserver, RedisStore};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store = Fallback::new(redis, LocalStore::default()).observer(MetricsObserver);
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct MetricsObserver;

impl Observer for MetricsObserver {
    fn decided(&self, &event::Decided { decision, elapsed, .. }: &event::Decided<'_>) {
        let policy = decision.policy().name().to_owned();
        let (outcome, source) = (decision.outcome().as_str(), decision.source().as_str());
        counter!("ratelimit_decisions_total", "policy" => policy, "outcome" => outcome, "source" => source)
            .increment(1);
        histogram!("ratelimit_check_seconds").record(elapsed);
    }

    fn failed(&self, event: &event::Failed<'_>) {
        counter!("ratelimit_failures_total", "kind" => event.error.kind().as_str()).increment(1);
    }

    fn degraded(&self, _: &event::Degraded<'_>) {
        gauge!("ratelimit_degraded").set(1);
    }

    fn recovered(&self, &event::Recovered { after }: &event::Recovered) {
        gauge!("ratelimit_degraded").set(0);
        histogram!("ratelimit_outage_seconds").record(after);
    }

    fn settled(&self, &event::Settled { charged, dropped }: &event::Settled) {
        counter!("ratelimit_settled_total").increment(charged);
        counter!("ratelimit_dropped_total").increment(dropped);
    }

    fn sends(&self, &event::Sends { checks, waiting }: &event::Sends) {
        histogram!("ratelimit_batch_checks").record(checks as f64);
        gauge!("ratelimit_queue_checks").set(waiting as f64);
    }
}
