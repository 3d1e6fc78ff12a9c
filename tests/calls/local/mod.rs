//! Services whose requests are not HTTP requests.

mod contract;
mod outcome;
mod stack;

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::advance;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_redis_ratelimit::call_limit::{CallFuture, CallLimit};
use tower_redis_ratelimit::check::RateLimited;
use tower_redis_ratelimit::extract::{Global, KeyExtractor, MissingKey};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::select::{Live, PolicySelector};
use tower_redis_ratelimit::store::{Store, StoreError};
use tower_redis_ratelimit::{CallLimitLayer, Key, LocalStore, Policies, Policy, RedisStore};

use crate::mocks::{Broken, SECRET, gcra};

/// A request that is not an HTTP request.
struct Job {
    tenant: &'static str,
    pages: u32,
}

fn job(tenant: &'static str) -> Job {
    Job { tenant, pages: 1 }
}

async fn print(job: Job) -> Result<String, Infallible> {
    Ok(format!("{} for {}", job.pages, job.tenant))
}

fn by_tenant(job: &Job) -> Option<Key> {
    (!job.tenant.is_empty()).then(|| Key::new(job.tenant))
}

type ByTenant = fn(&Job) -> Option<Key>;

/// Counts by tenant in this process, under one policy with the name `jobs`.
fn layer(quota: &str) -> CallLimitLayer<LocalStore, ByTenant, Job> {
    layer_with(LocalStore::default(), quota)
}

/// This layer over another store.
fn layer_with<S: Store>(store: S, quota: &str) -> CallLimitLayer<S, ByTenant, Job> {
    CallLimitLayer::new(store, by_tenant as ByTenant, gcra("jobs", quota))
}

/// Returns the printed text or the error; the service must not have to wait.
fn printed<S>(service: &S, job: Job) -> Result<String, BoxError>
where
    S: Service<Job, Response = String, Error = BoxError> + Clone,
{
    service
        .clone()
        .oneshot(job)
        .now_or_never()
        .expect("nothing to wait for")
}

/// Returns the denial of a call.
#[track_caller]
fn limited<T: Debug>(result: Result<T, BoxError>) -> RateLimited {
    *result
        .expect_err("it was let through")
        .downcast()
        .expect("another error than `RateLimited`")
}

#[tokio::test(start_paused = true)]
async fn closures_give_key_and_cost() {
    let service = ServiceBuilder::new()
        .layer(
            CallLimitLayer::new(
                LocalStore::default(),
                |job: &Job| Some(Key::new(job.tenant)),
                gcra("jobs", "60/m"),
            )
            .cost(|job| job.pages),
        )
        .service_fn(print);
    assert_eq!(
        printed(
            &service,
            Job {
                tenant: "acme",
                pages: 40
            }
        )
        .unwrap(),
        "40 for acme"
    );
    let denied = limited(printed(
        &service,
        Job {
            tenant: "acme",
            pages: 40,
        },
    ));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(20)));
    assert_eq!(
        (
            denied.decision().policy().name(),
            denied.decision().remaining()
        ),
        ("jobs", 20)
    );
    assert_eq!(
        denied.to_string(),
        "the quota of 60/m (jobs) cannot cover this call; try again in 20s"
    );
    assert_eq!(
        printed(
            &service,
            Job {
                tenant: "other",
                pages: 60
            }
        )
        .unwrap(),
        "60 for other"
    );
    advance(Duration::from_secs(20)).await;
    assert_eq!(
        printed(
            &service,
            Job {
                tenant: "acme",
                pages: 40
            }
        )
        .unwrap(),
        "40 for acme"
    );

    let never = limited(printed(
        &service,
        Job {
            tenant: "acme",
            pages: 61,
        },
    ));
    assert_eq!(never.retry_after(), None);
}

#[tokio::test(start_paused = true)]
async fn a_denial_names_the_fix_not_callers() {
    let service = layer("60/m").cost(|job| job.pages).layer(service_fn(print));
    let secret = |pages| Job {
        tenant: SECRET,
        pages,
    };
    printed(&service, secret(60)).unwrap();
    for (pages, sentence) in [
        (30, "the quota of 60/m (jobs) is used up; try again in 30s"),
        (61, "the call's cost exceeds the maximum burst of 60 (jobs)"),
    ] {
        let denied = limited(printed(&service, secret(pages)));
        assert_eq!(denied.to_string(), sentence);
        assert!(!format!("{denied:?}").contains(SECRET));
    }
}

#[test]
fn extractors_without_http_accept_any_request() {
    struct Tenant;
    impl KeyExtractor<Job> for Tenant {
        fn extract(&self, job: &Job) -> Result<Key, MissingKey> {
            by_tenant(job).ok_or(MissingKey::new("no tenant"))
        }
    }

    /// Returns whether two jobs of one tenant share a count, and whether two tenants do.
    fn counts(key: impl KeyExtractor<Job>) -> (bool, bool) {
        let layer = CallLimitLayer::new(LocalStore::default(), key, gcra("jobs", "1/h"));
        let service = layer.layer(service_fn(print));
        printed(&service, job("acme")).unwrap();
        (
            printed(&service, job("acme")).is_err(),
            printed(&service, job("other")).is_err(),
        )
    }

    assert_eq!(counts(Tenant), (true, false));
    assert_eq!(counts(Arc::new(Tenant)), (true, false));
    assert_eq!(counts(by_tenant), (true, false));
    assert_eq!(counts(|job: &Job| by_tenant(job)), (true, false));
    assert_eq!(counts((Tenant, Global)), (true, false));
    assert_eq!(
        counts((Global, |job: &Job| by_tenant(job), Tenant)),
        (true, false)
    );
    assert_eq!(counts(Global), (true, true));
}

#[test]
fn selectors_without_http_accept_any_request() {
    struct ByPages;
    impl PolicySelector<Job> for ByPages {
        fn policies(&self, job: &Job, _: Option<&Key>) -> Option<Policies> {
            (job.pages > 0).then(|| gcra("pages", "2/h").into())
        }
    }

    /// Returns the number of jobs that pass: of four that print something, and of four that do not.
    fn passes(policies: impl PolicySelector<Job>) -> (usize, usize) {
        let service =
            CallLimitLayer::new(LocalStore::default(), Global, policies).layer(service_fn(print));
        let pass = |pages| {
            (0..4)
                .filter(|_| {
                    printed(
                        &service,
                        Job {
                            tenant: "acme",
                            pages,
                        },
                    )
                    .is_ok()
                })
                .count()
        };
        (pass(1), pass(0))
    }

    let two = || gcra("two", "2/h");
    assert_eq!(passes(two()), (2, 0));
    assert_eq!(
        passes(Policies::new([two(), gcra("three", "3/h")]).unwrap()),
        (2, 0)
    );
    assert_eq!(passes(Some(two())), (2, 0));
    assert_eq!(passes(None::<Policy>), (4, 4));
    assert_eq!(passes(Arc::new(two())), (2, 0));
    assert_eq!(passes(Live::new(two())), (2, 0));
    assert_eq!(passes(ByPages), (2, 4));
    assert_eq!(passes(Live::new(ByPages)), (2, 4));
    let policies = Policies::from(two());
    assert_eq!(
        passes(move |job: &Job| (job.pages > 0).then(|| policies.clone())),
        (2, 4)
    );
}

#[test]
fn live_policies_serve_two_request_types() {
    let live = Live::new(gcra("jobs", "1/h"));
    let jobs =
        CallLimitLayer::new(LocalStore::default(), Global, live.clone()).layer(service_fn(print));
    let numbers = CallLimitLayer::new(LocalStore::default(), Global, live.clone())
        .layer(service_fn(async |number: u32| Ok::<_, Infallible>(number)));
    let number = || numbers.clone().oneshot(7).now_or_never().unwrap();
    assert!(printed(&jobs, job("acme")).is_ok() && number().is_ok());
    assert!(printed(&jobs, job("acme")).is_err() && number().is_err());
    live.replace(gcra("jobs", "3/h"));
    assert!(printed(&jobs, job("acme")).is_ok() && number().is_ok());
}

#[test]
fn skipped_requests_need_no_key() {
    let service = layer("1/h")
        .skip(|job| job.pages == 0)
        .layer(service_fn(print));
    for tenant in ["acme", "acme", ""] {
        assert!(printed(&service, Job { tenant, pages: 0 }).is_ok());
    }
    assert!(
        printed(&service, job("acme")).is_ok(),
        "nothing was charged"
    );
    limited(printed(&service, job("acme")));
}

#[test]
fn a_cost_may_go_by_the_policies() {
    let layer =
        layer("10/h").cost_under(|job, policies| job.pages * policies[0].name().len() as u32);
    let service = layer.layer(service_fn(print));
    assert!(
        printed(
            &service,
            Job {
                tenant: "acme",
                pages: 2
            }
        )
        .is_ok()
    );
    assert_eq!(
        limited(printed(
            &service,
            Job {
                tenant: "acme",
                pages: 1
            }
        ))
        .decision()
        .remaining(),
        2
    );
}

#[test]
fn a_missing_key_fails_or_passes() {
    let service = layer("1/h").layer(service_fn(print));
    let error = printed(&service, job("")).unwrap_err();
    assert!(
        error
            .downcast_ref::<MissingKey>()
            .is_some_and(MissingKey::is_absent),
        "{error}"
    );

    let allowing = layer("1/h")
        .on_missing_key(OnMissingKey::Allow)
        .layer(service_fn(print));
    assert!((0..3).all(|_| printed(&allowing, job("")).is_ok()));

    struct Malformed;
    impl KeyExtractor<Job> for Malformed {
        fn extract(&self, _: &Job) -> Result<Key, MissingKey> {
            Err(MissingKey::malformed("two tenants"))
        }
    }
    let layer = CallLimitLayer::new(LocalStore::default(), Malformed, gcra("jobs", "1/h"));
    let service = layer
        .on_missing_key(OnMissingKey::Allow)
        .layer(service_fn(print));
    assert_eq!(
        printed(&service, job("acme")).unwrap_err().to_string(),
        "two tenants"
    );
}

#[test]
fn store_errors_fail_or_pass() {
    let service = layer_with(Broken, "1/h").layer(service_fn(print));
    let error = printed(&service, job("acme")).unwrap_err();
    assert!(error.is::<StoreError>(), "{error}");

    let allowing = layer_with(Broken, "1/h")
        .on_error(OnError::Allow)
        .layer(service_fn(print));
    assert!((0..3).all(|_| printed(&allowing, job("acme")).is_ok()));
}

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Observer for Notes {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Decided {
                dry_run,
                key,
                decision,
                ..
            } => {
                assert!(!dry_run);
                let note = format!("{} {}", key.reveal(), decision.outcome().as_str());
                self.0.lock().unwrap().push(note);
            }
            Event::Failed { key, .. } => {
                self.0
                    .lock()
                    .unwrap()
                    .push(format!("{} failed", key.unwrap().reveal()));
            }
            Event::Misconfigured { problem, .. } => {
                self.0.lock().unwrap().push(problem.to_owned());
            }
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn observers_see_decisions_failures_and_misconfigurations() {
    let notes = Notes::default();
    let noted = || std::mem::take(&mut *notes.0.lock().unwrap());

    let service = layer("1/h")
        .observer(notes.clone())
        .layer(service_fn(print));
    let _ = [job("acme"), job("acme"), job("")].map(|job| printed(&service, job));
    assert_eq!(noted(), ["acme allowed", "acme denied"]);

    let service = layer_with(Broken, "1/h")
        .observer(notes.clone())
        .layer(service_fn(print));
    let _ = printed(&service, job("acme"));
    assert_eq!(noted(), ["acme failed"]);

    struct Misconfigured;
    impl KeyExtractor<Job> for Misconfigured {
        fn extract(&self, _: &Job) -> Result<Key, MissingKey> {
            Err(MissingKey::misconfigured("set it up"))
        }
    }
    let layer = CallLimitLayer::new(LocalStore::default(), Misconfigured, gcra("jobs", "1/h"));
    let layer = layer
        .on_missing_key(OnMissingKey::Allow)
        .observer(notes.clone());
    let service = layer.layer(service_fn(print));
    assert!((0..3).all(|_| printed(&service, job("acme")).is_err()));
    assert_eq!(noted(), ["set it up"]);
    advance(Duration::from_secs(60)).await;
    let _ = printed(&layer.layer(service_fn(print)), job("acme"));
    assert_eq!(noted(), ["set it up"]);
}

#[test]
fn settings_on_a_clone_leave_the_original() {
    let first = layer("1/h");
    let skipping = first.clone().skip(|_| true);
    let (first, skipping) = (
        first.layer(service_fn(print)),
        skipping.layer(service_fn(print)),
    );
    assert!((0..3).all(|_| printed(&skipping, job("acme")).is_ok()));
    assert!(printed(&first, job("acme")).is_ok());
    limited(printed(&first, job("acme")));
}

/// An extractor that implements neither `Clone` nor `Debug`.
struct Rigid;

impl KeyExtractor<Job> for Rigid {
    fn extract(&self, _: &Job) -> Result<Key, MissingKey> {
        Ok(Key::new("rigid"))
    }
}

#[tokio::test]
async fn all_types_are_nameable_send_and_clone() {
    fn shared<T: Send + Sync + Clone + Debug + 'static>(_: &T) {}
    fn spawnable<T: Send + Debug + 'static>(_: &T) {}
    fn error<T: std::error::Error + Send + Sync + Clone + 'static>() {}
    type Inner = tower::util::BoxCloneService<Job, String, Infallible>;

    error::<RateLimited>();
    let store =
        RedisStore::connect_lazy(format!("redis://user:{SECRET}@127.0.0.1:1/").as_str()).unwrap();
    let layer: CallLimitLayer<RedisStore, Rigid, Job> =
        CallLimitLayer::new(store, Rigid, gcra("jobs", "1/h"));
    shared(&layer);
    let mut service: CallLimit<_, RedisStore, Rigid, Job> = layer.clone().layer(service_fn(print));
    shared(&service);
    let future: CallFuture<_, RedisStore, Job> = service.call(job("alice"));
    spawnable(&future);
    spawnable(
        &layer
            .layer(Inner::new(service_fn(print)))
            .call(job("alice")),
    );
    let shown = format!("{layer:?} {service:?} {future:?}");
    assert!(shown.contains("Policy(jobs Gcra 1/h)"), "{shown}");
    assert!(
        !shown.contains(SECRET) && !shown.contains("alice"),
        "{shown}"
    );
}

#[test]
fn the_inner_service_is_accessible() {
    let mut service = layer("1/h").layer(Some("inner"));
    assert_eq!(service.get_ref(), &Some("inner"));
    assert_eq!(service.get_mut().take(), Some("inner"));
    assert_eq!(service.into_inner(), None);
}
