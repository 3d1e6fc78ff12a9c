//! Tokens of a language model, and few answers at a time.

use std::num::NonZeroU32;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use futures_util::{StreamExt, stream};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::by_extension;
use tower_redis_ratelimit::settle::{RequestCost, ReserveError};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{LocalStore, Policies, Policy, RateLimitLayer, Strategy};

/// In the extensions of each request that reaches the limits.
#[derive(Clone)]
struct User(&'static str);

async fn authenticate(mut request: Request<Body>, next: Next) -> Response {
    if request
        .headers()
        .get("x-api-key")
        .is_none_or(|key| key != "key-of-ann")
    {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    request.extensions_mut().insert(User("ann"));
    next.run(request).await
}

#[derive(serde::Deserialize)]
struct Question {
    prompt: String,
    max_tokens: NonZeroU32,
}

async fn chat(cost: RequestCost, Json(question): Json<Question>) -> Result<Body, ReserveError> {
    let (prompt, max_tokens) = (
        question.prompt.split(' ').count() as u32,
        question.max_tokens.get(),
    );
    cost.reserve(prompt.saturating_add(max_tokens)).await?;
    // From this line, the request costs its count, which is at least the prompt.
    cost.set(prompt);
    let tokens = stream::iter(["The ", "sea ", "is ", "blue."]).inspect(move |_| cost.add(1));
    Ok(Body::from_stream(
        tokens
            .take(max_tokens as usize)
            .map(Ok::<_, std::convert::Infallible>),
    ))
}

pub(crate) fn app<S: Store>(store: S, policies: Policies) -> Router {
    let limits = RateLimitLayer::new(store, by_extension(|user: &User| user.0), policies);
    let limits = limits.cost(|_| 0).until_body_end();
    // The last layer is the outermost: the limits know the user.
    Router::new()
        .route("/chat", post(chat))
        .layer(limits)
        .layer(from_fn(authenticate))
}

#[tokio::test]
async fn tokens_and_answers_are_limited() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = Policy::new("tokens", Strategy::SlidingWindow { cells: 60 }, "1000/m")?;
    let (store, limits) = (
        LocalStore::default(),
        Policies::new([tokens, Policy::in_flight("streams", 2)?])?,
    );
    let app = app(store, limits);
    let by = |key, max_tokens| {
        let request = Request::post("/chat")
            .header("x-api-key", key)
            .header("content-type", "application/json");
        let body = Body::from(format!(
            r#"{{"prompt":"What is the sea?","max_tokens":{max_tokens}}}"#
        ));
        app.clone().oneshot(request.body(body).expect("good"))
    };
    let ask = |max_tokens| by("key-of-ann", max_tokens);
    assert_eq!(by("invented", 1).await?.status(), 401);
    assert_eq!(ask(0).await?.status(), 422);
    let first = ask(3).await?;
    assert_eq!(ask(990).await?.status(), 429, "too many tokens");
    let second = ask(300).await?;
    assert_eq!(ask(1).await?.status(), 429, "a third answer");

    // One is read to its end, and the client of the other hangs up before the first token.
    assert_eq!(to_bytes(first.into_body(), 1_000).await?, "The sea is ");
    drop(second);
    // The first has cost 7, the second 4, and the denied ones nothing.
    assert_eq!(ask(986).await?.status(), 429);
    assert_eq!(ask(985).await?.status(), 200);
    Ok(())
}
