use std::time::{Duration, SystemTime};

use http::StatusCode;
use http::header::{DATE, HeaderMap, HeaderName, RETRY_AFTER};

use crate::error::{ConfigError, StoreError};
use crate::limit::{Key, Policy, Quota, Strategy};
use crate::store::{Store, charge_debt_of};

/// Stops all instances from calling for a while, such as for the `Retry-After` of a server's 429.
///
/// Add its [policy](Self::policy) to the other policies of a layer or a
/// [`Limiter`](crate::Limiter). It allows all calls until an instance [begins](Self::begin) a pause
/// for the key. Then calls are denied, or wait, until the pause ends:
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
/// // At most five minutes, even if the server requests a longer pause.
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
/// Permits granted before the pause stay valid: at most one per service, and one more per instance.
/// After a pause, the other policies count as before. A [reset](crate::Limiter::reset) of the key
/// ends the pause in all instances within a second.
///
/// Without a pause, the policy allows 2,147,483,648 units of cost in each `max`, and never a larger
/// cost. A call of cost `c`, or its refund, changes a pause by at most `c / 2,147,483,648` of `max`.
/// Header fields and messages for clients do not show this quota.
///
/// Clones share the store.
#[derive(Debug, Clone)]
pub struct Pause<S> {
    store: S,
    policy: Policy,
    max: Duration,
}

const LONGEST: Duration = Duration::from_secs(5 * 3_600);

impl<S: Store> Pause<S> {
    /// Creates pauses in `store` of at most `max`, from 1 second to 5 hours. The maximum protects
    /// callers from a server that requests an excessive pause.
    ///
    /// # Errors
    ///
    /// If [`Policy::new`] rejects the name, or `max` is out of range.
    pub fn new(store: S, name: &str, max: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_secs(1)..=LONGEST).contains(&max) {
            return Err(ConfigError::new(format!(
                "the maximum pause {max:?} is out of range: use 1 second to 5 hours"
            )));
        }
        let policy = policy_of(name, max)?;
        Ok(Self { store, policy, max })
    }

    /// The policy that denies calls during a pause.
    pub fn policy(&self) -> Policy {
        self.policy.clone()
    }

    /// Denies all calls under `key` for `time`, capped at the maximum. A longer pause already in
    /// effect is kept, even if both begin concurrently.
    ///
    /// # Errors
    ///
    /// The errors of the store.
    pub async fn begin(&self, key: Key, time: Duration) -> Result<(), StoreError> {
        let time = time.min(self.max);
        if !time.is_zero() {
            let _ = self
                .store
                .check(charge_debt_of(key, &self.policy().into(), time))
                .await?;
        }
        Ok(())
    }
}

/// Creates the policy of pauses of at most `max`. A debt in its quota denies requests until the pause ends.
fn policy_of(name: &str, max: Duration) -> Result<Policy, ConfigError> {
    /// A pause is a debt of at most the burst, and may be charged before anything else. So the burst is half of the maximum
    /// cost of a check. Calls do not use it up.
    const BURST: u32 = 1 << 31;
    let max = Duration::from_micros(max.as_micros() as u64);
    let policy = Policy::new(name, Strategy::Gcra, Quota::per(BURST, max))?;
    Ok(policy.of_pauses())
}

/// Returns the pause that a response requests: the `Retry-After` of a 429 or a 503, or the
/// `grpc-retry-pushback-ms` of a gRPC call that failed before its first message. `None` if the
/// response requests no pause. So a 429 can return `None`, and is still a denial.
///
/// A `Retry-After` is a number of seconds, or a date. The time until a date is that after the
/// response's own `Date`, by the server's clock; without a `Date` it is `None`.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::throttle::retry_after;
///
/// let response = http::Response::builder().status(429).header("retry-after", "30").body(())?;
/// assert_eq!(retry_after(response.status(), response.headers()), Some(Duration::from_secs(30)));
/// # Ok::<(), http::Error>(())
/// ```
#[doc(alias("Retry-After", "429"))]
pub fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            match number(headers, RETRY_AFTER.as_str()) {
                Some(seconds) => Some(Duration::from_secs(seconds)),
                None => until_date(headers),
            }
        }
        // A negative number means that retrying never helps. It is not read, so no pause begins.
        _ => {
            let millis = number(headers, "grpc-retry-pushback-ms")?;
            Some(Duration::from_millis(millis))
        }
    }
}

/// Returns the time from the response's own date to the date in `Retry-After`.
fn until_date(headers: &HeaderMap) -> Option<Duration> {
    let end = date(headers, RETRY_AFTER)?;
    let sent_at = date(headers, DATE)?;
    // Nothing, if the end has passed.
    Some(end.duration_since(sent_at).unwrap_or_default())
}

fn date(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(text(headers, name.as_str())?).ok()
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    let digits = text(headers, name)?;
    // `parse` would accept a sign.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    Some(headers.get(name)?.to_str().ok()?.trim())
}
