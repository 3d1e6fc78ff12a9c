//! `cargo bench -p benches --bench select`
//!
//! The cost of finding a request's policies: whole requests through a layer with a `LocalStore`,
//! under fixed policies and under each selector; and the selectors alone.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark fails by panicking"
)]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::task::{Context, Poll};
use std::time::Duration;

use criterion::{BatchSize, Criterion};
use futures_util::FutureExt;
use http::request::Parts;
use http::{Request, Response};
use tower::{Layer, Service};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::select::{Live, PolicySelector, Routes, Tier, Tiers, policies_fn};
use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy};

#[derive(Clone)]
struct Hello;

impl Service<Request<()>> for Hello {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let _ = black_box(request);
        ready(Ok(Response::new(String::new())))
    }
}

fn policy(name: &str) -> Policy {
    Policy::new(name, Strategy::Gcra, Quota::per_second(u32::MAX)).unwrap()
}

fn request() -> Request<()> {
    let mut request = Request::builder().uri("/users/42/orders").body(()).unwrap();
    request.extensions_mut().insert(Tier::new("pro"));
    request
}

fn tiers() -> Tiers {
    Tiers::new(policy("free"))
        .tier("pro", policy("pro"))
        .tier("team", policy("team"))
        .exempt("internal")
}

fn routes() -> Routes {
    (0..20).fold(Routes::new(policy("api")), |routes, i| {
        routes
            .route(&format!("/users/{{id}}/part-{i}"), policy("part"))
            .unwrap()
    })
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(100)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();

    let mut group = criterion.benchmark_group("request");
    let mut run = |name: &str, layer: RateLimitLayer<LocalStore, Global>| {
        let mut service = layer.layer(Hello);
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                request,
                |request| service.call(request).now_or_never().unwrap().unwrap(),
                BatchSize::SmallInput,
            )
        });
    };
    fn layer(policies: impl PolicySelector) -> RateLimitLayer<LocalStore, Global> {
        RateLimitLayer::new(LocalStore::default(), Global, policies)
    }
    let always = Policies::from(policy("api"));
    run("fixed", layer(policy("api")));
    run("closure", layer(policies_fn(move |_| always.clone())));
    run("tiers", layer(tiers()));
    run("routes", layer(routes()));
    run("live", layer(Live::new(policy("api"))));
    group.finish();

    // A million callers, each with its own policies, in random order.
    const CALLERS: u32 = 1_000_000;
    let key = |i: u32| Key::new(format!("tenant-{i}"));
    let own: Vec<Policies> = (0..1_000)
        .map(|i| policy(&format!("own-{i}")).into())
        .collect();
    let tiers =
        tiers().callers((0..CALLERS).map(|i| (key(i), own[i as usize % own.len()].clone())));
    let (parts, ()) = request().into_parts();
    let mut rng = fastrand::Rng::with_seed(1);
    let keys: Vec<Key> = (0..CALLERS).map(|_| key(rng.u32(..CALLERS))).collect();
    let mut group = criterion.benchmark_group("1,000,000 overrides");
    let mut next = keys.iter().cycle();
    group.bench_function("any caller", |bencher| {
        bencher.iter(|| find(&tiers, &parts, next.next().unwrap()))
    });
    let mut next = keys[..1_000].iter().cycle();
    group.bench_function("one of 1,000 callers", |bencher| {
        bencher.iter(|| find(&tiers, &parts, next.next().unwrap()))
    });
    group.finish();
    criterion.final_summary();
}

fn find(tiers: &Tiers, parts: &Parts, key: &Key) -> Policies {
    tiers.policies(parts, Some(key)).unwrap()
}
