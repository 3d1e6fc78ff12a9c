//! The reconciliation: charges the accounts to the primary store, once.
//!
//! It begins with the callers that have used most of a limit, since another instance might exceed the
//! limit for these. The cost is computed when it is sent, so that no expired cost is charged.
//!
//! The methods of [`Partition`] here are apart from those that decide checks, since only the recovery
//! calls them.

use std::cmp::Reverse;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::task::yield_now;
use tokio::time::sleep;

use super::account::Account;
use super::partition::Partition;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Mode};
use crate::observe::event;
use crate::store::Store;
use crate::util::instant;

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
        let mut callers = vec![];
        self.sweep(|key, used| callers.push((Reverse(used), key)))
            .await;
        callers.sort_unstable_by_key(|(used, _)| *used);
        let mut accounts = callers.into_iter().flat_map(|(_, key)| {
            let accounts = self.accounts.take(&key, self.clock.micros()).into_iter();
            // Collect the accounts, so that dropping the iterator puts all of them back.
            let taken = accounts.map(|account| Taken {
                partition: self,
                key,
                account,
                sent: None,
            });
            taken.collect::<SmallVec<[_; 1]>>()
        });
        let mut window = Window::of(self.partitions, self.settings.share.instances());
        let (mut working, mut well) = (FuturesUnordered::new(), true);
        loop {
            while well && working.len() < window.now {
                let Some(account) = accounts.next() else {
                    break;
                };
                working.push(async move {
                    let since = instant();
                    (account.reconcile().await, since.elapsed())
                });
            }
            let Some((is_done, took)) = working.next().await else {
                return well;
            };
            well &= is_done;
            window.learn(took, self.settings.deadline);
        }
    }

    /// Removes the expired accounts, and passes the other callers to `each`, with the part of a limit that they have
    /// used.
    pub(super) async fn sweep(&self, mut each: impl FnMut(Key, u8)) {
        if self.accounts.is_empty() {
            return;
        }
        for shard in self.accounts.shards() {
            self.accounts.sweep(shard, self.clock.micros(), &mut each);
            yield_now().await;
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
        let [charged, dropped] = [&self.accounts.charged, &self.accounts.dropped]
            .map(|cost| cost.swap(0, Ordering::Relaxed));
        if charged + dropped > 0 {
            let reconciled = event::Reconciled::new(charged, dropped);
            self.observe(|observer| observer.reconciled(&reconciled));
        }
    }
}

/// An account that is being reconciled. Dropping it puts back the unsent rest, also if the runtime shuts down.
struct Taken<'a, P: Store, F: Store> {
    partition: &'a Partition<P, F>,
    key: Key,
    account: Account,
    /// The check that was sent and has no reply yet.
    sent: Option<Check>,
}

impl<P: Store, F: Store> Taken<'_, P, F> {
    /// Sends all checks. Returns `false` if the primary store fails.
    async fn reconcile(mut self) -> bool {
        while let Some(check) = self.account.next(self.key, self.partition.clock.micros()) {
            self.sent = Some(check.clone());
            match self.partition.send(check).await {
                Ok(decision) => self.done(decision.granted()),
                Err(error) if error.is_not_sent() => {
                    self.sent = None;
                    return error.is_check_only();
                }
                Err(error) => {
                    self.done(0);
                    if !error.is_check_only() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Records that the primary store has charged this much of the sent check, if any. The rest is dropped: without a
    /// reply, the primary store may have charged it.
    fn done(&mut self, charged: u32) {
        let (partition, now) = (self.partition, self.partition.clock.micros());
        let Some(check) = self.sent.take() else {
            return;
        };
        self.account.done(&check, now);
        partition.accounts.end_epoch();
        if check.mode() == Mode::Charge {
            let dropped = check.cost().saturating_sub(charged);
            let accounts = &partition.accounts;
            accounts
                .charged
                .fetch_add(charged.into(), Ordering::Relaxed);
            accounts
                .dropped
                .fetch_add(dropped.into(), Ordering::Relaxed);
        }
    }
}

impl<P: Store, F: Store> Drop for Taken<'_, P, F> {
    fn drop(&mut self) {
        self.done(0);
        let Self {
            partition,
            key,
            account,
            ..
        } = self;
        let now = partition.clock.micros();
        partition.accounts.put_back(key, account, now);
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
