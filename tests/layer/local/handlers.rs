//! Arguments and errors of axum handlers, and the order of a router's layers.

use std::any::type_name;

use axum::extract::{Extension, State};
use axum::middleware::{Next, from_fn};
use axum::routing::get;
use axum::{Router, body::Body, response::Response};
use http::{HeaderValue, Method, Request, StatusCode};
use tower_http::cors::CorsLayer;
use tower_redis_ratelimit::check::{Decision, RateLimited};
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor, PeerIp, by_extension};
use tower_redis_ratelimit::settle::{RequestCost, ReserveError};
use tower_redis_ratelimit::store::{AnyStore, StoreError};
use tower_redis_ratelimit::{Key, Limiter, LocalStore, RateLimitLayer};

use crate::mocks::*;

fn by_user() -> HeaderKey {
    HeaderKey::new(USER).unwrap()
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_limiter_are_responses() {
    async fn reserve(
        State(limiter): State<Limiter<LocalStore>>,
    ) -> Result<&'static str, ReserveError> {
        limiter.reserve(Key::GLOBAL, 1).await?.keep();
        let _ = limiter.peek(Key::GLOBAL, 0).await?;
        Ok("hello")
    }
    let app = Router::new().route("/books", get(reserve));
    let app = app.with_state(Limiter::new(LocalStore::default(), gcra("api", "1/90s")));
    assert_eq!(send(&app, anonymous()).await.status(), 200);
    let denied = send(&app, anonymous()).await;
    assert_eq!(denied.status(), 429);
    assert_eq!(field(&denied, "retry-after"), Some("90"));
    assert_eq!(field(&denied, "ratelimit"), Some("\"api\";r=0;t=90"));
    assert_eq!(field(&denied, "ratelimit-policy"), Some("\"api\";q=1;w=90"));
    assert_eq!(field(&denied, "cache-control"), Some("no-store"));
    assert!(!decision(&denied).unwrap().is_allowed());
    assert_eq!(
        json(denied).await["detail"],
        "The quota of 1 per 90 seconds is used up. Try again in 90 s."
    );

    async fn fail<E: From<StoreError>>() -> Result<(), E> {
        Err(error().into())
    }
    async fn deny() -> Result<(), RateLimited> {
        let limiter = Limiter::new(LocalStore::default(), gcra("api", "1/90s"));
        match limiter.reserve(Key::GLOBAL, 2).await {
            Err(ReserveError::Denied(denied)) => Err(denied),
            _ => Ok(()),
        }
    }
    let app: Router = Router::new()
        .route("/store", get(fail::<StoreError>))
        .route("/reserve", get(fail::<ReserveError>))
        .route("/denied", get(deny));
    for (path, status, retry_after) in [
        ("/store", 503, Some("1")),
        ("/reserve", 503, Some("1")),
        ("/denied", 429, None),
    ] {
        let answer = send(&app, Request::get(path).body(Body::empty()).unwrap()).await;
        assert_eq!(
            (answer.status().as_u16(), field(&answer, "retry-after")),
            (status, retry_after),
            "{path}"
        );
        assert!(!text(answer).await.contains(SECRET));
    }
}

#[tokio::test]
async fn handlers_take_the_charge_and_the_decision() {
    async fn remaining(decision: Option<Decision>) -> String {
        decision.map_or("uncounted".to_owned(), |decision| {
            decision.remaining().to_string()
        })
    }
    async fn charge(charge: RequestCost) -> String {
        charge.set(3);
        charge.reserved().to_string()
    }
    async fn maybe(charge: Option<RequestCost>) -> String {
        charge.is_some().to_string()
    }
    let routes = || {
        Router::new()
            .route("/", get(remaining))
            .route("/charge", get(charge))
            .route("/maybe", get(maybe))
    };
    let get = |path| {
        Request::get(path)
            .header(USER, "alice")
            .body(Body::empty())
            .unwrap()
    };
    let bare: Router = routes();
    let limited = routes().layer(layer("9/h").skip(|request| request.uri.query() == Some("skip")));
    let settled = routes().layer(layer("9/h").until_body_end());
    for (app, path, answer) in [
        (&bare, "/", "uncounted"),
        (&bare, "/maybe", "false"),
        (&limited, "/", "8"),
        (&limited, "/?skip", "uncounted"),
        (&limited, "/maybe", "false"),
        (&settled, "/charge", "1"),
        (&settled, "/maybe", "true"),
        // Three for the charge, and one for the request that did not use its charge, in addition
        // to its own.
        (&settled, "/", "4"),
    ] {
        assert_eq!(text(send(app, get(path)).await).await, answer, "{path}");
    }
    let missing = send(&limited, get("/charge")).await;
    assert_eq!(missing.status(), 500);
    let fix = "add `.settle(..)` or `.until_body_end()` (no-charge: https://docs.rs/";
    assert_eq!(
        text(missing).await.contains(fix),
        cfg!(debug_assertions),
        "in a release build it is for the log alone"
    );
}

/// A router's `layer` also wraps its fallback; a `route_layer` does not.
#[tokio::test]
async fn a_route_layer_does_not_count_unknown_paths() {
    let routes = || Router::new().route("/books", get(|| async { "hello" }));
    let unknown = || {
        Request::get("/unknown")
            .header(USER, "alice")
            .body(Body::empty())
            .unwrap()
    };
    let [around, within] = [
        routes().layer(layer("2/h")),
        routes().route_layer(layer("2/h")),
    ];
    for (app, books) in [(around, 429), (within, 200)] {
        for _ in 0..2 {
            assert_eq!(send(&app, unknown()).await.status(), 404);
        }
        assert_eq!(
            send(
                &app,
                Request::get("/books")
                    .header(USER, "alice")
                    .body(Body::empty())
                    .unwrap()
            )
            .await
            .status(),
            books
        );
    }
}

/// A browser's preflight request has no key, and a browser hides responses without CORS fields from
/// scripts.
#[tokio::test]
async fn cors_belongs_around_the_limit() {
    let cors = || {
        CorsLayer::new()
            .allow_origin(HeaderValue::from_static("https://shop.example"))
            .allow_headers([USER])
    };
    let preflight = || {
        let request = Request::options("/books").header("origin", "https://shop.example");
        request
            .header("access-control-request-method", "GET")
            .body(Body::empty())
            .unwrap()
    };
    let books = || {
        Request::get("/books")
            .header(USER, "alice")
            .header("origin", "https://shop.example")
    };
    let routes = || Router::new().route("/books", get(|| async { "hello" }));
    let allows = |response: &Response| {
        response
            .headers()
            .contains_key("access-control-allow-origin")
    };

    let around = routes().layer(layer("1/h")).layer(cors());
    let within = routes().layer(cors()).layer(layer("1/h"));
    let skipping = routes()
        .layer(cors())
        .layer(layer("1/h").skip(|request| request.method == Method::OPTIONS));
    for (app, expected, reads_denials) in [
        (around, 200, true),
        (within, 400, false),
        (skipping, 200, false),
    ] {
        assert_eq!(send(&app, preflight()).await.status(), expected);
        for status in [200, 429] {
            let answer = send(&app, books().body(Body::empty()).unwrap()).await;
            assert_eq!(answer.status(), status);
            assert_eq!(allows(&answer), reads_denials || status == 200);
        }
    }
}

#[tokio::test]
async fn the_limit_belongs_inside_the_authentication() {
    #[derive(Clone)]
    struct User(u64);

    async fn authenticate(mut request: Request<Body>, next: Next) -> Response {
        request.extensions_mut().insert(User(42));
        next.run(request).await
    }
    async fn hello(Extension(User(id)): Extension<User>) -> String {
        id.to_string()
    }
    let problems = Problems::default();
    let limit = || {
        RateLimitLayer::new(
            LocalStore::default(),
            by_extension(|user: &User| user.0),
            gcra("api", "1/h"),
        )
    };
    let routes = || Router::new().route("/books", get(hello));

    let inside = routes().layer(limit()).layer(from_fn(authenticate));
    assert_eq!(text(send(&inside, anonymous()).await).await, "42");
    assert_eq!(send(&inside, anonymous()).await.status(), 429);

    let outside = routes()
        .layer(from_fn(authenticate))
        .layer(limit().observer(problems.clone()));
    let answer = send(&outside, anonymous()).await;
    assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        text(answer).await.contains("User"),
        cfg!(debug_assertions),
        "in a release build it is for the log alone"
    );
    let problem = problems.0.lock().unwrap().concat();
    assert!(problem.contains(type_name::<User>()), "{problem}");
    assert!(
        problem.contains("put the layer inside the authentication"),
        "{problem}"
    );
}

/// Types that a user's program has to name.
struct Limits {
    by_user: RateLimitLayer<AnyStore, HeaderKey>,
    chosen: RateLimitLayer<LocalStore, Box<dyn KeyExtractor>>,
}

fn limits(by_address: bool) -> Limits {
    let store = AnyStore::from(LocalStore::default());
    let chosen: Box<dyn KeyExtractor> = if by_address {
        Box::new(by_user().or(PeerIp))
    } else {
        Box::new(by_user())
    };
    Limits {
        by_user: RateLimitLayer::new(store, by_user(), gcra("api", "1/h")),
        chosen: RateLimitLayer::new(LocalStore::default(), chosen, gcra("api", "1/h")),
    }
}

#[tokio::test]
async fn layers_in_fields_need_few_type_arguments() {
    let Limits { by_user, chosen } = limits(false);
    let app: Router = Router::new()
        .route("/books", get(|| async { "hello" }))
        .layer(chosen)
        .layer(by_user);
    assert_eq!(send(&app, request("alice")).await.status(), 200);
    assert_eq!(send(&app, anonymous()).await.status(), 400);
    let by_address = Router::new()
        .route("/books", get(|| async {}))
        .layer(limits(true).chosen);
    let mut request = anonymous();
    request
        .extensions_mut()
        .insert(std::net::IpAddr::from([192, 0, 2, 7]));
    assert_eq!(send(&by_address, request).await.status(), 200);
}
