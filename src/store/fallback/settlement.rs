//! The settlement: what was done in place of the primary store is done there too, once.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::task::{JoinError, JoinSet};

use super::notes::Step;
use super::shared::Shared;
use crate::limit::Mode;
use crate::store::{Error, Store, event};

/// How many steps are under way at once, so that live traffic is not held up.
const AT_ONCE: usize = 64;

/// What was charged, in units of cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sums {
    charged: u64,
    dropped: u64,
}

impl<P: Store, F: Store> Shared<P, F> {
    /// Does all that is noted in the primary store, and adds it up. `false` if that fails again: what it was not sent is
    /// for the next time.
    pub(super) async fn settle(self: &Arc<Self>, sums: &mut Sums) -> bool {
        if self.grants.is_empty() {
            return true;
        }
        let mut round = Round::new(self, sums);
        let mut calls = JoinSet::new();
        let mut order = 0;
        while let Some(next) = round.left.front().map(|step| step.order) {
            while calls.len() >= AT_ONCE || (next != order && !calls.is_empty()) {
                calls.join_next().await.into_iter().for_each(|ended| round.ended(ended));
            }
            if round.failed {
                break;
            }
            order = next;
            let shared = Arc::clone(self);
            if let Some(step) = round.left.pop_front() {
                calls.spawn(async move {
                    let result = shared.send(&step).await;
                    (step, result)
                });
            }
        }
        while let Some(ended) = calls.join_next().await {
            round.ended(ended);
        }
        !round.failed
    }

    /// Does one step. How much was charged.
    async fn send(&self, step: &Step) -> Result<u64, Error> {
        let decision = self.asked_in_time(step.check()).await?;
        Ok(if step.mode == Mode::Charge { decision.granted().into() } else { 0 })
    }

    pub(super) fn tell(&self, sums: Sums) {
        if sums != Sums::default() {
            self.observer().settled(&event::Settled::new(sums.charged, sums.dropped));
        }
    }
}

/// A step, and how much was charged.
type Ended = (Step, Result<u64, Error>);

/// A settlement. When it ends, or its task does, what was not sent is noted again.
struct Round<'a, P: Store, F: Store> {
    shared: &'a Shared<P, F>,
    sums: &'a mut Sums,
    left: VecDeque<Step>,
    back: Vec<Step>,
    failed: bool,
}

impl<'a, P: Store, F: Store> Round<'a, P, F> {
    fn new(shared: &'a Shared<P, F>, sums: &'a mut Sums) -> Self {
        let (left, unnoted) = shared.grants.take(shared.clock.micros());
        sums.dropped += unnoted;
        Self { shared, sums, left: left.into(), back: vec![], failed: false }
    }

    /// A step has ended. What failed is sent again if it is known not to have been done, or is done once by its id.
    fn ended(&mut self, ended: Result<Ended, JoinError>) {
        match ended {
            Ok((_, Ok(charged))) => self.sums.charged += charged,
            Ok((step, Err(error))) => {
                let again = error.is_unsent() || (step.id.is_some() && !error.is_of_check());
                self.failed |= again || !error.is_of_check();
                if again {
                    self.back.push(step);
                } else if step.mode == Mode::Charge {
                    self.sums.dropped += step.cost;
                }
            }
            Err(_) => self.failed = true,
        }
    }
}

impl<P: Store, F: Store> Drop for Round<'_, P, F> {
    fn drop(&mut self) {
        let now = self.shared.clock.micros();
        // The last first, since each is put before what is noted.
        for step in self.back.drain(..).chain(self.left.drain(..)).rev() {
            self.shared.grants.put_back(step, now);
        }
        // First the epoch: what was asked before must not be followed once these callers are again.
        self.shared.epoch.end();
        self.shared.grants.settled();
    }
}
