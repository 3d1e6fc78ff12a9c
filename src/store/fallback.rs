use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tokio::time::{Sleep, sleep, timeout};

use super::breaker::Breaker;
use super::clock::Clock;
use super::observer::Observers;
use super::{Error, ErrorKind, Observer, Store};
use crate::limit::{Check, Decision, Key, Policies, Policy, Quota, Strategy};

/// A store made of two stores: the second answers when the first cannot.
///
/// - Every check has a deadline: what the primary store has not answered by then, the fallback does.
/// - After a few failures in a row the breaker opens: every check goes to the fallback at once, with no wait.
/// - One probe at a time, off the request path, tries the primary store again, and closes the breaker.
///
/// [`Decision::source`] tells for each decision where it was made, and an [`Observer`] is told of every change. A check
/// that the primary store did not answer is never sent to it again.
///
/// Clones share the breaker and both stores.
///
/// ```
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1/")?, LocalStore::default());
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
pub struct Fallback<P, F> {
    shared: Arc<Shared<P, F>>,
}

struct Shared<P, F> {
    primary: P,
    fallback: F,
    deadline: Duration,
    breaker: Breaker,
    /// Whether a task probes the primary store.
    probing: AtomicBool,
    observer: Observers,
    clock: Clock,
}

impl<P: Store, F: Store> Fallback<P, F> {
    /// The deadline of a check, unless set otherwise.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
    /// How many failures in a row open the breaker, unless set otherwise.
    pub const DEFAULT_FAILURES: NonZeroU32 = NonZeroU32::MIN.saturating_add(2);

    /// `primary` decides, or `fallback` where it cannot.
    pub fn new(primary: P, fallback: F) -> Self {
        Self::build(primary, fallback, Self::DEFAULT_DEADLINE, Self::DEFAULT_FAILURES.get(), Observers(Arc::new(())))
    }

    /// Sets how long the primary store may take for a check. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        let Shared { primary, fallback, breaker, observer, .. } = &*self.shared;
        Self::build(primary.clone(), fallback.clone(), deadline, breaker.threshold(), observer.clone())
    }

    /// Sets how many failures in a row open the breaker. Defaults to 3.
    #[must_use]
    pub fn failures(self, failures: NonZeroU32) -> Self {
        let Shared { primary, fallback, deadline, observer, .. } = &*self.shared;
        Self::build(primary.clone(), fallback.clone(), *deadline, failures.get(), observer.clone())
    }

    /// Sets who is told of failures and changes. Defaults to nobody.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        let Shared { primary, fallback, deadline, breaker, .. } = &*self.shared;
        Self::build(primary.clone(), fallback.clone(), *deadline, breaker.threshold(), Observers(Arc::new(observer)))
    }

    fn build(primary: P, fallback: F, deadline: Duration, failures: u32, observer: Observers) -> Self {
        let breaker = Breaker::new(failures);
        let (probing, clock) = (AtomicBool::new(false), Clock::new());
        Self { shared: Arc::new(Shared { primary, fallback, deadline, breaker, probing, observer, clock }) }
    }

    /// Whether the fallback decides, because the primary store has failed too often.
    pub fn is_degraded(&self) -> bool {
        self.shared.breaker.is_open()
    }
}

impl<P: Store, F: Store> Shared<P, F> {
    fn failed(self: &Arc<Self>, error: &Error) {
        self.observer.0.failed(error);
        if self.breaker.failed(self.clock.micros()) {
            self.observer.0.degraded(error);
        }
        if self.breaker.is_open() {
            self.probe();
        }
    }

    /// Starts to probe, unless somebody does already.
    fn probe(self: &Arc<Self>) {
        if self.probing.load(Ordering::Relaxed) || self.probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let probe = Probe { shared: Arc::downgrade(self) };
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(probe.run()));
        }
    }
}

/// The one task that tries the primary store while the breaker is open.
struct Probe<P, F> {
    /// Ends with the last clone of the store.
    shared: Weak<Shared<P, F>>,
}

impl<P: Store, F: Store> Probe<P, F> {
    async fn run(self) {
        let jitter = RandomState::new();
        for probes in 0.. {
            let jitter = jitter.hash_one(probes) as f64 / u64::MAX as f64;
            sleep(Breaker::delay(probes, jitter)).await;
            let Some(shared) = self.shared.upgrade() else { return };
            let Some(check) = probe_check() else { return };
            if let Ok(Ok(_)) = timeout(shared.deadline, shared.primary.check(check)).await {
                if let Some(after) = shared.breaker.close(shared.clock.micros()) {
                    shared.observer.0.recovered(after);
                }
                return;
            }
        }
    }
}

/// Also when the task is dropped with its runtime: the next check on another one probes again.
impl<P, F> Drop for Probe<P, F> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.probing.store(false, Ordering::Release);
        }
    }
}

/// A check that reads and writes as any other, of a caller that no request can name. It is always granted, so that it
/// always writes.
fn probe_check() -> Option<Check> {
    let policy = Policy::new("probe", Strategy::Gcra, Quota::per_second(1_000_000)).ok()?;
    Some(Check::take(Key::PROBE, &Policies::from(policy), 1))
}

impl<P: Store, F: Store> Store for Fallback<P, F> {
    type Future = FallbackFuture<P, F>;

    fn check(&self, check: Check) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let state = if shared.breaker.is_open() {
            // In case the task that probed is gone with its runtime.
            shared.probe();
            State::Fallback { answer: shared.fallback.check(check) }
        } else {
            State::Primary { answer: shared.primary.check(check.clone()), deadline: None, check: Some(check) }
        };
        FallbackFuture { shared, state }
    }
}

pin_project! {
    /// Resolves to the answer of a [`Fallback`].
    pub struct FallbackFuture<P: Store, F: Store> {
        shared: Arc<Shared<P, F>>,
        #[pin]
        state: State<P::Future, F::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<P, F> {
        Primary {
            #[pin]
            answer: P,
            // Runs once the primary store has not answered at once.
            #[pin]
            deadline: Option<Sleep>,
            check: Option<Check>,
        },
        Fallback {
            #[pin]
            answer: F,
        },
    }
}

impl<P: Store, F: Store> Future for FallbackFuture<P, F> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let (error, check) = match this.state.as_mut().project() {
                StateProj::Fallback { answer } => return answer.poll(cx),
                StateProj::Primary { answer, mut deadline, check } => match answer.poll(cx) {
                    Poll::Ready(Ok(decision)) => {
                        this.shared.breaker.succeeded();
                        return Poll::Ready(Ok(decision));
                    }
                    Poll::Ready(Err(error)) => (error, check.take()),
                    Poll::Pending => {
                        if deadline.is_none() {
                            deadline.set(Some(sleep(this.shared.deadline)));
                        }
                        if let Some(deadline) = deadline.as_mut().as_pin_mut() {
                            ready!(deadline.poll(cx));
                        }
                        (Error::new(ErrorKind::Timeout), check.take())
                    }
                },
            };
            this.shared.failed(&error);
            match check {
                Some(check) => this.state.set(State::Fallback { answer: this.shared.fallback.check(check) }),
                None => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl<P, F> Clone for Fallback<P, F> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P: fmt::Debug, F: fmt::Debug> fmt::Debug for Fallback<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { primary, fallback, deadline, breaker, .. } = &*self.shared;
        f.debug_struct("Fallback")
            .field("primary", primary)
            .field("fallback", fallback)
            .field("deadline", deadline)
            .field("degraded", &breaker.is_open())
            .finish_non_exhaustive()
    }
}

impl<P: Store, F: Store> fmt::Debug for FallbackFuture<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackFuture").finish_non_exhaustive()
    }
}
