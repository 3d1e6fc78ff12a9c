//! `cargo run --example llm_gateway`
//!
//! A gateway to a language model. Each user has 1,000 tokens a minute and 4 answers at a time, over all instances.
//! The tokens of the prompt and the longest answer, `max_tokens`, are reserved before the model starts, and the stream ends at
//! `max_tokens`. So no answer costs more than its reservation. The real cost is settled when the answer ends or its client hangs
//! up. Only users with a known API key get an answer: a client that invents keys would have a new quota for each.
//!
//! **Tokens count when they are reserved.** A client can hold back `STREAMS` answers of earlier periods, and read them in the
//! current one: at most `STREAMS + 1` times the quota in a period. If that is too much, end a stream after one period. Over
//! many periods no user gets more than the quota of each, and one more.
//!
//! **A word is a token here**, so a prompt without spaces is one token: use your model's tokenizer in `tokens`.
//!
//! Settings by the environment: `PORT` (3000), `TOKENS` (`1000/min`), `STREAMS` (4), `KEYS` with their users
//! (by default `key-of-alice=alice key-of-bob=bob`, which are public), and `REDIS_URL` to share the counts among instances.

mod listen;
mod serve;

use std::collections::HashMap;
use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use futures_util::{StreamExt, stream};
use http::{StatusCode, header};
use serde::Deserialize;
use tower_redis_ratelimit::extract::by_extension;
use tower_redis_ratelimit::settle::{RequestCost, ReserveError};
use tower_redis_ratelimit::store::{AnyStore, Store};
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, RateLimitLayer, Strategy};

/// The keys without the setting `KEYS`.
const KEYS: &str = "key-of-alice=alice key-of-bob=bob";
/// Maximum length of a question in bytes.
const MAX_LENGTH: usize = 64 * 1024;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let tokens: Quota = setting("TOKENS", "1000/min")?;
    let streams: u32 = setting("STREAMS", "4")?;
    let keys: String = setting("KEYS", KEYS)?;
    let store = AnyStore::from_env("REDIS_URL")?;
    let app = app(store.clone(), tokens, streams, &keys)?;

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    println!("{tokens} tokens and {streams} answers at a time for each user. Try:");
    let question = r#"{"prompt":"Tell me of the sea.","max_tokens":200}"#;
    let key = if keys == KEYS { "key-of-alice" } else { "KEY" };
    println!("curl -iN -H 'x-api-key: {key}' --json '{question}' localhost:{port}/chat");
    serve::serve(listener, app).await?;
    // What the last requests gave back.
    store.flush().await;
    Ok(())
}

/// The gateway, without a server.
pub(crate) fn app(
    store: AnyStore,
    tokens: Quota,
    streams: u32,
    keys: &str,
) -> Result<Router, Box<dyn Error>> {
    let users = keys
        .split_whitespace()
        // A key may end with the `=` of base64.
        .map(|pair| pair.rsplit_once('=').ok_or("KEYS: use KEY=USER pairs"))
        .map(|pair| pair.map(|(key, user)| (key.to_owned(), User(user.to_owned()))))
        .collect::<Result<HashMap<_, _>, _>>()?;
    let tokens_a_period = Policy::new("tokens", Strategy::SlidingWindow { cells: 60 }, tokens)?;
    let policies = Policies::new([tokens_a_period, Policy::in_flight("streams", streams)?])?;
    let by_user = by_extension(|user: &User| Key::new(&user.0));
    let layer = RateLimitLayer::new(store, by_user, policies);
    // Take nothing before the body is read, since the cost depends on it. By default the layer takes 1, which a
    // request would keep if `reserve` denies it.
    Ok(Router::new()
        .route("/chat", post(chat))
        .layer(DefaultBodyLimit::max(MAX_LENGTH))
        .layer(layer.cost(|_| 0).until_body_end())
        // The last one is the outermost: the limits know the user.
        .layer(from_fn_with_state(Arc::new(users), authenticate)))
}

/// The user of a key, in the extensions of each request that reaches the limits.
#[derive(Clone)]
struct User(String);

/// Rejects a request whose key is unknown.
async fn authenticate(
    State(users): State<Arc<HashMap<String, User>>>,
    mut request: Request,
    next: Next,
) -> Response {
    let key = request.headers().get("x-api-key");
    let user = key
        .and_then(|key| key.to_str().ok())
        .and_then(|key| users.get(key));
    let Some(user) = user else {
        return (
            StatusCode::UNAUTHORIZED,
            [(header::WWW_AUTHENTICATE, "ApiKey")],
        )
            .into_response();
    };
    request.extensions_mut().insert(user.clone());
    next.run(request).await
}

#[derive(Deserialize)]
struct Question {
    prompt: String,
    /// The maximum length of the answer. Zero is no question, and would reserve nothing for the answer.
    max_tokens: NonZeroU32,
}

/// Streams the model's answer, up to the reserved tokens.
async fn chat(cost: RequestCost, Json(question): Json<Question>) -> Result<Body, ReserveError> {
    let (prompt, max_tokens) = (tokens(&question.prompt), question.max_tokens.get());
    cost.reserve(prompt.saturating_add(max_tokens)).await?;
    // This begins the count, which is charged even if the client hangs up.
    cost.set(prompt);
    let model = Model::answer(&question.prompt);
    let answer = stream::unfold((model, cost), |(mut model, cost)| async move {
        let token = model.next().await?;
        cost.add(1);
        Some((Ok::<_, Infallible>(token), (model, cost)))
    });
    // A model may overrun the limit in its request.
    Ok(Body::from_stream(answer.take(max_tokens as usize)))
}

/// The length of a prompt. Use your model's tokenizer.
fn tokens(prompt: &str) -> u32 {
    u32::try_from(prompt.split_whitespace().count()).unwrap_or(u32::MAX)
}

/// A language model that repeats its prompt three times, one word at a time.
struct Model {
    words: std::vec::IntoIter<String>,
}

impl Model {
    fn answer(prompt: &str) -> Self {
        let words: Vec<_> = (0..3)
            .flat_map(|_| prompt.split_whitespace())
            .map(|word| format!("{word} "))
            .collect();
        Self {
            words: words.into_iter(),
        }
    }

    async fn next(&mut self) -> Option<String> {
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.words.next()
    }
}

/// Returns a setting from the environment, or its default.
fn setting<T>(name: &str, default: &str) -> Result<T, String>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = env::var(name).unwrap_or_else(|_| default.to_owned());
    text.parse()
        .map_err(|error| format!("{name}={text}: {error}"))
}
