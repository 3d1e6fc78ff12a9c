//! `cargo run --example dashboard`
//!
//! A page on which you can kill, freeze and restart Redis, and watch what three instances of a service decide, which
//! store decides, and how fast. The example starts its own `redis-server` if there is one on the PATH; otherwise the
//! instances count in this process. The page listens at `PORT` (3000) for this machine only.

#[path = "../listen.rs"]
mod listen;
mod load;
#[path = "../local_page.rs"]
mod local_page;
mod recorder;
mod redis;
#[path = "../serve.rs"]
mod serve;

use std::convert::Infallible;
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::middleware::from_fn;
use axum::response::sse::{Event, Sse};
use axum::routing::{get, post};
use futures_util::{Stream, StreamExt};
use http::{Response, StatusCode};
use tokio::signal::unix::SignalKind;
use tower::{Layer, service_fn};
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::select::{Live, Tiers};
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{
    ConfigError, Fallback, LocalStore, Policy, Quota, RateLimitLayer, RedisStore, Strategy,
};

use crate::local_page::{only_our_page, page};
use crate::recorder::{Recorder, Settings};
use crate::redis::{Action, Redis};

const INSTANCES: u32 = 3;
const PLANS: [&str; 2] = ["free", "pro"];
/// The selectable rates, in requests per second.
const RATES: [u32; 7] = [0, 100, 250, 500, 1_000, 2_000, 4_000];

/// The settings that the page's buttons change.
struct Demo {
    recorder: Arc<Recorder>,
    redis: Mutex<Option<Redis>>,
    rate: Arc<AtomicU32>,
    quotas: Mutex<[Quota; 2]>,
    limits: Live<Tiers>,
}

type Answer = Result<StatusCode, (StatusCode, String)>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let redis = Redis::start()?;
    if redis.is_none() {
        println!(
            "There is no redis-server on the PATH, so nothing can be killed: counts are in this process."
        );
    }
    let quotas = [
        Quota::per_second(10).burst(20),
        Quota::per_second(40).burst(80),
    ];
    let (limits, recorder, rate) = (
        Live::new(tiers(quotas)?),
        Recorder::new(),
        Arc::new(AtomicU32::new(1_000)),
    );

    let local = LocalStore::default();
    let mut instances = vec![];
    for _ in 0..INSTANCES {
        let store = match &redis {
            Some(redis) => {
                let store = RedisStore::connect_lazy(redis.url())?;
                Fallback::builder(store, LocalStore::default())
                    .share(INSTANCES)
                    .build()
                    .into()
            }
            None => AnyStore::from(local.clone()),
        };
        let layer =
            RateLimitLayer::new(store, HeaderKey::new("x-user")?.readable(), limits.clone());
        let service = service_fn(async |_| Ok::<_, Infallible>(Response::new(String::new())));
        instances.push(layer.observer(Arc::clone(&recorder)).layer(service));
    }
    tokio::spawn(load::run(
        instances,
        Arc::clone(&rate),
        Arc::clone(&recorder),
    ));

    let demo = Arc::new(Demo {
        recorder,
        redis: Mutex::new(redis),
        rate,
        quotas: Mutex::new(quotas),
        limits,
    });
    tokio::spawn(end_seconds(Arc::clone(&demo)));
    let app = Router::new()
        .route("/", get(async || page(include_str!("page.html"))))
        .route("/records", get(records))
        .route("/redis/{action}", post(redis_action))
        .route("/rate/{change}", post(change_rate))
        .route("/limit/{plan}", post(change_limit))
        .layer(from_fn(only_our_page))
        .with_state(demo);

    let listener = local_page::listen("kill Redis").await?;
    let mut terminated = tokio::signal::unix::signal(SignalKind::terminate())?;
    tokio::select! {
        ended = serve::serve(listener, app) => Ok(ended?),
        // Return from `main`, which drops `Redis` and so kills the server, even a frozen one.
        stopped = tokio::signal::ctrl_c() => Ok(stopped?),
        _ = terminated.recv() => Ok(()),
    }
}

/// Returns the policies of both plans.
fn tiers(quotas: [Quota; 2]) -> Result<Tiers, ConfigError> {
    let policy = |plan: usize| Policy::new(PLANS[plan], Strategy::Gcra, quotas[plan]);
    Ok(Tiers::new(policy(0)?).tier(PLANS[1], policy(1)?))
}

async fn end_seconds(demo: Arc<Demo>) {
    let mut seconds = tokio::time::interval(Duration::from_secs(1));
    loop {
        seconds.tick().await;
        let redis = lock(&demo.redis)
            .as_mut()
            .map_or(redis::State::Missing, Redis::state);
        let quotas = PLANS
            .into_iter()
            .zip(lock(&demo.quotas).map(|quota| quota.to_string()))
            .collect();
        demo.recorder.end_second(Settings {
            redis,
            rate: demo.rate.load(Relaxed),
            quotas,
        });
    }
}

async fn records(
    State(demo): State<Arc<Demo>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    Sse::new(
        demo.recorder
            .records()
            .map(|record| Ok(Event::default().data(record))),
    )
}

async fn redis_action(State(demo): State<Arc<Demo>>, Path(action): Path<Action>) -> Answer {
    let mut redis = lock(&demo.redis);
    let redis = redis.as_mut().ok_or((
        StatusCode::CONFLICT,
        "there is no redis-server on the PATH".to_owned(),
    ))?;
    redis
        .act(action)
        .map_err(|error| (StatusCode::CONFLICT, error.to_string()))?;
    let (mark, text) = match action {
        Action::Kill => ("killed", "You killed Redis"),
        Action::Freeze => (
            "frozen",
            "You froze Redis: it takes connections and does not answer",
        ),
        Action::Resume => ("resumed", "You resumed Redis"),
        Action::Restart => (
            "restarted",
            "You started Redis again, empty: each caller has its burst again, less what the fallback granted",
        ),
    };
    demo.recorder.note(mark, text);
    Ok(StatusCode::NO_CONTENT)
}

/// Changes the rate to the next higher or lower one (`more` or `less`).
async fn change_rate(State(demo): State<Arc<Demo>>, Path(change): Path<String>) -> Answer {
    let rate = demo.rate.load(Relaxed);
    let next = match change.as_str() {
        "more" => RATES.into_iter().find(|other| *other > rate),
        "less" => RATES.into_iter().rfind(|other| *other < rate),
        _ => return Err((StatusCode::NOT_FOUND, "`more` or `less`".to_owned())),
    };
    demo.rate.store(next.unwrap_or(rate), Relaxed);
    Ok(StatusCode::NO_CONTENT)
}

async fn change_limit(
    State(demo): State<Arc<Demo>>,
    Path(plan): Path<String>,
    quota: String,
) -> Answer {
    let bad_request = |error: ConfigError| (StatusCode::BAD_REQUEST, error.to_string());
    let quota: Quota = quota.parse().map_err(bad_request)?;
    let mut quotas = lock(&demo.quotas);
    let mut changed = *quotas;
    let plan = PLANS
        .into_iter()
        .position(|name| name == plan)
        .ok_or((StatusCode::NOT_FOUND, "`free` or `pro`".to_owned()))?;
    changed[plan] = quota;
    demo.limits.replace(tiers(changed).map_err(bad_request)?);
    *quotas = changed;
    demo.recorder
        .note(PLANS[plan], format!("You set {} to {quota}", PLANS[plan]));
    Ok(StatusCode::NO_CONTENT)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
