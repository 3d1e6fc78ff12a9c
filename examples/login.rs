//! `cargo run --example login`
//!
//! A login of which only failures count: 5 wrong passwords a minute for each user, over all instances. An attempt is
//! taken before the password is looked at, and refunded if it was right: so many guesses at once are no way around.
//! Settings by the environment: `PORT` (3000), `FAILURES` (`5/min`), and `REDIS_URL` to share the count among
//! instances.

use std::env;
use std::error::Error;
use std::time::Duration;

use axum::extract::{Path, Request};
use axum::middleware::{Next, from_fn};
use axum::{Router, response::Response, routing::post};
use http::StatusCode;
use tower_redis_ratelimit::extract::key_fn;
use tower_redis_ratelimit::settle::Settlement;
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Key, Policy, Quota, RateLimitLayer, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let quota: Quota = setting("FAILURES", "5/min")?;
    let failures = Policy::new("login", Strategy::SlidingLog, quota)?;

    let user = key_fn(|request| request.extensions.get().map(|User(name)| Key::new(name)));
    let layer = RateLimitLayer::new(AnyStore::from_env("REDIS_URL")?, user, failures).settle(|response| match response
        .status
    {
        StatusCode::UNAUTHORIZED => Settlement::Keep,
        _ => Settlement::Refund,
    });
    // The last one is the outermost: the limit knows the user.
    let app = Router::new().route("/login/{user}", post(login).layer(layer).layer(from_fn(note_user)));

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    println!("{quota} wrong passwords for each user. Try: curl -i -d 'open sesame' localhost:{port}/login/alice");
    axum::serve(listener, app).await?;
    Ok(())
}

#[derive(Clone)]
struct User(String);

/// Notes the user as `login` sees it, which is decoded: one user has many paths, such as `/login/alice` and
/// `/login/%61lice`.
async fn note_user(Path(user): Path<String>, mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(User(user));
    next.run(request).await
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
