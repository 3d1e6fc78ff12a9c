//! `cargo run --example remote_store`
//!
//! A store of your own for a table without scripts, such as DynamoDB's, in `tests/support/remote.rs`: it keeps each
//! caller's counts as bytes and replaces them by compare-and-swap. Two instances share the table, which this process
//! simulates. They take 10 per minute together, charge a repeated message once, and limit requests in flight.

#[path = "../tests/support/remote.rs"]
mod remote;

use std::error::Error;

use remote::{Remote, Table};
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, Policy, Quota, Strategy,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let table = Table::default();
    let [here, there] = [(); 2].map(|()| {
        // Each instance decides locally while the table does not.
        Fallback::new(Remote::new(table.clone()), LocalStore::default())
    });
    let ann = Key::new("ann");

    let orders: Policies =
        Policy::new("orders", Strategy::SlidingLog, Quota::per_minute(10))?.into();
    let [one, other] = [&here, &there].map(|store| Limiter::new(store.clone(), orders.clone()));
    let attempts = (0..40).map(|i| {
        if i % 2 == 0 {
            one.take(ann, 1)
        } else {
            other.take(ann, 1)
        }
    });
    let decisions = futures_util::future::try_join_all(attempts).await?;
    let granted = decisions
        .iter()
        .filter(|decision| decision.is_allowed())
        .count();
    println!("of 40 concurrent orders {granted} are granted");

    one.reset(ann).await?;
    for limiter in [&one, &other, &one] {
        let decision = limiter.take_with_id(ann, 4, "message-7").await?;
        println!("message-7: {} remain", decision.remaining());
    }

    let uploads: Policies = Policy::in_flight("uploads", 1)?.into();
    let [one, other] = [here, there].map(|store| Limiter::new(store, uploads.clone()));
    let upload = one.reserve(ann, 1).await?;
    println!(
        "a second upload is denied: {}",
        other.reserve(ann, 1).await.is_err()
    );
    drop(upload);
    while other.reserve(ann, 1).await.is_err() {
        tokio::task::yield_now().await;
    }
    println!("after the first one has ended, it is allowed");
    Ok(())
}
