//! Keys by the routes of a real axum `Router`.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::routing::{any, get, post};
use http::Request;
use http::request::Parts;
use tower::Layer;
use tower_redis_ratelimit::extract::{KeyExtractor, MatchedEndpoint, MatchedRoute, PeerIp, key_fn};
use tower_redis_ratelimit::{Key, LocalStore, RateLimitLayer};

use crate::mocks::*;

async fn ok() -> &'static str {
    "hello"
}

/// A router with every kind of route.
fn app() -> Router {
    let orders = Router::new().route("/{id}", get(ok)).route("/", get(ok));
    let admin = Router::new().route("/users/{name}", post(ok)).fallback(ok);
    let files = Router::new().route("/{file}", get(ok)).fallback(ok);
    Router::new()
        .route("/", get(ok))
        .route("/users/{id}", get(ok).delete(ok))
        .route("/users/me", get(ok))
        .route("/files/{*path}", any(ok))
        .nest("/tenants/{tenant}/orders", orders)
        .nest("/admin", admin)
        .nest_service("/static", files)
        .fallback(ok)
}

type Find = Box<dyn Fn(&Parts) -> Option<Key> + Send + Sync>;

/// Returns the keys of requests, each a method and a path, in a router that `layered` adds the
/// layer to.
async fn keys<K, L>(extractor: K, requests: &[&str], layered: L) -> Vec<Key>
where
    K: KeyExtractor + Send + Sync + 'static,
    L: FnOnce(Find) -> Router,
{
    let keys = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&keys);
    let app = layered(Box::new(move |request: &Parts| {
        let key = extractor.extract(request).unwrap();
        seen.lock().unwrap().push(key);
        Some(key)
    }));
    for request in requests {
        let (method, path) = request.split_once(' ').unwrap();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .body(Body::empty())
            .unwrap();
        send(&app, request).await;
    }
    let keys = keys.lock().unwrap().clone();
    assert_eq!(keys.len(), requests.len());
    keys
}

/// One layer over the whole router, the most common setup.
fn over_all(extractor: Find) -> Router {
    app().layer(RateLimitLayer::new(
        LocalStore::default(),
        key_fn(extractor),
        gcra("api", "1000/h"),
    ))
}

#[tokio::test]
async fn a_route_is_counted_by_its_template() {
    for (requests, template) in [
        (["GET /", "GET /?a=b"], "/"),
        (["GET /users/1", "GET /users/2%2f3"], "/users/{id}"),
        (["GET /users/me", "GET /users/me?x"], "/users/me"),
        (["GET /files/a", "PUT /files/a/b/c"], "/files/{*path}"),
        (
            ["GET /tenants/a/orders/1", "GET /tenants/b/orders/2"],
            "/tenants/{tenant}/orders/{id}",
        ),
        (
            ["POST /admin/users/bob", "POST /admin/users/eve"],
            "/admin/users/{name}",
        ),
        (["GET /users/1", "POST /users/1"], "/users/{id}"),
    ] {
        assert_eq!(
            keys(MatchedRoute, &requests, over_all).await,
            [Key::new(template); 2],
            "{requests:?}"
        );
    }
}

/// Paths that match no route, with methods of every kind.
const UNMATCHED: [&str; 9] = [
    "GET /a",
    "GET /b/c",
    "POST /users",
    "PURGE /users/1/2",
    "GET /admin/x",
    "GET /admin/users/x/y",
    "FOO /tenants/a/orders/1/2",
    "GET /static/a.css",
    "GET /static/b.css",
];

#[tokio::test]
async fn unmatched_routes_share_a_key() {
    for keys in [
        keys(MatchedRoute, &UNMATCHED, over_all).await,
        keys(MatchedEndpoint, &UNMATCHED, over_all).await,
    ] {
        for (key, request) in keys.iter().zip(UNMATCHED) {
            assert_eq!(key.as_bytes(), b"route:none", "{request}");
        }
    }
}

#[tokio::test]
async fn endpoints_are_method_and_template() {
    let endpoint = |method, template| Key::tuple(&[Key::new(method), Key::new(template)]);
    for (request, method, template) in [
        ("GET /users/1", "GET", "/users/{id}"),
        ("HEAD /users/1", "GET", "/users/{id}"),
        // RFC 8441: a WebSocket over HTTP/2 starts like this.
        ("CONNECT /files/a", "GET", "/files/{*path}"),
        ("DELETE /users/1", "DELETE", "/users/{id}"),
        ("POST /users/1", "POST", "/users/{id}"),
        ("PATCH /files/a", "PATCH", "/files/{*path}"),
        ("PURGE /files/a", "OTHER", "/files/{*path}"),
        ("get /files/a", "OTHER", "/files/{*path}"),
        ("POST /admin/users/bob", "POST", "/admin/users/{name}"),
    ] {
        assert_eq!(
            keys(MatchedEndpoint, &[request], over_all).await,
            [endpoint(method, template)],
            "{request}"
        );
    }
}

#[tokio::test]
async fn nested_routers_see_the_whole_route() {
    let nested = |extractor| {
        let layer = RateLimitLayer::new(
            LocalStore::default(),
            key_fn(extractor),
            gcra("api", "1000/h"),
        );
        let users = Router::new()
            .route("/{id}", get(ok))
            .fallback(ok)
            .layer(layer);
        Router::new().nest("/api/{version}/users", users)
    };
    let requests = [
        "GET /api/1/users/7",
        "GET /api/2/users/8",
        "GET /api/1/users/7/x",
        "GET /api/1/users/7/y",
    ];
    let found = keys(MatchedRoute, &requests, nested).await;
    assert_eq!(found[..2], [Key::new("/api/{version}/users/{id}"); 2]);
    assert!(found[2..].iter().all(|key| key.as_bytes() == b"route:none"));
}

#[tokio::test]
async fn a_layer_on_a_route_sees_it() {
    let on_route = |extractor| {
        let layer = RateLimitLayer::new(
            LocalStore::default(),
            key_fn(extractor),
            gcra("api", "1000/h"),
        );
        Router::new().route("/users/{id}", get(ok).layer(layer))
    };
    assert_eq!(
        keys(MatchedRoute, &["GET /users/7"], on_route).await,
        [Key::new("/users/{id}")]
    );
}

#[tokio::test]
async fn around_a_router_no_route_is_known() {
    let around = |extractor| {
        let layer = RateLimitLayer::new(
            LocalStore::default(),
            key_fn(extractor),
            gcra("api", "1000/h"),
        );
        Router::new().fallback_service(layer.layer(app()))
    };
    let found = keys(MatchedRoute, &["GET /users/1", "GET /"], around).await;
    assert!(found.iter().all(|key| key.as_bytes() == b"route:none"));
}

#[tokio::test]
async fn addresses_count_separately_for_each_route() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        (PeerIp, MatchedRoute),
        gcra("api", "1/h"),
    );
    let app = app().layer(layer);
    for (peer, path, status) in [
        ("192.0.2.7:1", "/users/1", 200),
        ("192.0.2.7:2", "/users/2", 429),
        ("192.0.2.7:1", "/users/me", 200),
        ("192.0.2.8:1", "/users/2", 200),
        ("192.0.2.8:1", "/no/such/1", 200),
        ("192.0.2.8:1", "/no/such/2", 429),
    ] {
        let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
        request
            .extensions_mut()
            .insert(peer.parse::<SocketAddr>().unwrap());
        assert_eq!(send(&app, request).await.status(), status, "{peer} {path}");
    }
}
