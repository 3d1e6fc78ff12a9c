//! Finds the limit of a descriptor, from files in the format of Envoy's own service.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io};

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::RateLimit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, Strategy};

/// The lengths of the units, as in Envoy's service.
const UNITS: [(Unit, Duration); 7] = [
    (Unit::Second, Duration::from_secs(1)),
    (Unit::Minute, Duration::from_secs(60)),
    (Unit::Hour, Duration::from_secs(3_600)),
    (Unit::Day, Duration::from_secs(86_400)),
    (Unit::Week, Duration::from_secs(7 * 86_400)),
    (Unit::Month, Duration::from_secs(30 * 86_400)),
    (Unit::Year, Duration::from_secs(365 * 86_400)),
];

/// The text of each YAML file in a directory; at least one.
pub(crate) type Files = BTreeMap<PathBuf, String>;

/// Skips directories, and hidden files, such as an editor's.
pub(crate) fn read(directory: &Path) -> Result<Files, String> {
    let failed = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    let mut files = Files::new();
    for entry in fs::read_dir(directory).map_err(|error| failed(directory, error))? {
        let path = entry.map_err(|error| failed(directory, error))?.path();
        let is_yaml = |extension| extension == "yaml" || extension == "yml";
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if path.extension().is_some_and(is_yaml) && !name.starts_with(b".") && !path.is_dir() {
            let text = fs::read_to_string(&path).map_err(|error| failed(&path, error))?;
            files.insert(path, text);
        }
    }
    if files.is_empty() {
        // Without a file, every request would pass.
        return Err(format!(
            "{}: no file: add a `*.yaml` or `*.yml`",
            directory.display()
        ));
    }
    Ok(files)
}

/// The contents of a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    domain: String,
    descriptors: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Descriptor {
    key: String,
    #[serde(default)]
    value: String,
    rate_limit: Option<LimitText>,
    #[serde(default)]
    shadow_mode: bool,
    #[serde(default)]
    share_threshold: bool,
    #[serde(default)]
    descriptors: Vec<Descriptor>,
    /// Names of statistics in Envoy's service. Here, statistics have the names of policies.
    #[serde(default, rename = "detailed_metric")]
    _detailed_metric: IgnoredAny,
    #[serde(default, rename = "value_to_metric")]
    _value_to_metric: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitText {
    #[serde(default)]
    name: String,
    #[serde(default)]
    replaces: Vec<Name>,
    #[serde(default)]
    unlimited: bool,
    unit: Option<String>,
    requests_per_unit: Option<u32>,
    /// Two extensions that Envoy's service does not have.
    quota: Option<Quota>,
    strategy: Option<Strategy>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
}

/// The rules of each domain.
#[derive(Default)]
pub(crate) struct Domains(HashMap<String, Rules>);

/// The descriptors of one level, by their keys.
#[derive(Default)]
struct Rules(HashMap<String, Values>);

/// The descriptors of one key.
#[derive(Default)]
struct Values {
    exact: HashMap<String, Rule>,
    /// Patterns with `*`, in order of the file.
    patterns: Vec<(String, Rule)>,
    any: Option<Rule>,
}

struct Rule {
    limit: Option<Arc<Limit>>,
    /// The value to count all matching values under, if they share a count.
    shared: Option<String>,
    nested: Rules,
}

/// A limit with its policy.
pub(crate) struct Limit {
    /// The limit reported to Envoy; `None` if unlimited.
    pub(crate) current: Option<RateLimit>,
    /// Names of the limits that do not apply together with this one.
    pub(crate) replaces: Vec<String>,
    /// Whether it is in a dry run.
    pub(crate) shadow: bool,
    pub(crate) rate: Rate,
}

pub(crate) enum Rate {
    Unlimited,
    /// 0 requests per unit, which is no quota.
    Banned,
    Counted(Policies),
}

impl Domains {
    /// Reads the files, with one domain in each.
    pub(crate) fn new(files: &Files) -> Result<Self, String> {
        let mut domains = Self::default();
        for (path, text) in files {
            domains
                .add(text)
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(domains)
    }

    fn add(&mut self, text: &str) -> Result<(), String> {
        let File {
            domain,
            descriptors,
        } = yaml_serde::from_str(text).map_err(|error| error.to_string())?;
        if domain.is_empty() {
            return Err("the domain is empty: use the one of Envoy's filter".to_owned());
        }
        if descriptors.is_empty() {
            return Err(format!("the domain {domain:?} has no descriptors: add one"));
        }
        let rules = Rules::new(descriptors, &domain)?;
        match self.0.insert(domain.clone(), rules) {
            Some(_) => Err(format!(
                "the domain {domain:?} is in another file too: use one file for each domain"
            )),
            None => Ok(()),
        }
    }

    /// Returns `true` if a file has the domain.
    pub(crate) fn contains(&self, domain: &str) -> bool {
        self.0.contains_key(domain)
    }

    /// The domains that are missing in `other`.
    pub(crate) fn without<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a str> {
        self.0
            .keys()
            .map(String::as_str)
            .filter(|domain| !other.contains(domain))
    }

    /// Returns the limit of a descriptor, and the key to count under. `None` if it is not limited.
    pub(crate) fn find(
        &self,
        domain: &str,
        descriptor: &RateLimitDescriptor,
    ) -> Result<Option<(Key, Arc<Limit>)>, String> {
        let Some(mut rules) = self.0.get(domain) else {
            return Ok(None);
        };
        let (mut caller, mut limit) = (vec![Key::new(domain)], None);
        for entry in &descriptor.entries {
            let value = match (&descriptor.limit, rules.find(entry)) {
                (Some(_), _) => &entry.value,
                (None, None) => return Ok(None),
                (None, Some(rule)) => {
                    (rules, limit) = (&rule.nested, rule.limit.clone());
                    rule.shared.as_ref().unwrap_or(&entry.value)
                }
            };
            caller.extend([Key::new(&entry.key), Key::new(value)]);
        }
        if let Some(instead) = &descriptor.limit {
            let unit = Unit::try_from(instead.unit).unwrap_or_default();
            let quota = Quota::per(instead.requests_per_unit, period(unit)?);
            // The unit comes first, because a long name is truncated.
            let name = format!("override.{}.{domain}", unit.as_str_name().to_lowercase());
            limit = Some(Arc::new(Limit::new(&name, Some(quota), as_envoy())?));
        }
        Ok(limit.map(|limit| (Key::tuple(&caller), limit)))
    }
}

impl Domains {
    /// The limits as a metric for Prometheus, with the names of `ratelimit_decisions_total`. Written from the rules, so that a
    /// removed limit has no series.
    pub(crate) fn metrics(&self) -> String {
        let mut series = BTreeMap::new();
        self.0.values().for_each(|rules| rules.collect(&mut series));
        let mut text =
            "# HELP ratelimit_limit Requests that a rule allows per period, as in its file.\n\
                        # TYPE ratelimit_limit gauge\n"
                .to_owned();
        for ((policy, quota), limit) in series {
            text += &format!("ratelimit_limit{{policy=\"{policy}\",quota=\"{quota}\"}} {limit}\n");
        }
        text
    }
}

/// Summary of the domains and limits that were read.
impl fmt::Display for Domains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits: usize = self.0.values().map(Rules::limits).sum();
        write!(f, "{} domains, {limits} limits", self.0.len())
    }
}

impl Rules {
    fn new(descriptors: Vec<Descriptor>, within: &str) -> Result<Self, String> {
        let mut rules = Self::default();
        for Descriptor {
            key,
            value,
            rate_limit,
            shadow_mode,
            share_threshold,
            descriptors,
            ..
        } in descriptors
        {
            let path = format!(
                "{within}.{key}{}{value}",
                if value.is_empty() { "" } else { "_" }
            );
            let limit = rate_limit
                .map(|text| text.read(&path, shadow_mode))
                .transpose();
            let limit = limit
                .map_err(|error| format!("{path}: {error}"))?
                .map(Arc::new);
            let shared = share_threshold.then(|| value.clone());
            let rule = Rule {
                limit,
                shared,
                nested: Self::new(descriptors, &path)?,
            };
            let values = rules.0.entry(key).or_default();
            let is_second = match value {
                value if value.is_empty() => values.any.replace(rule).is_some(),
                value if !value.contains('*') => values.exact.insert(value, rule).is_some(),
                pattern => {
                    values.patterns.push((pattern, rule));
                    false
                }
            };
            if is_second {
                return Err(format!("{path}: appears more than once"));
            }
        }
        Ok(rules)
    }

    /// The rules of this level.
    fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.0.values().flat_map(|values| {
            let patterns = values.patterns.iter().map(|(_, rule)| rule);
            values.exact.values().chain(patterns).chain(&values.any)
        })
    }

    /// The number of limits, including nested rules.
    fn limits(&self) -> usize {
        let of_rule = |rule: &Rule| usize::from(rule.limit.is_some()) + rule.nested.limits();
        self.rules().map(of_rule).sum()
    }

    /// Adds the counted limits, including nested rules, by policy and quota.
    fn collect(&self, limits: &mut BTreeMap<(String, String), u32>) {
        for rule in self.rules() {
            if let Some(Rate::Counted(policies)) = rule.limit.as_ref().map(|limit| &limit.rate) {
                for policy in policies {
                    let (name, quota) = (policy.name().to_owned(), policy.quota());
                    limits.insert((name, quota.to_string()), quota.limit());
                }
            }
            rule.nested.collect(limits);
        }
    }

    /// Returns the most specific rule: by value, by pattern, or by key alone.
    fn find(&self, entry: &Entry) -> Option<&Rule> {
        let Values {
            exact,
            patterns,
            any,
        } = self.0.get(&entry.key)?;
        let by_pattern = || {
            patterns
                .iter()
                .find(|(pattern, _)| matches(pattern, &entry.value))
                .map(|(_, rule)| rule)
        };
        exact.get(&entry.value).or_else(by_pattern).or(any.as_ref())
    }
}

impl LimitText {
    fn read(self, path: &str, shadow: bool) -> Result<Limit, String> {
        let Self {
            name,
            replaces,
            unlimited,
            unit,
            requests_per_unit,
            quota,
            strategy,
        } = self;
        let (quota, default) = match (unlimited, quota, unit, requests_per_unit) {
            (true, None, None, None) => (None, as_envoy()),
            (false, Some(quota), None, None) => (Some(quota), Strategy::default_for(quota)),
            (false, None, Some(unit), Some(requests)) => {
                let unit = Unit::from_str_name(&unit.to_uppercase()).unwrap_or_default();
                (Some(quota_of(unit, requests, strategy)?), as_envoy())
            }
            _ => {
                return Err(
                    "write `unit` and `requests_per_unit`, or `quota`, or `unlimited: true`"
                        .to_owned(),
                );
            }
        };
        if replaces
            .iter()
            .any(|Name { name: of }| of.is_empty() || *of == name)
        {
            return Err("`replaces` needs the `name` of another limit".to_owned());
        }
        let limit = Limit::new(path, quota, strategy.unwrap_or(default))?;
        let current = limit.current.map(|current| RateLimit { name, ..current });
        Ok(Limit {
            current,
            replaces: replaces.into_iter().map(|Name { name }| name).collect(),
            shadow,
            ..limit
        })
    }
}

impl Limit {
    /// Creates a limit. Its policy gets this name, without the characters that policy names cannot have.
    fn new(name: &str, quota: Option<Quota>, strategy: Strategy) -> Result<Self, String> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./".contains(letter);
        let name: String = name
            .chars()
            .map(|letter| if plain(letter) { letter } else { '_' })
            .take(64)
            .collect();
        let rate = match quota {
            None => Rate::Unlimited,
            Some(quota) if quota.limit() == 0 => Rate::Banned,
            Some(quota) => Rate::Counted(
                Policy::new(&name, strategy, quota)
                    .map_err(|error| error.to_string())?
                    .into(),
            ),
        };
        let current = quota.map(|quota| RateLimit {
            name: String::new(),
            requests_per_unit: quota.limit(),
            unit: unit_of(quota).into(),
        });
        Ok(Self {
            current,
            replaces: vec![],
            shadow: false,
            rate,
        })
    }
}

/// Windows aligned with the clock's minutes, hours or days.
fn as_envoy() -> Strategy {
    Strategy::FixedWindow(Align::default())
}

fn period(unit: Unit) -> Result<Duration, String> {
    let known = UNITS.iter().find(|(of, _)| *of == unit);
    known
        .map(|(_, period)| *period)
        .ok_or_else(|| "use `second`, `minute`, `hour`, `day`, .. as `unit`".to_owned())
}

/// Returns the quota of a `unit`: under a calendar, of its months and years.
fn quota_of(unit: Unit, requests: u32, strategy: Option<Strategy>) -> Result<Quota, String> {
    let by_calendar = matches!(strategy, Some(Strategy::FixedWindow(Align::Calendar(_))));
    match unit {
        Unit::Month if by_calendar => Ok(Quota::per_month(requests)),
        Unit::Year if by_calendar => Ok(Quota::per_year(requests)),
        _ => Ok(Quota::per(requests, period(unit)?)),
    }
}

/// Returns the unit that Envoy shows for a quota.
fn unit_of(quota: Quota) -> Unit {
    let limit = quota.limit();
    if quota == Quota::per_month(limit) {
        return Unit::Month;
    } else if quota == Quota::per_year(limit) {
        return Unit::Year;
    }
    let of_period = UNITS.iter().find(|(_, period)| *period == quota.period());
    of_period.map_or(Unit::Unknown, |(unit, _)| *unit)
}

/// Returns `true` if the pattern matches the value. Each `*` matches any text.
fn matches(pattern: &str, value: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(rest) = parts.next().and_then(|start| value.strip_prefix(start)) else {
        return false;
    };
    let Some(mut rest) = parts.next_back().and_then(|end| rest.strip_suffix(end)) else {
        return false;
    };
    parts.all(|part| {
        rest.split_once(part)
            .map(|(_, after)| rest = after)
            .is_some()
    })
}
