//! `cargo run --example llm_gateway`
//!
//! A gateway to a language model. Each API key has 1,000 tokens a minute, and 4 answers at a time, over all instances.
//! What an answer may cost at most is reserved when it begins (the body's `max_tokens`); what it has cost is settled when
//! it ends, also if the client hangs up before. Settings by the environment: `PORT` (3000), `TOKENS` (`1000/min`),
//! `STREAMS` (4), and `REDIS_URL` to share the counts among instances.

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::time::Duration;

use axum::body::Body;
use axum::{Json, Router, routing::post};
use futures_util::stream;
use serde::Deserialize;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::settle::{Charge, ReserveError};
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Policies, Policy, Quota, RateLimitLayer, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let tokens: Quota = setting("TOKENS", "1000/min")?;
    let streams: u32 = setting("STREAMS", "4")?;

    let tokens_a_minute = Policy::new("tokens", Strategy::SlidingWindow { cells: 60 }, tokens)?;
    let policies = Policies::new([tokens_a_minute, Policy::in_flight("streams", streams)?])?;
    let layer = RateLimitLayer::new(
        AnyStore::from_env("REDIS_URL")?,
        HeaderKey::new("x-api-key")?,
        policies,
    );
    // An answer that is denied its tokens would keep what the layer takes at the start.
    let app = Router::new()
        .route("/chat", post(chat))
        .layer(layer.cost(|_| 0).until_body_end());

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    println!("{tokens} tokens and {streams} answers at a time for each key. Try:");
    let question = r#"{"prompt":"Tell me of the sea.","max_tokens":200}"#;
    println!("curl -iN -H 'x-api-key: alice' --json '{question}' localhost:{port}/chat");
    axum::serve(listener, app).await?;
    Ok(())
}

#[derive(Deserialize)]
struct Question {
    prompt: String,
    /// The most that the answer may have.
    max_tokens: u32,
}

/// Streams the model's answer, and charges the tokens of the question and each of the answer.
async fn chat(
    charge: Charge,
    Json(Question { prompt, max_tokens }): Json<Question>,
) -> Result<Body, ReserveError> {
    charge.reserve(max_tokens).await?;
    charge.set(prompt.split_whitespace().count() as u32);
    let answer = stream::unfold(
        (Model::answer(&prompt), charge),
        |(mut model, charge)| async move {
            let token = model.next().await?;
            charge.add(1);
            Some((Ok::<_, Infallible>(token), (model, charge)))
        },
    );
    Ok(Body::from_stream(answer))
}

/// A language model that says what it is told, a word at a time, three times over.
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

/// A setting of the environment, or what it is by default.
fn setting<T>(name: &str, default: &str) -> Result<T, String>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = env::var(name).unwrap_or_else(|_| default.to_owned());
    text.parse()
        .map_err(|error| format!("{name}={text}: {error}"))
}
