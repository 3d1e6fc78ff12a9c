//! Counts in the process: a `LocalStore`.

mod serve;

use tower_redis_ratelimit::LocalStore;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    serve::serve(LocalStore::default()).await
}
