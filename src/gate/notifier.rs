use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::{MissingKey, Question};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Policies};
use crate::observe::mistakes::{COUNTED_TWICE, NOT_LEASED};
use crate::observe::{Observer, event, or_log};
use crate::store::{Answer, Store};
use crate::util::{instant, lock};

/// Notifies the observer of a layer, or of a limiter, or logs what needs attention if it has none. Clones are of the same one.
#[derive(Clone, Default)]
pub(crate) struct Notifier {
    observer: Option<Arc<dyn Observer>>,
    misconfiguration: Arc<Misconfiguration>,
}

/// The problems reported of a misconfigured server: once a minute at most, since every request finds them.
#[derive(Default)]
struct Misconfiguration {
    reported: Mutex<Option<Instant>>,
    /// Whether it was reported that requests are counted twice: only once, since that may be intended.
    reported_twice: AtomicBool,
    /// Whether a check under a leased policy was sent: the first one shows whether blocks can decide any. Reported once,
    /// since a deploy may begin with policies that are leased for nothing.
    sent_leased: AtomicBool,
}

const PAUSE: Duration = Duration::from_secs(60);

impl Notifier {
    pub(crate) fn new(observer: Arc<dyn Observer>) -> Self {
        Self {
            observer: Some(observer),
            misconfiguration: Arc::default(),
        }
    }

    /// The notifier of another layer, which has reported nothing yet.
    pub(crate) fn anew(&self) -> Self {
        Self {
            observer: self.observer.clone(),
            misconfiguration: Arc::default(),
        }
    }

    /// The time of a check, if there is an observer to be notified of its duration.
    #[inline]
    pub(crate) fn since(&self) -> Option<Instant> {
        self.observer.as_ref().map(|_| instant())
    }

    /// A check of this caller was answered.
    #[inline]
    pub(crate) fn answered(
        &self,
        key: &Key,
        question: &Question,
        answer: &Result<Decision, StoreError>,
        dry_run: bool,
    ) {
        match (answer, &self.observer) {
            (Ok(decision), Some(observer)) => {
                let mut event = event::Decided::new(key, decision, question.waited());
                event.dry_run = dry_run;
                observer.decided(&event);
            }
            (Ok(_), None) => {}
            (Err(error), observer) => {
                or_log(observer.as_ref()).failed(&event::Failed::new(Some(key), error))
            }
        }
    }

    /// A request has no key: reported if the server is at fault.
    pub(crate) fn missing(&self, missing: &MissingKey) {
        if missing.is_misconfigured() {
            self.misconfigured(missing);
        }
    }

    /// Reports what is wrong with the server.
    pub(crate) fn misconfigured(&self, problem: impl fmt::Display) {
        if self.misconfiguration.is_due() {
            self.report(&problem.to_string());
        }
    }

    /// Reports, once, a request that a layer around this one has counted by a policy of this one.
    pub(crate) fn counted_twice(&self, outer: &Decision, inner: &Decision) {
        // Of one name and strategy they share their count, whatever their quotas are.
        let both = inner.policies().iter().find(|inner| {
            outer
                .policies()
                .iter()
                .any(|outer| outer.id() == inner.id())
        });
        if let Some(policy) = both
            && !self.misconfiguration.reported_twice.swap(true, Relaxed)
        {
            let name = policy.name();
            self.report(&format!(
                "a request is counted twice by the policy {name:?}: a layer is there twice, or two layers share it; \
                 add the layer once, or give each layer policies with names of its own{COUNTED_TWICE}"
            ));
        }
    }

    /// Sends a check. If it is the first under a leased policy, and no block can decide it, that is reported.
    #[inline]
    pub(crate) fn send<S: Store>(&self, store: &S, check: Check) -> Answer<S::Future> {
        let policies = check.policies();
        let is_leased = policies.has_lease() && check.cost() > 0;
        if !is_leased || self.misconfiguration.sent_leased.load(Relaxed) {
            return store.check(check);
        }
        if !check.is_leasable() {
            self.never_leased(policies);
            return store.check(check);
        }
        let policies = policies.clone();
        let (check, offered) = check.watched();
        let answer = store.check(check);
        if offered.load(Relaxed) {
            self.misconfiguration.sent_leased.store(true, Relaxed);
        } else {
            self.never_leased(&policies);
        }
        answer
    }

    /// Reports that no block can decide checks under these policies, if one of them is leased and none was sent before.
    pub(crate) fn never_leased(&self, policies: &Policies) {
        if policies.has_lease() && !self.misconfiguration.sent_leased.swap(true, Relaxed) {
            let name = policies
                .iter()
                .find(|policy| policy.lease().is_some())
                .map_or("", |policy| policy.name());
            self.report(&format!(
                "the policy {name:?} is leased for nothing, and has a tighter quota for that: put the store into a \
                 `Leased`, around any `Fallback`, lease all policies of the list, and do not settle, reserve or wait; or \
                 remove the lease from the policy{NOT_LEASED}"
            ));
        }
    }

    fn report(&self, problem: &str) {
        or_log(self.observer.as_ref()).misconfigured(&event::Misconfigured::new(problem));
    }
}

impl Misconfiguration {
    fn is_due(&self) -> bool {
        let (mut last, now) = (lock(&self.reported), instant());
        let due = last.is_none_or(|last| now.saturating_duration_since(last) >= PAUSE);
        if due {
            *last = Some(now);
        }
        due
    }
}
