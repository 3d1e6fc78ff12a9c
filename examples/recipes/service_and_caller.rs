//! A limit for each user, for its organization and for the whole service, all or nothing.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{Global, by_extension};
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, RateLimitLayer, Strategy};

/// The authentication inserts it into the extensions of a request.
#[derive(Clone)]
struct User {
    id: u64,
    org: u64,
}

fn app(store: LocalStore) -> Result<Router, ConfigError> {
    let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota);
    let by_user = by_extension(|user: &User| user.id);
    let by_org = by_extension(|user: &User| user.org);
    let limits = RateLimitLayer::new(store, by_user, policy("user", "2/m")?)
        .and(by_org, policy("org", "3/m")?)
        .and(Global, policy("service", "100/m")?);
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn a_denied_user_takes_nothing_from_the_organization()
-> Result<(), Box<dyn std::error::Error>> {
    let app = app(LocalStore::default())?;
    for (id, org, status, left) in [
        (1, 7, 200, "\"user\";r=1, \"org\";r=2, \"service\";r=99"),
        (1, 7, 200, "\"user\";r=0, \"org\";r=1, \"service\";r=98"),
        (1, 7, 429, "\"user\";r=0, \"org\";r=1, \"service\";r=98"),
        (2, 7, 200, "\"user\";r=1, \"org\";r=0, \"service\";r=97"),
        (2, 7, 429, "\"user\";r=1, \"org\";r=0, \"service\";r=97"),
        (3, 8, 200, "\"user\";r=1, \"org\";r=2, \"service\";r=96"),
    ] {
        let user = User { id, org };
        let request = Request::get("/").extension(user).body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        assert_eq!(response.status(), status);
        let items = response.headers()["ratelimit"].to_str()?.split(", ");
        let items: Vec<&str> = items.filter_map(|item| item.split(";t=").next()).collect();
        assert_eq!(items.join(", "), left);
    }
    Ok(())
}
