//! Counts in Redis, and in the process while Redis cannot decide: a `Fallback`.

mod serve;

use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
    serve::serve(Fallback::new(redis, LocalStore::default())).await
}
