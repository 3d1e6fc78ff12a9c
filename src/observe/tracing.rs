use std::error::Error as StdError;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;

use tracing::{Span, error, info, trace, warn};

use super::repeats::{Count, Repeats};
use super::{Observer, event};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Key, Policy};

/// Logs by `tracing` which callers were limited, and when the limits are no longer shared.
///
/// | what | level | how often |
/// |---|---|---|
/// | a denial: `policy`, `caller`, `denied`, `dry_run` | info | at once, then once a minute for each caller and policy |
/// | a failed check: `kind`, `error`, `failed` | warn | at once, then once a minute for each kind |
/// | the server is [misconfigured](Observer::misconfigured) | error | once a minute by each layer |
/// | a [`Fallback`](crate::Fallback) decides locally | warn | each time |
/// | it shares its counts again, or has charged what it granted | info | each time |
/// | every decision, failure and call, in full | trace | each time |
///
/// # Who was limited, in the log
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
/// `denied` is how many of the caller's requests were denied since the previous line. No task writes these lines: a
/// count is logged by the first decision after its minute, of any caller, or when the last clone of the observer is
/// dropped. Without [`reveal_keys`](Self::reveal_keys) a caller is shown as a few digits of a hash, such as
/// `Key(#a1b2c3)`, always the same. The first line is in the span of its request, a count is in no span.
///
/// Callers beyond the [maximum](Self::callers) of a minute have one line together:
/// `further callers rate limited (not listed)`.
///
/// # In a request's span
///
/// A denial sets the field `rate_limit` of the current span, if that has such a field, to `denied` or
/// `exceeds_capacity`; one that a [dry run](event::Decided::dry_run) lets pass sets `rate_limit_dry_run`. So a request
/// log has it:
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
/// // The last one is the outermost: the span is there when the limits are asked.
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limits).layer(requests);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct TracingObserver {
    log: Arc<Log>,
    reveal_keys: bool,
}

/// What is logged once a minute.
struct Log {
    /// By the caller, the policy, and whether it is a dry run.
    denials: Repeats<(Key, u64, bool), Denied>,
    failures: Repeats<ErrorKind, StoreError>,
}

#[derive(Clone)]
struct Denied {
    policy: Policy,
    caller: String,
    dry_run: bool,
}

impl TracingObserver {
    /// How many callers are listed by default.
    pub const DEFAULT_CALLERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(999);

    /// Shows callers as a few digits of a hash.
    pub fn new() -> Self {
        Self {
            log: Log::new(Self::DEFAULT_CALLERS),
            reveal_keys: false,
        }
    }

    /// Names callers by their [keys in clear](Key::reveal), which may be addresses or names of users. A secret stays
    /// hashed. Defaults to no.
    pub fn reveal_keys(self) -> Self {
        Self {
            reveal_keys: true,
            ..self
        }
    }

    /// Sets how many callers may be listed in a minute; one that is denied by two policies counts twice. It bounds the
    /// lines, and the memory to about 400 bytes each. Defaults to [1,000](Self::DEFAULT_CALLERS). Earlier clones keep
    /// their counts.
    pub fn callers(self, max: NonZeroUsize) -> Self {
        Self {
            log: Log::new(max),
            ..self
        }
    }

    fn shown(&self, key: &Key) -> String {
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

/// Shows no caller, whether or not the log does.
impl fmt::Debug for TracingObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TracingObserver")
            .field("reveal_keys", &self.reveal_keys)
            .finish_non_exhaustive()
    }
}

impl Observer for TracingObserver {
    fn decided(
        &self,
        &event::Decided {
            key,
            decision,
            elapsed,
            dry_run,
        }: &event::Decided<'_>,
    ) {
        let (policy, outcome) = (decision.policy(), decision.outcome());
        trace!(
            policy = policy.name(),
            caller = self.shown(key),
            allowed = decision.is_allowed(),
            remaining = decision.remaining(),
            source = ?decision.source(),
            ?elapsed,
            dry_run,
            "rate limit decided"
        );
        self.log.report_counts();
        if !decision.is_allowed() {
            let (span, field) = (
                Span::current(),
                if dry_run {
                    "rate_limit_dry_run"
                } else {
                    "rate_limit"
                },
            );
            span.record(field, outcome.as_str());
            let who = || Denied {
                policy: policy.clone(),
                caller: self.shown(key),
                dry_run,
            };
            if let Some(new) = self.log.denials.note((*key, policy.id(), dry_run), who) {
                denied(&span, new);
            }
        }
    }

    fn failed(&self, &event::Failed { key, error }: &event::Failed<'_>) {
        trace!(
            caller = key.map(|key| self.shown(key)),
            kind = error.kind().as_str(),
            error = error as &dyn StdError,
            "rate limit check failed"
        );
        self.log.report_counts();
        if let Some(new) = self.log.failures.note(error.kind(), || error.clone()) {
            failed(&Span::current(), new);
        }
    }

    fn misconfigured(&self, &event::Misconfigured { problem }: &event::Misconfigured<'_>) {
        error!(
            problem,
            "the server is set up so that requests are not counted as they should be"
        );
    }

    fn degraded(&self, &event::Degraded { error, share }: &event::Degraded<'_>) {
        let (kind, source) = (error.kind().as_str(), error as &dyn StdError);
        match share {
            NonZeroU32::MIN => warn!(
                kind,
                error = source,
                share,
                "rate limits are local: the shared store has failed too often, and each instance grants the whole limit; with \
                 more than one, set `Fallback::share`"
            ),
            share => warn!(
                kind,
                error = source,
                share,
                "rate limits are local: the shared store has failed too often"
            ),
        }
    }

    fn recovered(&self, &event::Recovered { after }: &event::Recovered) {
        info!(?after, "rate limits are shared again");
    }

    fn reconciled(&self, &event::Reconciled { charged, dropped }: &event::Reconciled) {
        info!(
            charged,
            dropped, "charged what was granted locally to the shared store"
        );
    }

    fn leased(
        &self,
        &event::Leased {
            charged,
            refunded,
            expired,
            lost,
        }: &event::Leased,
    ) {
        trace!(
            charged,
            refunded, expired, lost, "a block of a leased quota has ended"
        );
    }

    fn sends(&self, &event::Sends { checks, waiting }: &event::Sends) {
        trace!(checks, waiting, "rate limit checks sent");
    }
}

impl Log {
    fn new(callers: NonZeroUsize) -> Arc<Self> {
        // There are fewer kinds than this.
        Arc::new(Self {
            denials: Repeats::new(callers.get()),
            failures: Repeats::new(64),
        })
    }

    /// In no span, since it is about other requests than the current one.
    fn report_counts(&self) {
        self.denials
            .counts()
            .into_iter()
            .for_each(|count| denied(&Span::none(), count));
        self.failures
            .counts()
            .into_iter()
            .for_each(|count| failed(&Span::none(), count));
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.denials
            .unreported()
            .into_iter()
            .for_each(|count| denied(&Span::none(), count));
        self.failures
            .unreported()
            .into_iter()
            .for_each(|count| failed(&Span::none(), count));
    }
}

fn denied(span: &Span, (who, denied): Count<Denied>) {
    match who {
        Some(Denied {
            policy,
            caller,
            dry_run,
        }) => {
            info!(parent: span, policy = policy.name(), caller, denied, dry_run, "rate limit exceeded");
        }
        None => info!(parent: span, denied, "further callers rate limited (not listed)"),
    }
}

fn failed(span: &Span, (error, failed): Count<StoreError>) {
    if let Some(error) = error {
        warn!(parent: span, kind = error.kind().as_str(), error = &error as &dyn StdError, failed, "rate limit checks failed");
    }
}
