//! The order of those who wait for their turn: a line for each caller, first come, first served.
//!
//! A [`Line`](line::Line) is who waits, a [`Clerk`](clerk::Clerk) is the task that asks the store for all of them, a
//! [`Turn`] is the future of one of them, and a [`Permit`] is what it gets.
//!
//! **Few calls.** Only the clerk asks, for whoever is first, and so takes one permit ahead of time: charged at once, due
//! later. So each process has at most one permit ahead, those of several processes are due one after another, and a call
//! makes a grant. If the last answer tells that there is room for more, the next call takes for as many as wait. Where a
//! strategy cannot owe, the clerk asks again when the denial says so.
//!
//! **Nothing is lost.** A permit belongs to the line, not to who asked for it: whoever gives up leaves what he would have
//! had to the next one, and the last one leaves it to the store. A permit that is dropped unused goes the same way.
//! Before it is due there is no permit yet: if whoever is first wants something else by then, the clerk gives back what it
//! took, and asks again. Only a runtime that ends keeps what it has taken.

mod clerk;
mod line;
mod permit;
mod turn;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

pub(crate) use permit::Permit;
pub(crate) use turn::Turn;

use self::clerk::Clerk;
use self::line::{Line, Waiter};
use crate::leases::Leases;
use crate::limit::{Check, Decision, Key, Policies};
use crate::store::{Error, ErrorKind, Observer, Store, instant, lock};

/// Who waits for a turn, of all callers. Clones share the lines.
#[derive(Clone)]
pub(crate) struct Turns {
    shared: Arc<Shared>,
}

struct Shared {
    store: Box<dyn AnyStore>,
    /// What permits hold in flight.
    leases: Leases,
    bounds: Bounds,
    lines: Mutex<Lines>,
    /// How many lines there are: while there are none, nobody looks for one.
    count: AtomicUsize,
}

/// A store whose type does not matter: whoever waits has the time for a box.
trait AnyStore: Send + Sync {
    fn ask(&self, check: Check) -> Pin<Box<dyn Future<Output = Result<Decision, Error>> + Send>>;
    fn observe(&self, observer: &Arc<dyn Observer>);
}

impl<S: Store> AnyStore for S {
    fn ask(&self, check: Check) -> Pin<Box<dyn Future<Output = Result<Decision, Error>> + Send>> {
        Box::pin(self.check(check))
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        Store::observe(self, observer);
    }
}

struct Lines {
    each: HashMap<Place, Line>,
    /// How many wait in all of them.
    waiting: usize,
    /// How many lines were ever made: each has a number.
    made: u64,
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
    /// What the policies count.
    count: u64,
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
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It would take too long, or too many wait.
    Denied(Decision),
    Failed(Error),
}

impl Refusal {
    /// The store's answer.
    pub(crate) fn into_answer(self) -> Result<Decision, Error> {
        match self {
            Self::Denied(decision) => Ok(decision),
            Self::Failed(error) => Err(error),
        }
    }
}

impl Bounds {
    pub(crate) const NONE: Self = Self { each: usize::MAX, all: usize::MAX };
}

impl Turns {
    /// `leases` are those of whoever asks the store.
    pub(crate) fn new(store: impl Store, leases: Leases, bounds: Bounds) -> Self {
        let lines = Mutex::new(Lines { each: HashMap::new(), waiting: 0, made: 0 });
        let count = AtomicUsize::new(0);
        Self { shared: Arc::new(Shared { store: Box::new(store), leases, bounds, lines, count }) }
    }

    /// Waits behind those who wait on this runtime already, if anybody does.
    pub(crate) fn join_others(&self, wanted: &Wanted) -> Option<Result<Turn, Refusal>> {
        if self.shared.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let place = Place::of(&runtime, wanted);
        let Lines { each, waiting, .. } = &mut *lock(&self.shared.lines);
        let line = each.get_mut(&place)?;
        Some(self.shared.line_up(line, waiting, place, wanted.clone()))
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

    /// Waits for a permit. `denied` is what the store has just said, if it was asked.
    ///
    /// # Errors
    ///
    /// [`Refusal`], if it is certain already that there is none in time, or if too many wait.
    pub(crate) fn join(&self, wanted: Wanted, denied: Option<Decision>) -> Result<Turn, Refusal> {
        let runtime = Handle::try_current()
            .map_err(|error| Refusal::Failed(Error::with_source(ErrorKind::NoRuntime, error).of_check()))?;
        let place = Place::of(&runtime, &wanted);
        let (turn, clerk) = {
            let Lines { each, waiting, made } = &mut *lock(&self.shared.lines);
            if let Some(line) = each.get_mut(&place) {
                return self.shared.line_up(line, waiting, place, wanted);
            }
            let mut line = Line::new(*made, &wanted, denied, instant());
            let turn = self.shared.line_up(&mut line, waiting, place, wanted)?;
            let clerk = Clerk::new(Arc::clone(&self.shared), place, &line, runtime.clone());
            *made += 1;
            each.insert(place, line);
            self.shared.count.fetch_add(1, Ordering::AcqRel);
            (turn, clerk)
        };
        // A runtime that has ended drops it at once: that answers who waits.
        runtime.spawn(clerk.run());
        Ok(turn)
    }
}

impl Place {
    fn of(runtime: &Handle, wanted: &Wanted) -> Self {
        Self { runtime: runtime.id(), key: wanted.key, count: wanted.policies.id() }
    }
}

impl Shared {
    /// Lines up, if that is not too late and not too many wait.
    fn line_up(
        self: &Arc<Self>,
        line: &mut Line,
        waiting: &mut usize,
        place: Place,
        wanted: Wanted,
    ) -> Result<Turn, Refusal> {
        let is_full = *waiting >= self.bounds.all || line.len() >= self.bounds.each;
        if let Some(decision) = line.refusal(&wanted, is_full, instant()) {
            return Err(Refusal::Denied(decision));
        }
        let (waiter, answer) = Waiter::new(wanted);
        *waiting += 1;
        Ok(Turn::new(Arc::clone(self), place, line.number(), line.push(waiter), answer))
    }

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
        lines.waiting = lines.waiting + line.len() - before;
        Some(result)
    }

    /// Takes out whoever is first at this place, if a permit of this cost under these policies is what it wants.
    fn pop(&self, place: &Place, policies: &Policies, cost: u32) -> Option<Waiter> {
        let lines = &mut *lock(&self.lines);
        let waiter = lines.each.get_mut(place)?.pop(policies, cost)?;
        lines.waiting -= 1;
        Some(waiter)
    }

    /// Takes away the line of this number, if nobody waits in it or if it `must` go.
    fn remove(&self, place: &Place, number: u64, must: bool) -> Option<Line> {
        let lines = &mut *lock(&self.lines);
        lines.each.get(place).filter(|line| line.number() == number && (must || line.len() == 0))?;
        let line = lines.each.remove(place)?;
        lines.waiting -= line.len();
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(line)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").field("waiting", &lock(&self.shared.lines).waiting).finish_non_exhaustive()
    }
}

/// Tokio's timers have milliseconds; a retry a little too early would be denied for the rest.
const TICK: Duration = Duration::from_millis(1);
