use std::any::Any;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::ops::Index;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::Policy;
use crate::error::ConfigError;

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
/// Environment variables can hold one policy: one variable each for `name`, `strategy` and `quota`.
#[derive(Clone)]
pub struct Policies(Arc<SharedPolicies>);

struct SharedPolicies {
    policies: SmallVec<[Policy; 1]>,
    /// Identifies the counts of the list.
    id: u64,
    /// The lease, if all policies are leased.
    lease: Option<Lease>,
    has_lease: bool,
    contents: Contents,
    /// A hash of the addresses of the policies.
    identity: u64,
    /// An instance's share, for the most recent number of instances.
    part: Mutex<Option<(NonZeroU32, Policies)>>,
    /// A value that another module derived from the list.
    derived: OnceLock<Box<dyn Any + Send + Sync>>,
}

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
}

impl Contents {
    fn of(policies: &[Policy]) -> Self {
        let (in_flight, costs): (SmallVec<_>, SmallVec<_>) =
            policies.iter().cloned().partition(Policy::is_in_flight);
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

/// The lease of a list of policies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lease {
    /// The shortest lease time of the policies.
    pub(crate) time: Duration,
    /// Identifies the leased counts: lists with the same names but other quotas have another id.
    pub(crate) id: u64,
}

impl Lease {
    fn of(policies: &[Policy]) -> Option<Self> {
        let mut shortest = Duration::MAX;
        let mut hasher = DefaultHasher::new();
        for policy in policies {
            let time = policy.lease()?;
            shortest = shortest.min(time);
            (policy.name(), policy.kind(), policy.quota(), time).hash(&mut hasher);
        }
        Some(Self {
            time: shortest,
            id: hasher.finish(),
        })
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
        for (i, name) in policies.iter().map(Policy::name).enumerate() {
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
    pub(crate) fn of(policies: SmallVec<[Policy; 1]>) -> Self {
        Self(Arc::new(SharedPolicies {
            id: hash_of_each(&policies, Policy::id),
            identity: hash_of_each(&policies, |policy| policy.address() as u64),
            lease: Lease::of(&policies),
            has_lease: policies.iter().any(|policy| policy.lease().is_some()),
            contents: Contents::of(&policies),
            part: Mutex::default(),
            derived: OnceLock::new(),
            policies,
        }))
    }

    /// Returns the policies in order; there is at least one.
    pub fn as_slice(&self) -> &[Policy] {
        &self.0.policies
    }

    /// Iterates over the policies in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Policy> {
        self.as_slice().iter()
    }

    /// Returns the share of one of `instances` instances; see [`Policy::share`].
    pub(crate) fn share(&self, instances: NonZeroU32) -> Self {
        let mut last = self.0.part.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, part)) = &*last
            && *of == instances
        {
            return part.clone();
        }
        let part = Self::of(self.iter().map(|policy| policy.share(instances)).collect());
        *last = Some((instances, part.clone()));
        part
    }

    /// Returns the policies that count requests [in flight](Policy::in_flight).
    #[inline]
    pub(crate) fn in_flight(&self) -> Option<&Self> {
        match &self.0.contents {
            Contents::Costs => None,
            Contents::InFlight => Some(self),
            Contents::Both { in_flight, .. } => Some(in_flight),
        }
    }

    /// Returns the policies that count costs over time.
    pub(crate) fn without_in_flight(&self) -> Option<&Self> {
        match &self.0.contents {
            Contents::Costs => Some(self),
            Contents::InFlight => None,
            Contents::Both { costs, .. } => Some(costs),
        }
    }

    /// Returns `true` if this policy counts towards `granted`. Beside other policies, one of
    /// requests in flight does not: it grants one request, not a cost.
    pub(crate) fn tells_granted(&self, policy: &Policy) -> bool {
        match self.0.contents {
            Contents::Costs | Contents::InFlight => true,
            Contents::Both { .. } => !policy.is_in_flight(),
        }
    }

    /// Returns the undivided policies if these are an instance's share, otherwise the same list.
    pub(crate) fn whole(&self) -> Self {
        if self.iter().all(Policy::is_whole) {
            return self.clone();
        }
        Self::of(self.iter().map(|policy| policy.whole().clone()).collect())
    }

    /// Returns the longest period, in microseconds.
    pub(crate) fn longest_period(&self) -> i64 {
        self.iter()
            .map(|policy| policy.params().period)
            .max()
            .unwrap_or(0)
    }

    /// Returns how long a charge counts at most, in microseconds. A debt counts for longer.
    pub(crate) fn longest_count(&self) -> i64 {
        self.iter().map(Policy::counts_for).max().unwrap_or(0)
    }

    /// Identifies the counts of this list.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns the [lease](Policy::leased), if all policies are leased.
    #[inline]
    pub(crate) fn lease(&self) -> Option<Lease> {
        self.0.lease
    }

    /// Returns `true` if a policy of the list is leased.
    #[inline]
    pub(crate) fn has_lease(&self) -> bool {
        self.0.has_lease
    }

    /// Equal for all lists that [are](Self::is) the same. Different lists rarely have the same
    /// value.
    pub(crate) fn identity(&self) -> u64 {
        self.0.identity
    }

    /// Returns `true` if both lists contain the same policies in memory, which is cheaper than
    /// comparing their values.
    pub(crate) fn is(&self, other: &Self) -> bool {
        if Arc::ptr_eq(&self.0, &other.0) {
            return true;
        }
        // A copy of a list has the same policies. The hashes may collide, so compare the addresses too.
        let own = self.iter().map(Policy::address);
        let others = other.iter().map(Policy::address);
        self.identity() == other.identity() && own.eq(others)
    }

    /// Passes `read` the value that `make` derives from the list. The value is computed once and
    /// kept in the list. A list keeps one value: one of another type is computed each time.
    #[inline]
    pub(crate) fn derived<T: Send + Sync + 'static, R>(
        &self,
        make: fn(&Self) -> T,
        read: impl FnOnce(&T) -> R,
    ) -> R {
        let kept = self.0.derived.get_or_init(|| Box::new(make(self)));
        match kept.downcast_ref() {
            Some(kept) => read(kept),
            None => read(&make(self)),
        }
    }
}

fn hash_of_each(policies: &[Policy], number: fn(&Policy) -> u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    for policy in policies {
        number(policy).hash(&mut hasher);
    }
    hasher.finish()
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

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl PartialEq for Policies {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Policies {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::{Check, Key, Quota, Source, Strategy, Verdict};

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
    fn identity_is_that_of_the_policies() {
        let (one, two) = (policy("one", 1), policy("two", 1));
        let list = Policies::new([one.clone(), two.clone()]).unwrap();
        for same in [
            list.clone(),
            Policies::new([one.clone(), two.clone()]).unwrap(),
        ] {
            assert!(list.is(&same) && list.identity() == same.identity() && list == same);
        }
        let equal = Policies::new([policy("one", 1), two.clone()]).unwrap();
        assert!(!list.is(&equal) && list.identity() != equal.identity() && list == equal);
        for other in [
            Policies::from(one.clone()),
            Policies::new([two, one]).unwrap(),
        ] {
            assert!(!list.is(&other) && list.identity() != other.identity() && list != other);
        }
    }

    #[test]
    fn a_share_is_made_once() {
        let list = Policies::from(policy("one", 100));
        let part = |instances| list.share(NonZeroU32::new(instances).unwrap());
        assert!(part(4).is(&part(4)));
        assert_eq!(part(4).as_slice()[0].quota().capacity(), 25);
        assert_eq!(part(5).as_slice()[0].quota().capacity(), 20);
    }

    /// A decision on a share must refund under the whole policies.
    #[test]
    fn a_share_knows_its_whole() {
        let list = Policies::new([policy("one", 100), policy("two", 7)]).unwrap();
        let part = list.share(NonZeroU32::new(4).unwrap());
        assert!(!part.is(&list) && part.whole().is(&list) && list.whole().is(&list));
        let second = Duration::from_secs(1);
        let take = Check::take(Key::GLOBAL, &part, 1);
        let decision = take.decided(Source::Local, 1, |_| {
            Verdict::allowed().with_reset_after(second)
        });
        let back = decision.refund(Key::GLOBAL, 1, Duration::ZERO).next();
        assert!(back.is_some_and(|back| back.policies().is(&list)));
    }

    #[test]
    fn derived_values_are_made_once() {
        let list = Policies::from(policy("one", 100));
        assert_eq!(list.derived(|list| list.iter().len(), |len| *len), 1);
        assert_eq!(list.derived(|_| 2_usize, |len| *len), 1);
        assert_eq!(list.derived(|_| "another", |text| text.len()), 7);
    }
}
