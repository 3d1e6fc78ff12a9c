use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::strategy::{Frees, Params};
use super::{Align, Quota, Strategy, in_flight, span};
use crate::error::ConfigError;

/// A named limit: a strategy and a quota.
///
/// The name is part of Redis keys and headers. Policies with the same name, strategy and *span*
/// share a count:
///
/// - For [`FixedWindow`](Strategy::FixedWindow), [`SlidingLog`](Strategy::SlidingLog),
///   [`SlidingWindow`](Strategy::SlidingWindow) and [`SlidingCounter`](Strategy::SlidingCounter),
///   the span is the period, with the alignment or the cells. Two policies that differ only in the
///   limit share a count, and each compares it with its own limit.
/// - The buckets [`Gcra`](Strategy::Gcra), [`TokenBucket`](Strategy::TokenBucket) and
///   [`LeakyBucket`](Strategy::LeakyBucket) have no span: another quota continues the count. A token
///   bucket that refills by the interval is a separate count.
///
/// A bucket's count keeps the units that were used under another quota, as they have drained since
/// at its rate. All quotas that are used under one name, for example while a rolling deploy changes
/// it, together grant at most what the largest burst and the fastest rate of them give; two refills
/// more if the bucket refills by the interval. After a change to a faster quota, a denied caller
/// waits at the new rate. After a change to a slower one, the old rate drains the old grants.
///
/// Policies of different spans count independently. Limits that apply together in one check, such as
/// one per minute and one per hour, need different names. A clone is the same policy.
///
/// With the feature `serde`, a policy is a table: `{ name = "api", strategy = "gcra", quota =
/// "100/s burst 200" }`. The strategy defaults to [`Strategy::Gcra`], for a quota per month or year to
/// its calendar in UTC. [`Policies`](super::Policies)
/// are one such table or a list of them.
///
/// ```
/// use tower_redis_ratelimit::{Policy, Quota, Strategy};
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50).burst(100))?;
/// assert_eq!(policy.name(), "api");
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct Policy(Arc<SharedPolicy>);

/// Default time to live of a slot.
const SLOT_TTL: Duration = Duration::from_secs(30);
/// Minimum lease time. A block that lasts less saves few calls.
const SHORTEST_LEASE: Duration = Duration::from_millis(10);

struct SharedPolicy {
    name: Box<str>,
    kind: PolicyKind,
    quota: Quota,
    params: Params,
    lease: Option<QuotaLease>,
    /// The whole policy, if this is an instance's share of it.
    whole: Option<Policy>,
    is_pause: bool,
    /// See [`Policy::count`].
    count: Box<str>,
    /// A hash of `count`.
    id: u64,
}

/// The lease of a policy: see [`Policy::leased`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct QuotaLease {
    /// The quota before.
    stated: Quota,
    time: Duration,
}

impl Policy {
    /// Creates a policy with a [`Quota`] or its text, such as `"100/s burst 200"`.
    ///
    /// ```
    /// use tower_redis_ratelimit::{Policy, Quota, Strategy};
    ///
    /// let policy = Policy::new("api", Strategy::Gcra, "100/s")?;
    /// assert_eq!(policy, Policy::new("api", Strategy::Gcra, Quota::per_second(100))?);
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the name is empty, longer than 64 bytes, or contains a character other
    /// than ASCII letters, digits, `-`, `_`, `.` and `/`; if the quota is not
    /// [valid](Quota::is_valid), or has a burst that the strategy does not use; for a quota per month or
    /// year that the strategy does not count, and for a calendar of another unit than the quota's; for a
    /// limit above 100,000 with [`Strategy::SlidingLog`]; and for a [`Strategy::SlidingWindow`] of 0 or more
    /// than 1000 cells.
    pub fn new(
        name: &str,
        strategy: Strategy,
        quota: impl TryInto<Quota, Error: Into<ConfigError>>,
    ) -> Result<Self, ConfigError> {
        let quota = quota.try_into().map_err(Into::into)?;
        Self::of_kind(name, strategy.into(), quota)
    }

    pub(super) fn of_kind(name: &str, kind: PolicyKind, quota: Quota) -> Result<Self, ConfigError> {
        check_name(name)?;
        quota.check()?;
        // Its own bounds: the period is the time to live of a slot.
        if kind == PolicyKind::InFlight {
            in_flight::check(quota)?;
        }
        Ok(Self::with_params(
            name,
            kind,
            quota,
            Params::new(kind, quota)?,
        ))
    }

    /// Creates a policy of at most `limit` concurrent requests per caller, over all instances: 1 to
    /// 1,000,000. Each request counts as one until it is released, regardless of its cost, so this
    /// can be combined with a policy that counts bytes or tokens.
    ///
    /// Each request takes a slot, which expires after its [time to live](Self::slot_ttl), the
    /// quota's period. So the slots of a dead instance are freed. A layer renews the slots of
    /// longer requests every third of that time, on the tokio runtime that first needed it: see
    /// ["Runtimes"](crate::Limiter#runtimes). A request may end at any time, so
    /// [`Decision::retry_after`](super::Decision::retry_after) is always 100 ms.
    ///
    /// The policy works like a semaphore whose permits expire, such as Redisson's
    /// `RPermitExpirableSemaphore`. As text it is a policy with the strategy `in-flight` and a
    /// quota of the limit and the time to live, such as `10/30s`.
    ///
    /// A [`RateLimitLayer`](crate::RateLimitLayer) needs
    /// [`until_body_end`](crate::RateLimitLayer::until_body_end) or
    /// [`settle`](crate::RateLimitLayer::settle) to see when a request ends.
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
    /// Returns an error if [`new`](Self::new) would reject the name, and for a limit outside of 1
    /// to 1,000,000.
    #[doc(alias("concurrency", "semaphore"))]
    pub fn in_flight(name: &str, limit: u32) -> Result<Self, ConfigError> {
        Self::of_kind(name, PolicyKind::InFlight, Quota::per(limit, SLOT_TTL))
    }

    /// Sets the time to live of the slots of requests [in flight](Self::in_flight), from 1 second
    /// to 1 hour. Defaults to 30 seconds.
    ///
    /// # Errors
    ///
    /// Returns an error for a time outside of that range, and for a policy of another kind, which
    /// has no slots.
    pub fn slot_ttl(self, time: Duration) -> Result<Self, ConfigError> {
        if !self.is_in_flight() {
            return Err(ConfigError::new(format!(
                "policy {:?} counts by {} and has no slots: set `slot_ttl` on a `Policy::in_flight` only",
                self.name(),
                self.kind()
            )));
        }
        let quota = Quota::per(self.quota().limit(), time);
        Self::of_kind(self.name(), PolicyKind::InFlight, quota)
    }

    /// Lets a [`Leased`](crate::Leased) store charge blocks of this policy in advance and spend
    /// each within `time`, the lease time. All instances must use the same `time`: it changes the
    /// quota they count with.
    ///
    /// The lease time is at least 10 ms, and at most half of the time in which the burst refills,
    /// or half of the period if the strategy has no burst.
    ///
    /// A unit may be spent up to a lease time after it was charged. So that no more is ever spent
    /// than the quota allows, this method makes the [`quota`](Self::quota) tighter:
    ///
    /// - [`Gcra`](Strategy::Gcra), [`LeakyBucket`](Strategy::LeakyBucket) and a
    ///   [`TokenBucket`](Strategy::TokenBucket) that refills greedily: the burst is lowered by the
    ///   amount that refills in that time. The rate stays.
    /// - [`SlidingLog`](Strategy::SlidingLog), [`SlidingWindow`](Strategy::SlidingWindow),
    ///   [`SlidingCounter`](Strategy::SlidingCounter), and a token bucket that refills by the
    ///   interval: the period is longer by that time.
    /// - [`FixedWindow`](Strategy::FixedWindow): unchanged, since a block ends with its window.
    ///
    /// Stores count with the tighter quota. Header fields and messages show the original one. In
    /// the policy's table, the lease is `leased = "100ms"` in addition to the original quota.
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
    /// Returns an error if `time` is outside of that range or not a whole number of microseconds,
    /// and for a policy of requests [in flight](Self::in_flight).
    pub fn leased(self, time: Duration) -> Result<Self, ConfigError> {
        if self.is_in_flight() {
            let text = format!(
                "policy {:?} is leased: remove the lease, since requests in flight cannot be charged in advance",
                self.name()
            );
            return Err(ConfigError::new(text));
        }
        let stated = self.stated();
        check_lease(stated, time, self.frees().is_gradual())?;
        let quota = match self.frees() {
            Frees::Gradually => stated.burst(stated.capacity() - stated.units_in(time)),
            Frees::InBatches | Frees::OneByOne | Frees::Fading | Frees::WithCell => {
                stated.with_period(stated.period() + time)
            }
            Frees::WithWindow | Frees::OnRelease => stated,
        };
        let mut leased = self.with_quota(quota)?;
        // Always `Some`: the policy was just made.
        if let Some(inner) = Arc::get_mut(&mut leased.0) {
            inner.lease = Some(QuotaLease { stated, time });
        }
        Ok(leased)
    }

    /// Marks a new policy as that of a [`Pause`](crate::throttle::Pause): its quota is no limit of clients, and it is the same
    /// for all instances.
    pub(crate) fn of_pauses(mut self) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.is_pause = true;
        }
        // A debt under another maximum would be another time.
        let span = span::of_pause(self.quota());
        self.with_span(&span)
    }

    /// Sets the span of a new policy: that of a count found in Redis.
    pub(crate) fn with_span(mut self, span: &str) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.count = count_of(&inner.name, inner.kind, span);
            inner.id = id_of(&inner.count);
        }
        self
    }

    /// Creates the policy of [`Policies::blocked`](super::Policies::blocked). Its capacity is 0, so no store allows a cost.
    pub(super) fn of_blocked() -> Result<Self, ConfigError> {
        let windows = Strategy::FixedWindow(Align::FirstHit);
        let mut policy = Self::new("blocked", windows, Quota::per_day(1))?;
        if let Some(inner) = Arc::get_mut(&mut policy.0) {
            inner.params.capacity = 0;
        }
        Ok(policy)
    }

    /// Returns `true` if the policy allows nothing.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.params().capacity == 0
    }

    /// Returns the quota before it was leased or divided, which people see.
    pub(crate) fn stated(&self) -> Quota {
        let whole = &self.whole().0;
        match whole.lease {
            Some(lease) => lease.stated,
            None => whole.quota,
        }
    }

    /// Returns the [lease](Self::leased) time, if the policy is leased.
    pub(crate) fn lease(&self) -> Option<Duration> {
        Some(self.0.lease?.time)
    }

    fn with_params(name: &str, kind: PolicyKind, quota: Quota, params: Params) -> Self {
        let count = count_of(name, kind, &span::of(kind, quota));
        Self(Arc::new(SharedPolicy {
            name: name.into(),
            kind,
            quota,
            params,
            lease: None,
            whole: None,
            is_pause: false,
            id: id_of(&count),
            count,
        }))
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the strategy, or `None` for requests [in flight](Self::in_flight).
    pub fn strategy(&self) -> Option<Strategy> {
        match self.0.kind {
            PolicyKind::Rate(strategy) => Some(strategy),
            PolicyKind::InFlight => None,
        }
    }

    pub(crate) fn kind(&self) -> PolicyKind {
        self.0.kind
    }

    /// Returns `true` if the policy counts requests in flight instead of costs over time.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.0.kind == PolicyKind::InFlight
    }

    /// Returns how the policy's capacity is freed.
    pub(crate) fn frees(&self) -> Frees {
        self.0.params.frees
    }

    /// Returns `true` if a request of this cost can never be allowed.
    pub(crate) fn never_fits(&self, cost: u32) -> bool {
        self.is_blocked() || !self.is_in_flight() && self.quota().capacity() < cost
    }

    /// Returns the effective quota. For a [leased](Self::leased) policy it is tighter than the one
    /// given to [`new`](Self::new).
    pub fn quota(&self) -> Quota {
        self.0.quota
    }

    /// Creates the share of one of `instances` instances: a policy with this quota, and the count of this policy.
    ///
    /// # Errors
    ///
    /// Returns an error for an invalid quota.
    pub(crate) fn share_of(
        &self,
        quota: Quota,
        instances: NonZeroU32,
    ) -> Result<Self, ConfigError> {
        let mut share = self.with_quota(quota)?;
        if let Some(inner) = Arc::get_mut(&mut share.0) {
            let share = inner.params.share_of(self.params(), instances);
            inner.params = share.part_of(self.params());
            // The share continues the count of the whole policy.
            inner.count = self.0.count.clone();
            inner.id = self.0.id;
            inner.whole = Some(self.clone());
        }
        Ok(share)
    }

    /// Creates a policy of this name and kind.
    fn with_quota(&self, quota: Quota) -> Result<Self, ConfigError> {
        Self::of_kind(self.name(), self.kind(), quota)
    }

    /// Returns how long a charge counts at most, in microseconds: with a burst, the time in which a
    /// full burst refills; in a cell, until the cell has left the window.
    pub(crate) fn counts_for(&self) -> i64 {
        let period = self.params().period;
        match self.frees() {
            Frees::Gradually | Frees::InBatches => {
                let quota = self.quota();
                let periods = quota.capacity().div_ceil(quota.limit().max(1));
                period.saturating_mul(periods.into())
            }
            Frees::Fading => 2 * period,
            Frees::WithCell => period + self.params().width,
            Frees::WithWindow | Frees::OneByOne | Frees::OnRelease => period,
        }
    }

    /// Returns `true` for the policy of a [`Pause`](crate::throttle::Pause).
    pub(crate) fn is_pause(&self) -> bool {
        self.0.is_pause
    }

    /// Returns `true` if the quota is a limit of clients, which header fields show.
    #[inline]
    pub(crate) fn is_shown(&self) -> bool {
        !self.is_pause() && !self.is_blocked()
    }

    /// Returns the policy that this is a share of, or itself.
    pub(crate) fn whole(&self) -> &Self {
        self.0.whole.as_ref().unwrap_or(self)
    }

    /// Returns `true` unless this is a share of another policy.
    pub(super) fn is_whole(&self) -> bool {
        self.0.whole.is_none()
    }

    pub(crate) fn params(&self) -> &Params {
        &self.0.params
    }

    /// Returns the name of the count, with which its keys end: `name:strategy:span`, or `name:strategy` without a
    /// [span](span::of). The span is what the count depends on, so a policy with that count can be restored.
    pub(crate) fn count(&self) -> &str {
        &self.0.count
    }

    /// Returns the count's span; empty for requests in flight.
    pub(crate) fn span(&self) -> &str {
        let mut parts = self.count().splitn(3, COUNT_SEPARATOR);
        parts.nth(2).unwrap_or_default()
    }

    /// Identifies the count within this process. Policies with other limits may have it too.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Hashes what a list is identified by.
    pub(super) fn hash_into(&self, hasher: &mut impl Hasher) {
        (self.id(), self.kind(), self.quota(), self.0.lease).hash(hasher);
    }
}

/// Separates the parts of a count's name. No name of a policy contains it.
pub(super) const COUNT_SEPARATOR: char = ':';

/// Returns the name of a count.
fn count_of(name: &str, kind: PolicyKind, span: &str) -> Box<str> {
    let letter = kind.letter();
    let count = if span.is_empty() {
        format!("{name}{COUNT_SEPARATOR}{letter}")
    } else {
        format!("{name}{COUNT_SEPARATOR}{letter}{COUNT_SEPARATOR}{span}")
    };
    count.into()
}

/// Returns the identity of a count within this process.
fn id_of(count: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    count.hash(&mut hasher);
    hasher.finish()
}

/// Returns an error if a quota cannot be [leased](Policy::leased) for this time.
fn check_lease(stated: Quota, time: Duration, is_gradual: bool) -> Result<(), ConfigError> {
    let (longest, larger) = if is_gradual {
        let refills = stated.time_for(stated.capacity().into());
        (refills / 2, "burst")
    } else {
        (stated.period() / 2, "period")
    };
    // The lease lowers a burst by that, and at least 1 must be left.
    let takes_burst = is_gradual && stated.units_in(time.min(longest)) >= stated.capacity();
    let is_whole = time.subsec_nanos().is_multiple_of(1_000);
    let fix = if longest < SHORTEST_LEASE || takes_burst {
        format!("raise the {larger}, or remove the lease")
    } else if !is_whole || !(SHORTEST_LEASE..=longest).contains(&time) {
        format!(
            "use whole microseconds from {SHORTEST_LEASE:?} to {longest:?}, or raise the {larger}"
        )
    } else {
        return Ok(());
    };
    Err(ConfigError::new(format!(
        "cannot lease the quota `{stated}` for {time:?}: {fix}"
    )))
}

pub(crate) fn check_name(name: &str) -> Result<(), ConfigError> {
    let fix = "use 1 to 64 ASCII letters, digits, `-`, `_`, `.` or `/`";
    if is_name(name, b"-_./") {
        Ok(())
    } else {
        Err(ConfigError::invalid("policy name", name, fix))
    }
}

/// Returns `true` if `name` is 1 to 64 ASCII letters, digits and `others`.
pub(crate) fn is_name(name: &str, others: &[u8]) -> bool {
    (1..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || others.contains(&b))
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind: &dyn fmt::Debug = match &self.0.kind {
            PolicyKind::Rate(strategy) => strategy,
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
        // Most policies that are compared are clones of one.
        if Arc::ptr_eq(&self.0, &other.0) {
            return true;
        }
        self.name() == other.name()
            && self.kind() == other.kind()
            && self.quota() == other.quota()
            && self.0.lease == other.0.lease
            && self.is_blocked() == other.is_blocked()
    }
}

impl Eq for Policy {}

impl Hash for Policy {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
        self.kind().hash(state);
        self.quota().hash(state);
        self.0.lease.hash(state);
    }
}

/// The kind of limit of a policy: a rate, or concurrent requests. All differences between the two
/// start here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PolicyKind {
    /// Limits the cost over time.
    Rate(Strategy),
    /// Limits concurrent requests.
    InFlight,
}

impl PolicyKind {
    /// Returns the letter of the kind in Redis keys.
    pub(crate) const fn letter(self) -> &'static str {
        match self {
            Self::Rate(strategy) => strategy.letter(),
            Self::InFlight => "s",
        }
    }

    /// Returns the name as text, without a parameter.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Rate(strategy) => strategy.name(),
            Self::InFlight => IN_FLIGHT,
        }
    }

    /// Returns the kind with this letter in Redis keys, with default parameters.
    pub(super) fn of_letter(letter: &str) -> Option<Self> {
        if letter == Self::InFlight.letter() {
            return Some(Self::InFlight);
        }
        let mut strategies = Strategy::ALL.iter();
        let strategy = strategies.find(|strategy| strategy.letter() == letter)?;
        Some(Self::Rate(*strategy))
    }

    /// Returns how the policy's capacity is freed.
    pub(super) fn frees(self) -> Frees {
        match self {
            Self::Rate(strategy) => strategy.frees(),
            Self::InFlight => Frees::OnRelease,
        }
    }
}

impl From<Strategy> for PolicyKind {
    fn from(strategy: Strategy) -> Self {
        Self::Rate(strategy)
    }
}

/// The text form in a policy's table.
impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(strategy) => strategy.fmt(f),
            Self::InFlight => f.write_str(IN_FLIGHT),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.trim() == IN_FLIGHT {
            Ok(Self::InFlight)
        } else {
            text.parse().map(Self::Rate)
        }
    }
}

const IN_FLIGHT: &str = "in-flight";

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
    fn invalid_quotas_are_rejected() {
        let refused = |quota: Quota, problem: &str| {
            let error = policy("p", quota).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("invalid quota `{quota}`: its {problem}")),
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
                .starts_with("a burst of 6 for a window of 5: ")
        );
        let day = |hours: u64| {
            let offset = Duration::from_secs(hours * 3_600);
            let strategy = Strategy::FixedWindow(Align::Clock { offset });
            Policy::new("p", strategy, Quota::per_day(5))
        };
        for (hours, error) in [
            (
                25,
                "an offset of 25h for a window of 1d: use `1h`, which starts the same windows",
            ),
            (
                48,
                "an offset of 2d for a window of 1d: use `0s`, which starts the same windows",
            ),
        ] {
            assert_eq!(day(hours).unwrap_err().to_string(), error);
        }
        assert!(day(23).is_ok());
        assert!(policy("p", Quota::per_second(u32::MAX)).is_ok());
        let log = |limit| Policy::new("p", Strategy::SlidingLog, Quota::per_hour(limit));
        let error = log(100_001).unwrap_err().to_string();
        assert!(
            error.starts_with("a limit of 100001 is too high for a sliding log")
                && error.contains("at most 100000"),
            "{error}"
        );
        assert!(log(100_000).is_ok());
    }

    #[test]
    fn a_month_needs_its_calendar() {
        for (strategy, quota, expected) in [
            (
                "gcra",
                "10/month",
                "the quota `10/month` under gcra, which counts no calendar: use the strategy `fixed-window(month)`, or a \
                 period such as `31d`",
            ),
            (
                "fixed-window",
                "10/year",
                "the quota `10/year` under fixed-window, which counts no calendar: use the strategy `fixed-window(year)`, \
                 or a period such as `366d`",
            ),
            (
                "fixed-window(month from 15)",
                "10/year",
                "the quota `10/year` under the calendar `month from 15`: use `10/month`, or another strategy",
            ),
            (
                "fixed-window(month)",
                "10/31d",
                "the quota `10/31d` under the calendar `month`: use `10/month`, or another strategy",
            ),
            (
                "fixed-window(week)",
                "10/d",
                "the quota `10/d` under the calendar `week`: use `10/week`, or another strategy",
            ),
        ] {
            let strategy = strategy.parse().unwrap();
            let error = Policy::new("p", strategy, quota).unwrap_err().to_string();
            assert_eq!(error, expected);
        }
        for (strategy, quota) in [
            ("fixed-window(month)", "10/month"),
            ("fixed-window(week)", "10/7d"),
            ("fixed-window(day, +02:00)", "10/24h"),
            ("gcra", "10/week"),
        ] {
            assert!(Policy::new("p", strategy.parse().unwrap(), quota).is_ok());
        }
        let burst = Policy::new(
            "p",
            Strategy::default_for(Quota::per_month(5)),
            "5/month burst 6",
        );
        assert!(
            burst
                .unwrap_err()
                .to_string()
                .starts_with("a burst of 6 for a window of 5")
        );
    }

    #[test]
    fn a_lease_tightens_the_quota() {
        let leased = |strategy, quota: &str, ms| {
            let policy = Policy::new("p", strategy, quota).unwrap();
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
            // 99.9 units refill in 100 ms, so the burst is lowered by 100.
            assert_eq!(
                leased(strategy, "999/s", 100).unwrap(),
                quota,
                "{strategy:?}"
            );
            assert!(leased(strategy, "999/s", 500).is_ok());
            for (ms, fix) in [(9, "from 10ms to 500"), (501, "or raise the ")] {
                let error = leased(strategy, "999/s", ms).unwrap_err().to_string();
                assert!(
                    error.starts_with("cannot lease the quota `") && error.contains(fix),
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
                    "cannot lease the quota `{quota}` for 10ms: raise the burst, or remove the lease"
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
            "derived from the original quota"
        );
        assert_eq!(
            format!("{policy:?}, {one:?}"),
            "Policy(p Gcra 1000/s), Policy(p Gcra 1000/s leased 100ms)"
        );
        assert!(one != two && one != policy && one.stated() == policy.quota());
    }

    /// Requests wait differently under a pause.
    #[test]
    fn only_pauses_are_pauses() {
        let same = policy("p", Quota::per_minute(60)).unwrap();
        let pause = policy("p", Quota::per_minute(60)).unwrap().of_pauses();
        assert!(pause.is_pause() && !same.is_pause() && same == pause);
    }

    #[test]
    fn in_flight_has_limit_and_slot_ttl() {
        let rate = policy("p", Quota::per_second(1)).unwrap();
        let error = rate.slot_ttl(Duration::from_secs(5)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "policy \"p\" counts by gcra and has no slots: set `slot_ttl` on a `Policy::in_flight` only"
        );
        let in_flight =
            |text: &str| Policy::of_kind("p", PolicyKind::InFlight, text.parse().unwrap());
        for (text, part) in [
            ("10/30s burst 20", "a burst is not supported"),
            ("1000001/30s", "the maximum is 1000000"),
            ("10/999ms", "must be 1 second to 1 hour"),
            ("10/3601s", "must be 1 second to 1 hour"),
        ] {
            let error = in_flight(text).unwrap_err().to_string();
            assert!(
                error.contains(part) && error.contains("such as `10/30s`"),
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
        let none = Policy::in_flight("p", 0).unwrap_err().to_string();
        assert!(none.contains("its limit must be at least 1"), "{none}");
    }
}
