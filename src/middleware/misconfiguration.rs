use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::MissingKey;
use crate::store::{Observer, event, instant, lock};

/// Tells that the server is misconfigured: once a minute at most, since every request finds out.
#[derive(Debug, Default)]
pub(super) struct Misconfiguration {
    told: Mutex<Option<Instant>>,
}

const PAUSE: Duration = Duration::from_secs(60);

impl Misconfiguration {
    /// Tells of a missing key, if the server is at fault.
    pub(super) fn tell(&self, missing: &MissingKey, observer: Option<&dyn Observer>) {
        if missing.is_misconfigured() && self.is_due() {
            let problem = missing.to_string();
            let event = event::Misconfigured::new(&problem);
            match observer {
                Some(observer) => observer.misconfigured(&event),
                #[cfg(feature = "tracing")]
                None => crate::store::log_misconfigured(&event),
                #[cfg(not(feature = "tracing"))]
                None => {}
            }
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
