//! What is logged where no observer is set, so that nothing goes wrong in silence.

use std::error::Error as _;
use std::fmt;
use std::io::Write as _;
use std::num::NonZeroU32;
use std::sync::{Arc, Once};

use super::{Observer, event};

/// The observer that is set, or one that logs what needs attention, and no decision.
pub(crate) fn or_log(observer: Option<&Arc<dyn Observer>>) -> &dyn Observer {
    observer.map_or(&Unobserved, |observer| &**observer)
}

/// Logs by `tracing`, if anybody has set a subscriber; otherwise what is worst on standard error.
struct Unobserved;

/// One log for the whole process: what several layers or stores report at the same time is logged once.
fn log() -> Option<&'static dyn Observer> {
    #[cfg(feature = "tracing")]
    if tracing::dispatcher::has_been_set() {
        use std::sync::LazyLock;

        static LOG: LazyLock<super::TracingObserver> = LazyLock::new(super::TracingObserver::new);
        return Some(&*LOG);
    }
    None
}

impl Observer for Unobserved {
    fn failed(&self, event: &event::Failed<'_>) {
        if let Some(log) = log() {
            log.failed(event);
        }
    }

    fn misconfigured(&self, event: &event::Misconfigured<'_>) {
        static SAID: Once = Once::new();
        match log() {
            Some(log) => log.misconfigured(event),
            None => say(
                &SAID,
                format_args!("the server is misconfigured: {}", event.problem),
            ),
        }
    }

    fn degraded(&self, event: &event::Degraded<'_>) {
        static SAID: Once = Once::new();
        match log() {
            Some(log) => log.degraded(event),
            None => {
                let cause = event
                    .error
                    .source()
                    .map(|cause| format!(" ({cause})"))
                    .unwrap_or_default();
                let whole = match event.share {
                    NonZeroU32::MIN => {
                        "; each instance grants the whole limit: with more than one, set `Fallback::share`"
                    }
                    _ => "",
                };
                say(
                    &SAID,
                    format_args!("rate limits are local: {}{cause}{whole}", event.error),
                );
            }
        }
    }

    fn recovered(&self, event: &event::Recovered) {
        if let Some(log) = log() {
            log.recovered(event);
        }
    }
}

/// Says it on standard error, in debug builds, and once.
fn say(said: &Once, problem: fmt::Arguments<'_>) {
    if cfg!(debug_assertions) {
        said.call_once(|| {
            // `eprintln!` panics if nobody reads it any more.
            let _ = writeln!(
                std::io::stderr(),
                "tower-redis-ratelimit: {problem}\n\
                 It is said once, and in debug builds only: set an observer, or turn on the feature `tracing` and set a \
                 subscriber."
            );
        });
    }
}
