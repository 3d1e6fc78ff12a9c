//! A store that replies late, as if it were far away, and that may fail.

#![allow(unreachable_pub, reason = "shared by test binaries")]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;
use tower_redis_ratelimit::check::{Check, Decision, Mode};
use tower_redis_ratelimit::store::{Answer, ErrorKind, Store, StoreError};
use tower_redis_ratelimit::{Key, LocalStore};

/// Wraps a local store: a check takes `there` to arrive, and its reply takes as long to return.
#[derive(Clone)]
pub struct Late {
    store: LocalStore,
    there: Duration,
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
            shared: Arc::default(),
        }
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
        self.shared.asked.lock().unwrap().push(check.mode());
        let Self {
            store,
            there,
            shared,
        } = self.clone();
        Answer::pending(Box::pin(async move {
            sleep(there).await;
            let fails = shared.fails.load(SeqCst)
                || shared
                    .failing
                    .fetch_update(SeqCst, SeqCst, |failing| failing.checked_sub(1))
                    .is_ok();
            let answer = if fails {
                Err(StoreError::new(ErrorKind::Unreachable))
            } else {
                store.check(check).await
            };
            sleep(there).await;
            answer
        }))
    }

    fn warm(&self, key: &Key, decision: &Decision) {
        self.store.warm(key, decision);
    }

    fn identity(&self) -> Option<usize> {
        self.store.identity()
    }
}
