use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

/// How many instances of a service are alive, for the [share](crate::store::FallbackBuilder::share) of each in a policy while
/// it decides locally.
///
/// Each instance grants its share of the limit and of the burst, rounded down, but at least 1. For example, each of 4
/// instances grants 2 of a limit of 10, and each of 20 instances grants 1, so that together they grant 20. The rate of
/// a strategy that refills gradually is divided exactly.
///
/// A constant number, such as `4`, where `0` counts as 1:
///
/// ```
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store = Fallback::builder(redis, LocalStore::default()).share(4).build();
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// [`RedisStore::announce`](crate::RedisStore::announce) counts them in Redis. If you know the number from elsewhere,
/// such as a service registry, use that:
///
/// ```
/// use std::num::NonZeroU32;
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use tower_redis_ratelimit::store::Instances;
///
/// let count = Arc::new(AtomicU32::new(3));
/// let seen = Arc::clone(&count);
/// let instances = Instances::new(move || NonZeroU32::new(seen.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN));
/// assert_eq!(instances.alive().get(), 3);
/// count.store(4, Ordering::Relaxed);
/// assert_eq!(instances.alive().get(), 4);
/// ```
#[derive(Clone)]
pub struct Instances(Number);

#[derive(Clone)]
enum Number {
    Constant(NonZeroU32),
    Counted(Arc<dyn Fn() -> NonZeroU32 + Send + Sync>),
}

impl Instances {
    /// Creates the number that `alive` returns, including this instance. A [`Fallback`](crate::Fallback) calls it for each
    /// check that it decides locally, so it should only read a number. It is dropped with the last clone.
    pub fn new(alive: impl Fn() -> NonZeroU32 + Send + Sync + 'static) -> Self {
        Self(Number::Counted(Arc::new(alive)))
    }

    /// Sets a minimum, for an instance that starts while Redis is down: it has found no other one, and without a
    /// minimum it grants the whole limit. Defaults to 1.
    ///
    /// ```
    /// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
    /// let instances = redis.announce()?.at_least(2);
    /// assert_eq!(instances.alive().get(), 2);
    /// let store = Fallback::builder(redis, LocalStore::default()).share(instances).build();
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn at_least(self, min: u32) -> Self {
        let min = NonZeroU32::new(min).unwrap_or(NonZeroU32::MIN);
        match self.0 {
            Number::Constant(number) => number.max(min).into(),
            Number::Counted(alive) => Self::new(move || alive().max(min)),
        }
    }

    /// How many are alive, at least this one.
    pub fn alive(&self) -> NonZeroU32 {
        match &self.0 {
            Number::Constant(number) => *number,
            Number::Counted(alive) => alive(),
        }
    }

    /// Returns `true` unless the number is constant.
    pub(crate) fn is_counted(&self) -> bool {
        matches!(self.0, Number::Counted(_))
    }
}

/// A constant number. `0` counts as 1.
impl From<u32> for Instances {
    fn from(number: u32) -> Self {
        NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN).into()
    }
}

/// A constant number.
impl From<NonZeroU32> for Instances {
    fn from(number: NonZeroU32) -> Self {
        Self(Number::Constant(number))
    }
}

impl fmt::Debug for Instances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instances({} alive)", self.alive())
    }
}
