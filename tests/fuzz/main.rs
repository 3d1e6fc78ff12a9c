//! Fuzz tests: input from clients, operators and servers, damaged at random, must not cause a
//! panic, a hang or a lockout.
//!
//! Each test damages valid input, by the same seeds in each run. `FUZZ_SECONDS` takes random seeds
//! for so long; `cargo xtask fuzz` runs each test for ten minutes. A failure prints its seed, which
//! `FUZZ_SEED` replays.

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
use std::iter;
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

/// Runs a case for the first `count` seeds, for random ones for `FUZZ_SECONDS`, or for `FUZZ_SEED`.
async fn each_seed<F: Future<Output = ()>>(count: u64, mut case: impl FnMut(Rng) -> F) {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICS.lock().unwrap().push(info.to_string());
        hook(info);
    }));
    let since = Instant::now();
    let seeds: Box<dyn Iterator<Item = u64>> = match (setting("FUZZ_SEED"), setting("FUZZ_SECONDS"))
    {
        (Some(seed), _) => Box::new(iter::once(seed)),
        (None, Some(seconds)) => {
            let time = Duration::from_secs(seconds);
            let random = iter::repeat_with(|| fastrand::u64(..));
            Box::new(random.take_while(move |_| since.elapsed() < time))
        }
        (None, None) => Box::new(0..count),
    };
    let mut done = 0;
    for seed in seeds {
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
