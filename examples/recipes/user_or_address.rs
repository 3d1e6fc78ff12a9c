//! By user, or by address without a login.

use std::net::SocketAddr;

use axum::{
    Router, body::Body, extract::connect_info::MockConnectInfo, http::Request, routing::get,
};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{KeyExtractor, PeerIp, by_extension};
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

/// In the request's extensions, from the authentication.
#[derive(Clone)]
struct UserId(&'static str);

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(1))?;
    let user_or_address = by_extension(|user: &UserId| user.0).or(PeerIp);
    let limits = RateLimitLayer::new(LocalStore::default(), user_or_address, policy);
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn users_and_addresses_are_counted_separately() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?.layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 7], 4711))));
    for (user, status) in [
        (None, 200),
        (Some("ann"), 200),
        (Some("ann"), 429),
        (Some("ip:192.0.2.7"), 200),
        (None, 429),
    ] {
        let mut request = Request::new(Body::empty());
        user.map(|id| request.extensions_mut().insert(UserId(id)));
        assert_eq!(app.clone().oneshot(request).await?.status(), status);
    }
    Ok(())
}
