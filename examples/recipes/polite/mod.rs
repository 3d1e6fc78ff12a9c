//! Each recipe that gives something back, over Redis, with a client that sends one request after the other below its limits:
//! it is never denied.

#[path = "../../../tests/support/mod.rs"]
mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::connect_info::MockConnectInfo;
use axum::http::Request;
use axum::http::request::Builder;
use axum::routing::get;
use axum::serve::ListenerExt;
use futures_util::{StreamExt, stream};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{Policies, Policy, RateLimitLayer, RedisStore, Strategy};

use self::support::RedisServer;
use super::{failures, login_attempts, tokens, web_sockets};

/// A store with a timeout that a busy machine does not exceed.
fn store(server: &RedisServer) -> RedisStore {
    RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap()
}

async fn serve(app: Router) -> SocketAddr {
    let app = app.layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 7], 4711))));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

fn client(is_http2: bool) -> Client<HttpConnector, Body> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .http2_only(is_http2)
        .build(connector)
}

/// Sends requests, each when the response to the last one has ended: on one connection, on two in turn, and over HTTP/2.
async fn is_never_denied(app: Router, requests: usize, request: impl Fn(Builder) -> Request<Body>) {
    let address = serve(app).await;
    for (connections, is_http2) in [(1, false), (2, false), (1, true)] {
        let clients: Vec<_> = (0..connections).map(|_| client(is_http2)).collect();
        for i in 0..requests {
            let request = request(Request::post(format!("http://{address}")));
            let response = clients[i % connections].request(request).await.unwrap();
            let case = format!(
                "request {i}, {connections} connections, {:?}",
                response.version()
            );
            assert_eq!(response.status(), 200, "{case}");
            to_bytes(Body::new(response.into_body()), 1_000)
                .await
                .unwrap();
        }
    }
}

/// Replaces the path of the address.
fn to(path: &str, builder: Builder) -> Builder {
    let address = builder.uri_ref().unwrap().authority().unwrap().clone();
    builder.uri(format!("http://{address}{path}"))
}

fn log_in(builder: Builder, password: &str) -> Request<Body> {
    let request = to("/login", builder).header("content-type", "application/json");
    let body = format!(r#"{{"user":"ann","password":"{password}"}}"#);
    request.body(body.into()).unwrap()
}

/// After two of three failures.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_passwords_use_no_failures() {
    let server = RedisServer::start();
    let app = failures::app(store(&server)).unwrap();
    let address = serve(app.clone()).await;
    let client = client(false);
    for _ in 0..2 {
        let wrong = log_in(Request::post(format!("http://{address}")), "abc");
        assert_eq!(client.request(wrong).await.unwrap().status(), 401);
    }
    is_never_denied(app, 100, |builder| log_in(builder, "open sesame")).await;
}

/// Each right password resets the attempts of the user. The address has 20 a minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_passwords_reset_the_attempts() {
    let server = RedisServer::start();
    let app = login_attempts::app(store(&server)).unwrap();
    let log_in = |builder| {
        let request = to("/login/ann", builder);
        request.body("open sesame".into()).unwrap()
    };
    is_never_denied(app, 6, log_in).await;
}

/// Each answer costs 8 tokens, and reserves 1,004 of 4,000. One answer may be in progress.
fn chat() -> (Policies, fn(Builder) -> Request<Body>) {
    let cells = Strategy::SlidingWindow { cells: 60 };
    let tokens = Policy::new("tokens", cells, "4000/h").unwrap();
    let streams = Policy::in_flight("streams", 1).unwrap();
    let request = |builder| {
        let request = to("/chat", builder)
            .header("x-api-key", "key-of-ann")
            .header("content-type", "application/json");
        let body = r#"{"prompt":"What is the sea?","max_tokens":1000}"#;
        request.body(body.into()).unwrap()
    };
    (Policies::new([tokens, streams]).unwrap(), request)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_answer_follows_another() {
    let server = RedisServer::start();
    let (policies, request) = chat();
    is_never_denied(tokens::app(store(&server), policies), 100, request).await;
}

/// A body of a known length, one of an unknown length, and none, over HTTP/2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_requests_follow_one_another() {
    let server = RedisServer::start();
    let stream = async || {
        let parts = ["hel", "lo"].map(Ok::<_, Infallible>);
        Body::from_stream(stream::iter(parts))
    };
    let one = Policy::in_flight("requests", 1).unwrap();
    let layer = RateLimitLayer::new(store(&server), Global, one).until_body_end();
    let app = Router::new()
        .route("/", get(async || "hello"))
        .route("/stream", get(stream))
        .route("/empty", get(async || {}));
    let address = serve(app.layer(layer)).await;
    let client = client(true);
    for i in 0..300 {
        for path in ["", "stream", "empty"] {
            let request = Request::get(format!("http://{address}/{path}"));
            let request = request.body(Body::empty()).unwrap();
            let response = client.request(request).await.unwrap();
            assert_eq!(response.status(), 200, "/{path}, request {i}");
            to_bytes(Body::new(response.into_body()), 1_000)
                .await
                .unwrap();
        }
    }
}

/// The server drops the body of a response that a client does not want.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_answer_gives_back() {
    let server = RedisServer::start();
    let (policies, request) = chat();
    let app = tokens::app(store(&server), policies);
    for i in 0..300 {
        let request = request(Request::post("http://test"));
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200, "request {i}");
        drop(response);
    }
}

/// One of two sockets stays open. A socket has ended when the server has closed the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_socket_follows_another() {
    let server = RedisServer::start();
    let address = serve(web_sockets::app(store(&server)).unwrap()).await;
    let _open = web_sockets::connect(address, "ann").await.unwrap();
    for i in 0..100 {
        let socket = web_sockets::connect(address, "ann").await;
        let mut socket = socket.unwrap_or_else(|status| panic!("socket {i}: {status}"));
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
    }
}
