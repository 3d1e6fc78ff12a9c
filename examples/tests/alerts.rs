//! Produces the metrics of services whose Redis is killed, as series for Prometheus's tool, with the alerts that they must fire.
//! `cargo xtask ops` runs this, and then the rules on `services.test.json`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{Request, StatusCode};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{Global, KeyExtractor, PeerIp};
use tower_redis_ratelimit::observe::MetricsObserver;
use tower_redis_ratelimit::store::{AnyStore, Store};
use tower_redis_ratelimit::{
    Fallback, LocalStore, Policy, Quota, RateLimitLayer, RedisStore, Strategy,
};

use crate::support::{RedisServer, until};

/// Requests a minute for each route: one a second.
const REQUESTS: usize = 60;
/// The metrics of the rules.
const METRICS: [&str; 7] = [
    "ratelimit_decisions_total{",
    "ratelimit_degraded{",
    "ratelimit_dropped_total{",
    "ratelimit_failures_total{",
    "ratelimit_misconfigured_total{",
    "ratelimit_reconciled_total{",
    "ratelimit_unanswered_total{",
];

/// A route of an instance, by how its requests are counted.
#[derive(Clone, Copy, PartialEq)]
enum Route {
    /// Counts in Redis.
    Shared,
    /// Counts in Redis, with a fallback.
    WithFallback,
    /// Counts in this process.
    Local,
    /// Counts in Redis, without an effect.
    DryRun,
    /// Counts by addresses that the server does not record.
    NoAddress,
}

impl Route {
    fn router(self, url: &str) -> Router {
        let path = format!("/{}", self as usize);
        let redis = || RedisStore::connect_lazy(url).unwrap();
        let store: AnyStore = match self {
            Self::WithFallback => Fallback::new(redis(), LocalStore::default()).into(),
            Self::Shared | Self::DryRun => redis().into(),
            Self::Local | Self::NoAddress => LocalStore::default().into(),
        };
        let router = Router::new().route(&path, get(|| async {}));
        let observer = MetricsObserver::new();
        match self {
            Self::NoAddress => router.layer(layer(store, PeerIp).observer(observer)),
            Self::DryRun => router.layer(layer(store, Global).dry_run().observer(observer)),
            _ => router.layer(layer(store, Global).observer(observer)),
        }
    }

    fn status(self, is_up: bool) -> StatusCode {
        match self {
            Self::Shared if !is_up => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoAddress => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::OK,
        }
    }
}

fn layer<S: Store, K: KeyExtractor>(store: S, key: K) -> RateLimitLayer<S, K> {
    let quota = Quota::per_second(1_000_000);
    RateLimitLayer::new(
        store,
        key,
        Policy::new("api", Strategy::Gcra, quota).unwrap(),
    )
}

/// Series by name and labels, with their value in each minute.
type Series = BTreeMap<String, Vec<String>>;

/// Serves requests for some minutes, with Redis unavailable from minute `outage.0` until `outage.1`, and adds the series of this
/// instance.
fn serve(
    all: &mut Series,
    instance: &str,
    routes: &[Route],
    minutes: usize,
    outage: (usize, usize),
) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let mut server = RedisServer::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let serving = async {
        let mut app = Router::new();
        for route in routes {
            app = app.merge(route.router(&server.url()));
        }
        for minute in 0..minutes {
            if minute == outage.0 {
                server.kill();
            }
            if minute == outage.1 {
                server.restart();
                until("Redis decides again", || async {
                    !recorder
                        .handle()
                        .render()
                        .contains("ratelimit_degraded{store=\"default\"} 1")
                })
                .await;
            }
            let is_up = !(outage.0..outage.1).contains(&minute);
            for route in routes {
                // Requests without an address are reported once.
                for _ in 0..REQUESTS {
                    let request = Request::get(format!("/{}", *route as usize)).body(Body::empty());
                    let response = app.clone().oneshot(request.unwrap()).await.unwrap();
                    assert_eq!(response.status(), route.status(is_up), "in minute {minute}");
                }
            }
            add(all, &recorder.handle(), instance, minute);
        }
    };
    metrics::with_local_recorder(&recorder, || runtime.unwrap().block_on(serving));
}

/// Adds the present values. A series that begins later has no values in the first minutes.
fn add(all: &mut Series, metrics: &PrometheusHandle, instance: &str, minute: usize) {
    let rendered = metrics.render();
    for line in rendered
        .lines()
        .filter(|line| METRICS.iter().any(|name| line.starts_with(name)))
    {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap();
        let series = format!("{name}{{job=\"shop\",instance=\"{instance}\",{labels}");
        let values = all.entry(series).or_default();
        values.resize(minute, "_".to_owned());
        values.push(value.to_owned());
    }
}

/// An alert that must fire.
fn fires(
    alert: &str,
    severity: &str,
    code: Option<&str>,
    summary: &str,
    description: &str,
) -> Value {
    let page = "https://docs.rs/tower-redis-ratelimit/latest/tower_redis_ratelimit/guide/runbook/index.html";
    let mut labels = json!({ "job": "shop", "store": "default", "severity": severity });
    if let Some(code) = code {
        labels["code"] = code.into();
    }
    json!({
        "exp_labels": labels,
        "exp_annotations": {
            "summary": summary,
            "description": description,
            "runbook_url": format!("{page}#{}", alert.to_lowercase()),
        },
    })
}

/// A test for Prometheus's tool: the alerts in some minutes. Alerts that are not named must not fire.
fn test(name: &str, series: Series, minutes: &[(usize, &[(&str, Value)])]) -> Value {
    const ALERTS: [&str; 5] = [
        "RateLimitUnanswered",
        "RateLimitDegraded",
        "RateLimitChecksFail",
        "RateLimitNotReconciled",
        "RateLimitMisconfigured",
    ];
    let series: Vec<Value> = series
        .into_iter()
        .map(|(series, values)| json!({ "series": series, "values": values.join(" ") }))
        .collect();
    let mut tests = vec![];
    for (minute, firing) in minutes {
        for alert in ALERTS {
            let expected: Vec<&Value> = firing
                .iter()
                .filter(|(name, _)| *name == alert)
                .map(|(_, value)| value)
                .collect();
            tests.push(json!({ "alertname": alert, "eval_time": format!("{minute}m"), "exp_alerts": expected }));
        }
    }
    json!({ "name": name, "interval": "1m", "input_series": series, "alert_rule_test": tests })
}

fn unanswered(instances: &str) -> (&'static str, Value) {
    let summary = "1 requests a second of shop are not counted, because no store decides them";
    let name = "RateLimitUnanswered";
    (name, fires(name, "critical", None, summary, instances))
}

fn degraded(of: &str, instances: &str) -> (&'static str, Value) {
    let summary =
        format!("{of} instances of shop have decided without Redis for most of ten minutes");
    let name = "RateLimitDegraded";
    (name, fires(name, "warning", None, &summary, instances))
}

#[test]
fn services_produce_series_for_the_rules() {
    use Route::{DryRun, Local, NoAddress, Shared, WithFallback};

    let never = (usize::MAX, usize::MAX);
    let series = |instances: &[(&str, &[Route])], minutes, outage| {
        let mut all = Series::new();
        for (instance, routes) in instances {
            serve(&mut all, instance, routes, minutes, outage);
        }
        all
    };

    let other_layer = series(&[("a", &[Local, Shared])], 30, (10, usize::MAX));
    assert!(
        other_layer
            .keys()
            .any(|series| series.contains("source=\"local\"")),
        "{other_layer:?}"
    );
    let half = series(
        &[("a", &[WithFallback]), ("b", &[Shared])],
        30,
        (10, usize::MAX),
    );
    let with_fallback = series(
        &[("a", &[WithFallback]), ("b", &[WithFallback, Local])],
        30,
        (10, usize::MAX),
    );
    let short = series(&[("a", &[WithFallback])], 30, (10, 14));
    let dry_run = series(&[("a", &[DryRun])], 30, (10, usize::MAX));
    let no_address = series(&[("a", &[Local]), ("b", &[NoAddress])], 90, never);
    assert!(
        no_address
            .keys()
            .any(|series| series.contains("code=\"no-peer-address\"")),
        "{no_address:?}"
    );

    let name = "RateLimitMisconfigured";
    let summary =
        "shop is misconfigured, so that some requests are not counted correctly: no-peer-address";
    let misconfigured = (
        name,
        fires(name, "warning", Some("no-peer-address"), summary, "On b"),
    );
    let tests = [
        test(
            "Redis is unavailable, and another layer counts in its process",
            other_layer,
            &[(14, &[]), (25, &[unanswered("On a")])],
        ),
        test(
            "Redis is unavailable, and half of the instances have a fallback",
            half,
            &[
                (14, &[]),
                (25, &[unanswered("On b"), degraded("1 of 2", "On a")]),
            ],
        ),
        test(
            "Redis is unavailable, and all instances have a fallback",
            with_fallback,
            &[(14, &[]), (25, &[degraded("2 of 2", "On a, b")])],
        ),
        test(
            "Redis is unavailable for four minutes, behind a fallback",
            short,
            &[(14, &[]), (17, &[]), (25, &[])],
        ),
        test(
            "Redis is unavailable, in a dry run",
            dry_run,
            &[(14, &[]), (25, &[])],
        ),
        test(
            "no request has an address",
            no_address,
            &[(5, &[misconfigured]), (80, &[])],
        ),
    ];
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("ops/alerts.yml");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("services.test.json");
    let text = json!({ "rule_files": [rules], "evaluation_interval": "1m", "tests": tests });
    fs::write(file, text.to_string()).unwrap();
}
