//! One partition of the primary store: sends each check to one of the two stores, and handles the reply.

use std::any::TypeId;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tokio::time::Instant;

use super::Settings;
use super::accounts::{Accounts, Caller};
use super::breaker::{Breaker, Ticket};
use super::share;
use crate::background::TaskOwner;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{ChargedAt, Check, Decision, Key, Mode, Source};
use crate::observe::{Observer, event, or_log};
use crate::store::{Answer, LocalStore, Store};
use crate::util::{Clock, contain, instant};

/// One partition of the primary store, or all of it, with the fallback.
pub(super) struct Partition<P, F> {
    pub(super) primary: P,
    pub(super) fallback: F,
    pub(super) settings: Settings,
    /// Number of partitions of the primary store.
    pub(super) partitions: usize,
    /// The caller of the probes of this partition.
    pub(super) probe: Key,
    pub(super) breaker: Breaker,
    /// Number of partitions with an open breaker. Briefly too small by one if a breaker closes immediately after it has
    /// opened.
    pub(super) open: Arc<AtomicI64>,
    /// The owner of the recovery task.
    pub(super) recovery: TaskOwner,
    pub(super) accounts: Accounts,
    pub(super) clock: Clock,
}

/// The circumstances in which a check was sent to the primary store.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    epoch: u64,
    ticket: Ticket,
}

/// The primary store's immediate reply to a check.
pub(super) enum Reply<F> {
    NotAsked,
    Answer(Result<Decision, StoreError>),
    /// The check was sent at this time, and its reply is pending.
    Later(F, Asked, Instant),
}

impl<P: Store, F: Store> Partition<P, F> {
    /// Notifies the observer of an event, which is lost if the observer panics.
    pub(super) fn observe(&self, notify: impl FnOnce(&dyn Observer)) {
        contain(|| notify(or_log(self.settings.observer.get())));
    }

    /// Sends a check to the primary store, unless the fallback must decide it.
    pub(super) fn ask(self: &Arc<Self>, check: &Check) -> Reply<P::Future> {
        if self.overtakes(check) {
            self.attend();
            return Reply::NotAsked;
        }
        // Read the epoch before the breaker, so that a check sent before the breaker opened is of an earlier epoch.
        let epoch = self.accounts.epoch();
        // Within two deadlines a check has failed, or its future was dropped.
        let patience = self.settings.deadline.saturating_mul(2);
        let Some(ticket) = self.breaker.admit(|| self.clock.micros(), patience) else {
            // If the runtime of the recovery task has shut down, start the task on this one.
            self.attend();
            return Reply::NotAsked;
        };
        let asked = Asked { epoch, ticket };
        match self.primary.check(check.clone().in_fallback()) {
            Answer::Ready { answer } => {
                match &answer {
                    Ok(decision) => self.succeeded(check, decision, asked),
                    Err(error) => self.failed(check, error, asked),
                }
                Reply::Answer(answer)
            }
            Answer::Pending { future } => Reply::Later(future, asked, instant()),
        }
    }

    /// Returns `true` if a check refunds or resets charges that the primary store may lack, so that the fallback must
    /// decide it. Charges in the primary store are refunded there.
    fn overtakes(&self, check: &Check) -> bool {
        let charged = check.charged().first().map(|charged| charged.at);
        let may = match check.mode() {
            Mode::Reset => true,
            Mode::Refund => !matches!(charged, Some(ChargedAt::Redis(_))),
            _ => false,
        };
        may && check
            .policies()
            .without_in_flight()
            .is_some_and(|policies| {
                let caller = self.accounts.caller(check.key());
                caller.account(policies).is_some()
            })
    }

    /// The check under this instance's share of its policies.
    pub(super) fn share_of(&self, check: Check) -> Check {
        match self.settings.share.instances() {
            NonZeroU32::MIN => check,
            instances => {
                let share = check.policies().share(instances);
                check.under(share)
            }
        }
    }

    /// Handles a decision of the primary store.
    pub(super) fn succeeded(self: &Arc<Self>, check: &Check, decision: &Decision, asked: Asked) {
        if decision.source() == Source::Cached {
            // A cached denial is no evidence about the store.
            return self.breaker.learned_nothing(asked.ticket);
        }
        self.breaker.succeeded(asked.ticket);
        if !self.accounts.is_empty() {
            self.attend();
        }
        // The answer to a repeated id is an old one.
        if !decision.is_repeated() {
            if let Some(mirrored) = check.mirrored(decision) {
                // Keep the slots of this instance in the fallback too, for an outage.
                drop(self.fallback.check(mirrored));
            }
            let caller = self.accounts.caller(check.key());
            if caller.is_known(asked.epoch) {
                let _caller = self.locks_while_it_decides().then_some(caller);
                self.fallback.backend().warm(check.key(), decision);
            }
        }
    }

    /// Handles a failure of the primary store to decide a check, or a missed deadline.
    pub(super) fn failed(self: &Arc<Self>, check: &Check, error: &StoreError, asked: Asked) {
        self.observe(|observer| observer.failed(&event::Failed::new(Some(check.key()), error)));
        // A full queue is no evidence about the store: the outcome of the queued checks is.
        if error.is_check_only() || error.kind() == ErrorKind::QueueFull {
            return self.breaker.learned_nothing(asked.ticket);
        }
        self.count(error, asked.ticket);
        self.attend();
    }

    /// The error for a check of this caller without a reply at the deadline.
    pub(super) fn late(&self, key: &Key) -> StoreError {
        let late = StoreError::new(ErrorKind::Timeout);
        match self.primary.backend().server(key) {
            Some(server) => late.with_server(server),
            None => late,
        }
    }

    /// Counts a failure.
    pub(super) fn count(&self, error: &StoreError, ticket: Ticket) {
        let (lasting, now) = (error.kind() == ErrorKind::ClusterNode, self.clock.micros());
        if !self.breaker.failed(ticket, lasting, now) {
            return;
        }
        self.accounts.end_epoch();
        if self.open.fetch_add(1, Ordering::AcqRel) == 0 {
            let mut degraded = event::Degraded::new(error);
            degraded.share = self.settings.share.instances();
            self.observe(|observer| observer.degraded(&degraded));
        }
    }

    /// Lets the fallback decide. If the check was `sent` to the primary store too, it may have been charged there, so
    /// the decision is not recorded.
    pub(super) fn fall_back(self: &Arc<Self>, check: &Check, sent: bool) -> Answer<F::Future> {
        if let Some(waiters) = self.primary.backend().waiters() {
            waiters.freed(check);
        }
        let elsewhere = || {
            let error = StoreError::new(ErrorKind::NotReady).check_only();
            Answer::ready(Err(if sent { error } else { error.not_sent() }))
        };
        if check.mode() == Mode::Release {
            // The primary store may still count the slot, so report an error that lets the release be retried.
            drop(self.fallback.check(self.share_of(check.clone())));
            return elsewhere();
        }
        let caller = self.accounts.caller(check.key());
        let refund = self.refunds_here(&caller, check).filter(|_| !sent);
        if refund.is_none() && check.mode() == Mode::Refund {
            return elsewhere();
        }
        let check = refund.as_ref().unwrap_or(check);
        // Under the lock, no reply can warm the fallback between a grant and its record.
        let caller = self.locks_while_it_decides().then_some(caller);
        match self.fallback.check(self.share_of(check.clone())) {
            Answer::Ready { answer } => Answer::ready(self.fell_back(check, sent, answer, caller)),
            pending => pending,
        }
    }

    /// Returns `true` if the fallback decides and is warmed under the lock of the caller. Only [`LocalStore`] is, as it
    /// runs no user code. Another fallback may be warmed with a reply that lacks a concurrent grant.
    fn locks_while_it_decides(&self) -> bool {
        TypeId::of::<F>() == TypeId::of::<LocalStore>()
    }

    /// Returns the part of a refund that applies to the caller's account: the account has the charge, or the refund
    /// names no charge. `None` if the primary store must refund.
    fn refunds_here(&self, caller: &Caller<'_>, check: &Check) -> Option<Check> {
        if check.mode() != Mode::Refund {
            return None;
        }
        let account = caller.account(check.policies().without_in_flight()?)?;
        let cost = account.refundable(check, self.clock.micros())?;
        let (key, policies, charged) = (*check.key(), check.policies(), check.charged());
        Some(Check::refund_of(key, policies, cost, charged.into()))
    }

    /// Handles a reply of the fallback, and records it, under the lock of the `caller` if it is held.
    ///
    /// Replies of the primary store may have warmed the fallback before a later reply, so a fallback that uses them
    /// should reply immediately, as [`LocalStore`](crate::LocalStore) does.
    pub(super) fn fell_back(
        self: &Arc<Self>,
        check: &Check,
        sent: bool,
        answer: Result<Decision, StoreError>,
        caller: Option<Caller<'_>>,
    ) -> Result<Decision, StoreError> {
        let (decision, now) = (share::of_whole(check, answer?), self.clock.micros());
        let record = || {
            let mut caller = caller.unwrap_or_else(|| self.accounts.caller(check.key()));
            caller.record(check, &decision, now)
        };
        if !sent && record() {
            self.attend();
        }
        Ok(decision.charged_locally(now, sent))
    }
}
