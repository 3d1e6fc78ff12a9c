use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{Quota, Strategy};

/// A mistake in what the limiter was asked to be: a quota, a policy, a Redis URL.
///
/// Every variant names the value that was refused, and its text says what to write instead.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A limit, a burst, a size or a duration of zero where at least one unit is needed: what of.
    Zero(&'static str),
    /// A period shorter than a microsecond, not a whole number of microseconds, or longer than 366 days.
    Period(Duration),
    /// Refilling the whole burst would take more than ten years.
    BurstTooSlow {
        /// The burst asked for.
        burst: u32,
        /// How long it would take to refill.
        refill: Duration,
    },
    /// A burst given to a strategy whose burst is its limit.
    BurstOfWindow {
        /// The burst asked for.
        burst: u32,
        /// The limit of the same quota.
        limit: u32,
    },
    /// A sliding window cut into no cells, or into too many.
    Cells(u16),
    /// A limit above 100,000 for a sliding log, which keeps every charge.
    LogTooLong(u32),
    /// A quota that cannot be one of requests in flight.
    InFlight {
        /// The quota.
        quota: Quota,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Text that is no quota.
    QuotaSyntax {
        /// The text as it was given.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Text that is no strategy.
    StrategySyntax {
        /// The text as it was given.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Text that is no duration.
    DurationSyntax {
        /// The text as it was given.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Text that is none of the values that there are.
    Choice {
        /// What the value is of.
        what: &'static str,
        /// The text as it was given.
        text: String,
        /// The values that there are.
        choices: &'static str,
    },
    /// A policy name that is empty, too long, or has a character that keys and headers cannot carry.
    PolicyName(String),
    /// A key prefix that is empty, too long, or has a character that keys cannot carry.
    Prefix(String),
    /// No policy at all.
    NoPolicy,
    /// More policies than one check may have.
    TooManyPolicies(usize),
    /// Two policies of one check with the same name.
    DuplicatePolicy(String),
    /// A pattern of [`Routes`](crate::select::Routes) that is none, or that another one is like.
    Route {
        /// The pattern as it was given.
        pattern: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Text that names no proxies to [trust](crate::extract::ClientIpBuilder::trust), or all addresses.
    TrustedNetwork {
        /// The text as it was given.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Text that is no name of a header.
    HeaderName(String),
    /// An IPv6 prefix of 0 bits, or of more than 128.
    Ipv6Prefix(u8),
    /// A Redis URL that cannot be read. The URL itself is left out, since it may hold a password.
    RedisUrl(String),
    /// A Redis URL that asks for TLS, or settings for it, in a build without it.
    NoTls,
    /// Certificates, or what goes with them, that cannot be used.
    Certificate {
        /// Which.
        what: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A file that settings name, and that cannot be read.
    File {
        /// The setting.
        setting: &'static str,
        /// What it names.
        path: PathBuf,
        /// Why it cannot be read.
        problem: String,
    },
    /// A deadline of a [`Fallback`](crate::Fallback) below a millisecond.
    Deadline(Duration),
    /// A setting without the one that goes with it.
    Unpaired {
        /// The one that is set.
        setting: &'static str,
        /// The one that is not.
        without: &'static str,
    },
    /// A name that no server's certificate can have.
    ServerName(String),
    /// Something is set for TLS, and no URL asks for it.
    TlsUnused,
    /// A name of a master that the sentinels do not know.
    NoMaster(String),
    /// A server that is no Redis Sentinel, in the place of one: its address.
    NoSentinel(String),
    /// A server that is no node of a Redis Cluster, in the place of one: its address.
    NoCluster(String),
    /// More than 1,024 partitions.
    TooManyPartitions(usize),
    /// Another number of partitions than other stores have in the same Redis Cluster under the same prefix.
    Partitions {
        /// The number of this store.
        ours: usize,
        /// The number of the others.
        theirs: usize,
        /// The prefix that they share.
        prefix: String,
    },
}

impl ConfigError {
    pub(crate) fn choice(what: &'static str, text: &str, choices: &'static str) -> Self {
        Self::Choice { what, text: redacted(text).chars().take(80).collect(), choices }
    }
}

/// Without what follows `secret:`, which is the text form of a key. In any case, and also where blanks or what is in front
/// keep it from being one.
fn redacted(text: &str) -> Cow<'_, str> {
    let lower = text.to_ascii_lowercase();
    let colon = lower.find("secret").and_then(|secret| Some(secret + lower[secret..].find(':')?));
    match colon {
        Some(colon) if colon + 1 < text.len() => format!("{}\u{2026}", &text[..=colon]).into(),
        _ => text.into(),
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero(what) => write!(f, "{what} is 0: it must be at least 1"),
            Self::Period(period) => write!(
                f,
                "a quota's period is {period:?}: it must be a whole number of microseconds, from 1 us to 366 days"
            ),
            Self::BurstTooSlow { burst, refill } => write!(
                f,
                "a burst of {burst} would take {} days to refill: lower the burst or raise the rate so that it takes at most 3650",
                refill.as_secs() / 86_400
            ),
            Self::BurstOfWindow { burst, limit } => write!(
                f,
                "a burst of {burst} on a window of {limit}: a window's burst is its limit, so leave the burst out, \
                 or choose a strategy that has one, such as GCRA"
            ),
            Self::Cells(cells) => write!(f, "a sliding window of {cells} cells: cut it into 1 to 1000"),
            Self::LogTooLong(limit) => write!(
                f,
                "a limit of {limit} for a sliding log, which keeps every charge: it must be at most 100000, \
                 or choose a sliding window"
            ),
            Self::InFlight { quota, problem } => write!(
                f,
                "a quota of {quota} for requests in flight ({problem}): write how many at once and the lease time, like `10/30s`"
            ),
            Self::QuotaSyntax { text, problem } => {
                write!(f, "{text:?} is no quota: {problem}; write it like `100/s`, `10/60s` or `1000/h burst 50`")
            }
            Self::StrategySyntax { text, problem } => {
                write!(f, "{text:?} is no strategy: {problem}; write ")?;
                Strategy::ALL.iter().try_for_each(|strategy| write!(f, "`{strategy}`, "))?;
                f.write_str("or in a policy `in-flight`")
            }

            Self::DurationSyntax { text, problem } => {
                write!(f, "{text:?} is no duration: {problem}; write it like `250ms`, `2s` or `15m`")
            }
            Self::Choice { what, text, choices } => write!(f, "{text:?} is no {what}: write {choices}"),
            Self::PolicyName(name) => {
                write!(f, "{name:?} is no policy name: use 1 to 64 ASCII letters, digits, `-`, `_`, `.` or `/`")
            }
            Self::Prefix(prefix) => {
                write!(f, "{prefix:?} is no key prefix: use 1 to 64 ASCII letters, digits, `-`, `_`, `.`, `/` or `:`")
            }
            Self::NoPolicy => f.write_str("no policy given: a check needs at least one"),
            Self::TooManyPolicies(count) => {
                write!(f, "{count} policies for one check: at most {} fit", super::Policies::MAX)
            }
            Self::DuplicatePolicy(name) => {
                write!(f, "two policies are named {name:?}: give each a name of its own, since it is part of the key")
            }
            Self::Route { pattern, problem } => write!(
                f,
                "the route {pattern:?} cannot be used ({problem}): write it like `/users/{{id}}` or `/files/{{*path}}`, \
                 and each once"
            ),
            Self::TrustedNetwork { text, problem } => write!(
                f,
                "{text:?} cannot be trusted: {problem}; write the proxies' network like `203.0.113.0/24`, an address, \
                 `private`, `loopback` or `unix`, or trust a number of hops"
            ),
            Self::HeaderName(name) => {
                write!(f, "{name:?} is no name of a header: use letters, digits and `-`, such as `x-real-ip`")
            }
            Self::Ipv6Prefix(bits) => {
                write!(f, "an IPv6 prefix of {bits} bits: it must be from 1 to 128, such as 64, which one host owns")
            }
            Self::RedisUrl(problem) => {
                write!(f, "the Redis URL cannot be used: {problem}; write it like `redis://:password@host:6379/0`")
            }
            Self::NoTls => f.write_str(
                "TLS is asked for, and is not built in: turn on the feature `tls` of tower-redis-ratelimit",
            ),
            Self::Certificate { what, problem } => {
                write!(f, "the {what} cannot be used: {problem}; give it in PEM, which begins with `-----BEGIN`")
            }
            Self::File { setting, path, problem } => write!(
                f,
                "the file {path:?} of `{setting}` cannot be read: {problem}; write the path of a file that this process may read"
            ),
            Self::Deadline(deadline) => write!(
                f,
                "a deadline of {deadline:?} for Redis: it must be at least 1 ms, or no answer is in time; 100 ms suit most"
            ),
            Self::Unpaired { setting, without } => write!(f, "`{setting}` is set without `{without}`: set both or neither"),
            Self::ServerName(name) => {
                write!(f, "{name:?} is no server's name: write one such as `redis.example`, or an IP address")
            }
            Self::TlsUnused => f.write_str(
                "certificates or a server name are set, but the Redis URL does not ask for TLS: write `rediss://` instead of \
                 `redis://`, or leave them out",
            ),
            Self::NoMaster(name) => write!(
                f,
                "the sentinels know no master named {name:?}: write the name that `sentinel monitor` has in their configuration"
            ),
            Self::NoSentinel(address) => write!(
                f,
                "the server {address} is no Redis Sentinel: write the sentinel's port, mostly 26379; or for a Redis without \
                 sentinels, `redis://host:6379`"
            ),
            Self::NoCluster(address) => write!(
                f,
                "the server {address} is no node of a Redis Cluster: write `redis://` instead of `redis+cluster://`, or connect \
                 with `RedisStore::connect`"
            ),
            Self::TooManyPartitions(partitions) => write!(f, "{partitions} partitions: at most 1024 can be had"),
            Self::Partitions { ours, theirs, prefix } => write!(
                f,
                "this store has {ours} partitions, and others have {theirs} under the prefix {prefix:?} in the same cluster, so that \
                 neither would see the other's counts: give all the same number, or this one a prefix of its own"
            ),
        }
    }
}

impl std::error::Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is wrong, a colon, and then what to do.
    #[test]
    fn every_text_says_what_to_do() {
        use ConfigError::*;
        let name = || "a b".to_owned();
        let all = [
            Zero("a quota's limit"),
            Period(Duration::ZERO),
            BurstTooSlow { burst: 1, refill: Duration::MAX },
            BurstOfWindow { burst: 1, limit: 2 },
            Cells(0),
            LogTooLong(100_001),
            InFlight { quota: Quota::per_day(1), problem: "too long" },
            QuotaSyntax { text: name(), problem: "it has no slash" },
            StrategySyntax { text: name(), problem: "it has no name" },
            DurationSyntax { text: name(), problem: "it has no unit" },
            Choice { what: "color", text: name(), choices: "`red` or `blue`" },
            PolicyName(name()),
            Prefix(name()),
            NoPolicy,
            TooManyPolicies(100),
            DuplicatePolicy(name()),
            Route { pattern: name(), problem: name() },
            TrustedNetwork { text: name(), problem: "it is none" },
            HeaderName(name()),
            Ipv6Prefix(0),
            RedisUrl(name()),
            NoTls,
            File { setting: "client_key", path: name().into(), problem: "there is none".to_owned() },
            Unpaired { setting: "client_key", without: "client_certificate" },
            Deadline(Duration::from_nanos(1)),
            NoCluster(name()),
            TooManyPartitions(2_000),
            Partitions { ours: 32, theirs: 64, prefix: name() },
        ];
        for error in all {
            let text = error.to_string();
            let (what, advice) = text.split_once(": ").expect(&text);
            assert!(what.len() > 5 && advice.len() > 5, "{text}");
        }
    }
}
