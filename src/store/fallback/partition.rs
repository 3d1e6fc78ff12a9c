//! Who decides a check, and what is learned of it.

use std::any::TypeId;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

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

/// One partition of the primary store, or the whole of it, and the fallback.
pub(super) struct Partition<P, F> {
    pub(super) primary: P,
    pub(super) fallback: F,
    pub(super) settings: Settings,
    /// How many partitions the primary store has.
    pub(super) partitions: usize,
    /// The caller by whom this partition of the primary store is tried.
    pub(super) probe: Key,
    pub(super) breaker: Breaker,
    /// How many partitions have an open breaker. For a moment one less, where one closes as soon as it has opened.
    pub(super) open: Arc<AtomicI64>,
    /// The task that looks after the primary store.
    pub(super) recovery: TaskOwner,
    pub(super) accounts: Accounts,
    /// What has been reconciled, until the observer is notified.
    pub(super) sums: Mutex<Sums>,
    pub(super) clock: Clock,
}

/// What has been reconciled and not yet reported, in units of cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) charged: u64,
    pub(super) dropped: u64,
}

/// How the primary store was asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    epoch: u64,
    ticket: Ticket,
}

/// What the primary store says to a check at once.
pub(super) enum Reply<F> {
    NotAsked,
    Answer(Result<Decision, StoreError>),
    /// It was asked at this time, and has to be waited for.
    Later(F, Asked, Instant),
}

impl<P: Store, F: Store> Partition<P, F> {
    /// Notifies the observer of an event. If it panics, it has missed that.
    pub(super) fn observe(&self, notify: impl FnOnce(&dyn Observer)) {
        contain(|| notify(or_log(self.settings.observer.get())));
    }

    /// Asks the primary store, if that may be asked.
    pub(super) fn ask(self: &Arc<Self>, check: &Check) -> Reply<P::Future> {
        if self.overtakes(check) {
            self.attend();
            return Reply::NotAsked;
        }
        // Before the breaker is looked at: so an answer that comes while it is open is of another epoch.
        let epoch = self.accounts.epoch();
        // A check that is waited for has failed by its deadline, or its caller has gone away.
        let patience = self.settings.deadline.saturating_mul(2);
        let Some(ticket) = self.breaker.admit(|| self.clock.micros(), patience) else {
            // The runtime of the recovery task may have shut down.
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

    /// Returns `true` if a check refunds or resets charges that the primary store lacks: the fallback does
    /// that. A charge in the primary store is refunded there.
    fn overtakes(&self, check: &Check) -> bool {
        let charged = check.charged().first().map(|charged| charged.at);
        match (check.mode(), charged) {
            (Mode::Reset, _) | (Mode::Refund, Some(ChargedAt::Local(_))) => {
                check.policies().without_in_flight().is_some()
                    && self.accounts.caller(check.key()).is_held()
            }
            (Mode::Refund, None) => {
                let caller = self.accounts.caller(check.key());
                let policies = check.policies().without_in_flight();
                policies.is_some_and(|policies| caller.account(policies).is_some())
            }
            _ => false,
        }
    }

    /// The same check of this instance's share.
    pub(super) fn share_of(&self, check: Check) -> Check {
        match self.settings.share.instances() {
            NonZeroU32::MIN => check,
            instances => {
                let share = check.policies().share(instances);
                check.under(share)
            }
        }
    }

    /// The primary store has decided.
    pub(super) fn succeeded(self: &Arc<Self>, check: &Check, decision: &Decision, asked: Asked) {
        if decision.source() == Source::Cached {
            // What was remembered says nothing of the store now.
            return self.breaker.learned_nothing(asked.ticket);
        }
        self.breaker.succeeded(asked.ticket);
        if !self.accounts.is_empty() {
            self.attend();
        }
        // An answer to an id may be an old one.
        if check.id().is_none() {
            if let Some(mirrored) = check.mirrored(decision) {
                // So that the fallback knows the slots of this instance, when it has to decide.
                drop(self.fallback.check(mirrored));
            }
            let follow = || self.fallback.warm(check.key(), decision);
            if self.locks_while_it_decides() {
                self.accounts.warm(check.key(), asked.epoch, follow);
            } else if self.accounts.is_known(check.key(), asked.epoch) {
                follow();
            }
        }
    }

    /// The primary store could not decide a check, or has not by its deadline.
    pub(super) fn failed(self: &Arc<Self>, check: &Check, error: &StoreError, asked: Asked) {
        self.observe(|observer| observer.failed(&event::Failed::new(Some(check.key()), error)));
        // A full queue is of our own making: what waits in it shows whether the primary store answers.
        if error.is_of_check() || error.kind() == ErrorKind::QueueFull {
            return self.breaker.learned_nothing(asked.ticket);
        }
        self.count(error, asked.ticket);
        self.attend();
    }

    /// The primary store has not answered a check of this caller by the deadline.
    pub(super) fn late(&self, key: &Key) -> StoreError {
        let late = StoreError::new(ErrorKind::Timeout);
        match self.primary.server(key) {
            Some(server) => late.at(server),
            None => late,
        }
    }

    /// Counts a failure.
    pub(super) fn count(&self, error: &StoreError, ticket: Ticket) {
        if self.breaker.failed(
            ticket,
            error.kind() == ErrorKind::Cluster,
            self.clock.micros(),
        ) {
            self.accounts.end_epoch();
            if self.open.fetch_add(1, Ordering::AcqRel) == 0 {
                let mut degraded = event::Degraded::new(error);
                degraded.share = self.settings.share.instances();
                self.observe(|observer| observer.degraded(&degraded));
            }
        }
    }

    /// Has the fallback decide. If the check was `sent` to the primary store too, that may have charged it,
    /// so the decision is not recorded.
    pub(super) fn fall_back(self: &Arc<Self>, check: &Check, sent: bool) -> Answer<F::Future> {
        if let Some(waiters) = self.primary.waiters() {
            waiters.freed(check);
        }
        let elsewhere = || {
            let error = StoreError::new(ErrorKind::NotReady).of_check();
            Answer::ready(Err(if sent { error } else { error.unsent() }))
        };
        if check.mode() == Mode::Release {
            // The primary store may still have the slot.
            drop(self.fallback.check(self.share_of(check.clone())));
            return elsewhere();
        }
        let caller = self.accounts.caller(check.key());
        let refund = self.refunds_here(&caller, check).filter(|_| !sent);
        if refund.is_none() && check.mode() == Mode::Refund {
            return elsewhere();
        }
        let check = refund.as_ref().unwrap_or(check);
        let share = self.share_of(check.clone());
        // No reply is followed between a grant and its record.
        if self.locks_while_it_decides() {
            return match self.fallback.check(share) {
                Answer::Ready { answer } => Answer::ready(self.record(caller, check, sent, answer)),
                pending => pending,
            };
        }
        drop(caller);
        let _deciding = self.accounts.deciding(check.key());
        match self.fallback.check(share) {
            Answer::Ready { answer } => Answer::ready(self.fell_back(check, sent, answer)),
            pending => pending,
        }
    }

    /// Whether the fallback decides and follows under the lock of a caller: only ours does, which runs no code of a
    /// user's. In front of another one, an answer may be followed that does not know of what is granted at the same
    /// moment.
    fn locks_while_it_decides(&self) -> bool {
        TypeId::of::<F>() == TypeId::of::<LocalStore>()
    }

    /// The part of a refund that applies to the account of the caller: the charge is in the account, or the
    /// refund names none. `None` if the primary store has to refund it.
    fn refunds_here(&self, caller: &Caller<'_>, check: &Check) -> Option<Check> {
        if check.mode() != Mode::Refund {
            return None;
        }
        let charged = check.charged();
        let account = caller.account(check.policies().without_in_flight()?)?;
        let at = match charged.first().map(|charged| charged.at) {
            Some(ChargedAt::Redis(_)) => return None,
            Some(ChargedAt::Local(at)) => Some(at),
            None => None,
        };
        let most = account.refundable(at, self.clock.micros())?;
        let cost = check.cost().min(u32::try_from(most).unwrap_or(u32::MAX));
        Some(match charged {
            [] => Check::refund(*check.key(), check.policies(), cost),
            _ => Check::refund_of(*check.key(), check.policies(), cost, charged.into()),
        })
    }

    /// The fallback has replied later. Replies of the primary store may have been followed in between, so a
    /// fallback that follows them should reply immediately, as [`LocalStore`](crate::LocalStore) does.
    pub(super) fn fell_back(
        self: &Arc<Self>,
        check: &Check,
        sent: bool,
        answer: Result<Decision, StoreError>,
    ) -> Result<Decision, StoreError> {
        self.record(self.accounts.caller(check.key()), check, sent, answer)
    }

    fn record(
        self: &Arc<Self>,
        mut caller: Caller<'_>,
        check: &Check,
        sent: bool,
        answer: Result<Decision, StoreError>,
    ) -> Result<Decision, StoreError> {
        let decision = share::of_whole(check, answer?, || self.clock.micros());
        let now = self.clock.micros();
        let is_owed = !sent && caller.record(check, &decision, now);
        drop(caller);
        if is_owed {
            self.attend();
        }
        Ok(decision.charged_locally(now))
    }
}
