//! A store that replies late, as if it were far away, and that may fail.

#![allow(unreachable_pub, reason = "shared by test binaries")]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use tokio::time::sleep;
use tower_redis_ratelimit::LocalStore;
use tower_redis_ratelimit::check::{Check, Decision, Mode};
use tower_redis_ratelimit::store::{Answer, Backend, ErrorKind, Store, StoreError, Waiters};

/// Wraps a local store: a check takes `there` to arrive, and its reply takes as long to return.
#[derive(Clone)]
pub struct Late {
    store: LocalStore,
    there: Duration,
    /// The way there takes up to as much longer.
    jitter: Duration,
    /// Of this instance.
    waiters: Waiters,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    fails: AtomicBool,
    /// The number of further checks that fail.
    failing: AtomicUsize,
    asked: Mutex<Vec<Mode>>,
}

impl Late {
    pub fn new(store: &LocalStore, there: Duration) -> Self {
        Self {
            store: store.clone(),
            there,
            jitter: Duration::ZERO,
            waiters: Waiters::default(),
            shared: Arc::default(),
        }
    }

    /// Checks arrive up to `jitter` later, and so in any order.
    pub fn jittered(self, jitter: Duration) -> Self {
        Self { jitter, ..self }
    }

    pub fn fail(&self, fails: bool) {
        self.shared.fails.store(fails, SeqCst);
    }

    pub fn fail_next(&self, count: usize) {
        self.shared.failing.store(count, SeqCst);
    }

    /// Returns the modes of all checks.
    pub fn asked(&self) -> Vec<Mode> {
        self.shared.asked.lock().unwrap().clone()
    }
}

impl Store for Late {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let number = {
            let mut asked = self.shared.asked.lock().unwrap();
            asked.push(check.mode());
            asked.len() as u64
        };
        let Self {
            store,
            there,
            jitter,
            waiters,
            shared,
        } = self.clone();
        let later = jitter.mul_f64(Rng::with_seed(number).f64());
        Answer::pending(Box::pin(async move {
            sleep(there + later).await;
            let fails = shared.fails.load(SeqCst)
                || shared
                    .failing
                    .fetch_update(SeqCst, SeqCst, |failing| failing.checked_sub(1))
                    .is_ok();
            let answer = if fails {
                Err(StoreError::new(ErrorKind::Unreachable))
            } else {
                store.check(check.clone()).await
            };
            sleep(there).await;
            waiters.freed(&check);
            answer
        }))
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::from(&self.waiters)
    }
}
