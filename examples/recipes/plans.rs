//! Plans, and one customer's limit.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::by_extension;
use tower_redis_ratelimit::select::Tiers;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

#[derive(Clone)]
struct User {
    id: u64,
    plan: &'static str,
}

fn app() -> Result<Router, ConfigError> {
    let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
    let by_user = by_extension(|user: &User| user.id);
    let acme = by_user.key_of(&User {
        id: 17,
        plan: "any",
    });
    let plans = Tiers::new(policy("free", 1)?)
        .tier("pro", policy("pro", 2)?)
        .caller(acme, policy("acme", 3)?)
        .tier_by(|request| Some(request.extensions.get::<User>()?.plan));
    let limits = RateLimitLayer::new(LocalStore::default(), by_user, plans);
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn plans_and_one_customer_have_limits() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    for (id, plan, passes) in [
        (1, "free", 1),
        (1, "pro", 2),
        (2, "none", 1),
        (17, "pro", 3),
    ] {
        for i in 0..=passes {
            let request = Request::get("/")
                .extension(User { id, plan })
                .body(Body::empty())?;
            assert_eq!(
                app.clone().oneshot(request).await?.status(),
                if i < passes { 200 } else { 429 }
            );
        }
    }
    Ok(())
}
