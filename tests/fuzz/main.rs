//! Fuzz tests: input from clients, operators and servers, damaged at random, must not cause a
//! panic, a hang or a lockout.
//!
//! Each test damages valid input. A failure prints its seed, which `FUZZ_SEED` replays.
//! `FUZZ_SECONDS` sets the duration of each test; `cargo xtask fuzz` runs each for ten minutes.

#![cfg(feature = "serde")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

#[path = "../support/mod.rs"]
mod support;

mod damage;
mod replies;
mod states;
mod texts;

use std::future::Future;
use std::panic;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// Panics of all threads: a panic in a task of the store would not fail the test otherwise.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text}: not a number"))
    })
}

/// Runs a case for many seeds: `count` of them, or for `FUZZ_SECONDS`.
async fn each_seed<F: Future<Output = ()>>(count: u64, mut case: impl FnMut(Rng) -> F) {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICS.lock().unwrap().push(info.to_string());
        hook(info);
    }));
    let time = setting("FUZZ_SECONDS").map(Duration::from_secs);
    let (since, first) = (Instant::now(), setting("FUZZ_SEED"));
    let mut done = 0;
    while done == 0 || first.is_none() && time.map_or(done < count, |time| since.elapsed() < time) {
        let seed = first.unwrap_or_else(|| fastrand::u64(..));
        let shown = ShowSeed(seed);
        case(Rng::with_seed(seed)).await;
        let panics = PANICS.lock().unwrap().clone();
        assert!(panics.is_empty(), "{panics:?}");
        std::mem::forget(shown);
        done += 1;
    }
    println!("{done} cases");
}

/// Prints the seed if a case panics.
struct ShowSeed(u64);

impl Drop for ShowSeed {
    fn drop(&mut self) {
        println!("FUZZ_SEED={}", self.0);
    }
}
