//! What a decision leaves behind: header fields for the client, extensions for the code around.

use http::{Response, StatusCode};
use tower_redis_ratelimit::{Decision, OnError, OnMissingKey, Outcome, Rejection, Source};

use crate::support::*;

/// The `ratelimit` and the `ratelimit-policy` field.
fn both<B>(response: &Response<B>) -> (Option<&str>, Option<&str>) {
    (field(response, "ratelimit"), field(response, "ratelimit-policy"))
}

#[tokio::test(start_paused = true)]
async fn every_counted_response_tells_the_policy_and_what_remains() {
    let service = limited(layer("2/m"));
    for (status, expected) in
        [(200, "\"api\";r=1;t=30"), (200, "\"api\";r=0;t=30"), (429, "\"api\";r=0;t=30"), (429, "\"api\";r=0;t=30")]
    {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(both(&response), (Some(expected), Some("\"api\";q=2;w=60")));
    }
}

#[tokio::test(start_paused = true)]
async fn the_decision_is_with_the_request_and_with_the_response() {
    let service = limited(layer("2/m"));
    let response = send(&service, request("alice")).await;
    let left = decision(&response).unwrap();
    assert_eq!((left.outcome(), left.remaining(), left.source()), (Outcome::Allowed, 1, Source::Local));
    let Some(Seen(Some(seen))) = response.extensions().get() else { panic!("the inner service saw no decision") };
    assert_eq!(seen, left);

    send(&service, request("alice")).await;
    let denied = send(&service, request("alice")).await;
    assert!(decision(&denied).unwrap().retry_after().is_some());
    assert!(denied.extensions().get::<Seen>().is_none(), "the inner service has nothing to see");
}

#[tokio::test]
async fn callers_are_counted_apart() {
    let service = limited(layer("1/h"));
    for (user, status) in [("alice", 200), ("alice", 429), ("bob", 200), ("bob", 429)] {
        assert_eq!(send(&service, request(user)).await.status(), status, "{user}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_fields_can_be_switched_off_and_nothing_else_with_them() {
    let service = limited(layer("1/h").headers(false));
    for status in [200, 429] {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(both(&response), (None, None));
        assert!(decision(&response).is_some());
        assert_eq!(field(&response, "retry-after").is_some(), status == 429);
    }
    let response = send(&limited(layer("1/h").headers(false).headers(true)), request("alice")).await;
    assert_eq!(both(&response), (Some("\"api\";r=0;t=3600"), Some("\"api\";q=1;w=3600")));
}

#[tokio::test]
async fn an_uncounted_response_tells_nothing_of_a_count() {
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
async fn a_response_of_ones_own_gets_the_fields_and_the_decision_too() {
    let teapot = |_: Rejection<'_>| {
        let mut response = Response::new("no".to_owned());
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    };
    let service = limited(layer("1/h").reject(teapot));
    send(&service, request("alice")).await;
    let response = send(&service, request("alice")).await;
    assert_eq!((response.status(), response.body().as_str()), (StatusCode::IM_A_TEAPOT, "no"));
    assert_eq!(both(&response), (Some("\"api\";r=0;t=3600"), Some("\"api\";q=1;w=3600")));
    assert!(!response.extensions().get::<Decision>().unwrap().is_allowed());
}
