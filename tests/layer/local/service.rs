//! The tower contract: readiness, which inner service is called, and when.

use std::fmt::Debug;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use http::{Method, Request, Response};
use tokio::time::timeout;
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::load_shed::LoadShed;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Decision, Mode};
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::rate_limit::RateLimit;
use tower_redis_ratelimit::reject::{HttpReject, OnError, OnMissingKey};
use tower_redis_ratelimit::{Key, LocalStore};
use tower_test::mock::{self, Mock, SendResponse, Spawn};

use crate::mocks::*;

/// Panics when a clone is called that was not polled ready.
type Inner = Mock<Request<String>, Response<String>>;
type Handle = mock::Handle<Request<String>, Response<String>>;
type Limited = RateLimit<Inner, ManualStore, HeaderKey, HttpReject>;

/// A limited mock, with the test's handles to its inner service and to its store.
fn mocked() -> (Spawn<Limited>, Handle, Questions) {
    let (store, questions) = manual_store();
    let (service, handle) = mock::spawn_layer(layer_with(store, "100/s"));
    (service, handle, questions)
}

/// Returns the call that the inner service must have received.
fn called(handle: &mut Handle) -> (Request<String>, SendResponse<Response<String>>) {
    handle
        .next_request()
        .now_or_never()
        .expect("the inner service was not called")
        .unwrap()
}

/// Calls the service, which must be ready.
fn call<S: Service<Request<String>, Error: Debug>>(
    service: &mut S,
    request: Request<String>,
) -> S::Future {
    service
        .ready()
        .now_or_never()
        .expect("the service is ready")
        .unwrap()
        .call(request)
}

/// Returns `true` if the mock was never called, and can no longer be called since all its clones
/// are dropped.
fn was_never_called(service: Spawn<Limited>, mut handle: Handle) -> bool {
    drop(service);
    let request = handle
        .next_request()
        .now_or_never()
        .expect("no clone of the inner service is left");
    request.is_none()
}

#[test]
fn readiness_is_that_of_the_inner_service() {
    let (mut service, mut handle, mut questions) = mocked();
    handle.allow(0);
    assert!(service.poll_ready::<Request<String>>().is_pending());
    assert!(!service.is_woken());
    handle.allow(1);
    assert!(
        service.is_woken(),
        "the task must be woken when the inner service gets ready"
    );
    assert!(matches!(
        service.poll_ready::<Request<String>>(),
        Poll::Ready(Ok(()))
    ));
    assert!(
        questions.try_recv().is_err(),
        "readiness is no question to the store"
    );
}

#[test]
fn readiness_reports_a_broken_inner_service() {
    let (mut service, mut handle, _questions) = mocked();
    handle.send_error("broken");
    let Poll::Ready(Err(error)) = service.poll_ready::<Request<String>>() else {
        panic!("the error is kept back")
    };
    assert_eq!(error.to_string(), "broken");
}

#[test]
fn a_request_is_one_check() {
    let (mut service, _handle, mut questions) = mocked();
    let mut response = pin!(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()) && waits(response.as_mut()));
    let check = questions.try_recv().unwrap().check;
    assert_eq!(
        (check.mode(), check.cost(), *check.key()),
        (Mode::Take, 1, Key::new("alice"))
    );
    assert_eq!(check.policies().as_slice(), [gcra("api", "100/s")]);
    assert!(questions.try_recv().is_err(), "one request is one check");
}

#[test]
fn the_inner_call_follows_the_decision() {
    let (mut service, mut handle, mut questions) = mocked();
    let mut response = pin!(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()));
    assert!(
        handle.poll_request().is_pending(),
        "called before the decision"
    );

    questions.try_recv().unwrap().allow();
    assert!(waits(response.as_mut()));
    let (_, answer) = called(&mut handle);
    answer.send_response(Response::new("hello".to_owned()));
    assert_eq!(settled(response).unwrap().body(), "hello");
}

#[tokio::test(start_paused = true)]
async fn store_and_inner_service_wake_the_task() {
    let (mut service, mut handle, mut questions) = mocked();
    // Separate tasks: no other wake-up may poll the response, which is spawned first and so waits
    // first.
    let response = tokio::spawn(call(service.get_mut(), request("alice")));
    tokio::spawn(async move {
        questions.recv().await.unwrap().allow();
        let (_, answer) = handle.next_request().await.unwrap();
        answer.send_response(Response::new("hello".to_owned()));
    });
    let response = timeout(Duration::from_secs(1), response)
        .await
        .expect("a wake-up was lost");
    assert_eq!(response.unwrap().unwrap().body(), "hello");
}

#[test]
fn denied_requests_never_reach_the_inner_service() {
    let (mut service, handle, mut questions) = mocked();
    let mut response = pin!(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()));
    questions.try_recv().unwrap().deny();
    assert_eq!(settled(response).unwrap().status(), 429);
    assert!(was_never_called(service, handle));
}

#[test]
fn undecided_requests_never_reach_the_inner_service() {
    let (mut service, handle, mut questions) = mocked();
    let mut response = pin!(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()));
    questions.try_recv().unwrap().fail();
    assert_eq!(settled(response).unwrap().status(), 503);
    assert!(was_never_called(service, handle));
}

#[test]
fn requests_without_key_reach_nothing() {
    let (mut service, handle, mut questions) = mocked();
    assert_eq!(
        settled(call(service.get_mut(), anonymous()))
            .unwrap()
            .status(),
        400
    );
    assert!(questions.try_recv().is_err(), "no check without a key");
    assert!(was_never_called(service, handle));
}

#[test]
fn cancelled_requests_never_reach_the_inner_service() {
    let (mut service, handle, mut questions) = mocked();
    let mut response = Box::pin(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()));
    let question = questions.try_recv().unwrap();
    assert!(!question.is_abandoned());
    drop(response);
    assert!(
        question.is_abandoned(),
        "the store can see that the check was abandoned"
    );
    assert!(was_never_called(service, handle));
}

#[test]
fn a_slow_decision_delays_no_other_request() {
    let (mut service, mut handle, mut questions) = mocked();
    let mut slow = pin!(call(service.get_mut(), request("slow")));
    let mut quick = pin!(call(service.get_mut(), request("quick")));
    assert!(waits(slow.as_mut()) && waits(quick.as_mut()));
    let (first, second) = (questions.try_recv().unwrap(), questions.try_recv().unwrap());

    for (question, mut response, user) in [(second, quick, "quick"), (first, slow, "slow")] {
        question.allow();
        assert!(waits(response.as_mut()));
        let (request, answer) = called(&mut handle);
        assert_eq!(request.headers()[USER], user);
        answer.send_response(Response::new(user.to_owned()));
        assert_eq!(settled(response).unwrap().body(), user);
    }
}

#[test]
fn the_request_arrives_as_it_was_sent() {
    #[derive(Debug, Clone, PartialEq)]
    struct Session(u32);

    let (mut service, mut handle, mut questions) = mocked();
    let request = Request::builder()
        .method(Method::PUT)
        .uri("/books?page=2")
        .version(http::Version::HTTP_2)
        .header(USER, "alice")
        .extension(Session(7))
        .body("body".to_owned());
    let mut response = pin!(call(service.get_mut(), request.unwrap()));
    assert!(waits(response.as_mut()));
    questions.try_recv().unwrap().allow();
    assert!(waits(response.as_mut()));

    let (request, _answer) = called(&mut handle);
    assert_eq!(
        (request.method(), request.version()),
        (&Method::PUT, http::Version::HTTP_2)
    );
    assert_eq!(request.uri(), "/books?page=2");
    assert_eq!(request.headers().len(), 1);
    assert_eq!(request.body(), "body");
    assert_eq!(request.extensions().get(), Some(&Session(7)));
    assert!(request.extensions().get::<Decision>().is_some());
}

#[test]
fn inner_errors_pass_through_untouched() {
    #[derive(Debug, PartialEq)]
    struct Broken(u32);

    let service = layer("100/s").layer(service_fn(|_: Request<String>| async {
        Err::<Response<String>, _>(Broken(7))
    }));
    assert_eq!(
        settled(service.oneshot(request("alice"))).unwrap_err(),
        Broken(7)
    );
}

#[tokio::test(start_paused = true)]
async fn the_service_polled_ready_is_called() {
    async fn serves<T>(inner: T)
    where
        T: Service<Request<String>, Response = Response<String>, Error: Debug> + Clone,
    {
        let layer = layer("100/s").on_missing_key(OnMissingKey::Allow);
        let mut service = layer.layer(inner);
        // Each of these inner services panics, or fails, if a clone is called that was not polled
        // ready. A request without a key takes another path through the middleware.
        for request in [request("alice"), anonymous(), request("alice"), anonymous()] {
            let response = async { service.ready().await.unwrap().call(request).await.unwrap() };
            let response = timeout(Duration::from_secs(1), response)
                .await
                .expect("a wake-up was lost");
            assert_eq!(response.body(), "hello");
        }
    }

    let hello = service_fn(hello::<String>);
    serves(ConcurrencyLimit::new(hello, 1)).await;
    serves(Buffer::new(hello, 1)).await;
    serves(LoadShed::new(hello)).await;

    let (inner, mut handle) = mock::pair();
    tokio::spawn(async move {
        while let Some((_, answer)) = handle.next_request().await {
            answer.send_response(Response::new("hello".to_owned()));
        }
    });
    serves(inner).await;
}

#[test]
fn an_undecided_request_holds_the_inner_service() {
    let (store, _questions) = manual_store();
    let mut service =
        layer_with(store, "100/s").layer(ConcurrencyLimit::new(service_fn(hello::<String>), 1));
    let mut response = Box::pin(call(&mut service, request("alice")));
    assert!(waits(response.as_mut()));
    assert!(
        service.ready().now_or_never().is_none(),
        "the one place is taken"
    );
    drop(response);
    assert!(
        service.ready().now_or_never().is_some(),
        "the one place is free again"
    );
}

#[tokio::test]
async fn a_rejection_releases_the_inner_service() {
    fn rejects<T>(inner: T)
    where
        T: Service<Request<String>, Response = Response<String>, Error: Debug> + Clone,
    {
        let (store, mut questions) = manual_store();
        let mut service = layer_with(store, "100/s").layer(inner);
        // The place must be freed even if the futures are kept: their owner may keep them for any
        // time.
        let mut rejected = Vec::new();
        for (request, status) in [
            (request("alice"), 429),
            (anonymous(), 400),
            (request("alice"), 503),
        ] {
            let mut response = Box::pin(call(&mut service, request));
            match questions.try_recv() {
                Ok(question) if status == 429 => question.deny(),
                Ok(question) => question.fail(),
                Err(_) => {}
            }
            assert_eq!(settled(response.as_mut()).unwrap().status(), status);
            rejected.push(response);
            assert!(
                service.clone().ready().now_or_never().is_some(),
                "the one place is free again after a {status}"
            );
        }
    }

    let hello = service_fn(hello::<String>);
    rejects(ConcurrencyLimit::new(hello, 1));
    rejects(Buffer::new(hello, 1));
}

#[tokio::test]
async fn an_immediate_rejection_releases_the_inner_service() {
    let inner = ConcurrencyLimit::new(service_fn(hello::<String>), 1);
    let mut service = layer_with(LocalStore::default(), "1/h").layer(inner);
    assert_eq!(
        call(&mut service, request("alice")).await.unwrap().status(),
        200
    );
    for (request, status) in [(request("alice"), 429), (anonymous(), 400)] {
        let response = call(&mut service, request);
        assert!(
            service.clone().ready().now_or_never().is_some(),
            "the one place is free again after a {status}"
        );
        assert_eq!(response.await.unwrap().status(), status);
    }
}

#[test]
fn an_immediate_decision_calls_the_ready_service() {
    let (mut service, mut handle) = mock::spawn_layer(layer_with(LocalStore::default(), "100/s"));
    let mut response = pin!(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()));
    let (request, answer) = called(&mut handle);
    assert!(
        request
            .extensions()
            .get::<Decision>()
            .is_some_and(Decision::is_allowed)
    );
    answer.send_response(Response::new("hello".to_owned()));
    assert_eq!(settled(response).unwrap().body(), "hello");
}

#[test]
fn an_undecided_request_may_pass_once() {
    let (store, mut questions) = manual_store();
    let (mut service, mut handle) =
        mock::spawn_layer(layer_with(store, "100/s").on_error(OnError::Allow));
    let mut response = pin!(call(service.get_mut(), request("alice")));
    assert!(waits(response.as_mut()));
    assert!(handle.poll_request().is_pending());
    questions.try_recv().unwrap().fail();
    assert!(waits(response.as_mut()));
    let (request, answer) = called(&mut handle);
    assert!(request.extensions().get::<Decision>().is_none());
    answer.send_response(Response::new(String::new()));
    assert_eq!(settled(response).unwrap().status(), 200);
    assert!(handle.poll_request().is_pending());
}

#[test]
#[should_panic(expected = "`ResponseFuture` polled after completion")]
fn polling_after_the_response_panics() {
    let mut service = limited(layer("1/h"));
    let mut response = pin!(call(&mut service, anonymous()));
    assert_eq!(settled(response.as_mut()).unwrap().status(), 400);
    let _ = waits(response.as_mut());
}
