//! Policies that are not enforced: dry runs, and shadows in addition to enforced policies.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use http::{Request, Response};
use tokio::sync::oneshot;
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::DryRun;
use tower_redis_ratelimit::extract::{Global, HeaderKey};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::select::{Tier, Tiers, policies_fn};
use tower_redis_ratelimit::{LocalStore, Policies, RateLimitLayer};

use crate::mocks::*;

fn dry<B>(response: &Response<B>) -> &DryRun {
    response.extensions().get().expect("a dry run")
}

/// Returns the policies that decided without being enforced, and whether they allowed the request.
fn would<B>(response: &Response<B>) -> Vec<(String, bool)> {
    let dry = dry(response);
    assert_eq!(
        dry.is_allowed(),
        dry.decisions().iter().all(|decision| decision.is_allowed())
    );
    dry.decisions()
        .iter()
        .map(|decision| (decision.policy().name().to_owned(), decision.is_allowed()))
        .collect()
}

#[tokio::test]
async fn a_dry_run_charges_and_rejects_nothing() {
    let service = limited(layer("2/h").dry_run());
    for allowed in [true, true, false, false] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), 200);
        assert_eq!(would(&response), [("api".to_owned(), allowed)]);
        assert!(
            decision(&response).is_none() && field(&response, "ratelimit").is_none(),
            "nothing is limited"
        );
        assert!(field(&response, "retry-after").is_none());
        assert_eq!(
            response.extensions().get(),
            Some(&Seen(None)),
            "the handler sees no decision either"
        );
    }
}

#[tokio::test]
async fn a_dry_run_passes_undecided_requests() {
    let response = send(&limited(layer("1/h").dry_run()), anonymous()).await;
    assert_eq!(response.status(), 200);
    assert!(
        response.extensions().get::<DryRun>().is_none(),
        "no check without a key"
    );
    let response = send(
        &limited(
            layer_with(Broken, "1/h")
                .on_error(OnError::Reject)
                .dry_run(),
        ),
        request("alice"),
    )
    .await;
    assert_eq!(
        (response.status().as_u16(), would(&response)),
        (200, Vec::new())
    );
}

#[tokio::test]
async fn a_shadow_does_not_affect_enforcement() {
    let service = limited(
        layer("3/h")
            .shadow(gcra("tighter", "1/h"))
            .shadow(gcra("looser", "9/h")),
    );
    for (status, tighter) in [(200, true), (200, false), (200, false)] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(
            would(&response),
            [("tighter".to_owned(), tighter), ("looser".to_owned(), true)]
        );
        assert_eq!(decision(&response).unwrap().policy().name(), "api");
        assert!(
            field(&response, "ratelimit-policy")
                .unwrap()
                .starts_with("\"api\""),
            "clients see what is enforced"
        );
        assert_eq!(
            response
                .headers()
                .get_all("ratelimit-policy")
                .iter()
                .count(),
            1
        );
    }
    for _ in 0..3 {
        let denied = send(&service, request("alice")).await;
        assert_eq!(denied.status(), 429);
        assert!(
            denied.extensions().get::<DryRun>().is_none(),
            "a request that is rejected is not tried"
        );
    }
}

/// A common use: try another limit for the same policy.
#[tokio::test]
async fn same_named_shadows_count_separately() {
    let store = LocalStore::default();
    let service = limited(layer_with(store.clone(), "3/h").shadow(gcra("api", "2/h")));
    for (remaining, tried) in [(2, true), (1, true), (0, false)] {
        let response = send(&service, request("alice")).await;
        assert_eq!(
            (
                response.status().as_u16(),
                decision(&response).unwrap().remaining()
            ),
            (200, remaining)
        );
        assert_eq!(would(&response), [("api".to_owned(), tried)]);
    }
    assert_eq!(send(&service, request("alice")).await.status(), 429);
    // A dry run uses the same count that enforcement continues.
    let bob = |layer: RateLimitLayer<_, _>| async { send(&limited(layer), request("bob")).await };
    bob(layer_with(store.clone(), "3/h").dry_run()).await;
    assert_eq!(
        decision(&bob(layer_with(store, "3/h")).await)
            .unwrap()
            .remaining(),
        1
    );
}

#[tokio::test]
async fn shadows_do_not_charge_rejected_requests() {
    let store = LocalStore::default();
    let service = limited(layer_with(store.clone(), "1/h").shadow(gcra("new", "5/h")));
    for _ in 0..10 {
        send(&service, request("alice")).await;
    }
    let peek = limited(
        layer_with(store, "9/h")
            .cost(|_| 0)
            .shadow(gcra("new", "5/h")),
    );
    assert_eq!(
        dry(&send(&peek, request("alice")).await).decisions()[0].remaining(),
        4
    );
}

#[tokio::test]
async fn a_shadow_costs_what_the_request_costs() {
    let service = limited(layer("100/h").shadow(gcra("new", "10/h")).cost(by_header));
    assert_eq!(
        dry(&send(&service, costing(7)).await).decisions()[0].remaining(),
        3
    );
}

#[tokio::test]
async fn dry_runs_try_shadows_unless_skipped() {
    let service = limited(
        layer("2/h")
            .shadow(gcra("other", "1/h"))
            .skip(|request| request.uri.path() == "/health")
            .dry_run(),
    );
    let response = send(&service, request("alice")).await;
    assert_eq!(
        would(&response),
        [("api".to_owned(), true), ("other".to_owned(), true)]
    );
    let response = send(&service, request("alice")).await;
    assert_eq!(
        would(&response),
        [("api".to_owned(), true), ("other".to_owned(), false)]
    );
    let mut health = request("alice");
    *health.uri_mut() = "/health".parse().unwrap();
    assert!(
        send(&service, health)
            .await
            .extensions()
            .get::<DryRun>()
            .is_none()
    );
}

/// A new plan can be tried on callers that have no limit yet.
#[tokio::test]
async fn a_shadow_may_limit_exempt_requests() {
    let tiers = Tiers::new(gcra("free", "1/h")).exempt("internal");
    let tried = Policies::from(gcra("internal", "1/h"));
    let tried = policies_fn(move |request| {
        request
            .extensions
            .get::<Tier>()
            .filter(|tier| tier.0 == "internal")
            .map(|_| tried.clone())
    });
    let layer = RateLimitLayer::new(LocalStore::default(), HeaderKey::new(USER).unwrap(), tiers)
        .shadow(tried);
    let service = limited(layer);
    for allowed in [true, false] {
        let mut internal = request("robot");
        internal.extensions_mut().insert(Tier::new("internal"));
        let response = send(&service, internal).await;
        assert_eq!(would(&response), [("internal".to_owned(), allowed)]);
        assert!(decision(&response).is_none());
    }
    assert_eq!(
        would(&send(&service, request("alice")).await),
        [],
        "no policies of the shadow's are for her"
    );
}

#[tokio::test]
async fn layers_around_each_other_add_up() {
    let outer = RateLimitLayer::new(LocalStore::default(), Global, gcra("outer", "1/h")).dry_run();
    let service = outer.layer(limited(layer("1/h").dry_run()));
    assert_eq!(
        would(&send(&service, request("a")).await),
        [("api".to_owned(), true), ("outer".to_owned(), true)]
    );
    assert_eq!(
        would(&send(&service, request("b")).await),
        [("api".to_owned(), true), ("outer".to_owned(), false)]
    );
}

/// Records decisions: policy, caller, whether it was allowed, and whether it was a dry run.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<Line>>>);

type Line = (String, String, bool, bool);

impl Observer for Recorder {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Decided {
            decision,
            key,
            dry_run,
            ..
        } = *event
        {
            let (policy, key) = (decision.policy().name().to_owned(), key.reveal().to_owned());
            self.0
                .lock()
                .unwrap()
                .push((policy, key, decision.is_allowed(), dry_run));
        }
    }
}

#[tokio::test]
async fn observers_see_unenforced_decisions() {
    let recorder = Recorder::default();
    let service = limited(
        layer("5/h")
            .shadow(gcra("new", "1/h"))
            .observer(recorder.clone()),
    );
    for _ in 0..2 {
        send(&service, request("alice")).await;
    }
    let expected = [
        ("api", true, false),
        ("new", true, true),
        ("api", true, false),
        ("new", false, true),
    ];
    let expected =
        expected.map(|(name, allowed, dry)| (name.to_owned(), "alice".to_owned(), allowed, dry));
    assert_eq!(*recorder.0.lock().unwrap(), expected);
}

/// The check runs concurrently with the inner call; either may end first.
#[tokio::test]
async fn the_inner_call_precedes_the_shadow_answer() {
    let (store, mut questions) = manual_store();
    let (calls, mut called) = tokio::sync::mpsc::unbounded_channel();
    let inner = service_fn(move |_: Request<String>| {
        let (answer, response) = oneshot::channel::<Response<String>>();
        calls.send(answer).unwrap();
        async move { Ok::<_, Infallible>(response.await.unwrap()) }
    });
    let mut service = layer_with(store, "1/h").dry_run().layer(inner);
    for check_first in [true, false] {
        let mut response = Box::pin(service.call(request("alice")));
        let question = questions.try_recv().expect("an immediate check");
        let call = called.try_recv().expect("an immediate call");
        if check_first {
            question.deny();
            assert!(response.as_mut().now_or_never().is_none());
            call.send(Response::new(String::new())).unwrap();
        } else {
            call.send(Response::new(String::new())).unwrap();
            assert!(
                response.as_mut().now_or_never().is_none(),
                "the check is not answered"
            );
            question.deny();
        }
        let response = response
            .now_or_never()
            .expect("both have completed")
            .unwrap();
        assert_eq!(would(&response), [("api".to_owned(), false)]);
    }
    // A dropped request withdraws its check.
    let dropped = service.call(request("alice"));
    let question = questions.try_recv().unwrap();
    drop(dropped);
    assert!(question.is_abandoned());
}

/// A finished inner call keeps no resource that others wait for, even if its response waits for a
/// shadow.
#[tokio::test]
async fn inner_futures_drop_before_late_checks() {
    let (store, mut questions) = manual_store();
    let mut service = layer_with(store, "1/h")
        .dry_run()
        .layer(ConcurrencyLimit::new(service_fn(hello::<String>), 1));
    let mut response = Box::pin(service.ready().await.unwrap().call(request("alice")));
    assert!(
        response.as_mut().now_or_never().is_none(),
        "the check is not answered"
    );
    assert!(
        service.ready().now_or_never().is_some(),
        "a call that is done holds its permit"
    );
    questions.try_recv().unwrap().deny();
    assert_eq!(
        would(&response.now_or_never().unwrap().unwrap()),
        [("api".to_owned(), false)]
    );
}

/// If the enforced check takes time, the shadow's check starts after the admission.
#[tokio::test]
async fn shadows_follow_a_late_enforced_check() {
    let (store, mut questions) = manual_store();
    let mut service = layer_with(store, "1/h")
        .shadow(gcra("new", "1/h"))
        .layer(service_fn(hello::<String>));
    for allowed in [true, false] {
        let mut response = Box::pin(service.call(request("alice")));
        let enforced = questions.try_recv().unwrap();
        assert_eq!(enforced.check.policies()[0].name(), "api");
        assert!(response.as_mut().now_or_never().is_none());
        assert!(
            questions.try_recv().is_err(),
            "the request has not passed yet"
        );
        if !allowed {
            enforced.deny();
            assert_eq!(response.now_or_never().unwrap().unwrap().status(), 429);
            assert!(questions.try_recv().is_err());
            continue;
        }
        enforced.allow();
        assert!(response.as_mut().now_or_never().is_none());
        let tried = questions.try_recv().unwrap();
        assert_eq!(tried.check.policies()[0].name(), "new");
        tried.deny();
        let response = response.now_or_never().unwrap().unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(would(&response), [("new".to_owned(), false)]);
        assert!(decision(&response).unwrap().is_allowed());
    }
}

#[tokio::test]
async fn inner_errors_do_not_await_shadows() {
    let (store, mut questions) = manual_store();
    let inner = service_fn(|_: Request<String>| async { Err::<Response<String>, _>("broken") });
    let response = layer_with(store, "1/h")
        .dry_run()
        .layer(inner)
        .call(request("alice"))
        .now_or_never();
    assert_eq!(response.expect("an error").unwrap_err(), "broken");
    assert!(questions.try_recv().unwrap().is_abandoned());
}
