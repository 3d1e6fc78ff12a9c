//! The default observer: logs problems if the user has set no observer.

use std::error::Error as _;
use std::fmt;
use std::io::Write as _;
use std::sync::Arc;

use super::event::share_hint;
use super::{Event, Observer, UncountedReason};
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
    fn notify(&self, event: &Event<'_>) {
        let is_logged = match *event {
            // Nothing else shows the denials of a dry run.
            Event::Decided {
                decision, dry_run, ..
            } => dry_run && !decision.is_allowed(),
            // Requests without a key may be a mistake. Others pass as configured.
            Event::Uncounted { reason, .. } => matches!(reason, UncountedReason::NoKey(_)),
            Event::Failed { .. }
            | Event::Misconfigured { .. }
            | Event::Suspected { .. }
            | Event::Degraded { .. }
            | Event::StillDegraded { .. }
            | Event::RuntimeLate { .. }
            | Event::Recovered { .. } => true,
            Event::SecondKey { .. }
            | Event::Reconciled { .. }
            | Event::LeasedBlockEnded { .. }
            | Event::Sent { .. } => false,
        };
        if is_logged {
            match shared_log() {
                Some(log) => log.notify(event),
                None => print(event),
            }
        }
    }
}

/// Prints the worst problems to standard error, the first of each kind.
fn print(event: &Event<'_>) {
    static MISCONFIGURED: OnceFlag = OnceFlag::new();
    static SUSPECTED: OnceFlag = OnceFlag::new();
    static DEGRADED: OnceFlag = OnceFlag::new();
    match *event {
        Event::Misconfigured { problem } => print_once(
            &MISCONFIGURED,
            format_args!("rate limiting is misconfigured: {problem}"),
        ),
        Event::Suspected { problem } => print_once(
            &SUSPECTED,
            format_args!("rate limiting may be misconfigured: {problem}"),
        ),
        Event::Degraded {
            error,
            share,
            is_counted,
        } => {
            let cause = match error.source() {
                Some(cause) => format!(" ({cause})"),
                None => String::new(),
            };
            let hint = share_hint(share, is_counted);
            print_once(
                &DEGRADED,
                format_args!(
                    "shared store unavailable, enforcing rate limits locally: {error}{cause}{hint}"
                ),
            );
        }
        _ => {}
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
