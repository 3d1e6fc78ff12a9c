//! Jobs of a queue: requests that are not HTTP's.

use std::convert::Infallible;

use tower::{ServiceBuilder, ServiceExt};
use tower_redis_ratelimit::check::RateLimited;
use tower_redis_ratelimit::{CallLimitLayer, Key, LocalStore, Policy, Quota, Strategy};

struct Job {
    tenant: &'static str,
    pages: u32,
}

async fn print(job: Job) -> Result<u32, Infallible> {
    Ok(job.pages)
}

#[tokio::test(start_paused = true)]
async fn jobs_are_limited_by_tenant() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let policy = Policy::new("pages", Strategy::Gcra, Quota::per_minute(60))?;
    let by_tenant = |job: &Job| Some(Key::new(job.tenant));
    let limits = CallLimitLayer::new(LocalStore::default(), by_tenant, policy)
        .cost(|job| job.pages)
        .skip(|job| job.tenant == "internal");
    let service = ServiceBuilder::new().layer(limits).service_fn(print);

    for (tenant, pages, wait) in [
        ("acme", 40, None),
        ("acme", 40, Some(20)),
        ("other", 60, None),
        ("internal", 1000, None),
    ] {
        match service.clone().oneshot(Job { tenant, pages }).await {
            Ok(printed) => assert_eq!((printed, wait), (pages, None)),
            Err(error) => match error.downcast_ref::<RateLimited>() {
                Some(limited) => assert_eq!(limited.retry_after().map(|wait| wait.as_secs()), wait),
                None => return Err(error),
            },
        }
    }
    Ok(())
}
