//! Answers for gRPC.

use std::{convert::Infallible, time::Duration};

use http::{Request, Response};
use tonic::{Code, Status, body::Body};
use tonic_types::StatusExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::reject::GrpcReject;
use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};

#[tokio::test(start_paused = true)]
async fn denials_have_a_grpc_status() -> Result<(), Box<dyn std::error::Error>> {
    let policy = Policy::new("rpc", Strategy::Gcra, Quota::per_minute(1))?;
    let limits =
        RateLimitLayer::new(LocalStore::default(), Global, policy).reject(GrpcReject::new());

    // As `Server::builder().layer(limits)` does.
    let service = limits.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    assert!(
        !service
            .clone()
            .oneshot(Request::new(Body::empty()))
            .await?
            .headers()
            .contains_key("grpc-status")
    );
    let denied = service.oneshot(Request::new(Body::empty())).await?;

    // The details that a client reads.
    let status = Status::from_header_map(denied.headers()).ok_or("no status")?;
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(
        status.message(),
        "The quota of 1 per minute is used up. Try again in 60 s."
    );
    let retry_info = status.get_details_retry_info().ok_or("no RetryInfo")?;
    assert_eq!(retry_info.retry_delay, Some(Duration::from_secs(60)));
    let quota_failure = status
        .get_details_quota_failure()
        .ok_or("no QuotaFailure")?;
    assert_eq!(quota_failure.violations[0].subject, "rpc");
    assert_eq!(
        status
            .metadata()
            .get("grpc-retry-pushback-ms")
            .ok_or("no pushback")?,
        "60000"
    );
    Ok(())
}
