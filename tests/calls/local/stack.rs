//! Combined with tower's own layers, outside and inside.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::time::{Sleep, sleep};
use tower::balance::p2c::Balance;
use tower::discover::{Discover, ServiceList};
use tower::load::{CompleteOnResponse, PendingRequests};
use tower::load_shed::error::Overloaded;
use tower::retry::Policy;
use tower::timeout::error::Elapsed;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_redis_ratelimit::check::RateLimited;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{CallLimitLayer, LocalStore};

use super::{job, layer, layer_with, limited, print};
use crate::mocks::{gcra, manual_store};

/// A limit of two requests per 20 seconds; the requests are numbers.
fn numbers() -> CallLimitLayer<LocalStore, Global, u32> {
    CallLimitLayer::new(
        LocalStore::default(),
        Global,
        gcra("numbers", "1/10s burst 2"),
    )
}

async fn echo(number: u32) -> Result<u32, Infallible> {
    Ok(number)
}

#[tokio::test(start_paused = true)]
async fn the_error_is_found_under_a_buffer() {
    let service = ServiceBuilder::new()
        .buffer(8)
        .layer(layer("2/h"))
        .service_fn(print);
    let mut denied = 0;
    for result in join_all((0..3).map(|_| service.clone().oneshot(job("acme")))).await {
        denied += u32::from(result.is_err_and(|error| error.is::<RateLimited>()));
    }
    assert_eq!(denied, 1);
}

/// Retries after `retry_after`, and records the waiting times.
#[derive(Clone, Default)]
struct HonourRetryAfter(Arc<Mutex<Vec<Duration>>>);

impl Policy<u32, u32, BoxError> for HonourRetryAfter {
    type Future = Sleep;

    fn retry(&mut self, _: &mut u32, result: &mut Result<u32, BoxError>) -> Option<Sleep> {
        let limited = result.as_ref().err()?.downcast_ref::<RateLimited>()?;
        let wait = limited.retry_after()?;
        self.0.lock().unwrap().push(wait);
        Some(sleep(wait))
    }

    fn clone_request(&mut self, number: &u32) -> Option<u32> {
        Some(*number)
    }
}

#[tokio::test(start_paused = true)]
async fn each_retry_attempt_is_limited() {
    let (calls, policy) = (AtomicU32::new(0), HonourRetryAfter::default());
    let service = ServiceBuilder::new()
        .retry(policy.clone())
        .layer(numbers())
        .service_fn(|number| {
            calls.fetch_add(1, Relaxed);
            echo(number)
        });
    for number in 1..=4 {
        assert_eq!(service.clone().oneshot(number).await.unwrap(), number);
    }
    // Tokio's sleep may take a millisecond longer, which shortens the next wait.
    let waits: Vec<_> = policy
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|wait| (*wait + Duration::from_millis(5)).as_secs())
        .collect();
    assert_eq!(waits, [10, 10]);
    assert_eq!(calls.load(Relaxed), 4, "a denied attempt is not made");
}

/// Retries once, after any result.
#[derive(Clone)]
struct Twice(bool);

impl Policy<u32, u32, BoxError> for Twice {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut u32, result: &mut Result<u32, BoxError>) -> Option<Ready<()>> {
        (result.is_err() && std::mem::take(&mut self.0)).then(|| ready(()))
    }

    fn clone_request(&mut self, number: &u32) -> Option<u32> {
        Some(*number)
    }
}

#[tokio::test(start_paused = true)]
async fn under_a_retry_each_attempt_is_charged() {
    let service = ServiceBuilder::new()
        .retry(Twice(true))
        .layer(numbers())
        .service_fn(async |_: u32| Err::<u32, _>(std::io::Error::other("broken")));
    assert_eq!(
        service.clone().oneshot(1).await.unwrap_err().to_string(),
        "broken"
    );
    limited(service.oneshot(1).await);
}

#[tokio::test(start_paused = true)]
async fn timeouts_work_outside_and_inside() {
    let (store, mut questions) = manual_store();
    let service = ServiceBuilder::new()
        .timeout(Duration::from_secs(1))
        .layer(layer_with(store, "100/s"))
        .service_fn(print);
    let error = service.oneshot(job("acme")).await.unwrap_err();
    assert!(error.is::<Elapsed>(), "{error}");
    assert!(questions.try_recv().unwrap().is_abandoned());

    let service = ServiceBuilder::new()
        .layer(numbers())
        .timeout(Duration::from_secs(1))
        .service_fn(async |_: u32| std::future::pending::<Result<u32, Infallible>>().await);
    let error = service.oneshot(1).await.unwrap_err();
    assert!(error.is::<Elapsed>(), "{error}");
}

#[tokio::test]
async fn load_shed_works_outside_and_inside() {
    let (store, _questions) = manual_store();
    // Outside: the only place is taken by a call that waits for the store.
    let service = ServiceBuilder::new()
        .load_shed()
        .concurrency_limit(1)
        .layer(layer_with(store, "100/s"))
        .service_fn(print);
    let mut waiting: Pin<Box<_>> = Box::pin(service.clone().oneshot(job("acme")));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert!(
        service
            .clone()
            .oneshot(job("acme"))
            .await
            .unwrap_err()
            .is::<Overloaded>()
    );
    drop(waiting);

    // Inside: a shed call was charged, since it was admitted first.
    let mut service = ServiceBuilder::new()
        .layer(numbers())
        .load_shed()
        .concurrency_limit(1)
        .service_fn(async |_: u32| std::future::pending::<Result<u32, Infallible>>().await);
    let first = service.ready().await.unwrap().call(1);
    assert!(
        service
            .clone()
            .oneshot(2)
            .await
            .unwrap_err()
            .is::<Overloaded>()
    );
    limited(service.oneshot(3).await);
    drop(first);
}

#[tokio::test]
async fn balance_survives_denied_calls() {
    fn balance<S, E>(
        service: S,
    ) -> Balance<impl Discover<Key = usize, Service = PendingRequests<S>, Error = Infallible>, u32>
    where
        S: Service<u32, Error = E> + Clone,
        E: Into<BoxError>,
    {
        let endpoints = [service.clone(), service]
            .map(|each| PendingRequests::new(each, CompleteOnResponse::default()));
        Balance::new(ServiceList::new(endpoints))
    }

    let mut inside = balance(numbers().layer(service_fn(echo)));
    let mut outside = ServiceBuilder::new()
        .layer(numbers())
        .buffer(1)
        .service(balance(service_fn(echo)));
    for number in [1, 2] {
        assert_eq!(
            inside.ready().await.unwrap().call(number).await.unwrap(),
            number
        );
        assert_eq!(
            outside.ready().await.unwrap().call(number).await.unwrap(),
            number
        );
    }
    for number in [3, 4] {
        limited(inside.ready().await.unwrap().call(number).await);
        limited(outside.ready().await.unwrap().call(number).await);
    }
}

#[tokio::test]
async fn nested_limits_differ_by_policy() {
    let service = ServiceBuilder::new()
        .layer(layer("1/h"))
        .layer(layer("9/h"))
        .service_fn(print);
    assert!(service.clone().oneshot(job("acme")).await.is_ok());
    let denied = limited(service.oneshot(job("acme")).await);
    assert_eq!(denied.decision().policy().quota().to_string(), "1/h");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_callers_get_exactly_the_quota() {
    let service = ServiceBuilder::new()
        .layer(layer("100/h"))
        .service_fn(print);
    let calls = (0..250).map(|_| tokio::spawn(service.clone().oneshot(job("acme"))));
    let all = join_all(calls).await;
    assert_eq!(
        all.into_iter()
            .filter(|result| matches!(result, Ok(Ok(_))))
            .count(),
        100
    );
}
