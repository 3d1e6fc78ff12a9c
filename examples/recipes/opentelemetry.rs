//! Metrics and spans for OpenTelemetry.

use axum::{Router, body::Body, http::Request, routing::get};
use metrics_exporter_otel::OpenTelemetryRecorder;
use opentelemetry::{Value, metrics::MeterProvider, trace::TracerProvider};
use opentelemetry_sdk::metrics::{InMemoryMetricExporter, SdkMeterProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider};
use tower::ServiceExt;
use tower_http::trace::TraceLayer;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::observe::{MetricsObserver, TracingObserver};
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
use tracing::{field, info_span};
use tracing_subscriber::{filter::LevelFilter, layer::SubscriberExt};

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(1))?;
    let limits = RateLimitLayer::new(LocalStore::default(), Global, policy)
        .observer((MetricsObserver::new(), TracingObserver::new()));
    let spans = TraceLayer::new_for_http()
        .make_span_with(|_: &Request<Body>| info_span!("request", rate_limit = field::Empty));
    Ok(Router::new()
        .route("/", get(|| async {}))
        .layer(limits)
        .layer(spans))
}

#[tokio::test]
async fn opentelemetry_gets_metrics_and_spans() -> Result<(), Box<dyn std::error::Error>> {
    let (metrics, spans) = (
        InMemoryMetricExporter::default(),
        InMemorySpanExporter::default(),
    );
    let meters = SdkMeterProvider::builder()
        .with_periodic_exporter(metrics.clone())
        .build();
    metrics::set_global_recorder(OpenTelemetryRecorder::new(meters.meter("shop")))?;
    let tracers = SdkTracerProvider::builder()
        .with_simple_exporter(spans.clone())
        .build();
    let traced = tracing_opentelemetry::layer().with_tracer(tracers.tracer("shop"));
    tracing::subscriber::set_global_default(
        tracing_subscriber::registry()
            .with(traced)
            .with(LevelFilter::INFO),
    )?;

    let app = app()?;
    for status in [200, 429] {
        assert_eq!(
            app.clone()
                .oneshot(Request::new(Body::empty()))
                .await?
                .status(),
            status
        );
    }

    meters.force_flush()?;
    let metrics = metrics.get_finished_metrics()?;
    let mut names = metrics
        .iter()
        .flat_map(|all| all.scope_metrics())
        .flat_map(|some| some.metrics());
    assert!(
        names.any(|metric| metric.name() == "ratelimit_decisions_total"),
        "{metrics:?}"
    );

    let spans = spans.get_finished_spans()?;
    let denied = spans[1]
        .attributes
        .iter()
        .find(|attribute| attribute.key.as_str() == "rate_limit");
    assert_eq!(
        denied.map(|attribute| &attribute.value),
        Some(&Value::from("denied")),
        "{spans:?}"
    );
    Ok(())
}
