use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use super::MissingKey;
use crate::limit::Decision;
use crate::store::{Observer, event, instant, lock};

/// Tells that the server is misconfigured: once a minute at most, since every request finds out.
#[derive(Debug, Default)]
pub(super) struct Misconfiguration {
    told: Mutex<Option<Instant>>,
    /// Whether it was told that requests are counted twice: that is all it ever tells of it, for it may be meant.
    told_twice: AtomicBool,
}

const PAUSE: Duration = Duration::from_secs(60);

impl Misconfiguration {
    /// Tells of a missing key, if the server is at fault.
    pub(super) fn tell(&self, missing: &MissingKey, observer: Option<&dyn Observer>) {
        if missing.is_misconfigured() && self.is_due() {
            tell(&missing.to_string(), observer);
        }
    }

    /// Tells of a request that a layer around this one has counted by a policy of this one, once.
    pub(super) fn tell_twice(&self, outer: &Decision, inner: &Decision, observer: Option<&dyn Observer>) {
        let both = inner.policies().iter().find(|policy| outer.policies().as_slice().contains(policy));
        if let Some(policy) = both
            && !self.told_twice.swap(true, Relaxed)
        {
            let name = policy.name();
            let problem = format!(
                "a request is counted twice by the policy {name:?}: a layer is there twice, or two layers share it; \
                 add the layer once, or give each layer policies with names of its own"
            );
            tell(&problem, observer);
        }
    }

    fn is_due(&self) -> bool {
        let (mut last, now) = (lock(&self.told), instant());
        let due = last.is_none_or(|last| now.saturating_duration_since(last) >= PAUSE);
        if due {
            *last = Some(now);
        }
        due
    }
}

fn tell(problem: &str, observer: Option<&dyn Observer>) {
    let event = event::Misconfigured::new(problem);
    match observer {
        Some(observer) => observer.misconfigured(&event),
        #[cfg(feature = "tracing")]
        None => crate::store::log_misconfigured(&event),
        #[cfg(not(feature = "tracing"))]
        None => {}
    }
}
