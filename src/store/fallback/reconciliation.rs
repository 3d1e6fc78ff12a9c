//! The reconciliation: the primary store is told what the accounts hold, once.
//!
//! Callers are taken out one by one, beginning with those who have used most of a limit: what another instance might grant
//! them once more is too much. What is left of an account is computed then, so that nothing is sent that no longer counts.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::task::yield_now;
use tokio::time::sleep;

use super::account::{Account, Step};
use super::partition::{Partition, Sums};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key};
use crate::observe::event;
use crate::store::Store;
use crate::util::{instant, lock};

/// How many accounts are reconciled concurrently: as many as the primary store replies to in time, so that live traffic is
/// not delayed.
#[derive(Debug)]
struct Window {
    now: usize,
    least: usize,
    most: usize,
}

/// Pause until a check is sent again that has found the queue full.
const FULL: Duration = Duration::from_millis(2);

/// Number of accounts after which other tasks get their turn.
const TURN: usize = 256;

impl Window {
    const START: usize = 64;
    /// Of all instances. Keeps the connections of a Redis store busy, and is a tenth of its queue.
    const MOST: usize = 1_024;
    /// Of each of many partitions.
    const LEAST: usize = 16;

    /// That of one of so many partitions, in one of so many instances.
    fn of(partitions: usize, instances: NonZeroU32) -> Self {
        let most = (Self::MOST / instances.get() as usize).max(Self::START);
        let most = (most / partitions).max(Self::LEAST);
        let least = most.min(Self::START);
        Self {
            now: least,
            least,
            most,
        }
    }

    /// One more if an account took less than a quarter of the deadline, and else one less.
    fn learn(&mut self, took: Duration, deadline: Duration) {
        self.now = if took < deadline / 4 {
            self.now + 1
        } else {
            self.now - 1
        }
        .clamp(self.least, self.most);
    }
}

impl<P: Store, F: Store> Partition<P, F> {
    /// Tells the primary store what all accounts hold. `false` if it fails again: what was not sent waits for the next time.
    pub(super) async fn reconcile(self: &Arc<Self>) -> bool {
        if self.accounts.is_empty() {
            return true;
        }
        // When this is dropped, also with its runtime, replies may be followed again.
        let _ended = Ended(self);
        let mut callers = BTreeMap::new();
        for shard in 0..self.accounts.shards() {
            let dropped = self.accounts.list(shard, &mut callers);
            lock(&self.sums).dropped += dropped;
            yield_now().await;
        }
        let mut accounts = callers.into_values().rev().flatten().flat_map(|key| {
            let accounts = self.accounts.take(&key).into_iter();
            // All of them: what is taken out and not reconciled is put back.
            let taken = accounts.map(|account| Taken::new(self, key, account));
            taken.collect::<SmallVec<[_; 1]>>()
        });
        let mut window = Window::of(self.partitions, self.settings.share.instances());
        let (mut working, mut well, mut taken) = (FuturesUnordered::new(), true, 0);
        loop {
            while well && working.len() < window.now {
                let Some(mut account) = accounts.next() else {
                    break;
                };
                taken += 1;
                if taken % TURN == 0 {
                    yield_now().await;
                }
                if account.next().is_some() {
                    working.push(async move {
                        let since = instant();
                        (account.reconcile().await, since.elapsed())
                    });
                }
            }
            let Some((is_told, took)) = working.next().await else {
                return well;
            };
            well &= is_told;
            window.learn(took, self.settings.deadline);
        }
    }

    /// Sends a check. A full queue says nothing about the primary store: this waits for its turn there.
    async fn tell(&self, check: Check) -> Result<Decision, StoreError> {
        // No request waits for it.
        let (since, patience) = (instant(), self.settings.deadline.saturating_mul(2));
        loop {
            match self.asked_within(check.clone(), patience).await {
                Err(error)
                    if error.kind() == ErrorKind::QueueFull
                        && since.elapsed() < self.settings.deadline =>
                {
                    sleep(FULL).await;
                }
                answer => return answer,
            }
        }
    }

    /// Notifies the observer of what has been reconciled since the last time.
    pub(super) fn notify(&self) {
        let sums = std::mem::take(&mut *lock(&self.sums));
        if sums != Sums::default() {
            self.observe(|observer| {
                observer.reconciled(&event::Reconciled::new(sums.charged, sums.dropped))
            });
        }
    }
}

/// An account that was taken out. When it is dropped, also with its runtime, what was not sent is put back.
struct Taken<'a, P: Store, F: Store> {
    partition: &'a Partition<P, F>,
    key: Key,
    account: Option<Account>,
    /// A step that was sent, and has no reply yet.
    sent: Option<Step>,
}

impl<'a, P: Store, F: Store> Taken<'a, P, F> {
    fn new(partition: &'a Partition<P, F>, key: Key, account: Account) -> Self {
        Self {
            partition,
            key,
            account: Some(account),
            sent: None,
        }
    }

    fn next(&mut self) -> Option<(Step, Check)> {
        let account = self.account.as_mut()?;
        let step = account.next(self.partition.clock.micros());
        if step.is_none() {
            self.account = None;
        }
        step.zip(self.account.as_ref()).map(|(step, account)| {
            let check = step.check(self.key, account);
            (step, check)
        })
    }

    /// Tells the primary store. `false` if that fails.
    async fn reconcile(mut self) -> bool {
        while let Some((step, check)) = self.next() {
            self.sent = Some(step);
            match self.partition.tell(check).await {
                Ok(decision) => self.is_told(decision.granted().into(), 0),
                Err(error) if error.is_unsent() => {
                    self.sent = None;
                    return error.is_of_check();
                }
                Err(error) => {
                    self.is_lost();
                    if !error.is_of_check() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// A check that was sent is not sent again: it may have been done.
    fn is_lost(&mut self) {
        let cost = self.sent.as_ref().map_or(0, Step::cost);
        self.is_told(0, cost);
    }

    fn is_told(&mut self, charged: u64, dropped: u64) {
        let (step, now) = (self.sent.take(), self.partition.clock.micros());
        if let (Some(account), Some(step)) = (&mut self.account, step) {
            account.done(&step, now);
            let mut sums = lock(&self.partition.sums);
            if step.cost() > 0 {
                sums.charged += charged;
            }
            sums.dropped += dropped;
        }
    }
}

impl<P: Store, F: Store> Drop for Taken<'_, P, F> {
    fn drop(&mut self) {
        self.is_lost();
        let now = self.partition.clock.micros();
        if let Some(mut account) = self.account.take()
            && account.next(now).is_some()
        {
            let dropped = self.partition.accounts.put_back(&self.key, account, now);
            lock(&self.partition.sums).dropped += dropped;
        }
    }
}

struct Ended<'a, P: Store, F: Store>(&'a Partition<P, F>);

impl<P: Store, F: Store> Drop for Ended<'_, P, F> {
    fn drop(&mut self) {
        self.0.accounts.reconciled();
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_the_answers() {
        let (mut window, deadline) = (Window::of(1, NonZeroU32::MIN), Duration::from_millis(100));
        let mut after = |took, ops| {
            (0..ops).for_each(|_| window.learn(Duration::from_millis(took), deadline));
            window.now
        };
        assert_eq!([after(24, 10), after(25, 5), after(90, 1)], [74, 69, 68]);
        assert_eq!(
            [after(0, 10_000), after(25, 10_000)],
            [Window::MOST, Window::START]
        );
        assert_eq!(Window::of(100, NonZeroU32::MIN).now, Window::LEAST);
        assert_eq!(Window::of(1, NonZeroU32::MAX).most, Window::START);
    }
}
