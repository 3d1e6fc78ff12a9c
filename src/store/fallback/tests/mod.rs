//! The fallback in front of a scripted primary store, in paused time.

mod ahead;
mod answers;
mod breaker;
mod breaker_states;
mod busy;
mod calendars;
mod ends;
mod far;
mod flow_back;
mod flush;
mod joint;
mod late;
mod nested;
mod outage;
mod partitions;
mod reconcile;
mod reconciliation;
mod runtimes;
mod undo;
mod user_code;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{advance, sleep};

use super::{Fallback, FallbackBuilder, FallbackSettings};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Policies, Policy, Strategy};
use crate::observe::{Event, Observer};
use crate::simulation::in_redis;
use crate::store::{Answer, Backend, Hooks, LocalStore, Store, probe};
use crate::util::lock;

/// Counts like any store, and replies as the script says.
#[derive(Clone, Default)]
struct Primary {
    counts: LocalStore,
    script: Arc<Mutex<Script>>,
    /// The address in errors.
    name: Option<&'static str>,
}

#[derive(Default)]
struct Script {
    manner: Manner,
    /// The checks that it received, without probes.
    asked: Vec<Check>,
}

#[derive(Clone, Default)]
enum Manner {
    /// Decides immediately, and replies after this time.
    After(Duration),
    #[default]
    AtOnce,
    /// Neither decides nor replies.
    Silent,
    /// Decides, and never replies.
    Swallows,
    /// Fails with clones of one error, like the checks of one call.
    Fails(StoreError),
    /// Fails each check with a separate error.
    Each(fn() -> StoreError),
    /// Replies to this number of checks, and fails the others with separate errors.
    Answers(usize, fn() -> StoreError),
    /// Fails each check with a separate error after 20 ms.
    Late(fn() -> StoreError),
    /// Its queue is full, except for one check in this number, at random.
    Crowded(usize),
}

impl Primary {
    fn set(&self, manner: Manner) {
        lock(&self.script).manner = manner;
    }

    fn asked(&self) -> usize {
        lock(&self.script).asked.len()
    }

    /// Returns the units that the primary store counts of ann.
    async fn used(&self, policies: &Policies) -> u32 {
        let peek = self
            .counts
            .check(Check::peek(ann(), policies, 0))
            .await
            .unwrap();
        peek.capacity() - peek.remaining()
    }
}

impl Store for Primary {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let script = &mut *lock(&self.script);
        if *check.key() != probe::KEY {
            script.asked.push(check.clone());
        }
        let decide = || match self.counts.check(check) {
            // Use the store's own clock, as Redis does.
            Answer::Ready { answer } => Answer::ready(answer.map(in_redis)),
            pending => pending,
        };
        Answer::pending(match &mut script.manner {
            Manner::AtOnce => Box::pin(decide()),
            Manner::After(delay) => {
                let (delay, answer) = (*delay, decide());
                Box::pin(async move {
                    sleep(delay).await;
                    answer.await
                })
            }
            Manner::Silent => Box::pin(std::future::pending()),
            Manner::Swallows => {
                drop(decide());
                Box::pin(std::future::pending())
            }
            Manner::Fails(error) => Box::pin(std::future::ready(Err(error.clone()))),
            Manner::Each(error) => Box::pin(std::future::ready(Err(error()))),
            Manner::Answers(0, error) => Box::pin(std::future::ready(Err(error()))),
            Manner::Answers(left, _) => {
                *left -= 1;
                Box::pin(decide())
            }
            Manner::Late(error) => {
                let error = error();
                Box::pin(async move {
                    sleep(Duration::from_millis(20)).await;
                    Err(error)
                })
            }
            Manner::Crowded(every) if fastrand::usize(..*every) > 0 => {
                return Answer::ready(Err(queue_full()));
            }
            Manner::Crowded(_) => Box::pin(decide()),
        })
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::new(self)
    }
}

impl Hooks for Primary {
    fn server(&self, _key: &Key) -> Option<String> {
        self.name.map(str::to_owned)
    }
}

/// Records the reconciled cost.
#[derive(Clone, Default)]
struct Reconciled(Arc<Mutex<Vec<(u64, u64)>>>);

impl Observer for Reconciled {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Reconciled { charged, dropped } = *event {
            lock(&self.0).push((charged, dropped));
        }
    }
}

impl Reconciled {
    fn events(&self) -> Vec<(u64, u64)> {
        lock(&self.0).clone()
    }
}

type Tested = Fallback<Primary, LocalStore>;

fn pair(share: u32) -> (Tested, Primary, Reconciled) {
    let (primary, reconciled) = (Primary::default(), Reconciled::default());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .share(share)
        .observer(reconciled.clone())
        .build();
    (store, primary, reconciled)
}

/// Returns a builder of a store with the same inner stores and settings.
fn rebuild(store: &Tested) -> FallbackBuilder<Primary, LocalStore> {
    let partition = &store.partitions[0];
    FallbackBuilder {
        primary: partition.primary.clone(),
        fallback: partition.fallback.clone(),
        settings: FallbackSettings::clone(&partition.settings),
    }
}

fn ann() -> Key {
    Key::new("ann")
}

fn policies(strategy: Strategy, quota: &str) -> Policies {
    Policy::new("test", strategy, quota).unwrap().into()
}

fn unreachable() -> StoreError {
    StoreError::new(ErrorKind::Unreachable)
}

fn unsent() -> StoreError {
    unreachable().check_only().not_sent()
}

fn queue_full() -> StoreError {
    StoreError::new(ErrorKind::QueueFull).not_sent()
}

/// Fails checks of another caller until the breaker is open.
async fn open(store: &Tested, primary: &Primary) {
    primary.set(Manner::Each(unreachable));
    let somebody = policies(Strategy::Gcra, "1000/s");
    while !store.is_degraded() {
        let _ = store
            .check(Check::take(Key::new("somebody"), &somebody, 1))
            .await
            .unwrap();
        advance(Duration::from_millis(2)).await;
    }
}

/// Replies again until the breaker is closed and everything is reconciled.
async fn close(store: &Tested, primary: &Primary) {
    primary.set(Manner::AtOnce);
    while store.is_degraded() {
        sleep(Duration::from_millis(5)).await;
    }
    sleep(Duration::from_millis(5)).await;
}

/// Returns the total grant of `count` consecutive checks of ann.
async fn burst(store: &Tested, policies: &Policies, count: usize) -> u32 {
    let mut granted = 0;
    for _ in 0..count {
        granted += store
            .check(Check::take(ann(), policies, 1))
            .await
            .unwrap()
            .granted();
    }
    granted
}
