use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Sleep, sleep, timeout};

use super::breaker::Breaker;
use super::clock::Clock;
use super::observer::Observers;
use super::settle::{Grant, Grants};
use super::{Error, ErrorKind, Instances, LocalStore, Observer, Store};
use crate::limit::{Check, Decision, Policies, Source};

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
/// [`Decision::source`] tells for each decision where it was made, and an [`Observer`] is told of every change.
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

/// How many instances share a policy while each decides by itself.
///
/// Each grants the whole part of a limit and of a burst, at least 1: with more instances than the limit, all together
/// may grant one each. The rate of a strategy that refills little by little is divided exactly.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Share {
    /// So many.
    Fixed(NonZeroU32),
    /// As many as were alive when Redis was last seen.
    Alive(Instances),
}

impl Share {
    /// So many instances; 0 counts as 1.
    pub const fn fixed(instances: u32) -> Self {
        match NonZeroU32::new(instances) {
            Some(instances) => Self::Fixed(instances),
            None => Self::Fixed(NonZeroU32::MIN),
        }
    }

    fn instances(&self) -> NonZeroU32 {
        match self {
            Self::Fixed(instances) => *instances,
            Self::Alive(instances) => instances.alive(),
        }
    }
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

    /// Whether the primary store decides a check.
    async fn answers(&self) -> bool {
        matches!(timeout(self.settings.deadline, self.primary.check(Check::probe())).await, Ok(Ok(_)))
    }

    /// How long after the primary store has come back the last of the other instances may find that out and settle;
    /// nothing if there are no others.
    fn others(&self) -> Option<Duration> {
        let others = self.settings.share.instances() > NonZeroU32::MIN;
        // The longest until a probe, and a deadline each for that and for a charge.
        others.then(|| Breaker::LONGEST_DELAY.saturating_add(self.settings.deadline.saturating_mul(2)))
    }

    /// Charges what was granted meanwhile to the primary store, and then lets that decide again. `false` if it fails
    /// again.
    async fn recover(self: &Arc<Self>, sums: &mut Sums) -> bool {
        // While this goes on, the fallback grants more; what is left in the end is little.
        for _ in 0..Self::SETTLEMENTS {
            let before = *sums;
            if !self.settle(sums).await {
                return false;
            }
            if *sums == before {
                break;
            }
        }
        if let Some(after) = self.breaker.close(self.clock.micros()) {
            self.observer().recovered(after);
        }
        self.settle(sums).await;
        true
    }

    const SETTLEMENTS: usize = 3;
    /// How many charges are under way at once, so that live traffic is not held up.
    const AT_ONCE: usize = 64;

    /// Charges all that was granted, and adds it up. `false` if the primary store fails again: the rest is for the next
    /// time.
    async fn settle(self: &Arc<Self>, sums: &mut Sums) -> bool {
        let (grants, unnoted) = self.grants.take();
        sums.dropped += unnoted;
        let mut whole = true;
        let mut charges = JoinSet::new();
        for grant in grants {
            if charges.len() >= Self::AT_ONCE
                && let Some(charge) = charges.join_next().await
            {
                whole &= sums.add(charge);
            }
            if !whole {
                self.grants.put_back(grant);
                continue;
            }
            let shared = Arc::clone(self);
            charges.spawn(async move { (grant.granted, shared.charge(grant).await) });
        }
        while let Some(charge) = charges.join_next().await {
            whole &= sums.add(charge);
        }
        whole
    }

    /// Charges what still counts of a grant. How much that was.
    async fn charge(&self, Grant { key, policies, granted }: Grant) -> Result<u32, Error> {
        let peek = self.fallback.check(self.part(Check::peek(key, &policies, 0))).await?;
        let used = peek.each().map(|each| each.limit() - each.remaining().min(each.limit())).max().unwrap_or(0);
        match granted.min(used) {
            0 => Ok(0),
            counts => {
                let charge = self.primary.check(Check::charge(key, &policies, counts));
                let decision = timeout(self.settings.deadline, charge).await;
                decision.map_err(|_| Error::new(ErrorKind::Timeout))?.map(|_| counts)
            }
        }
    }
}

/// What was settled, in units of cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sums {
    charged: u64,
    dropped: u64,
}

impl Sums {
    /// Adds one caller's. `false` if the primary store failed as a whole. What failed may have been charged, and is not
    /// sent again.
    fn add(&mut self, charge: Result<(u32, Result<u32, Error>), JoinError>) -> bool {
        match charge {
            Ok((_, Ok(charged))) => self.charged += u64::from(charged),
            Ok((granted, Err(error))) => {
                self.dropped += u64::from(granted);
                return error.is_of_check();
            }
            Err(_) => return false,
        }
        true
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
            let Some(mut shared) = self.shared.upgrade() else { return };
            if !shared.answers().await {
                continue;
            }
            let mut sums = Sums::default();
            let mut whole = shared.settle(&mut sums).await;
            if let (true, Some(others)) = (whole, shared.others()) {
                // This task keeps no store alive while it waits.
                drop(shared);
                sleep(others).await;
                let Some(again) = self.shared.upgrade() else { return };
                shared = again;
                whole = shared.answers().await;
            }
            let recovered = whole && shared.recover(&mut sums).await;
            if sums != Sums::default() {
                shared.observer().settled(sums.charged, sums.dropped);
            }
            if recovered {
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

/// The parts of the policies that have been asked for, so that each is made once.
#[derive(Debug, Default)]
struct Parts(Mutex<Vec<(Policies, NonZeroU32, Policies)>>);

impl Parts {
    /// Policies that are made anew for every request are not worth more.
    const MOST: usize = 64;

    fn of(&self, policies: &Policies, instances: NonZeroU32) -> Policies {
        // Nothing under the lock panics; if it ever did, the list would still be whole.
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., part)) = parts.iter().find(|(whole, of, _)| whole.is(policies) && *of == instances) {
            return part.clone();
        }
        if parts.len() >= Self::MOST {
            parts.clear();
        }
        let part = policies.share(instances);
        parts.push((policies.clone(), instances, part.clone()));
        part
    }
}

impl<P: Store, F: Store> Store for Fallback<P, F> {
    type Future = FallbackFuture<P, F>;

    fn check(&self, check: Check) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let state = if shared.breaker.is_open() {
            // In case the task that probed is gone with its runtime.
            shared.probe();
            State::Fallback { answer: shared.fallback.check(shared.part(check.clone())), unsent: Some(check) }
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
            // A check that the primary store was not asked. One that it was asked may have been charged there.
            unsent: Option<Check>,
        },
    }
}

impl<P: Store, F: Store> Future for FallbackFuture<P, F> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let shared = &*this.shared;
        loop {
            let (error, check) = match this.state.as_mut().project() {
                StateProj::Fallback { answer, unsent } => {
                    let answer = ready!(answer.poll(cx));
                    if let (Some(check), Ok(decision)) = (unsent, &answer) {
                        shared.grants.note(check, decision);
                    }
                    return Poll::Ready(answer);
                }
                StateProj::Primary { answer, mut deadline, check } => match answer.poll(cx) {
                    Poll::Ready(Ok(decision)) => {
                        // An answer that was remembered says nothing of the store now.
                        if decision.source() != Source::Cached {
                            shared.breaker.succeeded();
                            if let Some(check) = check.as_ref().filter(|check| check.id_key().is_none()) {
                                shared.fallback.follow(check.key(), &decision);
                            }
                        }
                        return Poll::Ready(Ok(decision));
                    }
                    Poll::Ready(Err(error)) => (error, check.take()),
                    Poll::Pending => {
                        if deadline.is_none() {
                            deadline.set(Some(sleep(shared.settings.deadline)));
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
                Some(check) => {
                    let unsent = error.is_unsent().then(|| check.clone());
                    let answer = shared.fallback.check(shared.part(check));
                    this.state.set(State::Fallback { answer, unsent });
                }
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
        let Shared { primary, fallback, settings, breaker, .. } = &*self.shared;
        f.debug_struct("Fallback")
            .field("primary", primary)
            .field("fallback", fallback)
            .field("settings", settings)
            .field("degraded", &breaker.is_open())
            .finish_non_exhaustive()
    }
}

impl<P: Store, F: Store> fmt::Debug for FallbackFuture<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackFuture").finish_non_exhaustive()
    }
}
