use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::{MissingKey, Question};
use crate::error::StoreError;
use crate::limit::{Decision, Key, Policies};
use crate::observe::mistakes::{COUNTED_TWICE, NOT_LEASED};
use crate::observe::{Observer, event, or_log};
use crate::util::{instant, lock};

/// Notifies the observer of a layer or limiter. Without an observer, logs problems. Clones share
/// the observer.
#[derive(Clone, Default)]
pub struct Notifier {
    observer: Option<Arc<dyn Observer>>,
    misconfiguration: Arc<Misconfiguration>,
}

/// Limits reports of a misconfigured server to one per minute, since every request finds the same
/// problem.
#[derive(Default)]
struct Misconfiguration {
    reported: Mutex<Option<Instant>>,
    /// Whether a doubly counted request was reported. Reported once, since it may be intended.
    reported_twice: AtomicBool,
    /// Whether an ineffective lease was reported. Reported once, since a deployment may start with
    /// one.
    reported_unleased: AtomicBool,
}

const PAUSE: Duration = Duration::from_secs(60);

impl Notifier {
    pub(crate) fn new(observer: Arc<dyn Observer>) -> Self {
        Self {
            observer: Some(observer),
            misconfiguration: Arc::default(),
        }
    }

    /// Creates the notifier of another layer: the same observer, and no reports yet.
    pub(crate) fn with_fresh_limits(&self) -> Self {
        Self {
            observer: self.observer.clone(),
            misconfiguration: Arc::default(),
        }
    }

    /// Returns the start time of a check, if an observer needs its duration.
    #[inline]
    pub(crate) fn since(&self) -> Option<Instant> {
        self.observer.as_ref().map(|_| instant())
    }

    /// Notifies the observer of the reply to a check.
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

    /// Reports a missing key if the server is at fault.
    pub(crate) fn missing(&self, missing: &MissingKey) {
        if missing.is_misconfigured() {
            self.misconfigured(missing);
        }
    }

    /// Reports a misconfigured server, at most once a minute.
    pub(crate) fn misconfigured(&self, problem: impl fmt::Display) {
        if self.misconfiguration.is_due() {
            self.report(&problem.to_string());
        }
    }

    /// Reports, once, that an outer layer has already counted a request under a policy of this
    /// layer.
    pub(crate) fn counted_twice(&self, outer: &Decision, inner: &Decision) {
        // Policies of one name and strategy share a count, even if their quotas differ.
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
                "policy {name:?} charged a request twice: the layer is installed twice, or two layers use this policy; \
                 remove one, or rename its policy{COUNTED_TWICE}"
            ));
        }
    }

    /// Reports, once, a leased policy that took effect without a block. Call it after the check was
    /// sent.
    #[inline]
    pub(crate) fn unless_leased(&self, policies: &Policies) {
        let reported = &self.misconfiguration.reported_unleased;
        if policies.is_leased_for_nothing()
            && !reported.load(Relaxed)
            && !reported.swap(true, Relaxed)
        {
            let name = policies
                .iter()
                .find(|policy| policy.lease().is_some())
                .map_or("", |policy| policy.name());
            self.report(&format!(
                "policy {name:?} is leased without effect, which only tightens its quota: wrap the store in `Leased`, \
                 around any `Fallback`, lease every policy of the list, and do not settle, reserve or wait; or remove the \
                 lease from the policy{NOT_LEASED}"
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

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifier").finish_non_exhaustive()
    }
}
