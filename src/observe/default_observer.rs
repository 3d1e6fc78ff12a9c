//! The default observer: logs problems if the user has set no observer.

use std::error::Error as _;
use std::fmt;
use std::io::Write as _;
use std::sync::Arc;

use super::{Observer, event};
use crate::util::OnceFlag;

/// Returns the user's observer. Defaults to a log of problems.
pub(crate) fn or_log(observer: Option<&Arc<dyn Observer>>) -> &dyn Observer {
    match observer {
        Some(observer) => &**observer,
        None => &DefaultObserver,
    }
}

/// Shares the user's observer. If it shows no text, the log of problems stays.
pub(crate) fn shared_observer(observer: impl Observer) -> Arc<dyn Observer> {
    if observer.keeps_log() {
        Arc::new((observer, DefaultObserver))
    } else {
        Arc::new(observer)
    }
}

/// Logs through `tracing` if a subscriber is set, otherwise prints the worst problems to standard
/// error.
struct DefaultObserver;

/// Returns one log for the whole process, so that a problem that several layers or stores report at
/// the same time is logged once.
fn shared_log() -> Option<&'static dyn Observer> {
    // Without a subscriber, or behind a filter, the events would be lost.
    #[cfg(feature = "tracing")]
    if tracing::enabled!(tracing::Level::ERROR) {
        use std::sync::LazyLock;

        static LOG: LazyLock<super::TracingObserver> = LazyLock::new(super::TracingObserver::new);
        return Some(&*LOG);
    }
    None
}

/// Logs that the settings of a store may be a mistake. The store has no observer yet.
pub(crate) fn log_settings(problem: &str) {
    static PRINTED: OnceFlag = OnceFlag::new();
    #[cfg(feature = "tracing")]
    if tracing::enabled!(tracing::Level::WARN) {
        return tracing::warn!("{problem}");
    }
    print_once(&PRINTED, format_args!("{problem}"));
}

impl Observer for DefaultObserver {
    /// Nothing else shows the denials of a dry run.
    fn decided(&self, event: &event::Decided<'_>) {
        if event.dry_run
            && !event.decision.is_allowed()
            && let Some(log) = shared_log()
        {
            log.decided(event);
        }
    }

    fn failed(&self, event: &event::Failed<'_>) {
        if let Some(log) = shared_log() {
            log.failed(event);
        }
    }

    /// Requests without a key may be a mistake. Others pass as configured.
    fn uncounted(&self, event: &event::Uncounted<'_>) {
        if let event::UncountedReason::NoKey(_) = event.reason
            && let Some(log) = shared_log()
        {
            log.uncounted(event);
        }
    }

    fn misconfigured(&self, event: &event::Misconfigured<'_>) {
        static PRINTED: OnceFlag = OnceFlag::new();
        match shared_log() {
            Some(log) => log.misconfigured(event),
            None => print_once(
                &PRINTED,
                format_args!("rate limiting is misconfigured: {}", event.problem),
            ),
        }
    }

    fn suspected(&self, event: &event::Suspected<'_>) {
        static PRINTED: OnceFlag = OnceFlag::new();
        match shared_log() {
            Some(log) => log.suspected(event),
            None => print_once(
                &PRINTED,
                format_args!("rate limiting may be misconfigured: {}", event.problem),
            ),
        }
    }

    fn degraded(&self, event: &event::Degraded<'_>) {
        static PRINTED: OnceFlag = OnceFlag::new();
        match shared_log() {
            Some(log) => log.degraded(event),
            None => {
                let cause = match event.error.source() {
                    Some(cause) => format!(" ({cause})"),
                    None => String::new(),
                };
                print_once(
                    &PRINTED,
                    format_args!(
                        "shared store unavailable, enforcing rate limits locally: {}{cause}{}",
                        event.error,
                        event.hint()
                    ),
                );
            }
        }
    }

    fn still_degraded(&self, event: &event::StillDegraded<'_>) {
        if let Some(log) = shared_log() {
            log.still_degraded(event);
        }
    }

    fn runtime_late(&self, event: &event::RuntimeLate) {
        if let Some(log) = shared_log() {
            log.runtime_late(event);
        }
    }

    fn recovered(&self, event: &event::Recovered) {
        if let Some(log) = shared_log() {
            log.recovered(event);
        }
    }
}

/// Prints a problem to standard error, once per `printed`, in debug builds only.
fn print_once(printed: &OnceFlag, problem: fmt::Arguments<'_>) {
    if cfg!(debug_assertions) && printed.claim() {
        // `eprintln!` would panic if standard error is closed.
        let _ = writeln!(
            std::io::stderr(),
            "tower-redis-ratelimit: {problem}\n\
             Printed once, in debug builds only. To get all reports, set an observer, or enable the feature `tracing` \
             and install a subscriber that does not filter the target `tower_redis_ratelimit`."
        );
    }
}
