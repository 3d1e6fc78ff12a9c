use http::{HeaderMap, HeaderName};

use super::number;
use crate::limit::{Decision, words};
use crate::util::unix_time;

/// Three header fields of one policy, for clients that do not read the `RateLimit` field: its
/// limit, the remaining units, and the time at which the whole limit is available again.
///
/// The styles look similar, but `Reset` has different meanings. Choose the style that your clients
/// read:
///
/// | form | fields | `Reset` |
/// |---|---|---|
/// | [`GitHub`](Self::GitHub) | `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset` | a Unix time in seconds: `1700000060` |
/// | [`XSeconds`](Self::XSeconds) | the same names | seconds from now: `60` |
/// | [`Draft6`](Self::Draft6) | `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` | seconds from now: `60` |
///
/// A client that reads seconds as a Unix time never waits; one that reads a Unix time as seconds
/// waits for decades. `Reset` is rounded up. A Unix time is that of this server's clock: a client
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
/// As text: `github`, `x-seconds`, `draft-6`.
#[doc(alias = "X-RateLimit-Remaining")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LegacyHeaders {
    /// As in GitHub's API: `X-` names, and a Unix time.
    GitHub,
    /// As in many gateways: `X-` names, and the remaining seconds.
    XSeconds,
    /// As in the IETF's draft up to draft-ietf-httpapi-ratelimit-headers-06: the remaining seconds.
    /// (GitLab uses these names with a Unix time.)
    Draft6,
}

words!(LegacyHeaders, "style of legacy header fields":
    GitHub = "github", XSeconds = "x-seconds", Draft6 = "draft-6");

impl LegacyHeaders {
    /// The names of `Limit`, `Remaining` and `Reset`.
    const fn names(self) -> [HeaderName; 3] {
        match self {
            Self::GitHub | Self::XSeconds => [
                HeaderName::from_static("x-ratelimit-limit"),
                HeaderName::from_static("x-ratelimit-remaining"),
                HeaderName::from_static("x-ratelimit-reset"),
            ],
            Self::Draft6 => [
                HeaderName::from_static("ratelimit-limit"),
                HeaderName::from_static("ratelimit-remaining"),
                HeaderName::from_static("ratelimit-reset"),
            ],
        }
    }

    /// Sets the fields, unless the existing ones are tighter, or the decision shows no quota.
    pub(super) fn set(self, headers: &mut HeaderMap, decision: &Decision) {
        if !decision.policy().is_shown() {
            return;
        }
        let reset = decision.reset_after();
        let reset = match self {
            Self::GitHub => unix_time().saturating_add(reset),
            Self::XSeconds | Self::Draft6 => reset,
        };
        let reset = reset.as_secs() + u64::from(reset.subsec_nanos() > 0);
        let remaining = u64::from(decision.remaining());
        let names = self.names();
        if let (Some(there), Some(until)) =
            (existing(headers, &names[1]), existing(headers, &names[2]))
        {
            let tighter = there < remaining || there == remaining && until >= reset;
            if tighter && decision.is_allowed() {
                return;
            }
        }
        for (name, value) in
            names
                .into_iter()
                .zip([u64::from(decision.capacity()), remaining, reset])
        {
            headers.insert(name, number(value));
        }
    }
}

/// Parses the number in a field. `None` for other text, which this crate does not write.
fn existing(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}
