//! `cargo run --example gateway`
//!
//! A service with plans, limits for individual callers, addresses behind proxies, a costly route, a page of
//! what a caller has used, a limit in a dry run, a log and metrics. Its settings are in `examples/gateway.toml`, or in another file: `cargo run --example gateway --
//! FILE`. Changed limits apply within a second. It needs no Redis, but the file may name one. In production, serve `/metrics` on a
//! port that clients do not reach, as `examples/envoy` does.

mod listen;
mod serve;

use std::collections::HashMap;
use std::error::Error;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, process, thread};

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::{Extension, Router, response::Response, routing::get};
use http::StatusCode;
use http::request::Parts;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde::Deserialize;
use tower_redis_ratelimit::check::Decision;
use tower_redis_ratelimit::extract::{ClientIp, KeyExtractor, MissingKey};
use tower_redis_ratelimit::observe::{MetricsObserver, TracingObserver};
use tower_redis_ratelimit::select::{Live, Tier, Tiers};
use tower_redis_ratelimit::store::{AnyStore, Health, Store, StoreConfig};
use tower_redis_ratelimit::{Key, Policies, RateLimitLayer};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/gateway.toml");

/// The contents of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    listen: SocketAddr,
    client_ip: ClientIp,
    store: StoreConfig,
    limits: Tiers,
    trial: Policies,
    /// By API key.
    users: HashMap<String, User>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct User {
    name: String,
    plan: String,
}

#[tokio::main]
async fn main() {
    if let Err(error) = run(env::args().nth(1).unwrap_or_else(|| FILE.to_owned())).await {
        eprintln!("{error}");
        process::exit(1);
    }
}

async fn run(file: String) -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let buckets = Matcher::Suffix("_seconds".to_owned());
    let metrics =
        PrometheusBuilder::new().set_buckets_for_metric(buckets, &[0.001, 0.01, 0.1, 1.0])?;
    let metrics = metrics.install_recorder()?;

    let text = read(&file);
    let settings = text
        .clone()
        .and_then(|text| parse(&text))
        .map_err(|error| format!("{file}: {error}"))?;
    let (limits, trial) = (Live::new(settings.limits), Live::new(settings.trial));
    let store = AnyStore::from_config(&settings.store)?;
    let layer = RateLimitLayer::new(store.clone(), Caller(settings.client_ip), limits.clone())
        .skip(|request| matches!(request.uri.path(), "/health" | "/metrics"))
        .cost(|request| match request.uri.path() {
            "/report" => 10,
            "/usage" => 0,
            _ => 1,
        })
        .shadow(trial.clone())
        .observer((TracingObserver::new().reveal_keys(), MetricsObserver::new()));

    let upkeep = metrics.clone();
    let checked = store.clone();
    let app = Router::new()
        .route("/", get(|| async { "Hello!\n" }))
        .route("/report", get(|| async { "A long report\n" }))
        .route("/usage", get(usage))
        .route("/health", get(async move || health(&checked)))
        .route("/metrics", get(async move || metrics.render()))
        .layer(layer)
        // The last one is the outermost: the limits know the user.
        .layer(from_fn_with_state(Arc::new(settings.users), authenticate));

    thread::spawn(move || {
        let mut known = text;
        loop {
            thread::sleep(Duration::from_secs(1));
            upkeep.run_upkeep();
            reload(&file, &mut known, &limits, &trial);
        }
    });
    let listener = tokio::net::TcpListener::bind(settings.listen).await?;
    help(listener.local_addr()?);
    serve::serve(listener, app).await?;
    // What the last requests gave back.
    store.flush().await;
    Ok(())
}

/// Shows callers how much they have used. The layer's check of this request has cost 0, so it has used nothing.
async fn usage(decision: Option<Extension<Decision>>) -> String {
    let Some(Extension(decision)) = decision else {
        return "no limit\n".to_owned();
    };
    let mut text = String::new();
    for each in decision.each() {
        text += &format!(
            "{}: {} of {} used, all of them free in {} s\n",
            each.policy().name(),
            each.used(),
            each.capacity(),
            each.reset_after().as_secs()
        );
    }
    text
}

/// Without a decision of any store, requests get a 503.
fn health(store: &AnyStore) -> (StatusCode, &'static str) {
    match store.health() {
        Health::Failing => (StatusCode::SERVICE_UNAVAILABLE, "failing\n"),
        Health::Local => (StatusCode::OK, "local\n"),
        _ => (StatusCode::OK, "ok\n"),
    }
}

/// Records the user of the API key, and the user's plan. A request with an unknown key is treated like one without a
/// key, so guesses are counted by address.
async fn authenticate(
    State(users): State<Arc<HashMap<String, User>>>,
    mut request: Request,
    next: Next,
) -> Response {
    let api_key = request
        .headers()
        .get("x-api-key")
        .and_then(|value| value.to_str().ok());
    if let Some(user) = api_key.and_then(|api_key| users.get(api_key)) {
        request
            .extensions_mut()
            .insert(Tier::new(user.plan.clone()));
        request.extensions_mut().insert(user.clone());
    }
    next.run(request).await
}

/// Counts users by name, and all others by address.
struct Caller(ClientIp);

impl KeyExtractor for Caller {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        match request.extensions.get::<User>() {
            Some(user) => Ok(Key::new(&user.name)),
            None => self.0.extract(request),
        }
    }
}

/// Applies the limits in the file. If the file has an error, all limits stay unchanged.
fn reload(
    file: &str,
    known: &mut Result<String, String>,
    limits: &Live<Tiers>,
    trial: &Live<Policies>,
) {
    let text = read(file);
    if text == *known {
        return;
    }
    match text.clone().and_then(|text| parse(&text)) {
        Ok(settings) => {
            limits.replace(settings.limits);
            trial.replace(settings.trial);
            tracing::info!("new limits from {file}");
        }
        Err(error) => tracing::error!("the old limits stay: {file}: {error}"),
    }
    *known = text;
}

fn read(file: &str) -> Result<String, String> {
    fs::read_to_string(file).map_err(|error| error.to_string())
}

/// Errors name the number of the line but do not quote it, because it may contain an API key.
fn parse(text: &str) -> Result<Settings, String> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error
            .span()
            .and_then(|span| text.get(..span.start))
            .unwrap_or_default();
        format!(
            "line {}: {}",
            before.matches('\n').count() + 1,
            error.message()
        )
    })
}

fn help(at: SocketAddr) {
    println!(
        "\
Try these, more than once:
curl -i {at}/                                        # by address
curl -i -H 'x-forwarded-for: 192.0.2.7' {at}/        # another address, told by a trusted proxy
curl -i -H 'x-api-key: key-of-alice' {at}/           # the plan `free`
curl -i -H 'x-api-key: key-of-alice' {at}/report     # which costs 10
curl -i -H 'x-api-key: key-of-alice' {at}/usage      # what she has used; it uses nothing
curl -i -H 'x-api-key: key-of-bob' {at}/             # the plan `pro`
curl -i -H 'x-api-key: key-of-carol' {at}/           # `free`, but with a limit of her own
curl -i -H 'x-api-key: key-of-monitor' {at}/         # exempt
curl -i -H 'x-forwarded-for: 192.0.2.66' {at}/       # blocked
curl -i {at}/health                                  # never counted
curl -s {at}/metrics"
    );
}
