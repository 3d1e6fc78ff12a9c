//! Clients under a limit, and the servers that they call, on real sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use axum::{Router, body::Body, extract::State, routing::get};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Status};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt};
use tower_redis_ratelimit::check::{Decision, RateLimited};
use tower_redis_ratelimit::extract::{Global, key_fn};
use tower_redis_ratelimit::{CallLimitLayer, Key, LocalStore, RateLimitLayer};

use crate::support::gcra;

/// A server that counts the requests that reach it.
struct Server {
    address: SocketAddr,
    reached: Arc<AtomicU32>,
}

impl Server {
    async fn start() -> Self {
        let reached = Arc::new(AtomicU32::new(0));
        let count = async |State(reached): State<Arc<AtomicU32>>| {
            (reached.fetch_add(1, Relaxed) + 1).to_string()
        };
        let app = Router::new()
            .route("/", get(count))
            .with_state(Arc::clone(&reached));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, reached }
    }

    fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    fn request(&self) -> Request<Body> {
        Request::get(self.url()).body(Body::empty()).unwrap()
    }

    fn reached(&self) -> u32 {
        self.reached.load(Relaxed)
    }
}

fn hyper() -> Client<HttpConnector, Body> {
    Client::builder(TokioExecutor::new()).build_http()
}

/// Returns the response, within a time limit.
async fn say<S: Service<R> + Clone, R>(service: &S, request: R) -> Result<S::Response, S::Error> {
    timeout(Duration::from_secs(20), service.clone().oneshot(request))
        .await
        .expect("an answer")
}

async fn text(response: Response<Body>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the denial of a call.
fn limited<T>(result: Result<T, BoxError>) -> RateLimited {
    *result
        .err()
        .expect("it was let through")
        .downcast()
        .expect("another error than `RateLimited`")
}

#[tokio::test]
async fn hyper_clients_get_the_servers_denial() {
    let server = Server::start().await;
    let by_host = key_fn(|request| request.uri.host().map(Key::new));
    let client = ServiceBuilder::new()
        .layer(
            RateLimitLayer::new(LocalStore::default(), by_host, gcra("api", "2/h"))
                .decision_in_response(),
        )
        .map_response(|response: Response<_>| response.map(Body::new))
        .service(hyper());
    for (expected, status) in [("1", 200), ("2", 200), ("", 429)] {
        let response = say(&client, server.request()).await.unwrap();
        assert_eq!(response.status(), status);
        assert!(response.extensions().get::<Decision>().is_some());
        if status == 200 {
            assert_eq!(text(response).await, expected);
        } else {
            assert_eq!(response.headers()["retry-after"], "1800");
        }
    }
    assert_eq!(server.reached(), 2);
}

#[tokio::test]
async fn a_hyper_client_gets_an_error() {
    let server = Server::start().await;
    let by_host = |request: &Request<Body>| request.uri().host().map(Key::new);
    let client = ServiceBuilder::new()
        .layer(CallLimitLayer::new(
            LocalStore::default(),
            by_host,
            gcra("api", "2/h"),
        ))
        .service(hyper());
    for expected in ["1", "2"] {
        let response = say(&client, server.request()).await.unwrap();
        assert_eq!(text(response.map(Body::new)).await, expected);
    }
    assert!(
        limited(say(&client, server.request()).await)
            .retry_after()
            .is_some()
    );
    assert_eq!(server.reached(), 2);

    let other = Request::get("http://localhost:1/")
        .body(Body::empty())
        .unwrap();
    let error = say(&client, other).await.unwrap_err();
    assert!(
        error.is::<hyper_util::client::legacy::Error>(),
        "another host is another count: {error}"
    );
}

#[tokio::test]
async fn a_reqwest_client_gets_an_error() {
    let server = Server::start().await;
    let by_host = |request: &reqwest::Request| request.url().host_str().map(Key::new);
    let client = ServiceBuilder::new()
        .layer(CallLimitLayer::new(
            LocalStore::default(),
            by_host,
            gcra("api", "2/h"),
        ))
        .service(reqwest::Client::builder().no_proxy().build().unwrap());
    let request = || reqwest::Request::new(Method::GET, server.url().parse().unwrap());
    for expected in ["1", "2"] {
        let response = say(&client, request()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.text().await.unwrap(), expected);
    }
    assert!(
        limited(say(&client, request()).await)
            .retry_after()
            .is_some()
    );
    assert_eq!(server.reached(), 2);
}

/// A client of a gRPC server that is well, over a channel under these layers.
macro_rules! health {
    ($layer:expr) => {{
        let (_, health) = tonic_health::server::health_reporter();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_service(health);
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        let channel = Endpoint::from_shared(format!("http://{address}"))
            .unwrap()
            .connect_lazy();
        HealthClient::new(ServiceBuilder::new().layer($layer).service(channel))
    }};
}

#[tokio::test]
async fn tonic_clients_get_the_servers_denial() {
    let limits = RateLimitLayer::new(LocalStore::default(), Global, gcra("api", "2/h"))
        .reject_with(|rejection| Status::resource_exhausted(rejection.to_string()).into_http());
    let mut client = health!(limits);
    for _ in 0..2 {
        client
            .check(HealthCheckRequest::default())
            .await
            .expect("the server is well");
    }
    let status = client
        .check(HealthCheckRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(
        status.message(),
        "The quota of 2 per hour is used up. Try again in 1800 s."
    );
}

#[tokio::test]
async fn a_tonic_client_gets_an_error() {
    let by_method = |request: &Request<tonic::body::Body>| Some(Key::new(request.uri().path()));
    let mut client = health!(CallLimitLayer::new(
        LocalStore::default(),
        by_method,
        gcra("api", "2/h")
    ));
    for _ in 0..2 {
        client
            .check(HealthCheckRequest::default())
            .await
            .expect("the server is well");
    }
    let status = client
        .check(HealthCheckRequest::default())
        .await
        .unwrap_err();
    let source = std::error::Error::source(&status).expect("the error of the channel");
    assert!(source.is::<RateLimited>(), "{status}");
}
