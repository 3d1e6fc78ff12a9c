//! Outside of tower.

use std::time::Duration;

use tokio::time::Instant;
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};

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
