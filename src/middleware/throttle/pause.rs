use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, RETRY_AFTER};

use crate::error::{ConfigError, StoreError};
use crate::limit::{Check, Key, Policy, Quota, Strategy};
use crate::store::Store;

/// Keeps everybody from calling for a while, over all instances: a server has answered 429 and said for how long.
///
/// Its [policy](Self::policy), in a layer or a [`Limiter`](crate::Limiter) beside the others, lets everything pass until
/// somebody [begins](Self::begin) a pause of that key. Then calls are denied, or wait, until it is over:
///
/// ```
/// use std::time::Duration;
///
/// use http::Response;
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt};
/// use tower_redis_ratelimit::throttle::{Pause, retry_after};
/// use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, Strategy, ThrottleLayer};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), BoxError> {
/// # let start = tokio::time::Instant::now();
/// let (store, key) = (LocalStore::default(), Key::new("geocoder"));
/// // However long the server says, no longer than five minutes.
/// let pause = Pause::new(store.clone(), "geocoder-pause", Duration::from_secs(300))?;
/// let rate = Policy::new("geocoder", Strategy::Gcra, Quota::per_second(50).burst(5))?;
///
/// let mut client = ServiceBuilder::new()
///     .layer(ThrottleLayer::new(store, key, Policies::new([rate, pause.policy()])?))
///     .and_then(move |response: Response<()>| {
///         let pause = pause.clone();
///         async move {
///             if let Some(wait) = retry_after(response.status(), response.headers()) {
///                 pause.begin(key, wait).await?;
///             }
///             Ok::<_, BoxError>(response)
///         }
///     })
///     // The client: a server that is busy.
///     .service_fn(async |_city: &str| {
///         Ok::<_, BoxError>(Response::builder().status(429).header("retry-after", "30").body(())?)
///     });
///
/// client.ready().await?.call("Oslo").await?;
/// client.ready().await?;
/// assert_eq!(start.elapsed().as_secs(), 30);
/// # Ok(())
/// # }
/// ```
///
/// Who has a permit when a pause begins, at most one for each service and one more for each instance, still calls. After a
/// pause the other policies count as before. A [reset](crate::Limiter::reset) of the key ends it, in all instances within a
/// second. The policy counts up to 100,000 units of cost a second without ever denying.
///
/// Clones share the store.
#[derive(Debug, Clone)]
pub struct Pause<S> {
    store: S,
    policy: Policy,
    max: Duration,
}

/// A unit of cost is so little time that no other policy is limited by it; and the longest pause has at most half of
/// the units that a check may cost.
const UNITS_PER_SECOND: u32 = 100_000;
const LONGEST: Duration = Duration::from_secs(5 * 3_600);

impl<S: Store> Pause<S> {
    /// Pauses in `store` of at most `max`, from 1 second to 5 hours: a server that says something else, by mistake or to
    /// do harm, stops nobody for longer.
    ///
    /// # Errors
    ///
    /// For a name that [`Policy::new`] refuses, and for another `max`.
    pub fn new(store: S, name: &str, max: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_secs(1)..=LONGEST).contains(&max) {
            return Err(ConfigError::new(format!(
                "a longest pause of {max:?}: write from 1 second to 5 hours"
            )));
        }
        let quota = Quota::per_second(UNITS_PER_SECOND);
        let policy = Policy::new(name, Strategy::Gcra, quota.burst(quota.units_in(max)))?;
        Ok(Self { store, policy, max })
    }

    /// The policy that denies while there is a pause.
    pub fn policy(&self) -> Policy {
        self.policy.clone()
    }

    /// Denies this key for `time` from now, or for the longest time. Of several pauses the longest counts, also if they
    /// begin together.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub async fn begin(&self, key: Key, time: Duration) -> Result<(), StoreError> {
        let time = time.min(self.max);
        if !time.is_zero() {
            let _ = self
                .store
                .check(Check::charge_debt_of(key, &self.policy().into(), time))
                .await?;
        }
        Ok(())
    }
}

/// For how long a response asks its client not to call again: the `Retry-After` of a 429 or a 503, in seconds, or the
/// `grpc-retry-pushback-ms` of a gRPC call that has failed at once. `None` if it does not ask, or names a date.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::throttle::retry_after;
///
/// let response = http::Response::builder().status(429).header("retry-after", "30").body(())?;
/// assert_eq!(retry_after(response.status(), response.headers()), Some(Duration::from_secs(30)));
/// # Ok::<(), http::Error>(())
/// ```
pub fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse().ok();
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            number(RETRY_AFTER.as_str()).map(Duration::from_secs)
        }
        // A negative number says that no wait helps.
        _ => number("grpc-retry-pushback-ms").map(Duration::from_millis),
    }
}
