//! The reconciliation: charges the accounts to the primary store, once.
//!
//! It begins with the callers that have used most of a limit, since another instance might exceed the
//! limit for these. The cost is computed when it is sent, so that no expired cost is charged.

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

/// Number of accounts that are reconciled concurrently. It adapts to the reply times of the primary store, so that live
/// traffic is not delayed.
#[derive(Debug)]
struct Window {
    now: usize,
    least: usize,
    most: usize,
}

/// Pause before a check that found the queue full is sent again.
const FULL: Duration = Duration::from_millis(2);

/// Number of accounts after which the task yields.
const TURN: usize = 256;

impl Window {
    const START: usize = 64;
    /// Maximum over all instances: a tenth of a Redis store's queue, which keeps its connections busy.
    const MOST: usize = 1_024;
    /// Minimum for each of many partitions.
    const LEAST: usize = 16;

    /// The window of one of `partitions` in one of `instances`.
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

    /// Grows by one if an account took less than a quarter of the deadline, otherwise shrinks by one.
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
    /// Charges all accounts to the primary store. Returns `false` if the store fails again; unsent charges are kept.
    pub(super) async fn reconcile(self: &Arc<Self>) -> bool {
        if self.accounts.is_empty() {
            return true;
        }
        // Dropped at the end, or with the runtime, so that replies may warm the fallback again.
        let mut ended = Ended(self, false);
        let mut callers = BTreeMap::new();
        for shard in 0..self.accounts.shards() {
            let dropped = self.accounts.list(shard, &mut callers);
            lock(&self.sums).dropped += dropped;
            yield_now().await;
        }
        let mut accounts = callers.into_values().rev().flatten().flat_map(|key| {
            let accounts = self.accounts.take(&key).into_iter();
            // Collect the accounts, so that dropping the iterator puts all of them back.
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
                    ended.1 = true;
                    working.push(async move {
                        let since = instant();
                        (account.reconcile().await, since.elapsed())
                    });
                }
            }
            let Some((is_done, took)) = working.next().await else {
                return well;
            };
            well &= is_done;
            window.learn(took, self.settings.deadline);
        }
    }

    /// Sends a check. If the queue is full, retries until the deadline.
    async fn send(&self, check: Check) -> Result<Decision, StoreError> {
        // No request awaits this check, so it may take longer.
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

    /// Notifies the observer of the cost reconciled since the last notification.
    pub(super) fn notify(&self) {
        let sums = std::mem::take(&mut *lock(&self.sums));
        if sums != Sums::default() {
            self.observe(|observer| {
                observer.reconciled(&event::Reconciled::new(sums.charged, sums.dropped))
            });
        }
    }
}

/// An account that is being reconciled. Dropping it puts the unsent rest back, also if the runtime shuts down.
struct Taken<'a, P: Store, F: Store> {
    partition: &'a Partition<P, F>,
    key: Key,
    account: Option<Account>,
    /// The step that was sent and has no reply yet.
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

    /// Sends all steps. Returns `false` if the primary store fails.
    async fn reconcile(mut self) -> bool {
        while let Some((step, check)) = self.next() {
            self.sent = Some(step);
            match self.partition.send(check).await {
                Ok(decision) => self.charged(decision.granted().into(), 0),
                Err(error) if error.is_not_sent() => {
                    self.sent = None;
                    return error.is_check_only();
                }
                Err(error) => {
                    self.is_lost();
                    if !error.is_check_only() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Treats the sent step, if any, as lost: the primary store may have charged it.
    fn is_lost(&mut self) {
        let cost = self.sent.as_ref().map_or(0, Step::cost);
        self.charged(0, cost);
    }

    fn charged(&mut self, charged: u64, dropped: u64) {
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

/// Ends a reconciliation when dropped. `true` if a charge or reset was sent.
struct Ended<'a, P: Store, F: Store>(&'a Partition<P, F>, bool);

impl<P: Store, F: Store> Drop for Ended<'_, P, F> {
    fn drop(&mut self) {
        self.0.accounts.reconciled(self.1);
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
