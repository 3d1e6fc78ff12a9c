//! A job that knows its cost afterwards.

use tower_redis_ratelimit::settle::ReserveError;
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Strategy};

#[tokio::test]
async fn a_job_pays_its_cost() -> Result<(), Box<dyn std::error::Error>> {
    let rows = Policy::new("rows", Strategy::SlidingWindow { cells: 60 }, "10000/h")?;
    let (limiter, user) = (
        Limiter::new(LocalStore::default(), rows),
        Key::new("user-42"),
    );

    let reserved = limiter.reserve(user, 8_000).await?;
    assert!(matches!(
        limiter.reserve(user, 8_000).await,
        Err(ReserveError::Denied(_))
    ));
    reserved.settle(1_200);

    // Dropping the reservation of a failed job refunds all of it.
    drop(limiter.reserve(user, 8_000).await?);
    assert_eq!(limiter.peek(user, 0).await?.remaining(), 8_800);

    // Settlements that are unsent at the end of a process are lost.
    limiter.flush().await;
    Ok(())
}
