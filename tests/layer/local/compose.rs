//! The layer in axum routers and tower's `ServiceBuilder`.

use std::convert::Infallible;

use axum::routing::get;
use axum::{Extension, Router};
use http::{Request, Response};
use tower::util::option_layer;
use tower::{Layer, Service, ServiceBuilder, service_fn};
use tower_redis_ratelimit::check::Decision;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::OnMissingKey;
use tower_redis_ratelimit::{LocalStore, RateLimitLayer};

use crate::mocks::*;

/// Responds with the remaining units that the handler sees.
async fn remaining(Extension(decision): Extension<Decision>) -> String {
    decision.remaining().to_string()
}

fn at(path: &str) -> Request<String> {
    let mut request = request("alice");
    *request.uri_mut() = path.parse().unwrap();
    request
}

async fn statuses<S, B>(service: &S, paths: &[&str]) -> Vec<u16>
where
    S: Service<Request<String>, Response = Response<B>, Error = Infallible> + Clone,
{
    let mut statuses = Vec::new();
    for path in paths {
        statuses.push(send(service, at(path)).await.status().as_u16());
    }
    statuses
}

#[tokio::test]
async fn on_a_router_everything_is_counted() {
    let app: Router = Router::new()
        .route("/", get(remaining))
        .route("/more", get(remaining))
        .layer(layer("3/h"));
    assert_eq!(text(send(&app, at("/")).await).await, "2");
    assert_eq!(
        statuses(&app, &["/nowhere", "/more", "/", "/nowhere"]).await,
        [404, 200, 429, 429]
    );
}

#[tokio::test]
async fn an_optional_layer_keeps_the_response_type() {
    for (limits, expected) in [(Some(layer("1/h")), [200, 429]), (None, [200, 200])] {
        let service = option_layer(limits.clone()).layer(service_fn(hello::<String>));
        assert_eq!(statuses(&service, &["/", "/"]).await, expected);
        let app: Router = Router::new()
            .route("/", get(|| async { "hello" }))
            .layer(option_layer(limits.map(|_| layer("1/h"))));
        assert_eq!(statuses(&app, &["/", "/"]).await, expected);
    }
}

#[tokio::test]
async fn as_route_layer_only_routes_are_counted() {
    let app: Router = Router::new()
        .route("/", get(remaining))
        .route("/more", get(remaining))
        .route_layer(layer("2/h"));
    assert_eq!(
        statuses(
            &app,
            &["/nowhere", "/", "/nowhere", "/more", "/", "/nowhere"]
        )
        .await,
        [404, 200, 404, 200, 429, 404]
    );
    assert_eq!(field(&send(&app, at("/nowhere")).await, "ratelimit"), None);
}

#[tokio::test]
async fn one_limited_route_leaves_others_alone() {
    let app: Router =
        Router::new()
            .route("/", get(remaining).layer(layer("1/h")))
            .route(
                "/free",
                get(|decision: Option<Extension<Decision>>| async move {
                    decision.is_none().to_string()
                }),
            );
    assert_eq!(statuses(&app, &["/", "/"]).await, [200, 429]);
    let free = send(&app, at("/free")).await;
    assert_eq!(field(&free, "ratelimit"), None);
    assert_eq!(text(free).await, "true");
}

#[tokio::test]
async fn handlers_may_take_an_optional_decision() {
    let app: Router =
        Router::new()
            .route(
                "/",
                get(|decision: Option<Extension<Decision>>| async move {
                    decision.is_some().to_string()
                }),
            )
            .layer(layer("1/h").on_missing_key(OnMissingKey::Allow));
    assert_eq!(text(send(&app, at("/")).await).await, "true");
    let mut anonymous = anonymous();
    *anonymous.uri_mut() = "/".parse().unwrap();
    assert_eq!(text(send(&app, anonymous).await).await, "false");
}

#[tokio::test]
async fn one_layer_on_two_routers_counts_once() {
    let layer = layer("2/h");
    let one: Router = Router::new()
        .route("/", get(remaining))
        .layer(layer.clone());
    let other: Router = Router::new().route("/", get(remaining)).layer(layer);
    assert_eq!(text(send(&one, at("/")).await).await, "1");
    assert_eq!(text(send(&other, at("/")).await).await, "0");
    assert_eq!(statuses(&one, &["/"]).await, [429]);
    assert_eq!(statuses(&other, &["/"]).await, [429]);
}

#[tokio::test]
async fn layers_with_separate_stores_count_apart() {
    let one: Router = Router::new().route("/", get(remaining)).layer(layer("1/h"));
    let other: Router = Router::new().route("/", get(remaining)).layer(layer("1/h"));
    assert_eq!(statuses(&one, &["/", "/"]).await, [200, 429]);
    assert_eq!(statuses(&other, &["/", "/"]).await, [200, 429]);
}

#[tokio::test]
async fn settings_on_a_clone_leave_the_original() {
    let first = layer("2/h");
    let quiet = first.clone().headers(Headers::NONE);
    let response = send(&limited(first.clone()), request("alice")).await;
    assert!(field(&response, "ratelimit").is_some());
    let untold = send(&limited(quiet), request("alice")).await;
    assert_eq!(field(&untold, "ratelimit"), None);
    assert_eq!(
        decision(&untold).unwrap().remaining(),
        0,
        "the count is still the same"
    );
}

#[tokio::test]
async fn a_service_builder_combines_it_with_layers() {
    let service = ServiceBuilder::new()
        .buffer(8)
        .layer(layer("1/h"))
        .concurrency_limit(1)
        .service(service_fn(hello::<String>));
    assert_eq!(send(&service, request("alice")).await.status(), 200);
    assert_eq!(send(&service, request("alice")).await.status(), 429);
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn axum_connect_info_gives_the_peer() {
    use std::net::SocketAddr;

    use axum::extract::ConnectInfo;
    use tower_redis_ratelimit::extract::PeerIp;

    let app: Router = Router::new()
        .route("/", get(remaining))
        .layer(RateLimitLayer::new(
            LocalStore::default(),
            PeerIp,
            gcra("api", "1/h"),
        ));
    for (peer, status) in [
        ("192.0.2.7:1000", 200),
        ("192.0.2.7:2000", 429),
        ("192.0.2.8:1000", 200),
    ] {
        let mut request = at("/");
        request
            .extensions_mut()
            .insert(ConnectInfo(peer.parse::<SocketAddr>().unwrap()));
        assert_eq!(send(&app, request).await.status(), status, "{peer}");
    }
}

#[tokio::test(start_paused = true)]
async fn nested_layers_both_add_fields() {
    let global = RateLimitLayer::new(LocalStore::default(), Global, gcra("global", "10/m"));
    let service = global.layer(limited(layer("1/m")));
    for status in [200, 429] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        for (name, expected) in [
            ("ratelimit", ["\"api\";r=0;", "\"global\";r="]),
            ("ratelimit-policy", ["\"api\";q=1;", "\"global\";q=10;"]),
        ] {
            let fields: Vec<_> = response
                .headers()
                .get_all(name)
                .iter()
                .map(|value| value.to_str().unwrap())
                .collect();
            let fields = fields.join(", ");
            assert!(
                expected.iter().all(|part| fields.contains(part)),
                "{status} {name}: {fields}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_callers_get_exactly_the_quota() {
    let app: Router = Router::new()
        .route("/", get(remaining))
        .layer(layer("100/h"));
    let calls = (0..250).map(|_| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, at("/")).await.status().as_u16() })
    });
    let all: Vec<u16> = futures_util::future::try_join_all(calls).await.unwrap();
    let allowed = all.iter().filter(|status| **status == 200).count();
    assert_eq!((allowed, all.len()), (100, 250));
}
