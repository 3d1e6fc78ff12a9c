//! The counts in Redis.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde::Serialize;
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::store::{
    AnyStore, Store, StoreConfig, StoreError, StoreKind, StoredCount,
};
use tower_redis_ratelimit::{Key, Limiter, Policies, Policy, Quota, RedisStore, Strategy};

use crate::args::Args;
use crate::callers::{CallerArg, CallerId, caller_of_strikes, log_digits, split_dry_run};
use crate::settings::Settings;

/// Number of counts that are queried concurrently, in one call of the store.
const MAX_CONCURRENT: usize = 128;

pub(crate) struct Counts {
    store: RedisStore,
    /// The policies of `--policy` or, without it, of the settings.
    policies: Vec<Policy>,
    /// Whether to skip counts under other policies.
    only_these: bool,
    max_rows: usize,
    json: bool,
}

/// The state of one caller under one policy.
#[derive(Serialize)]
struct Row {
    caller: String,
    /// The caller in the log.
    log: String,
    dry_run: bool,
    policy: String,
    strategy: &'static str,
    span: String,
    quota: String,
    capacity: u32,
    used: u32,
    remaining: u32,
    /// Seconds until the next request passes, or `None` if it passes now.
    denied_for: Option<f64>,
    /// Seconds until nothing counts.
    reset_after: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    remaining_after_reset: Option<u32>,
    #[serde(skip)]
    count: (Key, Policies),
}

/// The first rows by an order, each of them once: SCAN may return a key twice.
struct FirstRows<F> {
    max: usize,
    order: F,
    /// Up to twice the maximum, unsorted.
    rows: Vec<Row>,
    total: usize,
}

/// The counts that a scan has found.
struct FoundCounts {
    rows: Vec<Row>,
    /// The number of counts that were queried.
    counts: usize,
    /// Counts whose limit is unknown.
    unknown: BTreeSet<CountKind>,
    /// The limits of counts for which the policies name several.
    several: BTreeMap<CountKind, Vec<String>>,
}

/// The name, strategy and span of a count.
type CountKind = (String, &'static str, String);

impl Counts {
    pub(crate) fn open(args: &Args) -> Result<Self, Box<dyn Error>> {
        let settings = args.settings.as_deref().map(Settings::read).transpose()?;
        let settings = settings.unwrap_or_default();
        let mut config = settings.store.unwrap_or_default();
        if config.kind == StoreKind::Local && args.url.is_none() {
            return Err(
                "the service counts in its process (`kind = \"local\"`), not in Redis: use --url to read another server"
                    .into(),
            );
        }
        let url = args.url.clone().or(config.url);
        config.url = Some(url.ok_or("no server: set REDIS_URL, or use --url or --settings")?);
        config.kind = StoreKind::Redis;
        // An operator can wait longer than a request.
        config.timeout = Duration::from_secs(10);
        config.connect_timeout = config.connect_timeout.map(|time| time.max(config.timeout));
        // Those of the service's fallback, which this program does not need.
        let unused = StoreConfig::default();
        config.deadline = unused.deadline;
        config.failures = unused.failures;
        config.share = unused.share;
        config.local_keys = unused.local_keys;
        let store = connect(&config)?;
        let only_these = !args.policies.is_empty();
        Ok(Self {
            store,
            policies: if only_these {
                args.policies.clone()
            } else {
                settings.policies
            },
            only_these,
            max_rows: args.max_rows,
            json: args.json,
        })
    }

    /// The callers whose next request is denied.
    pub(crate) async fn limited(&self) -> Result<String, Box<dyn Error>> {
        let is_limited = |row: &Row| row.denied_for.is_some();
        let wait = |row: &Row| -row.denied_for.unwrap_or_default();
        let (found, limited) = self.list(is_limited, wait).await?;
        let counts = found.counts;
        let is_empty = found.is_empty();
        let text = self.render(found)?;
        if self.json || is_empty {
            return Ok(text);
        }
        Ok(format!(
            "{text}{limited} of {counts} counts deny the next request\n"
        ))
    }

    /// The callers who have used most of a policy.
    pub(crate) async fn top(&self) -> Result<String, Box<dyn Error>> {
        let left = |row: &Row| f64::from(row.remaining) / f64::from(row.capacity.max(1));
        let (found, _) = self.list(|_| true, left).await?;
        self.render(found)
    }

    /// The first rows by an order, and how many are wanted.
    async fn list(
        &self,
        wanted: impl Fn(&Row) -> bool,
        order: impl Fn(&Row) -> f64,
    ) -> Result<(FoundCounts, usize), StoreError> {
        let mut first = FirstRows::new(self.max_rows, order);
        let add = |found: Vec<Row>| {
            for row in found {
                if wanted(&row) {
                    first.add(row);
                }
            }
        };
        let found = self.scan(|_| true, add).await?;
        let (rows, total) = first.finish();
        Ok((FoundCounts { rows, ..found }, total))
    }

    /// The counts of one caller.
    pub(crate) async fn caller(&self, wanted: &CallerArg) -> Result<String, Box<dyn Error>> {
        let found = self.of_caller(wanted).await?;
        if found.is_empty() && !self.json {
            return Ok(wanted.nothing_counted());
        }
        self.render(found)
    }

    /// Resets the counts of one caller.
    pub(crate) async fn reset(&self, wanted: &CallerArg) -> Result<String, Box<dyn Error>> {
        let mut found = self.of_caller(wanted).await?;
        if !found.unknown.is_empty() {
            found.print_notes();
            return Err("nothing was reset: the caller has counts whose limit is unknown".into());
        }
        if found.rows.is_empty() && !self.json {
            return Ok(wanted.nothing_counted());
        }
        let callers: BTreeSet<&str> = found.rows.iter().map(|row| row.caller.as_str()).collect();
        if matches!(wanted.id, CallerId::Log(_)) && callers.len() > 1 {
            let callers: Vec<&str> = callers.into_iter().collect();
            return Err(format!(
                "nothing was reset: {} are the digits of several callers, so name one of them: `{}`",
                wanted.text,
                callers.join("`, `")
            )
            .into());
        }
        for row in &mut found.rows {
            let (key, policies) = &row.count;
            let reset = Check::reset(*key, policies);
            let _: Decision = self.store.check(reset).await?;
            let after = self.store.check(Check::peek(*key, policies, 1)).await?;
            row.remaining_after_reset = Some(after.remaining());
        }
        if self.json {
            return self.render(found);
        }
        let mut text = String::new();
        let names = policy_names(&found.rows);
        for (row, policy) in found.rows.iter().zip(names) {
            let (shown, before, capacity) = (row.display_caller(), row.remaining, row.capacity);
            let after = row.remaining_after_reset.unwrap_or_default();
            writeln!(
                text,
                "reset `{policy}` of {shown}: {before} of {capacity} were left, and {after} are"
            )?;
        }
        text += "Redis counts the next request from zero. An instance that has denied the caller may deny it for up to a second \
                 more. An instance that decides without Redis, or from a leased block, still has its own count.\n";
        Ok(text)
    }

    /// Blocks one caller, or ends the block if there is no time.
    pub(crate) async fn block(
        &self,
        wanted: &CallerArg,
        time: Option<Duration>,
    ) -> Result<String, Box<dyn Error>> {
        if self.policies.is_empty() {
            return Err("a block belongs to the first policy of a layer: name it by --policy, or use --settings".into());
        }
        let keys = match &wanted.id {
            CallerId::Key(key) => vec![*key],
            CallerId::Header(keys) => keys.to_vec(),
            CallerId::Log(_) => {
                return Err("the digits of the log do not tell the caller: name the caller".into());
            }
        };
        let mut text = String::new();
        for policy in &self.policies {
            let limiter = Limiter::new(self.store.clone(), policy.clone());
            for key in &keys {
                match time {
                    Some(time) => limiter.block(*key, time).await?,
                    None => limiter.unblock(*key).await?,
                }
            }
            let done = if time.is_some() {
                "blocked"
            } else {
                "unblocked"
            };
            writeln!(text, "{done} {} under `{}`", wanted.text, policy.name())?;
        }
        if time.is_none() {
            self.reset_strikes(&keys).await?;
        }
        Ok(text)
    }

    /// Resets the strikes of a caller under the policies. Otherwise the next denial could block the caller again.
    async fn reset_strikes(&self, keys: &[Key]) -> Result<(), Box<dyn Error>> {
        let mut scan = self.store.scan();
        while let Some(step) = scan.next().await? {
            for count in step {
                let caller = caller_of_strikes(&count.key);
                let is_caller = keys.iter().any(|key| caller == Some(key.reveal()));
                let is_known = self
                    .policies
                    .iter()
                    .any(|known| known.name() == count.policy);
                if is_caller && is_known {
                    // Any limit has the same count.
                    let quota = format!("1/{}", count.span);
                    let strikes = Policy::new(&count.policy, Strategy::SlidingLog, quota)?.into();
                    let _: Decision = self.store.check(Check::reset(count.key, &strikes)).await?;
                }
            }
        }
        Ok(())
    }

    /// Returns the counts of one caller.
    async fn of_caller(&self, wanted: &CallerArg) -> Result<FoundCounts, StoreError> {
        let mut rows = vec![];
        let is_of = |count: &StoredCount| wanted.matches(&count.key);
        let found = self.scan(is_of, |found| rows.extend(found)).await?;
        // SCAN may return a key twice.
        rows.sort_by(Row::cmp_ids);
        rows.dedup_by(|one, other| one.id() == other.id());
        Ok(FoundCounts { rows, ..found })
    }

    /// Queries the wanted counts, and passes their rows to `add` in chunks. The result has no rows itself.
    async fn scan(
        &self,
        wanted: impl Fn(&StoredCount) -> bool,
        mut add: impl FnMut(Vec<Row>),
    ) -> Result<FoundCounts, StoreError> {
        let (mut scan, mut counts) = (self.store.scan(), 0);
        let (mut unknown, mut several) = (BTreeSet::new(), BTreeMap::new());
        while let Some(step) = scan.next().await? {
            let mut to_query = vec![];
            for count in step.into_iter().filter(&wanted) {
                if caller_of_strikes(&count.key).is_some() {
                    continue;
                }
                let mut known: Vec<&Policy> = self
                    .policies
                    .iter()
                    .filter(|policy| count.is_of(policy))
                    .collect();
                known.sort_by_key(|policy| policy.quota().limit());
                known.dedup_by_key(|policy| policy.quota());
                let bucket = count.bucket();
                let is_bucket = bucket.is_some();
                let policy = match (&known[..], bucket) {
                    ([], _) if self.only_these => continue,
                    // Its value names the quota that wrote it; the settings may write that differently.
                    (_, Some(bucket)) => Some(known_as(&known, bucket)),
                    ([], None) => None,
                    ([.., largest], None) => Some((*largest).clone()),
                };
                if known.len() > 1 && !is_bucket {
                    several.entry(kind_of(&count)).or_insert_with(|| {
                        known
                            .iter()
                            .map(|policy| policy.quota().to_string())
                            .collect()
                    });
                }
                match policy {
                    Some(policy) => to_query.push((count, Policies::from(policy))),
                    None => drop(unknown.insert(kind_of(&count))),
                }
            }
            counts += to_query.len();
            for to_query in to_query.chunks(MAX_CONCURRENT) {
                let rows = to_query
                    .iter()
                    .map(|(count, policies)| self.row(count, policies));
                add(try_join_all(rows).await?);
            }
        }
        Ok(FoundCounts {
            rows: vec![],
            counts,
            unknown,
            several,
        })
    }

    async fn row(&self, count: &StoredCount, policies: &Policies) -> Result<Row, StoreError> {
        let key = count.key;
        let decision = self.store.check(Check::peek(key, policies, 1)).await?;
        let (caller, dry_run) = split_dry_run(&key);
        let (policy, strategy, span) = kind_of(count);
        Ok(Row {
            caller: caller.reveal().to_owned(),
            log: log_digits(&caller),
            dry_run,
            policy,
            strategy,
            span,
            quota: decision.policy().quota().to_string(),
            capacity: decision.capacity(),
            used: decision.used(),
            remaining: decision.remaining(),
            denied_for: decision.retry_after().map(|wait| wait.as_secs_f64()),
            reset_after: decision.reset_after().as_secs_f64(),
            remaining_after_reset: None,
            count: (key, policies.clone()),
        })
    }

    /// Returns the rows as a table, or as JSON.
    fn render(&self, found: FoundCounts) -> Result<String, Box<dyn Error>> {
        found.print_notes();
        if self.json {
            return Ok(serde_json::to_string_pretty(&found.rows)? + "\n");
        }
        if found.is_empty() {
            return Ok(self.nothing_counted());
        }
        if found.rows.is_empty() {
            return Ok(String::new());
        }
        let mut lines =
            vec![["caller", "log", "policy", "left", "next passes", "all back"].map(str::to_owned)];
        let names = policy_names(&found.rows);
        for (row, policy) in found.rows.iter().zip(names) {
            let next = match row.denied_for {
                Some(wait) => format!("in {}", format_duration(wait)),
                None => "now".to_owned(),
            };
            lines.push([
                row.display_caller(),
                row.log.clone(),
                policy,
                format!("{} of {}", row.remaining, row.capacity),
                next,
                format!("in {}", format_duration(row.reset_after)),
            ]);
        }
        Ok(align(&lines).concat())
    }

    fn nothing_counted(&self) -> String {
        let under = if self.only_these {
            " under this policy"
        } else {
            ""
        };
        format!(
            "nothing is counted{under}: the counts have expired, or the service uses another server or prefix\n"
        )
    }

    /// The policies under the prefix, and the number of callers of each.
    pub(crate) async fn policies(&self) -> Result<String, Box<dyn Error>> {
        #[derive(Serialize)]
        struct StoredCount<'a> {
            policy: &'a str,
            strategy: &'a str,
            span: &'a str,
            callers: usize,
        }

        let (mut callers, mut scan) = (BTreeMap::new(), self.store.scan());
        while let Some(counts) = scan.next().await? {
            for count in counts {
                let name = (count.policy, count.strategy, count.span);
                *callers.entry(name).or_insert(0) += 1;
            }
        }
        if self.json {
            let rows: Vec<_> = callers
                .iter()
                .map(|((policy, strategy, span), callers)| StoredCount {
                    policy,
                    strategy,
                    span,
                    callers: *callers,
                })
                .collect();
            return Ok(serde_json::to_string_pretty(&rows)? + "\n");
        }
        if callers.is_empty() {
            return Ok(self.nothing_counted());
        }
        let mut lines = vec![["policy", "strategy", "span", "callers"].map(str::to_owned)];
        for ((policy, strategy, span), callers) in &callers {
            let shown = if span.is_empty() { "-" } else { span };
            lines.push([policy, *strategy, shown, &callers.to_string()].map(str::to_owned));
        }
        let lines = align(&lines);
        let mut text = lines[0].clone();
        let mut before = "";
        for (line, (policy, ..)) in lines[1..].iter().zip(callers.keys()) {
            text += line;
            if policy == before {
                text += "  ^ two counts under one name: programs that share this prefix differ\n";
            }
            before = policy;
        }
        Ok(text)
    }
}

impl Row {
    /// Identifies the count.
    fn id(&self) -> (&str, &str, &str, &str) {
        let (key, _) = &self.count;
        (key.reveal(), &self.policy, self.strategy, &self.span)
    }

    fn cmp_ids(&self, other: &Self) -> Ordering {
        self.id().cmp(&other.id())
    }

    fn display_caller(&self) -> String {
        let mark = if self.dry_run { " (dry run)" } else { "" };
        format!("{}{mark}", self.caller)
    }
}

impl<F: Fn(&Row) -> f64> FirstRows<F> {
    fn new(max: usize, order: F) -> Self {
        Self {
            max,
            order,
            rows: vec![],
            total: 0,
        }
    }

    fn add(&mut self, row: Row) {
        self.rows.push(row);
        self.total += 1;
        // Sorting once for `max` added rows keeps the time for each row logarithmic.
        if self.rows.len() >= 2 * self.max.max(MAX_CONCURRENT) {
            self.trim();
        }
    }

    /// Removes repeated rows, and those beyond `max`.
    fn trim(&mut self) {
        self.rows.sort_by(Row::cmp_ids);
        let added = self.rows.len();
        self.rows.dedup_by(|one, other| one.id() == other.id());
        self.total -= added - self.rows.len();
        // Equal rows stay sorted by id.
        let order = &self.order;
        self.rows
            .sort_by(|one, other| order(one).total_cmp(&order(other)));
        self.rows.truncate(self.max);
    }

    /// Returns the rows, and the number of those added.
    fn finish(mut self) -> (Vec<Row>, usize) {
        self.trim();
        (self.rows, self.total)
    }
}

impl FoundCounts {
    fn is_empty(&self) -> bool {
        self.counts == 0 && self.rows.is_empty() && self.unknown.is_empty()
    }

    /// Prints, on standard error, the counts whose limit is unknown, and those with several limits.
    fn print_notes(&self) {
        for (name, strategy, span) in &self.unknown {
            // The span of a window of the clock begins with its period, that of a calendar with its unit.
            let is_calendar =
                *strategy == "fixed-window" && !span.starts_with(|c: char| c.is_ascii_digit());
            let calendar = if is_calendar { "(CALENDAR)" } else { "" };
            eprintln!(
                "the limit of `{name} {strategy} {span}` is not in Redis: use --settings FILE, or --policy '{name} \
                 {strategy}{calendar} LIMIT/PERIOD'"
            );
        }
        for ((name, strategy, _), limits) in &self.several {
            let (least, limits) = (&limits[0], limits.join("`, `"));
            eprintln!(
                "`{name}` has the limits `{limits}`, and the largest one is shown: for another, use --policy '{name} {strategy} {least}'"
            );
        }
    }
}

/// Returns the policy of the settings that decides as this bucket does, or the bucket.
fn known_as(known: &[&Policy], bucket: Policy) -> Policy {
    let is_same = |policy: &&&Policy| {
        let [one, other] = [policy.quota(), bucket.quota()];
        let parts = |one: Quota, other: Quota| u128::from(one.limit()) * other.period().as_micros();
        one.capacity() == other.capacity() && parts(one, other) == parts(other, one)
    };
    let same = known.iter().find(is_same).map(|policy| (*policy).clone());
    same.unwrap_or(bucket)
}

fn kind_of(count: &StoredCount) -> CountKind {
    (count.policy.clone(), count.strategy, count.span.clone())
}

/// Returns the policy's name for each row, with its strategy and span if the rows have several under this name.
fn policy_names(rows: &[Row]) -> Vec<String> {
    let mut kinds = BTreeMap::<&str, BTreeSet<_>>::new();
    for row in rows {
        let of_name = kinds.entry(&row.policy).or_default();
        of_name.insert((row.strategy, &row.span));
    }
    let name = |row: &Row| match kinds[row.policy.as_str()].len() {
        1 => row.policy.clone(),
        _ if row.span.is_empty() => format!("{} {}", row.policy, row.strategy),
        _ => format!("{} {} {}", row.policy, row.strategy, row.span),
    };
    rows.iter().map(name).collect()
}

/// Returns lines whose columns are as wide as their longest text.
fn align<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let mut widths = [0; N];
    for row in rows {
        for (width, text) in widths.iter_mut().zip(row) {
            *width = text.chars().count().max(*width);
        }
    }
    let mut lines = vec![];
    for row in rows {
        let mut line = String::new();
        for (width, text) in widths.iter().zip(row) {
            line += &format!("{text:<width$}  ");
        }
        lines.push(format!("{}\n", line.trim_end()));
    }
    lines
}

/// Returns a number of seconds as a person reads it: its two largest units, rounded up.
fn format_duration(seconds: f64) -> String {
    let whole = seconds.ceil() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3_600 => format!("{} min {} s", whole / 60, whole % 60),
        3_600..86_400 => {
            let minutes = whole.div_ceil(60);
            format!("{} h {} min", minutes / 60, minutes % 60)
        }
        _ => {
            let hours = whole.div_ceil(3_600);
            format!("{} d {} h", hours / 24, hours % 24)
        }
    }
}

fn connect(config: &StoreConfig) -> Result<RedisStore, Box<dyn Error>> {
    match AnyStore::from_config(config)? {
        AnyStore::Redis(store) => Ok(store),
        _ => Err("the settings name no Redis: use --url".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tower_redis_ratelimit::{Key, Policies, Policy, Strategy};

    use super::{FirstRows, Row, format_duration};

    fn row(number: u32, policies: &Policies) -> Row {
        Row {
            caller: String::new(),
            log: String::new(),
            dry_run: false,
            policy: "api".to_owned(),
            strategy: "gcra",
            span: String::new(),
            quota: String::new(),
            capacity: 0,
            used: 0,
            // Far from the order of the keys.
            remaining: number.wrapping_mul(0x9e37_79b1),
            denied_for: None,
            reset_after: 0.0,
            remaining_after_reset: None,
            count: (Key::new(number.to_string()), policies.clone()),
        }
    }

    #[test]
    fn a_long_list_sorts_each_row_rarely() {
        let policy = Policy::new("api", Strategy::Gcra, "10/min");
        let policies = Policies::from(policy.unwrap());
        let (max, added) = (20_000, 100_000);
        let compared = Cell::new(0_usize);
        let order = |row: &Row| {
            compared.set(compared.get() + 1);
            f64::from(row.remaining)
        };
        let mut first = FirstRows::new(max, order);
        for number in 0..added {
            first.add(row(number, &policies));
        }
        let (rows, total) = first.finish();
        let mut expected: Vec<u32> = (0..added)
            .map(|number| row(number, &policies).remaining)
            .collect();
        expected.sort_unstable();
        let listed: Vec<u32> = rows.iter().map(|row| row.remaining).collect();
        assert_eq!(listed, expected[..max]);
        assert_eq!(total, added as usize);
        let each = compared.get() / added as usize;
        assert!(each < 100, "{each} orders for each row");
    }

    #[test]
    fn equal_rows_are_sorted_by_caller() {
        let policy = Policy::new("api", Strategy::Gcra, "10/min");
        let policies = Policies::from(policy.unwrap());
        let mut first = FirstRows::new(2, |_: &Row| 0.0);
        for number in [3, 1, 2, 1] {
            first.add(row(number, &policies));
        }
        let (rows, total) = first.finish();
        let callers: Vec<_> = rows.iter().map(|row| row.count.0.reveal()).collect();
        assert_eq!((callers, total), (vec!["1", "2"], 3));
    }

    #[test]
    fn durations_have_two_units() {
        for (seconds, text) in [
            (0.0, "0.0 s"),
            (35.94, "35.9 s"),
            (59.4, "1 min 0 s"),
            (3_599.9, "1 h 0 min"),
            (10_313.7, "2 h 52 min"),
            (86_400.0, "1 d 0 h"),
            (200_000.0, "2 d 8 h"),
        ] {
            assert_eq!(format_duration(seconds), text);
        }
    }
}
