//! `cargo run --example strategies`
//!
//! A page to type a quota, and to choose a pattern of requests. It shows what each strategy grants, when, and what a client is
//! told: decided by the crate itself on a simulated clock, so the answer is immediate. The page listens at `PORT` (3000) for
//! this machine only. With arguments, the example prints the same: `cargo run --example strategies -- 10/10s border`.

#[path = "../listen.rs"]
mod listen;
#[path = "../local_page.rs"]
mod local_page;
mod play;
#[path = "../serve.rs"]
mod serve;

use std::env;
use std::error::Error;
use std::process::ExitCode;

use axum::middleware::from_fn;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde::de::value::{Error as Invalid, StrDeserializer};

use crate::local_page::{only_our_page, page};
use crate::play::{Answer, Input, Pattern, Play, Plays, play_all};

/// Columns of a printed play.
const COLUMNS: usize = 60;

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match run(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &[String]) -> Result<(), Box<dyn Error>> {
    match args {
        [] => serve_page().await,
        [quota, pattern] => {
            let pattern = Pattern::deserialize(StrDeserializer::<Invalid>::new(pattern))?;
            let quota = quota.clone();
            // A runtime cannot run within another.
            let plays = tokio::task::spawn_blocking(move || play_all(&Input { quota, pattern }));
            print!("{}", table(&plays.await??));
            Ok(())
        }
        _ => Err("usage: strategies [QUOTA steady|burst|border|greedy|polite]".into()),
    }
}

async fn serve_page() -> Result<(), Box<dyn Error>> {
    let app = Router::new()
        .route("/", get(async || page(include_str!("page.html"))))
        .route("/play", post(answer))
        .layer(from_fn(only_our_page));
    let listener = local_page::listen("choose a quota").await?;
    Ok(serve::serve(listener, app).await?)
}

async fn answer(Json(input): Json<Input>) -> Result<Json<Plays>, (StatusCode, String)> {
    let plays = tokio::task::spawn_blocking(move || play_all(&input)).await;
    let plays = plays.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    plays
        .map(Json)
        .map_err(|error| (StatusCode::BAD_REQUEST, error))
}

/// Returns the plays as text: a line for each strategy, and one with its requests in time.
fn table(plays: &Plays) -> String {
    let mut text = format!(
        "{:<26} {:>7} {:>7} {:>13}  first denial\n",
        "strategy", "granted", "denied", "in one period"
    );
    for play in &plays.plays {
        if let Some(error) = &play.error {
            text += &format!("{:<26} {error}\n", play.strategy);
            continue;
        }
        text += &format!(
            "{:<26} {:>7} {:>7} {:>13}  {}\n  {}\n",
            play.strategy,
            play.granted,
            play.requests.len() - play.granted,
            play.most,
            first_denial(play),
            columns(&play.requests, plays.duration),
        );
    }
    text + "in time: + all granted, x all denied, ~ some of each\n"
}

fn first_denial(play: &Play) -> String {
    let denied = play.requests.iter().find(|answer| !answer.is_allowed);
    match denied.and_then(|answer| Some((answer.at, answer.retry_after?))) {
        Some((at, wait)) => format!("after {at:.1} s, Retry-After: {wait}"),
        None => "none".to_owned(),
    }
}

fn columns(requests: &[Answer], duration: f64) -> String {
    let mut columns = ['.'; COLUMNS];
    for answer in requests {
        let at = (answer.at / duration * COLUMNS as f64) as usize;
        let column = &mut columns[at.min(COLUMNS - 1)];
        *column = match (*column, answer.is_allowed) {
            ('.' | '+', true) => '+',
            ('.' | 'x', false) => 'x',
            _ => '~',
        };
    }
    columns.iter().collect()
}
