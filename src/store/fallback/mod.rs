mod breaker;
mod future;
mod grants;
mod recovery;
mod share;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use self::future::FallbackFuture;
pub use self::share::Share;

use self::breaker::Breaker;
use self::future::State;
use self::grants::Grants;
use self::share::Parts;
use super::clock::Clock;
use super::observer::Observers;
use super::{Error, LocalStore, Observer, Store};
use crate::limit::{Check, Decision, Source};

/// A store made of two stores: the second answers when the first cannot.
///
/// - **Deadline.** What the primary store has not answered by then, the fallback does. A check that the primary store
///   did not answer is never sent to it again.
/// - **Breaker.** After a few failures in a row every check goes to the fallback at once, with no wait. One probe at a
///   time, off the request path, tries the primary store again.
/// - **Warm.** The fallback follows what the primary store decides, so that a caller goes on from where it was, and an
///   outage is no second burst.
/// - **Share.** While the fallback decides, each instance grants its part of a policy: see [`share`](Self::share).
/// - **Settle.** What the fallback granted while the breaker was open, and still counts, is charged to the primary
///   store before that decides again. With more than one instance in the [`Share`], each waits until all the others
///   have had the time to do so, or the first one back would be granted what they have granted already.
///
/// [`Decision::source`](crate::Decision::source) tells for each decision where it was made, and an [`Observer`] is told
/// of every change.
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
    settings: Settings,
    breaker: Breaker,
    /// Whether a task probes the primary store.
    probing: AtomicBool,
    grants: Grants,
    parts: Parts,
    clock: Clock,
}

#[derive(Debug, Clone)]
struct Settings {
    deadline: Duration,
    failures: NonZeroU32,
    share: Share,
    observer: Observers,
}

impl<P: Store, F: Store> Fallback<P, F> {
    /// The deadline of a check, unless set otherwise.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
    /// How many failures in a row open the breaker, unless set otherwise.
    pub const DEFAULT_FAILURES: NonZeroU32 = NonZeroU32::MIN.saturating_add(2);

    /// `primary` decides, or `fallback` where it cannot.
    pub fn new(primary: P, fallback: F) -> Self {
        let settings = Settings {
            deadline: Self::DEFAULT_DEADLINE,
            failures: Self::DEFAULT_FAILURES,
            share: Share::fixed(1),
            observer: Observers::default(),
        };
        Self::build(primary, fallback, settings)
    }

    /// Sets how long the primary store may take for a check. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|settings| settings.deadline = deadline)
    }

    /// Sets how many failures in a row open the breaker. Defaults to 3.
    #[must_use]
    pub fn failures(self, failures: NonZeroU32) -> Self {
        self.with(|settings| settings.failures = failures)
    }

    /// Sets how many instances share a policy while each decides by itself. Defaults to 1: every instance then grants
    /// the whole of it.
    #[must_use]
    pub fn share(self, share: Share) -> Self {
        self.with(|settings| settings.share = share)
    }

    /// Sets who is told of failures and changes. Defaults to nobody.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        self.with(|settings| settings.observer = Observers(Arc::new(observer)))
    }

    /// The same stores with other settings, and a closed breaker.
    fn with(self, change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = self.shared.settings.clone();
        change(&mut settings);
        Self::build(self.shared.primary.clone(), self.shared.fallback.clone(), settings)
    }

    fn future(&self, state: State<P::Future, F::Future>) -> FallbackFuture<P, F> {
        FallbackFuture { shared: Arc::clone(&self.shared), state }
    }

    fn build(primary: P, fallback: F, settings: Settings) -> Self {
        let shared = Shared {
            primary,
            fallback,
            breaker: Breaker::new(settings.failures.get()),
            settings,
            probing: AtomicBool::new(false),
            grants: Grants::new(LocalStore::DEFAULT_KEYS.get()),
            parts: Parts::default(),
            clock: Clock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Whether the fallback decides, because the primary store has failed too often: for health checks.
    pub fn is_degraded(&self) -> bool {
        self.shared.breaker.is_open()
    }
}

impl<P: Store, F: Store> Shared<P, F> {
    fn observer(&self) -> &dyn Observer {
        &*self.settings.observer.0
    }

    /// The same check of this instance's part.
    fn part(&self, check: Check) -> Check {
        match self.settings.share.instances() {
            NonZeroU32::MIN => check,
            instances => {
                let part = self.parts.of(check.policies(), instances);
                check.under(part)
            }
        }
    }

    /// The primary store has decided.
    fn succeeded(&self, check: &Check, decision: &Decision) {
        // An answer that was remembered says nothing of the store now.
        if decision.source() != Source::Cached {
            self.breaker.succeeded();
            if check.id_key().is_none() {
                self.fallback.follow(check.key(), decision);
            }
        }
    }

    /// The fallback has answered, in place of a primary store that was not asked what is `unsent`.
    fn note(&self, unsent: Option<&Check>, answer: &Result<Decision, Error>) {
        if let (Some(check), Ok(decision)) = (unsent, answer) {
            self.grants.note(check, decision);
        }
    }

    /// The primary store could not decide.
    fn failed(self: &Arc<Self>, error: &Error) {
        self.observer().failed(error);
        if error.is_of_check() {
            return;
        }
        if self.breaker.failed(self.clock.micros()) {
            self.observer().degraded(error);
        }
        if self.breaker.is_open() {
            self.probe();
        }
    }
}

impl<P: Store, F: Store> Store for Fallback<P, F> {
    type Future = FallbackFuture<P, F>;

    fn check(&self, check: Check) -> Self::Future {
        match self.try_check(check) {
            Ok(answer) => self.future(State::Answered { answer: Some(answer) }),
            Err(waiting) => waiting,
        }
    }

    fn try_check(&self, check: Check) -> Result<Result<Decision, Error>, Self::Future> {
        let shared = &self.shared;
        let (check, unsent) = if shared.breaker.is_open() {
            // In case the task that probed is gone with its runtime.
            shared.probe();
            (check.clone(), Some(check))
        } else {
            match shared.primary.try_check(check.clone()) {
                Ok(Ok(decision)) => {
                    shared.succeeded(&check, &decision);
                    return Ok(Ok(decision));
                }
                Ok(Err(error)) => {
                    shared.failed(&error);
                    let unsent = error.is_unsent().then(|| check.clone());
                    (check, unsent)
                }
                Err(answer) => {
                    return Err(self.future(State::Primary { answer, deadline: None, check: Some(check) }));
                }
            }
        };
        match shared.fallback.try_check(shared.part(check)) {
            Ok(answer) => {
                shared.note(unsent.as_ref(), &answer);
                Ok(answer)
            }
            Err(answer) => Err(self.future(State::Fallback { answer, unsent })),
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
        let Shared { primary, fallback, settings, breaker, .. } = &*self.shared;
        f.debug_struct("Fallback")
            .field("primary", primary)
            .field("fallback", fallback)
            .field("settings", settings)
            .field("degraded", &breaker.is_open())
            .finish_non_exhaustive()
    }
}
