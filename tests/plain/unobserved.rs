//! Problems printed to standard error, without an observer and without the feature `tracing`.

use std::convert::Infallible;
use std::env;
use std::process::{Command, Stdio};

use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::extract::{Global, KeyExtractor, PeerIp};
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{Fallback, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

/// Returns a command that runs an ignored test in a separate process.
fn ignored(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([
        "--exact",
        &format!("unobserved::{test}"),
        "--ignored",
        "--nocapture",
    ]);
    command
}

/// Runs an ignored test, and returns its standard error.
fn printed(test: &str) -> String {
    let output = ignored(test).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

async fn send<S: Store, K: KeyExtractor>(layer: &RateLimitLayer<S, K>) {
    let answer =
        service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new())));
    layer
        .layer(answer)
        .oneshot(Request::new(()))
        .await
        .map(drop)
        .unwrap();
}

fn policy() -> Policy {
    Policy::new("api", Strategy::Gcra, Quota::per_second(50)).unwrap()
}

fn outage() -> Fallback<MockStore, LocalStore> {
    let store = MockStore::new();
    store.fail(StoreError::new(ErrorKind::Unreachable));
    Fallback::new(store, LocalStore::default())
}

#[tokio::test]
#[ignore = "run by the test below, in a separate process"]
async fn without_an_observer() {
    let down = RateLimitLayer::new(outage(), Global, policy());
    let other = RateLimitLayer::new(outage(), Global, policy());
    let misconfigured = RateLimitLayer::new(LocalStore::default(), PeerIp, policy());
    let shared = LocalStore::default();
    let tighter = Policy::new("api", Strategy::Gcra, Quota::per_second(20)).unwrap();
    let first = RateLimitLayer::new(shared.clone(), Global, policy());
    let suspected = RateLimitLayer::new(shared, Global, tighter);
    for _ in 0..5 {
        send(&down).await;
        send(&other).await;
        send(&first).await;
        send(&suspected).await;
        send(&misconfigured).await;
    }
}

#[tokio::test]
#[ignore = "run by the test below, in a separate process"]
async fn with_a_unit_observer() {
    let down = RateLimitLayer::new(outage(), Global, policy()).observer(());
    let misconfigured = RateLimitLayer::new(LocalStore::default(), PeerIp, policy()).observer(());
    for _ in 0..5 {
        send(&down).await;
        send(&misconfigured).await;
    }
}

#[test]
fn outages_and_misconfigurations_appear_once() {
    let printed = printed("without_an_observer");
    for part in [
        "enforcing rate limits locally: the server cannot be reached: check the URL",
        "enable the feature `axum`",
        "rate limiting may be misconfigured: two layers or limiters have a policy \"api\", one with 50/s and one with 20/s",
        "; every instance grants the whole limit: set `FallbackBuilder::share` if there are several\n",
    ] {
        let times = if cfg!(debug_assertions) { 1 } else { 0 };
        assert_eq!(printed.matches(part).count(), times, "{part}: {printed}");
    }
    assert_eq!(self::printed("with_a_unit_observer"), "");
}

/// The reader of standard error may have closed it.
#[test]
fn a_closed_standard_error_harms_no_request() {
    let mut child = ignored("without_an_observer")
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
