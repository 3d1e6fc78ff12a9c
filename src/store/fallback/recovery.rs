//! The way back: the one task that looks after the primary store, off the request path.

use std::future::{Future, poll_fn};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use super::breaker::{Breaker, Ticket};
use super::partition::Partition;
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::observe::event;
use crate::store::{Answer, Store};
use crate::util::{Span, Task, instant, jittered};

/// Longest wait for others that reconcile.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl<P: Store, F: Store> Partition<P, F> {
    /// Starts the task that looks after the primary store on the present runtime, if no task does so.
    pub(super) fn attend(self: &Arc<Self>) {
        let now = instant();
        if self.recovery.is_held(now) {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let span = Span {
            begins: now,
            until: now + self.patience(),
        };
        if let Some(task) = self.recovery.begin(runtime.id(), now, span) {
            drop(
                runtime.spawn(
                    Recovery {
                        partition: Arc::downgrade(self),
                        task,
                    }
                    .run(),
                ),
            );
        }
    }

    /// Has other runtimes rely on the task for longer. `false` if that has come too late, and another task has taken over.
    pub(super) fn renew(&self, task: &Task) -> bool {
        let now = instant();
        task.renew(now, now + self.patience())
    }

    /// For how long other runtimes rely on a task that is not heard of. It waits for a quarter of a second and two
    /// deadlines at most: see [`others`](Self::others).
    fn patience(&self) -> Duration {
        let longest = self
            .settings
            .deadline
            .saturating_add(Breaker::LONGEST_DELAY)
            .saturating_mul(2);
        // Or there may be no such time.
        longest.min(Duration::from_secs(365 * 86_400))
    }

    fn needs_attention(&self) -> bool {
        !self.breaker.is_closed() || !self.outages.is_empty()
    }

    /// What the primary store decides on a check of ours, by the deadline.
    pub(super) async fn asked_in_time(&self, check: Check) -> Result<Decision, StoreError> {
        self.asked_within(check, self.settings.deadline).await
    }

    /// What the primary store decides on a check of ours, within this time.
    pub(super) async fn asked_within(
        &self,
        check: Check,
        time: Duration,
    ) -> Result<Decision, StoreError> {
        let key = *check.key();
        let mut answer = match self.primary.check(check) {
            Answer::Ready { answer } => return answer,
            Answer::Pending { future } => pin!(future),
        };
        timeout(time, answer.as_mut()).await.unwrap_or_else(|_| {
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

    /// How long it takes all other instances to find out that the primary store is back, and to announce that they
    /// reconcile. `None` if there are no others.
    fn others(&self) -> Option<Duration> {
        let instances = self.settings.share.instances();
        // The longest wait until a probe, a deadline for the probe, and one for the announcement.
        (instances > NonZeroU32::MIN).then(|| {
            Breaker::longest_delay(instances)
                .saturating_add(self.settings.deadline.saturating_mul(2))
        })
    }

    /// With the breaker closed: sends a probe if it is half-open, and reconciles what the fallback has
    /// granted. `false` if the primary store fails again.
    async fn tend(self: &Arc<Self>, task: &Task) -> bool {
        if !self.breaker.is_closed() {
            if let Err(error) = self.ping().await {
                self.count(&error, Ticket::Probe);
                return false;
            }
            self.breaker.succeeded(Ticket::Probe);
        }
        let well = self.reconcile(task).await;
        self.notify();
        well
    }

    /// With the breaker open: reconciles, and then closes it. `false` if the primary store fails again.
    async fn close(self: &Arc<Self>, task: &Task) -> bool {
        // Requests go on meanwhile, and the fallback grants some more. After a few rounds there is hardly anything left.
        for _ in 0..Self::ROUNDS {
            if self.outages.is_empty() {
                break;
            } else if !self.reconcile(task).await {
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
        self.reconcile(task).await;
        true
    }

    const ROUNDS: usize = 3;
}

/// The task. It ends when there is nothing to do, when another one has taken over, and with the last clone of the store.
struct Recovery<P: Store, F: Store> {
    partition: Weak<Partition<P, F>>,
    task: Task,
}

impl<P: Store, F: Store> Recovery<P, F> {
    async fn run(self) {
        let (mut attempts, mut was_open) = (0, false);
        while let Some(partition) = self
            .current()
            .filter(|partition| partition.needs_attention())
        {
            let open = partition.breaker.is_open();
            let longest = Breaker::longest_delay(partition.settings.share.instances());
            // While it waits, it keeps no store alive.
            drop(partition);
            if open != was_open {
                (attempts, was_open) = (0, open);
            }
            sleep(jittered(Breaker::delay(attempts, longest), 0.5..1.0)).await;
            let Some(partition) = self.current() else {
                break;
            };
            let well = unless_it_panics(async {
                if partition.breaker.is_open() {
                    self.recover(partition).await
                } else {
                    partition.tend(&self.task).await
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

    /// The store, unless it is gone or another task looks after it.
    fn current(&self) -> Option<Arc<Partition<P, F>>> {
        self.partition
            .upgrade()
            .filter(|partition| partition.renew(&self.task))
    }

    /// With the breaker open: tries to close it. Reconciles first, and waits until the other instances have reconciled
    /// too: otherwise they and this one would be granted again what the others have granted already.
    async fn recover(&self, mut partition: Arc<Partition<P, F>>) -> bool {
        if partition.ping().await.is_err() || !partition.renew(&self.task) {
            return false;
        }
        let mut well = true;
        if let Some(others) = partition.others() {
            well = partition
                .announced(others, partition.reconcile(&self.task))
                .await;
            let reconciled = instant();
            let mut wait = others;
            while well && reconciled.elapsed() < LONGEST_WAIT {
                drop(partition);
                sleep(wait).await;
                let Some(again) = self.current() else {
                    return false;
                };
                partition = again;
                match partition.reconciling().await {
                    Ok(None) => break,
                    // All wait for the same moment.
                    Ok(Some(time)) => wait = time.min(LONGEST_WAIT) + jittered(others, 0.0..0.25),
                    Err(_) => {
                        wait = jittered(others, 0.0..0.25);
                        well = partition.ping().await.is_ok();
                    }
                }
                // The fallback grants meanwhile, so that little is left in the end.
                well = well && partition.reconcile(&self.task).await;
            }
        }
        let recovered = well && partition.close(&self.task).await;
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
