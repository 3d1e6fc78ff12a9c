//! A primary store that several instances share, with a delay for each.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::time::Instant;

use super::*;
use crate::limit::Mode;
use crate::store::charge_debt_of;
use crate::store::fallback::recovery::announcements;
use crate::util::instant;

/// The primary store as one instance reaches it. All instances share its count.
#[derive(Clone)]
pub(super) struct Far {
    pub(super) counts: LocalStore,
    /// Whether the announcements of this instance are lost.
    pub(super) is_mute: bool,
    /// Number of queries for announcements that get no reply.
    pub(super) unanswered: Arc<AtomicUsize>,
    pub(super) delay: Arc<Mutex<Option<Duration>>>,
    pub(super) seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
pub(super) struct Seen {
    /// Times of the charges of each caller.
    pub(super) charged: HashMap<Key, Vec<Instant>>,
    /// Charged callers, in order of the charges.
    pub(super) order: Vec<Key>,
    under_way: usize,
    pub(super) most: usize,
}

impl Far {
    pub(super) fn new(delay: Duration) -> Self {
        let delay = Arc::new(Mutex::new(Some(delay)));
        let (unanswered, seen) = (Arc::default(), Arc::default());
        Self {
            counts: LocalStore::default(),
            is_mute: false,
            unanswered,
            delay,
            seen,
        }
    }

    /// Returns the primary store as another instance reaches it.
    pub(super) fn another(&self, delay: Duration) -> Self {
        Self {
            delay: Arc::new(Mutex::new(Some(delay))),
            ..self.clone()
        }
    }

    pub(super) fn set(&self, delay: Option<Duration>) {
        *lock(&self.delay) = delay;
    }

    pub(super) fn fallback(&self, share: u32) -> Fallback<Self, LocalStore> {
        self.builder(share).build()
    }

    pub(super) fn builder(&self, share: u32) -> FallbackBuilder<Self, LocalStore> {
        Fallback::builder(self.clone(), LocalStore::default()).share(share)
    }

    /// Lets another instance announce that it reconciles for `time`.
    pub(super) fn announce(&self, time: Duration) {
        let check = charge_debt_of(probe::KEY, &announcements(), time);
        drop(self.counts.check(check));
    }

    /// Returns `true` if an instance has announced that it reconciles.
    pub(super) async fn is_announced(&self) -> bool {
        let peek = Check::peek(probe::KEY, &announcements(), 1);
        !self.counts.check(peek).await.unwrap().is_allowed()
    }
}

impl Store for Far {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Some(delay) = *lock(&self.delay) else {
            return Answer::ready(Err(unreachable().not_sent()));
        };
        let is_announcement =
            *check.key() == probe::KEY && check.policies().id() == announcements().id();
        if is_announcement {
            if self.is_mute && check.mode() == Mode::Charge {
                return Answer::pending(Box::pin(pending()));
            }
            let fewer = |left: usize| left.checked_sub(1);
            if check.mode() == Mode::Peek
                && self
                    .unanswered
                    .fetch_update(Relaxed, Relaxed, fewer)
                    .is_ok()
            {
                return Answer::pending(Box::pin(pending()));
            }
            let decision = self.counts.check(check);
            return Answer::pending(Box::pin(async move {
                sleep(delay).await;
                decision.await
            }));
        }
        let mut seen = lock(&self.seen);
        if check.mode() == Mode::Charge {
            seen.charged
                .entry(*check.key())
                .or_default()
                .push(instant());
            seen.order.push(*check.key());
            seen.under_way += 1;
            seen.most = seen.most.max(seen.under_way);
        }
        let (decision, seen, is_charge) = (
            self.counts.check(check.clone()),
            Arc::clone(&self.seen),
            check.mode() == Mode::Charge,
        );
        Answer::pending(Box::pin(async move {
            sleep(delay).await;
            lock(&seen).under_way -= usize::from(is_charge);
            decision.await
        }))
    }
}

pub(super) fn caller(i: usize) -> Key {
    Key::new(format!("caller-{i}"))
}

pub(super) async fn take(store: &impl Store, key: Key, policies: &Policies) -> Decision {
    store.check(Check::take(key, policies, 1)).await.unwrap()
}

/// Makes the primary store unreachable for an instance until its breaker is open.
pub(super) async fn cut(store: &Fallback<Far, LocalStore>, far: &Far) {
    far.set(None);
    while !store.is_degraded() {
        let _ = take(
            store,
            Key::new("somebody"),
            &policies(Strategy::Gcra, "1000/s"),
        )
        .await;
        advance(Duration::from_millis(2)).await;
    }
}

/// Returns the time until the breaker is closed.
pub(super) async fn recovery<P: Store>(store: &Fallback<P, LocalStore>) -> Duration {
    let start = instant();
    while store.is_degraded() {
        sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}
