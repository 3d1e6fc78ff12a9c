use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::{
    Answer, Fallback, FallbackFuture, LocalStore, RedisFuture, RedisStore, Store, StoreConfig,
    Waiters,
};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key};
use crate::observe::Observer;

/// A store that is chosen when the service starts: in Redis with a local fallback, in Redis alone, or local.
///
/// Redis if `REDIS_URL` is set, as in production, and otherwise this process:
///
/// ```
/// use tower_redis_ratelimit::store::AnyStore;
///
/// let store = AnyStore::from_env("REDIS_URL")?;
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::store::StoreError>(())
/// ```
///
/// From settings, for example of a file: see [`StoreConfig`]. And from another store:
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::store::AnyStore;
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store: AnyStore = Fallback::new(redis, LocalStore::default()).deadline(Duration::from_millis(50)).into();
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// It adds no allocation to a check. Clones share the counts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyStore {
    /// In Redis, and in this process while Redis cannot decide.
    Fallback(Fallback<RedisStore, LocalStore>),
    /// In Redis.
    Redis(RedisStore),
    /// In this process.
    Local(LocalStore),
}

impl AnyStore {
    /// Creates the store that these settings describe. It connects to Redis at the first check, so
    /// a service starts while Redis is down.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) if
    /// [`RedisStoreBuilder::connect_lazy`](crate::store::RedisStoreBuilder::connect_lazy) rejects
    /// the settings, if the URL is missing, if a file is unreadable, or if a fallback's deadline is
    /// below 1 ms; [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) for
    /// [`ShareConfig::Alive`](crate::store::ShareConfig::Alive) outside a Tokio runtime.
    pub fn from_config(config: &StoreConfig) -> Result<Self, StoreError> {
        config.store()
    }

    /// Uses Redis with a local fallback if this environment variable holds the URL of a Redis;
    /// otherwise counts locally. The other settings have their defaults.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) for an invalid URL. An
    /// empty variable is an invalid URL: if a secret is lost, the instances must not silently count
    /// separately.
    pub fn from_env(variable: &str) -> Result<Self, StoreError> {
        Self::from_config(&StoreConfig::from_env(variable)?)
    }

    /// Creates a local store with the default settings.
    pub fn local() -> Self {
        LocalStore::default().into()
    }

    /// Returns `true` if Redis should decide, but the fallback does: for health checks. See
    /// [`Fallback::is_degraded`].
    pub fn is_degraded(&self) -> bool {
        match self {
            Self::Fallback(store) => store.is_degraded(),
            Self::Redis(_) | Self::Local(_) => false,
        }
    }
}

impl From<Fallback<RedisStore, LocalStore>> for AnyStore {
    fn from(store: Fallback<RedisStore, LocalStore>) -> Self {
        Self::Fallback(store)
    }
}

impl From<RedisStore> for AnyStore {
    fn from(store: RedisStore) -> Self {
        Self::Redis(store)
    }
}

impl From<LocalStore> for AnyStore {
    fn from(store: LocalStore) -> Self {
        Self::Local(store)
    }
}

/// Evaluates an expression for each kind of store.
macro_rules! each {
    ($self:ident, $store:ident => $answer:expr) => {
        match $self {
            AnyStore::Fallback($store) => $answer,
            AnyStore::Redis($store) => $answer,
            AnyStore::Local($store) => $answer,
        }
    };
}

impl Store for AnyStore {
    type Future = AnyStoreFuture;

    fn check(&self, check: Check) -> Answer<AnyStoreFuture> {
        match self {
            Self::Fallback(store) => wrap(store.check(check), |future| State::Fallback { future }),
            Self::Redis(store) => wrap(store.check(check), |future| State::Redis { future }),
            Self::Local(store) => wrap(store.check(check), |future| State::Local { future }),
        }
    }

    fn warm(&self, key: &Key, decision: &Decision) {
        each!(self, store => store.warm(key, decision))
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        each!(self, store => store.observe(observer))
    }

    fn waiters(&self) -> Option<Waiters> {
        each!(self, store => store.waiters())
    }

    fn server(&self, key: &Key) -> Option<String> {
        each!(self, store => store.server(key))
    }

    fn partitions(&self) -> usize {
        each!(self, store => store.partitions())
    }

    fn partition(&self, key: &Key) -> usize {
        each!(self, store => store.partition(key))
    }

    fn withdraw(&self, future: Pin<&mut AnyStoreFuture>) -> bool {
        match (self, future.project().state.project()) {
            (Self::Fallback(store), StateProj::Fallback { future }) => store.withdraw(future),
            (Self::Redis(store), StateProj::Redis { future }) => store.withdraw(future),
            (Self::Local(store), StateProj::Local { future }) => store.withdraw(future),
            // The future belongs to another store.
            _ => false,
        }
    }
}

fn wrap<F>(answer: Answer<F>, state: impl FnOnce(F) -> State) -> Answer<AnyStoreFuture> {
    match answer {
        Answer::Ready { answer } => Answer::ready(answer),
        Answer::Pending { future } => Answer::pending(AnyStoreFuture {
            state: state(future),
        }),
    }
}

pin_project! {
    /// Resolves to the reply of an [`AnyStore`].
    ///
    /// # Panics
    ///
    /// If it is polled after completion.
    pub struct AnyStoreFuture {
        #[pin]
        state: State,
    }
}

pin_project! {
    #[project = StateProj]
    enum State {
        Fallback {
            #[pin]
            future: FallbackFuture<RedisStore, LocalStore>,
        },
        Redis {
            #[pin]
            future: RedisFuture,
        },
        Local {
            #[pin]
            future: <LocalStore as Store>::Future,
        },
    }
}

impl Future for AnyStoreFuture {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Fallback { future } => future.poll(cx),
            StateProj::Redis { future } => future.poll(cx),
            StateProj::Local { future } => future.poll(cx),
        }
    }
}

impl fmt::Debug for AnyStoreFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyStoreFuture").finish_non_exhaustive()
    }
}
