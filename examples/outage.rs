//! `cargo run --example outage`
//!
//! Four instances of a small service share one limit. Redis is killed after 5 seconds and started again, empty, after
//! 10. For each second this prints the grants by source, and the longest time that a request took. The lines in between
//! are the default log without an observer. It needs `redis-server` on the PATH.

use std::convert::Infallible;
use std::error::Error;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::{Request, Response};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Decision, Source};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{
    Fallback, LocalStore, Policy, Quota, RateLimitLayer, RedisStore, Strategy,
};

const INSTANCES: u32 = 4;
const QUOTA: Quota = Quota::per_second(200);
const SECONDS: u64 = 15;

/// The answers of one second.
#[derive(Default)]
struct Second {
    redis: AtomicU64,
    local: AtomicU64,
    denied: AtomicU64,
    failed: AtomicU64,
    longest: AtomicU64,
}

impl Second {
    fn count(&self, decision: Option<&Decision>, elapsed: Duration) {
        let count = match decision {
            None => &self.failed,
            Some(decision) if !decision.is_allowed() => &self.denied,
            Some(decision) if decision.source() == Source::Redis => &self.redis,
            Some(_) => &self.local,
        };
        count.fetch_add(1, Relaxed);
        self.longest.fetch_max(elapsed.as_micros() as u64, Relaxed);
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .without_time()
        .with_target(false)
        .init();
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut redis = start_redis(port)?;
    let second = Arc::new(Second::default());
    for _ in 0..INSTANCES {
        let store = RedisStore::connect_lazy(format!("redis://127.0.0.1:{port}/"))?;
        let store = Fallback::builder(store, LocalStore::default())
            .share(INSTANCES)
            .build();
        let policy = Policy::new("example", Strategy::Gcra, QUOTA)?;
        let service = RateLimitLayer::new(store, Global, policy)
            .decision_in_response()
            .layer(service_fn(async |_: Request<()>| {
                Ok::<_, Infallible>(Response::new(String::new()))
            }));
        for _ in 0..16 {
            tokio::spawn(client(service.clone(), Arc::clone(&second)));
        }
    }

    println!("{QUOTA}, {INSTANCES} instances of 16 clients each\n");
    println!("second  by Redis  locally  denied  failed  longest");
    for i in 1..=SECONDS {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let take = |count: &AtomicU64| count.swap(0, Relaxed);
        println!(
            "{i:>6}  {:>8}  {:>7}  {:>6}  {:>6}  {:>4} ms",
            take(&second.redis),
            take(&second.local),
            take(&second.denied),
            take(&second.failed),
            take(&second.longest).div_ceil(1000),
        );
        match i {
            5 => {
                println!("        Redis is killed");
                redis.kill()?;
                redis.wait()?;
            }
            10 => {
                println!("        Redis is started again, empty");
                redis = start_redis(port)?;
            }
            _ => {}
        }
    }
    redis.kill()?;
    redis.wait()?;
    Ok(())
}

/// Sends a hundred requests per second, regardless of the replies.
#[allow(
    clippy::disallowed_methods,
    reason = "the time of each request is what it shows"
)]
async fn client<S>(mut service: S, second: Arc<Second>)
where
    S: Service<Request<()>, Response = Response<String>, Error = Infallible>,
{
    loop {
        let since = Instant::now();
        let Ok(ready) = service.ready().await;
        let Ok(response) = ready.call(Request::new(())).await;
        second.count(response.extensions().get(), since.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Starts Redis, and waits until it accepts connections.
fn start_redis(port: u16) -> std::io::Result<Child> {
    let redis = Command::new("redis-server")
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ])
        .stdout(Stdio::null())
        .spawn()?;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(redis)
}
