//! The recovery: a background task that probes the primary store, charges the accounts to it, and closes the breaker.
//! [`start_recovery`](Partition::start_recovery) starts it. It ends when no work is left, or after the present attempt when the last clone
//! of the store is dropped.
//!
//! - **Reconciliation.** All accounts are charged, once, beginning with the callers that have used
//!   most of a limit, since another instance might exceed the limit for these. An account counts a
//!   check as sent before it is sent: if the runtime shuts down, the check is not repeated. The
//!   cost is computed when it is sent, so that no expired cost is charged.
//! - **Announcement.** An instance that reconciles charges one shared count in the primary store,
//!   which belongs to no caller: the time until which at least one instance reconciles. An
//!   announcement is never withdrawn: it expires. So it costs the primary store the same for any
//!   number of instances, and no instance waits for a dead one.

use std::cmp::Reverse;
use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Either, join_all, select};
use tokio::time::sleep;

use super::account::is_reply;
use super::breaker::{Breaker, Ticket};
use super::check::{GRACES, Partition};
use crate::background::Task;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Policies, Quota};
use crate::observe::Event;
use crate::store::health::shows_failure;
use crate::store::{Answer, Store, charge_debt_of, probe};
use crate::util::{instant, jittered, patient, yield_to_others};

/// Time after which no further wait for other instances that reconcile begins, and the longest of these waits.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Reconciliations before the breaker closes.
const ROUNDS: usize = 3;
/// Number of accounts in the first wave of a reconciliation: these charges may be lost if the primary store fails again.
const CONCURRENT: usize = 64;
/// Number of callers whose accounts are examined without a yield. On a busy runtime each yield may take as long as the
/// handlers of all requests.
const EXAMINED: usize = 512;
/// Pause after a check that found the queue full.
const FULL: Duration = Duration::from_millis(2);

pub(super) async fn run<P: Store, F: Store>(partition: Weak<Partition<P, F>>, task: Task) {
    let mut attempts = 0;
    while let Some(alive) = partition.upgrade().filter(|alive| alive.needs_recovery()) {
        let longest = Breaker::longest_delay(alive.settings.share.alive());
        // Keep no store alive during the pause.
        drop(alive);
        sleep(jittered(Breaker::delay(attempts, longest), 0.5..1.0)).await;
        let Some(alive) = partition.upgrade() else {
            break;
        };
        // User code may panic.
        let well = AssertUnwindSafe(alive.attempt()).catch_unwind().await;
        attempts = if well.is_ok_and(|well| well) {
            0
        } else {
            attempts.saturating_add(1)
        };
    }
    if let Some(alive) = partition.upgrade() {
        alive.outage.forget_failures();
    }
    drop(task);
    // Work that arrived while this task was ending has not started another one: see `TaskOwner`.
    if let Some(alive) = partition.upgrade().filter(|alive| alive.needs_recovery()) {
        alive.start_recovery();
    }
}

impl<P: Store, F: Store> Partition<P, F> {
    fn needs_recovery(&self) -> bool {
        !self.breaker.is_closed()
            || !self.accounts.is_empty()
            || self.abandoned.load(Ordering::Acquire)
    }

    /// Returns `false` if the next attempt should come after a longer pause.
    async fn attempt(&self) -> bool {
        let well = if self.breaker.is_open() {
            let well = self.recover().await;
            self.report_outage(None);
            well
        } else {
            self.reconcile_while_usable().await
        };
        // Pause longer if the store has rejected all checks, even if it works.
        let has_charged = self.notify();
        well && (has_charged || self.accounts.is_empty())
    }

    /// With an open breaker: tries to close it. First reconciles, and waits until the other instances have reconciled
    /// too. Otherwise the primary store would grant again what the instances have already granted. Returns `false` if the
    /// primary store fails again.
    async fn recover(&self) -> bool {
        if let Err(error) = self.ping().await {
            self.report_outage(Some(&error));
            if self.accounts.is_full() {
                self.sweep().await;
            }
            return false;
        }
        let since = instant();
        let instances = self.settings.share.alive();
        if instances > NonZeroU32::MIN {
            // Time for a probe and an announcement.
            let both = self.settings.deadline.saturating_mul(2);
            let holds = Breaker::spread(instances).saturating_add(both);
            let well = self.announced(holds, self.reconcile()).await;
            // Time for all others to notice that the primary store is back, and to announce that they reconcile.
            let found = Breaker::longest_delay(instances).saturating_add(both);
            let wait = found.saturating_sub(since.elapsed());
            if !well || !self.wait_for_others(wait).await {
                return false;
            }
        }
        // During a reconciliation the fallback grants more. After three rounds little is left.
        for _ in 0..ROUNDS {
            if !self.reconcile().await {
                return false;
            }
        }
        // Before the report of the recovery, which includes it.
        self.notify();
        // Report the recovery when the last partition has recovered.
        if let Some(after) = self.breaker.close(self.clock.micros())
            && let Some(recovered) = self.outage.closed(after)
        {
            self.observe(|observer| observer.notify(&recovered));
        }
        // If this fails, `reconcile_while_usable` reconciles the rest later.
        self.reconcile().await
    }

    /// Waits for this time, and then until no announcement holds. Returns `false` if the primary store fails again.
    async fn wait_for_others(&self, mut wait: Duration) -> bool {
        let since = instant();
        while since.elapsed() < LONGEST_WAIT {
            sleep(wait.min(LONGEST_WAIT)).await;
            wait = match self.reconciling().await {
                Ok(None) => break,
                Ok(Some(time)) => time,
                // A single lost reply does not begin the recovery again.
                Err(_) if self.ping().await.is_ok() => Breaker::FIRST_DELAY,
                Err(_) => return false,
            };
            // Other instances wait for the same moment, so spread the checks.
            let spread = Breaker::spread(self.settings.share.alive());
            wait += jittered(spread, 0.0..0.5);
            // Charge the fallback's new grants now, so that little is left at the end.
            if !self.reconcile().await {
                return false;
            }
        }
        true
    }

    /// With a breaker that is not open: probes the store if the breaker is half-open or a check was abandoned, and
    /// reconciles the fallback's grants. Returns `false` if the primary store fails again.
    async fn reconcile_while_usable(&self) -> bool {
        if self.abandoned.swap(false, Ordering::AcqRel) || !self.breaker.is_closed() {
            match self.ping().await {
                Ok(()) => self.breaker.succeeded(Ticket::Probe),
                Err(error) => {
                    if shows_failure(&error) {
                        self.count(&error, Ticket::Probe);
                    }
                    return false;
                }
            }
        }
        self.reconcile().await
    }

    /// Sends a check. Returns the primary store's decision, or an error after this number of deadlines and their
    /// graces.
    async fn send(&self, check: Check, deadlines: u32) -> Result<Decision, StoreError> {
        let key = *check.key();
        let mut answer = match self.primary.check(check) {
            Answer::Ready { answer } => return answer,
            Answer::Pending { future } => pin!(future),
        };
        let time = self.settings.deadline.saturating_mul(deadlines);
        match patient(time, GRACES, answer.as_mut()).await {
            Ok(answer) => answer,
            // Even if noticed late: no request waits for this check, and a store that replies had time for it.
            Err(_) => Err(self.give_up(&key, answer)),
        }
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.send(probe::check(self.probe, 1), 1).await.map(drop)
    }

    /// Announces that this instance is reconciling until `work` is done. Each announcement holds for `time`.
    pub(super) async fn announced<T>(&self, time: Duration, work: impl Future<Output = T>) -> T {
        let announcing = pin!(async {
            loop {
                let announcement = charge_debt_of(self.probe, &announcements(), time);
                let _ = self.send(announcement, 1).await;
                sleep(jittered(time, 0.3..0.5)).await;
            }
        });
        match select(pin!(work), announcing).await {
            Either::Left((done, _)) => done,
            Either::Right((never, _)) => never,
        }
    }

    /// Returns the time until the last announcement expires, or `None` if no announcement holds.
    pub(super) async fn reconciling(&self) -> Result<Option<Duration>, StoreError> {
        let peek = Check::peek(self.probe, &announcements(), 1);
        Ok(self.send(peek, 1).await?.retry_after())
    }

    /// Charges all accounts to the primary store, and removes them. Returns `false` if the store fails again; unsent
    /// charges are kept.
    pub(super) async fn reconcile(&self) -> bool {
        let mut accounts = self.sweep().await;
        accounts.sort_unstable_by_key(|(used, ..)| Reverse(*used));
        let most = most_concurrent(
            self.primary.backend().partitions(),
            self.settings.share.alive(),
        );
        let mut well = true;
        let mut wave = most.min(CONCURRENT);
        let mut rest = accounts.into_iter().peekable();
        while well && rest.peek().is_some() {
            let since = instant();
            let mut charges = vec![];
            for (_, key, policies) in rest.by_ref().take(wave) {
                charges.push(self.reconcile_account(key, policies));
            }
            well = !join_all(charges).await.contains(&false);
            // A distant store, or a busy one, gets few charges, so that they do not delay live traffic.
            wave = if since.elapsed() < self.settings.deadline / 2 {
                most.min(2 * wave)
            } else {
                most.min(CONCURRENT)
            };
        }
        self.sweep().await;
        well
    }

    /// Removes the accounts that owe nothing, and returns the others, with the part of a limit that each has used.
    async fn sweep(&self) -> Vec<(u8, Key, Policies)> {
        let mut owed = vec![];
        if !self.accounts.is_empty() {
            let mut examined = 0;
            for shard in self.accounts.shards() {
                examined += self.accounts.sweep(shard, self.clock.micros(), &mut owed);
                if examined >= EXAMINED {
                    examined = 0;
                    yield_to_others().await;
                }
            }
        }
        owed
    }

    /// Charges an account to the primary store. Returns `false` if the store fails.
    async fn reconcile_account(&self, key: Key, policies: Policies) -> bool {
        let since = instant();
        // A reset, and a charge under each policy. The next reconciliation charges the grants since.
        let mut checks = 1 + policies.iter().len();
        while checks > 0 {
            let sent = self
                .accounts
                .caller(&key)
                .send(&policies, self.clock.micros());
            let Some(check) = sent else {
                break;
            };
            // No request awaits this check, so it may take longer.
            let answer = self.send(check.clone(), 2).await;
            self.accounts
                .caller(&key)
                .replied(&policies, &check, &answer);
            match answer {
                answer if is_reply(&answer) => checks -= 1,
                Err(error)
                    if error.kind() == ErrorKind::QueueFull
                        && since.elapsed() / 2 < self.settings.deadline =>
                {
                    sleep(FULL).await;
                }
                // Any other error stops the reconciliation, also a queue that stays full.
                answer => return answer.is_err_and(|error| error.is_check_only()),
            }
        }
        true
    }

    /// Notifies the observer once a minute of an outage that continues, and why the last probe failed.
    fn report_outage(&self, error: Option<&StoreError>) {
        if let Some((after, checks)) = self.outage.due(self.clock.micros()) {
            self.observe(|observer| {
                observer.notify(&Event::StillDegraded {
                    after,
                    checks,
                    share: self.settings.share.alive(),
                    error,
                });
            });
        }
    }

    /// Notifies the observer of the cost reconciled since the last notification. Returns `true` if anything was charged.
    fn notify(&self) -> bool {
        let [charged, dropped] = [&self.accounts.charged, &self.accounts.dropped]
            .map(|cost| cost.swap(0, Ordering::Relaxed));
        if charged + dropped > 0 {
            self.outage.reconciled(charged, dropped);
            self.observe(|observer| observer.notify(&Event::Reconciled { charged, dropped }));
        }
        charged > 0
    }
}

/// Maximum number of accounts that one of `instances` reconciles concurrently in one of `partitions`. Together they are
/// about 1,000, or [`CONCURRENT`] each, so that they do not delay other checks in Redis.
fn most_concurrent(partitions: usize, instances: NonZeroU32) -> usize {
    let most = (1_024 / instances.get() as usize).max(CONCURRENT);
    (most / partitions.max(1)).max(16)
}

/// The policy of announcements. Each charges a debt, which expires with the announcement.
pub(super) fn announcements() -> Policies {
    const QUOTA: Quota = Quota::per_second(1_000).burst(10_000);
    static POLICIES: LazyLock<Policies> =
        LazyLock::new(|| probe::policy("reconciling", QUOTA).into());
    POLICIES.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_and_partitions_share_the_concurrency() {
        let of = |partitions, instances| {
            most_concurrent(partitions, NonZeroU32::new(instances).unwrap())
        };
        assert_eq!([of(1, 1), of(1, 4), of(1, u32::MAX)], [1_024, 256, 64]);
        assert_eq!([of(4, 1), of(100, 1), of(100, 100)], [256, 16, 16]);
    }
}
