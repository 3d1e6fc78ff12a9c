//! `cargo run --example envoy --features envoy`
//!
//! A rate limit service for Envoy and Istio, by their protocol v3, which reads the files of Envoy's own service. Changed
//! limits apply within two seconds, once no file has changed for one second. See `README.md`. `grpc.rs` and `listen.rs` bound
//! connections, streams and unfinished requests. Let only Envoys reach the port of `LISTEN`. Metrics and readiness have a separate
//! port.
//!
//! Settings by the environment: `CONFIG` (`examples/envoy/config`), a directory of YAML files; and as YAML, `LISTEN`
//! (`127.0.0.1:8081`), `ADMIN` (`127.0.0.1:8082`), `HEADERS` for clients (`draft-11`), and `STORE` to share the counts among
//! instances:
//!
//! ```sh
//! STORE='{ url: redis://127.0.0.1/, share: alive }' cargo run --example envoy --features envoy
//! ```

#[path = "../grpc.rs"]
mod grpc;
#[path = "../listen.rs"]
mod listen;
mod rules;
#[path = "../serve.rs"]
mod serve;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::error::Error;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, process, thread};

use axum::Router;
use axum::routing::get;
use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf;
use futures_util::future::try_join_all;
use http::HeaderMap;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use tower_redis_ratelimit::Key;
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::observe::{Event, MetricsObserver, Observer, TracingObserver};
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use rules::{Domains, Files, Limit, Rate};

/// Maximum number of descriptors in a request.
const MAX_DESCRIPTORS: usize = 100;
/// Maximum number of concurrent requests. Envoy's `failure_mode_deny` applies to those beyond.
const MAX_REQUESTS: usize = 10_000;
/// Maximum length of a request in bytes.
const MAX_LENGTH: usize = 64 * 1024;
/// Maximum length of a request for the health service in bytes.
const MAX_HEALTH_LENGTH: usize = 1_024;
/// Maximum duration of a shutdown: a stream of the health service may never end.
const SHUTDOWN: Duration = Duration::from_secs(10);
/// Maximum number of warnings about unknown domains.
const MAX_WARNINGS: usize = 100;

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/envoy/config");

#[tokio::main]
async fn main() {
    if let Err(error) = run().await {
        eprintln!("{error}");
        process::exit(1);
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // Otherwise a client could add a line to the log by each frame.
    let targets = Targets::new()
        .with_default(LevelFilter::INFO)
        .with_target("h2", LevelFilter::ERROR);
    tracing_subscriber::registry()
        .with(log)
        .with(targets)
        .init();
    let buckets = Matcher::Suffix("_seconds".to_owned());
    let metrics =
        PrometheusBuilder::new().set_buckets_for_metric(buckets, &[0.001, 0.01, 0.1, 1.0])?;
    let metrics = metrics.install_recorder()?;

    let listen: SocketAddr = setting("LISTEN", "127.0.0.1:8081")?;
    let observer: Arc<dyn Observer> = Arc::new((TracingObserver::new(), MetricsObserver::new()));
    let store = AnyStore::from_config(&setting::<StoreConfig>("STORE", "{}")?)?;
    let store = store.observer(Arc::clone(&observer));
    let directory = PathBuf::from(env::var("CONFIG").unwrap_or_else(|_| DIRECTORY.to_owned()));
    let files = rules::read(&directory);
    let domains = Domains::new(files.as_ref().map_err(String::as_str)?)?;
    tracing::info!("{domains} from {}", directory.display());
    let (new_domains, domains) = watch::channel(Arc::new(domains));
    let service = Service {
        domains: domains.clone(),
        requests: Semaphore::new(MAX_REQUESTS),
        unknown: Mutex::default(),
        store,
        observer,
        headers: setting("HEADERS", "draft-11")?,
    };

    let upkeep = metrics.clone();
    thread::spawn(move || {
        let (mut known, mut last) = (files.clone(), files);
        loop {
            thread::sleep(Duration::from_secs(1));
            upkeep.run_upkeep();
            // A file that changes between two reads may be half-written.
            let files = rules::read(&directory);
            if files == last && files != known {
                apply(&files, &directory, &new_domains);
                known.clone_from(&files);
            }
            last = files;
        }
    });

    let (reporter, health) = tonic_health::server::health_reporter();
    reporter
        .set_serving::<RateLimitServiceServer<Service>>()
        .await;
    let service = RateLimitServiceServer::new(service).max_decoding_message_size(MAX_LENGTH);
    let loaded = domains.clone();
    let admin = Router::new()
        .route(
            "/ready",
            get(async move || format!("{}\n", *loaded.borrow())),
        )
        .route(
            "/metrics",
            get(async move || metrics.render() + &domains.borrow().metrics()),
        );
    let health = health.max_decoding_message_size(MAX_HEALTH_LENGTH);
    let admin_listener =
        TcpListener::bind(setting::<SocketAddr>("ADMIN", "127.0.0.1:8082")?).await?;
    let listener = TcpListener::bind(listen).await?;
    println!(
        "localhost:{}/ is for Envoy; localhost:{port}/metrics is for Prometheus, and localhost:{port}/ready for Kubernetes",
        listener.local_addr()?.port(),
        port = admin_listener.local_addr()?.port()
    );
    // Ends by the same signals.
    tokio::spawn(serve::serve(admin_listener, admin));
    let (stop, stopped) = oneshot::channel::<()>();
    let serve = grpc::server()
        .add_service(service)
        .add_service(health)
        .serve_with_incoming_shutdown(grpc::incoming(listener), async { drop(stopped.await) });
    let shutdown = async {
        let mut terminated = signal(SignalKind::terminate())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            _ = terminated.recv() => {}
        }
        tracing::info!("shutting down");
        reporter
            .set_not_serving::<RateLimitServiceServer<Service>>()
            .await;
        drop(stop);
        tokio::time::sleep(SHUTDOWN).await;
        Ok(())
    };
    // Requests in flight are answered.
    tokio::select! {
        served = serve => Ok(served?),
        ended = shutdown => ended,
    }
}

/// Applies the limits in the files. If a file has an error, all limits stay unchanged.
fn apply(files: &Result<Files, String>, directory: &Path, limits: &watch::Sender<Arc<Domains>>) {
    match files.as_ref().map_err(String::clone).and_then(Domains::new) {
        Ok(domains) => {
            tracing::info!("new limits: {domains} from {}", directory.display());
            for gone in limits.borrow().without(&domains) {
                tracing::warn!("the domain {gone:?} was removed: its requests pass");
            }
            limits.send_replace(Arc::new(domains));
        }
        Err(error) => tracing::error!("the old limits stay: {error}"),
    }
}

/// Returns a setting from the environment, or its default.
fn setting<T: DeserializeOwned>(name: &str, default: &str) -> Result<T, String> {
    let text = env::var(name).unwrap_or_else(|_| default.to_owned());
    yaml_serde::from_str(&text).map_err(|error| format!("{name}: {error}"))
}

struct Service {
    domains: watch::Receiver<Arc<Domains>>,
    requests: Semaphore,
    /// The unknown domains that a warning was logged for.
    unknown: Mutex<HashSet<String>>,
    store: AnyStore,
    observer: Arc<dyn Observer>,
    headers: Headers,
}

#[tonic::async_trait]
impl RateLimitService for Service {
    /// Decides each descriptor separately. One with enough capacity is charged even if another one exceeds its limit.
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let RateLimitRequest {
            domain,
            descriptors,
            hits_addend,
        } = request.into_inner();
        let _request = self.requests.try_acquire().map_err(|_| {
            Status::resource_exhausted(format!("more than {MAX_REQUESTS} concurrent requests"))
        })?;
        if domain.is_empty() {
            return Err(Status::invalid_argument("the domain is empty"));
        }
        if !(1..=MAX_DESCRIPTORS).contains(&descriptors.len()) {
            return Err(Status::invalid_argument(format!(
                "{} descriptors: send 1 to {MAX_DESCRIPTORS}",
                descriptors.len()
            )));
        }
        let domains = Arc::clone(&self.domains.borrow());
        if !domains.contains(&domain) {
            self.warn_of(&domain);
        }
        let find = |descriptor| domains.find(&domain, descriptor);
        let found: Vec<_> = descriptors
            .iter()
            .map(find)
            .collect::<Result<_, _>>()
            .map_err(Status::invalid_argument)?;
        let limits = found.iter().flatten().map(|(_, limit)| limit);
        let replaced: HashSet<_> = limits.flat_map(|limit| &limit.replaces).collect();
        let is_replaced = |limit: &Limit| {
            let name = limit.current.as_ref().map(|current| &current.name);
            name.is_some_and(|name| replaced.contains(name))
        };
        let answers = descriptors.iter().zip(&found).map(|(descriptor, found)| {
            let found = found.as_ref().filter(|(_, limit)| !is_replaced(limit));
            self.answer(found, descriptor, hits_addend)
        });
        // Concurrent checks share a round trip.
        let answers = try_join_all(answers).await?;
        let (statuses, decisions): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
        let is_over = statuses
            .iter()
            .any(|status| status.code() == Code::OverLimit);
        Ok(Response::new(RateLimitResponse {
            overall_code: if is_over { Code::OverLimit } else { Code::Ok }.into(),
            statuses,
            response_headers_to_add: self.fields(decisions.into_iter().flatten().collect()),
            ..RateLimitResponse::default()
        }))
    }
}

impl Service {
    /// Logs a warning about a domain without a file. Its requests are allowed.
    fn warn_of(&self, domain: &str) {
        let domain: String = domain.chars().take(100).collect();
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        if unknown.len() < MAX_WARNINGS && unknown.insert(domain.clone()) {
            tracing::warn!("no file has the domain {domain:?}: its requests pass");
        }
    }

    /// Returns the status of a descriptor, and the decision for the header fields.
    ///
    /// # Errors
    ///
    /// If the store cannot decide. Then Envoy's `failure_mode_deny` applies.
    async fn answer(
        &self,
        found: Option<&(Key, Arc<Limit>)>,
        descriptor: &RateLimitDescriptor,
        hits_addend: u32,
    ) -> Result<(DescriptorStatus, Option<Decision>), Status> {
        let status = |is_over| DescriptorStatus {
            code: if is_over { Code::OverLimit } else { Code::Ok }.into(),
            current_limit: found.and_then(|(_, limit)| limit.current.clone()),
            ..DescriptorStatus::default()
        };
        let Some((caller, limit)) = found else {
            return Ok((status(false), None));
        };
        let policies = match &limit.rate {
            Rate::Unlimited => {
                return Ok((
                    DescriptorStatus {
                        limit_remaining: u32::MAX,
                        ..status(false)
                    },
                    None,
                ));
            }
            Rate::Banned => return Ok((status(!limit.shadow), None)),
            Rate::Counted(policies) => policies,
        };
        // In a request, 0 hits means unspecified; in a descriptor, it means 0.
        let hits = descriptor
            .hits_addend
            .as_ref()
            .map_or(u64::from(hits_addend.max(1)), |hits| hits.value);
        let hits = u32::try_from(hits).unwrap_or(u32::MAX);
        let (check, needed) = match hits {
            _ if descriptor.is_negative_hits => (Check::refund(*caller, policies, hits), 0),
            0 => (Check::peek(*caller, policies, 1), 0),
            1 => (Check::take(*caller, policies, 1), 1),
            // Hits that do not fit use up the rest, because they may be the cost of a response that has been sent.
            _ => (Check::up_to(*caller, policies, hits), hits),
        };
        let since = now();
        let decision = self.store.check(check).await.map_err(|error| {
            self.observer
                .notify(&Event::failed(Some(caller), &error, true));
            Status::unavailable(error.to_string())
        })?;
        let (elapsed, dry_run) = (since.elapsed(), limit.shadow);
        self.observer
            .notify(&Event::decided(caller, &decision, elapsed, dry_run));

        let is_over = !decision.is_allowed() || decision.granted() < needed;
        let reset = decision.reset_after().as_micros().div_ceil(1_000_000);
        let status = DescriptorStatus {
            limit_remaining: decision.remaining(),
            // Envoy reads whole seconds.
            duration_until_reset: Some(protobuf::Duration {
                seconds: reset as i64,
                nanos: 0,
            }),
            ..status(is_over && !limit.shadow)
        };
        Ok((status, Some(decision).filter(|_| !limit.shadow)))
    }

    /// Returns the header fields for the client, with the longest `Retry-After`.
    fn fields(&self, mut decisions: Vec<Decision>) -> Vec<HeaderValue> {
        decisions.sort_by_key(|decision| Reverse(decision.retry_after()));
        let mut fields = HeaderMap::new();
        decisions
            .iter()
            .for_each(|decision| self.headers.append(decision, &mut fields));
        let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| HeaderValue {
            key: name.to_string(),
            value: value.to_str().unwrap_or_default().to_owned(),
            ..HeaderValue::default()
        };
        fields.iter().map(field).collect()
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "for the metric of how long a check takes"
)]
fn now() -> Instant {
    Instant::now()
}
