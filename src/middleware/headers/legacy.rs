use http::{HeaderMap, HeaderName};

use super::draft::number;
use crate::limit::Decision;
use crate::util::unix_time;

/// Three header fields of one policy, for clients older than the `RateLimit` field: its limit, what remains, and when
/// the whole limit is available again.
///
/// They look alike and mean different times. Choose the form that your clients read:
///
/// | form | fields | `Reset` |
/// |---|---|---|
/// | [`GitHub`](Self::GitHub) | `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset` | at this Unix time, in seconds: `1700000060` |
/// | [`XSeconds`](Self::XSeconds) | the same names | in so many seconds: `60` |
/// | [`Draft6`](Self::Draft6) | `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` | in so many seconds: `60` |
///
/// A client that reads seconds as a Unix time never waits, and one that reads a Unix time as seconds waits for decades.
/// `Reset` is rounded up. A Unix time is that of this server's clock: clients whose clocks differ wait for too long, or
/// too short a time.
///
/// - `Limit` is the [capacity](Decision::capacity) of the policy, so that no more remains than that: `50/s burst 100`
///   has 100.
/// - `Remaining` is [what would pass now](Decision::remaining).
/// - `Reset` is [when nothing is charged any more](Decision::reset_after). A quota that refills gradually has a part of
///   it earlier: `Retry-After` tells a denied client when.
///
/// The fields are of the tightest policy: the one that [decided](Decision::policy). Of nested layers, that of the layer
/// that denied, so that there is no legacy header if that one adds none; otherwise the one with the least remaining,
/// and of two equal ones, the one with the later reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LegacyHeaders {
    /// As GitHub's API has them: `X-` and a Unix time.
    GitHub,
    /// `X-` and seconds to go, as many gateways have it.
    XSeconds,
    /// As the IETF's draft had it up to draft-ietf-httpapi-ratelimit-headers-06: seconds to go. (GitLab has these names
    /// with a Unix time.)
    Draft6,
}

impl LegacyHeaders {
    /// `Limit`, `Remaining` and `Reset`.
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

    /// Sets the fields, unless existing ones are tighter.
    pub(super) fn set(self, headers: &mut HeaderMap, decision: &Decision) {
        let reset = decision.reset_after();
        let reset = match self {
            Self::GitHub => unix_time().saturating_add(reset),
            Self::XSeconds | Self::Draft6 => reset,
        };
        let reset = reset.as_secs() + u64::from(reset.subsec_nanos() > 0);
        let remaining = u64::from(decision.remaining());
        let names = self.names();
        if let (Some(there), Some(until)) = (told(headers, &names[1]), told(headers, &names[2])) {
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

/// The number in a field. `None` also for other text, which this crate does not write.
fn told(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}
