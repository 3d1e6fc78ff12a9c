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
/// By all of its settings, for example from a file: see [`StoreConfig`]. And from a store:
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
    /// The store of these settings. Redis is not connected to before the first check, so that a service starts while
    /// Redis is down.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) for settings that
    /// [`RedisStoreBuilder::connect_lazy`](crate::store::RedisStoreBuilder::connect_lazy) refuses, that lack a URL,
    /// that name unreadable files, or a fallback's deadline below 1 ms;
    /// [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) for
    /// [`ShareConfig::Alive`](crate::store::ShareConfig::Alive) outside of a tokio runtime.
    pub fn from_config(config: &StoreConfig) -> Result<Self, StoreError> {
        config.store()
    }

    /// In Redis with a local fallback if this environment variable is set, to the URL of Redis; else local. The other
    /// settings are the defaults.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) for a wrong URL. An empty variable is a
    /// wrong URL, so that a lost secret does not split the counts of the instances.
    pub fn from_env(variable: &str) -> Result<Self, StoreError> {
        Self::from_config(&StoreConfig::from_env(variable)?)
    }

    /// In this process, with the defaults.
    pub fn local() -> Self {
        LocalStore::default().into()
    }

    /// Whether Redis should decide, but the fallback does: for health checks. See [`Fallback::is_degraded`].
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

/// The answer of any of the stores.
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

    fn is_authoritative(&self, decision: &Decision) -> bool {
        each!(self, store => store.is_authoritative(decision))
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
            // Of another store.
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
    /// Resolves to the answer of an [`AnyStore`].
    ///
    /// # Panics
    ///
    /// If it is polled after it has answered.
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
