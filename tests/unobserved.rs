//! The default log without an observer. It is shared by the whole process, so each test causes
//! another kind of error.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/lines.rs"]
mod lines;

use std::convert::Infallible;
use std::env;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::process::Command;
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{advance, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::extract::{ClientIp, Global, KeyExtractor, PeerIp};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::store::{
    AnyStore, ErrorKind, MockStore, ShareConfig, Store, StoreConfig, StoreError, StoreKind,
};
use tower_redis_ratelimit::{
    CallLimitLayer, Fallback, Key, Limiter, LocalStore, Policy, Quota, RateLimitLayer, Strategy,
    ThrottleLayer,
};
use tracing::Level;

use crate::lines::Lines;

/// Asserts that each line contains the part at the same index, and that there are no other lines.
#[track_caller]
fn assert_lines(lines: &[String], parts: &[&str]) {
    let fit = lines
        .iter()
        .zip(parts)
        .all(|(line, part)| line.contains(part));
    assert!(
        fit && lines.len() == parts.len(),
        "{parts:?} are expected: {lines:#?}"
    );
}

fn policy() -> Policy {
    Policy::new("api", Strategy::Gcra, Quota::per_hour(1)).unwrap()
}

fn layer<S: Store>(store: &S) -> RateLimitLayer<S, Global> {
    RateLimitLayer::new(store.clone(), Global, policy())
}

async fn send<S: Store, K: KeyExtractor>(layer: &RateLimitLayer<S, K>) -> u16 {
    let answer =
        service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new())));
    layer
        .layer(answer)
        .oneshot(Request::new(()))
        .await
        .unwrap()
        .status()
        .as_u16()
}

/// Returns a store that fails with this error, and a fallback around it.
fn outage(kind: ErrorKind) -> (MockStore, Fallback<MockStore, LocalStore>) {
    let store = MockStore::new();
    store.fail(StoreError::new(kind));
    (store.clone(), Fallback::new(store, LocalStore::default()))
}

/// Two layers over one store report its outage once, and denials are not logged.
#[tokio::test(start_paused = true)]
async fn an_outage_is_logged_once() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let (primary, store) = outage(ErrorKind::Unreachable);
    let layers = [layer(&store), layer(&store)];
    let mut statuses = vec![];
    for i in 0..50 {
        statuses.push(send(&layers[i % 2]).await);
    }
    assert_eq!((statuses[0], statuses[49]), (200, 429));
    assert_lines(
        &lines.take(),
        &[
            "WARN rate limit checks failed kind=\"unreachable\" error=the server cannot be reached: check",
            "set `FallbackBuilder::share` if there are several kind=\"unreachable\"",
        ],
    );
    primary.allow();
    while store.is_degraded() {
        sleep(Duration::from_millis(50)).await;
    }
    let logged = lines.take();
    assert_lines(&logged, &["INFO shared store recovered after="]);
    assert!(
        logged[0].ends_with("checks=50 granted=1 charged=0 dropped=0"),
        "{logged:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn failures_are_logged_once_a_minute() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let store = MockStore::new();
    store.fail(StoreError::new(ErrorKind::Refused));
    for _ in 0..50 {
        assert_eq!(send(&layer(&store)).await, 503);
        let calls = CallLimitLayer::<_, _, ()>::new(store.clone(), Global, policy());
        calls
            .layer(service_fn(async |()| Ok::<_, Infallible>(())))
            .oneshot(())
            .await
            .unwrap_err();
    }
    assert_lines(&lines.take(), &["kind=\"refused\""]);
    advance(Duration::from_secs(60)).await;
    // A request logs at most two counts, and those of other tests may come first.
    for _ in 0..10 {
        send(&layer(&store)).await;
    }
    let mut logged = lines.take();
    logged.retain(|line| line.contains("kind=\"refused\""));
    assert_lines(&logged, &["failed="]);
    let failed: u32 = logged[0].rsplit_once("failed=").unwrap().1.parse().unwrap();
    assert!((99..109).contains(&failed), "{logged:?}");
}

#[tokio::test(start_paused = true)]
async fn limiters_and_throttles_log_too() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let (_, store) = outage(ErrorKind::ReadOnly);
    let limiter = Limiter::new(store, policy());
    for _ in 0..5 {
        limiter.take(Key::GLOBAL, 1).await.map(drop).unwrap();
    }
    assert_lines(
        &lines.take(),
        &["kind=\"read_only\"", "enforcing rate limits locally"],
    );

    let store = MockStore::new();
    store.fail(StoreError::new(ErrorKind::OutOfMemory));
    let layer = ThrottleLayer::new(store, Key::GLOBAL, policy()).on_error(OnError::Allow);
    layer
        .layer(service_fn(async |()| Ok::<_, Infallible>(())))
        .ready()
        .await
        .unwrap()
        .call(())
        .await
        .unwrap();
    assert_lines(&lines.take(), &["kind=\"out_of_memory\""]);
}

#[tokio::test]
async fn a_misconfiguration_is_logged() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy());
    assert_eq!([send(&layer).await, send(&layer).await], [500; 2]);
    assert_lines(&lines.take(), &["ERROR rate limiting is misconfigured"]);
}

#[tokio::test]
async fn denials_of_a_dry_run_are_logged() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let enforced = layer(&LocalStore::default());
    assert_eq!([send(&enforced).await, send(&enforced).await], [200, 429]);
    assert_lines(&lines.take(), &[]);

    let dry_run = layer(&LocalStore::default()).dry_run();
    assert_eq!([send(&dry_run).await, send(&dry_run).await], [200; 2]);
    assert_lines(&lines.take(), &["INFO rate limit exceeded policy=\"api\""]);

    let of_both = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_hour(limit)).unwrap();
    let shadowed = RateLimitLayer::new(LocalStore::default(), Global, of_both("api", 9))
        .shadow(of_both("tighter", 1));
    assert_eq!([send(&shadowed).await, send(&shadowed).await], [200; 2]);
    assert_lines(
        &lines.take(),
        &["INFO rate limit exceeded policy=\"tighter\""],
    );
}

#[tokio::test(start_paused = true)]
async fn a_unit_observer_turns_the_log_off() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let (_, store) = outage(ErrorKind::Permission);
    let layer = layer(&store).observer(());
    for _ in 0..5 {
        send(&layer).await;
    }
    assert!(store.is_degraded());
    let failing = MockStore::new();
    failing.fail(StoreError::new(ErrorKind::Permission));
    assert_eq!(send(&self::layer(&failing).observer(())).await, 503);
    let peer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy()).observer(());
    assert_eq!(send(&peer).await, 500);
    assert_lines(&lines.take(), &[]);
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn without_a_subscriber() {
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy());
    for _ in 0..5 {
        assert_eq!(send(&layer).await, 500);
    }
}

/// Sends two requests that a load balancer has forwarded.
async fn forward(key: impl KeyExtractor) {
    let layer = RateLimitLayer::new(LocalStore::default(), key, policy());
    let mut statuses = vec![];
    for _ in 0..2 {
        let peer: SocketAddr = "10.0.0.9:1".parse().unwrap();
        let request = Request::builder().header("x-forwarded-for", "203.0.113.7");
        let request = request.extension(peer).body(()).unwrap();
        let answer = async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new()));
        let response = layer.layer(service_fn(answer)).oneshot(request).await;
        statuses.push(response.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [200, 429]);
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn behind_a_proxy_by_peer() {
    forward(PeerIp).await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn behind_an_untrusted_proxy() {
    let client = ClientIp::x_forwarded_for().trust(["10.0.0.8"]).unwrap();
    forward(client).await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn behind_a_trusted_proxy() {
    let client = ClientIp::x_forwarded_for().trust(["10.0.0.9"]).unwrap();
    forward(client).await;
}

/// Sends a request from a proxy at 10.0.0.9, with this header. Logs to standard error.
async fn log_proxied(client: ClientIp, header: &str, value: &str) {
    let stderr = tracing_subscriber::fmt().with_writer(std::io::stderr);
    stderr.with_ansi(false).init();
    let layer = RateLimitLayer::new(LocalStore::default(), client, policy());
    let peer: SocketAddr = "10.0.0.9:1".parse().unwrap();
    for _ in 0..2 {
        let request = Request::builder().header(header, value).extension(peer);
        let request = request.body(()).unwrap();
        let answer = async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new()));
        let response = layer.layer(service_fn(answer)).oneshot(request).await;
        response.unwrap();
    }
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn by_a_header_that_the_proxy_does_not_send() {
    let client = ClientIp::header("cf-connecting-ip").trust(["private"]);
    log_proxied(client.unwrap(), "x-forwarded-for", "203.0.113.7").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn with_too_many_hops() {
    let client = ClientIp::x_forwarded_for().hops(3).unwrap();
    log_proxied(client, "x-forwarded-for", "6.6.6.6, 203.0.113.7").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn with_too_few_hops() {
    let client = ClientIp::x_forwarded_for().hops(1).unwrap();
    log_proxied(client, "x-forwarded-for", "203.0.113.7, 10.0.0.8").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn with_an_untrusted_second_proxy() {
    let client = ClientIp::x_forwarded_for().trust(["10.0.0.9"]).unwrap();
    log_proxied(client, "x-forwarded-for", "203.0.113.7, 100.64.0.3").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn with_a_client_in_the_own_network() {
    let client = ClientIp::x_forwarded_for().trust(["10.0.0.9"]).unwrap();
    log_proxied(client, "x-forwarded-for", "10.0.0.8").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn with_a_client_that_a_proxy_hides() {
    let client = ClientIp::x_forwarded_for().trust(["private"]).unwrap();
    log_proxied(client, "x-forwarded-for", "203.0.113.7, unknown").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn with_the_right_hops() {
    let client = ClientIp::x_forwarded_for().hops(2).unwrap();
    log_proxied(client, "x-forwarded-for", "6.6.6.6, 203.0.113.7, 10.0.0.8").await;
}

#[tokio::test]
#[ignore = "run by a test below, in a separate process"]
async fn behind_a_filter() {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt;

    let filter = Targets::new().with_target("shop", LevelFilter::INFO);
    let subscriber = tracing_subscriber::registry().with(filter);
    let _guard = tracing::subscriber::set_default(subscriber);
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy());
    assert_eq!(send(&layer).await, 500);
}

/// Runs an ignored test of this file in a separate process, and returns what it prints to standard error.
fn printed_by(test: &str) -> String {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// The feature alone logs nothing without a subscriber.
#[test]
fn problems_are_printed_without_a_subscriber() {
    let printed = printed_by("without_a_subscriber");
    assert_eq!(
        printed.matches("no-peer-address").count(),
        usize::from(cfg!(debug_assertions)) * 2,
        "{printed}"
    );
    assert!(
        !cfg!(debug_assertions)
            || printed.contains("enable the feature `tracing` and install a subscriber"),
        "{printed}"
    );
}

#[cfg(debug_assertions)]
#[test]
fn a_proxy_whose_header_is_ignored_is_printed() {
    for (test, expected) in [
        (
            "behind_a_proxy_by_peer",
            "the peer 10.0.0.9 sends `x-forwarded-for`, so it is probably a proxy, and all of its clients share one count: count by",
        ),
        (
            "behind_an_untrusted_proxy",
            "all of its clients share one count: trust it, as in `.trust([\"10.0.0.9\"])`",
        ),
        ("behind_a_trusted_proxy", ""),
    ] {
        let printed = printed_by(test);
        assert!(printed.contains(expected), "{printed}");
        assert_eq!(printed.is_empty(), expected.is_empty(), "{printed}");
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_filter_that_hides_problems_is_named() {
    let printed = printed_by("behind_a_filter");
    for part in [
        "no-peer-address",
        "does not filter the target `tower_redis_ratelimit`",
    ] {
        assert!(printed.contains(part), "{printed}");
    }
}

#[test]
fn a_header_that_does_not_fit_is_suspected_once() {
    for (test, expected) in [
        (
            "by_a_header_that_the_proxy_does_not_send",
            "a trusted proxy sends `x-forwarded-for` instead of `cf-connecting-ip`, so it is counted itself",
        ),
        (
            "with_too_many_hops",
            "a request has only 2 of 3 entries in `x-forwarded-for`, so it has bypassed a proxy, or",
        ),
        (
            "with_too_few_hops",
            "the client 10.0.0.8 in `x-forwarded-for` has an entry before it, so it is probably a proxy, and all of its clients \
             share one count: trust one more, by `.hops(2)`",
        ),
        (
            "with_an_untrusted_second_proxy",
            "share one count: trust it too, as in `.trust([\\\"shared\\\"])`",
        ),
    ] {
        let printed = printed_by(test);
        assert_eq!(printed.matches(expected).count(), 1, "{test}: {printed}");
        assert_eq!(printed.matches("#proxy-header").count(), 1, "{printed}");
        assert!(printed.contains("INFO"), "{printed}");
    }
    for test in [
        "with_a_client_in_the_own_network",
        "with_a_client_that_a_proxy_hides",
        "with_the_right_hops",
    ] {
        assert_eq!(printed_by(test), "", "{test}");
    }
}

#[tokio::test]
async fn a_suspicion_is_logged() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let store = LocalStore::default();
    let limiters = [9, 8].map(|limit| {
        let policy = Policy::new("mails", Strategy::SlidingLog, Quota::per_hour(limit)).unwrap();
        Limiter::new(store.clone(), policy)
    });
    for limiter in &limiters {
        let _ = limiter.take(Key::GLOBAL, 1).await.unwrap();
    }
    assert_lines(
        &lines.take(),
        &["INFO rate limiting may be misconfigured problem=\"two layers or limiters have"],
    );
}

/// Metrics name neither the server nor the fix.
#[cfg(feature = "metrics")]
#[tokio::test(start_paused = true)]
async fn the_log_stays_beside_metrics() {
    use std::sync::Arc;
    use tower_redis_ratelimit::observe::{MetricsObserver, Observer};

    async fn logged(observer: impl Observer, kind: ErrorKind) -> Vec<String> {
        let (lines, _guard) = Lines::collect(Level::INFO);
        let store = MockStore::new();
        store.fail(StoreError::new(kind));
        let store = Fallback::new(store, LocalStore::default());
        let limits = layer(&store).observer(observer);
        let mut statuses = vec![];
        for _ in 0..5 {
            statuses.push(send(&limits).await);
        }
        assert_eq!(
            statuses,
            [200, 429, 429, 429, 429],
            "denials are not logged"
        );
        let mut lines = lines.take();
        // All tests share the log of the process, with their counts.
        lines.retain(|line| line.contains(&format!("kind=\"{}\"", kind.as_str())));
        lines
    }
    let parts = [
        "WARN rate limit checks failed",
        "WARN shared store unavailable",
    ];
    let alone = MetricsObserver::new();
    assert_lines(&logged(alone, ErrorKind::Protocol).await, &parts);
    let boxed: Arc<dyn Observer> = Arc::new((MetricsObserver::new(), MetricsObserver::new()));
    assert_lines(&logged(boxed, ErrorKind::NotReady).await, &parts);
    let silent = (MetricsObserver::new(), ());
    assert_lines(&logged(silent, ErrorKind::Timeout).await, &[]);
}

const FOUR: NonZeroU32 = NonZeroU32::new(4).unwrap();

/// Another kind may be meant.
#[test]
fn ignored_settings_are_logged() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let url = "redis://127.0.0.1:1/".to_owned();
    let open = |kind| {
        let config = StoreConfig::default().kind(kind).url(url.clone());
        for config in [
            config.clone(),
            config
                .share(ShareConfig::Fixed(FOUR))
                .deadline(Duration::from_millis(50)),
        ] {
            AnyStore::from_config(&config).unwrap();
        }
        lines.take()
    };
    let local = "WARN the kind of the store is `local`, so it ignores the `url` and counts in this process only: use the \
                 kind `auto` to count in Redis, or remove the `url`";
    assert_lines(&open(StoreKind::Local), &[local, local]);
    let redis = "WARN the kind of the store is `redis`, so it ignores `deadline`, `share`: use the kind `fallback` to decide in this \
                 process while Redis is down, or remove the setting";
    assert_lines(&open(StoreKind::Redis), &[redis]);
    assert_lines(&open(StoreKind::Auto), &[]);
    assert_lines(&open(StoreKind::Fallback), &[]);
    let in_url = StoreConfig::default()
        .kind(StoreKind::Redis)
        .url(format!("{url}?share=4"));
    AnyStore::from_config(&in_url).unwrap();
    let share = "WARN the kind of the store is `redis`, so it ignores `share`: use the kind `fallback` to decide in this process \
                 while Redis is down, or remove the setting";
    assert_lines(&lines.take(), &[share]);
    AnyStore::from_config(&StoreConfig::default().prefix("shop")).unwrap();
    let no_url = "WARN the store has no `url`, so it ignores `prefix` and counts in this process only: add the `url`, or use the \
                  kind `local` if that is intended";
    assert_lines(&lines.take(), &[no_url]);
    AnyStore::from_config(&StoreConfig::default().kind(StoreKind::Local)).unwrap();
    assert_lines(&lines.take(), &[]);
}

/// A misspelled name of the variable would otherwise be silent.
#[test]
fn an_unset_variable_is_logged() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    AnyStore::from_env("REDIS_ULR").unwrap();
    assert_lines(
        &lines.take(),
        &[
            "WARN the environment variable REDIS_ULR is not set, so limits are counted in this process only: set REDIS_ULR=local if \
             that is intended, or use `require_env`",
        ],
    );
    let error = AnyStore::require_env("REDIS_ULR").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert_lines(&lines.take(), &[]);
}
