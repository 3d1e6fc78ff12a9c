//! The header fields of a decision: `RateLimit` and `RateLimit-Policy`, as in draft-ietf-httpapi-ratelimit-headers-11.
//!
//! The draft still changes; this is the one place that knows its syntax.

use std::fmt::Write as _;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::limit::{Decision, Policies, Policy};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The fields of a list of policies, with what does not change from request to request made ready.
#[derive(Debug, Clone)]
pub(super) struct FieldsOf {
    policy: Option<HeaderValue>,
}

impl FieldsOf {
    pub(super) fn new(policies: &Policies) -> Self {
        let mut text = String::new();
        for policy in policies.iter() {
            let (separator, quota) = (if text.is_empty() { "" } else { ", " }, policy.quota());
            // A window is a whole number of seconds above 0 in the draft.
            let _ = write!(text, "{separator}\"{}\";q={};w={}", policy.name(), quota.limit(), seconds(quota.period()));
        }
        // Names and numbers are of characters that a header value can have.
        Self { policy: HeaderValue::try_from(text).ok() }
    }

    /// Both fields are lists: what a layer or a server further in has told stays.
    pub(super) fn append(&self, headers: &mut HeaderMap, decision: &Decision) {
        if let Some(policy) = &self.policy {
            headers.append(RATE_LIMIT_POLICY, policy.clone());
        }
        if let Ok(value) = HeaderValue::try_from(rate_limit(decision)) {
            headers.append(RATE_LIMIT, value);
        }
    }
}

/// `"api";r=9;t=54` for every policy: what remains, and the time within which no more than that can be used.
fn rate_limit(decision: &Decision) -> String {
    let mut text = String::with_capacity(64);
    for each in decision.each() {
        let separator = if text.is_empty() { "" } else { ", " };
        let window = seconds(effective_window(&each));
        let _ = write!(text, "{separator}\"{}\";r={};t={window}", each.policy().name(), each.remaining());
    }
    text
}

/// The time within which a client can use no more than what remains.
///
/// With a window that is until it ends; with a strategy that refills, until the next unit is there. But the draft asks
/// for a bound on what remains per time, so that clients do not come all at once: it is never told to be less than the
/// time for which the quota would make it last.
fn effective_window(decision: &Decision) -> Duration {
    if let Some(wait) = decision.retry_after() {
        return wait;
    }
    let unit = unit_of_time(decision.policy());
    let lasts = unit.saturating_mul(decision.remaining());
    let next = match decision.policy().strategy().is_steady() {
        true => unit.min(decision.reset_after()),
        false => decision.reset_after(),
    };
    lasts.max(next)
}

/// What the quota gives one unit of cost.
fn unit_of_time(policy: &Policy) -> Duration {
    policy.quota().period() / policy.quota().limit().max(1)
}

/// Whole seconds, rounded up, so that no client comes back too early; and at least 1.
pub(super) fn seconds(duration: Duration) -> u64 {
    (duration.as_secs() + u64::from(duration.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Align, Check, Key, Quota, Source, Strategy};

    /// The field after each of `count` checks at one moment, under these policies.
    fn fields(policies: &Policies, count: usize) -> Vec<String> {
        let mut states: Vec<_> = policies.iter().map(|p| crate::limit::State::fresh(p.strategy())).collect();
        let check = || Check::take(Key::GLOBAL, policies, 1);
        (0..count)
            .map(|_| {
                let verdicts = check().decide(&mut states, 1_700_000_000_000_000);
                rate_limit(&check().answer(verdicts, Source::Local))
            })
            .collect()
    }

    #[test]
    fn a_refilling_quota_tells_how_long_the_rest_must_last() {
        let policies = Policy::new("api", Strategy::Gcra, Quota::per_minute(3)).unwrap().into();
        let expected = ["\"api\";r=2;t=40", "\"api\";r=1;t=20", "\"api\";r=0;t=20", "\"api\";r=0;t=20"];
        assert_eq!(fields(&policies, 4), expected);
    }

    #[test]
    fn a_window_tells_when_it_ends() {
        let policies = Policy::new("day", Strategy::FixedWindow(Align::FirstHit), Quota::per_minute(2)).unwrap().into();
        assert_eq!(fields(&policies, 3), ["\"day\";r=1;t=60", "\"day\";r=0;t=60", "\"day\";r=0;t=60"]);
    }

    #[test]
    fn several_policies_are_one_list() {
        let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota).unwrap();
        let policies = Policies::new([
            policy("burst", Quota::per(5, Duration::from_millis(300))),
            policy("daily", Quota::per_day(86_400)),
        ])
        .unwrap();
        assert_eq!(fields(&policies, 1), ["\"burst\";r=4;t=1, \"daily\";r=86399;t=86399"]);
        let mut headers = HeaderMap::new();
        let mut states: Vec<_> = policies.iter().map(|p| crate::limit::State::fresh(p.strategy())).collect();
        let check = Check::take(Key::GLOBAL, &policies, 1);
        let verdicts = check.decide(&mut states, 0);
        FieldsOf::new(&policies).append(&mut headers, &check.answer(verdicts, Source::Local));
        assert_eq!(headers["ratelimit-policy"], "\"burst\";q=5;w=1, \"daily\";q=86400;w=86400");
    }

    #[test]
    fn seconds_round_up() {
        for (millis, expected) in [(0, 1), (1, 1), (900, 1), (1_000, 1), (1_001, 2), (59_999, 60)] {
            assert_eq!(seconds(Duration::from_millis(millis)), expected);
        }
    }
}
