//! Only failures count.

use std::net::SocketAddr;

use axum::extract::{Json, State, connect_info::MockConnectInfo};
use axum::http::StatusCode;
use axum::{Router, body::Body, http::Request, routing::post};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::settle::{ReserveError, Settlement};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    ConfigError, Key, Limiter, LocalStore, Policy, RateLimitLayer, Strategy,
};

#[derive(serde::Deserialize)]
struct Login {
    user: String,
    password: String,
}

async fn login<S: Store>(
    State(failures): State<Limiter<S>>,
    Json(login): Json<Login>,
) -> Result<StatusCode, ReserveError> {
    let user = login.user.trim().to_lowercase();
    let attempt = failures.reserve(Key::new(&user), 1).await?;
    // From this line the attempt counts, also if the client disconnects.
    attempt.set(1);
    if login.password != "open sesame" {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    attempt.settle(0);
    Ok(StatusCode::OK)
}

pub(crate) fn app<S: Store>(store: S) -> Result<Router, ConfigError> {
    let failures = Policy::new("login", Strategy::SlidingLog, "3 per 15m")?;
    let by_address = Policy::new("login-address", Strategy::SlidingLog, "6/m")?;
    let by_address = RateLimitLayer::new(store.clone(), PeerIp, by_address).settle(|response| {
        match response.status {
            StatusCode::OK => Settlement::Refund,
            _ => Settlement::Keep,
        }
    });
    Ok(Router::new()
        .route("/login", post(login::<S>).layer(by_address))
        .with_state(Limiter::new(store, failures)))
}

#[tokio::test]
async fn only_failures_count() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(LocalStore::default())?
        .layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 7], 4711))));
    for (user, password, status) in [
        ("ann", "abc", 401),
        ("ann", "open sesame", 200),
        ("ann", "open sesame", 200),
        (" Ann", "abc", 401),
        ("ann", "open sesame", 200),
        ("ann", "abc", 401),
        ("ann", "open sesame", 429),
        ("bob", "abc", 401),
        ("bob", "abc", 401),
        // The address has six failures.
        ("cho", "open sesame", 429),
    ] {
        let body = format!(r#"{{"user":"{user}","password":"{password}"}}"#);
        let request = Request::post("/login")
            .header("content-type", "application/json")
            .body(Body::from(body))?;
        let response = app.clone().oneshot(request).await?;
        assert_eq!(response.status(), status, "{user}");
        assert_eq!(
            response.headers().contains_key("retry-after"),
            status == 429
        );
    }
    Ok(())
}
