//! A tonic client that is limited, and clients that try again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, retry};
use tower_redis_ratelimit::extract::{Global, KeyExtractor};
use tower_redis_ratelimit::reject::{GrpcReject, Reject};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{LocalStore, RateLimitLayer};

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_client_is_limited_before_it_calls() {
    let calls = Arc::new(AtomicUsize::new(0));
    let server = serve(counting(&calls));
    let limits = RateLimitLayer::new(LocalStore::default(), Global, gcra("out", "2/min"))
        .reject(GrpcReject::new());
    let limited = ServiceBuilder::new().layer(limits).service(server);
    let mut client = HealthClient::new(limited);
    for _ in 0..2 {
        client.check(HealthCheckRequest::default()).await.unwrap();
    }
    let denied = client
        .check(HealthCheckRequest::default())
        .await
        .unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert_eq!(
        denied.get_details_retry_info().unwrap().retry_delay,
        Some(Duration::from_secs(30))
    );
    assert_eq!(
        denied.get_details_quota_failure().unwrap().violations[0].subject,
        "out"
    );
    assert_eq!(field(&denied, PUSHBACK), Some("30000"));
    assert_eq!(calls.load(Relaxed), 2, "the third was not sent");
    sleep(Duration::from_secs(30)).await;
    client.check(HealthCheckRequest::default()).await.unwrap();
}

/// Counts calls, and allows all.
fn counting(calls: &Arc<AtomicUsize>) -> RateLimitLayer<LocalStore, Global, GrpcReject> {
    let calls = Arc::clone(calls);
    let layer = RateLimitLayer::new(LocalStore::default(), Global, gcra("api", "1000000/s"));
    layer
        .reject(GrpcReject::new())
        .skip(move |_| calls.fetch_add(1, Relaxed) < usize::MAX)
}

/// Retries at the time of the server's pushback.
#[derive(Clone)]
struct HonourPushback {
    retries: u32,
}

impl<Req: Clone, Res> retry::Policy<Req, Res, Status> for HonourPushback {
    type Future = Sleep;

    fn retry(&mut self, _: &mut Req, result: &mut Result<Res, Status>) -> Option<Sleep> {
        // -1 is no `u64`: no retry.
        let wait = field(result.as_ref().err()?, PUSHBACK)?.parse().ok()?;
        self.retries = self.retries.checked_sub(1)?;
        Some(sleep(Duration::from_millis(wait)))
    }

    fn clone_request(&mut self, request: &Req) -> Option<Req> {
        Some(request.clone())
    }
}

/// A client of this server that tries again after the pushback.
fn patient(
    server: &Channel,
) -> impl Service<HealthCheckRequest, Response = (), Error = Status> + Clone {
    let server = server.clone();
    ServiceBuilder::new()
        .retry(HonourPushback { retries: 3 })
        .service_fn(move |_: HealthCheckRequest| {
            let server = server.clone();
            async move { call(&server, from("alice")).await }
        })
}

/// A server behind a layer that counts the calls.
fn counted<S, K, R>(layer: RateLimitLayer<S, K, R>) -> (Channel, Arc<AtomicUsize>)
where
    S: Store<Future: Send>,
    K: KeyExtractor + Send + Sync + 'static,
    R: Reject<tonic::body::Body> + Send + Sync + 'static,
{
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    (
        serve(layer.skip(move |_| counter.fetch_add(1, Relaxed) == usize::MAX)),
        calls,
    )
}

#[tokio::test(start_paused = true)]
async fn retrying_clients_wait_exactly_the_pushback() {
    let (server, calls) = counted(layer(gcra("api", "1/7s")));
    let client = patient(&server);
    let start = Instant::now();
    for waits in 0..4 {
        client
            .clone()
            .oneshot(HealthCheckRequest::default())
            .await
            .unwrap();
        // The clock is the test's: it advances only by the waits. A timer of tokio rounds up to the millisecond.
        let (waited, pushback) = (start.elapsed(), Duration::from_secs(7 * waits));
        assert!(
            (pushback..pushback + Duration::from_millis(10)).contains(&waited),
            "{waited:?}"
        );
        assert_eq!(
            calls.load(Relaxed) as u64,
            1 + 2 * waits,
            "each wait was enough, so one retry was"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn retrying_clients_give_up_on_excessive_costs() {
    let start = Instant::now();
    let (server, calls) = counted(layer(gcra("api", "1/s")).cost(|_| 2));
    let denied = patient(&server)
        .oneshot(HealthCheckRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (denied.code(), calls.load(Relaxed)),
        (Code::ResourceExhausted, 1)
    );

    let (server, calls) = counted(layer_with(Broken, gcra("api", "1/s")));
    let failed = patient(&server)
        .oneshot(HealthCheckRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (failed.code(), calls.load(Relaxed)),
        (Code::Unavailable, 4),
        "three retries"
    );
    let waited = start.elapsed();
    assert!(
        (Duration::from_secs(3)..Duration::from_millis(3_010)).contains(&waited),
        "a second each: {waited:?}"
    );
}

#[tokio::test]
async fn clones_of_a_client_share_the_limit() {
    let limits = RateLimitLayer::new(LocalStore::default(), Global, gcra("out", "3/h"))
        .reject(GrpcReject::new());
    let client = HealthClient::new(limits.layer(serve(counting(&Arc::default()))));
    let calls = (0..10).map(|_| {
        let mut client = client.clone();
        async move { client.check(HealthCheckRequest::default()).await.is_ok() }
    });
    assert_eq!(
        join_all(calls)
            .await
            .into_iter()
            .filter(|passed| *passed)
            .count(),
        3
    );
}
