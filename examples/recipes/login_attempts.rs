//! Login attempts.

use std::net::SocketAddr;

use axum::extract::{Path, State, connect_info::MockConnectInfo};
use axum::http::{Request, StatusCode};
use axum::{Router, body::Body, routing::post};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::settle::ReserveError;
use tower_redis_ratelimit::{
    ConfigError, Key, Limiter, LocalStore, Policy, RateLimitLayer, Strategy,
};

async fn login(
    State(attempts): State<Limiter<LocalStore>>,
    Path(user): Path<String>,
    password: String,
) -> Result<StatusCode, ReserveError> {
    let user = Key::new(&user);
    attempts.reserve(user, 1).await?.keep();
    if password != "open sesame" {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    let _ = attempts.reset(user).await?;
    Ok(StatusCode::OK)
}

fn app(store: LocalStore) -> Result<Router, ConfigError> {
    let by_user = Policy::new("login-user", Strategy::SlidingLog, "3 per 15m".parse()?)?;
    let by_address = Policy::new("login-address", Strategy::Gcra, "20/m".parse()?)?;
    let limits = RateLimitLayer::new(store.clone(), PeerIp, by_address);
    Ok(Router::new()
        .route("/login/{user}", post(login).layer(limits))
        .with_state(Limiter::new(store, by_user)))
}

#[tokio::test]
async fn attempts_are_limited_by_user() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(LocalStore::default())?
        .layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 7], 4711))));
    let attempt = async |user: &str, password: &'static str| {
        let request = Request::post(format!("/login/{user}")).body(Body::from(password));
        app.clone()
            .oneshot(request.expect("a good path"))
            .await
            .map(|response| response.status().as_u16())
    };
    for (password, status) in [
        ("abc", 401),
        ("abc", 401),
        ("open sesame", 200),
        ("abc", 401),
        ("abc", 401),
        ("abc", 401),
    ] {
        assert_eq!(attempt("ann", password).await?, status);
    }
    assert_eq!(attempt("ann", "open sesame").await?, 429);
    assert_eq!(attempt("bob", "open sesame").await?, 200);
    Ok(())
}
