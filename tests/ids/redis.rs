//! Ids of requests: a repeated request is charged once, by all instances together.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, Source};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::settle::Settlement;
use tower_redis_ratelimit::store::{Counts, Store};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{
    CallLimitLayer, Fallback, Key, Limiter, LocalStore, Policies, Policy, RateLimitLayer,
    RedisStore, Strategy,
};

use crate::support::{RedisServer, STRATEGIES, is_gradual, policy, until};

const QUOTA: &str = "100/100d";

fn store(server: &RedisServer) -> RedisStore {
    RedisStore::builder(server.url())
        .timeout(Duration::from_secs(60))
        .connect_lazy()
        .unwrap()
}

/// A layer of requests that cost 10, by `Idempotency-Key`.
fn layer<S: Store>(store: S) -> RateLimitLayer<S, Global> {
    RateLimitLayer::new(store, Global, policy(Strategy::Gcra, QUOTA))
        .cost(|_| 10)
        .id(|request| request.headers.get("idempotency-key").map(Key::new))
        .decision_in_response()
}

async fn hello(_: Request<String>) -> Result<Response<String>, Infallible> {
    Ok(Response::new(String::new()))
}

fn request(id: Option<&str>) -> Request<String> {
    let mut request = Request::new(String::new());
    if let Some(id) = id {
        request
            .headers_mut()
            .insert("idempotency-key", id.parse().unwrap());
    }
    request
}

async fn send<S, B>(service: &S, id: Option<&str>) -> Decision
where
    S: Service<Request<String>, Response = Response<B>, Error = Infallible> + Clone,
{
    let response = service.clone().oneshot(request(id)).await.unwrap();
    response.extensions().get::<Decision>().unwrap().clone()
}

/// A retry after the end of the window is charged in the next one. Next to a bucket, the latest end counts: a period from
/// the charge.
#[test]
fn an_id_ends_with_its_window() {
    let window = Policy::new("window", Strategy::FixedWindow(Align::FirstHit), "100/10s").unwrap();
    let bucket = Policy::new("bucket", Strategy::Gcra, "1000/5s").unwrap();
    let both = Policies::new([window.clone(), bucket]).unwrap();
    let mut counts = Counts::default();
    let mut left = |policies: &Policies, seconds: f64, id: Option<&str>| {
        let take = Check::take(Key::GLOBAL, policies, 10);
        let take = match id {
            Some(id) => take.with_id(id),
            None => take,
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds);
        let decision = counts.decide(&take, now, Source::Local);
        decision.each().next().unwrap().remaining()
    };
    let alone = Policies::from(window);
    assert_eq!(left(&alone, 100.0, None), 90);
    assert_eq!(left(&alone, 108.0, Some("late")), 80);
    assert_eq!(left(&alone, 109.999, Some("late")), 80, "repeated");
    assert_eq!(left(&alone, 110.005, Some("late")), 90, "charged");

    assert_eq!(left(&both, 200.0, None), 90);
    assert_eq!(left(&both, 208.0, Some("late")), 80);
    assert_eq!(left(&both, 212.999, Some("late")), 80, "repeated");
    assert_eq!(left(&both, 213.0, Some("late")), 90, "charged");
}

/// A request that is repeated under another quota, as in a rolling deploy or after an upgrade, is charged once.
#[tokio::test]
async fn a_changed_quota_keeps_the_ids() {
    let server = RedisServer::start();
    let (redis, local) = (store(&server), LocalStore::default());
    for strategy in STRATEGIES
        .into_iter()
        .filter(|strategy| is_gradual(*strategy))
    {
        let [lower, higher] =
            ["100/100d", "300/100d burst 200"].map(|quota| policy(strategy, quota));
        let ann = Key::new(strategy.to_string());
        let take = |policies, id| Check::take(ann, policies, 10).with_id(id);
        let left = |policies| Check::peek(ann, policies, 0);
        for (policies, id, remaining) in [
            (&lower, "one", [90, 190]),
            (&higher, "one", [90, 190]),
            (&higher, "two", [80, 180]),
            (&lower, "two", [80, 180]),
            (&lower, "one", [80, 180]),
        ] {
            for decision in [
                redis.check(take(policies, id)).await.unwrap(),
                local.check(take(policies, id)).await.unwrap(),
            ] {
                assert_eq!(
                    decision.granted(),
                    10,
                    "{strategy}: {id} under {policies:?}"
                );
            }
            for (policies, remaining) in [&lower, &higher].into_iter().zip(remaining) {
                for peek in [
                    redis.check(left(policies)).await.unwrap(),
                    local.check(left(policies)).await.unwrap(),
                ] {
                    assert_eq!(
                        peek.remaining(),
                        remaining,
                        "{strategy}: {id} of {policies:?}"
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn a_repeated_request_is_charged_once() {
    let server = RedisServer::start();
    let [here, there] = [(); 2].map(|()| layer(store(&server)).layer(service_fn(hello)));
    assert_eq!(send(&here, Some("one")).await.remaining(), 90);
    for service in [&there, &here, &there] {
        let again = send(service, Some("one")).await;
        assert!(again.is_allowed());
        assert_eq!((again.granted(), again.remaining()), (10, 90));
    }
    assert_eq!(send(&there, Some("two")).await.remaining(), 80);
    assert_eq!(send(&here, None).await.remaining(), 70);
    assert_eq!(send(&here, None).await.remaining(), 60);
}

#[tokio::test]
async fn a_denied_request_may_be_repeated() {
    let server = RedisServer::start();
    let [here, there] = [(); 2].map(|()| layer(store(&server)).layer(service_fn(hello)));
    let limiter = Limiter::new(store(&server), policy(Strategy::Gcra, QUOTA));
    limiter.charge(Key::GLOBAL, 95).await.unwrap();
    assert!(!send(&here, Some("one")).await.is_allowed());
    assert!(!send(&there, Some("one")).await.is_allowed());
    limiter.refund(Key::GLOBAL, 95).await.unwrap();
    for service in [&there, &here] {
        assert_eq!(send(service, Some("one")).await.remaining(), 90);
    }
}

/// The layer of a call, and a limiter in another instance.
#[tokio::test]
async fn calls_and_limiters_share_ids() {
    let server = RedisServer::start();
    let by_tenant = |_: &u32| Some(Key::new("acme"));
    let layer = CallLimitLayer::new(store(&server), by_tenant, policy(Strategy::Gcra, QUOTA))
        .cost(|_| 10)
        .id(|message: &u32| Some(Key::new(message.to_be_bytes())));
    let service = layer.layer(service_fn(|_: u32| async { Ok::<_, Infallible>(()) }));
    let limiter = Limiter::new(store(&server), policy(Strategy::Gcra, QUOTA));
    let acme = Key::new("acme");
    for (message, left) in [(7_u32, 90), (8, 80), (7, 80), (8, 80)] {
        service.clone().oneshot(message).await.unwrap();
        assert_eq!(
            limiter.peek(acme, 1).await.unwrap().remaining(),
            left,
            "{message}"
        );
    }
    let take = |message: u32| limiter.take_with_id(acme, 10, message.to_be_bytes());
    assert_eq!(take(8).await.unwrap().granted(), 10);
    assert_eq!(take(9).await.unwrap().remaining(), 70);
    service.clone().oneshot(9).await.unwrap();
    assert_eq!(limiter.peek(acme, 1).await.unwrap().remaining(), 70);
}

/// A repeated reply would let a request pass without a slot.
#[tokio::test]
async fn no_id_exceeds_requests_in_flight() {
    async fn at_most_two<S: Store>(store: S) {
        let rate = policy(Strategy::Gcra, QUOTA)[0].clone();
        let policies = Policies::new([rate, Policy::in_flight("uploads", 2).unwrap()]).unwrap();
        let limiter = Limiter::new(store.clone(), policies.clone());
        let layer = RateLimitLayer::new(store, Global, policies)
            .id(|request| request.headers.get("idempotency-key").map(Key::new))
            .until_body_end();
        let service = layer.layer(service_fn(hello));
        // The responses hold their slots.
        let mut responses = vec![];
        for _ in 0..5 {
            responses.push(
                service
                    .clone()
                    .oneshot(request(Some("same")))
                    .await
                    .unwrap(),
            );
        }
        let codes = responses.iter().map(|response| response.status().as_u16());
        assert_eq!(codes.collect::<Vec<_>>(), [200, 200, 429, 429, 429]);
        let take = |id| limiter.take_with_id(Key::GLOBAL, 1, id);
        assert!(!take("same").await.unwrap().is_allowed());
        responses.clear();
        until("the slots are released", async || {
            take("other").await.unwrap().is_allowed()
        })
        .await;
    }
    let server = RedisServer::start();
    at_most_two(LocalStore::default()).await;
    at_most_two(store(&server)).await;
}

/// All retries get the first one's reservation: only one of them may refund the rest.
#[tokio::test]
async fn concurrent_retries_settle_once() {
    let server = RedisServer::start();
    let layers = [(); 2].map(|()| layer(store(&server)).settle(|_| Settlement::Cost(3)));
    let services = layers.map(|layer| layer.layer(service_fn(hello)));
    let limiter = Limiter::new(store(&server), policy(Strategy::Gcra, QUOTA));
    limiter.charge(Key::GLOBAL, 50).await.unwrap();
    let retries = services
        .iter()
        .flat_map(|service| (0..20).map(move |_| send(service, Some("one"))));
    let decisions = join_all(retries).await;
    let mut seen = decisions
        .iter()
        .map(|decision| (decision.granted(), decision.remaining()))
        .collect::<Vec<_>>();
    seen.sort_unstable();
    assert_eq!(seen[0], (3, 47));
    assert_eq!(seen[1..], [(10, 40); 39]);
    until("it costs 3", async || {
        limiter.peek(Key::GLOBAL, 1).await.unwrap().remaining() == 47
    })
    .await;
    assert_eq!(send(&services[0], Some("two")).await.remaining(), 44);
}

/// Ids are not carried across an outage: Redis charges an id once, and so does each instance.
#[tokio::test]
async fn an_outage_charges_an_id_once_more() {
    let mut server = RedisServer::start();
    let [here, there] = [(); 2].map(|()| {
        let fallback = Fallback::builder(store(&server), LocalStore::default())
            .deadline(Duration::from_secs(20))
            .unwrap()
            .build();
        layer(fallback).layer(service_fn(hello))
    });
    for (service, id, left) in [(&here, "one", 90), (&there, "two", 80)] {
        let first = send(service, Some(id)).await;
        assert_eq!((first.source(), first.remaining()), (Source::Redis, left));
    }
    server.kill();
    // Each instance continues from the last count that it has seen.
    for (service, left) in [(&here, 80), (&there, 70)] {
        for _ in 0..3 {
            let local = send(service, Some("one")).await;
            assert_eq!((local.source(), local.remaining()), (Source::Local, left));
        }
    }
}
