//! Login attempts, by address and by user.

use std::net::SocketAddr;

use axum::extract::{Path, State, connect_info::MockConnectInfo};
use axum::http::{Request, StatusCode, request::Parts};
use axum::response::{ErrorResponse, Response};
use axum::{Router, body::Body, routing::post};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{KeyExtractor, PeerIp};
use tower_redis_ratelimit::reject::{HttpReject, Reason};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{ConfigError, Key, Limiter, LocalStore, Policy, Strategy};

#[derive(Clone)]
struct Limits<S> {
    by_address: Limiter<S>,
    by_user: Limiter<S>,
}

async fn login<S: Store>(
    State(limits): State<Limits<S>>,
    Path(user): Path<String>,
    request: Parts,
    password: String,
) -> Result<StatusCode, ErrorResponse> {
    let user = Key::new(&user);
    let address = PeerIp.extract(&request).map_err(|missing| -> Response {
        HttpReject::new().response(Reason::MissingKey(&missing))
    })?;
    let by_address = limits.by_address.reserve(address, 1).await?;
    // If this is denied, the end of the handler drops `by_address`, which refunds it.
    limits.by_user.reserve(user, 1).await?.keep();
    by_address.keep();
    if password != "open sesame" {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    let _ = limits.by_user.reset(user).await?;
    Ok(StatusCode::OK)
}

pub(crate) fn app<S: Store>(store: S) -> Result<Router, ConfigError> {
    let by_address = Policy::new("login-address", Strategy::SlidingLog, "20/m")?;
    let by_user = Policy::new("login-user", Strategy::SlidingLog, "3 per 15m")?;
    Ok(Router::new()
        .route("/login/{user}", post(login::<S>))
        .with_state(Limits {
            by_address: Limiter::new(store.clone(), by_address),
            by_user: Limiter::new(store, by_user),
        }))
}

#[tokio::test]
async fn attempts_are_limited_by_user_and_address() -> Result<(), Box<dyn std::error::Error>> {
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
    // These are not charged to the address, which has 14 attempts left.
    for _ in 0..30 {
        assert_eq!(attempt("ann", "open sesame").await?, 429);
    }
    for user in 0..14 {
        assert_eq!(attempt(&format!("user-{user}"), "open sesame").await?, 200);
    }
    assert_eq!(attempt("bob", "open sesame").await?, 429);
    Ok(())
}
