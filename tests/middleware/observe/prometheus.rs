//! Metrics that Prometheus scrapes.

use std::time::Duration;

use futures_util::FutureExt;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::observe::{MetricsObserver, Observer, event};
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{Fallback, Key, LocalStore};

use crate::support::{layer_with, limited, policy, request, send};

fn recorder(recommended_naming: bool) -> PrometheusRecorder {
    let buckets = Matcher::Suffix("_seconds".into());
    let builder = PrometheusBuilder::new().with_recommended_naming(recommended_naming);
    builder
        .set_buckets_for_metric(buckets, &[0.1, 1.0])
        .unwrap()
        .build_recorder()
}

/// Returns the lines of one metric, in order.
fn lines(rendered: &str, metric: &str) -> Vec<String> {
    let mut lines: Vec<String> = rendered
        .lines()
        .filter(|line| line.starts_with(metric))
        .map(str::to_owned)
        .collect();
    lines.sort();
    lines
}

#[tokio::test(start_paused = true)]
async fn prometheus_exports_decisions_failures_and_breaker() {
    let recorder = recorder(false);
    let _guard = metrics::set_default_local_recorder(&recorder);
    let primary = MockStore::new();
    primary.fail(StoreError::new(ErrorKind::Unreachable));
    let store = Fallback::new(primary, LocalStore::default());
    let service = limited(layer_with(store, "3/h").observer(MetricsObserver::named("orders")));
    let rendered = || recorder.handle().render();
    assert_eq!(
        lines(&rendered(), "ratelimit_degraded"),
        ["ratelimit_degraded{store=\"orders\"} 0"]
    );
    for _ in 0..5 {
        send(&service, request("alice")).await;
    }
    let rendered = rendered();
    assert_eq!(
        lines(&rendered, "ratelimit_decisions_total"),
        [
            r#"ratelimit_decisions_total{store="orders",policy="api",outcome="allowed",source="local",dry_run="false"} 3"#,
            r#"ratelimit_decisions_total{store="orders",policy="api",outcome="denied",source="local",dry_run="false"} 2"#,
        ]
    );
    assert_eq!(
        lines(&rendered, "ratelimit_failures_total"),
        [r#"ratelimit_failures_total{store="orders",kind="unreachable"} 3"#]
    );
    assert_eq!(
        lines(&rendered, "ratelimit_degraded"),
        [r#"ratelimit_degraded{store="orders"} 1"#]
    );
    assert_eq!(
        lines(&rendered, "ratelimit_check_seconds_count"),
        [r#"ratelimit_check_seconds_count{store="orders"} 5"#]
    );
    assert!(!rendered.contains("alice"), "{rendered}");
}

#[test]
fn unlabelled_metrics_exist_from_the_start() {
    let recorder = recorder(false);
    let _guard = metrics::set_default_local_recorder(&recorder);
    let observer = MetricsObserver::new();
    let expected = [
        "ratelimit_batch_checks_count{store=\"default\"} 0",
        "ratelimit_check_seconds_count{store=\"default\"} 0",
        "ratelimit_degraded{store=\"default\"} 0",
        "ratelimit_dropped_total{store=\"default\"} 0",
        "ratelimit_lease_expired_total{store=\"default\"} 0",
        "ratelimit_lease_lost_total{store=\"default\"} 0",
        "ratelimit_lease_refunded_total{store=\"default\"} 0",
        "ratelimit_leased_total{store=\"default\"} 0",
        "ratelimit_misconfigured_total{store=\"default\"} 0",
        "ratelimit_outage_seconds_count{store=\"default\"} 0",
        "ratelimit_queue_checks{store=\"default\"} 0",
        "ratelimit_reconciled_total{store=\"default\"} 0",
    ];
    let mut found = lines(&recorder.handle().render(), "ratelimit_");
    // Keep one line per histogram: its count.
    found.retain(|line| {
        !["_bucket{", "_sum{", "quantile="]
            .iter()
            .any(|part| line.contains(part))
    });
    assert_eq!(found, expected);

    observer.degraded(&event::Degraded::new(&StoreError::new(ErrorKind::Timeout)));
    let _again = MetricsObserver::new();
    MetricsObserver::named("other").recovered(&event::Recovered::new(Duration::from_secs(1)));
    let degraded = lines(&recorder.handle().render(), "ratelimit_degraded");
    assert_eq!(
        degraded,
        [
            "ratelimit_degraded{store=\"default\"} 1",
            "ratelimit_degraded{store=\"other\"} 0"
        ]
    );
}

/// Emits every event, so that every metric is set, and a dry run.
fn emit_all(observer: &impl Observer) {
    let error = StoreError::new(ErrorKind::Timeout);
    let check = Check::take(Key::new("alice"), &policy("api", "1/h").into(), 2);
    let decision = LocalStore::default()
        .check(check)
        .now_or_never()
        .unwrap()
        .unwrap();
    let key = Key::new("alice");
    let mut decided = event::Decided::new(&key, &decision, Duration::from_millis(250));
    decided.dry_run = true;
    observer.decided(&decided);
    observer.failed(&event::Failed::new(None, &error));
    observer.misconfigured(&event::Misconfigured::new("no address"));
    observer.degraded(&event::Degraded::new(&error));
    observer.recovered(&event::Recovered::new(Duration::from_secs(3)));
    observer.reconciled(&event::Reconciled::new(7, 1));
    observer.leased(&event::Leased::new(64, 3, 2));
    observer.sent(&event::Sent::new(128, 5));
}

#[test]
fn metrics_are_described_and_follow_openmetrics() {
    let rendered = [false, true].map(|recommended_naming| {
        let recorder = recorder(recommended_naming);
        metrics::with_local_recorder(&recorder, || emit_all(&MetricsObserver::new()));
        let mut lines: Vec<String> = recorder
            .handle()
            .render()
            .lines()
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    });
    assert_eq!(
        rendered[0], rendered[1],
        "an exporter that normalizes names leaves them unchanged"
    );
    let rendered = rendered[0].join("\n");
    let kinds: Vec<(&str, &str)> = rendered
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            ("ratelimit_batch_checks", "summary"),
            ("ratelimit_check_seconds", "histogram"),
            ("ratelimit_decisions_total", "counter"),
            ("ratelimit_degraded", "gauge"),
            ("ratelimit_dropped_total", "counter"),
            ("ratelimit_failures_total", "counter"),
            ("ratelimit_lease_expired_total", "counter"),
            ("ratelimit_lease_lost_total", "counter"),
            ("ratelimit_lease_refunded_total", "counter"),
            ("ratelimit_leased_total", "counter"),
            ("ratelimit_misconfigured_total", "counter"),
            ("ratelimit_outage_seconds", "histogram"),
            ("ratelimit_queue_checks", "gauge"),
            ("ratelimit_reconciled_total", "counter"),
        ]
    );
    for (name, kind) in kinds {
        assert!(
            rendered.contains(&format!("# HELP {name} ")),
            "{name} is not described"
        );
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
    }
    for line in [
        r#"ratelimit_check_seconds_bucket{store="default",le="1"} 1"#,
        r#"ratelimit_check_seconds_bucket{store="default",le="0.1"} 0"#,
        r#"ratelimit_outage_seconds_sum{store="default"} 3"#,
        r#"ratelimit_misconfigured_total{store="default"} 1"#,
        r#"outcome="exceeds_capacity",source="local",dry_run="true"} 1"#,
    ] {
        assert!(rendered.contains(line), "{line} is missing in {rendered}");
    }
}
