//! `cargo run --example reqwest --features reqwest`
//!
//! Two instances of a service call an API with reqwest. Together they keep to 50 requests a second, and fail rather
//! than wait for more than 5 seconds. But the API accepts only 20 a second, and otherwise replies with a 429 and
//! `Retry-After`. The instance that gets the 429 notifies the others, and all of them pause until that time. The API is
//! a server in this process that counts its denials. It listens on the loopback address for these instances only, so it
//! needs no header timeout.
//!
//! Settings from the environment: `RATE` (`50/s burst 5`), `API_RATE` (`20/s`), `CALLS` (60), and `REDIS_URL` to share
//! the count among processes.

use std::env;
use std::error::Error;
use std::time::Duration;

use axum::{Router, routing::get};
use reqwest::{Client, Request, Response, StatusCode, Url};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::throttle::{Pause, retry_after};
use tower_redis_ratelimit::{
    ConfigError, Key, LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy, ThrottleLayer,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let store = AnyStore::from_env("REDIS_URL")?;
    let (rate, api_rate) = (
        setting("RATE", "50/s burst 5")?,
        setting("API_RATE", "20/s")?,
    );
    let calls: usize = setting("CALLS", "60")?;
    let api = serve(api_rate).await?;
    println!("two instances call {api}, {rate} together; it takes {api_rate}");

    let instances = [1, 2].map(|instance| {
        let (client, api) = (client(&store, rate), api.clone());
        tokio::spawn(async move { work(instance, client?, api, calls / 2).await })
    });
    let (mut made, mut denied) = (0, 0);
    for instance in instances {
        let (more, refused) = instance.await??;
        (made, denied) = (made + more, denied + refused);
    }
    println!("{made} calls, {denied} of them denied by the API");
    Ok(())
}

/// Creates the client of an instance. All clients share the count and the pauses.
fn client(
    store: &AnyStore,
    rate: Quota,
) -> Result<
    impl Service<Request, Response = Response, Error = BoxError, Future: Send> + use<>,
    ConfigError,
> {
    const API: Key = Key::GLOBAL;
    // Cap pauses at a minute, even if the API sends a longer `Retry-After`.
    let pause = Pause::new(store.clone(), "the-api-pause", Duration::from_secs(60))?;
    let policies = Policies::new([
        Policy::new("the-api", Strategy::Gcra, rate)?,
        pause.policy(),
    ])?;
    let throttle =
        ThrottleLayer::new(store.clone(), API, policies).max_wait(Duration::from_secs(5));

    let client = Client::new();
    Ok(throttle.layer(service_fn(move |request| {
        let (client, pause) = (client.clone(), pause.clone());
        async move {
            let response = client.execute(request).await?;
            if let Some(wait) = retry_after(response.status(), response.headers()) {
                pause.begin(API, wait).await?;
            }
            Ok::<_, BoxError>(response)
        }
    })))
}

/// Calls in sequence. Returns the number of calls, and the number that the API denied.
async fn work<S>(
    instance: usize,
    mut client: S,
    api: Url,
    calls: usize,
) -> Result<(usize, usize), BoxError>
where
    S: Service<Request, Response = Response, Error = BoxError>,
{
    let (mut made, mut denied) = (0, 0);
    while made - denied < calls {
        let request = Request::new(reqwest::Method::GET, api.clone());
        let response = client.ready().await?.call(request).await?;
        made += 1;
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            denied += 1;
            println!(
                "instance {instance} got a 429, retry-after: {:?}",
                response.headers()["retry-after"]
            );
        }
    }
    Ok((made, denied))
}

/// Starts the API.
async fn serve(quota: Quota) -> Result<Url, BoxError> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let api = format!("http://{}/", listener.local_addr()?).parse()?;
    let policy = Policy::new(
        "of-the-api",
        Strategy::FixedWindow(Default::default()),
        quota,
    )?;
    let layer = RateLimitLayer::new(LocalStore::default(), Global, policy);
    let app = Router::new()
        .route("/", get(|| async { "Hello!\n" }))
        .layer(layer);
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
