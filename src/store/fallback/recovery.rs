//! The way back: the one task that looks after the primary store, off the request path.

use std::future::{Future, poll_fn};
use std::hash::BuildHasher;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::breaker::{Breaker, Ticket};
use super::partition::Partition;
use crate::background::Task;
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::observe::event;
use crate::store::{Answer, Store};
use crate::util::{RandomState, instant};

/// For how long others that reconcile are waited for, and how often an instance looks whether any still does.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl<P: Store, F: Store> Partition<P, F> {
    /// Starts the recovery task, unless it is running.
    pub(super) fn attend(self: &Arc<Self>) {
        let partition = Arc::downgrade(self);
        self.recovery
            .spawn(None, |_task| Recovery { partition, _task }.run());
    }

    fn needs_attention(&self) -> bool {
        !self.breaker.is_closed() || !self.outages.is_empty()
    }

    /// What the primary store decides on a check of ours, by the deadline.
    pub(super) async fn asked_in_time(&self, check: Check) -> Result<Decision, StoreError> {
        let key = *check.key();
        let mut answer = match self.primary.check(check) {
            Answer::Ready { answer } => return answer,
            Answer::Pending { future } => pin!(future),
        };
        timeout(self.settings.deadline, answer.as_mut())
            .await
            .unwrap_or_else(|_| {
                let error = self.late(&key);
                Err(if self.primary.withdraw(answer) {
                    error.unsent()
                } else {
                    error
                })
            })
    }

    /// Has the primary store decide a check.
    async fn ping(&self) -> Result<(), StoreError> {
        self.asked_in_time(Check::probe(self.probe)).await.map(drop)
    }

    /// How long it takes all other instances to find out that the primary store is back, and to say that they
    /// reconcile. `None` if there are no others.
    fn others(&self) -> Option<Duration> {
        let others = self.settings.share.instances() > NonZeroU32::MIN;
        // The longest wait until a probe, a deadline for the probe, and one for what they say.
        others.then(|| {
            Breaker::LONGEST_DELAY.saturating_add(self.settings.deadline.saturating_mul(2))
        })
    }

    /// With the breaker closed: sends a probe if it is half-open, and reconciles what the fallback has
    /// granted. `false` if the primary store fails again.
    async fn tend(self: &Arc<Self>) -> bool {
        if !self.breaker.is_closed() {
            if let Err(error) = self.ping().await {
                self.count(&error, Ticket::Probe);
                return false;
            }
            self.breaker.succeeded(Ticket::Probe);
        }
        let well = self.reconcile().await;
        self.notify();
        well
    }

    /// With the breaker open: reconciles, and then closes it. `false` if the primary store fails again.
    async fn close(self: &Arc<Self>) -> bool {
        // Requests go on meanwhile, and the fallback grants some more. After a few rounds there is hardly anything left.
        for _ in 0..Self::ROUNDS {
            if self.outages.is_empty() {
                break;
            } else if !self.reconcile().await {
                return false;
            }
        }
        // Reported for the last partition that comes back.
        if let Some(after) = self.breaker.close(self.clock.micros())
            && self.open.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.observe(|observer| observer.recovered(&event::Recovered::new(after)));
        }
        // What fails here, `tend` reconciles later.
        self.reconcile().await;
        true
    }

    const ROUNDS: usize = 3;
}

/// The task. It ends when there is nothing to do, and with the last clone of the store.
struct Recovery<P: Store, F: Store> {
    partition: Weak<Partition<P, F>>,
    _task: Task,
}

impl<P: Store, F: Store> Recovery<P, F> {
    async fn run(self) {
        let jitter = RandomState::new();
        let (mut attempts, mut was_open) = (0, false);
        while let Some(partition) = self
            .partition
            .upgrade()
            .filter(|partition| partition.needs_attention())
        {
            let open = partition.breaker.is_open();
            // While it waits, it keeps no store alive.
            drop(partition);
            if open != was_open {
                (attempts, was_open) = (0, open);
            }
            sleep(Breaker::delay(
                attempts,
                jitter.hash_one(attempts) as f64 / u64::MAX as f64,
            ))
            .await;
            let Some(partition) = self.partition.upgrade() else {
                break;
            };
            let well = unless_it_panics(async {
                if partition.breaker.is_open() {
                    self.recover(partition).await
                } else {
                    partition.tend().await
                }
            });
            let well = well.await.unwrap_or(false);
            attempts = if well { 0 } else { attempts.saturating_add(1) };
        }
        let partition = self.partition.upgrade();
        drop(self);
        // What came up while this task was about to end has not started another: see `TaskOwner`.
        if let Some(partition) = partition.filter(|partition| partition.needs_attention()) {
            partition.attend();
        }
    }

    /// With the breaker open: tries to close it. Reconciles first, and waits until the other instances have reconciled
    /// too: or they would be granted, and so would this one, what the others have granted already.
    async fn recover(&self, mut partition: Arc<Partition<P, F>>) -> bool {
        if partition.ping().await.is_err() {
            return false;
        }
        // If others have heard that it reconciles, they have to hear too that it no longer does.
        let (found, others) = (instant(), partition.others());
        let announcement = others.map(|_| partition.announce());
        let mut well = partition.reconcile().await;
        let is_heard = match announcement {
            Some(announcement) if well => announcement.end().await,
            _ => false,
        };
        if let (true, Some(others)) = (well, others) {
            let reconciled = instant();
            // Those of whom nothing is heard may take as long to reconcile as this one did.
            let since = if is_heard { found } else { reconciled };
            drop(partition);
            sleep(others.saturating_sub(since.elapsed())).await;
            loop {
                let Some(again) = self.partition.upgrade() else {
                    return false;
                };
                partition = again;
                if reconciled.elapsed() >= LONGEST_WAIT {
                    break;
                }
                match partition.others_reconciling().await {
                    Some(0) => break,
                    // What is granted meanwhile is reconciled, so that little is left in the end.
                    Some(_) => well = partition.reconcile().await,
                    None => {
                        well = partition.ping().await.is_ok();
                        // A primary store that answers that and not this cannot tell. One that was away for a moment may
                        // have heard that this one reconciles, and not that it no longer does: the others would wait for it.
                        if well && !is_heard && partition.others_reconciling().await.is_none() {
                            break;
                        }
                    }
                }
                if !well {
                    break;
                }
                drop(partition);
                sleep(LOOK_AGAIN).await;
            }
            well = well && partition.ping().await.is_ok();
        }
        let recovered = well && partition.close().await;
        partition.notify();
        recovered
    }
}

/// What comes of this, or `None` if it panics, as the code of a user may that it calls.
async fn unless_it_panics<T>(work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx)));
        polled.map_or(Poll::Ready(None), |poll| poll.map(Some))
    })
    .await
}
