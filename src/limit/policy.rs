use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::strategy::{Frees, Params};
use super::{Kind, Quota, Strategy, in_flight, span};
use crate::error::ConfigError;

/// A named limit: a strategy and a quota.
///
/// The name is part of Redis keys and headers, and so is what the count is about, its span. For
/// [`FixedWindow`](Strategy::FixedWindow), [`SlidingLog`](Strategy::SlidingLog),
/// [`SlidingWindow`](Strategy::SlidingWindow) and [`SlidingCounter`](Strategy::SlidingCounter) that is the period, with
/// the alignment or the cells: two policies that differ in the limit alone share a count, and each compares it with its own
/// limit. For the buckets, which are [`Gcra`](Strategy::Gcra), [`TokenBucket`](Strategy::TokenBucket) and
/// [`LeakyBucket`](Strategy::LeakyBucket), the span is the whole quota. Policies of different spans count independently,
/// as in a rolling deploy that changes a quota: a caller of both gets at most their sum. Limits that apply together in one
/// check, such as one per minute and one per hour, need different names. A clone is the same policy.
///
/// With the feature `serde` it is a table of text: `{ name = "api", strategy = "gcra", quota = "100/s burst 200"
/// }`. Without a strategy it is [`Strategy::Gcra`]. [`Policies`](super::Policies) are a list of these, or one.
///
/// ```
/// use tower_redis_ratelimit::{Policy, Quota, Strategy};
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50).burst(100))?;
/// assert_eq!(policy.name(), "api");
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

/// Default time to live of the slots of requests in flight.
const SLOT_TTL: Duration = Duration::from_secs(30);
/// Below that a block hardly saves a call.
const SHORTEST_LEASE: Duration = Duration::from_millis(10);

struct Inner {
    name: Box<str>,
    kind: Kind,
    quota: Quota,
    params: Params,
    /// The quota before it was [leased](Policy::leased), and for how long blocks are.
    lease: Option<(Quota, Duration)>,
    /// The policy of which this is the share of an instance.
    whole: Option<Policy>,
    /// The span as it stands in keys.
    span: Box<str>,
    /// Identifies the count in a process, by the name, the letter of the kind in keys, and the span.
    id: u64,
}

impl Policy {
    /// A policy of this name.
    ///
    /// # Errors
    ///
    /// For a name that is empty, longer than 64 bytes, or has a character other than ASCII letters, digits, `-`, `_`, `.`
    /// and `/`; for a quota that is not [valid](Quota::is_valid), has a burst where the strategy has none, or a limit
    /// above 100,000 for a [`Strategy::SlidingLog`]; for a [`Strategy::SlidingWindow`] of 0 or more than 1000 cells.
    pub fn new(name: &str, strategy: Strategy, quota: Quota) -> Result<Self, ConfigError> {
        Self::of_kind(name, strategy.into(), quota)
    }

    pub(crate) fn of_kind(name: &str, kind: Kind, quota: Quota) -> Result<Self, ConfigError> {
        check_name(name)?;
        quota.check()?;
        if kind == Kind::InFlight {
            in_flight::check(quota)?;
        }
        Ok(Self::with_params(
            name,
            kind,
            quota,
            Params::new(kind, quota)?,
        ))
    }

    /// At most `limit` requests of a caller at the same moment, over all instances: from 1 to 1,000,000. Each counts
    /// until it is released, as one, whatever its cost, so that this can be combined with a policy that counts bytes or
    /// tokens.
    ///
    /// Each request has a slot, which expires after its [time to live](Self::slot_ttl), the quota's period: so the
    /// slots of a dead instance are free again. A layer renews the slots of longer requests every third of that time.
    /// A request may end at any time, so [`Decision::retry_after`](super::Decision::retry_after) is a fixed 100 ms.
    ///
    /// It works like semaphores whose permits expire, such as Redisson's `RPermitExpirableSemaphore`. As text it is a
    /// policy with the strategy `in-flight` and a quota of the limit and the slots' time to live, such as `10/30s`.
    ///
    /// A [`RateLimitLayer`](crate::RateLimitLayer) needs [`until_body_end`](crate::RateLimitLayer::until_body_end) or
    /// [`settle`](crate::RateLimitLayer::settle), to know when a request ends.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::Policy;
    ///
    /// let uploads = Policy::in_flight("uploads", 10)?;
    /// let calls = Policy::in_flight("calls", 10)?.slot_ttl(Duration::from_secs(5))?;
    /// assert_eq!((uploads.quota().limit(), calls.quota().to_string()), (10, "10/5s".to_owned()));
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// For a name that [`new`](Self::new) refuses, and for another limit.
    pub fn in_flight(name: &str, limit: u32) -> Result<Self, ConfigError> {
        Self::of_kind(name, Kind::InFlight, Quota::per(limit, SLOT_TTL))
    }

    /// Sets the time to live of the slots of requests [in flight](Self::in_flight), from 1 second to 1 hour. Defaults
    /// to 30 seconds. A policy of another kind is not changed.
    ///
    /// # Errors
    ///
    /// For a time to live that is too short or too long.
    pub fn slot_ttl(self, time: Duration) -> Result<Self, ConfigError> {
        match self.is_in_flight() {
            true => Self::of_kind(
                self.name(),
                Kind::InFlight,
                Quota::per(self.quota().limit(), time),
            ),
            false => Ok(self),
        }
    }

    /// The same policy for a [`Leased`](crate::Leased) store, which charges a block ahead and spends it within `time`, the
    /// lease time, which is short:
    /// from 10 ms to half of the time in which the burst refills, or to half of the period where there is no burst. All
    /// instances must lease for the same time, since they count by what this changes.
    ///
    /// What is spent at one moment may have been charged a lease time before. So that no more is ever spent than the
    /// quota allows, this makes the [`quota`](Self::quota) tighter:
    ///
    /// - [`Gcra`](Strategy::Gcra), [`LeakyBucket`](Strategy::LeakyBucket) and a
    ///   [`TokenBucket`](Strategy::TokenBucket) that refills greedily: the burst is lowered by what refills in that
    ///   time. The rate stays.
    /// - [`SlidingLog`](Strategy::SlidingLog), [`SlidingWindow`](Strategy::SlidingWindow),
    ///   [`SlidingCounter`](Strategy::SlidingCounter), and a token bucket that refills by the interval: the period is
    ///   longer by that time.
    /// - [`FixedWindow`](Strategy::FixedWindow): nothing changes, since a block ends with its window.
    ///
    /// Stores count by that. Header fields and messages state the quota as it was before, and as text it is
    /// `leased = "100ms"` beside that quota, in the table of the policy.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
    ///
    /// let time = Duration::from_millis(100);
    /// let bucket = Policy::new("api", Strategy::Gcra, Quota::per_second(1_000))?.leased(time)?;
    /// let log = Policy::new("api", Strategy::SlidingLog, Quota::per_second(1_000))?.leased(time)?;
    /// assert_eq!(bucket.quota().to_string(), "1000/s burst 900");
    /// assert_eq!(log.quota().to_string(), "1000/1100ms");
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// For a time that is too short or too long, or not a whole number of microseconds, and for a policy of requests
    /// [in flight](Self::in_flight).
    pub fn leased(self, time: Duration) -> Result<Self, ConfigError> {
        if self.is_in_flight() {
            let text = format!(
                "{self:?} is leased: leave that out, since requests in flight are never charged ahead"
            );
            return Err(ConfigError::new(text));
        }
        let stated = self.stated();
        let is_gradual = self.frees().is_gradual();
        let longest = match is_gradual {
            true => stated.time_for(stated.capacity().into()) / 2,
            false => stated.period() / 2,
        };
        let is_whole = time.subsec_nanos().is_multiple_of(1_000);
        let is_small = longest < SHORTEST_LEASE
            || is_gradual && stated.units_in(time.min(longest)) >= stated.capacity();
        if is_small || !is_whole || !(SHORTEST_LEASE..=longest).contains(&time) {
            let larger = if is_gradual { "burst" } else { "period" };
            let text = match is_small {
                true => format!("raise the {larger}, or leave the lease out"),
                false => {
                    format!(
                        "use whole microseconds from {SHORTEST_LEASE:?} to {longest:?}, or raise the {larger}"
                    )
                }
            };
            return Err(ConfigError::new(format!(
                "a lease of {time:?} of the quota `{stated}`: {text}"
            )));
        }
        let quota = match self.frees() {
            Frees::Gradually => stated.burst(stated.capacity() - stated.units_in(time)),
            Frees::InBatches | Frees::OneByOne | Frees::Fading => {
                stated.with_period(stated.period() + time)
            }
            Frees::WithWindow
                if matches!(self.strategy(), Some(Strategy::SlidingWindow { .. })) =>
            {
                stated.with_period(stated.period() + time)
            }
            Frees::WithWindow | Frees::OnRelease => stated,
        };
        let mut leased = Self::of_kind(self.name(), self.kind(), quota)?;
        if let Some(inner) = Arc::get_mut(&mut leased.0) {
            inner.lease = Some((stated, time));
        }
        Ok(leased)
    }

    /// The quota as it was before the policy was leased, for people to read.
    pub(crate) fn stated(&self) -> Quota {
        self.0.lease.map_or(self.0.quota, |(stated, _)| stated)
    }

    /// For how long it is [leased](Self::leased), if it is.
    pub(crate) fn lease(&self) -> Option<Duration> {
        self.0.lease.map(|(_, time)| time)
    }

    /// A policy of the crate itself, known to be valid.
    pub(super) fn known(name: &str, kind: Kind, quota: Quota) -> Self {
        let params =
            Params::new(kind, quota).unwrap_or_else(|_| unreachable!("the quota is a good one"));
        Self::with_params(name, kind, quota, params)
    }

    fn with_params(name: &str, kind: Kind, quota: Quota, params: Params) -> Self {
        let (span, mut hasher) = (span::of(kind, quota).into_boxed_str(), DefaultHasher::new());
        (name, kind.letter(), &span).hash(&mut hasher);
        let (name, id) = (name.into(), hasher.finish());
        Self(Arc::new(Inner {
            name,
            kind,
            quota,
            params,
            lease: None,
            whole: None,
            span,
            id,
        }))
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How it is counted. `None` if it counts requests [in flight](Self::in_flight).
    pub fn strategy(&self) -> Option<Strategy> {
        match self.0.kind {
            Kind::Rate(strategy) => Some(strategy),
            Kind::InFlight => None,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Whether it counts requests in flight, and not what is charged over time.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.0.kind == Kind::InFlight
    }

    /// How what it counts is freed again.
    pub(crate) fn frees(&self) -> Frees {
        self.0.params.frees
    }

    /// Whether a request of this cost never passes.
    pub(crate) fn never_fits(&self, cost: u32) -> bool {
        !self.is_in_flight() && self.quota().capacity() < cost
    }

    /// The quota that stores count by: that of a [leased](Self::leased) policy is tighter than it was before.
    pub fn quota(&self) -> Quota {
        self.0.quota
    }

    /// The share of one of so many instances, which together grant no more than this policy: limit and burst are
    /// rounded down, but at least 1. The rate of a strategy that refills gradually is divided exactly.
    pub(crate) fn share(&self, instances: NonZeroU32) -> Self {
        let part = |whole: u32| (whole / instances).max(1);
        let Inner {
            name, kind, quota, ..
        } = &*self.0;
        let burst = part(quota.capacity());
        let by_limit = Quota::per(part(quota.limit()), quota.period()).burst(burst);
        let by_period = Quota::per(
            quota.limit(),
            quota.period().saturating_mul(instances.get()),
        )
        .burst(burst);
        let by_period = Some(by_period).filter(|_| self.frees().is_gradual());
        let part = by_period
            .into_iter()
            .chain([by_limit])
            .find_map(|part| Self::of_kind(name, *kind, part).ok());
        part.map_or_else(|| self.clone(), |part| part.of(self.clone(), instances))
    }

    /// The same policy as a share of another, whose count it goes on with.
    fn of(mut self, whole: Self, instances: NonZeroU32) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.params = inner.params.share_of(whole.params(), instances);
            (inner.span, inner.id) = (whole.0.span.clone(), whole.0.id);
            inner.whole = Some(whole);
        }
        self
    }

    /// How long a charge counts at the longest, in microseconds: with a burst, until a full count has flowed back.
    pub(crate) fn counts_for(&self) -> i64 {
        let periods = match self.frees() {
            Frees::Gradually | Frees::InBatches => self
                .quota()
                .capacity()
                .div_ceil(self.quota().limit().max(1)),
            Frees::Fading => 2,
            Frees::WithWindow | Frees::OneByOne | Frees::OnRelease => 1,
        };
        self.params().period.saturating_mul(periods.into())
    }

    /// The policy of which it is a share, or itself.
    pub(crate) fn whole(&self) -> &Self {
        self.0.whole.as_ref().unwrap_or(self)
    }

    pub(crate) fn params(&self) -> &Params {
        &self.0.params
    }

    /// The span of its count, as it stands in keys; empty for requests in flight.
    pub(crate) fn span(&self) -> &str {
        &self.0.span
    }

    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// The policy of a key that has these letters after the name. The limit of a window is not known, and 1 here.
    pub(crate) fn of_key(name: &str, letter: &str, span: &str) -> Option<Self> {
        let (kind, quota) = span::read(letter, span)?;
        Self::of_kind(name, kind, quota).ok()
    }

    /// Where it is in memory: that of its clones too.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), ConfigError> {
    let fix = "use 1 to 64 ASCII letters, digits, `-`, `_`, `.` or `/`";
    if is_name(name, b"-_./") {
        Ok(())
    } else {
        Err(ConfigError::invalid("policy name", name, fix))
    }
}

/// 1 to 64 ASCII letters, digits and `others`.
pub(crate) fn is_name(name: &str, others: &[u8]) -> bool {
    (1..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || others.contains(&b))
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind: &dyn fmt::Debug = match &self.0.kind {
            Kind::Rate(strategy) => strategy,
            kind => kind,
        };
        write!(f, "Policy({} {kind:?} {}", self.name(), self.stated())?;
        match self.lease() {
            Some(time) => write!(f, " leased {time:?})"),
            None => f.write_str(")"),
        }
    }
}

impl PartialEq for Policy {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.name() == other.name()
                && self.kind() == other.kind()
                && self.quota() == other.quota())
                && self.0.lease == other.0.lease
    }
}

impl Eq for Policy {}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(name: &str, quota: Quota) -> Result<Policy, ConfigError> {
        Policy::new(name, Strategy::Gcra, quota)
    }

    #[test]
    fn names_are_checked() {
        for name in [
            "",
            "two words",
            "a:b",
            "a{b}",
            "a\"b",
            "caf\u{e9}",
            "tab\t",
            &"x".repeat(65),
        ] {
            let error = policy(name, Quota::per_second(1)).unwrap_err().to_string();
            let expected =
                format!("{name:?} is not a valid policy name: use 1 to 64 ASCII letters");
            assert!(error.starts_with(&expected), "{error}");
        }
        assert!(policy("v1/api.read_only-2", Quota::per_second(1)).is_ok());
    }

    #[test]
    fn quotas_that_cannot_work_are_refused() {
        let refused = |quota: Quota, problem: &str| {
            let error = policy("p", quota).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("the quota `{quota}` cannot work: its {problem}")),
                "{error}"
            );
        };
        refused(Quota::per_second(0), "limit must be at least 1");
        refused(Quota::per_second(1).burst(0), "burst must be at least 1");
        for period in [
            Duration::ZERO,
            Duration::from_nanos(1_500),
            Duration::from_secs(400 * 86_400),
            Duration::MAX,
        ] {
            refused(
                Quota::per(1, period),
                "period must be a whole number of microseconds",
            );
        }
        refused(
            Quota::per_day(1).burst(u32::MAX),
            "burst would take more than ten years",
        );
        let window = Policy::new(
            "p",
            Strategy::FixedWindow(Default::default()),
            Quota::per_second(5).burst(6),
        );
        assert!(
            window
                .unwrap_err()
                .to_string()
                .starts_with("a burst of 6 on a window of 5: ")
        );
        assert!(policy("p", Quota::per_second(u32::MAX)).is_ok());
        let log = |limit| Policy::new("p", Strategy::SlidingLog, Quota::per_hour(limit));
        let error = log(100_001).unwrap_err().to_string();
        assert!(
            error.starts_with("a limit of 100001 for a sliding log")
                && error.contains("at most 100000"),
            "{error}"
        );
        assert!(log(100_000).is_ok());
    }

    #[test]
    fn a_lease_tightens_the_quota() {
        let leased = |strategy, quota: &str, ms| {
            let policy = Policy::new("p", strategy, quota.parse().unwrap()).unwrap();
            policy
                .leased(Duration::from_millis(ms))
                .map(|policy| policy.quota().to_string())
        };
        let sliding = Strategy::SlidingWindow { cells: 10 };
        let interval = Strategy::TokenBucket(crate::limit::Refill::Interval);
        for (strategy, quota) in [
            (Strategy::Gcra, "999/s burst 899"),
            (Strategy::LeakyBucket, "999/s burst 899"),
            (Strategy::TokenBucket(Default::default()), "999/s burst 899"),
            (interval, "999/1100ms"),
            (Strategy::SlidingLog, "999/1100ms"),
            (sliding, "999/1100ms"),
            (Strategy::SlidingCounter, "999/1100ms"),
            (Strategy::FixedWindow(Default::default()), "999/s"),
        ] {
            // 99.9 are refilled in a tenth of a second.
            assert_eq!(
                leased(strategy, "999/s", 100).unwrap(),
                quota,
                "{strategy:?}"
            );
            assert!(leased(strategy, "999/s", 500).is_ok());
            for (ms, fix) in [(9, "from 10ms to 500"), (501, "or raise the ")] {
                let error = leased(strategy, "999/s", ms).unwrap_err().to_string();
                assert!(
                    error.starts_with("a lease of ") && error.contains(fix),
                    "{error}"
                );
            }
        }
        assert_eq!(
            leased(Strategy::Gcra, "10/s burst 100", 5_000).unwrap(),
            "10/s burst 50"
        );
        for quota in ["10/s burst 1", "1000/s burst 10"] {
            let error = leased(Strategy::Gcra, quota, 10).unwrap_err().to_string();
            assert_eq!(
                error,
                format!(
                    "a lease of 10ms of the quota `{quota}`: raise the burst, or leave the lease out"
                )
            );
        }
        let in_flight = Policy::in_flight("p", 4)
            .unwrap()
            .leased(Duration::from_millis(100));
        assert!(
            in_flight
                .unwrap_err()
                .to_string()
                .contains("requests in flight")
        );
        let policy = policy("p", Quota::per_second(1_000)).unwrap();
        let [one, two] =
            [100, 200].map(|ms| policy.clone().leased(Duration::from_millis(ms)).unwrap());
        assert_eq!(
            one.clone().leased(Duration::from_millis(200)),
            Ok(two.clone()),
            "from the quota as stated"
        );
        assert_eq!(
            format!("{policy:?}, {one:?}"),
            "Policy(p Gcra 1000/s), Policy(p Gcra 1000/s leased 100ms)"
        );
        assert!(one != two && one != policy && one.stated() == policy.quota());
    }

    #[test]
    fn in_flight_has_limit_and_slot_ttl() {
        let in_flight = |text: &str| Policy::of_kind("p", Kind::InFlight, text.parse().unwrap());
        for (text, part) in [
            ("10/30s burst 20", "no burst"),
            ("1000001/30s", "more than 1000000"),
            ("10/999ms", "from 1 second to 1 hour"),
            ("10/3601s", "from 1 second to 1 hour"),
        ] {
            let error = in_flight(text).unwrap_err().to_string();
            assert!(
                error.contains(part) && error.contains("like `10/30s`"),
                "{error}"
            );
        }
        assert!(in_flight("1000000/1s").is_ok() && in_flight("1/1h").is_ok());
        assert_eq!(in_flight("4/30s"), Policy::in_flight("p", 4));
        assert_eq!(
            in_flight("4/5s"),
            Policy::in_flight("p", 4)
                .unwrap()
                .slot_ttl(Duration::from_secs(5))
        );
        assert!(
            Policy::in_flight("p", 4)
                .unwrap()
                .slot_ttl(Duration::from_millis(999))
                .is_err()
        );
        let rate = policy("p", Quota::per_second(1)).unwrap();
        assert_eq!(rate.clone().slot_ttl(Duration::from_secs(5)), Ok(rate));
        let none = Policy::in_flight("p", 0).unwrap_err().to_string();
        assert!(none.contains("its limit must be at least 1"), "{none}");
    }

    #[test]
    fn instance_shares_never_exceed_the_whole() {
        use crate::limit::Align;
        let part = |strategy, quota, instances| {
            Policy::new("p", strategy, quota)
                .unwrap()
                .share(NonZeroU32::new(instances).unwrap())
                .quota()
        };
        let window = Strategy::FixedWindow(Align::FirstHit);
        assert_eq!(
            part(window, Quota::per_minute(10), 4),
            Quota::per_minute(2).burst(2)
        );
        assert_eq!(
            part(window, Quota::per_minute(3), 4),
            Quota::per_minute(1).burst(1),
            "at least 1"
        );
        let four_seconds = Quota::per(10, Duration::from_secs(4));
        assert_eq!(
            part(Strategy::Gcra, Quota::per_second(10).burst(20), 4),
            four_seconds.burst(5),
            "a rate is exact"
        );
        assert_eq!(
            part(Strategy::Gcra, Quota::per_day(365), 1000).limit(),
            1,
            "a period has its bound"
        );
    }
}
