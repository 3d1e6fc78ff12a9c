use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Mutex as Turn, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::limit::{Check, Decision, Key, Outcome, Policies};
use crate::store::{Answer, Error, ErrorKind, Observer, Store, instant, lock};

/// A store with policies, for code that is no tower service: a job worker, a WebSocket loop.
///
/// Clones share the store's counts and the order of who waits.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mails = Policy::new("mails", Strategy::Gcra, Quota::per_minute(60).burst(10))?;
/// let limiter = Limiter::new(LocalStore::default(), mails);
/// let user = Key::new("user-42");
///
/// assert!(limiter.take(user, 8).await?.is_allowed());
/// assert_eq!(limiter.up_to(user, 5).await?.granted(), 2);
/// assert!(limiter.wait(user, 1, Duration::from_secs(5)).await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Limiter<S> {
    store: S,
    policies: Policies,
    turns: Arc<Mutex<HashMap<Key, Waiters>>>,
}

/// Those of this process who wait for one key.
#[derive(Debug, Default)]
struct Waiters {
    /// Held by the one who asks; tokio's mutex is given in the order of asking.
    turn: Arc<Turn<()>>,
    count: usize,
}

impl<S: Store> Limiter<S> {
    /// Counts in `store` under one policy or several.
    pub fn new(store: S, policies: impl Into<Policies>) -> Self {
        Self { store, policies: policies.into(), turns: Arc::default() }
    }

    /// Sets who is told of what happens in the store, such as that a [`Fallback`](crate::Fallback) decides locally, if that has
    /// no observer yet. Not of the decisions: whoever asks gets these. Defaults to nobody.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        self.store.observe(&(Arc::new(observer) as Arc<dyn Observer>));
        self
    }

    /// Takes `cost`, all or nothing. See [`Check::take`].
    pub fn take(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::take(key, &self.policies, cost))
    }

    /// Takes as much of `cost` as there is room for. See [`Check::up_to`].
    pub fn up_to(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::up_to(key, &self.policies, cost))
    }

    /// Tells whether `cost` would pass. See [`Check::peek`].
    pub fn peek(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::peek(key, &self.policies, cost))
    }

    /// Charges `cost` without asking. See [`Check::charge`].
    pub fn charge(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::charge(key, &self.policies, cost))
    }

    /// Gives `cost` back. See [`Check::give_back`].
    pub fn give_back(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::give_back(key, &self.policies, cost))
    }

    /// Forgets all that the caller was charged. See [`Check::reset`].
    pub fn reset(&self, key: Key) -> Answer<S::Future> {
        self.store.check(Check::reset(key, &self.policies))
    }

    /// Takes `cost`, and waits for it up to `max` if it must.
    ///
    /// Those of this process who wait for one key take turns in the order in which they came, whatever their costs. The
    /// decision is a denial if it would take longer than `max`; this is told as soon as it is known.
    ///
    /// To drop the future gives up the wait, and takes nothing: what was granted just then is given back, on a task of
    /// its own.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub async fn wait(&self, key: Key, cost: u32, max: Duration) -> Result<Decision, Error> {
        let deadline = instant().checked_add(max);
        let waiting = Waiting::new(self, key);
        let turn = waiting.turn.lock();
        let _turn = match deadline {
            None => turn.await,
            Some(deadline) => match timeout_at(deadline, turn).await {
                Ok(turn) => turn,
                // Its turn has not come: to take now would be before those who came earlier.
                Err(_) => return Ok(self.peek(key, cost).await?.denied()),
            },
        };
        loop {
            let decision = self.attempt(key, cost).await?;
            let Outcome::Denied { retry_after } = decision.outcome() else { return Ok(decision) };
            match instant().checked_add(retry_after) {
                Some(retry) if deadline.is_none_or(|deadline| retry <= deadline) => sleep_until(up(retry)).await,
                _ => return Ok(decision),
            }
        }
    }

    /// One take, on a task of its own, so that it is answered even if nobody waits for it any more.
    async fn attempt(&self, key: Key, cost: u32) -> Result<Decision, Error> {
        let (answer, receiver) = oneshot::channel();
        let limiter = self.clone();
        let runtime = Handle::try_current().map_err(|error| Error::with_source(ErrorKind::NoRuntime, error))?;
        runtime.clone().spawn(async move {
            let decision = limiter.take(key, cost).await;
            // If nobody waits any more, the delivery is dropped here.
            let _ = answer.send(decision.map(|decision| Delivery { limiter, key, runtime, decision: Some(decision) }));
        });
        let delivery = receiver.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::NoRuntime)))?;
        delivery.accept().ok_or_else(|| Error::new(ErrorKind::NoRuntime))
    }
}

/// A decision on its way to the one who waits for it. Dropped on the way, it gives back what was granted: the wait may
/// be dropped when the decision has been sent and not yet received.
struct Delivery<S: Store> {
    limiter: Limiter<S>,
    key: Key,
    runtime: Handle,
    /// None once it is accepted.
    decision: Option<Decision>,
}

impl<S: Store> Delivery<S> {
    fn accept(mut self) -> Option<Decision> {
        self.decision.take()
    }
}

impl<S: Store> Drop for Delivery<S> {
    fn drop(&mut self) {
        if let Some(granted) = self.decision.take().map(|decision| decision.granted()).filter(|granted| *granted > 0) {
            let (limiter, key) = (self.limiter.clone(), self.key);
            // Nobody is left to be told of a failure.
            self.runtime.spawn(async move { limiter.give_back(key, granted).await.map(drop) });
        }
    }
}

/// Tokio's timers have milliseconds; a retry a little too early would be denied for the rest.
fn up(retry: Instant) -> Instant {
    retry + Duration::from_millis(1)
}

/// One who waits; gone from the map when dropped.
struct Waiting<'a> {
    turns: &'a Mutex<HashMap<Key, Waiters>>,
    key: Key,
    turn: Arc<Turn<()>>,
}

impl<'a> Waiting<'a> {
    fn new<S>(limiter: &'a Limiter<S>, key: Key) -> Self {
        let turns = &*limiter.turns;
        let mut map = lock(turns);
        let waiters = map.entry(key).or_default();
        waiters.count += 1;
        let turn = Arc::clone(&waiters.turn);
        Self { turns, key, turn }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(mut waiters) = lock(self.turns).entry(self.key) {
            waiters.get_mut().count -= 1;
            if waiters.get().count == 0 {
                waiters.remove();
            }
        }
    }
}
