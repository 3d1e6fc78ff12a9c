//! `cargo run --example tonic --features tonic`
//!
//! A tonic server behind a rate limit, 2 calls in 4 seconds for each client address, and a client that reads the reason
//! of a denial and retries after the given wait. Settings from the environment: `RATE_LIMIT` (`2/4s`), and `REDIS_URL`
//! to share the count among instances:
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example tonic --features tonic
//! ```
//!
//! The server is bounded as for clients from the internet, by `grpc.rs` and `listen.rs`: a tonic server without `max_concurrent_streams`
//! keeps any number of streams that never end.

mod grpc;
mod listen;

use std::env;
use std::error::Error;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::transport::Endpoint;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_types::StatusExt;
use tower::{Service, ServiceBuilder, ServiceExt, retry};
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::reject::GrpcReject;
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Policy, Quota, RateLimitLayer, Strategy};

/// Maximum length of a message in bytes. tonic's default is 4 MiB.
const MAX_LENGTH: usize = 1_024;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let quota: Quota = env::var("RATE_LIMIT")
        .as_deref()
        .unwrap_or("2/4s")
        .parse()?;
    let policy = Policy::new("example", Strategy::Gcra, quota)?;
    let store = AnyStore::from_env("REDIS_URL")?;
    let counted = match store {
        AnyStore::Local(_) => "counted in this process; set REDIS_URL to share the count",
        _ => "counted in Redis, for all instances",
    };

    // The server.
    let layer = RateLimitLayer::new(store, PeerIp, policy).reject(GrpcReject::new());
    let (_, health) = tonic_health::server::health_reporter();
    let health = health.max_decoding_message_size(MAX_LENGTH);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(
        grpc::server()
            .layer(layer)
            .add_service(health)
            .serve_with_incoming(grpc::incoming(listener)),
    );
    println!("{address}: {quota} per address, {counted}");

    // The client.
    let client = HealthClient::new(
        Endpoint::new(format!("http://{address}"))?
            .connect()
            .await?,
    );
    let mut patient = ServiceBuilder::new()
        .retry(HonourPushback { retries: 5 })
        .service_fn(|request: HealthCheckRequest| {
            let mut client = client.clone();
            async move { client.check(request).await }
        });
    for call in 1..=3 {
        let granted = patient
            .ready()
            .await?
            .call(HealthCheckRequest::default())
            .await?;
        let left = granted
            .metadata()
            .get("ratelimit")
            .and_then(|field| field.to_str().ok())
            .unwrap_or_default();
        println!("call {call}: granted, ratelimit: {left}");
    }
    Ok(())
}

/// Retries after the wait that the server returned: gRPC's retry policy, which tonic's client lacks.
#[derive(Clone)]
struct HonourPushback {
    retries: u32,
}

impl<Req: Clone, Res> retry::Policy<Req, Res, Status> for HonourPushback {
    type Future = Sleep;

    fn retry(&mut self, _: &mut Req, result: &mut Result<Res, Status>) -> Option<Sleep> {
        let denied = result.as_ref().err()?;
        println!("{:?}: {}", denied.code(), denied.message());
        if let Some(wait) = denied
            .get_details_retry_info()
            .and_then(|info| info.retry_delay)
        {
            println!("  RetryInfo: {wait:?}");
        }
        for violation in denied
            .get_details_quota_failure()
            .into_iter()
            .flat_map(|failure| failure.violations)
        {
            println!(
                "  QuotaFailure: {}: {}",
                violation.subject, violation.description
            );
        }
        // A negative number means that waiting does not help.
        let millis = denied
            .metadata()
            .get("grpc-retry-pushback-ms")?
            .to_str()
            .ok()?
            .parse()
            .ok()?;
        self.retries = self.retries.checked_sub(1)?;
        println!("  grpc-retry-pushback-ms: {millis}, so the client waits");
        Some(sleep(Duration::from_millis(millis)))
    }

    fn clone_request(&mut self, request: &Req) -> Option<Req> {
        Some(request.clone())
    }
}
