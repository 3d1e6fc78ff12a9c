use std::sync::Arc;

use metrics::{
    SharedString, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};

use super::{Event, Observer};

/// Records metrics through the `metrics` crate.
///
/// | metric | kind | labels in addition to `store` |
/// |---|---|---|
/// | `ratelimit_decisions_total` | counter | `policy`, `outcome` ([`Outcome::as_str`](crate::check::Outcome::as_str)), `source` ([`Source::as_str`](crate::check::Source::as_str)), `dry_run` |
/// | `ratelimit_check_seconds` | histogram | |
/// | `ratelimit_failures_total` | counter | `kind` ([`ErrorKind::as_str`](crate::store::ErrorKind::as_str)) |
/// | `ratelimit_unanswered_total` | counter of the requests that [no store decided](Event::Failed) | |
/// | `ratelimit_uncounted_total` | counter of the requests that layers [did not count](Event::Uncounted) | `reason` ([`UncountedReason::as_str`](super::UncountedReason::as_str)), `outcome` (`passed` or `rejected`) |
/// | `ratelimit_second_key_total` | counter of the requests whose key the second extractor of an [`or`](crate::extract::KeyExtractor::or) found | |
/// | `ratelimit_runtime_late_seconds` | histogram of the delays with which the runtime [noticed](Event::RuntimeLate) deadlines | |
/// | `ratelimit_degraded` | gauge: 1 while the fallback decides | |
/// | `ratelimit_outage_seconds` | histogram | |
/// | `ratelimit_reconciled_total`, `ratelimit_dropped_total` | counters, in units of cost | |
/// | `ratelimit_leased_total`, `ratelimit_lease_refunded_total`, `ratelimit_lease_expired_total`, `ratelimit_lease_lost_total` | counters, in units of cost: [charged in advance](crate::Leased); of that, refunded unspent and expired; and possibly lost because Redis did not reply | |
/// | `ratelimit_batch_checks` | histogram | |
/// | `ratelimit_queue_checks` | gauge | |
/// | `ratelimit_misconfigured_total` | counter of the [reports](Event::Misconfigured) | `code` ([`Event::code`], or `other`) |
///
/// The label `store` is the name of the observer. Create one [named](Self::named) observer per
/// [`Fallback`](crate::Fallback). No label contains a caller's key: that would create a series per
/// caller. Each policy name creates series, so do not name a policy for each caller: the policies
/// of [`Tiers::callers`](crate::select::Tiers::callers) may all have the same name, since their
/// keys differ.
///
/// Alone it keeps the [log of problems](Observer) of a layer or store without an observer.
/// `(MetricsObserver::new(), ())` disables that log.
///
/// The names end as OpenMetrics requires (`_total`, `_seconds`), so that exporters do not change them.
///
/// # Metrics for Prometheus
///
/// ```
/// use axum::{Router, routing::get};
/// use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::observe::MetricsObserver;
/// use tower_redis_ratelimit::{Fallback, LocalStore, Policy, Quota, RateLimitLayer};
/// use tower_redis_ratelimit::{RedisStore, Strategy};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Install the recorder first: observers created earlier are not described, and their gauges are
/// // missing until they change.
/// let recorder = PrometheusBuilder::new()
///     // Without buckets the exporter emits quantiles, which cannot be aggregated over instances.
///     .set_buckets_for_metric(Matcher::Full("ratelimit_check_seconds".into()), &[0.0001, 0.001, 0.01, 0.1])?
///     .install_recorder()?;
///
/// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1/")?, LocalStore::default());
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let limits = RateLimitLayer::new(store, Global, policy).observer(MetricsObserver::new());
/// let app: Router = Router::new()
///     .route("/", get(|| async { "hello" }))
///     .layer(limits)
///     // Added after the layer, so it is not limited.
///     .route("/metrics", get(move || async move { recorder.render() }));
/// # let _ = app;
/// # Ok(())
/// # }
/// ```
///
/// ```text
/// # HELP ratelimit_degraded Whether the fallback decides, because the primary store has failed too often.
/// # TYPE ratelimit_degraded gauge
/// ratelimit_degraded{store="default"} 0
/// ```
///
/// Query the denials per second with
/// `rate(ratelimit_decisions_total{outcome=~"denied|exceeds_capacity",dry_run="false"}[5m])`. The
/// repository contains alert rules and a dashboard in `examples/ops`: see the
/// [runbook](crate::guide::runbook).
#[derive(Debug, Clone)]
#[must_use]
pub struct MetricsObserver {
    store: SharedString,
}

/// Counters that have no other label than `store`.
const COUNTERS: &[(&str, &str)] = &[
    (
        "ratelimit_second_key_total",
        "Requests without a key for the first extractor of an `or`, for which the second one found a key.",
    ),
    (
        "ratelimit_unanswered_total",
        "Requests that no store decided. They were rejected, or passed uncounted.",
    ),
    (
        "ratelimit_reconciled_total",
        "Cost granted by the fallback and later charged to the primary store.",
    ),
    (
        "ratelimit_dropped_total",
        "Cost granted by the fallback that could not be charged to the primary store.",
    ),
    (
        "ratelimit_leased_total",
        "Cost charged in advance, to be spent in memory.",
    ),
    (
        "ratelimit_lease_refunded_total",
        "Leased cost that was refunded before it expired, such as at a shutdown.",
    ),
    (
        "ratelimit_lease_expired_total",
        "Leased cost that expired unspent. The part that still counted was refunded.",
    ),
    (
        "ratelimit_lease_lost_total",
        "Leased cost that may have been charged and lost because Redis did not reply.",
    ),
];
/// Without a unit: from OpenTelemetry, Prometheus would name gauges of unit 1 `.._ratio`.
const GAUGES: &[(&str, &str)] = &[
    (
        "ratelimit_degraded",
        "Whether the fallback decides, because the primary store has failed too often.",
    ),
    (
        "ratelimit_queue_checks",
        "Checks waiting in the queue when the last script call was sent to Redis.",
    ),
];
const HISTOGRAMS: &[(&str, Unit, &str)] = &[
    (
        "ratelimit_check_seconds",
        Unit::Seconds,
        "Duration of a check.",
    ),
    (
        "ratelimit_runtime_late_seconds",
        Unit::Seconds,
        "Delay with which the runtime noticed the deadline of a check.",
    ),
    (
        "ratelimit_outage_seconds",
        Unit::Seconds,
        "Duration of an outage, during which the fallback decided.",
    ),
    (
        "ratelimit_batch_checks",
        Unit::Count,
        "Checks decided by one script call in Redis.",
    ),
];

impl MetricsObserver {
    /// Creates an observer with the label `store="default"`.
    pub fn new() -> Self {
        Self::named("default")
    }

    /// Creates an observer with this label `store`, for a process with several stores. Observers of
    /// the same name share their gauges, so give each store its name.
    ///
    /// The constructor describes the metrics to the recorder, and registers those without further
    /// labels, so install the recorder first.
    pub fn named(store: &str) -> Self {
        let store = SharedString::from(Arc::<str>::from(store));
        describe_counter!(
            "ratelimit_decisions_total",
            Unit::Count,
            "Requests decided, by deciding policy, outcome, and source. A dry run rejects \
             nothing."
        );
        describe_counter!(
            "ratelimit_failures_total",
            Unit::Count,
            "Checks that a store could not decide, by kind of error. A fallback may have decided them."
        );
        describe_counter!(
            "ratelimit_uncounted_total",
            Unit::Count,
            "Requests that layers did not count, by reason. They passed, or were rejected without a key."
        );
        describe_counter!(
            "ratelimit_misconfigured_total",
            Unit::Count,
            "Reports that rate limiting is misconfigured, by code. The log names the problem."
        );
        for &(name, description) in COUNTERS {
            describe_counter!(name, Unit::Count, description);
            counter!(name, "store" => store.clone()).increment(0);
        }
        for &(name, description) in GAUGES {
            describe_gauge!(name, description);
            // Adding 0 keeps the value of a gauge that already exists.
            gauge!(name, "store" => store.clone()).increment(0.0);
        }
        for &(name, unit, description) in HISTOGRAMS {
            describe_histogram!(name, unit, description);
            // Register the histogram empty: Prometheus does not see the first outage unless the
            // series starts at 0.
            drop(histogram!(name, "store" => store.clone()));
        }
        Self { store }
    }

    fn store(&self) -> SharedString {
        self.store.clone()
    }
}

impl Default for MetricsObserver {
    fn default() -> Self {
        Self::new()
    }
}

impl Observer for MetricsObserver {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Decided {
                decision,
                elapsed,
                dry_run,
                ..
            } => {
                counter!(
                    "ratelimit_decisions_total",
                    "store" => self.store(),
                    "policy" => decision.policy().name().to_owned(),
                    "outcome" => decision.outcome().as_str(),
                    "source" => decision.source().as_str(),
                    "dry_run" => if dry_run { "true" } else { "false" },
                )
                .increment(1);
                histogram!("ratelimit_check_seconds", "store" => self.store()).record(elapsed);
            }
            Event::Failed {
                error, unanswered, ..
            } => {
                let kind = error.kind().as_str();
                counter!("ratelimit_failures_total", "store" => self.store(), "kind" => kind)
                    .increment(1);
                if unanswered {
                    counter!("ratelimit_unanswered_total", "store" => self.store()).increment(1);
                }
            }
            Event::Uncounted { reason, allowed } => {
                counter!(
                    "ratelimit_uncounted_total",
                    "store" => self.store(),
                    "reason" => reason.as_str(),
                    "outcome" => if allowed { "passed" } else { "rejected" },
                )
                .increment(1);
            }
            Event::SecondKey { .. } => {
                counter!("ratelimit_second_key_total", "store" => self.store()).increment(1);
            }
            Event::Misconfigured { .. } => {
                let code = event.code().unwrap_or("other");
                counter!("ratelimit_misconfigured_total", "store" => self.store(), "code" => code)
                    .increment(1);
            }
            Event::Suspected { .. } | Event::StillDegraded { .. } => {}
            Event::Degraded { .. } => {
                gauge!("ratelimit_degraded", "store" => self.store()).set(1);
            }
            Event::Recovered { after, .. } => {
                gauge!("ratelimit_degraded", "store" => self.store()).set(0);
                histogram!("ratelimit_outage_seconds", "store" => self.store()).record(after);
            }
            Event::Reconciled { charged, dropped } => {
                counter!("ratelimit_reconciled_total", "store" => self.store()).increment(charged);
                counter!("ratelimit_dropped_total", "store" => self.store()).increment(dropped);
            }
            Event::RuntimeLate { by, .. } => {
                histogram!("ratelimit_runtime_late_seconds", "store" => self.store()).record(by);
            }
            Event::LeasedBlockEnded {
                charged,
                refunded,
                expired,
                lost,
            } => {
                for (name, cost) in [
                    ("ratelimit_leased_total", charged),
                    ("ratelimit_lease_refunded_total", refunded),
                    ("ratelimit_lease_expired_total", expired),
                    ("ratelimit_lease_lost_total", lost),
                ] {
                    counter!(name, "store" => self.store()).increment(cost);
                }
            }
            Event::Sent { checks, waiting } => {
                histogram!("ratelimit_batch_checks", "store" => self.store()).record(checks as f64);
                gauge!("ratelimit_queue_checks", "store" => self.store()).set(waiting as f64);
            }
        }
    }

    /// A metric names no server and no fix.
    fn keeps_log(&self) -> bool {
        true
    }
}
