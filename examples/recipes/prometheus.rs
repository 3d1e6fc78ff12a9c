//! Metrics for Prometheus.

use axum::{Router, body::Body, body::to_bytes, http::Request, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::observe::MetricsObserver;
use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, Box<dyn std::error::Error>> {
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(
            Matcher::Suffix("_seconds".into()),
            &[0.0001, 0.001, 0.01, 0.1, 1.0],
        )?
        .set_buckets_for_metric(
            Matcher::Full("ratelimit_batch_checks".into()),
            &[1.0, 8.0, 64.0],
        )?
        .install_recorder()?;
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(1))?;
    let limits =
        RateLimitLayer::new(LocalStore::default(), Global, policy).observer(MetricsObserver::new());
    Ok(Router::new()
        .route("/", get(|| async {}))
        .layer(limits)
        .route("/metrics", get(move || async move { recorder.render() })))
}

#[tokio::test]
async fn prometheus_reads_the_decisions() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    for status in [200, 429, 429] {
        assert_eq!(
            app.clone()
                .oneshot(Request::new(Body::empty()))
                .await?
                .status(),
            status
        );
    }
    let response = app
        .oneshot(Request::get("/metrics").body(Body::empty())?)
        .await?;
    let metrics = String::from_utf8(to_bytes(response.into_body(), 100_000).await?.into())?;
    let denied = metrics
        .lines()
        .find(|line| line.contains(r#"outcome="denied""#))
        .unwrap_or(&metrics);
    assert!(
        denied.starts_with("ratelimit_decisions_total{") && denied.ends_with("} 2"),
        "{denied}"
    );
    Ok(())
}
