//! Rejections over HTTP, and by closures.

use std::convert::Infallible;
use std::fmt::Debug;

use axum::body::{Body, Bytes, HttpBody};
use http::request::Parts;
use http::{HeaderValue, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tower::{Layer, service_fn};
use tower_redis_ratelimit::check::Decision;
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor, MissingKey, PeerIp};
use tower_redis_ratelimit::reject::{HttpReject, OnMissingKey, Reason, Reject, Rejection};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Limiter, LocalStore, RateLimitLayer};

use crate::mocks::{self, *};

/// Checks the properties common to all rejections, and returns the problem.
async fn problem<B: HttpBody<Error: Debug>>(response: Response<B>) -> Value {
    assert_eq!(
        field(&response, "content-type"),
        Some("application/problem+json")
    );
    assert_eq!(field(&response, "cache-control"), Some("no-store"));
    json(response).await
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_the_drafts_problem_type() {
    let service = limited(layer("1/90s"));
    let allowed = send(&service, request("alice")).await;
    assert_eq!(
        field(&allowed, "cache-control"),
        None,
        "only rejections are kept from caches"
    );
    assert_eq!(allowed.body(), "hello");

    let denied = send(&service, request("alice")).await;
    assert_eq!(denied.status(), 429);
    assert_eq!(field(&denied, "retry-after"), Some("90"));
    let expected = json!({
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "The quota of 1 per 90 seconds is used up. Try again in 90 s.",
        "violated-policies": ["api"],
    });
    assert_eq!(problem(denied).await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_handler_responds_like_the_layer() {
    let by_layer = limited(layer("1/90s"));
    send(&by_layer, request("alice")).await;
    let by_layer = send(&by_layer, request("alice")).await;

    let limiter = Limiter::new(LocalStore::default(), gcra("api", "1/90s"));
    limiter.reserve(Key::GLOBAL, 1).await.unwrap().keep();
    let error = limiter.reserve(Key::GLOBAL, 1).await.unwrap_err();
    let decision = limiter.take(Key::GLOBAL, 1).await.unwrap();
    let by_handler: [Response<String>; 2] = [
        HttpReject::new().response(&error),
        HttpReject::new().response(&decision),
    ];
    for answer in by_handler {
        assert_eq!(
            (answer.status(), answer.headers()),
            (by_layer.status(), by_layer.headers())
        );
        assert_eq!(
            answer.extensions().get::<Decision>(),
            by_layer.extensions().get()
        );
        assert_eq!(answer.body(), by_layer.body());
    }
    let own: Response<String> = HttpReject::new().json("{}").response(&error);
    assert_eq!(
        (own.body().as_str(), field(&own, "retry-after")),
        ("{}", Some("90"))
    );

    let failed: Response<String> = HttpReject::new().response(&mocks::error());
    assert_eq!(
        (failed.status().as_u16(), field(&failed, "retry-after")),
        (503, Some("1"))
    );
    assert_eq!(
        problem(failed).await["detail"],
        "Rate limiting is temporarily unavailable."
    );
    let missing = MissingKey::unauthenticated("no token", HeaderValue::from_static("Bearer"));
    let missing: Response<String> = HttpReject::new().response(Reason::MissingKey(&missing));
    assert_eq!(
        (
            missing.status().as_u16(),
            field(&missing, "www-authenticate")
        ),
        (401, Some("Bearer"))
    );
}

#[tokio::test]
async fn a_missing_key_is_a_client_error() {
    let response = send(&limited(layer("1/h")), anonymous()).await;
    assert_eq!(response.status(), 400);
    assert_eq!(
        field(&response, "retry-after"),
        None,
        "waiting does not help"
    );
    let expected = json!({
        "type": "about:blank",
        "title": "Bad Request",
        "status": 400,
        "detail": "the header x-user is missing",
    });
    assert_eq!(problem(response).await, expected);
}

/// RFC 9110 requires a challenge in every 401, including custom responses.
#[tokio::test]
async fn anonymous_requests_are_challenged() {
    let by_api_key = || {
        let key = HeaderKey::new("x-api-key")
            .unwrap()
            .challenge(HeaderValue::from_static("ApiKey realm=\"books\""));
        RateLimitLayer::new(LocalStore::default(), key, gcra("api", "1/h"))
    };
    let response = send(&limited(by_api_key()), anonymous()).await;
    assert_eq!(
        (response.status().as_u16(), field(&response, "retry-after")),
        (401, None)
    );
    assert_eq!(
        field(&response, "www-authenticate"),
        Some("ApiKey realm=\"books\"")
    );
    let expected = json!({
        "type": "about:blank",
        "title": "Unauthorized",
        "status": 401,
        "detail": "the header x-api-key is missing",
    });
    assert_eq!(problem(response).await, expected);

    // The layer adds the challenge to a custom response too, unless it has another one, or is not a
    // 401.
    for (status, own, expected) in [
        (401, None, Some("ApiKey realm=\"books\"")),
        (401, Some("Bearer"), Some("Bearer")),
        (403, None, None),
    ] {
        let layer = by_api_key().reject_with(|rejection| {
            assert_eq!(rejection.status(), 401);
            let mut response = Response::builder().status(status);
            if let Some(own) = own {
                response = response.header("www-authenticate", own);
            }
            response.body(String::new()).unwrap()
        });
        let response = send(&limited(layer), anonymous()).await;
        let fields: Vec<_> = response
            .headers()
            .get_all("www-authenticate")
            .iter()
            .collect();
        assert_eq!(fields, Vec::from_iter(expected), "{status}");
    }

    // The client may omit its key, so the layer may let it pass. A client with an invalid header is
    // not challenged.
    let optional = limited(by_api_key().on_missing_key(OnMissingKey::Allow));
    assert_eq!(send(&optional, anonymous()).await.status(), 200);
    let mut twice = anonymous();
    for value in ["one", "two"] {
        twice
            .headers_mut()
            .append("x-api-key", value.parse().unwrap());
    }
    let response = send(&optional, twice).await;
    assert_eq!(
        (
            response.status().as_u16(),
            field(&response, "www-authenticate")
        ),
        (400, None)
    );
}

#[tokio::test]
async fn custom_extractors_challenge_too() {
    let nobody = |missing: fn() -> MissingKey| {
        struct Nobody(fn() -> MissingKey);

        impl KeyExtractor for Nobody {
            fn extract(&self, _: &Parts) -> Result<Key, MissingKey> {
                Err((self.0)())
            }
        }

        limited(RateLimitLayer::new(
            LocalStore::default(),
            Nobody(missing),
            gcra("api", "1/h"),
        ))
    };
    let missing =
        || MissingKey::unauthenticated("no access token", HeaderValue::from_static("Bearer"));
    let response = send(&nobody(missing), anonymous()).await;
    assert_eq!(
        (
            response.status().as_u16(),
            field(&response, "www-authenticate")
        ),
        (401, Some("Bearer"))
    );
    assert_eq!(problem(response).await["detail"], "no access token");
}

/// Returns the text for clients if the server recorded no address.
fn misconfigured() -> String {
    let why = PeerIp.extract(&anonymous().into_parts().0).unwrap_err();
    assert!(
        why.to_string()
            .contains("into_make_service_with_connect_info"),
        "{why}"
    );
    if cfg!(debug_assertions) {
        format!("Rate limiting is misconfigured: {why}.")
    } else {
        "Rate limiting is misconfigured.".to_owned()
    }
}

#[tokio::test]
async fn a_missing_address_is_a_server_error() {
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "1/h"));
    let response = send(&limited(layer), request("alice")).await;
    assert_eq!(response.status(), 500);
    assert_eq!(field(&response, "retry-after"), None);
    let expected = json!({
        "type": "about:blank",
        "title": "Internal Server Error",
        "status": 500,
        "detail": misconfigured(),
    });
    assert_eq!(
        problem(response).await,
        expected,
        "nothing of how it is set up, but in a debug build"
    );
}

#[tokio::test]
async fn store_failures_hide_their_error() {
    let text = error().to_string();
    assert!(
        text.contains(SECRET),
        "there must be something to leak: {text}"
    );

    let response = send(&limited(layer_with(Broken, "1/h")), request("alice")).await;
    assert_eq!(response.status(), 503);
    assert_eq!(field(&response, "retry-after"), Some("1"));
    assert!(!format!("{:?}", response.headers()).contains(SECRET));
    let expected = json!({
        "type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "Rate limiting is temporarily unavailable.",
    });
    assert_eq!(problem(response).await, expected);
}

#[tokio::test]
async fn extractor_messages_are_escaped_in_json() {
    struct Odd;
    const ODD: &str = "a \"quoted\" back\\slash,\n\ta control \u{1}, \u{7f}, and more: \u{e9}\u{2028}\u{1f600}</script>";

    impl KeyExtractor for Odd {
        fn extract(&self, _: &Parts) -> Result<Key, MissingKey> {
            Err(MissingKey::new(ODD))
        }
    }

    let layer = RateLimitLayer::new(LocalStore::default(), Odd, gcra("api", "1/h"));
    let response = send(&limited(layer), request("alice")).await;
    assert_eq!(problem(response).await["detail"], ODD);
}

#[tokio::test(start_paused = true)]
async fn the_denial_text_is_configurable() {
    const ODD: &str = "Contact \"us\" for more:\n\\sales";
    for (reject, content_type, expected) in [
        (
            HttpReject::new().json("{\"error\":\"slow\"}"),
            "application/json",
            "{\"error\":\"slow\"}",
        ),
        (
            HttpReject::new().body("text/html".parse().unwrap(), "<b>slow</b>"),
            "text/html",
            "<b>slow</b>",
        ),
        (
            HttpReject::new().detail(ODD).json("{}".to_owned()),
            "application/json",
            "{}",
        ),
        (
            HttpReject::new().json("{}").detail(ODD),
            "application/problem+json",
            "",
        ),
    ] {
        let service = limited(layer("1/h").reject(reject.clone()));
        assert_eq!(send(&service, request("alice")).await.body(), "hello");
        let denied = send(&service, request("alice")).await;
        assert_eq!(denied.status(), 429);
        let fields = ["content-type", "cache-control", "retry-after", "ratelimit"]
            .map(|name| field(&denied, name));
        assert_eq!(
            fields,
            [content_type, "no-store", "3600", "\"api\";r=0;t=3600"].map(Some)
        );
        if expected.is_empty() {
            let expected = json!({
                "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "title": "Too Many Requests",
                "status": 429,
                "detail": ODD,
                "violated-policies": ["api"],
            });
            assert_eq!(json(denied).await, expected);
        } else {
            assert_eq!(denied.body(), expected);
        }

        // Other rejections are unchanged.
        let missing = problem(send(&service, anonymous()).await).await;
        assert_eq!(missing["detail"], "the header x-user is missing");
        let broken = limited(layer_with(Broken, "1/h").reject(reject));
        let unavailable = problem(send(&broken, request("alice")).await).await;
        assert_eq!(
            unavailable["detail"],
            "Rate limiting is temporarily unavailable."
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_rejection_displays_as_a_sentence() {
    fn sentence<S: Store, K: KeyExtractor>(
        layer: RateLimitLayer<S, K>,
    ) -> RateLimitLayer<S, K, impl Fn(Rejection<'_>) -> Response<String>> {
        layer.reject_with(|rejection| Response::new(rejection.to_string()))
    }
    let service =
        limited(sentence(layer("1/h").cost(|request| {
            if request.uri.path() == "/all" { 2 } else { 1 }
        })));
    let at_fault = limited(sentence(RateLimitLayer::new(
        LocalStore::default(),
        PeerIp,
        gcra("api", "1/h"),
    )));
    let broken = limited(sentence(layer_with(Broken, "1/h")));
    let scarce = limited(sentence(layer("3/h").cost(|_| 2)));
    let mut all = request("alice");
    *all.uri_mut() = "/all".parse().unwrap();
    send(&service, request("alice")).await;
    send(&scarce, request("alice")).await;
    for (response, expected) in [
        (
            send(&scarce, request("alice")).await,
            "The quota of 3 per hour cannot cover this request. Try again in 1200 s.",
        ),
        (
            send(&service, request("alice")).await,
            "The quota of 1 per hour is used up. Try again in 3600 s.",
        ),
        (
            send(&service, all).await,
            "The request's cost exceeds the maximum burst of 1.",
        ),
        (
            send(&service, anonymous()).await,
            "the header x-user is missing",
        ),
        (send(&at_fault, anonymous()).await, &misconfigured()),
        (
            send(&broken, request("alice")).await,
            "Rate limiting is temporarily unavailable.",
        ),
    ] {
        assert_eq!(response.body(), expected);
    }
}

/// Checks every kind of response of a service with this body type.
async fn fits<B>()
where
    B: From<String> + HttpBody<Error: Debug> + 'static,
{
    async fn answer<B, S>(layer: &RateLimitLayer<S, HeaderKey>, user: Option<&str>) -> Response<B>
    where
        B: From<String>,
        S: Store,
    {
        send(
            &layer.layer(service_fn(hello::<B>)),
            user.map_or_else(anonymous, request),
        )
        .await
    }

    let (layer, broken) = (layer("1/h"), layer_with(Broken, "1/h"));
    let allowed: Response<B> = answer(&layer, Some("alice")).await;
    assert_eq!(allowed.status(), 200);
    assert!(field(&allowed, "ratelimit").is_some());
    assert_eq!(text(allowed).await, "hello");
    let rejected: [(u16, Response<B>); 3] = [
        (429, answer(&layer, Some("alice")).await),
        (400, answer(&layer, None).await),
        (503, answer(&broken, Some("alice")).await),
    ];
    for (status, response) in rejected {
        assert_eq!(response.status(), status);
        assert!(problem(response).await["title"].is_string());
    }
    let own: Response<B> = answer(&layer.reject(HttpReject::new().json("{}")), Some("alice")).await;
    assert_eq!(text(own).await, "{}");
}

#[tokio::test]
async fn common_body_types_compile() {
    fits::<String>().await;
    fits::<Body>().await;
    fits::<Full<Bytes>>().await;
}

#[tokio::test]
async fn custom_bodies_map_from_text() {
    type Boxed = BoxBody<Bytes, Infallible>;
    let layer = layer("1/h").reject_with(|rejection| {
        HttpReject::new()
            .reject(rejection)
            .map(|text: String| text.boxed())
    });
    let hello = |_: Request<String>| async { Ok::<_, Infallible>(Response::new(Boxed::default())) };
    let service = layer.layer(service_fn(hello));
    assert_eq!(send(&service, request("alice")).await.status(), 200);
    let denied = send(&service, request("alice")).await;
    assert_eq!(
        (denied.status().as_u16(), field(&denied, "retry-after")),
        (429, Some("3600"))
    );
    assert_eq!(problem(denied).await["violated-policies"], json!(["api"]));
}

#[tokio::test]
async fn a_closure_turns_rejections_into_responses() {
    let respond = |rejection: Rejection<'_>| {
        Response::new(match rejection.reason() {
            Reason::Denied(decision) => format!("denied by {}", decision.policy().name()),
            Reason::MissingKey(missing) => format!("missing: {missing}"),
            Reason::Unavailable(error) => format!("unavailable: {:?}", error.kind()),
            _ => "something new".to_owned(),
        })
    };
    let service = limited(layer("1/h").reject(respond));
    let broken = limited(layer_with(Broken, "1/h").reject(respond));
    assert_eq!(send(&service, request("alice")).await.body(), "hello");
    let denied = send(&service, request("alice")).await;
    assert_eq!(
        field(&denied, "retry-after"),
        Some("3600"),
        "the layer adds it"
    );
    assert_eq!(denied.body(), "denied by api");
    let missing = "missing: the header x-user is missing";
    assert_eq!(send(&service, anonymous()).await.body(), missing);
    let unavailable = send(&broken, request("alice")).await;
    assert_eq!(unavailable.body(), "unavailable: Configuration");
    assert_eq!(
        unavailable.headers().len(),
        0,
        "what the closure did not set is not there"
    );
}

/// A layer that responds to each client in its protocol: over gRPC trailers only, otherwise over
/// HTTP.
fn by_content_type<S: Store>(
    layer: RateLimitLayer<S, HeaderKey>,
) -> RateLimitLayer<S, HeaderKey, impl Fn(Rejection<'_>) -> Response<String>> {
    layer.reject_with(
        |rejection| match rejection.request().headers.get("content-type") {
            Some(kind) if kind == "application/grpc" => Response::builder()
                .header("grpc-status", "8")
                .body(rejection.status().to_string())
                .unwrap(),
            _ => HttpReject::new().reject(rejection),
        },
    )
}

#[tokio::test]
async fn one_layer_answers_in_each_protocol() {
    let (store, mut questions) = manual_store();
    let at_once = limited(by_content_type(layer("1/h")));
    let later = limited(by_content_type(layer_with(store, "1/h")));
    let server_at_fault = RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "1/h"));
    let server_at_fault = limited(
        server_at_fault.reject_with(|rejection| Response::new(rejection.status().to_string())),
    );
    assert_eq!(
        send(&server_at_fault, request("alice")).await.body(),
        "500 Internal Server Error"
    );

    assert_eq!(send(&at_once, request("alice")).await.status(), 200);
    for (reason, status) in [
        ("denied", 429),
        ("denied later", 429),
        ("unavailable", 503),
        ("no key", 400),
    ] {
        for grpc in [true, false] {
            let mut request = if reason == "no key" {
                anonymous()
            } else {
                request("alice")
            };
            if grpc {
                request
                    .headers_mut()
                    .insert("content-type", "application/grpc".parse().unwrap());
            }
            let response = match reason {
                "denied" | "no key" => send(&at_once, request).await,
                _ => {
                    let answer = async {
                        let question = questions.recv().await.unwrap();
                        if status == 429 {
                            question.deny()
                        } else {
                            question.fail()
                        }
                    };
                    tokio::join!(send(&later, request), answer).0
                }
            };
            if grpc {
                assert_eq!(
                    (response.status().as_u16(), field(&response, "grpc-status")),
                    (200, Some("8")),
                    "{reason}"
                );
                assert!(
                    response.body().starts_with(&status.to_string()),
                    "{reason}: {}",
                    response.body()
                );
            } else {
                assert_eq!(response.status(), status, "{reason}");
                assert!(problem(response).await["title"].is_string(), "{reason}");
            }
        }
    }
}

#[tokio::test]
async fn debug_of_rejections_hides_request_headers() {
    let service =
        limited(layer("1/h").reject_with(|rejection| Response::new(format!("{rejection:?}"))));
    for _ in 0..2 {
        let mut request = request("alice");
        request
            .headers_mut()
            .insert("authorization", SECRET.parse().unwrap());
        let response = send(&service, request).await;
        let shown = response.body();
        assert!(
            shown == "hello" || shown.contains("Denied") && !shown.contains(SECRET),
            "{shown}"
        );
    }
}

#[tokio::test]
async fn a_closures_retry_after_is_kept() {
    let later = |_: Rejection<'_>| {
        Response::builder()
            .header("retry-after", "7")
            .body(String::new())
            .unwrap()
    };
    let service = limited(layer("1/h").reject(later));
    send(&service, request("alice")).await;
    let denied = send(&service, request("alice")).await;
    assert_eq!(
        denied
            .headers()
            .get_all("retry-after")
            .iter()
            .collect::<Vec<_>>(),
        ["7"]
    );
}

#[tokio::test]
async fn a_cost_above_capacity_has_no_retry() {
    let plain = |_: Rejection<'_>| Response::new(String::new());
    let service = limited(layer("1/h").cost(by_header).reject(plain));
    let denied = send(&service, costing(2)).await;
    assert_eq!(field(&denied, "retry-after"), None);
    assert!(field(&denied, "ratelimit").is_some());
}

/// A client must not avoid being counted by sending a second header in addition to the proxy's.
#[tokio::test]
async fn repeated_headers_are_always_rejected() {
    let service = limited(layer("1/h").on_missing_key(OnMissingKey::Allow));
    let mut twice = request("alice");
    twice.headers_mut().append(USER, "mallory".parse().unwrap());
    let response = send(&service, twice).await;
    assert_eq!(response.status(), 400);
    assert_eq!(
        problem(response).await["detail"],
        "the header x-user appears more than once"
    );
    assert_eq!(send(&service, anonymous()).await.status(), 200);
}

/// As of a `KeyExtractor` that a handler calls.
#[cfg(feature = "axum")]
#[tokio::test]
async fn a_missing_key_is_a_response() {
    use axum::response::IntoResponse;
    use http::HeaderValue;
    use tower_redis_ratelimit::extract::MissingKey;

    let response = MissingKey::new("no API key").into_response();
    assert_eq!(response.status(), 400);
    let body = problem(response).await;
    assert_eq!(
        (&body["status"], &body["detail"]),
        (&json!(400), &json!("no API key"))
    );
    let bearer = HeaderValue::from_static("Bearer");
    let response = MissingKey::unauthenticated("no token", bearer).into_response();
    assert_eq!(response.status(), 401);
    assert_eq!(field(&response, "www-authenticate"), Some("Bearer"));
    assert_eq!(
        MissingKey::misconfigured("a wrong order")
            .into_response()
            .status(),
        500
    );
}
