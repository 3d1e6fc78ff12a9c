//! Log output.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use http::Request;
use tokio::time::advance;
use tower::{Layer, ServiceExt};
use tower_http::trace::TraceLayer;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::observe::{Event, Observer, TracingObserver};
use tower_redis_ratelimit::reject::OnMissingKey;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{Key, LocalStore, RateLimitLayer};
use tracing::{Level, field, info_span};

use crate::lines::Lines;
use crate::mocks::{
    Broken, ManualStore, anonymous, gcra, layer, layer_with, limited, manual_store, request, send,
};

fn exceeded(caller: &str, denied: u64) -> String {
    format!(
        "INFO rate limit exceeded policy=\"api\" caller=\"{caller}\" denied={denied} dry_run=false"
    )
}

#[tokio::test(start_paused = true)]
async fn limited_callers_are_logged_once_a_minute() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let service = limited(layer("1/h").observer(TracingObserver::new().reveal_keys()));
    for _ in 0..100 {
        send(&service, request("alice")).await;
    }
    send(&service, request("bob")).await;
    send(&service, request("bob")).await;
    assert_eq!(lines.take(), [exceeded("alice", 1), exceeded("bob", 1)]);
    advance(Duration::from_secs(60)).await;
    // The next decision logs the counts, even if it allows another caller's request.
    send(&service, request("carol")).await;
    assert_eq!(lines.take(), [exceeded("alice", 98)]);
    send(&service, request("bob")).await;
    assert_eq!(
        lines.take(),
        [exceeded("bob", 1)],
        "after a quiet minute, it is logged immediately"
    );
    send(&service, request("alice")).await;
    assert_eq!(lines.take(), [""; 0]);
    drop(service);
    assert_eq!(lines.take(), [exceeded("alice", 1)], "the rest");
}

/// With an observer and without.
#[tokio::test(start_paused = true)]
async fn requests_without_a_key_are_logged_once_a_minute() {
    let line = |requests: u64, passed: bool| {
        format!(
            "INFO requests without a rate-limit key problem=\"the header x-user is missing\" requests={requests} passed={passed}"
        )
    };
    for layer in [layer("1/h").observer(TracingObserver::new()), layer("1/h")] {
        let (lines, _guard) = Lines::collect(Level::INFO);
        let service = limited(layer.clone());
        let allowing = limited(layer.on_missing_key(OnMissingKey::Allow));
        for _ in 0..1_000 {
            assert_eq!(send(&service, anonymous()).await.status(), 400);
        }
        assert_eq!(lines.take(), [line(1, false)]);
        assert_eq!(send(&allowing, anonymous()).await.status(), 200);
        assert_eq!(lines.take(), [line(1, true)]);
        advance(Duration::from_secs(60)).await;
        assert_eq!(send(&service, anonymous()).await.status(), 400);
        assert_eq!(lines.take(), [line(999, false)]);
    }
}

#[tokio::test(start_paused = true)]
async fn policies_and_dry_runs_log_separately() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let observer = TracingObserver::new().reveal_keys();
    let key = Key::new("alice");
    for (name, dry_run) in [
        ("api", false),
        ("api", true),
        ("login", false),
        ("api", true),
    ] {
        let check = Check::take(key, &gcra(name, "1/h").into(), 2);
        let decision = LocalStore::default().check(check).await.unwrap();
        let event = Event::decided(&key, &decision, Duration::ZERO, dry_run);
        observer.clone().notify(&event);
    }
    let login = exceeded("alice", 1).replace("api", "login");
    assert_eq!(
        lines.take(),
        [
            exceeded("alice", 1),
            exceeded("alice", 1).replace("false", "true"),
            login
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn further_callers_share_one_log_line() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let store = MockStore::new();
    store.deny(Duration::from_secs(1));
    let observer = TracingObserver::new()
        .reveal_keys()
        .callers(NonZeroUsize::MIN);
    let service = limited(layer_with(store, "1/h").observer(observer));
    for i in 0..1_000 {
        send(&service, request(&i.to_string())).await;
    }
    let more =
        |denied: u64| format!("INFO further callers rate limited (not listed) denied={denied}");
    assert_eq!(lines.take(), [exceeded("0", 1), more(1)]);
    advance(Duration::from_secs(60)).await;
    send(&service, request("1000")).await;
    assert_eq!(lines.take(), [more(998), exceeded("1000", 1)]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_throttled_but_breaker_changes_logged() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let observer = TracingObserver::new();
    let (timeout, refused) = (
        StoreError::new(ErrorKind::Timeout),
        StoreError::new(ErrorKind::Refused),
    );
    let key = Key::new("alice");
    for _ in 0..100 {
        observer.notify(&Event::failed(Some(&key), &timeout, false));
    }
    observer.notify(&Event::failed(None, &refused, false));
    let logged = lines.take();
    assert!(
        logged[0].starts_with("WARN rate limit checks failed kind=\"timeout\" error="),
        "{logged:?}"
    );
    assert!(
        logged[0].ends_with("failed=1")
            && logged[1].contains("kind=\"refused\"")
            && logged.len() == 2,
        "{logged:?}"
    );
    advance(Duration::from_secs(60)).await;
    // Without a further failure, the next decision logs the failures.
    send(
        &limited(layer("9/h").observer(observer.clone())),
        request("alice"),
    )
    .await;
    let logged = lines.take();
    assert!(
        logged[0].contains("kind=\"timeout\"")
            && logged[0].ends_with("failed=99")
            && logged.len() == 1,
        "{logged:?}"
    );

    for _ in 0..2 {
        let [one, four] = [1, 4].map(|share| NonZeroU32::new(share).unwrap());
        for (share, is_counted) in [(one, false), (one, true), (four, true)] {
            observer.notify(&Event::degraded(&timeout, share, is_counted));
        }
        let minute = Duration::from_secs(60);
        observer.notify(&Event::still_degraded(minute, 950, four, Some(&timeout)));
        let after = Duration::from_secs(63);
        observer.notify(&Event::recovered(after, 999, 12, 7, 1));
        observer.notify(&Event::reconciled(7, 1));
    }
    let logged = lines.take();
    assert_eq!(logged.len(), 12, "{logged:?}");
    let shares = ["share=1", "share=1", "share=4"];
    assert!(
        logged
            .iter()
            .zip(shares)
            .all(|(line, share)| line.contains(share))
    );
    for (line, part) in logged.iter().zip([
        "WARN shared store unavailable, enforcing rate limits locally; every instance grants the whole limit: set \
         `FallbackBuilder::share` if there are several kind",
        "WARN shared store unavailable, enforcing rate limits locally; no other instance was found, so this one grants the \
         whole limit kind",
        "WARN shared store unavailable, enforcing rate limits locally kind",
        "WARN shared store still unavailable: no request fails, each is decided locally (https://docs.rs/tower-redis-ratelimit/\
         latest/tower_redis_ratelimit/guide/runbook/index.html#ratelimitdegraded) after=60s checks=950 share=4 error=",
        "INFO shared store recovered after=63s checks=999 granted=12 charged=7 dropped=1",
        "charged=7 dropped=1",
    ]) {
        assert!(line.contains(part), "{part} is missing in {line}");
    }
}

/// At most once a minute, with the longest delay and the number of checks.
#[tokio::test(start_paused = true)]
async fn a_late_runtime_is_logged_with_its_fix() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let observer = TracingObserver::new();
    let line = |longest: &str, checks: u32| {
        format!(
            "WARN the runtime was late: handlers keep its worker threads (move blocking work to `spawn_blocking`), or the \
             process gets too little processor time (a CPU limit); Redis was not the cause (runtime-late: \
             https://docs.rs/tower-redis-ratelimit/latest/tower_redis_ratelimit/guide/pitfalls/index.html#runtime-late) \
             longest={longest} checks={checks}"
        )
    };
    for delay in [160, 20, 300, 90] {
        let by = Duration::from_millis(delay);
        observer.notify(&Event::runtime_late(by, false));
    }
    assert_eq!(lines.take(), [line("160ms", 1)]);
    advance(Duration::from_secs(60)).await;
    observer.notify(&Event::runtime_late(Duration::from_millis(7), true));
    assert_eq!(lines.take(), [line("300ms", 3)]);
    observer.notify(&Event::runtime_late(Duration::from_millis(8), true));
    drop(observer);
    assert_eq!(lines.take(), [line("8ms", 2)], "the rest");
}

#[tokio::test]
async fn callers_are_named_only_on_demand() {
    let (lines, _guard) = Lines::collect(Level::TRACE);
    let observer = TracingObserver::new();
    let service = limited(layer("1/h").observer(observer.clone()));
    send(&service, request("alice")).await;
    send(&service, request("alice")).await;
    send(
        &limited(layer_with(Broken, "1/h").observer(observer)),
        request("alice"),
    )
    .await;
    let text = lines.take().join("\n");
    assert!(
        text.contains("rate limit decided policy=\"api\" caller=\"Key(#"),
        "{text}"
    );
    assert!(
        text.contains("rate limit exceeded policy=\"api\" caller=\"Key(#"),
        "{text}"
    );
    assert!(
        text.contains("rate limit check failed caller=\"Key(#"),
        "{text}"
    );
    assert!(!text.contains("alice"), "{text}");
}

#[tokio::test]
async fn denials_are_logged_within_the_span() {
    let (lines, _guard) = Lines::collect(Level::DEBUG);
    let (store, mut questions): (ManualStore, _) = manual_store();
    let service = TraceLayer::new_for_http()
        .make_span_with(|request: &Request<String>| {
            info_span!(
                "request",
                path = request.uri().path(),
                rate_limit = field::Empty
            )
        })
        .on_request(())
        .layer(limited(
            layer_with(store, "1/h").observer(TracingObserver::new()),
        ));
    let answered = async || {
        let response = service.clone().oneshot(request("alice")).await.unwrap();
        assert!(matches!(response.status().as_u16(), 200 | 429));
        lines
            .take()
            .into_iter()
            .find(|line| line.contains("finished processing request"))
            .unwrap()
    };
    let (allowed, ()) = tokio::join!(answered(), async {
        questions.recv().await.unwrap().allow()
    });
    assert!(allowed.contains("request{path=\"/books\"}"), "{allowed}");
    let (denied, ()) = tokio::join!(answered(), async { questions.recv().await.unwrap().deny() });
    assert!(
        denied.contains("request{path=\"/books\" rate_limit=\"denied\"}"),
        "{denied}"
    );
}

#[tokio::test(start_paused = true)]
async fn counts_are_logged_outside_foreign_spans() {
    let (lines, _guard) = Lines::collect(Level::INFO);
    let observer = TracingObserver::new().reveal_keys();
    let alice = Key::new("alice");
    let check = Check::take(alice, &gcra("api", "1/h").into(), 2);
    let decision = LocalStore::default().check(check).await.unwrap();
    let logged = |path: &str, key: &Key| {
        let event = Event::decided(key, &decision, Duration::ZERO, false);
        info_span!("request", path).in_scope(|| observer.notify(&event));
        lines.take()
    };
    assert_eq!(
        logged("/a", &alice),
        [exceeded("alice", 1).replace("INFO", "INFO request{path=\"/a\"}:")]
    );
    assert_eq!(logged("/a", &alice), [""; 0]);
    advance(Duration::from_secs(60)).await;
    let bob = exceeded("bob", 1).replace("INFO", "INFO request{path=\"/b\"}:");
    assert_eq!(logged("/b", &Key::new("bob")), [exceeded("alice", 1), bob]);
    assert!(!format!("{observer:?}").contains("alice"));
}

/// A layer without an observer logs it too.
#[tokio::test]
async fn a_misconfiguration_is_logged_as_error() {
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "1/h"));
    for layer in [layer.clone(), layer.observer(TracingObserver::new())] {
        let (lines, _guard) = Lines::collect(Level::INFO);
        send(&limited(layer), anonymous()).await;
        let logged = lines.take();
        assert!(
            logged[0].starts_with("ERROR rate limiting is misconfigured"),
            "{logged:?}"
        );
        assert!(
            logged[0].contains("into_make_service_with_connect_info") && logged.len() == 1,
            "{logged:?}"
        );
    }
}
