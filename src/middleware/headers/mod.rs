//! The header fields of a decision.

#[cfg(feature = "serde")]
mod formats;
mod legacy;

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use smallvec::SmallVec;

use legacy::LegacyStyle;

use crate::limit::{Decision, Policies, Policy, Quota, Source, Verdict, Verdicts};
use crate::store::rest_of_window;

/// Which header fields report a decision to clients: the `RateLimit` fields of the IETF's draft, legacy fields for old
/// clients, [both](Self::and) or none.
///
/// | setting | as text | fields | `Reset` |
/// |---|---|---|---|
/// | [`DRAFT_11`](Self::DRAFT_11), the default | `draft-11` | `RateLimit` and `RateLimit-Policy` | |
/// | [`GITHUB`](Self::GITHUB) | `github` | `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset` | a Unix time in seconds: `1700000060` |
/// | [`X_SECONDS`](Self::X_SECONDS) | `x-seconds` | the same names | seconds from now: `60` |
/// | [`DRAFT_6`](Self::DRAFT_6) | `draft-6` | `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` | seconds from now: `60` |
/// | `Headers::DRAFT_11.and(Headers::GITHUB)` | `draft-11, github` | the fields of both | as `GITHUB` |
/// | [`NONE`](Self::NONE) | | none | |
///
/// A denial that may be retried has `Retry-After` with any setting. The fields are explained in
/// [the guide](crate::guide::answers).
///
/// With the feature `serde` it is a list of these texts, such as `["draft-11", "github"]`, with at most one of the legacy
/// fields. In an environment variable it is one text: `draft-11, github`. An empty list is `Headers::NONE`.
///
/// # Legacy fields
///
/// They describe one policy, for clients that do not read the `RateLimit` field: its limit, the remaining units, and the
/// time at which the whole limit is available again. The styles look similar, but `Reset` has different meanings. Choose the
/// style that your clients read. A client that reads seconds as a Unix time never waits; with the opposite mistake it waits
/// for decades. `Reset` is rounded up. A Unix time is that of this server's clock: a client
/// with a different clock waits too long or too short.
///
/// - `Limit` is the [capacity](Decision::capacity) of the policy, so that `Remaining` never exceeds
///   it: 100 for `50/s burst 100`.
/// - `Remaining` is the largest cost that [would pass now](Decision::remaining).
/// - `Reset` is the time at which [all charges have expired](Decision::reset_after). A quota that
///   refills gradually has free units earlier: `Retry-After` reports that time to a denied client.
///
/// The fields describe the policy that [decided](Decision::policy). With nested layers, they
/// describe that of the layer that denied the request (and are absent if that layer adds none). If
/// all layers allowed it, they describe the policy with the least remaining, and of two equal ones,
/// the one with the later reset. A denial by a [`Pause`](crate::throttle::Pause) has no such fields.
///
/// A [layer](crate::RateLimitLayer::headers) adds the fields to every response. For a response that
/// did not pass through a layer, use [`append`](Self::append).
#[doc(alias("Retry-After", "RateLimit", "X-RateLimit-Remaining"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Headers {
    draft: bool,
    legacy: Option<LegacyStyle>,
}

impl Headers {
    /// `RateLimit` and `RateLimit-Policy`, as in draft-ietf-httpapi-ratelimit-headers-11. A later
    /// draft gets another constant.
    pub const DRAFT_11: Self = Self {
        draft: true,
        legacy: None,
    };

    /// The [legacy fields](#legacy-fields) of GitHub's API: `X-` names, and a Unix time.
    pub const GITHUB: Self = Self::legacy(LegacyStyle::GitHub);

    /// The [legacy fields](#legacy-fields) of many gateways: `X-` names, and the remaining seconds.
    pub const X_SECONDS: Self = Self::legacy(LegacyStyle::XSeconds);

    /// The [legacy fields](#legacy-fields) of the IETF's draft up to draft-ietf-httpapi-ratelimit-headers-06: the remaining
    /// seconds. (GitLab uses these names with a Unix time.)
    pub const DRAFT_6: Self = Self::legacy(LegacyStyle::Draft6);

    /// No fields.
    pub const NONE: Self = Self {
        draft: false,
        legacy: None,
    };

    const fn legacy(style: LegacyStyle) -> Self {
        Self {
            draft: false,
            legacy: Some(style),
        }
    }

    /// Adds the fields of `other`. The [legacy fields](#legacy-fields) of `other` replace other legacy fields.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            draft: self.draft || other.draft,
            legacy: match other.legacy {
                None => self.legacy,
                legacy => legacy,
            },
        }
    }

    /// Adds the fields of a decision to a response, and `Retry-After` if the request may be retried
    /// later.
    ///
    /// For a response that did not pass through a layer, such as that of a handler with a
    /// [`Limiter`](crate::Limiter):
    ///
    /// ```
    /// use axum::http::StatusCode;
    /// use axum::response::{IntoResponse, Response};
    /// use tower_redis_ratelimit::headers::Headers;
    /// use tower_redis_ratelimit::store::StoreError;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore};
    ///
    /// async fn search(limiter: &Limiter<LocalStore>, user: Key, words: u32) -> Result<Response, StoreError> {
    ///     let decision = limiter.take(user, words).await?;
    ///     let mut response = match decision.is_allowed() {
    ///         true => "found it".into_response(),
    ///         false => (StatusCode::TOO_MANY_REQUESTS, "not so fast").into_response(),
    ///     };
    ///     Headers::DRAFT_11.and(Headers::GITHUB).append(&decision, response.headers_mut());
    ///     Ok(response)
    /// }
    /// ```
    ///
    /// `RateLimit` and `RateLimit-Policy` are lists, to which the decision is appended. If the
    /// response has legacy fields already, the [tighter](Headers#legacy-fields) ones are kept. An existing
    /// `Retry-After` is kept.
    pub fn append(self, decision: &Decision, headers: &mut HeaderMap) {
        self.append_around(decision, headers, false);
    }

    /// Like [`append`](Self::append), but adds no legacy fields if an inner layer denied the
    /// request: they would describe another policy.
    #[inline]
    fn append_around(self, decision: &Decision, headers: &mut HeaderMap, denied_within: bool) {
        if self.draft {
            append_draft(headers, decision);
        }
        if let Some(legacy) = self.legacy
            && !denied_within
        {
            legacy.set(headers, decision);
        }
        if !decision.is_allowed()
            && let Some(wait) = decision.retry_after()
            && decision.source() != Source::Forbidden
        {
            headers
                .entry(RETRY_AFTER)
                .or_insert_with(|| retry_after_field(wait));
        }
    }

    /// Adds the header fields of a decision to its response. If `shows`, adds the decision to the
    /// extensions, unless an inner layer or a handler has added one.
    pub(super) fn annotate<B>(self, decision: Decision, response: &mut Response<B>, shows: bool) {
        let inner = response.extensions().get::<Decision>();
        let is_innermost = inner.is_none();
        let denied_within = inner.filter(|inner| !inner.is_allowed());
        if let Some(denied) = denied_within
            && is_by_handler(denied, &decision)
        {
            let denied = denied.clone();
            return self.replace_draft(&denied, response.headers_mut());
        }
        let is_denied_within = denied_within.is_some();
        self.append_around(&decision, response.headers_mut(), is_denied_within);
        // The extensions keep the innermost decision, which explains the response.
        if shows && is_innermost {
            response.extensions_mut().insert(decision);
        }
    }

    /// Applies this setting to the response of a handler that denied the request under the layer's
    /// policies. It has the draft's fields of that denial.
    fn replace_draft(self, denied: &Decision, headers: &mut HeaderMap) {
        if !self.draft {
            remove_draft(headers, denied);
        }
        if let Some(legacy) = self.legacy {
            legacy.set(headers, denied);
        }
    }
}

/// Returns `true` if a handler has denied the request under the layer's policies. Its decision may be under an instance's
/// share. The layer's own decision may also be under a policy of requests in flight.
fn is_by_handler(denied: &Decision, of_layer: &Decision) -> bool {
    let of_layer = of_layer.policies().whole();
    of_layer.without_in_flight() == Some(denied.policies().whole())
}

/// [`DRAFT_11`](Self::DRAFT_11).
impl Default for Headers {
    fn default() -> Self {
        Self::DRAFT_11
    }
}

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Adds `RateLimit` and `RateLimit-Policy`, as in draft-ietf-httpapi-ratelimit-headers-11. Both are lists,
/// so entries of inner layers and servers are kept. Pauses and blocked policies have no entries.
fn append_draft(headers: &mut HeaderMap, decision: &Decision) {
    let texts = Texts::of(decision.policies());
    if !texts.policy_field.is_empty() {
        headers.append(RATE_LIMIT_POLICY, texts.policy_field.clone());
    }
    let state = texts.rate_limit(decision);
    if !state.is_empty() {
        headers.append(RATE_LIMIT, state);
    }
}

/// Removes the entries that [`append_draft`] adds for this decision.
fn remove_draft(headers: &mut HeaderMap, decision: &Decision) {
    let texts = Texts::of(decision.policies());
    let state = texts.rate_limit(decision);
    for (name, value) in [
        (RATE_LIMIT_POLICY, &texts.policy_field),
        (RATE_LIMIT, &state),
    ] {
        let entries = headers.get_all(&name).iter();
        let others: Vec<HeaderValue> = entries.filter(|entry| *entry != value).cloned().collect();
        headers.remove(&name);
        for other in others {
            headers.append(name.clone(), other);
        }
    }
}

/// Writes the quota of the policy that decided, such as `50 per second burst 100` or `4 concurrent
/// requests`.
pub(in crate::middleware) fn write_quota(
    decision: &Decision,
    to: &mut impl fmt::Write,
) -> fmt::Result {
    let texts = Texts::of(decision.policies());
    match texts.each.get(decision.decider()) {
        Some(each) => to.write_str(&each.quota),
        None => Ok(()),
    }
}

/// Texts that depend on the policies only.
struct Texts {
    /// The value of `RateLimit-Policy`.
    policy_field: HeaderValue,
    each: SmallVec<[PolicyTexts; 1]>,
}

/// Texts of one policy.
struct PolicyTexts {
    quota: String,
    /// The start of its item in `RateLimit`, such as `"api";r=`.
    item: String,
}

impl Texts {
    /// Returns the texts of a list, which are made once and kept with the list.
    #[inline]
    fn of(policies: &Policies) -> &Self {
        let texts = policies.extension::<OnceLock<Self>>();
        texts.get_or_init(|| Self::new(policies))
    }

    fn new(policies: &Policies) -> Self {
        let mut items = vec![];
        let mut each = SmallVec::new();
        for policy in policies {
            let quota = policy.stated();
            let name = policy.name();
            if policy.is_shown() {
                items.push(if policy.is_in_flight() {
                    // The draft's unit for requests in flight, which have no window.
                    format!("\"{name}\";q={};qu=\"concurrent-requests\"", quota.limit())
                } else if policy.params().calendar.is_some() {
                    // The windows of a calendar differ in length.
                    format!("\"{name}\";q={}", quota.limit())
                } else {
                    let (limit, window) = per_seconds(quota);
                    format!("\"{name}\";q={limit};w={window}")
                });
            }
            each.push(PolicyTexts {
                quota: if policy.is_in_flight() {
                    format!("{} concurrent requests", quota.limit())
                } else {
                    quota.in_words()
                },
                item: format!("\"{name}\";r="),
            });
        }
        Self {
            policy_field: value(items.join(", ").as_bytes()),
            each,
        }
    }

    /// Writes `"api";r=9;t=54` for each policy: the remaining units (`r`), and the seconds that they
    /// must last (`t`). A policy of requests in flight has no `t`, since a request may end at any time.
    /// A pause is left out: its quota is not a limit of clients. A denial by a pause, or of a blocked caller, has no items,
    /// since no remaining unit can be used before it ends.
    fn rate_limit(&self, decision: &Decision) -> HeaderValue {
        if !decision.is_allowed() && !decision.policy().is_shown() {
            return value(b"");
        }
        let verdicts = decision.verdicts();
        let each = decision.policies().iter().zip(&verdicts.each);
        let mut earlier = vec![];
        let mut item = Item::new();
        for ((policy, verdict), texts) in each.zip(&self.each) {
            if !policy.is_shown() {
                continue;
            }
            if !item.is_empty() {
                earlier.extend_from_slice(item.as_bytes());
                earlier.extend_from_slice(b", ");
            }
            item.write(&texts.item, policy, verdict, verdicts);
        }
        if earlier.is_empty() {
            return value(item.as_bytes());
        }
        earlier.extend_from_slice(item.as_bytes());
        value(&earlier)
    }
}

/// Creates a field value from names and numbers, which contain only valid characters.
fn value(text: &[u8]) -> HeaderValue {
    HeaderValue::from_bytes(text).unwrap_or(HeaderValue::from_static(""))
}

/// The item of one policy, in a fixed buffer: `format!` or a growing `Vec` would take longer than
/// the decision.
struct Item {
    /// Large enough: a name has at most 64 bytes, a number 20.
    bytes: [u8; 128],
    len: usize,
}

impl Item {
    fn new() -> Self {
        Self {
            bytes: [0; 128],
            len: 0,
        }
    }

    /// Replaces the contents.
    fn write(&mut self, start: &str, policy: &Policy, verdict: &Verdict, verdicts: &Verdicts) {
        self.len = 0;
        self.push(start.as_bytes());
        self.push(itoa::Buffer::new().format(verdict.remaining).as_bytes());
        if !policy.is_in_flight() {
            let window = seconds(effective_window(policy, verdict, verdicts));
            self.push(b";t=");
            self.push(itoa::Buffer::new().format(window).as_bytes());
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if let Some(room) = self.bytes.get_mut(self.len..end) {
            room.copy_from_slice(bytes);
            self.len = end;
        }
    }

    fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The time during which a client can use at most the remaining units, in microseconds.
///
/// It ends with the window, or when a strategy that refills has the next unit. But it is at least
/// as long as the remaining units last at the quota's rate, so that clients spread their requests.
/// With `3/m` and 2 units left it is 40 s, although the next unit is available after 20 s. In a
/// calendar it is the rest of the window.
fn effective_window(policy: &Policy, verdict: &Verdict, verdicts: &Verdicts) -> u64 {
    if verdict.wait > 0 {
        return verdict.wait.unsigned_abs();
    }
    if let Some(calendar) = policy.params().calendar {
        return match verdict.reset {
            0 => rest_of_window(calendar, verdicts).unsigned_abs(),
            reset => reset.unsigned_abs(),
        };
    }
    let reset = verdict.reset.unsigned_abs();
    let remaining = verdict.remaining.unsigned_abs();
    let next = match policy.frees().is_gradual() {
        // No unit comes later than the remaining ones last.
        true if remaining > 0 => 0,
        true => lasts(policy, 1).min(reset),
        false => reset,
    };
    lasts(policy, remaining).max(next)
}

/// The time in which the quota refills `cost` units, in microseconds: 40 s for 2 units of `3/m`.
fn lasts(policy: &Policy, cost: u64) -> u64 {
    let period = policy.params().period.unsigned_abs();
    let limit = u64::from(policy.quota().limit().max(1));
    match period.checked_mul(cost) {
        Some(product) => product.div_ceil(limit),
        // The quotient fits in 64 bits: no quota takes longer than ten years to refill.
        None => (u128::from(period) * u128::from(cost)).div_ceil(u128::from(limit)) as u64,
    }
}

/// Returns a quota as a limit per whole seconds, which the draft requires. The rate is the same, rounded down: 10 in 1 s
/// for `1/100ms`.
fn per_seconds(quota: Quota) -> (u64, u64) {
    let period = quota.period().as_micros().max(1);
    let window = seconds(period as u64);
    let limit = u128::from(quota.limit()) * u128::from(window) * 1_000_000 / period;
    // The longest integer of a field has 15 digits.
    (limit.min(999_999_999_999_999) as u64, window)
}

/// Converts microseconds to seconds: at least 1, and rounded up so that no client retries too
/// early.
fn seconds(micros: u64) -> u64 {
    micros.div_ceil(1_000_000).max(1)
}

/// The number of seconds that a client should wait.
pub(in crate::middleware) fn retry_after(wait: Duration) -> u64 {
    seconds(wait.as_micros() as u64)
}

/// The value of `Retry-After`.
fn retry_after_field(wait: Duration) -> HeaderValue {
    number(retry_after(wait))
}

/// Converts a number to a field value. (`HeaderValue::from` would allocate twice.)
fn number(number: u64) -> HeaderValue {
    value(itoa::Buffer::new().format(number).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Align, Check, Key, Source, Strategy};

    /// Returns the `RateLimit` field after each of `count` takes at the same moment.
    fn fields(policies: &Policies, count: usize) -> Vec<String> {
        let mut states: Vec<_> = policies
            .iter()
            .map(|p| crate::limit::State::fresh(p.kind()))
            .collect();
        let check = || Check::take(Key::GLOBAL, policies, 1);
        (0..count)
            .map(|_| {
                let verdicts = check().decide(&mut states, 1_700_000_000_000_000);
                Texts::new(policies)
                    .rate_limit(&check().answer(verdicts, Source::Local))
                    .to_str()
                    .unwrap()
                    .to_owned()
            })
            .collect()
    }

    #[test]
    fn a_refilling_quota_returns_its_period() {
        let policies = Policy::new("api", Strategy::Gcra, Quota::per_minute(3))
            .unwrap()
            .into();
        let expected = [
            "\"api\";r=2;t=40",
            "\"api\";r=1;t=20",
            "\"api\";r=0;t=20",
            "\"api\";r=0;t=20",
        ];
        assert_eq!(fields(&policies, 4), expected);
    }

    #[test]
    fn a_window_returns_when_it_ends() {
        let policies = Policy::new(
            "day",
            Strategy::FixedWindow(Align::FirstHit),
            Quota::per_minute(2),
        )
        .unwrap()
        .into();
        assert_eq!(
            fields(&policies, 3),
            ["\"day\";r=1;t=60", "\"day\";r=0;t=60", "\"day\";r=0;t=60"]
        );
    }

    /// The takes are 40 s before the end of a window.
    #[test]
    fn late_in_a_window_units_last_longer() {
        let clock = Strategy::FixedWindow(Align::Clock {
            offset: Duration::ZERO,
        });
        let policies = Policy::new("day", clock, Quota::per_minute(5))
            .unwrap()
            .into();
        assert_eq!(
            fields(&policies, 2),
            ["\"day\";r=4;t=48", "\"day\";r=3;t=40"]
        );
    }

    #[test]
    fn requests_in_flight_have_no_window() {
        let policies = Policies::new([
            Policy::new("tokens", Strategy::Gcra, Quota::per_minute(3)).unwrap(),
            Policy::in_flight("streams", 2).unwrap(),
        ])
        .unwrap();
        let expected = [
            "\"tokens\";r=2;t=40, \"streams\";r=1",
            "\"tokens\";r=1;t=20, \"streams\";r=0",
            "\"tokens\";r=1;t=20, \"streams\";r=0",
        ];
        assert_eq!(fields(&policies, 3), expected);
        let texts = Texts::new(&policies);
        assert_eq!(
            texts.policy_field,
            "\"tokens\";q=3;w=60, \"streams\";q=2;qu=\"concurrent-requests\""
        );
        let quotas = texts.each.iter().map(|each| &*each.quota);
        assert!(quotas.eq(["3 per minute", "2 concurrent requests"]));
    }

    #[test]
    fn a_calendar_has_the_rest_of_its_window() {
        let months = "fixed-window(month)".parse().unwrap();
        let policy = Policy::new("plan", months, Quota::per_month(2)).unwrap();
        let policies = Policies::from(policy);
        // From November 14, 2023, 22:13:20.
        let rest = 16 * 86_400 + 6_400;
        assert_eq!(
            fields(&policies, 3),
            [
                format!("\"plan\";r=1;t={rest}"),
                format!("\"plan\";r=0;t={rest}"),
                format!("\"plan\";r=0;t={rest}"),
            ]
        );
        let peek = Check::peek(Key::GLOBAL, &policies, 1);
        let mut states = vec![crate::limit::State::fresh(policies[0].kind())];
        let mut unused = peek.decide(&mut states, 1_700_000_000_000_000);
        unused.at = 1_700_000_000_000_000;
        let texts = Texts::new(&policies);
        assert_eq!(
            texts.rate_limit(&peek.clone().answer(unused.clone(), Source::Local)),
            format!("\"plan\";r=2;t={rest}")
        );
        unused.ahead = 7_000_000;
        assert_eq!(
            texts.rate_limit(&peek.clone().answer(unused, Source::Local)),
            format!("\"plan\";r=2;t={}", rest - 7)
        );
        // A custom store reports no time: the own clock has the month.
        let own = || {
            let calendar = policies[0].params().calendar.unwrap();
            calendar.rest(crate::util::unix_time().as_micros() as i64) / 1_000_000
        };
        let before = own();
        let untimed = peek.decided(Source::Other("test"), 0, |_| Verdict::allowed());
        let field = texts.rate_limit(&untimed);
        let (_, shown) = field.to_str().unwrap().split_once("r=2;t=").unwrap();
        let shown: i64 = shown.parse().unwrap();
        assert!([before, own()].iter().any(|own| own.abs_diff(shown) <= 1));
        assert_eq!(texts.policy_field, "\"plan\";q=2");
        assert_eq!(texts.each[0].quota, "2 per month");
    }

    /// The store uses a period of 1.1 seconds, so `t` follows that period.
    #[test]
    fn a_leased_quota_is_as_written() {
        let policy = Policy::new("api", Strategy::SlidingLog, Quota::per_second(2)).unwrap();
        let policies = policy.leased(Duration::from_millis(100)).unwrap().into();
        let texts = Texts::new(&policies);
        assert_eq!(
            (texts.policy_field, &*texts.each[0].quota),
            (HeaderValue::from_static("\"api\";q=2;w=1"), "2 per second")
        );
        assert_eq!(
            fields(&policies, 3),
            ["\"api\";r=1;t=2", "\"api\";r=0;t=2", "\"api\";r=0;t=2"]
        );
    }

    #[test]
    fn several_policies_are_one_list() {
        let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota).unwrap();
        let policies = Policies::new([
            policy("burst", Quota::per(5, Duration::from_millis(300))),
            policy("daily", Quota::per_day(86_400)),
        ])
        .unwrap();
        assert_eq!(
            fields(&policies, 1),
            ["\"burst\";r=4;t=1, \"daily\";r=86399;t=86399"]
        );
        let mut headers = HeaderMap::new();
        let mut states: Vec<_> = policies
            .iter()
            .map(|p| crate::limit::State::fresh(p.kind()))
            .collect();
        let check = Check::take(Key::GLOBAL, &policies, 1);
        let verdicts = check.decide(&mut states, 0);
        append_draft(&mut headers, &check.answer(verdicts, Source::Local));
        assert_eq!(
            headers["ratelimit-policy"],
            "\"burst\";q=16;w=1, \"daily\";q=86400;w=86400"
        );
    }

    #[test]
    fn a_policy_announces_its_rate() {
        for (quota, expected) in [
            ("1/100ms burst 20", (10, 1)),
            ("1/500ms", (2, 1)),
            ("2/3ms", (666, 1)),
            ("10/1500ms", (13, 2)),
            ("1/1500ms", (1, 2)),
            ("10/s burst 5", (10, 1)),
            ("3/90s", (3, 90)),
            ("4294967295/us", (999_999_999_999_999, 1)),
            ("4294967295/366d", (4_294_967_295, 31_622_400)),
        ] {
            assert_eq!(per_seconds(quota.parse().unwrap()), expected, "{quota}");
        }
    }

    #[test]
    fn seconds_round_up() {
        for (millis, expected) in [
            (0, 1),
            (1, 1),
            (900, 1),
            (1_000, 1),
            (1_001, 2),
            (59_999, 60),
        ] {
            assert_eq!(retry_after(Duration::from_millis(millis)), expected);
        }
    }
}
