use std::any::Any;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Index;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::{Calendar, Policy, Quota, Strategy};
use crate::error::{ConfigError, ErrorKind, StoreError};

/// The policies of one check: one or more, with different names. All of them allow and charge the
/// check, or none.
///
/// ```
/// use tower_redis_ratelimit::{Policies, Policy, Quota, Strategy};
///
/// let policies = Policies::new([
///     Policy::new("burst", Strategy::Gcra, Quota::per_second(10))?,
///     Policy::new("daily", Strategy::Gcra, Quota::per_day(10_000))?,
/// ])?;
/// assert!(policies.iter().map(Policy::name).eq(["burst", "daily"]));
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// With the feature `serde`, from a file:
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use std::collections::HashMap;
/// use tower_redis_ratelimit::Policies;
///
/// let routes: HashMap<String, Policies> = toml::from_str(
///     r#"
///     search = { name = "search", quota = "5 per 10s" }
///     login = [
///         { name = "login", quota = "5 per 15m", strategy = "sliding-log" },
///         { name = "login-daily", quota = "50/d" },
///     ]
///     "#,
/// )?;
/// assert_eq!(routes["login"][1].quota().to_string(), "50/d");
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Environment variables can hold one policy: one variable each for `name`, `strategy` and `quota`. The text `blocked` stands
/// for [`blocked`](Policies::blocked).
#[derive(Clone)]
pub struct Policies(Arc<SharedPolicies>);

struct SharedPolicies {
    policies: SmallVec<[Policy; 1]>,
    id: u64,
    contents: Contents,
    /// The undivided policies, if some are an instance's share.
    whole: Option<Policies>,
    has_calendar: bool,
    has_lease: bool,
    extensions: Extensions,
}

/// Values that other modules keep with a list of policies, one of each type. It takes no lock: each cell is written once.
/// Few types are used, and usually one.
#[derive(Default)]
struct Extensions {
    value: OnceLock<Box<dyn Any + Send + Sync>>,
    others: OnceLock<Box<Extensions>>,
}

impl Extensions {
    /// Returns the value of this type, which is created at its first use.
    #[inline]
    fn get<T: Default + Send + Sync + 'static>(&self) -> &T {
        let mut cell = self;
        loop {
            let value = cell.value.get_or_init(|| Box::new(T::default()));
            if let Some(value) = value.downcast_ref() {
                return value;
            }
            cell = cell.others.get_or_init(Box::default);
        }
    }
}

/// The lists that begin with a list, which keeps them: most requests combine the same ones.
#[derive(Default)]
struct JoinedLists(Mutex<Vec<Policies>>);

/// Maximum number of combinations that a list keeps.
const MAX_JOINED: usize = 16;

/// The kinds of policies in a list.
enum Contents {
    /// Costs over time.
    Costs,
    /// Requests in flight.
    InFlight,
    /// Both: the policies of each.
    Both {
        costs: Policies,
        in_flight: Policies,
    },
    /// A policy that allows nothing.
    Blocked,
}

impl Contents {
    fn of(policies: &[Policy]) -> Self {
        let mut costs = SmallVec::new();
        let mut in_flight = SmallVec::new();
        for policy in policies {
            if policy.is_blocked() {
                return Self::Blocked;
            }
            if policy.is_in_flight() {
                in_flight.push(policy.clone());
            } else {
                costs.push(policy.clone());
            }
        }
        if in_flight.is_empty() {
            Self::Costs
        } else if costs.is_empty() {
            Self::InFlight
        } else {
            Self::Both {
                costs: Policies::of(costs),
                in_flight: Policies::of(in_flight),
            }
        }
    }
}

impl Policies {
    /// Maximum number of policies in one check.
    pub const MAX: usize = 16;

    /// Combines several policies.
    ///
    /// # Errors
    ///
    /// Returns an error for no policy, for more than [`MAX`](Self::MAX), and for two of the same
    /// name.
    pub fn new(policies: impl IntoIterator<Item = Policy>) -> Result<Self, ConfigError> {
        let policies: SmallVec<[Policy; 1]> = policies.into_iter().collect();
        if policies.is_empty() {
            return Err(ConfigError::new(
                "the list of policies is empty: add at least one policy",
            ));
        }
        if policies.len() > Self::MAX {
            let text = format!(
                "{} policies for one check: use at most {}",
                policies.len(),
                Self::MAX
            );
            return Err(ConfigError::new(text));
        }
        // At most 16, so comparing all pairs is fast.
        for (i, policy) in policies.iter().enumerate() {
            let name = policy.name();
            if policies[..i].iter().any(|other| other.name() == name) {
                let text = format!(
                    "two policies are named {name:?}: use different names, since the name is part of the key"
                );
                return Err(ConfigError::new(text));
            }
        }
        Ok(Self::of(policies))
    }

    /// Combines at least one and at most [`MAX`](Self::MAX) policies with different names.
    fn of(policies: SmallVec<[Policy; 1]>) -> Self {
        let mut hasher = DefaultHasher::new();
        for policy in &policies {
            policy.hash_into(&mut hasher);
        }
        Self(Arc::new(SharedPolicies {
            id: hasher.finish(),
            contents: Contents::of(&policies),
            whole: whole_of(&policies),
            has_calendar: policies
                .iter()
                .any(|policy| policy.params().calendar.is_some()),
            has_lease: policies.iter().any(|policy| policy.lease().is_some()),
            extensions: Extensions::default(),
            policies,
        }))
    }

    /// Combines lists into one, which is kept with the first of them.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub(crate) fn joined(lists: &[&Self]) -> Result<Self, ConfigError> {
        let first = match lists {
            [] => return Self::new([]),
            [only] => return Ok((*only).clone()),
            [first, ..] => *first,
        };
        let kept = &first.extension::<JoinedLists>().0;
        let all = || lists.iter().flat_map(|list| list.iter());
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        for joined in &*kept {
            if joined.iter().eq(all()) {
                return Ok(joined.clone());
            }
        }
        let joined = Self::new(all().cloned())?;
        // An application may create lists for each call.
        if kept.len() >= MAX_JOINED {
            kept.clear();
        }
        kept.push(joined.clone());
        Ok(joined)
    }

    /// Returns the policies in order; there is at least one.
    pub fn as_slice(&self) -> &[Policy] {
        &self.0.policies
    }

    /// Returns the number of policies: 1 to [`MAX`](Self::MAX).
    #[allow(clippy::len_without_is_empty, reason = "a list is never empty")]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Iterates over the policies in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Policy> {
        self.as_slice().iter()
    }

    /// Returns the policies of blocked callers, plans or routes: they deny requests of any cost. The text
    /// `blocked` of a settings file.
    ///
    /// A layer and a [`Limiter`](crate::Limiter) deny without a check of the store. The decision's source is
    /// [`Source::Blocked`](crate::check::Source::Blocked), under a policy named `blocked`, and no wait helps: over HTTP it is a
    /// 429 without `Retry-After`, or [a 403](crate::RateLimitLayer::forbid_blocked). To block for a time, use
    /// [`Limiter::block`](crate::Limiter::block).
    ///
    /// ```
    /// use tower_redis_ratelimit::extract::PeerIp;
    /// use tower_redis_ratelimit::select::Tiers;
    /// use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, RateLimitLayer, Strategy};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tiers = Tiers::new(Policy::new("free", Strategy::Gcra, "60/min")?)
    ///     .caller(Key::ip("192.0.2.7".parse()?), Policies::blocked());
    /// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, tiers);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias("ban", "denylist", "blocklist"))]
    pub fn blocked() -> Self {
        static BLOCKED: LazyLock<Policies> = LazyLock::new(|| {
            #[allow(clippy::expect_used, reason = "a constant, which a test makes")]
            let policy = Policy::of_blocked().expect("a valid policy");
            policy.into()
        });
        BLOCKED.clone()
    }

    /// Returns `true` if the policies deny every request.
    #[inline]
    pub(crate) fn are_blocked(&self) -> bool {
        matches!(self.0.contents, Contents::Blocked)
    }

    /// The policies of callers that nothing limits, for a [`Limiter`](crate::Limiter), whose decisions need some. No store
    /// counts by them.
    pub(crate) fn exempt() -> &'static Self {
        static EXEMPT: LazyLock<Policies> = LazyLock::new(|| {
            let quota = Quota::per_second(u32::MAX);
            #[allow(clippy::expect_used, reason = "a constant, which a test makes")]
            let policy = Policy::new("exempt", Strategy::default(), quota).expect("a valid policy");
            policy.into()
        });
        &EXEMPT
    }

    /// Returns `true` for [`exempt`](Self::exempt), and `false` for other policies of this name.
    pub(crate) fn is_exempt(&self) -> bool {
        Arc::ptr_eq(&self.0, &Self::exempt().0)
    }

    /// Returns the policies that count requests [in flight](Policy::in_flight).
    #[inline]
    pub(crate) fn in_flight(&self) -> Option<&Self> {
        match &self.0.contents {
            Contents::Costs | Contents::Blocked => None,
            Contents::InFlight => Some(self),
            Contents::Both { in_flight, .. } => Some(in_flight),
        }
    }

    /// Returns the policies that count costs over time.
    pub(crate) fn without_in_flight(&self) -> Option<&Self> {
        match &self.0.contents {
            Contents::Costs | Contents::Blocked => Some(self),
            Contents::InFlight => None,
            Contents::Both { costs, .. } => Some(costs),
        }
    }

    /// Returns `true` if this policy counts towards `granted`. Beside other policies, one of
    /// requests in flight does not: it grants one request, not a cost.
    pub(super) fn tells_granted(&self, policy: &Policy) -> bool {
        match self.0.contents {
            Contents::Costs | Contents::InFlight | Contents::Blocked => true,
            Contents::Both { .. } => !policy.is_in_flight(),
        }
    }

    /// Returns the undivided policies if these are an instance's share, otherwise the same list.
    pub(crate) fn whole(&self) -> &Self {
        self.0.whole.as_ref().unwrap_or(self)
    }

    /// Returns `true` if a policy counts the windows of a calendar.
    #[inline]
    pub(crate) fn have_calendar(&self) -> bool {
        self.0.has_calendar
    }

    /// Returns `true` if a policy is [leased](Policy::leased).
    #[inline]
    pub(crate) fn have_lease(&self) -> bool {
        self.0.has_lease
    }

    /// Returns the [lease](Policy::leased) time: the shortest of the policies. `None` unless all are leased.
    #[inline]
    pub(crate) fn lease_time(&self) -> Option<Duration> {
        if !self.have_lease() {
            return None;
        }
        let mut shortest = Duration::MAX;
        for policy in self {
            shortest = shortest.min(policy.lease()?);
        }
        Some(shortest)
    }

    /// Calls the functions of [custom calendars](Calendar::custom) for the windows around `now`.
    ///
    /// # Errors
    ///
    /// Returns an error for an invalid window.
    #[cold]
    pub(super) fn prepare_calendars(&self, now: i64) -> Result<(), StoreError> {
        for policy in self {
            if let Some(calendar) = policy.params().calendar {
                prepare(policy, calendar, now)?;
            }
        }
        Ok(())
    }

    /// Identifies the list: its counts, quotas and leases. Another list has another id, except for rare collisions.
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns the value of the type `T` that another module keeps with the list. Clones share it.
    #[inline]
    pub(crate) fn extension<T: Default + Send + Sync + 'static>(&self) -> &T {
        self.0.extensions.get()
    }
}

/// Prepares the calendar of a policy.
fn prepare(policy: &Policy, calendar: Calendar, now: i64) -> Result<(), StoreError> {
    let Err(problem) = calendar.prepare(now) else {
        return Ok(());
    };
    let name = policy.name();
    let reason = format!("the calendar `{calendar}` of the policy {name:?} is invalid: {problem}");
    let error = StoreError::explained(ErrorKind::Configuration, reason);
    Err(error.check_only().not_sent())
}

/// Returns the undivided policies. `None` if all of these are.
fn whole_of(policies: &[Policy]) -> Option<Policies> {
    if policies.iter().all(Policy::is_whole) {
        return None;
    }
    let whole = policies.iter().map(|policy| policy.whole().clone());
    Some(Policies::of(whole.collect()))
}

impl From<Policy> for Policies {
    fn from(policy: Policy) -> Self {
        Self::of(smallvec![policy])
    }
}

/// # Panics
///
/// If `index` is out of range.
impl Index<usize> for Policies {
    type Output = Policy;

    fn index(&self, index: usize) -> &Policy {
        &self.as_slice()[index]
    }
}

impl<'a> IntoIterator for &'a Policies {
    type Item = &'a Policy;
    type IntoIter = std::slice::Iter<'a, Policy>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl IntoIterator for Policies {
    type Item = Policy;
    type IntoIter = std::vec::IntoIter<Policy>;

    fn into_iter(self) -> Self::IntoIter {
        self.as_slice().to_vec().into_iter()
    }
}

/// As [`new`](Policies::new).
impl TryFrom<Vec<Policy>> for Policies {
    type Error = ConfigError;

    fn try_from(policies: Vec<Policy>) -> Result<Self, ConfigError> {
        Self::new(policies)
    }
}

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl PartialEq for Policies {
    fn eq(&self, other: &Self) -> bool {
        // A shortcut for the checks of a batch: most have clones of one list.
        Arc::ptr_eq(&self.0, &other.0) || self.as_slice() == other.as_slice()
    }
}

impl Eq for Policies {}

impl Hash for Policies {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;
    use crate::limit::{Check, Key, Outcome, Quota, Source, State, Strategy};

    fn policy(name: &str, limit: u32) -> Policy {
        Policy::new(name, Strategy::Gcra, Quota::per_second(limit)).unwrap()
    }

    #[test]
    fn lists_are_checked() {
        let one = policy("one", 1);
        let refused = |policies: Vec<Policy>| Policies::new(policies).unwrap_err().to_string();
        assert!(refused(vec![]).starts_with("the list of policies is empty: "));
        assert!(
            refused(vec![one.clone(), one.clone()]).starts_with("two policies are named \"one\": ")
        );
        let many = (0..17).map(|i| policy(&i.to_string(), 1));
        assert!(refused(many.collect()).starts_with("17 policies for one check: "));
        assert_eq!(Policies::from(one).iter().len(), 1);
    }

    #[test]
    fn blocked_lists_allow_nothing() {
        let blocked = Policies::blocked();
        let with_others = Policies::new([policy("api", 9), blocked[0].clone()]).unwrap();
        assert!(!Policies::from(policy("blocked", 1)).are_blocked());
        for list in [blocked, with_others] {
            assert!(list.are_blocked() && list[list.len() - 1].never_fits(0));
            let check = Check::take(Key::GLOBAL, &list, 1);
            let mut states: Vec<State> = list
                .iter()
                .map(|policy| State::fresh(policy.kind()))
                .collect();
            let verdicts = check.decide(&mut states, 1_700_000_000_000_000);
            let decision = check.answer(verdicts, Source::Local);
            assert_eq!(decision.outcome(), Outcome::ExceedsCapacity);
        }
    }

    #[test]
    fn an_id_is_that_of_the_contents() {
        let (one, two) = (policy("one", 1), policy("two", 1));
        let list = Policies::new([one.clone(), two.clone()]).unwrap();
        let same = Policies::new([policy("one", 1), two.clone()]).unwrap();
        assert_eq!((list.id(), &list), (same.id(), &same));
        let window =
            |limit| Policy::new("one", Strategy::SlidingLog, Quota::per_second(limit)).unwrap();
        assert_eq!(window(1).id(), window(2).id(), "one count");
        let leased = window(1).leased(Duration::from_millis(100)).unwrap();
        let lists = [
            list,
            one.clone().into(),
            Policies::new([two, one]).unwrap(),
            window(1).into(),
            window(2).into(),
            leased.into(),
        ];
        for (i, list) in lists.iter().enumerate() {
            assert_eq!(
                lists.iter().position(|other| other.id() == list.id()),
                Some(i)
            );
            assert_eq!(lists.iter().position(|other| other == list), Some(i));
        }
    }

    #[test]
    fn joined_lists_are_kept_with_the_first() {
        let [one, two, three] = ["one", "two", "three"].map(|name| Policies::from(policy(name, 1)));
        let joined = Policies::joined(&[&one, &two, &three]).unwrap();
        assert!(joined.iter().map(Policy::name).eq(["one", "two", "three"]));
        let again = Policies::joined(&[&one, &two, &three]).unwrap();
        assert!(Arc::ptr_eq(&joined.0, &again.0));
        let other = Policies::joined(&[&one, &three]).unwrap();
        assert!(other.iter().map(Policy::name).eq(["one", "three"]));
        assert!(Policies::joined(&[&one, &two, &one]).is_err());
        for i in 0..100 {
            let other = policy(&format!("other{i}"), 1).into();
            drop(Policies::joined(&[&one, &other]).unwrap());
        }
        let kept = one.extension::<JoinedLists>().0.lock().unwrap().len();
        assert!(kept <= MAX_JOINED, "{kept}");
    }

    #[test]
    fn each_type_has_one_extension() {
        let list = Policies::from(policy("one", 1));
        list.extension::<AtomicU32>().store(7, Relaxed);
        let text: &OnceLock<&str> = list.extension();
        assert_eq!(text.set("one"), Ok(()));
        assert_eq!(list.extension::<OnceLock<&str>>().get(), Some(&"one"));
        assert_eq!(list.clone().extension::<AtomicU32>().load(Relaxed), 7);
    }

    #[test]
    fn lists_are_collections() {
        let both = vec![policy("one", 1), policy("two", 2)];
        let list = Policies::try_from(both.clone()).unwrap();
        assert_eq!(list.len(), 2);
        assert_eq!(list.clone().into_iter().collect::<Vec<_>>(), both);
        let again = Policies::new(both).unwrap();
        assert_eq!(HashSet::from([list, again]).len(), 1);
        assert!(Policies::try_from(vec![policy("one", 1), policy("one", 2)]).is_err());
    }
}
