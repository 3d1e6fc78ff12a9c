//! Calls that are settled by their result, and policies that are not enforced.

use std::future::pending;

use tower::limit::ConcurrencyLimit;
use tower_redis_ratelimit::Limiter;
use tower_redis_ratelimit::check::Mode;
use tower_redis_ratelimit::settle::Settlement;

use super::*;
use crate::mocks::manual_store;

/// Returns the remaining units of a limit of ten per hour.
fn remaining(store: &LocalStore) -> u32 {
    let limiter = Limiter::new(store.clone(), gcra("jobs", "10/h"));
    limiter
        .peek(Key::new("acme"), 0)
        .now_or_never()
        .expect("an immediate answer")
        .unwrap()
        .remaining()
}

/// A service that settles by its result: a text's first digit is the cost, and an error keeps the
/// reservation.
fn settling(
    store: &LocalStore,
) -> CallLimitLayer<LocalStore, ByTenant, Job, Result<String, BoxError>> {
    layer_with(store.clone(), "10/h").cost(|_| 4).settle(
        |answer: &Result<String, _>| match answer {
            Ok(printed) if printed.starts_with('0') => Settlement::Refund,
            Ok(printed) => Settlement::Cost(printed[..1].parse().unwrap()),
            Err(_) => Settlement::Keep,
        },
    )
}

#[tokio::test(start_paused = true)]
async fn a_call_costs_what_its_answer_says() {
    let store = LocalStore::default();
    let service = settling(&store).layer(service_fn(print));
    for (pages, left) in [(0, 10), (1, 9), (7, 2)] {
        printed(
            &service,
            Job {
                tenant: "acme",
                pages,
            },
        )
        .unwrap();
        assert_eq!(remaining(&store), left);
    }
    limited(printed(&service, job("acme")));
    assert_eq!(remaining(&store), 2, "what is denied is not settled");
}

#[tokio::test(start_paused = true)]
async fn failed_calls_are_settled() {
    let store = LocalStore::default();
    let failing = settling(&store).layer(service_fn(async |_: Job| {
        Err::<String, BoxError>("no paper".into())
    }));
    assert_eq!(
        printed(&failing, job("acme")).unwrap_err().to_string(),
        "no paper"
    );
    assert_eq!(remaining(&store), 6);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_keeps_what_it_reserved() {
    let store = LocalStore::default();
    let service = settling(&store).layer(service_fn(async |_: Job| {
        pending::<Result<String, Infallible>>().await
    }));
    assert!(service.oneshot(job("acme")).now_or_never().is_none());
    assert_eq!(remaining(&store), 6);
}

#[tokio::test(start_paused = true)]
async fn uncharged_calls_are_not_settled() {
    for (settlement, left) in [
        (Settlement::AtEnd, 6),
        (
            Settlement::Bytes {
                per: 1.try_into().unwrap(),
            },
            10,
        ),
    ] {
        let store = LocalStore::default();
        let layer = layer_with(store.clone(), "10/h")
            .cost(|_| 4)
            .settle(move |_: &Result<String, _>| settlement);
        printed(&layer.layer(service_fn(print)), job("acme")).unwrap();
        assert_eq!(remaining(&store), left, "{settlement:?}");
    }
}

/// Records decisions: whether it was a dry run, the policy, and whether the call was allowed.
#[derive(Clone, Default)]
struct Tried(Arc<Mutex<Vec<(bool, String, bool)>>>);

impl Observer for Tried {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Decided {
            key,
            decision,
            dry_run,
            ..
        } = *event
        {
            assert_eq!(key.reveal(), "acme");
            let name = decision.policy().name().to_owned();
            self.0
                .lock()
                .unwrap()
                .push((dry_run, name, decision.is_allowed()));
        }
    }
}

impl Tried {
    fn take(&self) -> Vec<(bool, String, bool)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_of_calls_rejects_nothing() {
    let tried = Tried::default();
    let service = layer("1/h")
        .dry_run()
        .observer(tried.clone())
        .layer(service_fn(print));
    for allowed in [true, false] {
        printed(&service, job("acme")).unwrap();
        assert_eq!(tried.take(), [(true, "jobs".to_owned(), allowed)]);
    }
    printed(&service, job("")).unwrap();
    assert!(tried.take().is_empty(), "no check without a key");
}

#[tokio::test(start_paused = true)]
async fn calls_take_enforced_and_shadow_policies() {
    let tried = Tried::default();
    let service = layer("2/h")
        .shadow(gcra("new", "1/h"))
        .observer(tried.clone())
        .layer(service_fn(print));
    for new in [true, false] {
        printed(&service, job("acme")).unwrap();
        assert_eq!(
            tried.take(),
            [
                (false, "jobs".to_owned(), true),
                (true, "new".to_owned(), new)
            ]
        );
    }
    limited(printed(&service, job("acme")));
    assert_eq!(
        tried.take(),
        [(false, "jobs".to_owned(), false)],
        "what is denied is not tried"
    );
}

#[tokio::test(start_paused = true)]
async fn dry_run_charges_are_settled() {
    let store = LocalStore::default();
    let service = settling(&store).dry_run().layer(service_fn(print));
    printed(
        &service,
        Job {
            tenant: "acme",
            pages: 3,
        },
    )
    .unwrap();
    assert_eq!(remaining(&store), 7);
}

/// A finished call keeps no resource that others wait for, even if its result waits for a check.
#[tokio::test]
async fn a_late_check_keeps_only_the_answer() {
    let (store, mut questions) = manual_store();
    let tried = Tried::default();
    let layer = layer_with(store, "1/h").dry_run().observer(tried.clone());
    let mut service = layer.layer(ConcurrencyLimit::new(service_fn(print), 1));
    let mut answer = Box::pin(service.ready().await.unwrap().call(job("acme")));
    assert!(
        answer.as_mut().now_or_never().is_none(),
        "the check is not answered"
    );
    assert!(
        service.ready().now_or_never().is_some(),
        "a call that is done holds its permit"
    );
    questions.try_recv().unwrap().deny();
    assert_eq!(answer.now_or_never().unwrap().unwrap(), "1 for acme");
    assert_eq!(tried.take(), [(true, "jobs".to_owned(), false)]);
}

/// Its slot is released too.
#[tokio::test]
async fn a_late_check_keeps_no_call_in_flight() {
    let (store, mut questions) = manual_store();
    let uploads = Policy::in_flight("uploads", 1).unwrap();
    let layer =
        CallLimitLayer::new(store, by_tenant as ByTenant, uploads).shadow(gcra("new", "1/h"));
    let mut answer = Box::pin(layer.layer(service_fn(print)).oneshot(job("acme")));
    assert!(answer.as_mut().now_or_never().is_none());
    questions.recv().await.unwrap().allow();
    assert!(
        answer.as_mut().now_or_never().is_none(),
        "the shadow is not answered"
    );
    let shadow = questions.recv().await.unwrap();
    let released = questions.recv().await.unwrap();
    assert_eq!(
        (released.check.policies()[0].name(), released.check.mode()),
        ("uploads", Mode::Release)
    );
    shadow.deny();
    assert_eq!(answer.now_or_never().unwrap().unwrap(), "1 for acme");
}
