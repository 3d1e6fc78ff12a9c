//! Results of a decision: header fields for the client, extensions for the code around the layer.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use http::{HeaderMap, Response, StatusCode};
use tokio::time::advance;
use tower::Layer;
use tower_redis_ratelimit::check::{Decision, Outcome, Source};
use tower_redis_ratelimit::extract::{Global, HeaderKey};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::{OnError, OnMissingKey, Rejection};
use tower_redis_ratelimit::store::{ErrorKind, MockStore, StoreError};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, Policy, RateLimitLayer, Strategy,
};

use crate::mocks::*;

/// The `ratelimit` and the `ratelimit-policy` field.
fn both<B>(response: &Response<B>) -> (Option<&str>, Option<&str>) {
    (
        field(response, "ratelimit"),
        field(response, "ratelimit-policy"),
    )
}

#[tokio::test(start_paused = true)]
async fn counted_responses_have_policy_and_remaining_fields() {
    let service = limited(layer("2/m"));
    for (status, expected) in [
        (200, "\"api\";r=1;t=30"),
        (200, "\"api\";r=0;t=30"),
        (429, "\"api\";r=0;t=30"),
        (429, "\"api\";r=0;t=30"),
    ] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(both(&response), (Some(expected), Some("\"api\";q=2;w=60")));
    }
}

#[tokio::test(start_paused = true)]
async fn request_and_response_carry_the_decision() {
    let service = limited(layer("2/m"));
    let response = send(&service, request("alice")).await;
    let left = decision(&response).unwrap();
    assert_eq!(
        (left.outcome(), left.remaining(), left.source()),
        (Outcome::Allowed, 1, Source::Local)
    );
    let Some(Seen(Some(seen))) = response.extensions().get() else {
        panic!("the inner service saw no decision")
    };
    assert_eq!(seen, left);

    send(&service, request("alice")).await;
    let denied = send(&service, request("alice")).await;
    assert!(decision(&denied).unwrap().retry_after().is_some());
    assert!(
        denied.extensions().get::<Seen>().is_none(),
        "the inner service has nothing to see"
    );
}

/// The default.
#[tokio::test]
async fn only_denials_are_in_responses() {
    let user = HeaderKey::new(USER).unwrap();
    let service = limited(RateLimitLayer::new(
        LocalStore::default(),
        user,
        gcra("api", "1/h"),
    ));
    let response = send(&service, request("alice")).await;
    assert!(
        decision(&response).is_none() && matches!(response.extensions().get(), Some(Seen(Some(_))))
    );
    assert!(
        decision(&send(&service, request("alice")).await)
            .is_some_and(|decision| !decision.is_allowed())
    );
}

/// The response is the same.
#[tokio::test(start_paused = true)]
async fn requests_may_omit_the_decision() {
    let plain = || {
        let user = HeaderKey::new(USER).unwrap().readable();
        RateLimitLayer::new(LocalStore::default(), user, gcra("api", "1/h"))
    };
    let in_response = || layer("1/h");
    for layer in [plain, in_response] {
        for headers in [Headers::DRAFT_11, Headers::NONE] {
            let with = limited(layer().headers(headers));
            let without = limited(layer().headers(headers).decision_in_request(false));
            for status in [200, 429] {
                let expected = send(&with, request("alice")).await;
                let response = send(&without, request("alice")).await;
                assert_eq!(response.status(), status);
                assert_eq!(both(&response), both(&expected));
                assert_eq!(decision(&response), decision(&expected));
                let [seen, seen_by_default] =
                    [&response, &expected].map(|response| response.extensions().get());
                assert_eq!(seen, (status == 200).then_some(&Seen(None)));
                let is_shown = matches!(seen_by_default, Some(Seen(Some(_))));
                assert_eq!(is_shown, status == 200);
            }
        }
    }
}

#[tokio::test]
async fn callers_are_counted_apart() {
    let service = limited(layer("1/h"));
    for (user, status) in [("alice", 200), ("alice", 429), ("bob", 200), ("bob", 429)] {
        assert_eq!(
            send(&service, request(user)).await.status(),
            status,
            "{user}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn switching_fields_off_keeps_the_rest() {
    let service = limited(layer("1/h").headers(Headers::NONE));
    for status in [200, 429] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(both(&response), (None, None));
        assert!(decision(&response).is_some());
        assert_eq!(field(&response, "retry-after").is_some(), status == 429);
    }
    let response = send(
        &limited(
            layer("1/h")
                .headers(Headers::NONE)
                .headers(Headers::DRAFT_11),
        ),
        request("alice"),
    )
    .await;
    assert_eq!(
        both(&response),
        (Some("\"api\";r=0;t=3600"), Some("\"api\";q=1;w=3600"))
    );
}

#[tokio::test]
async fn uncounted_responses_have_no_fields() {
    let anybody = limited(layer("1/h").on_missing_key(OnMissingKey::Allow));
    let anyhow = limited(layer_with(Broken, "1/h").on_error(OnError::Allow));
    let nobody = limited(layer("1/h"));
    let nohow = limited(layer_with(Broken, "1/h"));
    let responses = [
        (200, send(&anybody, anonymous()).await),
        (200, send(&anyhow, request("alice")).await),
        (400, send(&nobody, anonymous()).await),
        (503, send(&nohow, request("alice")).await),
    ];
    for (status, response) in responses {
        assert_eq!(response.status(), status);
        assert_eq!(both(&response), (None, None), "{status}");
        assert_eq!(decision(&response), None, "{status}");
        let seen = response.extensions().get();
        assert_eq!(seen, (status == 200).then_some(&Seen(None)), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn custom_responses_get_fields_and_decision() {
    let teapot = |_: Rejection<'_>| {
        let mut response = Response::new("no".to_owned());
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    };
    let service = limited(layer("1/h").reject(teapot));
    send(&service, request("alice")).await;
    let response = send(&service, request("alice")).await;
    assert_eq!(
        (response.status(), response.body().as_str()),
        (StatusCode::IM_A_TEAPOT, "no")
    );
    assert_eq!(
        both(&response),
        (Some("\"api\";r=0;t=3600"), Some("\"api\";q=1;w=3600"))
    );
    assert!(
        !response
            .extensions()
            .get::<Decision>()
            .unwrap()
            .is_allowed()
    );
}

/// The legacy headers with these names.
fn legacy<'a, B>(response: &'a Response<B>, prefix: &str) -> [Option<&'a str>; 3] {
    ["limit", "remaining", "reset"].map(|name| field(response, &format!("{prefix}-{name}")))
}

#[tokio::test(start_paused = true)]
async fn legacy_headers_have_limit_remaining_and_reset() {
    for (form, prefix, other) in [
        (Headers::X_SECONDS, "x-ratelimit", "ratelimit"),
        (Headers::DRAFT_6, "ratelimit", "x-ratelimit"),
    ] {
        let service = limited(layer("2/m burst 3").headers(Headers::NONE.and(form)));
        for (status, remaining, reset) in [
            (200, "2", "30"),
            (200, "1", "60"),
            (200, "0", "90"),
            (429, "0", "90"),
        ] {
            let response = send(&service, request("alice")).await;
            assert_eq!(response.status(), status);
            assert_eq!(
                legacy(&response, prefix),
                [Some("3"), Some(remaining), Some(reset)],
                "{form:?}"
            );
            assert_eq!(legacy(&response, other), [None; 3]);
            assert_eq!(both(&response), (None, None));
            assert_eq!(
                field(&response, "retry-after"),
                (status == 429).then_some("30")
            );
        }
        advance(Duration::from_millis(1)).await;
        let response = send(&service, request("alice")).await;
        assert_eq!(legacy(&response, prefix)[2], Some("90"), "rounded up");
    }
}

/// In an outage an instance grants its share. Clients see the policy's quota, and the rest of the share.
#[tokio::test(start_paused = true)]
async fn an_outage_keeps_the_quota_in_the_fields() {
    for strategy in [Strategy::Gcra, Strategy::FixedWindow(Align::FirstHit)] {
        let redis = MockStore::new();
        redis.fail(StoreError::new(ErrorKind::Unreachable));
        let store = Fallback::builder(redis, LocalStore::default())
            .share(4)
            .build();
        let policy = Policy::new("api", strategy, "100/m").unwrap();
        let layer = RateLimitLayer::new(store, Global, policy)
            .headers(Headers::DRAFT_11.and(Headers::X_SECONDS))
            .decision_in_response();
        let service = limited(layer);
        for left in (0..25).rev() {
            let response = send(&service, request("alice")).await;
            let state = format!("\"api\";r={left};t=");
            let (limit, policy) = both(&response);
            assert!(limit.unwrap().starts_with(&state), "{limit:?}");
            assert_eq!(policy, Some("\"api\";q=100;w=60"));
            let [limit, remaining, _] = legacy(&response, "x-ratelimit");
            assert_eq!((limit, remaining), (Some("100"), Some(&*left.to_string())));
            assert_eq!(decision(&response).unwrap().capacity(), 100);
        }
        let denied = send(&service, request("alice")).await;
        assert_eq!(legacy(&denied, "x-ratelimit")[0], Some("100"));
        let detail = json(denied).await["detail"].to_string();
        assert!(
            detail.contains("The quota of 100 per minute is used up."),
            "{detail}"
        );
    }
}

#[tokio::test]
#[allow(clippy::disallowed_methods, reason = "the reset is in wall clock time")]
async fn github_reset_is_wall_clock_time() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let service = limited(layer("1/h").headers(Headers::GITHUB));
    let before = now();
    for status in [200, 429] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        let [limit, remaining, reset] = legacy(&response, "x-ratelimit");
        assert_eq!((limit, remaining), (Some("1"), Some("0")));
        // Rounded up, and not earlier than in the first response.
        let reset: u64 = reset.unwrap().parse().unwrap();
        let (earliest, latest) = (before.as_secs() + 3_600, now().as_secs() + 3_601);
        assert!(
            (earliest..=latest).contains(&reset),
            "{earliest} <= {reset} <= {latest}"
        );
        assert_eq!(legacy(&response, "ratelimit"), [None; 3]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_legacy_style_joins_draft_fields() {
    let headers = Headers::DRAFT_11.and(Headers::GITHUB).and(Headers::DRAFT_6);
    let response = send(&limited(layer("2/m").headers(headers)), request("alice")).await;
    assert_eq!(
        both(&response),
        (Some("\"api\";r=1;t=30"), Some("\"api\";q=2;w=60"))
    );
    assert_eq!(
        legacy(&response, "ratelimit"),
        [Some("2"), Some("1"), Some("30")]
    );
    assert_eq!(legacy(&response, "x-ratelimit"), [None; 3]);
    let default = send(&limited(layer("2/m")), request("alice")).await;
    assert_eq!(
        (
            legacy(&default, "ratelimit"),
            legacy(&default, "x-ratelimit")
        ),
        ([None; 3], [None; 3])
    );
}

/// The second request is denied by the minute's policy; the first one after that minute, by the
/// hour's.
#[tokio::test(start_paused = true)]
async fn the_deciding_policy_fills_legacy_headers() {
    let policies = Policies::new([gcra("hour", "3/h"), gcra("minute", "2/m")]).unwrap();
    let layer = RateLimitLayer::new(LocalStore::default(), Global, policies);
    let service = limited(layer.headers(Headers::X_SECONDS));
    for (wait, status, expected) in [
        (0, 200, ["2", "1", "30"]),
        (0, 200, ["2", "0", "60"]),
        (0, 429, ["2", "0", "60"]),
        (60, 200, ["3", "0", "3540"]),
        (0, 429, ["3", "0", "3540"]),
    ] {
        advance(Duration::from_secs(wait)).await;
        let response = send(&service, request("alice")).await;
        assert_eq!(
            (response.status().as_u16(), legacy(&response, "x-ratelimit")),
            (status, expected.map(Some))
        );
    }
}

/// Two layers, and the legacy headers after each of three requests.
#[tokio::test(start_paused = true)]
async fn the_tightest_layer_fills_legacy_headers() {
    for (outer, inner, expected) in [
        // The least remaining, in either layer.
        (
            "2/m",
            "9/h",
            [
                (200, ["2", "1", "30"]),
                (200, ["2", "0", "60"]),
                (429, ["2", "0", "60"]),
            ],
        ),
        (
            "9/h",
            "2/m",
            [
                (200, ["2", "1", "30"]),
                (200, ["2", "0", "60"]),
                (429, ["2", "0", "60"]),
            ],
        ),
        // With equal remaining units, the later reset.
        (
            "2/h",
            "2/m",
            [
                (200, ["2", "1", "1800"]),
                (200, ["2", "0", "3600"]),
                (429, ["2", "0", "3600"]),
            ],
        ),
        (
            "2/m",
            "2/h",
            [
                (200, ["2", "1", "1800"]),
                (200, ["2", "0", "3600"]),
                (429, ["2", "0", "60"]),
            ],
        ),
        // A denial, although the outer layer has no units left for a longer time.
        (
            "3/h",
            "2/m",
            [
                (200, ["2", "1", "30"]),
                (200, ["2", "0", "60"]),
                (429, ["2", "0", "60"]),
            ],
        ),
    ] {
        let headers = Headers::DRAFT_6;
        let service = layer(outer)
            .headers(headers)
            .layer(limited(layer(inner).headers(headers)));
        for (status, numbers) in expected {
            let response = send(&service, request("alice")).await;
            let fields = legacy(&response, "ratelimit");
            assert_eq!(
                (response.status().as_u16(), fields),
                (status, numbers.map(Some)),
                "{outer} around {inner}"
            );
            assert_eq!(
                response.headers().get_all("ratelimit-reset").iter().count(),
                1
            );
        }
    }
}

/// A cost of 3 is denied with 2 left, while the outer layer has 0 left.
#[tokio::test(start_paused = true)]
async fn an_inner_denial_fills_legacy_headers() {
    let headers = Headers::X_SECONDS;
    let inner = layer("2/m").cost(|_| 3).headers(headers);
    let service = layer("1/h").headers(headers).layer(limited(inner));
    let response = send(&service, request("alice")).await;
    assert_eq!(
        (response.status().as_u16(), legacy(&response, "x-ratelimit")),
        (429, ["2", "2", "0"].map(Some))
    );
}

/// A denial that reports 99 remaining would be misleading.
#[tokio::test]
async fn denials_never_get_legacy_headers_of_others() {
    for within in [Headers::NONE, Headers::DRAFT_11, Headers::DRAFT_6] {
        let outer = layer("100/h").headers(Headers::X_SECONDS);
        let service = outer.layer(limited(layer("1/h").headers(within)));
        assert_eq!(
            legacy(&send(&service, request("alice")).await, "x-ratelimit")[1],
            Some("99")
        );
        let denied = send(&service, request("alice")).await;
        assert_eq!(
            (denied.status().as_u16(), legacy(&denied, "x-ratelimit")),
            (429, [None; 3]),
            "{within:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn user_code_can_write_decision_fields() {
    let limiter = Limiter::new(LocalStore::default(), gcra("words", "2/m"));
    let decide = || {
        limiter
            .take(Key::new("alice"), 2)
            .now_or_never()
            .unwrap()
            .unwrap()
    };
    let (allowed, denied) = (decide(), decide());
    let append = |headers: Headers, decision: &Decision| {
        let mut response = Response::new(String::new());
        headers.append(decision, response.headers_mut());
        response
    };

    let response = append(Headers::DRAFT_11.and(Headers::X_SECONDS), &allowed);
    assert_eq!(
        both(&response),
        (Some("\"words\";r=0;t=30"), Some("\"words\";q=2;w=60"))
    );
    assert_eq!(legacy(&response, "x-ratelimit"), ["2", "0", "60"].map(Some));
    assert_eq!(response.headers().len(), 5);

    let response = append(Headers::NONE, &denied);
    assert_eq!(field(&response, "retry-after"), Some("60"));
    assert_eq!(response.headers().len(), 1);

    // A second decision: the lists have both, the tighter legacy headers win, and the existing
    // `Retry-After` stays.
    let mut response = append(Headers::DRAFT_11.and(Headers::X_SECONDS), &allowed);
    response.headers_mut().insert("retry-after", 7.into());
    let other = Limiter::new(LocalStore::default(), gcra("other", "9/m"));
    let roomy = other
        .take(Key::new("alice"), 1)
        .now_or_never()
        .unwrap()
        .unwrap();
    Headers::DRAFT_11
        .and(Headers::X_SECONDS)
        .append(&roomy, response.headers_mut());
    assert_eq!(response.headers().get_all("ratelimit").iter().count(), 2);
    assert_eq!(legacy(&response, "x-ratelimit"), ["2", "0", "60"].map(Some));
    Headers::NONE
        .and(Headers::X_SECONDS)
        .append(&denied, response.headers_mut());
    assert_eq!(field(&response, "retry-after"), Some("7"));

    // A denial sets the legacy headers, although the existing ones have less remaining.
    let never = limiter
        .take(Key::new("bob"), 3)
        .now_or_never()
        .unwrap()
        .unwrap();
    let mut response = append(Headers::X_SECONDS, &allowed);
    Headers::NONE
        .and(Headers::X_SECONDS)
        .append(&never, response.headers_mut());
    assert_eq!(legacy(&response, "x-ratelimit"), ["2", "2", "0"].map(Some));

    // Text that is not a number was not written by this crate.
    let mut headers = HeaderMap::new();
    headers.insert("x-ratelimit-remaining", "0, 10;w=1".parse().unwrap());
    headers.insert("x-ratelimit-reset", "soon".parse().unwrap());
    Headers::NONE
        .and(Headers::X_SECONDS)
        .append(&roomy, &mut headers);
    assert_eq!(headers["x-ratelimit-remaining"], "8");
    assert_eq!(headers["x-ratelimit-reset"], "7");
}

/// Draws one line of the picture: a request at this second, and the time for which the remaining
/// units must last.
fn line(second: usize, response: &Response<String>) -> String {
    let limit = field(response, "ratelimit")
        .unwrap()
        .split_once(';')
        .unwrap()
        .1;
    let number = |name: &str| {
        limit
            .split(';')
            .find_map(|part| part.strip_prefix(name))
            .unwrap()
    };
    let (remaining, seconds) = (number("r="), number("t=").parse::<usize>().unwrap());
    // Two columns are 5 s.
    let (start, width) = (" ".repeat(second * 2 / 5), seconds * 2 / 5 - 1);
    let bar = format!(" {remaining} ");
    format!(
        "{second:>3} s   {}   {limit:<10}   {start}|{bar:-^width$}|",
        response.status().as_u16()
    )
}

#[tokio::test(start_paused = true)]
async fn the_guides_picture_is_accurate() {
    let mut picture = String::new();
    for (title, strategy, seconds) in [
        ("Gcra, 3/m", Strategy::Gcra, &[0, 0, 0, 10, 20, 60][..]),
        (
            "FixedWindow, 3/m",
            Strategy::FixedWindow(Align::FirstHit),
            &[0, 15, 30, 45, 60],
        ),
    ] {
        let policy = Policy::new("api", strategy, "3/m").unwrap();
        let service = limited(RateLimitLayer::new(LocalStore::default(), Global, policy));
        let axis = "0 s     20 s    40 s    60 s    80 s    100 s   120 s";
        picture += &format!("{title:<27}{axis}\n");
        let mut now = 0;
        for &second in seconds {
            advance(Duration::from_secs(second as u64 - now)).await;
            now = second as u64;
            picture += &line(second, &send(&service, request("alice")).await);
            picture += "\n";
        }
    }
    let guide = include_str!("../../../docs/answers.md");
    assert!(
        guide.contains(&picture),
        "the guide must have this picture:\n{picture}"
    );
}
