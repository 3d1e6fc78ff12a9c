//! A monthly plan.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::strategy::{Align, Calendar};
use tower_redis_ratelimit::{
    ConfigError, LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy,
};

fn app(plan: Quota) -> Result<Router, ConfigError> {
    let months = Calendar::month_from(15)?.in_zone("+02:00")?;
    let policies = Policies::new([
        Policy::new("burst", Strategy::Gcra, "10/s")?,
        Policy::new("plan", Strategy::FixedWindow(Align::Calendar(months)), plan)?,
    ])?;
    let plans = RateLimitLayer::new(
        LocalStore::default(),
        HeaderKey::new("x-api-key")?,
        policies,
    );
    Ok(Router::new().route("/", get(|| async {})).layer(plans))
}

const FILE: &str = r#"
[[policies]]
name = "burst"
quota = "10/s"

[[policies]]
name = "plan"
strategy = "fixed-window(month from 15, +02:00)"
quota = "10000/month"
"#;

#[derive(serde::Deserialize)]
struct Settings {
    policies: Policies,
}

#[test]
fn a_file_has_the_plan() -> Result<(), Box<dyn std::error::Error>> {
    let settings: Settings = toml::from_str(FILE)?;
    let months = Calendar::month_from(15)?.in_zone("+02:00")?;
    let plan = &settings.policies[1];
    assert_eq!(
        plan.strategy(),
        Some(Strategy::FixedWindow(Align::Calendar(months)))
    );
    assert_eq!(plan.quota(), Quota::per_month(10_000));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_used_up_plan_waits_for_the_next_month() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(Quota::per_month(2))?;
    let mut rests = vec![];
    for (status, left) in [(200, 1), (200, 0), (429, 0)] {
        let request = Request::get("/")
            .header("x-api-key", "k-1")
            .body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        let headers = response.headers();
        assert_eq!(response.status(), status);
        assert_eq!(
            headers["ratelimit-policy"],
            r#""burst";q=10;w=1, "plan";q=2"#
        );
        let limits = headers["ratelimit"].to_str()?;
        let (_, rest) = limits
            .split_once(&format!(r#""plan";r={left};t="#))
            .ok_or_else(|| limits.to_owned())?;
        let rest: u64 = rest.parse()?;
        assert!((1..=31 * 86_400).contains(&rest), "{limits}");
        if status == 429 {
            assert_eq!(headers["retry-after"], rest.to_string());
        }
        rests.push(rest);
    }
    assert_eq!(
        rests, [rests[0]; 3],
        "the rest of the month, by a paused clock"
    );
    Ok(())
}
