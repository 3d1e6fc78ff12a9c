//! The settlement: what was done in place of the primary store is done there too, once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Id;
use tokio::task::{JoinError, JoinSet};

use super::notes::Step;
use super::shared::Shared;
use crate::limit::{Check, Mode};
use crate::store::{Error, Store, event, lock};

/// How many steps are under way at once, so that live traffic is not held up.
const AT_ONCE: usize = 64;

/// What was charged and not told yet, in units of cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sums {
    charged: u64,
    dropped: u64,
}

impl<P: Store, F: Store> Shared<P, F> {
    /// Does all that is noted in the primary store, and adds it up. `false` if that fails again, or the task on this
    /// `runtime` has lost the lease: what was not sent is for the next time.
    pub(super) async fn settle(self: &Arc<Self>, runtime: Id) -> bool {
        if self.grants.is_empty() {
            return true;
        }
        let mut round = Round::new(self);
        let mut calls = JoinSet::new();
        let mut order = 0;
        while let Some(next) = round.left.front().map(|step| step.order) {
            while calls.len() >= AT_ONCE || (next != order && !calls.is_empty()) {
                calls.join_next().await.into_iter().for_each(|ended| round.ended(ended));
                round.failed |= !self.renew(runtime);
            }
            if round.failed {
                break;
            }
            order = next;
            if let Some((call, check, asked)) = round.next() {
                let shared = Arc::clone(self);
                calls.spawn(async move { (call, shared.send(check, &asked).await) });
            }
        }
        while let Some(ended) = calls.join_next().await {
            round.ended(ended);
            round.failed |= !self.renew(runtime);
        }
        !round.failed
    }

    /// Does one step, unless it has been taken back. How much was granted.
    async fn send(&self, check: Check, asked: &AtomicBool) -> Option<Result<u64, Error>> {
        if asked.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(self.asked_in_time(check).await.map(|decision| decision.granted().into()))
    }

    /// Tells the observer what has been settled since the last time.
    pub(super) fn tell(&self) {
        let sums = std::mem::take(&mut *lock(&self.sums));
        if sums != Sums::default() {
            self.observer().settled(&event::Settled::new(sums.charged, sums.dropped));
        }
    }
}

/// A step that is under way. Whoever sets `asked` first decides whether it is sent or noted again.
struct Call {
    step: Step,
    asked: Arc<AtomicBool>,
}

/// The number of a call, and what was answered, if it was sent.
type Ended = (u64, Option<Result<u64, Error>>);

/// A settlement. When it ends, or its runtime does, what was not sent is noted again.
struct Round<'a, P: Store, F: Store> {
    shared: &'a Shared<P, F>,
    number: u64,
    /// In the order in which they were begun.
    calls: BTreeMap<u64, Call>,
    left: VecDeque<Step>,
    back: Vec<Step>,
    /// Whether any step was begun.
    begun: bool,
    failed: bool,
}

impl<'a, P: Store, F: Store> Round<'a, P, F> {
    fn new(shared: &'a Shared<P, F>) -> Self {
        let taken = shared.grants.take(shared.clock.micros());
        lock(&shared.sums).dropped += taken.dropped;
        let (number, left) = (taken.number, taken.steps.into());
        Self { shared, number, calls: BTreeMap::new(), left, back: vec![], begun: false, failed: false }
    }

    /// The next step, which is under way from now on.
    fn next(&mut self) -> Option<(u64, Check, Arc<AtomicBool>)> {
        let (step, asked) = (self.left.pop_front()?, Arc::new(AtomicBool::new(false)));
        let call = self.calls.last_key_value().map_or(0, |(call, _)| call + 1);
        let check = step.check(self.shared.clock.micros());
        self.calls.insert(call, Call { step, asked: Arc::clone(&asked) });
        self.begun = true;
        Some((call, check, asked))
    }

    fn ended(&mut self, ended: Result<Ended, JoinError>) {
        // What a task that panicked leaves behind is for the end.
        let Ok((call, result)) = ended else { return self.failed = true };
        let Some(Call { step, .. }) = self.calls.remove(&call) else { return };
        match result {
            None => self.back.push(step),
            Some(Ok(granted)) if step.mode == Mode::Charge => lock(&self.shared.sums).charged += granted,
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                // What is known not to have been done is sent again, and what is done once by its id.
                let again = error.is_unsent() || (step.id.is_some() && !error.is_of_check());
                self.failed |= again || !error.is_of_check();
                if again { self.back.push(step) } else { self.lost(&step) }
            }
        }
    }

    fn lost(&self, step: &Step) {
        if step.mode == Mode::Charge {
            lock(&self.shared.sums).dropped += step.cost;
        }
    }
}

impl<P: Store, F: Store> Drop for Round<'_, P, F> {
    fn drop(&mut self) {
        let now = self.shared.clock.micros();
        // Calls are left only if the runtime has ended under them.
        for Call { step, asked } in std::mem::take(&mut self.calls).into_values() {
            let sent = asked.swap(true, Ordering::Relaxed);
            if sent && step.id.is_none() { self.lost(&step) } else { self.back.push(step) }
        }
        // The last first, since each is put before what is noted.
        for step in self.back.drain(..).chain(self.left.drain(..)).rev() {
            self.shared.grants.put_back(step, now);
        }
        match self.begun {
            true => self.shared.grants.settled(self.number),
            false => self.shared.grants.lapsed(self.number),
        }
    }
}
