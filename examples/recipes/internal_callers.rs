//! Internal callers are exempt.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use axum::{
    Router, body::Body, extract::connect_info::MockConnectInfo, http::Request, routing::get,
};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::ClientIp;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

const PROXY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("client", Strategy::Gcra, Quota::per_minute(1))?;
    let client = ClientIp::x_forwarded_for().trust([PROXY.to_string()])?;
    let address = client.clone();
    let limits = RateLimitLayer::new(LocalStore::default(), client, policy)
        .skip(move |request| matches!(address.address(request), Some(IpAddr::V4(ip)) if ip.is_private() && ip != PROXY));
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn internal_callers_are_exempt() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?.layer(MockConnectInfo(SocketAddr::from((PROXY, 80))));
    for (client, status) in [
        ("10.0.0.9", 200),
        ("10.0.0.9", 200),
        ("198.51.100.7", 200),
        ("10.0.0.9, 198.51.100.7", 429),
        ("198.51.100.7, unknown", 200),
        ("198.51.100.7, unknown", 429),
    ] {
        let request = Request::get("/")
            .header("x-forwarded-for", client)
            .body(Body::empty())?;
        assert_eq!(app.clone().oneshot(request).await?.status(), status);
    }
    Ok(())
}
