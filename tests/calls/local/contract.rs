//! The tower contract: readiness, which inner service is called, and when.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::timeout;
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::load_shed::LoadShed;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::call_limit::CallLimit;
use tower_redis_ratelimit::check::{Mode, RateLimited};
use tower_redis_ratelimit::extract::MissingKey;
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::store::StoreError;
use tower_redis_ratelimit::{Key, LocalStore};
use tower_test::mock::{self, Mock, SendResponse, Spawn};

use super::{ByTenant, Job, job, layer, layer_with, limited, print};
use crate::mocks::{ManualStore, Questions, gcra, manual_store, settled, waits};

/// Panics when a clone is called that was not polled ready.
type Handle = mock::Handle<Job, String>;
type Limited = CallLimit<Mock<Job, String>, ManualStore, ByTenant, Job>;

/// A limited mock, with the test's handles to its inner service and to its store.
fn mocked() -> (Spawn<Limited>, Handle, Questions) {
    let (store, questions) = manual_store();
    let (service, handle) = mock::spawn_layer(layer_with(store, "100/s"));
    (service, handle, questions)
}

/// Returns the call that the inner service must have received.
fn called(handle: &mut Handle) -> (Job, SendResponse<String>) {
    handle
        .next_request()
        .now_or_never()
        .expect("the inner service was not called")
        .unwrap()
}

/// Calls the service, which must be ready.
fn call<S: Service<Job, Error = BoxError>>(service: &mut S, job: Job) -> S::Future {
    service
        .ready()
        .now_or_never()
        .expect("the service is ready")
        .unwrap()
        .call(job)
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
    assert!(service.poll_ready::<Job>().is_pending());
    handle.allow(1);
    assert!(
        service.is_woken(),
        "the task must be woken when the inner service gets ready"
    );
    assert!(matches!(service.poll_ready::<Job>(), Poll::Ready(Ok(()))));
    assert!(
        questions.try_recv().is_err(),
        "readiness is no question to the store"
    );
    handle.send_error("broken");
    let Poll::Ready(Err(error)) = service.poll_ready::<Job>() else {
        panic!("the error is kept back")
    };
    assert_eq!(error.to_string(), "broken");
}

#[test]
fn the_inner_call_follows_the_decision() {
    let (mut service, mut handle, mut questions) = mocked();
    let mut response = pin!(call(service.get_mut(), job("acme")));
    assert!(waits(response.as_mut()) && waits(response.as_mut()));
    assert!(
        handle.poll_request().is_pending(),
        "called before the decision"
    );

    let question = questions.try_recv().unwrap();
    assert!(questions.try_recv().is_err(), "one request is one check");
    let check = &question.check;
    assert_eq!(
        (check.mode(), check.cost(), *check.key()),
        (Mode::Take, 1, Key::new("acme"))
    );
    assert_eq!(check.policies().as_slice(), [gcra("jobs", "100/s")]);
    question.allow();
    assert!(waits(response.as_mut()));
    let (job, answer) = called(&mut handle);
    assert_eq!(job.tenant, "acme");
    answer.send_response("printed".to_owned());
    assert_eq!(settled(response).unwrap(), "printed");
}

#[test]
fn an_immediate_decision_calls_the_ready_service() {
    let (mut service, mut handle) = mock::spawn_layer(layer_with(LocalStore::default(), "100/s"));
    let mut response = pin!(call(service.get_mut(), job("acme")));
    assert!(waits(response.as_mut()));
    called(&mut handle).1.send_response("printed".to_owned());
    assert_eq!(settled(response).unwrap(), "printed");
}

#[tokio::test(start_paused = true)]
async fn store_and_inner_service_wake_the_task() {
    let (mut service, mut handle, mut questions) = mocked();
    // Separate tasks: no other wake-up may poll the response, which is spawned first and so waits
    // first.
    let response = tokio::spawn(call(service.get_mut(), job("acme")));
    tokio::spawn(async move {
        questions.recv().await.unwrap().allow();
        handle
            .next_request()
            .await
            .unwrap()
            .1
            .send_response("printed".to_owned());
    });
    let response = timeout(Duration::from_secs(1), response)
        .await
        .expect("a wake-up was lost");
    assert_eq!(response.unwrap().unwrap(), "printed");
}

#[test]
fn denied_or_undecided_calls_are_not_made() {
    let (mut service, handle, mut questions) = mocked();
    let mut denied = pin!(call(service.get_mut(), job("acme")));
    assert!(waits(denied.as_mut()));
    questions.try_recv().unwrap().deny();
    limited(settled(denied));

    let mut undecided = pin!(call(service.get_mut(), job("acme")));
    assert!(waits(undecided.as_mut()));
    questions.try_recv().unwrap().fail();
    assert!(settled(undecided).unwrap_err().is::<StoreError>());

    assert!(
        settled(call(service.get_mut(), job("")))
            .unwrap_err()
            .is::<MissingKey>()
    );
    assert!(questions.try_recv().is_err(), "no check without a key");
    assert!(was_never_called(service, handle));
}

#[test]
fn a_cancelled_undecided_request_is_withdrawn() {
    let (mut service, handle, mut questions) = mocked();
    let mut response = Box::pin(call(service.get_mut(), job("acme")));
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
fn an_undecided_request_may_pass_once() {
    let (store, mut questions) = manual_store();
    let (mut service, mut handle) =
        mock::spawn_layer(layer_with(store, "100/s").on_error(OnError::Allow));
    let mut response = pin!(call(service.get_mut(), job("acme")));
    assert!(waits(response.as_mut()));
    assert!(handle.poll_request().is_pending());
    questions.try_recv().unwrap().fail();
    assert!(waits(response.as_mut()));
    called(&mut handle).1.send_response(String::new());
    assert!(settled(response).is_ok());
    assert!(handle.poll_request().is_pending());
}

#[test]
fn inner_errors_are_boxed_once() {
    #[derive(Debug, PartialEq)]
    struct Broken(u32);
    impl std::fmt::Display for Broken {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("broken")
        }
    }
    impl std::error::Error for Broken {}

    let broken = layer("100/s").layer(service_fn(async |_: Job| Err::<String, _>(Broken(7))));
    assert_eq!(
        settled(broken.clone().oneshot(job("acme")))
            .unwrap_err()
            .downcast_ref(),
        Some(&Broken(7))
    );
    // Also through a layer of tower that boxes errors itself.
    let twice = layer("100/s").layer(LoadShed::new(broken));
    assert_eq!(
        settled(twice.oneshot(job("acme")))
            .unwrap_err()
            .downcast_ref(),
        Some(&Broken(7))
    );
}

#[tokio::test(start_paused = true)]
async fn the_service_polled_ready_is_called() {
    async fn serves<T>(inner: T)
    where
        T: Service<Job, Response = String, Error: Into<BoxError>> + Clone,
    {
        let layer = layer("100/s").on_missing_key(OnMissingKey::Allow);
        let mut service = layer.layer(inner);
        // Each of these inner services panics, or fails, if a clone is called that was not polled
        // ready. A request without a key takes another path through the middleware.
        for job in [job("acme"), job(""), job("acme"), job("")] {
            let response = async { service.ready().await.unwrap().call(job).await.unwrap() };
            timeout(Duration::from_secs(1), response)
                .await
                .expect("a wake-up was lost");
        }
    }

    serves(ConcurrencyLimit::new(service_fn(print), 1)).await;
    serves(Buffer::new(service_fn(print), 1)).await;
    serves(LoadShed::new(service_fn(print))).await;
}

#[test]
fn an_undecided_request_holds_the_inner_service() {
    let (store, _questions) = manual_store();
    let mut service = layer_with(store, "100/s").layer(ConcurrencyLimit::new(service_fn(print), 1));
    let mut response = Box::pin(call(&mut service, job("acme")));
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
async fn a_failed_call_releases_the_inner_service() {
    fn fails<T>(inner: T)
    where
        T: Service<Job, Response = String, Error: Into<BoxError>> + Clone,
    {
        let (store, mut questions) = manual_store();
        let mut service = layer_with(store, "100/s").layer(inner);
        // The place must be freed even if the futures are kept: their owner may keep them for any
        // time.
        let mut failed = Vec::new();
        for (tenant, denied) in [("acme", true), ("", false), ("acme", false)] {
            let mut response = Box::pin(call(&mut service, job(tenant)));
            match questions.try_recv() {
                Ok(question) if denied => question.deny(),
                Ok(question) => question.fail(),
                Err(_) => {}
            }
            assert_eq!(
                settled(response.as_mut()).unwrap_err().is::<RateLimited>(),
                denied
            );
            failed.push(response);
            assert!(
                service.clone().ready().now_or_never().is_some(),
                "the one place is free again"
            );
        }
    }

    fails(ConcurrencyLimit::new(service_fn(print), 1));
    fails(Buffer::new(service_fn(print), 1));
}

#[test]
fn an_immediate_failure_releases_the_inner_service() {
    let mut service = layer("1/h").layer(ConcurrencyLimit::new(service_fn(print), 1));
    assert!(settled(call(&mut service, job("acme"))).is_ok());
    for tenant in ["acme", ""] {
        let response = call(&mut service, job(tenant));
        assert!(
            service.clone().ready().now_or_never().is_some(),
            "the one place is free again"
        );
        assert!(settled(response).is_err());
    }
}

#[test]
#[should_panic(expected = "`CallFuture` polled after completion")]
fn polling_after_an_error_panics() {
    let mut service = layer("1/h").layer(service_fn(print));
    let mut response = pin!(call(&mut service, job("")));
    assert!(settled(response.as_mut()).is_err());
    let _ = waits(response.as_mut());
}
