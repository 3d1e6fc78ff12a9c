//! A limited tonic server, as a tonic client sees it.

use std::time::Duration;

use tokio::time::advance;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_types::{QuotaViolation, StatusExt};
use tower_redis_ratelimit::extract::{Global, HeaderKey, PeerIp};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::{GrpcReject, OnMissingKey};
use tower_redis_ratelimit::{LocalStore, Policies, RateLimitLayer};

use crate::support::*;

fn violations(status: &Status) -> Vec<(String, String)> {
    let failure = status.get_details_quota_failure();
    let texts = |QuotaViolation {
                     subject,
                     description,
                     ..
                 }: QuotaViolation| (subject, description);
    failure
        .into_iter()
        .flat_map(|failure| failure.violations)
        .map(texts)
        .collect()
}

fn retry_delay(status: &Status) -> Option<Duration> {
    status
        .get_details_retry_info()
        .and_then(|info| info.retry_delay)
}

#[tokio::test(start_paused = true)]
async fn a_denied_client_decodes_both_details() {
    let server = serve(layer(gcra("api", "1/90s")));
    call(&server, from("alice")).await.unwrap();
    advance(Duration::from_micros(500)).await;

    let denied = call(&server, from("alice")).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    let sentence = "The quota of 1 per 90 seconds is used up. Try again in 90 s.";
    assert_eq!(denied.message(), sentence);
    assert_eq!(
        retry_delay(&denied),
        Some(Duration::from_micros(89_999_500)),
        "exact"
    );
    assert_eq!(
        violations(&denied),
        [("api".to_owned(), sentence.to_owned())]
    );
    assert_eq!(field(&denied, PUSHBACK), Some("90000"), "rounded up");
    call(&server, from("bob")).await.unwrap();

    // A client that waits for that time passes.
    advance(retry_delay(&denied).unwrap()).await;
    call(&server, from("alice")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn each_denying_policy_has_a_violation() {
    let policies = Policies::new([
        gcra("burst", "1/s"),
        gcra("daily", "100/d"),
        gcra("hourly", "1/h"),
    ])
    .unwrap();
    let server = serve(layer(policies));
    call(&server, from("alice")).await.unwrap();
    let denied = call(&server, from("alice")).await.unwrap_err();
    let expected = [
        (
            "burst",
            "The quota of 1 per second is used up. Try again in 1 s.",
        ),
        (
            "hourly",
            "The quota of 1 per hour is used up. Try again in 3600 s.",
        ),
    ];
    assert_eq!(
        violations(&denied),
        expected.map(|(subject, text)| (subject.to_owned(), text.to_owned()))
    );
    assert_eq!(
        denied.message(),
        expected[1].1,
        "the one that asks for the longest wait"
    );
    assert_eq!(
        (retry_delay(&denied), field(&denied, PUSHBACK)),
        (Some(Duration::from_secs(3_600)), Some("3600000"))
    );
}

#[tokio::test]
async fn a_cost_above_capacity_forbids_retries() {
    let server = serve(layer(gcra("api", "10/s")).cost(|_| 11));
    let denied = call(&server, from("alice")).await.unwrap_err();
    let sentence = "The request's cost exceeds the maximum burst of 10.";
    assert_eq!(
        (denied.code(), denied.message()),
        (Code::ResourceExhausted, sentence)
    );
    assert_eq!(
        violations(&denied),
        [("api".to_owned(), sentence.to_owned())]
    );
    assert_eq!(
        denied.get_details_retry_info().map(|info| info.retry_delay),
        None
    );
    assert_eq!(field(&denied, PUSHBACK), Some("-1"));
}

#[tokio::test]
async fn store_failures_are_unavailable_with_a_second() {
    let failed = call(
        &serve(layer_with(Broken, gcra("api", "1/h"))),
        from("alice"),
    )
    .await
    .unwrap_err();
    assert_eq!(
        (failed.code(), failed.message()),
        (
            Code::Unavailable,
            "Rate limiting is temporarily unavailable."
        )
    );
    assert_eq!(
        (retry_delay(&failed), field(&failed, PUSHBACK)),
        (Some(Duration::from_secs(1)), Some("1000"))
    );
    assert!(violations(&failed).is_empty());
    tells_no_secret(&failed);
}

#[tokio::test]
async fn a_missing_key_gives_the_extractors_message() {
    let by = |key: HeaderKey| {
        RateLimitLayer::new(LocalStore::default(), key, gcra("api", "9/s"))
            .reject(GrpcReject::new())
    };
    let key = HeaderKey::new("x-api-key").unwrap();
    for (layer, code) in [
        (by(key.clone()), Code::InvalidArgument),
        (by(key.clone().challenge(API_KEY)), Code::Unauthenticated),
    ] {
        let missing = call(&serve(layer), from("alice")).await.unwrap_err();
        assert_eq!(missing.code(), code);
        assert_eq!(
            (missing.message(), field(&missing, PUSHBACK)),
            ("the header x-api-key is missing", Some("-1"))
        );
        assert!(retry_delay(&missing).is_none() && violations(&missing).is_empty());
    }
    // A repeated header gets no challenge, because authentication would not help.
    let mut twice = from("alice");
    twice
        .metadata_mut()
        .append("x-api-key", "one".parse().unwrap());
    twice
        .metadata_mut()
        .append("x-api-key", "two".parse().unwrap());
    let malformed = call(&serve(by(key.clone().challenge(API_KEY))), twice)
        .await
        .unwrap_err();
    assert_eq!(malformed.code(), Code::InvalidArgument);
    // A client without a key may pass.
    let optional = by(key.challenge(API_KEY)).on_missing_key(OnMissingKey::Allow);
    call(&serve(optional), from("alice")).await.unwrap();
}

#[tokio::test]
async fn a_missing_address_stays_internal_in_release_builds() {
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "9/s"))
        .reject(GrpcReject::new());
    let missing = call(&serve(layer), from("alice")).await.unwrap_err();
    assert_eq!(
        (missing.code(), field(&missing, PUSHBACK)),
        (Code::Internal, Some("-1"))
    );
    assert!(
        missing
            .message()
            .starts_with("Rate limiting is misconfigured"),
        "{missing:?}"
    );
    assert!(retry_delay(&missing).is_none() && violations(&missing).is_empty());
    assert_eq!(
        format!("{missing:?}").contains("address"),
        cfg!(debug_assertions),
        "{missing:?}"
    );
}

#[tokio::test]
async fn rejections_never_contain_the_callers_key() {
    let by_user = HeaderKey::new("x-user").unwrap().readable();
    let layer = RateLimitLayer::new(LocalStore::default(), by_user, gcra("api", "1/h"))
        .reject(GrpcReject::new());
    let server = serve(layer);
    call(&server, from(SECRET)).await.unwrap();
    tells_no_secret(&call(&server, from(SECRET)).await.unwrap_err());
}

/// The message goes through `grpc-message`, where bytes other than printable ASCII, and `%`, are escaped.
#[tokio::test]
async fn every_sentence_reaches_the_client() {
    struct Odd(&'static str);

    impl tower_redis_ratelimit::extract::KeyExtractor for Odd {
        fn extract(
            &self,
            _: &http::request::Parts,
        ) -> Result<tower_redis_ratelimit::Key, tower_redis_ratelimit::extract::MissingKey>
        {
            Err(tower_redis_ratelimit::extract::MissingKey::new(self.0))
        }
    }

    for problem in [
        "100 % \u{e9}\u{2028}\u{1f600}\r\n\0\t\u{7f} \"quoted\"",
        "%20",
        "",
        " spaces ",
        "\r\ngrpc-status: 0\r\n",
    ] {
        let layer = RateLimitLayer::new(LocalStore::default(), Odd(problem), gcra("api", "1/h"))
            .reject(GrpcReject::new());
        let missing = call(&serve(layer), from("alice")).await.unwrap_err();
        assert_eq!(
            (missing.code(), missing.message()),
            (Code::InvalidArgument, problem)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_fields_of_the_layer_are_metadata() {
    let server = serve(layer(gcra("api", "1/90s")));
    let mut client = tonic_health::pb::health_client::HealthClient::new(server.clone());
    let granted = client.check(from("alice")).await.unwrap();
    assert_eq!(
        granted.metadata().get("ratelimit").unwrap(),
        "\"api\";r=0;t=90"
    );
    let denied = call(&server, from("alice")).await.unwrap_err();
    let fields = ["ratelimit", "ratelimit-policy", "retry-after"].map(|name| field(&denied, name));
    assert_eq!(
        fields,
        ["\"api\";r=0;t=90", "\"api\";q=1;w=90", "90"].map(Some)
    );

    let plain = serve(layer(gcra("api", "1/90s")).headers(Headers::NONE));
    call(&plain, from("alice")).await.unwrap();
    let denied = call(&plain, from("alice")).await.unwrap_err();
    assert_eq!(
        (field(&denied, "ratelimit"), field(&denied, "retry-after")),
        (None, Some("90"))
    );
}

#[tokio::test]
async fn answers_of_the_service_pass_unchanged() {
    let layer = RateLimitLayer::new(LocalStore::default(), Global, gcra("api", "9/s"))
        .reject(GrpcReject::new());
    let unknown = Request::new(HealthCheckRequest {
        service: "unknown".to_owned(),
    });
    let status = call(&serve(layer), unknown).await.unwrap_err();
    assert_eq!(
        (status.code(), field(&status, PUSHBACK)),
        (Code::NotFound, None)
    );
}
