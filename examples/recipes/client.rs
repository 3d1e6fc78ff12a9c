//! A client that keeps to the limit of a server.

use std::time::Duration;

use axum::body::Body;
use axum::{Router, routing::get};
use http::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::{ServiceBuilder, ServiceExt};
use tower_redis_ratelimit::check::RateLimited;
use tower_redis_ratelimit::{CallLimitLayer, Key, LocalStore, Policy, Quota, Strategy};

#[tokio::test]
async fn calls_keep_to_the_limit() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let policy = Policy::new("calls", Strategy::Gcra, Quota::per_minute(2))?;
    let by_host = |request: &Request<Body>| request.uri().host().map(Key::new);
    let client = ServiceBuilder::new()
        .layer(
            CallLimitLayer::new(LocalStore::default(), by_host, policy)
                .wait(Duration::from_secs(5)),
        )
        .service(Client::builder(TokioExecutor::new()).build_http::<Body>());

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    let server = Router::new().route("/", get(|| async { "hello" }));
    tokio::spawn(async move { axum::serve(listener, server).await });
    // The third call would wait for 30 s, longer than the maximum of 5 s.
    for passes in [true, true, false] {
        match client
            .clone()
            .oneshot(Request::get(&url).body(Body::empty())?)
            .await
        {
            Ok(response) => assert!(response.status() == 200 && passes),
            Err(error) => assert!(error.is::<RateLimited>() && !passes),
        }
    }
    Ok(())
}
