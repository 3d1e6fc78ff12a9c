//! Outside of tower.

use std::time::Duration;

use tokio::time::Instant;
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Quota, Strategy};

#[tokio::test(start_paused = true)]
async fn a_worker_waits_for_its_turn() -> Result<(), Box<dyn std::error::Error>> {
    let mails = Policy::new("mails", Strategy::Gcra, Quota::per_minute(60).burst(10))?;
    let limiter = Limiter::new(LocalStore::default(), mails);
    let start = Instant::now();
    for _ in 0..15 {
        assert!(
            limiter
                .wait(Key::new("ann"), 1, Duration::from_secs(5))
                .await?
                .is_allowed()
        );
    }
    assert_eq!(start.elapsed().as_secs(), 5);
    // A batch waits for the units of ten jobs.
    let batch = limiter.wait(Key::new("ann"), 10, Duration::from_secs(15));
    assert!(batch.await?.is_allowed());
    assert_eq!(start.elapsed().as_secs(), 15);
    Ok(())
}

/// A row of the application's database.
struct Customer {
    id: &'static str,
    exports_a_day: u32,
}

#[tokio::test]
async fn each_customer_has_a_limit() -> Result<(), Box<dyn std::error::Error>> {
    let policy = |limit| Policy::new("exports", Strategy::SlidingLog, Quota::per_day(limit));
    let limiter = Limiter::new(LocalStore::default(), policy(10)?);
    let customer = Customer {
        id: "customer-7",
        exports_a_day: 30,
    };
    let bought = Policies::from(policy(customer.exports_a_day)?);
    let exports = limiter.under(&bought);
    let decision = exports.take(Key::new(customer.id), 20).await?.allowed()?;
    assert_eq!(decision.remaining(), 10);
    let denied = exports.take(Key::new(customer.id), 20).await?.allowed();
    assert!(denied.is_err());
    Ok(())
}
