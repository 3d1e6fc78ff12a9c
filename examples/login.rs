//! `cargo run --example login`
//!
//! A login that counts only failures: 5 wrong passwords a minute for each user and 20 for each address, over all
//! instances. An attempt is taken before the password is checked, and refunded if it was right, so that many guesses in
//! parallel do not help. Settings by the environment: `PORT` (3000), `FAILURES` (`5/min`), `ADDRESS` (`20/min`), and `REDIS_URL`
//! to share the counts among instances.
//!
//! **Anyone who knows a user's name can use up the user's attempts.** The limit by address makes that costly for one address, and a
//! `FAILURES` of few minutes makes it short. If that is not enough, require a captcha instead of denying, or count devices that
//! have logged in before (by a cookie) separately.
//!
//! Behind a proxy, take `ClientIp` instead of `PeerIp`.

mod listen;
mod serve;

use std::env;
use std::error::Error;
use std::io::{Write, stdout};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Json, State};
use axum::{Router, routing::post};
use http::StatusCode;
use serde::Deserialize;
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::settle::{ReserveError, Settlement};
use tower_redis_ratelimit::store::{AnyStore, Store};
use tower_redis_ratelimit::{Key, Limiter, Policy, Quota, RateLimitLayer, Strategy};

/// Maximum length of a request in bytes. It also bounds the user's name in the log, and in Redis.
const MAX_LENGTH: usize = 1_024;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let quota: Quota = setting("FAILURES", "5/min")?;
    let of_address: Quota = setting("ADDRESS", "20/min")?;
    let store = AnyStore::from_env("REDIS_URL")?;
    let failures = Limiter::new(
        store.clone(),
        Policy::new("login", Strategy::SlidingLog, quota)?,
    );
    let by_address = Policy::new("login-address", Strategy::SlidingLog, of_address)?;
    // The limit of the address also counts attempts that the user's limit denies.
    let by_address = RateLimitLayer::new(store.clone(), PeerIp, by_address).settle(|response| {
        if response.status == StatusCode::OK {
            Settlement::Refund
        } else {
            Settlement::Keep
        }
    });
    let app = Router::new()
        .route("/login", post(login))
        .layer(DefaultBodyLimit::max(MAX_LENGTH))
        .layer(by_address)
        .with_state(failures);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    println!("{quota} wrong passwords for each user, {of_address} for each address. Try:");
    println!(
        "curl -i --json '{{\"user\":\"alice\",\"password\":\"open sesame\"}}' localhost:{port}/login"
    );
    serve::serve(listener, app).await?;
    // What the last requests gave back.
    store.flush().await;
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
    let user = fold(&login.user);
    let attempt = failures.reserve(Key::new(&user), 1).await?;
    // The attempt counts even if the client hangs up.
    attempt.set(1);
    if !is_right(&user, &login.password).await {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    attempt.settle(0);
    Ok(StatusCode::OK)
}

/// Returns one spelling for each user. Fold names exactly as your user lookup does: if a database ignores case, accents or
/// blanks, each spelling of a user would have separate attempts. The id of the account is best.
fn fold(user: &str) -> String {
    user.trim().to_lowercase()
}

/// Takes as long as checking a hashed password.
async fn is_right(user: &str, password: &str) -> bool {
    // `{:?}` escapes control characters. `println!` would panic once no one reads the log.
    drop(writeln!(stdout(), "{user:?} tries"));
    tokio::time::sleep(Duration::from_millis(50)).await;
    password == "open sesame"
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
