//! `cargo run --example client`
//!
//! Clients of an API that allows 50 requests a second: three instances of a service, each with 50 tasks that call it as
//! fast as they may. Together they wait for their turns and keep to that rate. The API is a server in this process that
//! counts its requests. It listens on the loopback address for these clients only, so it needs no header timeout.
//!
//! Settings from the environment: `RATE` (`50/s burst 5`), `SECONDS` (3), `INSTANCES` (3), and `REDIS_URL` to share the
//! count among processes. Start one process with the API, and others that call it:
//!
//! ```sh
//! export REDIS_URL=redis://127.0.0.1/ INSTANCES=1 SECONDS=20
//! PORT=3000 cargo run --example client &
//! API=http://127.0.0.1:3000/ cargo run --example client
//! ```

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use axum::{Router, body::Body, routing::get};
use http::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::{Layer, Service, ServiceExt};
use tower_redis_ratelimit::store::{AnyStore, Health, ShareConfig, Store, StoreConfig};
use tower_redis_ratelimit::{Key, Policy, Quota, Strategy, ThrottleLayer};

const TASKS: usize = 50;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let quota: Quota = setting("RATE", "50/s burst 5")?;
    let seconds: u64 = setting("SECONDS", "3")?;
    let instances: usize = setting("INSTANCES", "3")?;
    // While Redis is unavailable, each instance keeps to its share of the rate.
    let mut config = StoreConfig::from_env("REDIS_URL")?;
    config.share = ShareConfig::Alive;
    let store = AnyStore::from_config(&config)?;
    let api = match env::var("API") {
        Ok(api) => api.parse()?,
        Err(_) => serve(setting("PORT", "0")?).await?,
    };

    let policy = Policy::new("the-api", Strategy::Gcra, quota)?;
    println!("{instances} instances with {TASKS} tasks each call {api}, {quota} in all");
    let mut made = vec![];
    for _ in 0..instances {
        // A real instance needs one layer, and clones the client for each task.
        let throttle = ThrottleLayer::new(store.clone(), Key::new("the-api"), policy.clone());
        let client = throttle.layer(Client::builder(TokioExecutor::new()).build_http::<Body>());
        let calls = Arc::new(AtomicUsize::new(0));
        made.push(Arc::clone(&calls));
        for _ in 0..TASKS {
            tokio::spawn(call(client.clone(), api.clone(), Arc::clone(&calls)));
        }
    }
    let (mut before, mut clock) = (0, tokio::time::interval(Duration::from_secs(1)));
    clock.tick().await;
    for second in 1..=seconds {
        clock.tick().await;
        let each: Vec<usize> = made.iter().map(|calls| calls.load(Relaxed)).collect();
        let all = each.iter().sum::<usize>();
        println!(
            "second {second}: {} calls, {all} in all, by instance {each:?}",
            all - before
        );
        before = all;
    }
    match store {
        AnyStore::Local(_) => println!("counted in this process; set REDIS_URL to share the count"),
        store if store.health() == Health::Local => {
            println!("Redis is unavailable: this instance counts its share")
        }
        _ => println!("counted in Redis, for all processes"),
    }
    Ok(())
}

/// Calls the API in a loop, each time when it is this task's turn.
async fn call<S>(mut client: S, api: Uri, calls: Arc<AtomicUsize>) -> Result<(), S::Error>
where
    S: Service<Request<Body>>,
{
    loop {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = api.clone();
        client.ready().await?.call(request).await?;
        calls.fetch_add(1, Relaxed);
    }
}

/// Starts the API, which does not limit its clients.
async fn serve(port: u16) -> Result<Uri, Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let api = format!("http://{}/", listener.local_addr()?).parse()?;
    let app = Router::new().route("/", get(|| async { "Hello!\n" }));
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(api)
}

/// Returns a setting from the environment, or its default.
fn setting<T>(name: &str, default: &str) -> Result<T, String>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = env::var(name).unwrap_or_else(|_| default.to_owned());
    text.parse()
        .map_err(|error| format!("{name}={text}: {error}"))
}
