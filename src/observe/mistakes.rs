//! The misconfigurations that the crate reports. Each message ends with its code and a link to the section of
//! `docs/pitfalls.md` about it. Codes must not change, because searches and alerts use them.

macro_rules! mistakes {
    ($($(#[$attribute:meta])* $name:ident = $code:literal,)+) => {
        $($(#[$attribute])* pub(crate) const $name: &str = concat!(
            " (", $code, ": https://docs.rs/tower-redis-ratelimit/latest/tower_redis_ratelimit/guide/pitfalls/index.html#",
            $code, ")"
        );)+

        const CODES: &[&str] = &[$($code),+];
    };
}

mistakes! {
    NO_PEER_ADDRESS = "no-peer-address",
    NO_EXTENSION = "no-extension",
    #[cfg_attr(not(any(feature = "axum", test)), expect(dead_code))]
    NO_CHARGE = "no-charge",
    COUNTED_TWICE = "counted-twice",
    IN_FLIGHT_WITHOUT_END = "in-flight-without-end",
    IN_FLIGHT_IN_THROTTLE = "in-flight-in-throttle",
    NOT_LEASED = "not-leased",
    SHORT_LEASE = "short-lease",
    MISSING_RIGHT = "missing-right",
    ONE_NAME_TWO_QUOTAS = "one-name-two-quotas",
    NEVER_PASSES = "never-passes",
    UNKNOWN_TIER = "unknown-tier",
    ALWAYS_SECOND_KEY = "always-second-key",
    NO_TIER = "no-tier",
    UNKNOWN_PROXY = "unknown-proxy",
    #[cfg_attr(not(feature = "tracing"), expect(dead_code))]
    RUNTIME_LATE = "runtime-late",
    OTHER_FALLBACK = "other-fallback",
    NARROW_NETWORK = "narrow-network",
    CALLER_FORM = "caller-form",
    NO_ROUTE = "no-route",
    DENIED_WITH_SUCCESS = "denied-with-success",
    CALL_WITHOUT_READY = "call-without-ready",
    SMALL_SHARE = "small-share",
    GRPC_OVER_HTTP = "grpc-over-http",
    NO_COST = "no-cost",
    PROXY_HEADER = "proxy-header",
    NESTED_PATTERN = "nested-pattern",
    UPGRADE_WITHOUT_COST = "upgrade-without-cost",
    CONSTANT_ID = "constant-id",
    UNENFORCED_BLOCK = "unenforced-block",
}

/// Returns the code that a message ends with.
pub(super) fn code(problem: &str) -> Option<&'static str> {
    let (_, last) = problem.strip_suffix(')')?.rsplit_once('#')?;
    CODES.iter().copied().find(|code| *code == last)
}

#[cfg(test)]
mod tests {
    use super::{CODES, NO_CHARGE, NO_PEER_ADDRESS, code};

    #[test]
    fn a_message_ends_with_its_code() {
        let codes =
            [NO_PEER_ADDRESS, NO_CHARGE].map(|end| code(&format!("no address: add it{end}")));
        assert_eq!(codes, [Some("no-peer-address"), Some("no-charge")]);
        let others = [
            "no address",
            "no address (#no-charge",
            "(https://host/#other)",
        ]
        .map(code);
        assert_eq!(others, [None; 3]);
    }

    #[test]
    fn each_code_has_its_section() {
        let page = include_str!("../../docs/pitfalls.md");
        let paragraphs: Vec<_> = page
            .lines()
            .filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'))
            .collect();
        assert_eq!(paragraphs, CODES);
    }
}
