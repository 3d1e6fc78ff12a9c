#[cfg(feature = "serde")]
mod formats;
mod networks;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use http::request::Parts;
use ipnet::IpNet;

use self::networks::Networks;
use crate::error::ConfigError;
use crate::gate::PolicySelector;
use crate::limit::{Key, KeyForms, Policies};
use crate::observe::Observer;
use crate::observe::misses::Misses;
use crate::observe::mistakes::{NARROW_NETWORK, NO_TIER, UNKNOWN_TIER};
use crate::util::{Copies, OnceFlag, own_list};

/// Policies by the caller's plan: `free`, `pro`.
///
/// A [`Tier`] in the request's extensions names the plan. An outer layer inserts it, such as the
/// authentication. Alternatively, a [closure](Self::tier_by) returns the name. A request without a
/// plan, or with an unlisted one, is under the policies passed to `new`. Single callers may have
/// [overrides](Self::caller).
///
/// The first unlisted plan is reported as [misconfigured](crate::observe::Event::Misconfigured), unless it is the
/// default plan: a policy passed to `new` has its name. If a listed plan has a policy of the same name as one passed to
/// `new`, one unlisted plan may be the default plan, so the first one is only
/// [suspected](crate::observe::Event::Suspected). So it is if none of the first 1,000 requests names a plan, which is
/// reported as misconfigured after ten minutes without any.
///
/// ```
/// use tower_redis_ratelimit::extract::HeaderKey;
/// use tower_redis_ratelimit::select::Tiers;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
/// let by_key = HeaderKey::new("x-api-key")?;
/// let tiers = Tiers::new(policy("free", 60)?)
///     .tier("pro", policy("pro", 6_000)?)
///     .exempt("internal")
///     .caller(by_key.key_of("the-key-of-our-largest-customer"), policy("large", 100_000)?);
/// let layer = RateLimitLayer::new(LocalStore::default(), by_key, tiers);
/// # let _ = layer;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// A count belongs to the name of its policy. A caller that changes from `free` to `pro` above
/// starts with an empty count, since the policies have different names. With the same name and
/// strategy, its usage in one plan counts in the other, and a changed plan is no fresh burst. Windows,
/// logs and counters also need the same period.
///
/// # From a file
///
/// With the feature `serde` it is a table. A plan or a caller has a policy, a list of policies, or one of the
/// words `exempt` and `blocked`:
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use tower_redis_ratelimit::select::Tiers;
///
/// #[derive(serde::Deserialize)]
/// struct Settings {
///     limits: Tiers,
/// }
///
/// let settings: Settings = toml::from_str(
///     r#"
///     [limits]
///     default = { name = "free", quota = "60/min" }
///
///     [limits.tiers]
///     pro = [{ name = "pro", quota = "6000/min" }, { name = "pro-daily", quota = "1000000/d" }]
///     internal = "exempt"
///
///     [limits.callers]
///     tenant-7 = { name = "large", quota = "100000/min" }
///     "ip:192.0.2.7" = { name = "office", quota = "600/min" }
///     "ip:10.0.0.0/8, ip:2001:db8::/32" = "exempt"
///     "ip:192.0.2.66" = "blocked"
///     "~8c3ba5a8f35d8b6e55c7e9ba2d0bbf3c" = "exempt"
///     "#,
/// )?;
/// # let _ = settings.limits;
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A caller is written as in Redis and in a log that [reveals keys](Key::reveal), so that it can be copied from there,
/// or as the value from which its key is made:
///
/// | text | key |
/// |---|---|
/// | `tenant-7` | [`Key::new`] of that text |
/// | `ip:192.0.2.7`, `ip:10.0.0.0/8`, `ip:2001:db8::/32`, or a list of them with `, ` in between | every [`Key::ip`] or [`Key::network`] in the [network](Self::network) |
/// | `secret:sk-live-1` | [`Key::secret`] of the text after the colon. It is serialized in the next form |
/// | `~` and 32 hexadecimal digits | a hashed key: a secret, or a long text |
/// | `ip:192.0.2.7,tenant-7` | [`Key::tuple`] of the comma-separated parts. A part is a whole key, not a network of keys |
/// | `*` | [`Key::GLOBAL`] |
///
/// Similar texts are rejected, since no caller has such a key: an address without `ip:`, `IP:`,
/// blanks around a comma. This crate's errors omit the text after `secret:`, but those of `toml`
/// show the whole line: use the hashed form, or show only the error's `message()`.
///
/// The closure of [`tier_by`](Self::tier_by) is not serialized: set it again after deserializing.
#[doc(alias = "plan")]
#[derive(Clone)]
pub struct Tiers {
    /// Finds the plan of a request. `None` for the [`Tier`] in its extensions.
    name: Option<Arc<TierName>>,
    plans: Copies<Plans>,
    callers: Arc<HashMap<Key, Option<Policies>>>,
    networks: Arc<Networks>,
    unknown: Arc<Unknown>,
}

/// Reports the first plan that is not listed, the first network without effect, and that the first
/// requests name no plan.
#[derive(Default)]
struct Unknown {
    misses: Misses,
    reported: OnceFlag,
    /// The first unlisted plan, if it may be the default plan.
    maybe_default: OnceLock<Box<str>>,
    narrow_reported: OnceFlag,
}

type TierName = dyn for<'a> Fn(&'a Parts) -> Option<&'a str> + Send + Sync;

/// The name of a request's plan, for [`Tiers`]: an extension of the request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tier(pub Cow<'static, str>);

impl Tier {
    /// Creates the plan name.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self(name.into())
    }
}

struct Plans {
    /// For requests without a listed plan.
    default: Policies,
    /// `None` means exempt.
    named: HashMap<Box<str>, Option<Policies>>,
}

impl Tiers {
    /// Creates tiers; `default` applies to requests without a listed plan.
    pub fn new(default: impl Into<Policies>) -> Self {
        Self::of(
            Plans {
                default: default.into(),
                named: HashMap::new(),
            },
            HashMap::new(),
        )
    }

    fn of(plans: Plans, callers: HashMap<Key, Option<Policies>>) -> Self {
        Self {
            name: None,
            plans: Copies::new(|| plans.copy()),
            callers: Arc::new(callers),
            networks: Arc::default(),
            unknown: Arc::default(),
        }
    }

    /// Sets the policies of a plan. A later call for the same name replaces them.
    #[must_use]
    pub fn tier(self, name: impl Into<Box<str>>, policies: impl Into<Policies>) -> Self {
        self.insert(name.into(), Some(policies.into()))
    }

    /// Exempts the requests of a plan: they pass uncounted, without header fields.
    #[doc(alias = "allowlist")]
    #[must_use]
    pub fn exempt(self, name: impl Into<Box<str>>) -> Self {
        self.insert(name.into(), None)
    }

    /// Sets the policies of one caller: an override that applies in every plan. [`Policies::blocked`] blocks the caller.
    ///
    /// `key` must be the key that the layer's extractor produces. Use the extractor's `key_of`,
    /// such as [`HeaderKey::key_of`](crate::extract::HeaderKey::key_of); for a tuple of extractors,
    /// use [`Key::tuple`] of the parts. A key of a form that a built-in extractor never makes, such as an
    /// address if the extractor is a [`HeaderKey`](crate::extract::HeaderKey), is
    /// [reported](crate::observe::Event::Misconfigured) at the first request. The cost of a lookup does
    /// not depend on the number of callers.
    #[must_use]
    pub fn caller(self, key: Key, policies: impl Into<Policies>) -> Self {
        self.callers([(key, policies)])
    }

    /// Sets the policies of many callers, like [`caller`](Self::caller) for each.
    #[must_use]
    pub fn callers(
        mut self,
        callers: impl IntoIterator<Item = (Key, impl Into<Policies>)>,
    ) -> Self {
        // A clone of these tiers keeps its callers.
        let own = Arc::make_mut(&mut self.callers);
        for (key, policies) in callers {
            own.insert(key, Some(policies.into()));
        }
        self
    }

    /// Exempts one caller in every plan.
    #[doc(alias = "allowlist")]
    #[must_use]
    pub fn exempt_caller(mut self, key: Key) -> Self {
        Arc::make_mut(&mut self.callers).insert(key, None);
        self
    }

    /// Sets the policies of all callers whose addresses are in `network`, in every plan: the keys of
    /// [`PeerIp`](crate::extract::PeerIp) and [`ClientIp`](crate::extract::ClientIp), or [`Key::ip`].
    /// The policies of a [caller](Self::caller) take precedence, then the longest network. A
    /// later call for the same network replaces them.
    ///
    /// A network contains whole keys only: an IPv6 key is a /64 by default, so a longer IPv6 network
    /// applies to nothing, which the first request from such a key
    /// [reports](crate::observe::Event::Misconfigured). The cost of a lookup depends on the number
    /// of different prefix lengths, not of networks.
    ///
    /// ```
    /// use tower_redis_ratelimit::select::Tiers;
    /// # use tower_redis_ratelimit::{Policy, Quota, Strategy};
    ///
    /// # let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
    /// let tiers = Tiers::new(policy("public", 60)?)
    ///     .network("203.0.113.0/24".parse()?, policy("office", 6_000)?)?
    ///     .exempt_network("10.0.0.0/8".parse()?)?;
    /// # let _ = tiers;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// For an address within a network, such as `10.0.0.1/8`, and for a network of all addresses.
    pub fn network(
        self,
        network: IpNet,
        policies: impl Into<Policies>,
    ) -> Result<Self, ConfigError> {
        self.insert_network(network, Some(policies.into()))
    }

    /// Exempts all callers in a [network](Self::network) in every plan.
    ///
    /// # Errors
    ///
    /// As [`network`](Self::network).
    #[doc(alias = "allowlist")]
    pub fn exempt_network(self, network: IpNet) -> Result<Self, ConfigError> {
        self.insert_network(network, None)
    }

    fn insert_network(
        mut self,
        network: IpNet,
        policies: Option<Policies>,
    ) -> Result<Self, ConfigError> {
        let network = networks::valid(network)?;
        Arc::make_mut(&mut self.networks).insert(network, policies);
        Ok(self)
    }

    /// Sets how the plan of a request is found, instead of a [`Tier`] in its extensions. Do not let clients choose
    /// their plan: take it from the result of the authentication.
    ///
    /// ```
    /// # use tower_redis_ratelimit::select::Tiers;
    /// # use tower_redis_ratelimit::{Policy, Quota, Strategy};
    /// #[derive(Clone)]
    /// struct User {
    ///     plan: String,
    /// }
    ///
    /// # let free = Policy::new("free", Strategy::Gcra, Quota::per_minute(60))?;
    /// let tiers = Tiers::new(free).tier_by(|request| Some(request.extensions.get::<User>()?.plan.as_str()));
    /// # let _ = tiers;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    #[must_use]
    pub fn tier_by(self, name: impl Fn(&Parts) -> Option<&str> + Send + Sync + 'static) -> Self {
        Self {
            name: Some(Arc::new(name)),
            ..self
        }
    }

    /// Returns the policies of requests without a listed plan.
    pub fn default_policies(&self) -> &Policies {
        &self.plans.current().default
    }

    /// Iterates over the listed plans, in any order, with their policies. `None` for an exempt plan.
    ///
    /// With [`default_policies`](Self::default_policies) and [`overrides`](Self::overrides), an admin page can show what is
    /// in force:
    ///
    /// ```
    /// use tower_redis_ratelimit::select::Tiers;
    /// use tower_redis_ratelimit::{Key, Policy, Strategy};
    ///
    /// let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota);
    /// let tiers = Tiers::new(policy("free", "60/m")?)
    ///     .exempt("internal")
    ///     .caller(Key::new("tenant-7"), policy("large", "100000/m")?);
    /// assert_eq!(tiers.default_policies()[0].quota().to_string(), "60/m");
    /// assert!(tiers.plans().eq([("internal", None)]));
    /// for (caller, policies) in tiers.overrides() {
    ///     assert_eq!((caller.reveal(), policies.map(|policies| policies[0].name())), ("tenant-7", Some("large")));
    /// }
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn plans(&self) -> impl Iterator<Item = (&str, Option<&Policies>)> {
        let named = self.plans.current().named.iter();
        named.map(|(name, policies)| (&**name, policies.as_ref()))
    }

    /// Iterates over the [overrides](Self::caller) of single callers, in any order. `None` for an exempt caller.
    pub fn overrides(&self) -> impl Iterator<Item = (&Key, Option<&Policies>)> {
        let callers = self.callers.iter();
        callers.map(|(caller, policies)| (caller, policies.as_ref()))
    }

    /// Returns the plan of a request, if it names one.
    #[inline]
    fn name_of<'a>(&self, request: &'a Parts) -> Option<&'a str> {
        match &self.name {
            Some(name_of) => name_of(request),
            None => {
                let Tier(name) = request.extensions.get()?;
                Some(name)
            }
        }
    }

    /// The policies of a single caller, or of its network; inside, `None` for an exempt caller.
    #[inline]
    fn policies_of_caller(&self, key: &Key) -> Option<&Option<Policies>> {
        // Most tiers have neither: skip the hash and the parsing of the key.
        if !self.callers.is_empty()
            && let Some(own) = self.callers.get(key)
        {
            return Some(own);
        }
        if self.networks.is_empty() {
            return None;
        }
        let caller = key.to_network()?;
        let own = self.networks.find(caller);
        let is_one_address = caller.prefix_len() == caller.max_prefix_len();
        if own.is_none() && !is_one_address && !self.unknown.narrow_reported.is_claimed() {
            self.unknown.report_narrow(&self.networks, caller);
        }
        own
    }

    fn insert(self, name: Box<str>, policies: Option<Policies>) -> Self {
        let mut plans = self.plans.current().copy();
        plans.named.insert(name, policies);
        Self {
            plans: Copies::new(|| plans.copy()),
            ..self
        }
    }
}

impl Plans {
    /// Creates fresh `Arc`s around the policies, to avoid contention.
    fn copy(&self) -> Self {
        let mut named = HashMap::with_capacity(self.named.len());
        for (name, policies) in &self.named {
            named.insert(name.clone(), policies.as_ref().map(own_list));
        }
        Self {
            default: own_list(&self.default),
            named,
        }
    }

    fn is_default_policy(&self, name: &str) -> bool {
        self.default.iter().any(|policy| policy.name() == name)
    }

    /// Whether the names of the policies tell the default plan: no listed plan has a policy of the same name.
    fn default_is_named(&self) -> bool {
        let mut listed = self.named.values().flatten().flatten();
        !listed.any(|policy| self.is_default_policy(policy.name()))
    }
}

impl Unknown {
    /// Number of listed plans that are named.
    const SHOWN: usize = 10;

    #[cold]
    fn report(&self, name: &str, plans: &Plans) {
        if let Some(first) = self.maybe_default.get()
            && **first == *name
        {
            return;
        }
        // A plan with the name of a default policy is the default plan, which needs no entry.
        if plans.is_default_policy(name) {
            return;
        }
        // One unlisted plan may be the default plan. A second one is a mistake in any case.
        let may_be_default =
            !plans.default_is_named() && self.maybe_default.set(name.into()).is_ok();
        if !may_be_default && !self.reported.claim() {
            return;
        }
        let mut listed: Vec<_> = plans.named.keys().collect();
        listed.sort_unstable();
        listed.truncate(Self::SHOWN);
        let name: String = name.chars().take(80).collect();
        let problem = format!("the plan {name:?} is not listed, and the default plan counts");
        if may_be_default {
            self.misses.suspect(&format!(
                "{problem}: list it, or ignore this if it is the default plan, as {listed:?} are not{UNKNOWN_TIER}"
            ));
        } else {
            self.misses.report(&format!(
                "{problem} instead: use one of {listed:?}, or list it{UNKNOWN_TIER}"
            ));
        }
    }

    #[cold]
    fn report_narrow(&self, networks: &Networks, caller: IpNet) {
        if let Some(network) = networks.narrower(caller)
            && self.narrow_reported.claim()
        {
            let problem = format!(
                "the policies of the network {network} apply to nothing: it is a part of one caller, whose key is a network of {} bits: \
                 use a network of at most that length, or a longer `ipv6_prefix` of the `ClientIp`{NARROW_NETWORK}",
                caller.prefix_len()
            );
            self.misses.report(&problem);
        }
    }
}

/// The problem that these requests named no plan.
fn no_tier(requests: fmt::Arguments<'_>, has_closure: bool) -> String {
    let fix = if has_closure {
        "put the layer inside the authentication that inserts what the closure of `tier_by` reads (of axum's layers, the last one is \
         the outermost)"
    } else {
        "insert a `Tier` into the extensions of the requests, in an authentication around the layer (of axum's layers, the last one is \
         the outermost), or set `.tier_by(..)`, which a settings file does not contain"
    };
    format!(
        "none of the {requests} named a plan, and the default plan counted them: {fix}; or ignore this if all of them belong to \
         the default plan{NO_TIER}"
    )
}

impl PolicySelector for Tiers {
    fn policies(&self, request: &Parts, key: Option<&Key>) -> Option<Policies> {
        if let Some(key) = key
            && let Some(own) = self.policies_of_caller(key)
        {
            return own.clone();
        }
        let plans = self.plans.current();
        let name = self.name_of(request);
        match name {
            Some(_) => self.unknown.misses.found(),
            // Without plans, none is expected.
            None if plans.named.is_empty() => {}
            // A request of the default plan may name none, so only many of them are suspicious.
            None => {
                let misses = &self.unknown.misses;
                let has_closure = self.name.is_some();
                misses.lasts(|| {
                    no_tier(
                        format_args!("requests of the first ten minutes"),
                        has_closure,
                    )
                });
                misses.missed(|| {
                    no_tier(
                        format_args!("first {} requests", Misses::REPORT_AT),
                        has_closure,
                    )
                });
            }
        }
        if let Some(name) = name {
            if let Some(policies) = plans.named.get(name) {
                return policies.clone();
            }
            if !self.unknown.reported.is_claimed() {
                self.unknown.report(name, plans);
            }
        }
        Some(plans.default.clone())
    }

    fn caller_without(&self, forms: KeyForms) -> Option<String> {
        let callers = self.callers.keys();
        let impossible = callers.filter(|key| !forms.has(KeyForms::of(key)));
        // The smallest one: a map has a random order, and all starts should report the same caller.
        if let Some(key) = impossible.min_by_key(|key| key.as_bytes()) {
            let form = KeyForms::of(key);
            return Some(format!(
                "the caller {key:?} of the `Tiers`, which is one of {form},"
            ));
        }
        if self.networks.is_empty() || forms.has(KeyForms::ADDRESS) {
            return None;
        }
        Some("the networks of the `Tiers`".to_owned())
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.unknown.misses.observe(observer);
    }
}

/// For a [`Limiter`](crate::Limiter): a key has no plan, so the default policies apply to a caller without overrides. For the
/// policies of a plan, call [`Limiter::under`](crate::Limiter::under).
impl PolicySelector<Key> for Tiers {
    fn policies(&self, caller: &Key, _: Option<&Key>) -> Option<Policies> {
        match self.policies_of_caller(caller) {
            Some(own) => own.clone(),
            None => Some(self.plans.current().default.clone()),
        }
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.unknown.misses.observe(observer);
    }
}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plans { default, named } = self.plans.current();
        let mut tiers = f.debug_struct("Tiers");
        tiers
            .field("default", default)
            .field("named", named)
            .field("callers", &self.callers.len())
            .field("networks", &self.networks.len());
        tiers.finish_non_exhaustive()
    }
}
