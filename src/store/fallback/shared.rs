//! Who decides a check, and what is learned of it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::time::Instant;

use super::Settings;
use super::breaker::{Breaker, Pass};
use super::grants::Grants;
use super::share;
use crate::limit::{Check, Decision, Mode, Source};
use crate::store::clock::{Clock, instant};
use crate::store::{Answer, Error, ErrorKind, Observer, Store, event};

pub(super) struct Shared<P, F> {
    pub(super) primary: P,
    pub(super) fallback: F,
    pub(super) settings: Settings,
    pub(super) breaker: Breaker,
    /// Whether a task looks after the primary store.
    pub(super) attended: AtomicBool,
    pub(super) grants: Grants,
    pub(super) epoch: Epoch,
    pub(super) clock: Clock,
}

/// How the primary store was asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    epoch: u64,
    pass: Pass,
}

/// What the primary store says to a check at once.
pub(super) enum Reply<F> {
    NotAsked,
    Answer(Result<Decision, Error>),
    /// It was asked at this time, and has to be waited for.
    Later(F, Asked, Instant),
}

impl<P: Store, F: Store> Shared<P, F> {
    pub(super) fn new(primary: P, fallback: F, settings: Settings, callers: usize) -> Self {
        Self {
            primary,
            fallback,
            breaker: Breaker::new(settings.failures.get()),
            settings,
            attended: AtomicBool::new(false),
            grants: Grants::new(callers),
            epoch: Epoch::default(),
            clock: Clock::new(),
        }
    }

    pub(super) fn observer(&self) -> &dyn Observer {
        &*self.settings.observer.0
    }

    /// Asks the primary store, if that may be asked.
    pub(super) fn ask(self: &Arc<Self>, check: &Check) -> Reply<P::Future> {
        // Before the breaker is looked at: so an answer that comes while it is open is of another epoch.
        let epoch = self.epoch.now();
        // A check that is waited for has failed by its deadline, or its caller has gone away.
        let patience = self.settings.deadline.saturating_mul(2);
        let Some(pass) = self.breaker.admit(|| self.clock.micros(), patience) else {
            // In case the task that did so is gone with its runtime.
            self.attend();
            return Reply::NotAsked;
        };
        let asked = Asked { epoch, pass };
        match self.primary.check(check.clone()) {
            Answer::Ready { answer } => {
                match &answer {
                    Ok(decision) => self.succeeded(check, decision, asked),
                    Err(error) => self.failed(error, asked),
                }
                Reply::Answer(answer)
            }
            Answer::Pending { future } => Reply::Later(future, asked, instant()),
        }
    }

    /// The same check of this instance's part.
    pub(super) fn part(&self, check: Check) -> Check {
        match self.settings.share.instances() {
            NonZeroU32::MIN => check,
            instances => {
                let part = check.policies().share(instances);
                check.under(part)
            }
        }
    }

    /// The primary store has decided.
    pub(super) fn succeeded(self: &Arc<Self>, check: &Check, decision: &Decision, asked: Asked) {
        if decision.source() == Source::Cached {
            // What was remembered says nothing of the store now.
            return self.breaker.learned_nothing(asked.pass);
        }
        self.breaker.succeeded(asked.pass);
        if !self.grants.is_empty() {
            self.attend();
        }
        // An answer to an id may be an old one.
        if check.id().is_none() && self.epoch.is_still(asked.epoch) && !self.grants.holds(check.key()) {
            self.fallback.follow(check.key(), decision);
        }
    }

    /// The primary store could not decide a check, or has not by its deadline.
    pub(super) fn failed(self: &Arc<Self>, error: &Error, asked: Asked) {
        self.observer().failed(&event::Failed::new(error));
        // A full queue is of our own making: what waits in it tells whether the primary store answers.
        if error.is_of_check() || error.kind() == ErrorKind::QueueFull {
            return self.breaker.learned_nothing(asked.pass);
        }
        self.count(error, asked.pass);
        self.attend();
    }

    /// Counts a failure.
    pub(super) fn count(&self, error: &Error, pass: Pass) {
        if self.breaker.failed(pass, error.kind() == ErrorKind::Cluster, self.clock.micros()) {
            self.epoch.end();
            self.observer().degraded(&event::Degraded::new(error));
        }
    }

    /// The fallback has answered. If the check was `sent` to the primary store too, that may have charged it: it is told
    /// to it again only if it has an id, by which it is charged once.
    pub(super) fn decided(
        self: &Arc<Self>,
        check: &Check,
        sent: bool,
        answer: Result<Decision, Error>,
    ) -> Result<Decision, Error> {
        let decision = share::of_whole(check, answer?, || self.clock.micros());
        let once = check.id().is_some() && check.mode() != Mode::Reset;
        if (!sent || once) && self.grants.note(check, sent, &decision, || self.clock.micros()) {
            self.attend();
        }
        Ok(decision)
    }
}

/// Tells answers that the fallback may go on from: those of checks that were asked in the present epoch. What was
/// granted locally before it is in none of the others.
///
/// An epoch ends when the breaker opens, and with every settlement.
#[derive(Debug, Default)]
pub(super) struct Epoch(AtomicU64);

impl Epoch {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn is_still(&self, epoch: u64) -> bool {
        epoch == self.now()
    }

    pub(super) fn end(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}
