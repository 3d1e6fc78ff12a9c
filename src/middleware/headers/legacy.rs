use http::{HeaderMap, HeaderName};

use super::number;
use crate::limit::{Decision, words};
use crate::util::unix_time;

/// Three header fields of one policy: see [`Headers`](super::Headers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum LegacyStyle {
    GitHub,
    XSeconds,
    Draft6,
}

words!(LegacyStyle, "style of legacy header fields":
    GitHub = "github", XSeconds = "x-seconds", Draft6 = "draft-6");

impl LegacyStyle {
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
