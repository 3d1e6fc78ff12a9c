//! Compile-time checks of the public types.

use std::any::type_name_of_val;
use std::convert::Infallible;
use std::fmt::Debug;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::{Router, routing::get};
use http::request::Parts;
use http::{Request, Response};
use tower::{Layer, Service};
use tower_redis_ratelimit::check::{Check, Decision, DryRun};
use tower_redis_ratelimit::extract::{
    ClientIp, ClientIpBuilder, Global, HeaderKey, KeyExtractor, MissingKey, PeerIp,
};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::observe::Observer;
use tower_redis_ratelimit::rate_limit::{
    RateLimit, ResponseFuture, Settled, SettledFuture, SettledLayer, TrackedBody,
};
use tower_redis_ratelimit::reject::{HttpReject, OnError, OnMissingKey, Reason, Reject, Rejection};
use tower_redis_ratelimit::select::{Live, PolicySelector, Tier, Tiers};
use tower_redis_ratelimit::settle::{RequestCost, Reservation, ReserveError, Settlement};
use tower_redis_ratelimit::store::{
    AnyStore, BoxStore, ErrorKind, RedisStoreBuilder, ShareConfig, Store, StoreConfig, StoreError,
    StoreKind,
};
use tower_redis_ratelimit::{
    CallLimitLayer, ConfigError, Fallback, Key, Limiter, LocalStore, Policies, Policy, Quota,
    RateLimitLayer, RedisStore, Strategy,
};

use crate::mocks::*;

/// A nameable inner service.
#[derive(Debug, Clone)]
struct Hello;

impl<B> Service<Request<B>> for Hello {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        ready(Ok(Response::new("hello".to_owned())))
    }
}

/// A custom service around a limited one, with an unboxed future.
#[derive(Debug, Clone)]
struct Around(RateLimit<Hello, Local, HeaderKey>);

type Local = Fallback<LocalStore, LocalStore>;

impl Service<Request<String>> for Around {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = ResponseFuture<Hello, Local, String>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<String>>::poll_ready(&mut self.0, cx)
    }

    fn call(&mut self, request: Request<String>) -> Self::Future {
        self.0.call(request)
    }
}

#[test]
fn shared_types_are_send_clone_and_debug() {
    fn shared<T: Send + Sync + Clone + Debug + 'static>() {}
    shared::<RateLimitLayer<RedisStore, HeaderKey>>();
    shared::<RateLimitLayer<Fallback<RedisStore, LocalStore>, (PeerIp, HeaderKey), HttpReject>>();
    shared::<RateLimit<Hello, RedisStore, HeaderKey, HttpReject>>();
    shared::<SettledLayer<RedisStore, HeaderKey>>();
    shared::<Settled<Hello, RedisStore, HeaderKey, HttpReject>>();
    shared::<(RequestCost, Settlement, Limiter<RedisStore>, ReserveError)>();
    shared::<(
        LocalStore,
        RedisStore,
        Fallback<RedisStore, LocalStore>,
        AnyStore,
    )>();
    shared::<(StoreConfig, StoreKind, ShareConfig)>();
    shared::<(Decision, Key, Check, Policy, Policies, Quota, Strategy)>();
    shared::<(
        StoreError,
        ErrorKind,
        ConfigError,
        MissingKey,
        Rejection<'static>,
        Reason<'static>,
    )>();
    shared::<(
        ClientIp,
        ClientIpBuilder,
        DryRun,
        Tier,
        Tiers,
        Live<Tiers>,
        Live<Policy>,
        Live<Policies>,
    )>();
    shared::<(
        Global,
        HeaderKey,
        PeerIp,
        HttpReject,
        OnError,
        OnMissingKey,
        Headers,
    )>();
    #[cfg(feature = "tonic")]
    shared::<(
        tower_redis_ratelimit::reject::GrpcReject,
        tower_redis_ratelimit::reject::GrpcOr<HttpReject>,
    )>();
}

#[test]
fn futures_can_be_spawned_and_shown() {
    fn spawnable<T: Send + Debug + 'static>() {}
    spawnable::<ResponseFuture<Hello, LocalStore, String>>();
    spawnable::<ResponseFuture<Hello, RedisStore, axum::body::Body, HttpReject>>();
    spawnable::<ResponseFuture<Hello, Fallback<RedisStore, LocalStore>, String, HttpReject>>();
    spawnable::<SettledFuture<Hello, RedisStore, axum::body::Body, HttpReject>>();
    spawnable::<(Reservation, TrackedBody<axum::body::Body>)>();
    spawnable::<(
        <RedisStore as Store>::Future,
        <Fallback<RedisStore, LocalStore> as Store>::Future,
        <AnyStore as Store>::Future,
        RedisStoreBuilder,
    )>();
}

#[test]
fn errors_are_errors() {
    fn error<T: std::error::Error + Send + Sync + 'static>() {}
    error::<StoreError>();
    error::<ConfigError>();
    error::<MissingKey>();
    error::<ReserveError>();
}

#[tokio::test]
async fn the_response_future_is_nameable() {
    let store = Fallback::new(LocalStore::default(), LocalStore::default());
    let service = Around(layer_with(store, "1/h").layer(Hello));
    assert_eq!(send(&service, request("alice")).await.status(), 200);
    assert_eq!(send(&service, request("alice")).await.status(), 429);
}

/// A custom service around a service that settles.
#[derive(Debug, Clone)]
struct Settling(Settled<Hello, LocalStore, HeaderKey>);

impl Service<Request<String>> for Settling {
    type Response = Response<TrackedBody<String>>;
    type Error = Infallible;
    type Future = SettledFuture<Hello, LocalStore, String>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<String>>::poll_ready(&mut self.0, cx)
    }

    fn call(&mut self, request: Request<String>) -> Self::Future {
        self.0.call(request)
    }
}

#[tokio::test]
async fn settling_types_are_nameable() {
    let store = LocalStore::default();
    let layer = layer_with(store, "1/h").settle(|response| match response.status.as_u16() {
        200 => Settlement::Refund,
        _ => Settlement::Keep,
    });
    let app: Router = Router::new()
        .route("/books", get(|| async { "hello" }))
        .layer(layer.clone());
    let service = Settling(layer.layer(Hello));
    for _ in 0..3 {
        assert_eq!(text(send(&service, request("alice")).await).await, "hello");
        assert_eq!(send(&app, request("alice")).await.status(), 200);
    }
}

#[test]
fn the_inner_service_is_accessible() {
    let mut service = layer("1/h").layer(Some("inner"));
    assert_eq!(service.get_ref(), &Some("inner"));
    assert_eq!(service.get_mut().take(), Some("inner"));
    assert_eq!(service.into_inner(), None);
}

/// An extractor and a rejection that implement neither `Clone` nor `Debug`.
struct Rigid;

impl KeyExtractor for Rigid {
    fn extract(&self, _: &Parts) -> Result<Key, MissingKey> {
        Ok(Key::new("rigid"))
    }
}

impl<B: From<String>> Reject<B> for Rigid {
    fn reject(&self, _: Rejection<'_>) -> Response<B> {
        Response::new(B::from("rigid".to_owned()))
    }
}

#[tokio::test]
async fn layers_are_clone_and_debug_without_bounds() {
    fn shared<T: Clone + Debug>(value: T) -> T {
        value
    }

    let extracting = shared(RateLimitLayer::new(
        LocalStore::default(),
        Rigid,
        gcra("api", "1/h"),
    ));
    let service = shared(extracting.layer(Hello));
    assert_eq!(send(&service, anonymous()).await.status(), 200);
    let app: Router = Router::new()
        .route("/books", get(|| async { "hello" }))
        .layer(extracting.clone());
    assert_eq!(send(&app, anonymous()).await.status(), 429);

    let rejecting = shared(layer("1/h").reject(Rigid));
    assert_eq!(
        send(&rejecting.clone().layer(Hello), request("alice"))
            .await
            .body(),
        "hello"
    );
    assert_eq!(
        send(&rejecting.layer(Hello), request("alice")).await.body(),
        "rigid"
    );
}

/// Checks the names of a layer, its service and its future in `Debug` and in the compiler's messages.
fn check_names<L, Req>(layer: &L, request: Req, names: [&str; 3])
where
    L: Layer<Hello, Service: Service<Req, Future: Debug> + Debug> + Debug,
{
    let mut service = layer.layer(Hello);
    let future = service.call(request);
    let shown = [
        (format!("{layer:?}"), type_name_of_val(layer)),
        (format!("{service:?}"), type_name_of_val(&service)),
        (format!("{future:?}"), type_name_of_val(&future)),
    ];
    for ((debug, path), name) in shown.into_iter().zip(names) {
        assert!(debug.starts_with(&format!("{name} {{")), "{debug}");
        assert!(path.contains(&format!("::{name}<")), "{path}");
        assert!(!path.contains("machine"), "{path}");
    }
}

#[tokio::test]
async fn layers_show_their_public_names() {
    let plain = layer("1/h");
    let names = ["RateLimitLayer", "RateLimit", "ResponseFuture"];
    check_names(&plain, request("alice"), names);
    let names = ["SettledLayer", "Settled", "SettledFuture"];
    check_names(&plain.until_body_end(), request("alice"), names);
    let calls = CallLimitLayer::new(LocalStore::default(), Global, gcra("api", "1/h"));
    let names = ["CallLimitLayer", "CallLimit", "CallFuture"];
    check_names(&calls, request("alice"), names);
}

#[tokio::test]
async fn debug_shows_policies_and_no_secret() {
    let store =
        RedisStore::connect_lazy(format!("redis://user:{SECRET}@127.0.0.1:1/").as_str()).unwrap();
    let store = Fallback::new(store, LocalStore::default());
    let limited = layer_with(store.clone(), "1/h").layer(Hello);
    let future = limited.clone().call(request("alice"));
    let builder = RedisStore::builder(format!("redis://user:{SECRET}@127.0.0.1:1/").as_str());
    let shown = format!(
        "{limited:?} {:?} {future:?} {builder:?}",
        layer_with(store, "1/h")
    );
    assert!(!shown.contains(SECRET), "{shown}");
    assert!(!shown.contains("alice"), "{shown}");
    assert!(shown.contains("Policy(api Gcra 1/h)"), "{shown}");
    let boxed = format!("{:?}", BoxStore::new(LocalStore::default()));
    assert!(
        boxed.starts_with("BoxStore(") && boxed.ends_with("::LocalStore)"),
        "{boxed}"
    );
}

/// Each trait of one method works behind a pointer.
#[tokio::test]
async fn parts_of_a_layer_may_be_chosen_at_run_time() {
    let policy: Policies = Policy::new("api", Strategy::Gcra, "1/h").unwrap().into();
    let not_so_fast = |_: Rejection<'_>| Response::new("not so fast".to_owned());
    let boxed = RateLimitLayer::new(
        BoxStore::new(LocalStore::default()),
        Box::new(Global) as Box<dyn KeyExtractor>,
        Box::new(policy.clone()) as Box<dyn PolicySelector>,
    )
    .observer(Box::new(()) as Box<dyn Observer>)
    .reject(Arc::new(
        Box::new(not_so_fast) as Box<dyn Reject<String> + Send + Sync>
    ));
    let shared = RateLimitLayer::new(
        Arc::new(LocalStore::default()),
        Arc::new(Global) as Arc<dyn KeyExtractor>,
        Arc::new(policy) as Arc<dyn PolicySelector>,
    )
    .observer(Arc::new(()) as Arc<dyn Observer>)
    .reject(Arc::new(not_so_fast) as Arc<dyn Reject<String> + Send + Sync>);
    let (boxed, shared) = (limited(boxed), limited(shared));
    for body in ["hello", "not so fast"] {
        assert_eq!(text(send(&boxed, request("ann")).await).await, body);
        assert_eq!(text(send(&shared, request("ann")).await).await, body);
    }
}
