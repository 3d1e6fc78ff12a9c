//! What is logged where no observer is set, so that nothing goes wrong in silence.

use std::sync::Arc;

use super::{Observer, event};

/// The observer that is set, or one that logs what needs attention, and no decision.
pub(crate) fn or_log(observer: Option<&Arc<dyn Observer>>) -> &dyn Observer {
    observer.map_or(&Unobserved, |observer| &**observer)
}

struct Unobserved;

/// By one log for the whole process: what several layers or stores report at the same time is logged once.
#[cfg(feature = "tracing")]
mod log {
    use std::sync::LazyLock;

    use super::{Observer, Unobserved, event};
    use crate::observe::TracingObserver;

    static LOG: LazyLock<TracingObserver> = LazyLock::new(TracingObserver::new);

    impl Observer for Unobserved {
        fn failed(&self, event: &event::Failed<'_>) {
            LOG.failed(event);
        }

        fn misconfigured(&self, event: &event::Misconfigured<'_>) {
            LOG.misconfigured(event);
        }

        fn degraded(&self, event: &event::Degraded<'_>) {
            LOG.degraded(event);
        }

        fn recovered(&self, event: &event::Recovered) {
            LOG.recovered(event);
        }
    }
}

/// On standard error, in debug builds, and once each.
#[cfg(not(feature = "tracing"))]
mod log {
    use std::error::Error as _;
    use std::fmt;
    use std::io::Write as _;
    use std::sync::Once;

    use super::{Observer, Unobserved, event};

    impl Observer for Unobserved {
        fn misconfigured(&self, event: &event::Misconfigured<'_>) {
            static TOLD: Once = Once::new();
            tell(&TOLD, format_args!("the server is misconfigured: {}", event.problem));
        }

        fn degraded(&self, &event::Degraded { error }: &event::Degraded<'_>) {
            static TOLD: Once = Once::new();
            let cause = error.source().map(|cause| format!(" ({cause})")).unwrap_or_default();
            tell(&TOLD, format_args!("rate limits are local: {error}{cause}"));
        }
    }

    fn tell(told: &Once, problem: fmt::Arguments<'_>) {
        if cfg!(debug_assertions) {
            told.call_once(|| {
                // `eprintln!` panics if nobody reads it any more.
                let _ = writeln!(
                    std::io::stderr(),
                    "tower-redis-ratelimit: {problem}\n\
                     It is said once, and in debug builds only: set an observer, or turn on the feature `tracing`."
                );
            });
        }
    }
}
