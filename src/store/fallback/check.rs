//! One check: decided by the primary store until the deadline, and then by the fallback. The
//! outcome is reported to the breaker.
//!
//! The methods of [`Partition`] that only the recovery task needs are in `recovery`.
//!
//! Only the primary store decides a check for a block of a [`Leased`](crate::Leased) store. It fails immediately while the
//! breaker does not admit it. At the deadline it counts as a failure, and then still waits for the late reply.

use std::any::TypeId;
use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;

use super::account::RefundTo;
use super::accounts::{Accounts, LockedCaller, is_of_time};
use super::breaker::{Breaker, Ticket};
use super::outage::Outage;
use super::share::share_of;
use super::{FallbackSettings, recovery};
use crate::background::TaskOwner;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Extra, Key, MadeBy, Mode, Source, Verdict};
use crate::observe::mistakes::{OTHER_FALLBACK, SMALL_SHARE};
use crate::observe::{Event, Observer, or_log};
use crate::store::health::shows_failure;
use crate::store::{Answer, LocalStore, Store};
use crate::util::{
    Clock, NoOutput, OnceFlag, Patient, contain, lock, patient, polled_after_completion,
};

/// One partition of the primary store, or all of it, with the fallback.
pub(super) struct Partition<P, F> {
    pub(super) primary: P,
    pub(super) fallback: F,
    pub(super) settings: Arc<FallbackSettings>,
    /// The key that the probes of this partition check.
    pub(super) probe: Key,
    pub(super) breaker: Breaker,
    /// The outage of all partitions.
    pub(super) outage: Arc<Outage>,
    /// Done when the fallback was [examined](Self::examine), at the first check.
    pub(super) examined: Arc<OnceFlag>,
    /// The policies whose share was reported as too small for a cost.
    pub(super) small_shares: Arc<Mutex<HashSet<u64>>>,
    /// Whether a check was dropped without a reply. If the breaker is not open then, a probe follows.
    pub(super) abandoned: AtomicBool,
    /// The owner of the recovery task.
    pub(super) recovery: TaskOwner,
    pub(super) accounts: Accounts,
    pub(super) clock: Clock,
}

/// Number of graces of a deadline: enough for a reply to pass the tasks that read it, on a runtime whose handlers keep
/// its threads.
pub(super) const GRACES: u32 = 8;

/// Maximum number of policies whose small share is reported.
const MAX_SMALL_SHARES: usize = 100;

/// How a check was sent to the primary store.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentToPrimary {
    /// At that time.
    epoch: u64,
    pub(super) ticket: Ticket,
}

pin_project! {
    /// Resolves to the decision of a [`Fallback`](crate::Fallback).
    ///
    /// # Panics
    ///
    /// If it is polled after it has resolved.
    pub struct FallbackFuture<P: Store, F: Store> {
        partition: Arc<Partition<P, F>>,
        #[pin]
        step: Step<P::Future, F::Future>,
    }

    /// A client that always gives up before the deadline reports no failures, so let a probe find
    /// the outage.
    impl<P: Store, F: Store> PinnedDrop for FallbackFuture<P, F> {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            if let StepProj::Primary { sent: Some(sent), .. } = this.step.project() {
                this.partition.abandon(*sent);
            }
        }
    }
}

pin_project! {
    #[project = StepProj]
    pub(super) enum Step<P, F> {
        Primary {
            #[pin]
            waiting: Patient<P>,
            // `None` after the deadline of a check for a block, which is reported once. The late
            // reply is still returned, since it shows the quota to refund.
            sent: Option<SentToPrimary>,
            check: Check,
        },
        Fallback {
            #[pin]
            answer: F,
            check: Check,
            // See `fall_back`.
            in_doubt: bool,
        },
        Done,
    }
}

/// The answer, or the next step towards it.
pub(super) type NextStep<P, F> = Answer<Step<<P as Store>::Future, <F as Store>::Future>>;

impl<P: Store, F: Store> Partition<P, F> {
    /// Notifies the observer of an event, which is lost if the observer panics.
    pub(super) fn observe(&self, notify: impl FnOnce(&dyn Observer)) {
        contain(|| notify(or_log(self.settings.observer.get())));
    }

    /// Starts the recovery task, unless it is running.
    pub(super) fn start_recovery(self: &Arc<Self>) {
        let partition = Arc::downgrade(self);
        self.recovery
            .spawn(None, |task| recovery::run(partition, task));
    }

    /// Sends a check to the primary store, unless the fallback must decide it.
    pub(super) fn check(self: &Arc<Self>, check: Check) -> Answer<FallbackFuture<P, F>> {
        let next = match self.admit(&check) {
            None if is_for_block(&check) => {
                let error = StoreError::new(ErrorKind::Unreachable);
                Answer::ready(Err(error.check_only().not_sent()))
            }
            None => self.fall_back(&check, false),
            Some(sent) => match self.primary.check(timed(&check)) {
                Answer::Ready { answer } => self.judge(&check, answer, sent),
                Answer::Pending { future } => Answer::pending(Step::Primary {
                    waiting: patient(self.settings.deadline, GRACES, future),
                    sent: Some(sent),
                    check,
                }),
            },
        };
        match next {
            Answer::Ready { answer } => Answer::ready(answer),
            Answer::Pending { future: step } => {
                Answer::pending(FallbackFuture::new(Arc::clone(self), step))
            }
        }
    }

    /// Returns `None` if the fallback must decide a check.
    pub(super) fn admit(self: &Arc<Self>, check: &Check) -> Option<SentToPrimary> {
        if !self.examined.is_claimed() {
            self.examine();
        }
        if !self.overtakes(check)
            && let Some(ticket) = self.breaker.admit()
        {
            let epoch = self.accounts.epoch();
            return Some(SentToPrimary { epoch, ticket });
        }
        // If the runtime of the recovery task has shut down, start the task on this one.
        self.start_recovery();
        None
    }

    /// Returns `true` if a check refunds or resets charges that the primary store may lack.
    fn overtakes(&self, check: &Check) -> bool {
        if !matches!(check.mode(), Mode::Refund | Mode::Reset) || self.accounts.is_empty() {
            return false;
        }
        let mut caller = self.accounts.caller(check.key());
        match caller.account(check.policies()) {
            Some(_) if check.mode() == Mode::Reset => true,
            Some(account) => account.refund_to(check, self.clock.micros()) != RefundTo::Primary,
            None => false,
        }
    }

    /// Handles the primary store's reply.
    fn judge(
        self: &Arc<Self>,
        check: &Check,
        answer: Result<Decision, StoreError>,
        sent: SentToPrimary,
    ) -> NextStep<P, F> {
        match &answer {
            Ok(decision) => self.succeeded(check, decision, sent),
            Err(error) => self.failed(check, error, sent),
        }
        match answer {
            Err(error) if !is_for_block(check) => self.fall_back(check, !error.is_not_sent()),
            answer => Answer::ready(answer),
        }
    }

    /// Handles a deadline without a reply. Returns its error.
    fn missed(
        self: &Arc<Self>,
        check: &Check,
        reason: NoOutput,
        sent: SentToPrimary,
        answer: Pin<&mut P::Future>,
    ) -> StoreError {
        let error = if is_for_block(check) {
            self.timed_out(check.key())
        } else {
            self.give_up(check.key(), answer)
        };
        match reason {
            NoOutput::TimeUp => self.failed(check, &error, sent),
            // No evidence about the primary store: let a probe find it, for which no request waits.
            NoOutput::RuntimeLate => self.abandon(sent),
        }
        error
    }

    /// Handles a check that ends without an outcome. A probe finds an outage, if there is one.
    pub(super) fn abandon(self: &Arc<Self>, sent: SentToPrimary) {
        self.breaker.learned_nothing(sent.ticket);
        self.abandoned.store(true, Ordering::Release);
        self.start_recovery();
    }

    /// Notifies the observer that the runtime was late while a check waited.
    pub(super) fn report_late(&self, by: Duration, gave_up: bool) {
        self.observe(|observer| observer.notify(&Event::RuntimeLate { by, gave_up }));
    }

    fn succeeded(self: &Arc<Self>, check: &Check, decision: &Decision, sent: SentToPrimary) {
        if decision.source() == Source::Cached {
            // A cached denial is no evidence about the store.
            return self.breaker.learned_nothing(sent.ticket);
        }
        self.breaker.succeeded(sent.ticket);
        if !self.accounts.is_empty() {
            self.start_recovery();
        }
        self.follow(check, decision, sent, true);
    }

    /// Lets the fallback follow a decision of the primary store. `has_effect` is `false` if another key of the check was
    /// denied, so that an allowed one has taken nothing.
    pub(super) fn follow(
        &self,
        check: &Check,
        decision: &Decision,
        sent: SentToPrimary,
        has_effect: bool,
    ) {
        // A repeated decision does not show the current counts. A decision that arrives in an outage may lack grants that
        // are in no account, because the primary store may have charged them.
        if !decision.is_repeated() {
            if has_effect && let Some(mirrored) = mirrored(check, decision) {
                // Keep the slots of this instance in the fallback too, for an outage, if it decides immediately.
                drop(self.fallback.check(mirrored));
            }
            let caller = self.accounts.caller(check.key());
            if !self.breaker.is_open() && caller.has_all_grants(sent.epoch) {
                let _caller = self.locks_while_it_decides().then_some(caller);
                self.fallback.backend().warm(check.key(), decision);
            }
        }
    }

    pub(super) fn failed(self: &Arc<Self>, check: &Check, error: &StoreError, sent: SentToPrimary) {
        self.observe(|observer| {
            observer.notify(&Event::Failed {
                key: Some(check.key()),
                error,
                unanswered: false,
            })
        });
        if !shows_failure(error) {
            return self.breaker.learned_nothing(sent.ticket);
        }
        self.count(error, sent.ticket);
        self.start_recovery();
    }

    /// Counts a failure.
    pub(super) fn count(&self, error: &StoreError, ticket: Ticket) {
        let is_lasting = error.kind() == ErrorKind::ClusterNode;
        let now = self.clock.micros();
        if self.breaker.failed(ticket, is_lasting, now) && self.outage.opened(now) {
            self.observe(|observer| {
                observer.notify(&Event::Degraded {
                    error,
                    share: self.settings.share.alive(),
                    is_counted: self.settings.share.is_counted(),
                });
            });
        }
    }

    /// Withdraws a check without a reply if it is still queued. Returns its error.
    pub(super) fn give_up(&self, key: &Key, answer: Pin<&mut P::Future>) -> StoreError {
        let error = self.timed_out(key);
        if self.primary.backend().withdraw(answer) {
            error.not_sent()
        } else {
            error
        }
    }

    /// The error for a check of this caller without a reply at the deadline.
    pub(super) fn timed_out(&self, key: &Key) -> StoreError {
        let error = if self.primary.backend().is_connecting(key) {
            StoreError::still_connecting()
        } else {
            StoreError::new(ErrorKind::Timeout).with_message(
                "the server did not reply within the `deadline` of the `Fallback`: check its load and the network, or raise \
                 the `deadline` above twice the round trip",
            )
        };
        match self.primary.backend().server(key) {
            Some(server) => error.with_server(server),
            None => error,
        }
    }

    /// Lets the fallback decide. `in_doubt` is whether the primary store may have run the check too. Then a grant is
    /// neither charged there afterwards nor ever refunded, but a reset is repeated. A release and a refund may be for the
    /// primary store only.
    pub(super) fn fall_back(self: &Arc<Self>, check: &Check, in_doubt: bool) -> NextStep<P, F> {
        // Before the caller is locked: code of the application may count the instances, and the windows of a calendar.
        let policies = match self.settings.share.alive() {
            NonZeroU32::MIN => check.policies().clone(),
            instances => share_of(check.policies(), instances),
        };
        let share = check.clone().under(policies.clone());
        if let Err(error) = self.fallback.backend().prepare(&share) {
            return Answer::ready(Err(of_fallback(error, in_doubt)));
        }
        let mut caller = self.accounts.caller(check.key());
        let check = match check.mode() {
            Mode::Refund => match self.refund_here(check, in_doubt, &mut caller) {
                Some(refund) => refund,
                None => {
                    drop(caller);
                    if in_doubt {
                        self.freed(check);
                    }
                    return Answer::ready(Err(elsewhere(in_doubt)));
                }
            },
            // The primary store could not count all turns of a fallback afterwards, and would give the same turns again.
            Mode::TakeAhead => check.clone().with_mode(Mode::Take),
            _ => check.clone(),
        };
        let share = check.clone().under(policies);
        // Under the lock, no reply can warm the fallback between a grant and its record. A release grants nothing, and
        // wakes waiters.
        let is_locked = self.locks_while_it_decides() && check.mode() != Mode::Release;
        let caller = is_locked.then_some(caller);
        match self.fallback.check(share) {
            Answer::Ready { answer } => {
                Answer::ready(self.fell_back(&check, in_doubt, answer, caller))
            }
            Answer::Pending { future: answer } => Answer::pending(Step::Fallback {
                answer,
                check,
                in_doubt,
            }),
        }
    }

    /// Deducts the part of a refund that is in the account, and returns it for the fallback. `None` if only the primary
    /// store can make the refund, or may have made it.
    fn refund_here(
        &self,
        check: &Check,
        in_doubt: bool,
        caller: &mut LockedCaller<'_>,
    ) -> Option<Check> {
        if in_doubt {
            return None;
        }
        let account = caller.account(check.policies())?;
        account.refund(check, self.clock.micros())
    }

    /// Returns `true` if the fallback decides and is warmed under the lock of the caller. Only [`LocalStore`] is, as it
    /// runs no user code. Another fallback may be warmed with a reply that lacks a concurrent grant.
    fn locks_while_it_decides(&self) -> bool {
        TypeId::of::<F>() == TypeId::of::<LocalStore>()
    }

    /// Reports, once, a fallback that decides without the lock of the caller.
    #[cold]
    fn examine(&self) {
        if !self.examined.claim() {
            return;
        }
        if !self.locks_while_it_decides() {
            self.report(format_args!(
                "the fallback is not a `LocalStore` itself, so a caller may get more than one burst beyond the policy in \
                 an outage: use a `LocalStore`, and wrap the `Fallback` instead{OTHER_FALLBACK}"
            ));
        }
    }

    /// Reports a misconfiguration.
    fn report(&self, problem: fmt::Arguments<'_>) {
        let problem = problem.to_string();
        self.observe(|observer| observer.notify(&Event::Misconfigured { problem: &problem }));
    }

    /// Reports, once for each policy, a cost above this instance's share that the whole policy allows.
    #[cold]
    fn report_small_share(&self, cost: u32, denied: &Decision) {
        let shares = denied.policies();
        let mut each = shares.iter().zip(shares.whole());
        let too_small =
            each.find(|(share, whole)| share.never_fits(cost) && !whole.never_fits(cost));
        let Some((share, whole)) = too_small else {
            return;
        };
        {
            let mut reported = lock(&self.small_shares);
            if reported.len() >= MAX_SMALL_SHARES || !reported.insert(whole.id()) {
                return;
            }
        }
        let instances = self.settings.share.alive();
        self.report(format_args!(
            "a request costs {cost}, and this instance's share of the policy {:?} of {} is {}, since {instances} instances \
             share it: without the primary store, such requests are denied; lower the cost, raise the burst, or set a smaller \
             `share`{SMALL_SHARE}",
            share.name(),
            whole.quota(),
            share.quota().capacity()
        ));
    }

    /// Handles a decision of the fallback, and records it in an account. `caller` is the lock under
    /// which a [`LocalStore`](crate::LocalStore) has decided; `None` for another fallback.
    ///
    /// Without the lock, a reply of the primary store may warm the fallback between the decision
    /// and this call, and drop the grant from its count. So a custom fallback that can be warmed
    /// should decide immediately.
    fn fell_back(
        self: &Arc<Self>,
        check: &Check,
        in_doubt: bool,
        answer: Result<Decision, StoreError>,
        caller: Option<LockedCaller<'_>>,
    ) -> Result<Decision, StoreError> {
        let now = self.clock.micros();
        let mut caller = caller.unwrap_or_else(|| self.accounts.caller(check.key()));
        let answer = answer.map_err(|error| match check.mode() {
            // The account has deducted the refund, so its owner must not repeat it.
            Mode::Refund => StoreError::new(error.kind()),
            _ => of_fallback(error, in_doubt),
        });
        // A cost that exceeds the share but fits the whole policy is denied until the primary store
        // may decide it, after the next probe.
        let decision = answer?;
        let mut verdicts = decision.verdicts().clone();
        let calendar_micros = verdicts.calendar_micros();
        verdicts.at = now - verdicts.age;
        if let Some(micros) = calendar_micros {
            verdicts.ahead = micros - now;
        }
        // A custom fallback may have decided on other policies than requested.
        for (verdict, whole) in verdicts.each.iter_mut().zip(check.policies()) {
            if verdict.wait == Verdict::NEVER && !whole.never_fits(check.cost()) {
                verdict.wait = Breaker::LONGEST_DELAY.as_micros() as i64;
            }
        }
        let decision = decision.with_verdicts(verdicts);
        // To repeat a reset is safe.
        let records = !in_doubt || check.mode() == Mode::Reset;
        let is_recorded = records && caller.record(check, &decision, now);
        drop(caller);
        self.freed(check);
        if !decision.is_allowed() {
            self.report_small_share(check.cost(), &decision);
        }
        if !self.accounts.is_empty() {
            self.start_recovery();
        }
        if !self.breaker.is_closed() {
            self.outage.decided(granted(check, &decision));
        }
        match check.mode() {
            // The primary store may still count the slot.
            Mode::Release => Err(elsewhere(in_doubt)),
            _ if is_recorded => Ok(decision.with_maker(MadeBy::Locally)),
            // It is never refunded: neither store may have the charge.
            _ => Ok(decision.with_maker(MadeBy::Unsure)),
        }
    }

    /// Wakes the requests that wait for this caller's quota. They check again, so call it after the effect.
    fn freed(&self, check: &Check) {
        if let Some(waiters) = self.primary.backend().waiters() {
            waiters.freed(check);
        }
    }
}

/// Returns `true` if a check charges a block of a [`Leased`](crate::Leased) store.
fn is_for_block(check: &Check) -> bool {
    matches!(check.extra(), Some(Extra::Block))
}

/// Returns the check for the primary store: the fallback limits its time, and no [`Leased`](crate::Leased) store may decide
/// it from a block.
fn timed(check: &Check) -> Check {
    let mut check = check.clone();
    check.sending_mut().sender_limits_time = true;
    check
}

/// Returns the check that repeats the effect of another one on slots in the fallback, given the decision on that.
fn mirrored(check: &Check, decision: &Decision) -> Option<Check> {
    let key = *check.key();
    let policies = check.policies().in_flight()?;
    match (check.mode(), check.slot()) {
        (Mode::Reset, _) => Some(Check::reset(key, policies)),
        (Mode::Release, Some(slot)) => Some(Check::release(key, policies, slot)),
        (_, Some(slot)) if decision.is_allowed() => Some(Check::renew(key, policies, slot)),
        _ => None,
    }
}

/// Returns the cost that a decision grants, in reports. A pause is a time, which costs nothing.
fn granted(check: &Check, decision: &Decision) -> u32 {
    match check.mode() {
        Mode::Take | Mode::UpTo | Mode::Charge if !is_of_time(check) => decision.granted(),
        _ => 0,
    }
}

/// The error for a check that only the primary store can execute. Its owner repeats a release, and a refund that is not in
/// doubt.
fn elsewhere(in_doubt: bool) -> StoreError {
    let error = StoreError::new(ErrorKind::NotReady).check_only();
    if in_doubt {
        error.with_message("the primary store may have run the check: do not repeat a refund")
    } else {
        error
            .with_message("the primary store cannot decide now: send it again")
            .not_sent()
    }
}

/// Returns the error of the fallback for a check. The primary store may have run it if `in_doubt`.
fn of_fallback(error: StoreError, in_doubt: bool) -> StoreError {
    if in_doubt { error.maybe_sent() } else { error }
}

impl<P: Store, F: Store> FallbackFuture<P, F> {
    pub(super) fn new(partition: Arc<Partition<P, F>>, step: Step<P::Future, F::Future>) -> Self {
        Self { partition, step }
    }

    /// See [`Withdraw`](crate::store::Withdraw).
    pub(super) fn withdraw(self: Pin<&mut Self>) -> bool {
        let this = self.project();
        match this.step.project() {
            StepProj::Primary { waiting, .. } => {
                let backend = this.partition.primary.backend();
                backend.withdraw(waiting.future())
            }
            StepProj::Fallback { .. } | StepProj::Done => false,
        }
    }
}

impl<P: Store, F: Store> Future for FallbackFuture<P, F> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let partition = this.partition;
        loop {
            let next = match this.step.as_mut().project() {
                StepProj::Done => polled_after_completion("FallbackFuture"),
                StepProj::Fallback {
                    answer,
                    check,
                    in_doubt,
                } => {
                    let answer = ready!(answer.poll(cx));
                    Answer::ready(partition.fell_back(check, *in_doubt, answer, None))
                }
                StepProj::Primary {
                    mut waiting,
                    sent,
                    check,
                } => match *sent {
                    None => Answer::ready(ready!(waiting.future().poll(cx))),
                    Some(as_sent) => {
                        let reply = ready!(waiting.as_mut().poll(cx));
                        if let Some(by) = waiting.late_by() {
                            partition.report_late(by, matches!(reply, Err(NoOutput::RuntimeLate)));
                        }
                        match reply {
                            Ok(answer) => partition.judge(check, answer, as_sent),
                            Err(reason) => {
                                let error =
                                    partition.missed(check, reason, as_sent, waiting.future());
                                if is_for_block(check) {
                                    *sent = None;
                                    continue;
                                }
                                partition.fall_back(check, !error.is_not_sent())
                            }
                        }
                    }
                },
            };
            match next {
                Answer::Ready { answer } => {
                    this.step.set(Step::Done);
                    return Poll::Ready(answer);
                }
                Answer::Pending { future } => this.step.set(future),
            }
        }
    }
}

impl<P: Store, F: Store> fmt::Debug for FallbackFuture<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackFuture").finish_non_exhaustive()
    }
}
