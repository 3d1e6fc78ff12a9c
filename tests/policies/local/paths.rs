//! The pattern of `Routes` that a request is under, compared with the route that a real axum
//! `Router` matches.

use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::routing::any;
use axum::{Router, body::Body};
use http::{Method, Request, Response, Uri};
use tower::Layer;
use tower::util::MapRequest;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::select::Routes;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policies, RateLimitLayer};

use crate::mocks::*;

fn layer(routes: Routes) -> RateLimitLayer<LocalStore, Global> {
    RateLimitLayer::new(LocalStore::default(), Global, routes)
}

/// Paths below `/files`, and `/files`, are under `files`; `/login` is under `login`; all others
/// under `default`.
fn routes() -> Result<Routes, ConfigError> {
    let named = |name| gcra(name, "9999/h");
    Routes::new(named("default"))
        .route("/files/{*path}", named("files"))?
        .route("/login", named("login"))
}

fn router() -> Router {
    Router::new()
        .route("/files/{*path}", any(ok))
        .route("/login", any(ok))
        .fallback(ok)
}

async fn ok() {}

/// The name of the policy in the response's fields, or `none`.
fn name<B>(response: &Response<B>) -> String {
    let policies =
        field(response, "ratelimit-policy").map(|policies| policies.split('"').nth(1).unwrap());
    policies.unwrap_or("none").to_owned()
}

async fn under(app: &Router, method: Method, target: &str) -> String {
    let request = Request::builder()
        .method(method)
        .uri(target)
        .body(Body::empty())
        .unwrap();
    name(&send(app, request).await)
}

/// One layer on the router, where axum sets the template, and one around it.
fn both(routes: impl Fn() -> Routes, router: impl Fn() -> Router) -> [Router; 2] {
    let around = Layer::layer(&layer(routes()), router());
    [
        router().layer(layer(routes())),
        Router::new().fallback_service(around),
    ]
}

async fn assert_under(apps: &[Router], expected: &[(&str, &str)]) {
    for (place, app) in ["on the router", "around it"].iter().zip(apps) {
        for (target, name) in expected {
            assert_eq!(
                under(app, Method::GET, target).await,
                *name,
                "{target}, {place}"
            );
        }
    }
}

#[tokio::test]
async fn a_more_exact_pattern_wins() {
    let routes = || {
        routes()
            .unwrap()
            .route("/files/secret.bin", gcra("secret", "9/h"))
            .unwrap()
    };
    let expected = [
        ("/files/secret.bin", "secret"),
        ("/files/a", "files"),
        ("/files/secret.bin/a", "files"),
    ];
    assert_under(&both(routes, router), &expected).await;
}

/// Tonic's router has one template for all methods of a service.
#[tokio::test]
async fn one_grpc_method_has_its_own_limit() {
    let routes = || {
        routes()
            .unwrap()
            .route("/shop.Orders/Export", gcra("export", "9/h"))
            .unwrap()
    };
    let router = || Router::new().route("/shop.Orders/{*rest}", any(ok));
    let expected = [
        ("/shop.Orders/Export", "export"),
        ("/shop.Orders/List", "default"),
    ];
    assert_under(&both(routes, router), &expected).await;
}

#[tokio::test]
async fn single_segment_patterns_do_not_match_wildcards() {
    let routes = || routes().unwrap().exempt("/public/{file}").unwrap();
    let router = || router().route("/public/{*path}", any(ok));
    let expected = [
        ("/public/a.csv", "none"),
        ("/public/a/b.csv", "default"),
        ("/public/a%2Fb.csv", "default"),
    ];
    assert_under(&both(routes, router), &expected).await;
}

/// Paths that another server, or an inner layer, could read as a limited path.
#[tokio::test]
async fn ambiguous_paths_are_not_exempt() {
    let routes = || {
        routes()
            .unwrap()
            .exempt("/static/{*path}")
            .unwrap()
            .exempt("/{page}")
            .unwrap()
    };
    let router = || {
        router()
            .route("/static/{*path}", any(ok))
            .route("/{page}", any(ok))
    };
    let expected = [
        ("/static/a.css", "none"),
        ("/static/a%20b.css", "none"),
        ("/static/a%2fb.css", "none"),
        ("/static/a//b.css", "none"),
        ("/static/a/../b.css", "default"),
        ("/static/a%2fb/../../login", "default"),
        ("/static/a%2fb/%2e%2e/%2e%2e/login", "default"),
        ("/static/a%5cb/../../login", "default"),
        ("/static/;/..;/../login", "login"),
        ("/static/caf%C3%A9.css?a=../b", "none"),
        ("/static/%FF", "none"),
        ("/static/100%", "none"),
        ("/about", "none"),
        ("http://host/about", "none"),
        ("/static/../login", "login"),
        ("/static/./../login", "login"),
        ("/static//../login", "login"),
        ("/static/../../login", "login"),
        ("/static/%2e%2e/login", "login"),
        ("/static/%2E./login", "login"),
        ("/static/..%2Flogin", "login"),
        ("/static/..%5clogin", "login"),
        ("/static/%252e%252e/login", "login"),
        ("/static/%25252e./login", "login"),
        ("/static/..;v=1/login", "login"),
        ("/static/..%3bv/login", "login"),
        ("/static/../files/a", "files"),
        ("/static/../a/b", "default"),
        ("/static/%2e%2e%2fa%2fb", "default"),
        ("http://host/static/../login", "login"),
        ("/%6cogin", "login"),
        ("/%6Cogi%256e", "login"),
        ("/login;v=1", "login"),
        ("/login%3Fv=1", "login"),
        ("/login%23v", "login"),
        ("/login%00.css", "login"),
        ("/;/login", "login"),
        ("//login", "login"),
        ("/LOGIN", "login"),
    ];
    assert_under(&both(routes, router), &expected).await;

    // All paths without a pattern are exempt.
    let named = |name| gcra(name, "9999/h");
    let listed = || {
        Routes::new(None::<Policies>)
            .route("/login", named("login"))
            .unwrap()
    };
    for target in [
        "/login",
        "/login/",
        "/%6cogin/",
        "//login",
        "/./login",
        "/a/../login",
        "/%6cogin",
        "/login;a",
        "/LOGIN",
        "http://host/login",
    ] {
        let [_, around] = both(listed, router);
        assert_eq!(
            under(&around, Method::GET, target).await,
            "login",
            "{target}"
        );
    }
    for target in ["/", "/login/a", "/a%2flogin"] {
        let [_, around] = both(listed, router);
        assert_eq!(
            under(&around, Method::GET, target).await,
            "none",
            "{target}"
        );
    }
}

/// A handler behind a catch-all, a file server and a proxied server decode the path.
#[tokio::test]
async fn no_spelling_avoids_a_limit() {
    let routes = || {
        routes()
            .and_then(|routes| routes.exempt("/health"))
            .and_then(|routes| routes.method(Method::POST, "/export", gcra("export", "9/h")))
            .unwrap()
    };
    let router = || Router::new().route("/{*path}", any(ok)).fallback(ok);
    let expected = [
        ("/login", "login"),
        ("/%6cogin", "login"),
        ("/%256cogin", "login"),
        ("/login/", "login"),
        ("/login//", "login"),
        ("//login", "login"),
        ("/./login", "login"),
        ("/a/../login", "login"),
        ("/a/..%2Flogin", "login"),
        ("/login;v=1", "login"),
        ("/LOGIN", "login"),
        ("/%4Cogin/", "login"),
        ("/login.", "login"),
        ("/files/a", "files"),
        ("/%66iles/a", "files"),
        ("/files%2Fa", "files"),
        ("//files/a", "files"),
        ("/a%5c..%5cfiles/a", "files"),
        // Another path, in any spelling.
        ("/other", "default"),
        ("/%6fther", "default"),
        ("/login/a", "default"),
        ("/login%2Fa", "default"),
        // Only the plain spelling is exempt.
        ("/health", "none"),
        ("/%68ealth", "default"),
        // A pattern that matches the raw path takes precedence.
        ("/files/..%2Flogin", "files"),
    ];
    let apps = both(routes, router);
    assert_under(&apps, &expected).await;
    for app in &apps {
        for path in ["/export", "/%65xport", "/export/"] {
            assert_eq!(under(app, Method::POST, path).await, "export", "{path}");
            assert_eq!(under(app, Method::GET, path).await, "default", "{path}");
        }
    }
}

/// Express, IIS and file servers of Windows and macOS ignore letter case.
#[tokio::test]
async fn limits_hold_in_every_letter_case() {
    let named = |name| gcra(name, "9999/h");
    let routes = || {
        Routes::new(named("api"))
            .method(Method::POST, "/login", named("login"))?
            .route("/shop/{id}/Export", named("export"))?
            .route("/caf%C3%A9/menu", named("menu"))?
            .route("/\u{c9}cole", named("school"))?
            .route("/\u{3bf}\u{3b4}\u{3c2}", named("street"))?
            .route("/\u{39f}\u{3a3}/{id}", named("bone"))?
            .exempt("/public/{*path}")?
            .route("/public/export", named("public"))?
            .route("/public/users/{id}/export", named("user"))?
            .exempt("/public/LOGO")?
            .route("/files/{*path}", named("files"))?
            .exempt("/files/logo")?
            .exempt("/Health/{probe}")
    };
    let router = || Router::new().route("/{*path}", any(ok)).fallback(ok);
    let apps = both(|| routes().unwrap(), router);
    for spelling in 0_u32..32 {
        let letters = "login".chars().enumerate();
        let login: String = letters
            .map(|(at, letter)| match spelling >> at & 1 {
                0 => letter,
                _ => letter.to_ascii_uppercase(),
            })
            .collect();
        for app in &apps {
            let path = format!("/{login}");
            assert_eq!(under(app, Method::POST, &path).await, "login", "{path}");
            assert_eq!(under(app, Method::GET, &path).await, "api", "{path}");
        }
    }
    let expected = [
        ("/shop/7/Export", "export"),
        ("/shop/7/export", "export"),
        ("/SHOP/7/export/", "export"),
        ("/CAF%C3%89/Menu", "menu"),
        ("/caf%c3%a9/menu", "menu"),
        ("/%C3%89COLE", "school"),
        ("/\u{e9}cole", "school"),
        // A sigma has one form in upper case, and two in lower case.
        ("/\u{39f}\u{394}\u{3a3}", "street"),
        ("/\u{3bf}\u{3b4}\u{3c3}", "street"),
        ("/%CE%9F%CE%94%CE%A3", "street"),
        ("/\u{3bf}\u{3c3}/7", "bone"),
        ("/\u{3bf}\u{3c2}/7", "bone"),
        ("/public/export", "public"),
        ("/public/Export", "public"),
        ("/public/%45xport", "public"),
        ("/public/Export/", "public"),
        ("/public/users/1/Export", "user"),
        ("/PUBLIC/users/1/Export", "user"),
        // Exemptions are exact.
        ("/public/a", "none"),
        ("/public/A", "none"),
        ("/Public/a", "api"),
        ("/public/LOGO", "none"),
        ("/files/logo", "none"),
        ("/files/LOGO", "files"),
        ("/FILES/LOGO", "files"),
        ("/Health/live", "none"),
        ("/Health/LIVE", "none"),
        ("/health/live", "api"),
    ];
    assert_under(&apps, &expected).await;

    // A catch-all is less specific than the exemption.
    let routes = || {
        Routes::new(named("api"))
            .exempt("/Health/{probe}")?
            .method(Method::POST, "/health/{*probe}", named("probe"))?
            .route("/{*path}", named("all"))
    };
    for app in both(|| routes().unwrap(), router) {
        assert_eq!(under(&app, Method::GET, "/Health/live").await, "none");
        assert_eq!(under(&app, Method::GET, "/health/live").await, "all");
        assert_eq!(under(&app, Method::POST, "/Health/live").await, "probe");
    }
}

/// For a server that minds case, `/users/Export` is a user.
#[tokio::test]
async fn a_limit_of_the_raw_path_stays() {
    let named = |name| gcra(name, "9999/h");
    let routes = || {
        Routes::new(named("api"))
            .route("/users/{id}", named("user"))?
            .route("/users/export", named("export"))?
            .method(Method::POST, "/login", named("login"))?
            .method(Method::HEAD, "/report", named("head"))?
            .method(Method::GET, "/Report", named("get"))?
            .route("/{page}", named("page"))?
            .route("/pages/{*rest}", named("pages"))?
            .exempt("/pages/logo")
    };
    let router = || Router::new().route("/{*path}", any(ok)).fallback(ok);
    let minding = both(|| routes().unwrap(), router);
    let ignoring = both(|| routes().unwrap().ignore_case(), router);
    for (method, path, minded, ignored) in [
        (Method::GET, "/users/export", "export", "export"),
        (Method::GET, "/users/Export", "user", "export"),
        (Method::GET, "/Users/Export", "export", "export"),
        (Method::GET, "/USERS/alice", "user", "user"),
        (Method::POST, "/login", "login", "login"),
        (Method::POST, "/Login", "page", "login"),
        (Method::POST, "/Login/", "page", "login"),
        (Method::GET, "/login", "page", "page"),
        (Method::HEAD, "/Report", "get", "head"),
        (Method::GET, "/report", "page", "get"),
        (Method::GET, "/pages/logo", "none", "none"),
        (Method::GET, "/pages/Logo", "pages", "pages"),
        (Method::GET, "/Pages/logo", "pages", "pages"),
        (Method::GET, "/%6Cogin", "page", "page"),
        (Method::GET, "/a/b", "api", "api"),
    ] {
        for (apps, expected) in [(&minding, minded), (&ignoring, ignored)] {
            for app in apps {
                let name = under(app, method.clone(), path).await;
                assert_eq!(name, expected, "{method} {path}");
            }
        }
    }
}

/// Each counts for its own spelling, and the first added for all others.
#[tokio::test]
async fn patterns_may_differ_in_letter_case() {
    let named = |name| gcra(name, "9999/h");
    let routes = || {
        Routes::new(named("api"))
            .route("/Login", named("first"))?
            .route("/login", named("second"))?
            .route("/Users/{id}", named("id"))?
            .route("/users/{name}", named("name"))?
            .route("/Files/{id}", named("file"))?
            .route("/files/{*rest}", named("files"))?
            .route("/Public/{*rest}", named("public"))?
            .exempt("/public/{*path}")
    };
    let router = || Router::new().route("/{*path}", any(ok)).fallback(ok);
    let expected = [
        ("/Login", "first"),
        ("/login", "second"),
        ("/LOGIN", "first"),
        ("/Users/7", "id"),
        ("/users/7", "name"),
        ("/USERS/7", "id"),
        ("/Files/7", "file"),
        ("/files/7", "files"),
        ("/FILES/7", "file"),
        ("/files/7/8", "files"),
        ("/FILES/7/8", "api"),
        ("/Public/a", "public"),
        ("/public/a", "none"),
        ("/PUBLIC/a", "public"),
    ];
    assert_under(&both(|| routes().unwrap(), router), &expected).await;
}

/// Windows drops them.
#[tokio::test]
async fn dots_and_blanks_avoid_no_limit() {
    let routes = || {
        routes()
            .and_then(|routes| routes.exempt("/static/{*path}"))
            .and_then(|routes| routes.route("/static/export", gcra("export", "9/h")))
            .unwrap()
    };
    let router = || Router::new().route("/{*path}", any(ok)).fallback(ok);
    let expected = [
        ("/login.", "login"),
        ("/login..", "login"),
        ("/login%20", "login"),
        ("/login.%20.", "login"),
        ("/login./", "login"),
        ("/LOGIN%2e", "login"),
        ("/login.;v=1", "login"),
        ("/login%20%00.css", "login"),
        ("/files./a", "files"),
        ("/static/export.", "export"),
        ("/static/export%20/", "export"),
        ("/static/..%20/login", "login"),
        ("/static/a.", "none"),
        ("/static/a./b", "none"),
        ("/static/...", "none"),
        ("/static/.../export", "none"),
        ("/login%09", "default"),
        ("/login.a", "default"),
        ("/.login", "default"),
    ];
    assert_under(&both(routes, router), &expected).await;
    let error = routes().exempt("/v1./{id}").unwrap_err().to_string();
    assert!(error.contains("ends with a dot"), "{error}");
}

/// In any letter case, a limited path stays limited; for a server that ignores case, by the same pattern.
#[tokio::test]
async fn letter_case_escapes_no_limit() {
    let mut random = fastrand::Rng::with_seed(29);
    let mut limited = 0;
    for round in 0..200 {
        let patterns = some(&mut random);
        let exempt: Vec<usize> = (0..patterns.len()).filter(|_| random.bool()).collect();
        let around = |routes: Routes| {
            let service = Layer::layer(&layer(routes), Router::new().fallback(ok));
            Router::new().fallback_service(service)
        };
        let minding = around(exempting(&patterns, &exempt).unwrap());
        let ignoring = around(exempting(&patterns, &exempt).unwrap().ignore_case());
        for _ in 0..20 {
            let path: String = (0..random.usize(1..5))
                .map(|_| format!("/{}", random.choice(SEGMENTS).unwrap()))
                .collect();
            let mut other_case = path.clone();
            if !path.contains('%') {
                other_case = path
                    .chars()
                    .map(|letter| match random.bool() {
                        true => letter.to_ascii_uppercase(),
                        false => letter,
                    })
                    .collect();
            }
            if path.parse::<Uri>().is_err() {
                continue;
            }
            let expected = under(&minding, Method::GET, &path).await;
            let context =
                format!("{round}: {path}, {other_case}, {patterns:?}, exempt: {exempt:?}");
            let name = under(&ignoring, Method::GET, &path).await;
            assert_eq!(name, expected, "{context}");
            if !expected.starts_with('p') {
                continue;
            }
            limited += 1;
            let minded = under(&minding, Method::GET, &other_case).await;
            assert_ne!(minded, "none", "{context}");
            let ignored = under(&ignoring, Method::GET, &other_case).await;
            assert_eq!(ignored, expected, "{context}");
        }
    }
    assert!(limited > 500, "{limited}");
}

/// Even if a lenient server would read it differently.
#[tokio::test]
async fn a_literally_named_path_is_exempt() {
    let paths = [
        "/caf%C3%A9",
        "/a;v=1",
        "/a//b",
        "/a/./b",
        "/100%25",
        "/.well-known/a",
    ];
    let routes = || {
        let named = paths[..5]
            .iter()
            .try_fold(routes().unwrap(), |routes, path| routes.exempt(path));
        named.unwrap().exempt("/.well-known/{*path}").unwrap()
    };
    let expected = paths.map(|path| (path, "none"));
    assert_under(&both(routes, router), &expected).await;
    assert_under(
        &both(routes, router),
        &[
            ("/caf\u{e9}", "default"),
            ("/a", "default"),
            ("/a/b", "default"),
        ],
    )
    .await;
    for pattern in ["/caf%C3%A9/{id}", "/{id}/a;v=1", "//a/{*path}", "/../{id}"] {
        assert!(
            routes()
                .exempt(pattern)
                .unwrap_err()
                .to_string()
                .contains("exempts nothing"),
            "{pattern}"
        );
    }
}

/// A path with a trailing slash is a different path, and middleware often removes the slash.
#[tokio::test]
async fn a_slash_at_the_end_exempts_nothing() {
    let named = |name| gcra(name, "9999/h");
    let routes = || {
        routes()
            .unwrap()
            .exempt("/static/")
            .unwrap()
            .exempt("/a/{*all}")
            .unwrap()
    };
    let routes = || {
        routes()
            .route("/a/b", named("b"))
            .unwrap()
            .route("/a/c/", named("c"))
            .unwrap()
    };
    let router = || {
        router()
            .route("/a/{*all}", any(ok))
            .route("/static/", any(ok))
    };
    let expected = [
        ("/a/b", "b"),
        ("/a/b/", "b"),
        ("/a/b//", "b"),
        ("/a/c", "c"),
        ("/a/d/", "none"),
        ("/static/", "none"),
        ("/static", "default"),
        ("/login/", "login"),
    ];
    assert_under(&both(routes, router), &expected).await;
}

/// A catch-all pattern matches a path with and without a slash at the end, so it must not limit a path that a more
/// specific pattern exempts. Any other pattern for the other spelling does.
#[tokio::test]
async fn a_catch_all_limits_no_exempt_path() {
    let named = |name| gcra(name, "9999/h");
    let router = || Router::new().route("/{*path}", any(ok));
    let limited = || {
        Routes::new(named("default"))
            .exempt("/health/{probe}")?
            .exempt("/users/{id}/avatar/")?
            .exempt("/posts/{id}")?
            .route("/posts/{id}/", named("post"))?
            .route("/{*path}", named("all"))
    };
    let expected = [
        ("/health/live", "none"),
        ("/health/%6cive", "none"),
        ("/users/7/avatar/", "none"),
        ("/health/live/", "all"),
        ("/users/7/avatar", "all"),
        ("/health/..%2flive", "all"),
        ("/health/..%2fhealth%2flive", "all"),
        ("/health/a/../live", "all"),
        ("//health/live", "all"),
        ("/posts/7", "post"),
        ("/posts/%37", "post"),
        ("/posts/7/", "post"),
    ];
    assert_under(&both(|| limited().unwrap(), router), &expected).await;
    let exempt = || {
        Routes::new(named("default"))
            .exempt("/{*path}")?
            .route("/users/{id}", named("user"))?
            .route("/users/{id}/posts", named("posts"))
    };
    let expected = [
        ("/users", "none"),
        ("/users/7/avatar", "none"),
        ("/users/7", "user"),
        ("/users/7/", "user"),
        ("/users//7", "user"),
        ("/users/a/../7/", "user"),
        ("/users/7/posts", "posts"),
        ("/users/7/posts/", "posts"),
        ("/users/%37/posts/", "posts"),
    ];
    assert_under(&both(|| exempt().unwrap(), router), &expected).await;
}

/// A path of 60 KB with the maximum number of nested escapes.
#[tokio::test]
async fn long_paths_take_linear_time() {
    let [on_router, _] = both(
        || routes().unwrap().exempt("/static/{*path}").unwrap(),
        || router().route("/static/{*path}", any(ok)),
    );
    let path = format!("/static/%{}2e%2e/login", "25".repeat(29_000));
    assert_eq!(under(&on_router, Method::GET, &path).await, "login");
}

/// RFC 8441: a WebSocket over HTTP/2 is a `CONNECT` with a path.
#[tokio::test]
async fn extended_connect_counts_as_get() {
    let routes = || {
        routes()
            .unwrap()
            .method(Method::GET, "/socket", gcra("socket", "9/h"))
            .unwrap()
    };
    for app in both(routes, || router().route("/socket", any(ok))) {
        assert_eq!(under(&app, Method::CONNECT, "/socket").await, "socket");
        assert_eq!(under(&app, Method::GET, "/socket").await, "socket");
        assert_eq!(under(&app, Method::POST, "/socket").await, "default");
        assert_eq!(under(&app, Method::CONNECT, "host:443").await, "default");
        assert_eq!(under(&app, Method::OPTIONS, "*").await, "default");
    }
}

fn set_path(mut request: Request<Body>, path: &str) -> Request<Body> {
    *request.uri_mut() = path.parse().unwrap();
    request
}

/// If the path is rewritten after axum has matched it, at least the route's own pattern applies.
#[tokio::test]
async fn rewritten_paths_cannot_bypass_a_template() {
    let routes = || {
        let named = |name| gcra(name, "9999/h");
        routes()?
            .route("/old/{*path}", named("old"))?
            .exempt("/health")?
            .route("/old/admin", named("admin"))
    };
    let router = Router::new()
        .route("/old/{*path}", any(ok))
        .layer(layer(routes().unwrap()));
    let app = router.layer(MapRequest::<(), _>::layer(|request: Request<Body>| {
        let path = request.uri().path().trim_start_matches("/old").to_owned();
        set_path(request, &path)
    }));
    for (path, name) in [
        ("/old/health", "old"),
        ("/old/login", "old"),
        ("/old/admin", "admin"),
    ] {
        assert_eq!(under(&app, Method::GET, path).await, name, "{path}");
    }
}

/// If the path is rewritten outside the router, the new path counts.
#[tokio::test]
async fn an_alias_counts_as_its_target() {
    let routes = routes()
        .unwrap()
        .route("/files/secret.bin", gcra("secret", "9/h"))
        .unwrap();
    let routes = routes.exempt("/alias/{*path}").unwrap();
    let alias = MapRequest::new(router().layer(layer(routes)), |request: Request<Body>| {
        let path = request.uri().path().replace("/alias/", "/files/");
        set_path(request, path.trim_end_matches('/'))
    });
    let app = Router::new().fallback_service(alias);
    for (path, name) in [
        ("/alias/secret.bin", "secret"),
        ("/files/secret.bin/", "secret"),
        ("/alias/a", "files"),
        ("/alias/", "default"),
    ] {
        assert_eq!(under(&app, Method::GET, path).await, name, "{path}");
    }
}

/// The template counts then, which is no path: a pattern of one segment must not exempt all paths
/// of the template.
#[tokio::test]
async fn nested_router_aliases_count_by_template() {
    let routes = || {
        routes()
            .unwrap()
            .exempt("/public/{file}")
            .unwrap()
            .exempt("/alias/{*path}")
            .unwrap()
    };
    let nested = || {
        Router::new()
            .route("/{*path}", any(ok))
            .layer(layer(routes()))
    };
    let router = Router::new()
        .nest("/files", nested())
        .nest("/public", nested());
    let alias = MapRequest::new(router, |request: Request<Body>| {
        let path = request.uri().path().replace("/alias", "");
        set_path(request, &path)
    });
    let app = Router::new().fallback_service(alias);
    for (path, name) in [
        ("/alias/files/a", "files"),
        ("/alias/public/a", "default"),
        ("/alias/public/a/b", "default"),
        ("/files/a", "files"),
        ("/public/a", "none"),
        ("/public/a/b", "default"),
    ] {
        assert_eq!(under(&app, Method::GET, path).await, name, "{path}");
    }
}

#[test]
fn unmatchable_patterns_are_refused() {
    let many = "/{a}".repeat(40);
    let named = |name: &str| format!("/{{{name}}}");
    for pattern in [
        "/users/:id",
        "/:id",
        "/files/*path",
        "/*",
        "/a?b=c",
        "/a#b",
        "/a b",
        "/ ",
        "/a\tb",
        "/a<b>",
        "/a\u{7f}",
        "http://host/a",
        "*",
        "a",
        "",
        &many,
    ] {
        match routes().unwrap().route(pattern, gcra("a", "1/m")) {
            Err(error) => {
                // A URL may contain a password.
                let shown = pattern.replace("://host/a", "://\u{2026}");
                assert!(
                    error
                        .to_string()
                        .starts_with(&format!("invalid route {shown:?} (")),
                    "{error}"
                )
            }
            Ok(routes) => panic!("{pattern:?} is taken: {routes:?}"),
        }
    }
    for pattern in [
        "/",
        "/a/",
        "//a",
        "/caf\u{e9}",
        "/a%20b",
        "/{{a}}",
        "/a:b",
        "/a*",
        &named("a_b"),
        &"/{a}".repeat(20),
    ] {
        assert!(
            routes().unwrap().route(pattern, gcra("a", "1/m")).is_ok(),
            "{pattern}"
        );
    }
}

/// Patterns may come from a file.
#[test]
fn no_pattern_panics() {
    const CHARACTERS: [&str; 14] = [
        "/", "/", "{", "}", "{a}", "{*a}", "{{", "}}", "*", ":", "a", "b", "%", "\u{e9}",
    ];
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..4_000 {
        let mut taken = routes().unwrap();
        for _ in 0..6 {
            let pattern: String = (0..random.usize(..10))
                .map(|_| *random.choice(&CHARACTERS).unwrap())
                .collect();
            let pattern = format!("/{pattern}");
            let made = catch_unwind(AssertUnwindSafe(move || {
                taken.route(&pattern, gcra("a", "1/m")).map_err(|_| pattern)
            }));
            match made.expect("no panic") {
                Ok(routes) => taken = routes,
                Err(_) => break,
            }
        }
    }
}

const PATTERNS: [&str; 16] = [
    "/",
    "/login",
    "/{page}",
    "/{page}/",
    "/files/{*path}",
    "/files/secret.bin",
    "/files/{name}/raw",
    "/files/a/{b}",
    "/api/{*rest}",
    "/api/v1/{id}",
    "/api/{version}/users",
    "/{a}/{b}",
    "/{*all}",
    "/{{x}}/{id}",
    "/api/v-{n}/x",
    "//login",
];

const SEGMENTS: [&str; 20] = [
    "login",
    "files",
    "secret.bin",
    "api",
    "v1",
    "7",
    "users",
    "a",
    "raw",
    "v-7",
    "x",
    "{x}",
    "{*path}",
    "{page}",
    "a%2fb",
    "%6cogin",
    "..",
    ".",
    "",
    "x;y=1",
];

/// Returns some patterns that can be combined.
fn some(random: &mut fastrand::Rng) -> Vec<&'static str> {
    let mut patterns = vec![];
    for pattern in random.choose_multiple(PATTERNS, 8) {
        patterns.push(pattern);
        if named(&patterns).is_err() {
            patterns.pop();
        }
    }
    patterns
}

fn named(patterns: &[&str]) -> Result<Routes, ConfigError> {
    exempting(patterns, &[])
}

/// The patterns with these numbers have no limit.
fn exempting(patterns: &[&str], exempt: &[usize]) -> Result<Routes, ConfigError> {
    let routes = Routes::new(gcra("default", "9999/h"));
    patterns
        .iter()
        .enumerate()
        .try_fold(routes, |routes, (number, pattern)| {
            if exempt.contains(&number) {
                routes.exempt(pattern)
            } else {
                routes.route(pattern, gcra(&format!("p{number}"), "9999/h"))
            }
        })
}

/// Returns the path as a lenient server reads it, and the same with the other end.
fn plain(path: &str) -> [String; 2] {
    let decoded = path.replace("%2f", "/").replace("%6c", "l");
    let mut segments = vec![];
    for segment in decoded.split('/') {
        match segment.split(';').next().unwrap() {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let path = format!("/{}", segments.join("/"));
    let slashed = format!("{}/", path.trim_end_matches('/'));
    if decoded.ends_with('/') {
        [slashed, path]
    } else {
        [path, slashed]
    }
}

/// A path is under the pattern that axum would match if the patterns were its routes,
/// independently of axum's own routes. Without such a pattern, the plain path counts.
#[tokio::test]
async fn patterns_are_matched_as_axum_would() {
    let mut random = fastrand::Rng::with_seed(19);
    for round in 0..150 {
        let (patterns, templates) = (some(&mut random), some(&mut random));
        let would = patterns
            .iter()
            .enumerate()
            .fold(Router::new(), |router, (number, pattern)| {
                router.route(pattern, any(async move || format!("p{number}")))
            });
        let would = would.fallback(async || "default");
        let mut router = Router::new().fallback(ok);
        for template in &templates {
            router = match *template {
                "/api/{version}/users" => {
                    router.nest("/api/{version}", Router::new().route("/users", any(ok)))
                }
                "/files/{name}/raw" => router.nest(
                    "/files/{name}",
                    Router::new().route("/raw", any(ok)).fallback(ok),
                ),
                template => router.route(template, any(ok)),
            };
        }
        let [on_router, around] = both(|| named(&patterns).unwrap(), || router.clone());
        for _ in 0..40 {
            let path: String = (0..random.usize(1..5))
                .map(|_| format!("/{}", random.choice(SEGMENTS).unwrap()))
                .collect();
            if path.parse::<Uri>().is_err() {
                continue;
            }
            let mut expected = "default".to_owned();
            for path in [path.clone()].into_iter().chain(plain(&path)) {
                if expected == "default" {
                    let request = Request::builder().uri(&path).body(Body::empty()).unwrap();
                    expected = text(send(&would, request).await).await;
                }
            }
            for (app, place) in [(&on_router, "on the router"), (&around, "around it")] {
                let name = under(app, Method::GET, &path).await;
                assert_eq!(
                    name, expected,
                    "{round}: {path} {place}, {patterns:?} over {templates:?}"
                );
            }
        }
    }
}

/// The number of the pattern that axum matches, if the patterns are its routes.
fn matched(patterns: &[(usize, &str)]) -> impl AsyncFn(&str) -> Option<usize> {
    let router = patterns
        .iter()
        .fold(Router::new(), |router, (number, pattern)| {
            let number = number.to_string();
            router.route(pattern, any(async move || number))
        });
    let router = router.fallback(async || "");
    async move |path| {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        text(send(&router, request).await).await.parse().ok()
    }
}

/// A path is exempt only if its pattern and that of the plain path are, and if no pattern limits the plain path with the
/// other end. A pattern that matches both ends has given way to a more specific one at this end.
#[tokio::test]
async fn no_spelling_of_a_limited_path_is_exempt() {
    let mut random = fastrand::Rng::with_seed(23);
    let mut seen = [0; 3];
    for round in 0..400 {
        let patterns = some(&mut random);
        let exempt: Vec<usize> = (0..patterns.len()).filter(|_| random.bool()).collect();
        let numbered: Vec<_> = patterns.iter().copied().enumerate().collect();
        let find = matched(&numbered);
        let is_limit = |number: &usize| !exempt.contains(number);
        let around = Layer::layer(
            &layer(exempting(&patterns, &exempt).unwrap()),
            Router::new().fallback(ok),
        );
        let app = Router::new().fallback_service(around);
        for _ in 0..40 {
            let mut path: String = (0..random.usize(1..5))
                .map(|_| format!("/{}", random.choice(SEGMENTS).unwrap()))
                .collect();
            if random.bool() {
                path.push('/');
            }
            if path.parse::<Uri>().is_err() {
                continue;
            }
            let [here, other] = plain(&path);
            let (raw, read, at_other) = (find(&path).await, find(&here).await, find(&other).await);
            let is_literal =
                raw.is_some_and(|number| !patterns[number].replace("{{", "").contains('{'));
            let climbs = path.split('/').any(|segment| segment == "..");
            let is_exempt = raw.is_some() && read.is_some() && !climbs;
            let is_overridden = match at_other {
                Some(number) if is_exempt => {
                    matched(&numbered[number..=number])(&here).await.is_some()
                }
                _ => false,
            };
            let limit = raw
                .filter(is_limit)
                .or(read.filter(is_limit).filter(|_| !is_literal))
                .or(at_other
                    .filter(is_limit)
                    .filter(|_| !is_literal && !is_overridden));
            let expected = match limit {
                Some(number) => format!("p{number}"),
                None if is_literal || is_exempt => "none".to_owned(),
                None => "default".to_owned(),
            };
            seen[["none", "default"]
                .iter()
                .position(|name| *name == expected)
                .unwrap_or(2)] += 1;
            let name = under(&app, Method::GET, &path).await;
            assert_eq!(
                name, expected,
                "{round}: {path}, {patterns:?}, of which {exempt:?} are exempt"
            );
        }
    }
    assert!(seen.iter().all(|count| *count > 500), "{seen:?}");
}
