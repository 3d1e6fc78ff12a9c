use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::config::{set_address_map, set_tls};
use super::redis::wrong_url;
use super::{
    Answer, Backend, BoxStore, Fallback, Health, Instances, JointFuture, LocalStore, RedisStore,
    RedisStoreBuilder, Servers, ShareConfig, Store, StoreConfig, StoreKind, Withdraw,
};
use crate::error::{ConfigError, StoreError};
use crate::limit::{Check, Decision, JointCheck};
use crate::observe::{Observer, shared_observer};

/// A store that is chosen when the service starts: in Redis with a local fallback, in Redis alone, or local.
///
/// Redis if `REDIS_URL` is set, as in production, and otherwise this process, with a warning in the log:
///
/// ```
/// use tower_redis_ratelimit::store::AnyStore;
///
/// let store = AnyStore::from_env("REDIS_URL")?;
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::store::StoreError>(())
/// ```
///
/// The URL may have a prefix for the keys, and the share of each instance in an outage:
/// `redis://127.0.0.1/?prefix=shop&share=alive`; see [`Servers`].
///
/// From settings, for example of a file: see [`StoreConfig`]. And from another store:
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::store::AnyStore;
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store: AnyStore = Fallback::builder(redis, LocalStore::default()).deadline(Duration::from_millis(50))?.build().into();
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// A store of your own goes into a [`BoxStore`]:
///
/// ```
/// use tower_redis_ratelimit::store::{AnyStore, BoxStore, Store, StoreError};
///
/// fn store(own: Option<impl Store>) -> Result<AnyStore, StoreError> {
///     match own {
///         Some(own) => Ok(BoxStore::new(own).into()),
///         None => AnyStore::from_env("REDIS_URL"),
///     }
/// }
/// # store(Some(tower_redis_ratelimit::store::MockStore::new()))?;
/// # Ok::<(), StoreError>(())
/// ```
///
/// It adds no allocation to a check, except for a store of your own. Clones share the counts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyStore {
    /// In Redis, and in this process while Redis cannot decide.
    Fallback(Fallback<RedisStore, LocalStore>),
    /// In Redis.
    Redis(RedisStore),
    /// In this process.
    Local(LocalStore),
    /// In a store outside of this crate.
    Own(BoxStore),
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
    /// below 1 ms or above the timeout; [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) for
    /// [`ShareConfig::Alive`](crate::store::ShareConfig::Alive) outside a Tokio runtime.
    pub fn from_config(config: &StoreConfig) -> Result<Self, StoreError> {
        let mut config = config.clone();
        let mut servers = config.url.as_ref().map(Servers::from);
        if let Some(share) = servers.as_mut().and_then(Servers::take_share) {
            config.share = share;
        }
        config.log_ignored();
        Ok(match (config.kind, servers) {
            (StoreKind::Local, _) | (StoreKind::Auto, None) => Self::Local(local(&config)),
            (StoreKind::Redis, Some(servers)) => {
                Self::Redis(redis(&config, servers)?.connect_lazy()?)
            }
            (StoreKind::Auto | StoreKind::Fallback, Some(servers)) => {
                let redis = redis(&config, servers)?.connect_lazy()?;
                Self::Fallback(fallback(&config, redis)?)
            }
            (kind @ (StoreKind::Redis | StoreKind::Fallback), None) => {
                return Err(wrong_url(format_args!(
                    "it is missing, and a store of the kind `{kind}` needs it"
                ))
                .into());
            }
        })
    }

    /// Uses Redis with a local fallback if this environment variable holds the URL of a Redis. The value `local` selects a
    /// [local](Self::local) store. So does a variable that is not set, with a warning in the log, since its name may be
    /// misspelled. The other settings have their defaults.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) for an invalid URL. An
    /// empty variable is an invalid URL: if a secret is lost, the instances must not silently count
    /// separately. [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) for a URL with `share=alive` outside a Tokio
    /// runtime.
    pub fn from_env(variable: &str) -> Result<Self, StoreError> {
        Self::from_config(&StoreConfig::from_env(variable)?)
    }

    /// Like [`from_env`](Self::from_env), for a variable that must be set, as in production.
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env), and if the variable is not set.
    pub fn require_env(variable: &str) -> Result<Self, StoreError> {
        Self::from_config(&StoreConfig::require_env(variable)?)
    }

    /// Creates a local store with the default settings.
    pub fn local() -> Self {
        LocalStore::default().into()
    }

    /// Sets the observer of failures and state changes. An observer that is set is kept. Defaults to the
    /// [observer](crate::RateLimitLayer::observer) of the first layer over the store, or else to [a
    /// log of problems](Observer).
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        let observer = shared_observer(observer);
        self.backend().observe(&observer);
        self
    }

    /// Returns the [share](crate::store::StoreConfig::share) of the fallback, as the number of instances: for a
    /// [`Leased`](crate::Leased) store. 1 without a fallback.
    ///
    /// ```
    /// use tower_redis_ratelimit::Leased;
    /// use tower_redis_ratelimit::store::{AnyStore, ShareConfig, StoreConfig};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = StoreConfig::from_env("REDIS_URL")?.share(ShareConfig::Alive);
    /// let store = AnyStore::from_config(&config)?;
    /// let instances = store.instances();
    /// let store = Leased::builder(store).share(instances).build();
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn instances(&self) -> Instances {
        match self {
            Self::Fallback(store) => store.instances(),
            Self::Redis(_) | Self::Local(_) | Self::Own(_) => Instances::from(1),
        }
    }
}

pub(super) fn redis(
    config: &StoreConfig,
    servers: impl Into<Servers>,
) -> Result<RedisStoreBuilder, ConfigError> {
    let mut builder = RedisStore::builder(servers).settings(config.into());
    if let Some(path) = &config.password_file {
        builder = builder.password_file(path);
    }
    if let Some(path) = &config.sentinel_password_file {
        builder = builder.sentinel_password_file(path);
    }
    set_address_map(set_tls(builder, config)?, config)
}

pub(super) fn fallback(
    config: &StoreConfig,
    redis: RedisStore,
) -> Result<Fallback<RedisStore, LocalStore>, StoreError> {
    let mut builder = Fallback::builder(redis.clone(), local(config));
    if let Some(deadline) = config.deadline {
        builder = builder.deadline(deadline)?;
    }
    let share = match config.share {
        ShareConfig::Fixed(instances) => Instances::from(instances),
        ShareConfig::Alive => redis.announce()?,
    };
    Ok(builder.failures(config.failures).share(share).build())
}

pub(super) fn local(config: &StoreConfig) -> LocalStore {
    LocalStore::with_capacity(config.local_keys)
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

impl From<BoxStore> for AnyStore {
    fn from(store: BoxStore) -> Self {
        Self::Own(store)
    }
}

impl Store for AnyStore {
    type Future = AnyStoreFuture;

    fn check(&self, check: Check) -> Answer<AnyStoreFuture> {
        match self {
            Self::Fallback(store) => wrap(store.check(check), |future| State::Fallback { future }),
            Self::Redis(store) => wrap(store.check(check), |future| State::Redis { future }),
            Self::Local(store) => wrap(store.check(check), |future| State::Local { future }),
            Self::Own(store) => wrap(store.check(check), |future| State::Own { future }),
        }
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        match self {
            Self::Fallback(store) => store.check_all(joint),
            Self::Redis(store) => store.check_all(joint),
            Self::Local(store) => store.check_all(joint),
            Self::Own(store) => store.check_all(joint),
        }
    }

    fn backend(&self) -> Backend<'_, AnyStoreFuture> {
        match self {
            Self::Fallback(store) => store.backend().withdrawing(self),
            Self::Redis(store) => store.backend().withdrawing(self),
            Self::Local(store) => store.backend().withdrawing(self),
            Self::Own(store) => store.backend().withdrawing(self),
        }
    }

    fn health(&self) -> Health {
        match self {
            Self::Fallback(store) => store.health(),
            Self::Redis(store) => store.health(),
            Self::Local(store) => store.health(),
            Self::Own(store) => store.health(),
        }
    }

    fn flush(&self) -> impl Future<Output = bool> + Send {
        let flush: Pin<Box<dyn Future<Output = bool> + Send + '_>> = match self {
            Self::Fallback(store) => Box::pin(store.flush()),
            Self::Redis(store) => Box::pin(store.flush()),
            Self::Local(store) => Box::pin(store.flush()),
            Self::Own(store) => Box::pin(store.flush()),
        };
        flush
    }
}

impl Withdraw<AnyStoreFuture> for AnyStore {
    fn withdraw(&self, future: Pin<&mut AnyStoreFuture>) -> bool {
        match (self, future.project().state.project()) {
            (Self::Fallback(store), StateProj::Fallback { future }) => {
                store.backend().withdraw(future)
            }
            (Self::Redis(store), StateProj::Redis { future }) => store.backend().withdraw(future),
            (Self::Local(store), StateProj::Local { future }) => store.backend().withdraw(future),
            (Self::Own(store), StateProj::Own { future }) => store.backend().withdraw(future),
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
            future: <Fallback<RedisStore, LocalStore> as Store>::Future,
        },
        Redis {
            #[pin]
            future: <RedisStore as Store>::Future,
        },
        Local {
            #[pin]
            future: <LocalStore as Store>::Future,
        },
        Own {
            #[pin]
            future: <BoxStore as Store>::Future,
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
            StateProj::Own { future } => future.poll(cx),
        }
    }
}

impl fmt::Debug for AnyStoreFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyStoreFuture").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;

    use futures_util::FutureExt;

    use super::*;
    use crate::limit::{Key, Policies, Policy, Strategy};

    fn redis() -> RedisStore {
        RedisStore::connect_lazy("redis://127.0.0.1:1/").unwrap()
    }

    fn policies(quota: &str) -> Policies {
        Policy::new("test", Strategy::Gcra, quota).unwrap().into()
    }

    #[test]
    fn warms_its_store() {
        let policies = policies("10/100d");
        let take = |cost| Check::take(Key::new("ann"), &policies, cost);
        let decision = LocalStore::default()
            .check(take(6))
            .now_or_never()
            .unwrap()
            .unwrap();
        let store = AnyStore::local();
        store.backend().warm(&Key::new("ann"), &decision);
        assert_eq!(
            store
                .check(take(0))
                .now_or_never()
                .unwrap()
                .unwrap()
                .remaining(),
            4
        );
    }

    /// It has the identity of the store that it contains, so that both track requests in flight
    /// together.
    #[tokio::test]
    async fn it_has_the_identity_of_its_store() {
        let (redis, local) = (redis(), LocalStore::default());
        let fallback = Fallback::new(redis.clone(), local.clone());
        let own = BoxStore::new(Arc::new(redis.clone()));
        for store in [redis.clone().into(), AnyStore::from(fallback), own.into()] {
            assert_eq!(store.backend().waiters(), redis.backend().waiters());
        }
        assert_eq!(
            AnyStore::from(local.clone()).backend().waiters(),
            local.backend().waiters()
        );
        assert!(
            redis.backend().waiters() != local.backend().waiters()
                && local.backend().waiters().is_some()
        );
    }

    /// A custom store may flush in its own way.
    #[test]
    fn its_store_flushes() {
        #[derive(Clone)]
        struct OwesAlways(LocalStore);

        impl Store for OwesAlways {
            type Future = <LocalStore as Store>::Future;

            fn check(&self, check: Check) -> Answer<Self::Future> {
                self.0.check(check)
            }

            async fn flush(&self) -> bool {
                false
            }
        }

        let own = BoxStore::new(OwesAlways(LocalStore::default()));
        for (store, flushes) in [(own.into(), false), (AnyStore::local(), true)] {
            assert_eq!(store.flush().now_or_never(), Some(flushes));
        }
    }

    /// A [`Fallback`] around the store relies on this at its deadline.
    #[tokio::test]
    async fn the_store_withdraws_unsent_checks() {
        let policies = policies("10/d");
        for store in [
            AnyStore::from(redis()),
            Fallback::new(redis(), LocalStore::default()).into(),
            BoxStore::new(Arc::new(redis())).into(),
        ] {
            let Answer::Pending { future } =
                store.check(Check::take(Key::new("ann"), &policies, 1))
            else {
                panic!("no answer yet")
            };
            assert!(
                store.backend().withdraw(pin!(future)),
                "no task has run that could send it"
            );
        }
    }
}
