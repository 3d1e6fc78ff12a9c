//! The order of those who wait for their turn: a line for each caller, first come, first served.
//!
//! A [`Line`](line::Line) is who waits, a [`Clerk`](clerk::Clerk) is the task that asks the store for all of them, a
//! [`Turn`] is the future of one of them, and a [`Permit`] is what it gets.
//!
//! **Few calls.** Only the clerk asks, for whoever is first, and so takes one permit ahead of time: charged at once, due
//! later. So each process has at most one permit ahead, those of several processes are due one after another, and a call
//! makes a grant. If the last answer tells that there is room for more, the next call takes for as many as wait, but only
//! what is there now: another process may have been faster. Of requests in flight each takes its own, so that these are as
//! many calls at once, and fewer after some of them were denied. Where a strategy cannot owe, the clerk asks again when the
//! denial says so. A line that begins takes nothing ahead that is due later than [soon](clerk::SOON): whoever wants it may
//! be gone by then.
//!
//! **Nothing is lost.** A permit belongs to the line, not to who asked for it: whoever gives up leaves what he would have
//! had to the next one, and the last one leaves it to the store. A permit that is dropped unused goes the same way.
//! Before it is due there is no permit yet: if whoever is first wants something else by then, the clerk releases what it
//! took, and asks again. Only a runtime that ends keeps what it has taken.
//!
//! **Nobody waits for too long.** Whoever's time is up is refused when the store has told that there is no room for them. What is released in this process [wakes](crate::store::Wake) the clerk, and for what
//! others release it looks again now and then.
//!
//! **A store that fails.** A call that fails is told to whoever is first. The others wait on, until [several in a
//! row](clerk::MAX_FAILURES) have failed; whoever comes then is told the same for a while, without a call.

mod clerk;
mod line;
mod permit;
mod turn;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

pub(crate) use permit::{Permit, Spent};
pub(crate) use turn::Turn;

use self::clerk::Clerk;
use self::line::{Line, Waiter};
use crate::leases::{Lease, Leases};
use crate::limit::{Check, Decision, Key, Policies, Source, Strategy, Verdict};
use crate::store::{ErrorKind, Observer, Store, StoreError, instant, lock};

/// Who waits for a turn, of all callers. Clones share the lines.
#[derive(Clone)]
pub(crate) struct Turns {
    shared: Arc<Shared>,
    bounds: Bounds,
}

struct Shared {
    store: Box<dyn AnyStore>,
    /// What permits hold in flight.
    leases: Leases,
    lines: Mutex<Lines>,
    /// How many lines there are: while there are none, nobody looks for one.
    count: AtomicUsize,
}

/// A store whose type does not matter: whoever waits has the time for a box.
trait AnyStore: Send + Sync {
    fn ask(&self, check: Check) -> Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;
    fn observe(&self, observer: &Arc<dyn Observer>);
}

impl<S: Store> AnyStore for S {
    fn ask(&self, check: Check) -> Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>> {
        Box::pin(self.check(check))
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        Store::observe(self, observer);
    }
}

struct Lines {
    each: HashMap<Place, Line>,
    waiting: Waiting,
    /// How many lines were ever made: each has a number.
    made: u64,
}

/// How many wait in all lines.
#[derive(Default)]
struct Waiting {
    all: usize,
    /// For each caller.
    each: HashMap<Key, usize>,
}

/// How many may wait: for one caller, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) each: usize,
    pub(crate) all: usize,
}

/// Where one waits. Each runtime has lines of its own, so that nobody depends on a runtime that has ended or stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    runtime: Id,
    key: Key,
    /// Tells policies from others by all that they say: nobody waits behind those of a quota that was replaced.
    policies: u64,
}

/// What one waits for.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) key: Key,
    pub(crate) policies: Policies,
    pub(crate) cost: u32,
    /// Until when to wait. `None`: for as long as it takes.
    pub(crate) deadline: Option<Instant>,
}

/// Why there is no permit.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// It would take too long, or too many wait.
    Denied(Decision),
    Failed(StoreError),
}

impl Refusal {
    /// The store's answer.
    pub(crate) fn into_answer(self) -> Result<Decision, StoreError> {
        match self {
            Self::Denied(decision) => Ok(decision),
            Self::Failed(error) => Err(error),
        }
    }
}

impl Bounds {
    /// Where one key is mostly that of all.
    pub(crate) const DEFAULT: Self = Self { each: 10_000, all: 10_000 };

    /// So many, whoever they are.
    pub(crate) const fn of(all: NonZeroUsize) -> Self {
        Self { each: all.get(), all: all.get() }
    }
}

impl Wanted {
    /// Whether it costs more than ever fits: no wait helps.
    pub(crate) fn exceeds_capacity(&self) -> bool {
        let mut of_costs = self.policies.iter().filter(|policy| policy.strategy() != Strategy::InFlight);
        of_costs.any(|policy| policy.quota().capacity() < self.cost)
    }

    /// What is told to one of too many before the store has said anything: to come again when a unit has flowed back.
    fn denial(&self) -> Decision {
        let check = Check::take(self.key, &self.policies, self.cost);
        check.decided(Source::Local, 0, |policy| Verdict::denied(policy.quota().time_for(1)))
    }
}

impl Waiting {
    fn of(&self, key: &Key) -> usize {
        self.each.get(key).copied().unwrap_or(0)
    }

    /// So many wait in one line of this caller where there were `before`.
    fn change(&mut self, key: &Key, before: usize, now: usize) {
        self.all = self.all + now - before;
        match self.of(key) + now - before {
            0 => self.each.remove(key),
            all => self.each.insert(*key, all),
        };
    }
}

impl Turns {
    /// `leases` are those of whoever asks the store.
    pub(crate) fn new(store: impl Store, leases: Leases, bounds: Bounds) -> Self {
        let lines = Mutex::new(Lines { each: HashMap::new(), waiting: Waiting::default(), made: 0 });
        let count = AtomicUsize::new(0);
        Self { shared: Arc::new(Shared { store: Box::new(store), leases, lines, count }), bounds }
    }

    /// The same lines, in which so many may wait.
    pub(crate) fn with_bounds(&self, bounds: Bounds) -> Self {
        Self { shared: Arc::clone(&self.shared), bounds }
    }

    /// What a request holds in flight if it [passes](Lease::passed) though the store has failed to decide.
    pub(crate) fn hold(&self, wanted: &Wanted) -> Option<Lease> {
        self.shared.leases.hold(wanted.key, &wanted.policies)
    }

    /// Waits behind those who wait on this runtime already, if anybody does, and if a wait helps.
    pub(crate) fn join_others(&self, wanted: &Wanted) -> Option<Result<Turn, Refusal>> {
        if self.shared.count.load(Ordering::Acquire) == 0 || wanted.exceeds_capacity() {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let place = Place::of(&runtime, wanted);
        let Lines { each, waiting, .. } = &mut *lock(&self.shared.lines);
        let line = each.get_mut(&place)?;
        Some(self.line_up(line, waiting, place, wanted.clone()))
    }

    /// Hands the observer on to the store.
    pub(crate) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.shared.store.observe(observer);
    }

    /// Charges without asking, on a task.
    pub(crate) fn charge(&self, key: Key, policies: &Policies, cost: u32) {
        if let Ok(runtime) = Handle::try_current() {
            self.shared.tell(&runtime, Check::charge(key, policies, cost));
        }
    }

    /// Waits for a permit. `denied` is what the store has just said, if it was asked. What [never
    /// fits](Wanted::exceeds_capacity) must not wait: others would wait behind it.
    ///
    /// # Errors
    ///
    /// [`Refusal`], if it is certain already that there is none in time, or if too many wait.
    pub(crate) fn join(&self, wanted: Wanted, denied: Option<Decision>) -> Result<Turn, Refusal> {
        let runtime = Handle::try_current()
            .map_err(|error| Refusal::Failed(StoreError::with_source(ErrorKind::NoRuntime, error).of_check()))?;
        let place = Place::of(&runtime, &wanted);
        let (turn, clerk) = {
            let Lines { each, waiting, made } = &mut *lock(&self.shared.lines);
            if let Some(line) = each.get_mut(&place) {
                return self.line_up(line, waiting, place, wanted);
            }
            let mut line = Line::new(*made, &wanted, denied, instant());
            let policies = wanted.policies.clone();
            let turn = self.line_up(&mut line, waiting, place, wanted)?;
            let clerk = Clerk::new(Arc::clone(&self.shared), place, &line, policies, runtime.clone());
            *made += 1;
            each.insert(place, line);
            self.shared.count.fetch_add(1, Ordering::AcqRel);
            (turn, clerk)
        };
        // What is there is taken at once, without a task.
        let mut clerk = Box::pin(clerk.run());
        if clerk.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            // A runtime that has ended drops it: that answers who waits.
            runtime.spawn(clerk);
        }
        Ok(turn)
    }

    /// Lines up, if that is not too late and not too many wait.
    fn line_up(&self, line: &mut Line, waiting: &mut Waiting, place: Place, wanted: Wanted) -> Result<Turn, Refusal> {
        if let Some(error) = line.failed() {
            return Err(Refusal::Failed(error.clone()));
        }
        let is_full = waiting.all >= self.bounds.all || waiting.of(&place.key) >= self.bounds.each;
        if let Some(decision) = line.refusal(&wanted, is_full, instant()) {
            return Err(Refusal::Denied(decision));
        }
        let (waiter, answer) = Waiter::new(wanted);
        let before = line.len();
        let number = line.push(waiter);
        waiting.change(&place.key, before, line.len());
        Ok(Turn::new(Arc::clone(&self.shared), place, line.number(), number, answer))
    }
}

impl Place {
    fn of(runtime: &Handle, wanted: &Wanted) -> Self {
        let mut policies = DefaultHasher::new();
        for policy in &wanted.policies {
            (policy.id(), policy.strategy(), policy.quota()).hash(&mut policies);
        }
        Self { runtime: runtime.id(), key: wanted.key, policies: policies.finish() }
    }
}

impl Shared {
    /// Has the store count, on a task: nobody waits for it, or is left to be told of a failure.
    fn tell(self: &Arc<Self>, runtime: &Handle, check: Check) {
        if check.cost() > 0 {
            let shared = Arc::clone(self);
            runtime.spawn(async move { shared.store.ask(check).await.map(drop) });
        }
    }

    /// Calls `act` with the line of this number, if it is still there.
    fn with_line<T>(&self, place: &Place, number: u64, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let lines = &mut *lock(&self.lines);
        let line = lines.each.get_mut(place).filter(|line| line.number() == number)?;
        let before = line.len();
        let result = act(line);
        lines.waiting.change(&place.key, before, line.len());
        Some(result)
    }

    /// Takes out whoever is first at this place, if a permit of this cost is what it wants.
    fn pop(&self, place: &Place, cost: u32) -> Option<Waiter> {
        let lines = &mut *lock(&self.lines);
        let line = lines.each.get_mut(place)?;
        let before = line.len();
        let waiter = line.pop(cost)?;
        lines.waiting.change(&place.key, before, line.len());
        Some(waiter)
    }

    /// Takes away the line of this number, if nobody waits in it or if it `must` go.
    fn remove(&self, place: &Place, number: u64, must: bool) -> Option<Line> {
        let lines = &mut *lock(&self.lines);
        lines.each.get(place).filter(|line| line.number() == number && (must || line.len() == 0))?;
        let line = lines.each.remove(place)?;
        lines.waiting.change(&place.key, line.len(), 0);
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(line)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").field("waiting", &lock(&self.shared.lines).waiting.all).finish_non_exhaustive()
    }
}

/// Tokio's timers have milliseconds; a retry a little too early would be denied for the rest.
const TICK: Duration = Duration::from_millis(1);
