use std::fmt;
use std::future::Pending;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::health::LastOutcome;
use super::{Answer, Backend, Health, Hooks, Store};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Source, Verdict};
use crate::util::lock;

/// A store for tests, which returns predefined replies.
///
/// It counts nothing. It allows every check until another reply is set, which then applies to all
/// checks. A check over several keys reaches it as one check of each key. The source of its decisions is [`Source::Other`] `"mock"`. Clones share the reply. In a
/// [`Fallback`](crate::Fallback), its failures are an outage; alone, it is then [failing](Health::Failing).
///
/// ```
/// use std::time::Duration;
/// use axum::{Router, body::Body, http::Request, routing::get};
/// use tower::ServiceExt;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::store::{ErrorKind, MockStore, StoreError};
/// use tower_redis_ratelimit::{Policy, Quota, RateLimitLayer, Strategy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MockStore::new();
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(store.clone(), Global, policy);
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
///
/// store.deny(Duration::from_secs(30));
/// let response = app.clone().oneshot(Request::new(Body::empty())).await?;
/// assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"30".parse()?));
///
/// store.fail(StoreError::new(ErrorKind::Unreachable));
/// assert_eq!(app.oneshot(Request::new(Body::empty())).await?.status(), 503);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MockStore {
    shared: Arc<Mutex<SharedMock>>,
}

struct SharedMock {
    answer: Arc<Answerer>,
    asked: Vec<Check>,
    last: LastOutcome,
}

type Answerer = dyn Fn(&Check) -> Result<Decision, StoreError> + Send + Sync;

fn decided(check: &Check, verdict: Verdict) -> Result<Decision, StoreError> {
    Ok(check.decided(Source::Other("mock"), check.cost(), |_| verdict))
}

fn allowed(check: &Check) -> Result<Decision, StoreError> {
    decided(check, Verdict::allowed())
}

impl MockStore {
    /// Creates a store that allows every check.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Mutex::new(SharedMock {
                answer: Arc::new(allowed),
                asked: vec![],
                last: LastOutcome::default(),
            })),
        }
    }

    /// Allows all further checks, as if each were its caller's first.
    pub fn allow(&self) {
        self.answer(allowed);
    }

    /// Denies all further checks.
    pub fn deny(&self, retry_after: Duration) {
        self.answer(move |check| decided(check, Verdict::denied(retry_after)));
    }

    /// Fails all further checks.
    pub fn fail(&self, error: StoreError) {
        self.answer(move |_| Err(error.clone()));
    }

    /// Replies to all further checks with `answer`; see [`Check::decided`].
    pub fn answer(
        &self,
        answer: impl Fn(&Check) -> Result<Decision, StoreError> + Send + Sync + 'static,
    ) {
        // Drop the user's former closure outside the lock.
        let _former = mem::replace(&mut lock(&self.shared).answer, Arc::new(answer));
    }

    /// Returns all checks that the store has received, in order.
    pub fn asked(&self) -> Vec<Check> {
        lock(&self.shared).asked.clone()
    }
}

impl Default for MockStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MockStore {
    /// Replies are always ready.
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let mut shared = lock(&self.shared);
        let answer = Arc::clone(&shared.answer);
        shared.asked.push(check.clone());
        // Unlock first: the closure may call the store again.
        drop(shared);
        let answer = answer(&check);
        lock(&self.shared).last.record(&answer);
        Answer::ready(answer)
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::new(self)
    }
}

impl Hooks for MockStore {
    fn health(&self) -> Health {
        lock(&self.shared).last.health()
    }
}

/// Shows the number of received checks only.
impl fmt::Debug for MockStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockStore")
            .field("asked", &lock(&self.shared).asked.len())
            .finish_non_exhaustive()
    }
}
