//! Selection of a request's policies.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use axum::{Router, routing::get};
use http::request::Parts;
use http::{HeaderName, Method, Request, Response};
use tower_redis_ratelimit::check::DryRun;
use tower_redis_ratelimit::extract::{ClientIp, Global, HeaderKey, KeyExtractor, MissingKey};
use tower_redis_ratelimit::reject::OnMissingKey;
use tower_redis_ratelimit::select::{Live, PolicySelector, Routes, Tier, Tiers, policies_fn};
use tower_redis_ratelimit::{
    ConfigError, Key, LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy,
};

use crate::mocks::*;
use crate::support::{STRATEGIES, is_gradual};

/// Counts by user, under the selected policies.
fn by(policies: impl PolicySelector) -> RateLimitLayer<LocalStore, HeaderKey> {
    RateLimitLayer::new(
        LocalStore::default(),
        HeaderKey::new(USER).unwrap().readable(),
        policies,
    )
    .decision_in_response()
}

/// The names and quotas in the fields of a response, without their windows.
fn quotas<B>(response: &Response<B>) -> String {
    field(response, "ratelimit-policy")
        .unwrap_or("none")
        .replace(";w=60", "")
}

fn on(method: Method, path: &str) -> Request<String> {
    let mut request = request("alice");
    (*request.method_mut(), *request.uri_mut()) = (method, path.parse().unwrap());
    request
}

fn of_tier(user: &str, tier: &'static str) -> Request<String> {
    let mut request = request(user);
    request.extensions_mut().insert(Tier::new(tier));
    request
}

fn assert_exempt<B>(response: &Response<B>) {
    assert_eq!(response.status(), 200);
    assert!(decision(response).is_none(), "it was counted");
    assert!(
        !response
            .headers()
            .keys()
            .any(|name| name.as_str().contains("ratelimit")),
        "{:?}",
        response.headers()
    );
}

#[tokio::test]
async fn a_closure_may_return_no_policies() {
    let [read, write] = ["read", "write"].map(|name| Policies::from(gcra(name, "1/m")));
    let service = limited(by(policies_fn(move |request| match request.method {
        Method::OPTIONS => None,
        Method::GET => Some(read.clone()),
        _ => Some(write.clone()),
    })));
    for (method, status, expected) in [
        (Method::GET, 200, "\"read\";q=1"),
        (Method::GET, 429, "\"read\";q=1"),
        (Method::POST, 200, "\"write\";q=1"),
        (Method::DELETE, 429, "\"write\";q=1"),
    ] {
        let response = send(&service, on(method.clone(), "/")).await;
        assert_eq!(
            (response.status().as_u16(), &*quotas(&response)),
            (status, expected),
            "{method}"
        );
    }
    for _ in 0..3 {
        assert_exempt(&send(&service, on(Method::OPTIONS, "/")).await);
    }
}

#[tokio::test]
async fn a_closure_may_always_return_policies() {
    let policies = Policies::from(gcra("api", "1/m"));
    let service = limited(by(policies_fn(move |_| policies.clone())));
    assert_eq!(send(&service, request("alice")).await.status(), 200);
    assert_eq!(send(&service, request("alice")).await.status(), 429);
}

#[tokio::test]
async fn without_policies_nothing_is_limited() {
    let service = limited(by(None::<Policy>));
    assert_exempt(&send(&service, anonymous()).await);
    let service = limited(by(Some(gcra("api", "1/m"))));
    assert_eq!(send(&service, anonymous()).await.status(), 400);
}

/// An exempt request needs no key. A request without a key is not exempt, with any selector.
#[tokio::test]
async fn a_missing_key_does_not_exempt() {
    let free = || gcra("free", "1/m");
    let selectors: [RateLimitLayer<_, _>; 4] = [
        by(Tiers::new(free())
            .exempt("internal")
            .exempt_caller(Key::new("root"))),
        by(Live::new(free())),
        by(Routes::new(free()).exempt("/health").unwrap()),
        by(policies_fn(move |request| {
            (request.uri.path() != "/health").then(|| Policies::from(free()))
        })),
    ];
    for layer in selectors {
        assert_eq!(
            send(&limited(layer.clone()), anonymous()).await.status(),
            400
        );
        let layer = layer.on_missing_key(OnMissingKey::Allow);
        assert_exempt(&send(&limited(layer), anonymous()).await);
    }
    let mut internal = anonymous();
    internal.extensions_mut().insert(Tier::new("internal"));
    let tiers = Tiers::new(gcra("free", "1/m")).exempt("internal");
    assert_exempt(&send(&limited(by(tiers)), internal).await);
}

/// `OnMissingKey::Allow` never admits a request with a misconfigured or malformed key, with any
/// selector.
#[tokio::test]
async fn only_exempt_requests_hide_a_misconfiguration() {
    struct Nowhere;
    impl KeyExtractor for Nowhere {
        fn extract(&self, _: &Parts) -> Result<Key, MissingKey> {
            Err(MissingKey::misconfigured("no address"))
        }
    }
    let routes = Routes::new(gcra("api", "1/m")).exempt("/health").unwrap();
    let layer = RateLimitLayer::new(LocalStore::default(), Nowhere, routes)
        .on_missing_key(OnMissingKey::Allow);
    let service = limited(layer);
    assert_eq!(send(&service, on(Method::GET, "/")).await.status(), 500);
    assert_exempt(&send(&service, on(Method::GET, "/health")).await);
}

#[tokio::test]
async fn skipped_requests_pass_immediately() {
    let service = limited(layer("1/m").skip(|request| request.uri.path() == "/health"));
    for _ in 0..3 {
        let mut health = anonymous();
        *health.uri_mut() = "/health".parse().unwrap();
        assert_exempt(&send(&service, health).await);
        assert_exempt(&send(&service, on(Method::GET, "/health")).await);
    }
    assert_eq!(
        send(&service, request("alice")).await.status(),
        200,
        "nothing was counted"
    );
    assert_eq!(send(&service, request("alice")).await.status(), 429);
}

#[tokio::test]
async fn the_cost_may_depend_on_the_policies() {
    let tiers = Tiers::new(gcra("free", "10/m")).tier("pro", gcra("pro", "10/m"));
    let service = limited(
        by(tiers).cost_under(|_, policies| if policies[0].name() == "pro" { 1 } else { 4 }),
    );
    for (request, remaining) in [(request("alice"), 6), (of_tier("bob", "pro"), 9)] {
        assert_eq!(
            decision(&send(&service, request).await)
                .unwrap()
                .remaining(),
            remaining
        );
    }
}

#[tokio::test]
async fn a_tier_is_named_by_an_extension() {
    let tiers = Tiers::new(gcra("free", "1/m"))
        .tier("pro", gcra("pro", "2/m"))
        .exempt("internal");
    let service = limited(by(tiers));
    for (request, expected) in [
        (request("alice"), "\"free\";q=1"),
        (of_tier("alice", "free"), "\"free\";q=1"),
        (of_tier("alice", "gone"), "\"free\";q=1"),
        (of_tier("alice", ""), "\"free\";q=1"),
        (of_tier("alice", "pro"), "\"pro\";q=2"),
    ] {
        assert_eq!(quotas(&send(&service, request).await), expected);
    }
    assert_exempt(&send(&service, of_tier("alice", "internal")).await);
}

#[tokio::test]
async fn a_tier_is_named_by_a_closure() {
    #[derive(Clone)]
    struct User {
        plan: String,
    }
    let tiers = Tiers::new(gcra("free", "1/m"))
        .tier("pro", gcra("pro", "2/m"))
        .tier_by(|request| Some(&request.extensions.get::<User>()?.plan));
    let service = limited(by(tiers));
    let mut of_user = request("alice");
    of_user.extensions_mut().insert(User {
        plan: "pro".to_owned(),
    });
    assert_eq!(quotas(&send(&service, of_user).await), "\"pro\";q=2");
    assert_eq!(
        quotas(&send(&service, of_tier("alice", "pro")).await),
        "\"free\";q=1",
        "the closure alone counts"
    );
}

#[tokio::test]
async fn caller_overrides_win_over_tiers() {
    let many = (0..10_000).map(|i| {
        (
            Key::new(format!("tenant-{i}")),
            gcra("tenant", &format!("{}/m", i + 1)),
        )
    });
    let tiers = Tiers::new(gcra("free", "1/m"))
        .tier("pro", gcra("pro", "2/m"))
        .exempt("internal")
        .callers(many)
        .caller(Key::new("large"), gcra("large", "9/m"))
        .exempt_caller(Key::new("root"));
    let service = limited(by(tiers));
    for (request, expected) in [
        (request("tenant-41"), "\"tenant\";q=42"),
        (of_tier("tenant-9999", "pro"), "\"tenant\";q=10000"),
        (of_tier("large", "internal"), "\"large\";q=9"),
        (of_tier("tenant-10000", "pro"), "\"pro\";q=2"),
    ] {
        assert_eq!(quotas(&send(&service, request).await), expected);
    }
    assert_exempt(&send(&service, request("root")).await);
}

/// The example in the docs, with keys that are secret in Redis.
#[tokio::test]
async fn overrides_match_secret_keys() {
    const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
    let tiers = Tiers::new(gcra("free", "1/m")).caller(Key::secret("k-17"), gcra("large", "9/m"));
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        HeaderKey::new(API_KEY).unwrap(),
        tiers,
    );
    let mut request = anonymous();
    request
        .headers_mut()
        .insert(API_KEY, "k-17".parse().unwrap());
    assert_eq!(
        quotas(&send(&limited(layer), request).await),
        "\"large\";q=9"
    );
}

/// As in the docs of `Key::network`, for any length of the prefix.
#[tokio::test]
async fn overrides_match_network_keys() {
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    for (bits, named, same, other) in [
        (
            56,
            "2001:db8:1:200::",
            "2001:db8:1:2ff::7",
            "2001:db8:1:300::7",
        ),
        (128, "2001:db8::7", "2001:db8::7", "2001:db8::8"),
        (56, "192.0.2.7", "::ffff:192.0.2.7", "192.0.2.8"),
    ] {
        let own = Key::network(address(named), bits);
        let tiers = Tiers::new(gcra("free", "9/m")).caller(own, gcra("large", "99/m"));
        let client = ClientIp::peer().ipv6_prefix(bits).unwrap();
        let service = limited(RateLimitLayer::new(LocalStore::default(), client, tiers));
        for (from, expected) in [(same, "\"large\";q=99"), (other, "\"free\";q=9")] {
            let mut request = anonymous();
            request.extensions_mut().insert(address(from));
            assert_eq!(
                quotas(&send(&service, request).await),
                expected,
                "{from}/{bits}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn stored_policies_apply_next_and_keep_counts() {
    let windowed = |quota: &str| Policy::new("api", Strategy::SlidingLog, quota).unwrap();
    let live = Live::new(windowed("2/m"));
    let service = limited(by(live.clone()));
    for (status, expected) in [
        (200, "\"api\";q=2"),
        (200, "\"api\";q=2"),
        (429, "\"api\";q=2"),
    ] {
        let response = send(&service, request("alice")).await;
        assert_eq!(
            (response.status().as_u16(), &*quotas(&response)),
            (status, expected)
        );
    }
    live.replace(windowed("4/m"));
    let remaining = [Some(1), Some(0), None]
        .map(|remaining| (remaining.map_or(429, |_| 200), remaining.unwrap_or(0)));
    for (status, remaining) in remaining {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(
            decision(&response).unwrap().remaining(),
            remaining,
            "2 of 4 were used before"
        );
        assert_eq!(quotas(&response), "\"api\";q=4");
    }
    let refused: Result<(), ConfigError> =
        Policy::new("api", Strategy::Gcra, Quota::per_minute(0)).map(|policy| live.replace(policy));
    assert!(refused.is_err());
    assert_eq!(quotas(&send(&service, request("bob")).await), "\"api\";q=4");
}

/// A customer who is raised gets the rest of the larger plan, and one who is lowered waits until the larger one has
/// drained the difference.
#[tokio::test(start_paused = true)]
async fn a_changed_plan_keeps_what_was_used() {
    let minute = Duration::from_secs(60);
    for strategy in STRATEGIES
        .into_iter()
        .filter(|strategy| is_gradual(*strategy))
    {
        let plan = |quota: &str| Policy::new("api", strategy, quota).unwrap();
        let tiers = Tiers::new(plan("10/h")).tier("pro", plan("20/h"));
        let service = limited(by(tiers));
        let exhaust = async |tier| {
            for granted in 0.. {
                let response = send(&service, of_tier("alice", tier)).await;
                if response.status() == 429 {
                    return (granted, decision(&response).unwrap().retry_after());
                }
            }
            unreachable!("a bucket is limited")
        };
        assert_eq!(exhaust("free").await, (10, Some(6 * minute)), "{strategy}");
        // A unit of the larger plan drains in three minutes.
        assert_eq!(exhaust("pro").await, (10, Some(3 * minute)), "{strategy}");
        assert_eq!(exhaust("free").await, (0, Some(33 * minute)), "{strategy}");
        tokio::time::advance(33 * minute).await;
        assert_eq!(exhaust("free").await, (1, Some(6 * minute)), "{strategy}");
        // Of 20, 10 are used.
        assert_eq!(exhaust("pro").await, (10, Some(3 * minute)), "{strategy}");
    }
}

/// A denied caller who is raised waits at the rate of the larger plan from then on.
#[tokio::test(start_paused = true)]
async fn a_raised_plan_does_not_wait_for_the_old_one() {
    let plan = |quota: &str| Policy::new("api", Strategy::Gcra, quota).unwrap();
    let tiers = Tiers::new(plan("1/d")).tier("pro", plan("100/s burst 1"));
    let service = limited(by(tiers));
    assert_eq!(send(&service, request("alice")).await.status(), 200);
    let denied = send(&service, of_tier("alice", "pro")).await;
    let wait = Duration::from_millis(10);
    assert_eq!(decision(&denied).unwrap().retry_after(), Some(wait));
    tokio::time::advance(wait).await;
    let raised = send(&service, of_tier("alice", "pro")).await;
    assert_eq!(raised.status(), 200);
}

/// Each decision uses one list, old or new: all its policies are of the same edition, and so is the
/// response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_under_load_is_atomic() {
    const REQUESTS: u32 = 4_000;
    let edition = |limit: u32| {
        let policy = |name| Policy::new(name, Strategy::Gcra, Quota::per_day(limit)).unwrap();
        Policies::new([policy("one"), policy("two")]).unwrap()
    };
    let live = Live::new(edition(10_000));
    let service = Router::new()
        .route("/books", get(|| async { "hello" }))
        .layer(by(live.clone()));
    let done = Arc::new(AtomicBool::new(false));
    let reload = tokio::task::spawn_blocking({
        let done = done.clone();
        move || {
            for limit in (10_001..20_000).cycle().take_while(|_| !done.load(Relaxed)) {
                live.replace(edition(limit));
            }
        }
    });
    let tasks = (0..4).map(|_| {
        let service = service.clone();
        tokio::spawn(async move {
            for _ in 0..REQUESTS / 4 {
                let response = send(&service, request("alice")).await;
                assert_eq!(response.status(), 200);
                let decision = decision(&response).unwrap();
                let limit = decision.policies()[0].quota().limit();
                assert_eq!(decision.policies()[1].quota().limit(), limit);
                let expected = format!("\"one\";q={limit};w=86400, \"two\";q={limit};w=86400");
                assert_eq!(field(&response, "ratelimit-policy"), Some(&*expected));
            }
        })
    });
    futures_util::future::try_join_all(tasks).await.unwrap();
    done.store(true, Relaxed);
    reload.await.unwrap();
}

#[tokio::test]
async fn routes_go_by_path_and_method() {
    let named = |name: &str| gcra(name, "9/m");
    let routes = Routes::new(named("default"))
        .route("/users/{id}", named("user"))
        .and_then(|routes| routes.route("/users/me", named("me")))
        .and_then(|routes| routes.route("/files/{*path}", named("files")))
        .and_then(|routes| routes.method(Method::POST, "/users/{id}", named("post")))
        .and_then(|routes| routes.method(Method::GET, "/list", named("list")))
        .and_then(|routes| routes.method(Method::GET, "/both", named("get")))
        .and_then(|routes| routes.method(Method::HEAD, "/both", named("head")))
        .and_then(|routes| routes.exempt("/health"))
        .unwrap();
    let service = limited(by(routes));
    for (method, path, expected) in [
        (Method::GET, "/users/7", "user"),
        (Method::POST, "/users/7?q=1", "post"),
        (Method::GET, "/users/me", "me"),
        (Method::GET, "/files/a/b", "files"),
        (Method::GET, "/files/", "default"),
        (Method::GET, "/list", "list"),
        (Method::HEAD, "/list", "list"),
        (Method::POST, "/list", "default"),
        (Method::HEAD, "/both", "head"),
        (Method::GET, "/both", "get"),
        (Method::GET, "/users/7/more", "default"),
        (Method::GET, "/users/", "default"),
        (Method::OPTIONS, "*", "default"),
    ] {
        let response = send(&service, on(method.clone(), path)).await;
        assert_eq!(
            quotas(&response),
            format!("\"{expected}\";q=9"),
            "{method} {path}"
        );
    }
    assert_exempt(&send(&service, on(Method::GET, "/health")).await);
    let asterisk = Routes::new(named("default")).route("users", named("user"));
    assert!(
        asterisk
            .unwrap_err()
            .to_string()
            .contains("invalid route \"users\" (it does not begin with `/`)")
    );
}

#[test]
fn wrong_patterns_are_refused() {
    for pattern in ["/users/{name}", "/a{*rest}/b", "/{}", "/{a", ""] {
        let routes = Routes::new(gcra("a", "1/m"))
            .route("/users/{id}", gcra("b", "1/m"))
            .unwrap();
        let error = routes.route(pattern, gcra("c", "1/m")).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with(&format!("invalid route {pattern:?} (")),
            "{error}"
        );
    }
    let error = Routes::new(gcra("a", "1/m"))
        .route("POST /users", gcra("b", "1/m"))
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("for one method, use `.method(Method::POST, \"/users\", ..)`"),
        "{error}"
    );
}

/// A route may have any selector, and so may a [`Live`].
#[tokio::test]
async fn selectors_can_be_nested() {
    let tiers = Tiers::new(gcra("free", "1/m")).tier("pro", gcra("pro", "2/m"));
    let routes = Routes::new(gcra("api", "5/m"))
        .route("/export", tiers)
        .unwrap();
    let live = Live::new(routes);
    let service = limited(by(live.clone()));
    let mut export = on(Method::GET, "/export");
    export.extensions_mut().insert(Tier::new("pro"));
    assert_eq!(quotas(&send(&service, export.clone()).await), "\"pro\";q=2");
    live.replace(Routes::new(gcra("api", "5/m")));
    assert_eq!(quotas(&send(&service, export).await), "\"api\";q=5");
}

/// Also a user's own selector that uses other selectors.
#[tokio::test]
async fn a_selector_may_use_another() {
    struct ByPath;
    impl PolicySelector for ByPath {
        fn policies(&self, request: &Parts, key: Option<&Key>) -> Option<Policies> {
            let policy = gcra("api", "5/m");
            match request.uri.path() {
                "/policy" => policy.policies(request, key),
                "/list" => Policies::from(policy).policies(request, key),
                _ => Some(Arc::new(policy)).policies(request, key),
            }
        }
    }
    let service = limited(by(ByPath));
    for path in ["/policy", "/list", "/option"] {
        assert_eq!(
            quotas(&send(&service, on(Method::GET, path)).await),
            "\"api\";q=5",
            "{path}"
        );
    }
}

/// A layer over fixed policies finds a mistake at startup.
#[test]
fn fixed_policies_are_known_beforehand() {
    let policies = Policies::from(gcra("api", "5/m"));
    let selectors: [Box<dyn PolicySelector>; 3] = [
        Box::new(policies.clone()),
        Box::new(Some(policies.clone())),
        Box::new(Arc::new(policies.clone())),
    ];
    assert_eq!(
        selectors.map(|selector| selector.fixed() == Some(policies.clone())),
        [true; 3]
    );
}

/// This layer does not see requests end, so it ignores a policy of requests in flight. All other
/// policies apply.
#[tokio::test]
async fn reloaded_in_flight_policies_fail_no_request() {
    let uploads = || Policy::in_flight("uploads", 1).unwrap();
    let (alone, both) = (
        Policies::from(uploads()),
        Policies::new([gcra("api", "2/m"), uploads()]).unwrap(),
    );
    let live = Live::new(Policies::from(gcra("api", "9/m")));
    live.replace(both.clone());
    let routes = Routes::new(gcra("api", "9/m"))
        .route("/books", both.clone())
        .unwrap();
    let found = both.clone();
    let layers: [RateLimitLayer<_, _>; 4] = [
        by(live.clone()),
        by(Tiers::new(both.clone())),
        by(routes),
        by(policies_fn(move |_| found.clone())),
    ];
    for layer in layers {
        let problems = Problems::default();
        let service = limited(layer.observer(problems.clone()));
        for status in [200, 200, 429, 429] {
            let response = send(&service, request("alice")).await;
            assert_eq!(
                (response.status().as_u16(), &*quotas(&response)),
                (status, "\"api\";q=2")
            );
        }
        let problems = problems.0.lock().unwrap();
        assert!(
            problems.len() == 1 && problems[0].contains("`.until_body_end()`"),
            "{problems:?}"
        );
    }

    let service = limited(by(live.clone()));
    live.replace(alone);
    assert_exempt(&send(&service, request("alice")).await);
    live.replace(both);
    assert_eq!(
        quotas(&send(&service, request("alice")).await),
        "\"api\";q=2",
        "the next reload works as usual"
    );

    // Also in a shadow.
    let tried = Tiers::new(Policies::new([gcra("tried", "1/m"), uploads()]).unwrap());
    let service = limited(by(gcra("api", "9/m")).shadow(tried));
    for allowed in [true, false] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), 200);
        assert_eq!(
            response.extensions().get::<DryRun>().unwrap().is_allowed(),
            allowed
        );
    }
}

#[tokio::test]
async fn another_layer_may_count_exempt_requests() {
    let inner = by(None::<Policies>);
    let outer = RateLimitLayer::new(LocalStore::default(), Global, gcra("all", "1/m"));
    let service = tower::Layer::layer(&outer, limited(inner));
    assert_eq!(quotas(&send(&service, anonymous()).await), "\"all\";q=1");
    assert_eq!(send(&service, anonymous()).await.status(), 429);
}

#[cfg(feature = "axum")]
mod with_axum {
    use tower::util::MapRequest;

    use super::*;

    fn routes() -> Routes {
        let named = |name: &str| gcra(name, "99/m");
        Routes::new(named("default"))
            .route("/users/{id}", named("user"))
            .and_then(|routes| routes.route("/api/items/{id}", named("item")))
            .and_then(|routes| routes.route("/api/{*rest}", named("api")))
            .and_then(|routes| routes.route("/exact", named("exact")))
            .unwrap()
    }

    async fn assert_told(app: &Router, expected: &[(&str, &str)]) {
        for (path, name) in expected {
            let response = send(app, on(Method::GET, path)).await;
            assert_eq!(quotas(&response), format!("\"{name}\";q=99"), "{path}");
        }
    }

    fn nested() -> Router {
        Router::new()
            .route("/items/{id}", get(|| async { "item" }))
            .route("/more", get(|| async { "more" }))
    }

    fn router() -> Router {
        Router::new()
            .route("/users/{id}", get(|| async { "user" }))
            .route("/exact/", get(|| async { "slash" }))
            .nest("/api", nested())
            .nest_service("/api/service", nested())
            .fallback(|| async { "nothing" })
    }

    const EXPECTED: [(&str, &str); 7] = [
        ("/users/7", "user"),
        ("/api/items/7", "item"),
        ("/api/more", "api"),
        ("/api/service/items/7", "api"),
        ("/api/nowhere", "api"),
        ("/exact/", "exact"),
        ("/nowhere", "default"),
    ];

    #[tokio::test]
    async fn router_layers_see_full_templates() {
        assert_told(&router().layer(by(routes())), &EXPECTED).await;
    }

    #[tokio::test]
    async fn a_layer_around_a_router_sees_paths() {
        let app = tower::Layer::layer(&by(routes()), router());
        let app = Router::new().fallback_service(app);
        assert_told(&app, &EXPECTED).await;
    }

    #[tokio::test]
    async fn nested_router_layers_see_full_paths() {
        let nested = nested()
            .fallback(|| async { "nothing" })
            .layer(by(routes()));
        let app = Router::new().nest("/api", nested);
        assert_told(
            &app,
            &[
                ("/api/items/7", "item"),
                ("/api/more", "api"),
                ("/api/nowhere", "api"),
            ],
        )
        .await;
    }

    #[tokio::test]
    async fn patterns_without_the_path_of_their_nest_are_suspected() {
        let problems = async |pattern: &str, is_nested: bool, paths: &[&str]| {
            let notes = Problems::default();
            let routes = Routes::new(gcra("default", "99/m"))
                .route(pattern, gcra("more", "99/m"))
                .unwrap();
            let limits = RateLimitLayer::new(LocalStore::default(), Global, routes);
            let limits = limits.observer(notes.clone());
            let app = match is_nested {
                true => Router::new().nest("/api", nested().layer(limits)),
                false => Router::new().nest("/api", nested()).layer(limits),
            };
            for path in paths {
                send(&app, on(Method::GET, path)).await;
            }
            notes.0.lock().unwrap().clone()
        };
        let paths = ["/api/items/7", "/api/more", "/api/more"];
        let seen = problems("/more", true, &paths).await;
        let [report] = &seen[..] else {
            panic!("it is reported once: {seen:?}");
        };
        assert!(
            report.starts_with("suspected: a pattern of the `Routes` matches a path inside of the router that is nested at \"/api\", but")
                && report.ends_with("#nested-pattern)"),
            "{report}"
        );
        assert_eq!(problems("/api/more", true, &paths).await, [""; 0]);
        assert_eq!(problems("/more", false, &paths).await, [""; 0]);
        assert_eq!(problems("/none", true, &paths).await, [""; 0]);
    }

    /// In a pattern, `{{` is a literal brace. A template is matched against patterns as if it were
    /// a path.
    #[tokio::test]
    async fn escaped_braces_match_in_templates() {
        let pattern = "/{{x}}/{id}";
        let routes = Routes::new(gcra("default", "99/m"))
            .route(pattern, gcra("braces", "99/m"))
            .unwrap();
        let app = Router::new()
            .route(pattern, get(|| async { "braces" }))
            .layer(by(routes));
        assert_told(&app, &[("/{x}/7", "braces"), ("/x/7", "default")]).await;
    }

    /// Checks the templates that axum sets. If this test fails, a limitation in the docs of
    /// `Routes` has been lifted.
    #[tokio::test]
    async fn routers_within_services_see_partial_templates() {
        let limited = || nested().layer(by(routes()));
        let service = MapRequest::new(
            Router::new().nest("/api", limited()),
            |request: Request<_>| request,
        );
        assert_told(
            &Router::new().route_service("/{*rest}", service),
            &[("/api/items/7", "default")],
        )
        .await;
        let app = Router::new().nest("/api", Router::new().fallback_service(limited()));
        assert_told(&app, &[("/api/items/7", "default")]).await;
    }

    #[tokio::test]
    async fn a_rewritten_path_counts_as_its_route() {
        let rewriting = MapRequest::new(router().layer(by(routes())), |mut request: Request<_>| {
            *request.uri_mut() = "/users/7".parse().unwrap();
            request
        });
        // The outer router records the original path.
        assert_told(
            &Router::new().fallback_service(rewriting),
            &[("/old-users/7", "user")],
        )
        .await;
    }

    /// All paths of a user's page share one limit, for all users.
    #[tokio::test]
    async fn template_values_share_one_count() {
        let routes = Routes::new(gcra("api", "9/m"))
            .route("/users/{id}", gcra("user", "2/m"))
            .unwrap();
        let app = router().layer(by(routes));
        for (path, status) in [("/users/1", 200), ("/users/2", 200), ("/users/3", 429)] {
            assert_eq!(
                send(&app, on(Method::GET, path)).await.status(),
                status,
                "{path}"
            );
        }
    }
}
