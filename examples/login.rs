//! `cargo run --example login`
//!
//! A login of which only failures count: 5 wrong passwords a minute for each user, over all instances. An attempt is taken
//! before the password is looked at, and given back if it was right: so many guesses at once are no way around. Settings by
//! the environment: `PORT` (3000), `FAILURES` (`5/min`), and `REDIS_URL` to share the count among instances.

use std::env;
use std::error::Error;
use std::time::Duration;

use axum::extract::Path;
use axum::{Router, routing::post};
use http::StatusCode;
use http::request::Parts;
use tower_redis_ratelimit::{AnyStore, Key, Policy, Quota, RateLimitLayer, Settlement, Strategy, key_fn};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let quota: Quota = setting("FAILURES", "5/min")?;
    let failures = Policy::new("login", Strategy::SlidingLog, quota)?;

    // The path has the user's name.
    let user = key_fn(|request: &Parts| Some(Key::new(request.uri.path())));
    let layer = RateLimitLayer::new(AnyStore::from_env("REDIS_URL")?, user, failures).settle(|response| match response
        .status
    {
        StatusCode::UNAUTHORIZED => Settlement::Keep,
        _ => Settlement::GiveBack,
    });
    let app = Router::new().route("/login/{user}", post(login)).layer(layer);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    println!("{quota} wrong passwords for each user. Try: curl -i -d 'open sesame' localhost:{port}/login/alice");
    axum::serve(listener, app).await?;
    Ok(())
}

/// Takes its time, as whoever looks at a password does.
async fn login(Path(user): Path<String>, password: String) -> (StatusCode, String) {
    println!("{user} tries");
    tokio::time::sleep(Duration::from_millis(50)).await;
    if password == "open sesame" {
        (StatusCode::OK, format!("Welcome, {user}!\n"))
    } else {
        (StatusCode::UNAUTHORIZED, "Wrong password.\n".to_owned())
    }
}

/// A setting of the environment, or what it is by default.
fn setting<T>(name: &str, default: &str) -> Result<T, String>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = env::var(name).unwrap_or_else(|_| default.to_owned());
    text.parse().map_err(|error| format!("{name}={text}: {error}"))
}
