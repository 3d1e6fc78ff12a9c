use std::fmt;
use std::time::Duration;

use super::{Decision, Source};

/// The error of a denied call or reservation: nothing was charged, and no inner service was called.
///
/// A [`CallLimit`](crate::call_limit::CallLimit) returns it boxed, and other layers pass the box
/// on. Downcast it like this:
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::check::RateLimited;
///
/// /// When to call again. `None` for another error, or if waiting does not help.
/// fn retry_after(error: &(dyn std::error::Error + 'static)) -> Option<Duration> {
///     error.downcast_ref::<RateLimited>()?.retry_after()
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RateLimited {
    decision: Decision,
}

impl RateLimited {
    pub(crate) const fn new(decision: Decision) -> Self {
        Self { decision }
    }

    /// Returns how long to wait before the same call can be allowed. `None` if waiting does not
    /// help, because the cost exceeds the burst, or the caller is [blocked](crate::Policies::blocked).
    pub fn retry_after(&self) -> Option<Duration> {
        self.decision.retry_after()
    }

    /// Returns the decision, with the policy that denied the call.
    pub const fn decision(&self) -> &Decision {
        &self.decision
    }
}

/// Shows the quota and the wait, but not the caller.
impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policy = self.decision.policy();
        let stated = policy.stated();
        let name = policy.name();
        match self.retry_after() {
            Some(wait) if policy.is_pause() => {
                write!(f, "calls are paused ({name}); try again in {wait:?}")
            }
            _ if self.decision.is_final() => write!(f, "calls are blocked ({name})"),
            Some(wait) if self.decision.source() == Source::Blocked => {
                write!(f, "calls are blocked ({name}); try again in {wait:?}")
            }
            Some(wait) => {
                let left = self.decision.remaining() > 0;
                let problem = if left {
                    "cannot cover this call"
                } else {
                    "is used up"
                };
                f.write_str("the quota of ")?;
                match policy.is_in_flight() {
                    true => write!(f, "{} requests in flight", stated.limit())?,
                    false => write!(f, "{stated}")?,
                }
                write!(f, " ({name}) {problem}; try again in {wait:?}")
            }
            None => {
                let capacity = self.decision.capacity();
                write!(
                    f,
                    "the call's cost exceeds the maximum burst of {capacity} ({name})"
                )
            }
        }
    }
}

impl std::error::Error for RateLimited {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Check, Key, Policy, Quota, Source, Strategy, Verdict};

    #[test]
    fn a_leased_quota_is_as_written() {
        let policy = Policy::new("api", Strategy::SlidingLog, Quota::per_second(2)).unwrap();
        let policies = policy.leased(Duration::from_millis(100)).unwrap().into();
        let check = Check::take(Key::GLOBAL, &policies, 1);
        let denied = check.decided(Source::Local, 0, |_| {
            Verdict::denied(Duration::from_secs(1))
        });
        let text = "the quota of 2/s (api) is used up; try again in 1s";
        assert_eq!(RateLimited::new(denied).to_string(), text);
    }

    #[test]
    fn requests_in_flight_are_no_rate() {
        let policies = Policy::in_flight("up", 5).unwrap().into();
        let denied = Check::take(Key::GLOBAL, &policies, 1).decided(Source::Local, 0, |_| {
            Verdict::denied(Duration::from_millis(100))
        });
        let text = "the quota of 5 requests in flight (up) is used up; try again in 100ms";
        assert_eq!(RateLimited::new(denied).to_string(), text);
    }
}
