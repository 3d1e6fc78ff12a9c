//! Metrics that Prometheus scrapes.

use std::num::NonZeroU32;
use std::time::Duration;

use futures_util::FutureExt;
use http::request::Parts;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::extract::{Global, KeyExtractor, PeerIp, by_extension};
use tower_redis_ratelimit::observe::{Event, MetricsObserver, Observer, UncountedReason};
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::select::policies_fn;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{Fallback, Key, LocalStore, RateLimitLayer};

use crate::mocks::{Broken, Problems, anonymous, gcra, layer, layer_with, limited, request, send};

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
    assert_eq!(
        lines(&rendered, "ratelimit_unanswered_total"),
        [r#"ratelimit_unanswered_total{store="orders"} 0"#]
    );
    assert!(!rendered.contains("alice"), "{rendered}");
}

#[tokio::test(start_paused = true)]
async fn layers_count_what_no_store_decides() {
    let recorder = recorder(false);
    let _guard = metrics::set_default_local_recorder(&recorder);
    let store = MockStore::new();
    store.fail(StoreError::new(ErrorKind::Timeout));
    let layer = layer_with(store, "3/h").observer(MetricsObserver::new());
    let services = [
        limited(layer.clone()),
        limited(layer.clone().on_error(OnError::Allow)),
        limited(layer.dry_run()),
    ];
    for service in &services {
        send(service, request("alice")).await;
    }
    let counted = |metric| lines(&recorder.handle().render(), metric);
    assert_eq!(
        counted("ratelimit_unanswered_total"),
        [r#"ratelimit_unanswered_total{store="default"} 2"#],
        "a dry run rejects nothing"
    );
    assert_eq!(
        counted("ratelimit_failures_total"),
        [r#"ratelimit_failures_total{store="default",kind="timeout"} 3"#]
    );
}

#[test]
fn unlabeled_metrics_exist_from_the_start() {
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
        "ratelimit_outage_seconds_count{store=\"default\"} 0",
        "ratelimit_queue_checks{store=\"default\"} 0",
        "ratelimit_reconciled_total{store=\"default\"} 0",
        "ratelimit_runtime_late_seconds_count{store=\"default\"} 0",
        "ratelimit_second_key_total{store=\"default\"} 0",
        "ratelimit_unanswered_total{store=\"default\"} 0",
    ];
    let mut found = lines(&recorder.handle().render(), "ratelimit_");
    // Keep one line per histogram: its count.
    found.retain(|line| {
        !["_bucket{", "_sum{", "quantile="]
            .iter()
            .any(|part| line.contains(part))
    });
    assert_eq!(found, expected);

    let timeout = StoreError::new(ErrorKind::Timeout);
    observer.notify(&Event::degraded(&timeout, NonZeroU32::MIN, false));
    let _again = MetricsObserver::new();
    let recovered = Event::recovered(Duration::from_secs(1), 0, 0, 0, 0);
    MetricsObserver::named("other").notify(&recovered);
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
    let check = Check::take(Key::new("alice"), &gcra("api", "1/h").into(), 2);
    let decision = LocalStore::default()
        .check(check)
        .now_or_never()
        .unwrap()
        .unwrap();
    let key = Key::new("alice");
    let elapsed = Duration::from_millis(250);
    observer.notify(&Event::decided(&key, &decision, elapsed, true));
    observer.notify(&Event::failed(None, &error, false));
    observer.notify(&Event::uncounted(UncountedReason::Exempt, true));
    observer.notify(&Event::misconfigured("no address"));
    observer.notify(&Event::degraded(&error, NonZeroU32::MIN, false));
    observer.notify(&Event::recovered(Duration::from_secs(3), 0, 0, 0, 0));
    observer.notify(&Event::reconciled(7, 1));
    observer.notify(&Event::leased_block_ended(64, 3, 2, 0));
    observer.notify(&Event::sent(128, 5));
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
            ("ratelimit_runtime_late_seconds", "histogram"),
            ("ratelimit_second_key_total", "counter"),
            ("ratelimit_unanswered_total", "counter"),
            ("ratelimit_uncounted_total", "counter"),
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
        r#"ratelimit_misconfigured_total{store="default",code="other"} 1"#,
        r#"outcome="exceeds_capacity",source="local",dry_run="true"} 1"#,
    ] {
        assert!(rendered.contains(line), "{line} is missing in {rendered}");
    }
}

/// Each request of a layer is counted, or counted as uncounted.
#[tokio::test]
async fn uncounted_requests_are_counted_by_reason() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let observer = MetricsObserver::new;
    let keyed = || layer("1000/s").observer(observer());
    let none = policies_fn(|_: &Parts| None);
    let exempt = RateLimitLayer::new(LocalStore::default(), Global, none);
    let (exempt, allowing) = (
        exempt.observer(observer()),
        keyed().on_missing_key(OnMissingKey::Allow),
    );
    let failing = layer_with(Broken, "1/h").observer(observer());
    for _ in 0..3 {
        assert_eq!(send(&limited(keyed()), anonymous()).await.status(), 400);
    }
    for (service, request) in [
        (limited(allowing), anonymous()),
        (limited(keyed().skip(|_| true)), request("alice")),
        (limited(keyed().dry_run()), anonymous()),
        (limited(keyed().dry_run()), request("alice")),
        (limited(keyed()), request("alice")),
    ] {
        assert_eq!(send(&service, request).await.status(), 200);
    }
    assert_eq!(send(&limited(exempt), anonymous()).await.status(), 200);
    let passing = limited(failing.on_error(OnError::Allow));
    assert_eq!(send(&passing, request("alice")).await.status(), 200);
    let no_address = RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "1/h"));
    let no_address = limited(no_address.observer(observer()));
    assert_eq!(send(&no_address, request("alice")).await.status(), 500);

    let line = |reason: &str, outcome: &str, count: u32| {
        format!(
            r#"ratelimit_uncounted_total{{store="default",reason="{reason}",outcome="{outcome}"}} {count}"#
        )
    };
    assert_eq!(
        lines(&recorder.handle().render(), "ratelimit_uncounted_total"),
        [
            line("exempt", "passed", 1),
            line("failed", "passed", 1),
            line("misconfigured", "rejected", 1),
            line("no_key", "passed", 2),
            line("no_key", "rejected", 3),
            line("skipped", "passed", 1),
        ]
    );
}

/// A request that has been authenticated.
#[derive(Clone)]
struct User(u64);

/// Sends so many requests without a user, and one with a user before these and after those.
async fn anonymous_requests(number: usize, before: bool, after: bool) -> (Vec<String>, String) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let problems = Problems::default();
    let by_user = by_extension(|user: &User| user.0);
    let extractor = (by_user.or(Global), Global);
    let layer = RateLimitLayer::new(LocalStore::default(), extractor, gcra("api", "1000000/s"));
    let service = limited(layer.observer((problems.clone(), MetricsObserver::new())));
    let user = || {
        let mut request = anonymous();
        request.extensions_mut().insert(User(42));
        request
    };
    if before {
        send(&service, user()).await;
    }
    for _ in 0..number {
        send(&service, anonymous()).await;
    }
    if after {
        send(&service, user()).await;
    }
    let counted = recorder.handle().render();
    assert!(
        !counted.contains("ratelimit_misconfigured_total{"),
        "clients raise no alert: {counted}"
    );
    let counted = counted
        .lines()
        .find_map(|line| line.strip_prefix("ratelimit_second_key_total{store=\"default\"} "));
    let reported = problems.0.lock().unwrap().clone();
    (reported, counted.unwrap().to_owned())
}

#[tokio::test]
async fn keys_of_the_second_extractor_are_counted() {
    let (reported, counted) = anonymous_requests(5_000, false, true).await;
    let [report] = &reported[..] else {
        panic!("it is reported once: {reported:?}");
    };
    assert!(
        report.starts_with("suspected: none of the first 1000 requests had a `")
            && report.contains("User` in its extensions")
            && report.ends_with("#always-second-key)"),
        "{report}"
    );
    assert_eq!(counted, "5000");
    // A single user shows that the order is right.
    assert_eq!(
        anonymous_requests(5_000, true, false).await,
        (vec![], "5000".to_owned())
    );
    assert_eq!(
        anonymous_requests(999, false, true).await,
        (vec![], "999".to_owned())
    );
}
