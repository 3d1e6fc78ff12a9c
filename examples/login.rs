//! `cargo run --example login`
//!
//! A login of which only failures count: 5 wrong passwords a minute for each user, over all instances. An attempt is
//! taken before the password is looked at, and refunded if it was right: so many guesses at once are no way around.
//! Settings by the environment: `PORT` (3000), `FAILURES` (`5/min`), and `REDIS_URL` to share the count among
//! instances.

use std::env;
use std::error::Error;
use std::time::Duration;

use axum::extract::{Json, State};
use axum::{Router, routing::post};
use http::StatusCode;
use serde::Deserialize;
use tower_redis_ratelimit::settle::ReserveError;
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Key, Limiter, Policy, Quota, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let quota: Quota = setting("FAILURES", "5/min")?;
    let failures = Limiter::new(
        AnyStore::from_env("REDIS_URL")?,
        Policy::new("login", Strategy::SlidingLog, quota)?,
    );
    let app = Router::new()
        .route("/login", post(login))
        .with_state(failures);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    println!("{quota} wrong passwords for each user. Try:");
    println!(
        "curl -i --json '{{\"user\":\"alice\",\"password\":\"open sesame\"}}' localhost:{port}/login"
    );
    axum::serve(listener, app).await?;
    Ok(())
}

#[derive(Deserialize)]
struct Login {
    user: String,
    password: String,
}

async fn login(
    State(failures): State<Limiter<AnyStore>>,
    Json(login): Json<Login>,
) -> Result<StatusCode, ReserveError> {
    let attempt = failures.reserve(Key::new(&login.user), 1).await?;
    // It counts from here on, also if the client hangs up.
    attempt.set(1);
    if !is_right(&login).await {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    attempt.settle(0);
    Ok(StatusCode::OK)
}

/// Takes its time, as whoever looks at a password does.
async fn is_right(login: &Login) -> bool {
    println!("{} tries", login.user);
    tokio::time::sleep(Duration::from_millis(50)).await;
    login.password == "open sesame"
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
