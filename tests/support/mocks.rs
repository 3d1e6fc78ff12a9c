//! Shared by the tests: layers, requests, an inner service, and stores whose replies the test
//! controls.

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::Pending;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::HttpBody;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::request::Parts;
use http::{HeaderName, Request, Response};
use http_body_util::BodyExt;
use proptest::prelude::ProptestConfig;
use proptest::test_runner::FileFailurePersistence;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::Reject;
use tower_redis_ratelimit::store::{Answer, ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{Limiter, LocalStore, Policy, RateLimitLayer, Strategy};

/// The header that requests are counted by.
pub(crate) const USER: HeaderName = HeaderName::from_static("x-user");

pub(crate) fn gcra(name: &str, quota: &str) -> Policy {
    Policy::new(name, Strategy::Gcra, quota).unwrap()
}

/// Counts by user in this process, under one policy with the name `api`.
pub(crate) fn layer(quota: &str) -> RateLimitLayer<LocalStore, HeaderKey> {
    layer_with(LocalStore::default(), quota)
}

/// This layer over another store.
pub(crate) fn layer_with<S: Store>(store: S, quota: &str) -> RateLimitLayer<S, HeaderKey> {
    RateLimitLayer::new(
        store,
        HeaderKey::new(USER).unwrap().readable(),
        gcra("api", quota),
    )
    .decision_in_response()
}

pub(crate) fn request(user: &str) -> Request<String> {
    Request::builder()
        .uri("/books")
        .header(USER, user)
        .body(String::new())
        .unwrap()
}

/// A request that states its cost, for [`by_header`].
pub(crate) fn costing(cost: u32) -> Request<String> {
    let mut request = request("alice");
    request.headers_mut().insert("x-cost", cost.into());
    request
}

pub(crate) fn by_header(request: &Parts) -> u32 {
    request.headers["x-cost"].to_str().unwrap().parse().unwrap()
}

/// A request without a key.
pub(crate) fn anonymous() -> Request<String> {
    Request::builder()
        .uri("/books")
        .body(String::new())
        .unwrap()
}

/// The decision in the extensions of a request to [`hello`], which copies it to the response.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen(pub(crate) Option<Decision>);

/// The inner service of most tests.
pub(crate) async fn hello<B: From<String>>(
    request: Request<String>,
) -> Result<Response<B>, Infallible> {
    let mut response = Response::new(B::from("hello".to_owned()));
    response
        .extensions_mut()
        .insert(Seen(request.extensions().get().cloned()));
    Ok(response)
}

/// [`hello`] behind a layer.
pub(crate) fn limited<S, K, R>(
    layer: RateLimitLayer<S, K, R>,
) -> impl Service<Request<String>, Response = Response<String>, Error = Infallible> + Clone
where
    S: Store,
    K: KeyExtractor,
    R: Reject<String>,
{
    layer.layer(service_fn(hello::<String>))
}

pub(crate) async fn send<S, A, B>(service: &S, request: Request<A>) -> Response<B>
where
    S: Service<Request<A>, Response = Response<B>, Error: Debug> + Clone,
{
    // A lost wake-up must fail the test instead of blocking it.
    timeout(Duration::from_secs(20), service.clone().oneshot(request))
        .await
        .expect("an answer")
        .unwrap()
}

/// Polls once. Returns `true` if the future is pending.
pub(crate) fn waits<F: Future>(future: Pin<&mut F>) -> bool {
    future.now_or_never().is_none()
}

/// Returns the output of a future that must be ready.
pub(crate) fn settled<F: Future>(future: F) -> F::Output {
    future.now_or_never().expect("a ready future")
}

/// A header field of a response as text.
pub(crate) fn field<'a, B>(response: &'a Response<B>, name: &str) -> Option<&'a str> {
    response
        .headers()
        .get(name)
        .map(|value| value.to_str().unwrap())
}

pub(crate) fn decision<B>(response: &Response<B>) -> Option<&Decision> {
    response.extensions().get()
}

pub(crate) async fn text<B: HttpBody<Error: Debug>>(response: Response<B>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) async fn json<B: HttpBody<Error: Debug>>(response: Response<B>) -> serde_json::Value {
    serde_json::from_str(&text(response).await).unwrap()
}

/// A [`Limiter`] over a new local store.
pub(crate) fn limiter(strategy: Strategy, quota: &str) -> Limiter<LocalStore> {
    Limiter::new(
        LocalStore::default(),
        crate::support::policy(strategy, quota),
    )
}

/// A local store, and a mock in front of it that records the checks.
pub(crate) fn watched() -> (LocalStore, MockStore) {
    let (local, store) = (LocalStore::default(), MockStore::new());
    let asked = local.clone();
    store.answer(move |check| {
        asked
            .check(check.clone())
            .now_or_never()
            .expect("it never waits")
    });
    (local, store)
}

/// Runs this number of cases. The seeds of failures are written next to the test, and run first.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("seeds"))),
        ..ProptestConfig::default()
    }
}

/// A text in a store's error that clients must never see.
pub(crate) const SECRET: &str = "hunter2";

/// An error whose text contains [`SECRET`].
pub(crate) fn error() -> StoreError {
    StoreError::with_source(ErrorKind::Configuration, io::Error::other(SECRET))
}

/// A store that cannot decide.
#[derive(Debug, Clone)]
pub(crate) struct Broken;

impl Store for Broken {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::ready(Err(error()))
    }
}

/// A store whose checks the test decides, at any time.
#[derive(Debug, Clone)]
pub(crate) struct ManualStore(mpsc::UnboundedSender<Question>);

pub(crate) type Questions = mpsc::UnboundedReceiver<Question>;

#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) check: Check,
    answer: oneshot::Sender<Result<Decision, StoreError>>,
}

pub(crate) fn manual_store() -> (ManualStore, Questions) {
    let (sender, questions) = mpsc::unbounded_channel();
    (ManualStore(sender), questions)
}

impl Store for ManualStore {
    type Future = BoxFuture<'static, Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let (answer, receiver) = oneshot::channel();
        self.0.send(Question { check, answer }).unwrap();
        Answer::pending(Box::pin(async {
            receiver
                .await
                .expect("the test answers, or drops the response first")
        }))
    }
}

impl Question {
    pub(crate) fn allow(self) {
        let decision = LocalStore::default()
            .check(self.check)
            .now_or_never()
            .unwrap();
        self.answer.send(decision).unwrap();
    }

    pub(crate) fn deny(self) {
        let store = LocalStore::default();
        let all = Check::charge(*self.check.key(), self.check.policies(), u32::MAX);
        let _ = store.check(all).now_or_never().unwrap().unwrap();
        self.answer
            .send(store.check(self.check).now_or_never().unwrap())
            .unwrap();
    }

    pub(crate) fn fail(self) {
        self.answer.send(Err(error())).unwrap();
    }

    /// Returns `true` if the check was abandoned.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }
}

/// Records reports of misconfigurations.
#[derive(Clone, Default)]
pub(crate) struct Problems(pub(crate) Arc<Mutex<Vec<String>>>);

impl Observer for Problems {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Misconfigured { problem, .. } => {
                self.0.lock().unwrap().push(problem.to_owned());
            }
            Event::Suspected { problem, .. } => {
                self.0.lock().unwrap().push(format!("suspected: {problem}"));
            }
            _ => {}
        }
    }
}
