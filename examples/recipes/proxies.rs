//! Behind two proxies, with IPv6.

use std::net::SocketAddr;

use axum::{
    Router, body::Body, extract::connect_info::MockConnectInfo, http::Request, routing::get,
};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::ClientIp;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

/// Serve it with `app.into_make_service_with_connect_info::<SocketAddr>()`.
fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("client", Strategy::Gcra, Quota::per_minute(1))?;
    let client = ClientIp::x_forwarded_for()
        .trust(["private", "203.0.113.0/24"])?
        .ipv6_prefix(56)?;
    Ok(Router::new()
        .route("/", get(|| async {}))
        .layer(RateLimitLayer::new(LocalStore::default(), client, policy)))
}

#[tokio::test]
async fn clients_behind_proxies_are_counted() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?.layer(MockConnectInfo(SocketAddr::from(([10, 0, 0, 1], 80))));
    for (forwarded, status) in [
        ("198.51.100.7, 203.0.113.9", 200),
        ("6.6.6.6, 198.51.100.7, 203.0.113.9", 429),
        ("2001:db8:1:200::7, 203.0.113.9", 200),
        ("2001:db8:1:2ff::8, 203.0.113.9", 429),
        ("2001:db8:1:300::7, 203.0.113.9", 200),
    ] {
        let request = Request::get("/")
            .header("x-forwarded-for", forwarded)
            .body(Body::empty())?;
        assert_eq!(
            app.clone().oneshot(request).await?.status(),
            status,
            "{forwarded}"
        );
    }
    Ok(())
}
