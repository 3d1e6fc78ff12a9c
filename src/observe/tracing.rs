use std::error::Error as StdError;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tracing::{Span, error, info, trace, warn};

use super::event::share_hint;
use super::mistakes::RUNTIME_LATE;
use super::repeats::{Repeats, SubjectCount};
use super::{Event, Observer, UncountedReason};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Decision, Key, Policy};

/// Logs denied callers and store problems through `tracing`.
///
/// | event | level | frequency |
/// |---|---|---|
/// | a denial: `policy`, `caller`, `denied`, `dry_run` | info | immediately, then once a minute per caller and policy |
/// | a request without a key: `problem`, `requests`, `passed` | info | immediately, then once a minute by `passed` |
/// | a failed check: `kind`, `error`, `failed` | warn | immediately, then once a minute per kind |
/// | the [runtime was late](Event::RuntimeLate): `longest`, `checks` | warn | immediately, then once a minute |
/// | rate limiting is [misconfigured](Event::Misconfigured) | error | once a minute per layer |
/// | rate limiting [may be misconfigured](Event::Suspected) | info | once per layer |
/// | a [`Fallback`](crate::Fallback) decides locally: `kind`, `error`, `share` | warn | immediately, then once a minute with `after` and `checks` |
/// | a [`Fallback`](crate::Fallback) has recovered: `after`, `checks`, `granted`, `charged`, `dropped` | info | each time |
/// | a [`Fallback`](crate::Fallback) has reconciled: `charged`, `dropped` | info | each time |
/// | every decision, failure and call, in full | trace | each time |
///
/// # Denied callers
///
/// ```
/// use tower_redis_ratelimit::extract::HeaderKey;
/// use tower_redis_ratelimit::{Fallback, LocalStore, Policy, Quota, RateLimitLayer, RedisStore};
/// use tower_redis_ratelimit::observe::TracingObserver;
/// use tower_redis_ratelimit::Strategy;
///
/// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1/")?, LocalStore::default());
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(store, HeaderKey::new("x-user")?.readable(), policy)
///     .observer(TracingObserver::new().reveal_keys());
/// # let _ = layer;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// ```text
/// INFO rate limit exceeded policy="api" caller="user-42" denied=1 dry_run=false
/// INFO rate limit exceeded policy="api" caller="user-42" denied=5811 dry_run=false
/// ```
///
/// `denied` is the number of the caller's denied requests since the previous line. No task writes
/// these lines: a count is logged by the first decision, of any caller, after the count's minute
/// has ended, or when the last clone of the observer is dropped. Without
/// [`reveal_keys`](Self::reveal_keys) a caller is shown as some digits of a stable hash, such as
/// `Key(#a1b2c3)`. The first line belongs to the span of its request, a count to no span.
///
/// Callers beyond the [maximum](Self::callers) per minute share one line: `further callers rate
/// limited (not listed)`.
///
/// # Request spans
///
/// A denial sets the field `rate_limit` of the current span, if the span has that field, to
/// `denied` or `exceeds_capacity`. A denial in a [dry run](Event::Decided), which rejects
/// nothing, sets `rate_limit_dry_run` instead. A request log can therefore include both:
///
/// ```
/// use axum::{Router, body::Body, routing::get};
/// use http::Request;
/// use tower_http::trace::TraceLayer;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::observe::TracingObserver;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
/// use tracing::{field, info_span};
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let limits = RateLimitLayer::new(LocalStore::default(), Global, policy).observer(TracingObserver::new());
/// let requests = TraceLayer::new_for_http().make_span_with(|request: &Request<Body>| {
///     info_span!("request", method = %request.method(), path = request.uri().path(), rate_limit = field::Empty)
/// });
/// // The layer added last is the outermost, so the span exists when the limits are checked.
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limits).layer(requests);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct TracingObserver {
    log: Arc<MinuteLog>,
    reveal_keys: bool,
}

/// The events that are logged at most once a minute.
struct MinuteLog {
    /// Per caller, policy, and whether it is a dry run.
    denials: Repeats<(Key, u64, bool), LoggedDenial>,
    failures: Repeats<ErrorKind, StoreError>,
    late: Repeats<(), ()>,
    /// The longest delay since the last line about the runtime, in microseconds.
    longest_delay: AtomicU64,
    /// Requests without a key, by whether they passed.
    keyless: Repeats<bool, Keyless>,
}

#[derive(Clone)]
struct Keyless {
    /// The problem of the first request.
    problem: String,
    passed: bool,
}

#[derive(Clone)]
struct LoggedDenial {
    policy: Policy,
    caller: String,
    dry_run: bool,
}

impl TracingObserver {
    /// Default maximum number of callers that are listed.
    pub const DEFAULT_CALLERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(999);

    /// Creates an observer that shows callers as some digits of a hash.
    pub fn new() -> Self {
        Self {
            log: MinuteLog::new(Self::DEFAULT_CALLERS),
            reveal_keys: false,
        }
    }

    /// Shows callers by their [keys in clear](Key::reveal), which may be addresses or user names.
    /// Secrets stay hashed. Disabled by default.
    pub fn reveal_keys(self) -> Self {
        Self {
            reveal_keys: true,
            ..self
        }
    }

    /// Sets the maximum number of callers that are listed per minute, which bounds the log lines,
    /// and the memory to about 400 bytes per caller. A caller denied by two policies counts twice.
    /// Defaults to [1,000](Self::DEFAULT_CALLERS). Earlier clones keep their counts.
    pub fn callers(self, max: NonZeroUsize) -> Self {
        Self {
            log: MinuteLog::new(max),
            ..self
        }
    }

    fn display_key(&self, key: &Key) -> String {
        if self.reveal_keys {
            key.reveal().to_owned()
        } else {
            format!("{key:?}")
        }
    }
}

impl Default for TracingObserver {
    fn default() -> Self {
        Self::new()
    }
}

/// Never shows a caller, even if the log does.
impl fmt::Debug for TracingObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TracingObserver")
            .field("reveal_keys", &self.reveal_keys)
            .finish_non_exhaustive()
    }
}

impl Observer for TracingObserver {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Decided {
                key,
                decision,
                elapsed,
                dry_run,
            } => self.decided(key, decision, elapsed, dry_run),
            Event::Failed { key, error, .. } => self.failed(key, error),
            Event::Uncounted { reason, allowed } => self.uncounted(reason, allowed),
            Event::SecondKey { key } => trace!(
                caller = self.display_key(key),
                "rate limit key found by the second extractor"
            ),
            Event::Misconfigured { problem } => error!(problem, "rate limiting is misconfigured"),
            Event::Suspected { problem } => info!(problem, "rate limiting may be misconfigured"),
            Event::Degraded {
                error,
                share,
                is_counted,
            } => warn!(
                kind = error.kind().as_str(),
                error = error as &dyn StdError,
                share,
                "shared store unavailable, enforcing rate limits locally{}",
                share_hint(share, is_counted)
            ),
            Event::StillDegraded {
                after,
                checks,
                share,
                error,
            } => warn!(
                ?after,
                checks,
                share,
                error = error.map(|error| error as &dyn StdError),
                "shared store still unavailable: no request fails, each is decided locally \
                 (https://docs.rs/tower-redis-ratelimit/latest/tower_redis_ratelimit/guide/runbook/index.html#ratelimitdegraded)"
            ),
            Event::Recovered {
                after,
                checks,
                granted,
                charged,
                dropped,
            } => info!(
                ?after,
                checks, granted, charged, dropped, "shared store recovered"
            ),
            Event::Reconciled { charged, dropped } => info!(
                charged,
                dropped, "reconciled local grants with the shared store"
            ),
            Event::RuntimeLate { by, gave_up } => self.runtime_late(by, gave_up),
            Event::LeasedBlockEnded {
                charged,
                refunded,
                expired,
                lost,
            } => trace!(
                charged,
                refunded, expired, lost, "a block of a leased quota has ended"
            ),
            Event::Sent { checks, waiting } => {
                trace!(checks, waiting, "rate limit checks sent");
            }
        }
    }
}

impl TracingObserver {
    fn decided(&self, key: &Key, decision: &Decision, elapsed: Duration, dry_run: bool) {
        let policy = decision.policy();
        trace!(
            policy = policy.name(),
            caller = self.display_key(key),
            allowed = decision.is_allowed(),
            remaining = decision.remaining(),
            source = ?decision.source(),
            ?elapsed,
            dry_run,
            "rate limit decided"
        );
        self.log.log_due_counts();
        if !decision.is_allowed() {
            // The request's span: without this field, `record` does nothing.
            let span = Span::current();
            let field = if dry_run {
                "rate_limit_dry_run"
            } else {
                "rate_limit"
            };
            span.record(field, decision.outcome().as_str());
            let subject = (*key, policy.id(), dry_run);
            let new = self.log.denials.record(subject, || LoggedDenial {
                policy: policy.clone(),
                caller: self.display_key(key),
                dry_run,
            });
            if let Some(new) = new {
                log_denied(&span, new);
            }
        }
    }

    fn failed(&self, key: Option<&Key>, error: &StoreError) {
        trace!(
            caller = key.map(|key| self.display_key(key)),
            kind = error.kind().as_str(),
            error = error as &dyn StdError,
            "rate limit check failed"
        );
        self.log.log_due_counts();
        if let Some(new) = self.log.failures.record(error.kind(), || error.clone()) {
            log_failed(&Span::current(), new);
        }
    }

    fn uncounted(&self, reason: UncountedReason<'_>, allowed: bool) {
        trace!(
            reason = reason.as_str(),
            allowed, "rate limit did not count a request"
        );
        // Others pass as configured.
        let UncountedReason::NoKey(problem) = reason else {
            return;
        };
        self.log.log_due_counts();
        let new = self.log.keyless.record(allowed, || Keyless {
            problem: problem.to_string(),
            passed: allowed,
        });
        if let Some(new) = new {
            log_keyless(&Span::current(), new);
        }
    }

    fn runtime_late(&self, by: Duration, gave_up: bool) {
        trace!(?by, gave_up, "the runtime was late");
        let delay = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        // Before the record, which may report it.
        self.log.longest_delay.fetch_max(delay, Relaxed);
        self.log.log_due_counts();
        if let Some(new) = self.log.late.record((), || ()) {
            self.log.log_late(new);
        }
    }
}

impl MinuteLog {
    fn new(callers: NonZeroUsize) -> Arc<Self> {
        Arc::new(Self {
            denials: Repeats::new(callers.get()),
            // More than the number of error kinds: every kind is listed.
            failures: Repeats::new(64),
            late: Repeats::new(1),
            longest_delay: AtomicU64::new(0),
            // Requests that passed, and requests that were rejected.
            keyless: Repeats::new(2),
        })
    }

    /// Uses no span: the counts are about other requests than the current one.
    fn log_due_counts(&self) {
        // Outside of the current span: the counts are of other requests too.
        for count in self.denials.take_due() {
            log_denied(&Span::none(), count);
        }
        for count in self.failures.take_due() {
            log_failed(&Span::none(), count);
        }
        for count in self.keyless.take_due() {
            log_keyless(&Span::none(), count);
        }
        for count in self.late.take_due() {
            self.log_late(count);
        }
    }

    fn log_late(&self, (_, checks): SubjectCount<()>) {
        let longest = Duration::from_micros(self.longest_delay.swap(0, Relaxed));
        warn!(
            parent: Span::none(),
            ?longest,
            checks,
            "the runtime was late: handlers keep its worker threads (move blocking work to `spawn_blocking`), or the process \
             gets too little processor time (a CPU limit); Redis was not the cause{RUNTIME_LATE}"
        );
    }
}

impl Drop for MinuteLog {
    fn drop(&mut self) {
        // The counts of the last minute: no further event would report these.
        for count in self.denials.take_all() {
            log_denied(&Span::none(), count);
        }
        for count in self.failures.take_all() {
            log_failed(&Span::none(), count);
        }
        for count in self.late.take_all() {
            self.log_late(count);
        }
        for count in self.keyless.take_all() {
            log_keyless(&Span::none(), count);
        }
    }
}

fn log_denied(span: &Span, (subject, denied): SubjectCount<LoggedDenial>) {
    match subject {
        Some(LoggedDenial {
            policy,
            caller,
            dry_run,
        }) => {
            info!(parent: span, policy = policy.name(), caller, denied, dry_run, "rate limit exceeded");
        }
        None => info!(parent: span, denied, "further callers rate limited (not listed)"),
    }
}

fn log_failed(span: &Span, (error, failed): SubjectCount<StoreError>) {
    if let Some(error) = error {
        warn!(parent: span, kind = error.kind().as_str(), error = &error as &dyn StdError, failed, "rate limit checks failed");
    }
}

fn log_keyless(span: &Span, (subject, requests): SubjectCount<Keyless>) {
    if let Some(Keyless { problem, passed }) = subject {
        info!(parent: span, problem, requests, passed, "requests without a rate-limit key");
    }
}
