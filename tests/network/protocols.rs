//! One service for gRPC and HTTP: each client is answered in its own protocol.

use std::sync::{Arc, Mutex};

use axum::body::{Body, to_bytes};
use axum::{Router, routing::get};
use http::{Request, Response};
use tonic::Code;
use tower::{Layer, ServiceExt};
use tower_redis_ratelimit::extract::{Global, HeaderKey};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::{GrpcOr, GrpcReject, HttpReject};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{LocalStore, RateLimitLayer};

use crate::support::*;

/// A health service next to a page.
fn app<S>(layer: RateLimitLayer<S, HeaderKey, GrpcReject>) -> Router
where
    S: Store<Future: Send>,
{
    let reject: GrpcOr<HttpReject> = GrpcReject::new().or(HttpReject::new());
    let (_, health) = tonic_health::server::health_reporter();
    let grpc = tonic::service::Routes::new(health).into_axum_router();
    grpc.route("/page", get(|| async { "hello" }))
        .layer(layer.reject(reject))
}

async fn send(app: &Router, content_type: &str, user: Option<&str>) -> Response<Body> {
    let mut request = Request::post("/page").header("content-type", content_type);
    if let Some(user) = user {
        request = request.header("x-user", user);
    }
    app.clone()
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap()
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response
        .headers()
        .get(name)
        .map(|value| value.to_str().unwrap())
}

#[tokio::test]
async fn clients_are_answered_in_their_protocol() {
    let limited = app(layer(gcra("api", "1/h")));
    let broken = app(layer_with(Broken, gcra("api", "1/h")));
    send(&limited, "text/plain", Some("alice")).await;
    for (app, user, status, code) in [
        (&limited, Some("alice"), 429, "8"),
        (&limited, None, 400, "3"),
        (&broken, Some("alice"), 503, "14"),
    ] {
        for kind in [
            "application/grpc",
            "application/grpc+proto",
            "Application/GRPC; a=b",
        ] {
            let response = send(app, kind, user).await;
            assert_eq!(
                (response.status().as_u16(), header(&response, "grpc-status")),
                (200, Some(code)),
                "{kind}"
            );
            assert_eq!(header(&response, "content-type"), Some("application/grpc"));
            assert!(axum::body::HttpBody::is_end_stream(response.body()));
        }
        for kind in [
            "application/json",
            "application/grpc-web",
            "application/grpc-web-text+proto",
        ] {
            let response = send(app, kind, user).await;
            assert_eq!(
                (response.status().as_u16(), header(&response, "grpc-status")),
                (status, None),
                "{kind}"
            );
            assert_eq!(
                header(&response, "content-type"),
                Some("application/problem+json")
            );
        }
    }
}

#[tokio::test]
async fn http_and_grpc_share_a_count() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, app(layer(gcra("api", "2/h")))).await });

    let channel = tonic::transport::Endpoint::new(url)
        .unwrap()
        .connect()
        .await
        .unwrap();
    call(&channel, from("alice")).await.unwrap();
    let mut page = channel.clone();
    let request = Request::get("/page")
        .header("x-user", "alice")
        .body(tonic::body::Body::empty())
        .unwrap();
    let response = tower::Service::call(page.ready().await.unwrap(), request)
        .await
        .unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            response.headers()["ratelimit"]
                .to_str()
                .unwrap()
                .contains("r=0")
        ),
        (200, true)
    );

    assert_eq!(
        call(&channel, from("alice")).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    let request = Request::get("/page")
        .header("x-user", "alice")
        .body(tonic::body::Body::empty())
        .unwrap();
    let response = tower::Service::call(page.ready().await.unwrap(), request)
        .await
        .unwrap();
    assert_eq!(response.status(), 429);
}

#[derive(Clone, Default)]
struct Suspicions(Arc<Mutex<Vec<String>>>);

impl Observer for Suspicions {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Suspected { problem, .. } = *event {
            self.0.lock().unwrap().push(problem.to_owned());
        }
    }
}

/// In a router, a layer without `GrpcReject` compiles.
#[tokio::test]
async fn a_call_rejected_over_http_is_reported() {
    let suspicions = Suspicions::default();
    let limits = RateLimitLayer::new(LocalStore::default(), Global, gcra("api", "1/h"));
    let (_, health) = tonic_health::server::health_reporter();
    let app = tonic::service::Routes::new(health).into_axum_router();
    let app = app.layer(limits.observer(suspicions.clone()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, app).await });
    let endpoint = tonic::transport::Endpoint::new(url).unwrap();
    let channel = endpoint.connect().await.unwrap();
    call(&channel, from("alice")).await.unwrap();
    for _ in 0..2 {
        let status = call(&channel, from("alice")).await.unwrap_err();
        assert_ne!(status.code(), Code::ResourceExhausted, "it knows no 429");
    }
    let seen = suspicions.0.lock().unwrap().clone();
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.contains("add `.reject(GrpcReject::new().or(HttpReject::new()))` to the layer"),
        "{report}"
    );
}

/// HTTP/1.1 has no blanks around a value. HTTP/2 forbids them (RFC 9113), and lets them through.
#[tokio::test]
async fn http2_values_ignore_surrounding_blanks() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, app(layer(gcra("api", "2/h")))).await });

    let mut page = tonic::transport::Endpoint::new(url)
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mut statuses = vec![];
    for value in [
        "k-1",
        "k-1 ",
        "k-1\t",
        " k-1",
        "\t \tk-1  \t",
        "k 1",
        "",
        " ",
        "\t ",
    ] {
        let request = Request::get("/page")
            .header("x-user", value)
            .body(tonic::body::Body::empty())
            .unwrap();
        let response = tower::Service::call(page.ready().await.unwrap(), request)
            .await
            .unwrap();
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 429, 429, 429, 200, 400, 400, 400]);
}

/// RFC 9110: every 401 has a challenge.
#[tokio::test]
async fn http_clients_without_key_are_challenged() {
    let key = HeaderKey::new("x-api-key").unwrap().challenge(API_KEY);
    let limits = RateLimitLayer::new(
        tower_redis_ratelimit::LocalStore::default(),
        key,
        gcra("api", "1/h"),
    );
    let app = Router::new().route("/page", get(|| async {}));
    let both = app.layer(limits.reject(GrpcReject::new().or(HttpReject::new())));
    let response = send(&both, "application/json", None).await;
    assert_eq!(
        (
            response.status().as_u16(),
            header(&response, "www-authenticate")
        ),
        (401, Some("ApiKey"))
    );
    let response = send(&both, "application/grpc", None).await;
    assert_eq!(
        (
            header(&response, "grpc-status"),
            header(&response, "www-authenticate")
        ),
        (Some("16"), None)
    );
}

/// tonic-web makes gRPC of gRPC-Web within itself, so that a layer there answers both.
#[tokio::test(start_paused = true)]
async fn grpc_web_works_within_the_translating_layer() {
    let inner = app(layer(gcra("api", "1/h")));
    let service = tonic_web::GrpcWebLayer::new().layer(inner);
    let call = || {
        let request = Request::post("http://web/grpc.health.v1.Health/Check")
            .header("content-type", "application/grpc-web")
            .header("x-user", "alice")
            .body(Body::from(vec![0; 5]))
            .unwrap();
        service.clone().oneshot(request)
    };
    let granted = call().await.unwrap();
    assert_eq!(granted.status(), 200);
    assert!(
        !granted.headers().contains_key("grpc-status"),
        "it is in the body"
    );
    let denied = call().await.unwrap();
    let fields = ["content-type", "grpc-status", "grpc-retry-pushback-ms"]
        .map(|name| &denied.headers()[name]);
    assert_eq!(fields, ["application/grpc-web+proto", "8", "3600000"]);
    assert!(
        to_bytes(Body::new(denied.into_body()), 1_000)
            .await
            .unwrap()
            .is_empty()
    );
}
