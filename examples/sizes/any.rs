//! The program of the README: any store, by a variable.

mod serve;

use tower_redis_ratelimit::store::AnyStore;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    serve::serve(AnyStore::from_env("REDIS_URL")?).await
}
