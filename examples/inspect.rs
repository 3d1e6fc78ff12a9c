//! `cargo run --example inspect`
//!
//! Prints the counts in Redis: the policies, the callers who have used most of a policy, or one caller's counts, which
//! it can reset. `REDIS_URL` names the servers (`redis://127.0.0.1/`): a server, sentinels or a cluster, and the
//! prefix.
//!
//! ```sh
//! export REDIS_URL='redis://127.0.0.1/?prefix=shop'
//! cargo run --example inspect                                            # the policies, and how many callers each has
//! cargo run --example inspect 'api 50/s burst 100'                       # its callers who have used most
//! cargo run --example inspect 'api 50/s burst 100' user-42               # one of them
//! cargo run --example inspect 'api 50/s burst 100' user-42 reset
//! ```
//!
//! Redis does not store the limit of a window, so write a policy as the service configures it: `name quota`, or with the
//! strategy in between, such as `login sliding-log 5/15m` and `uploads in-flight 10/30s`. Write a caller as `user-42`,
//! `ip:192.0.2.7`, `*` for a global count, a tuple with commas, and an API key as `secret:sk-1` or by its hash, `~` and
//! 32 digits: Redis stores no secrets.
//!
//! The lists scan the whole database, a thousand keys at a time. So does the query for a caller without counts, as the
//! policy may be misspelled. The Redis user needs `+scan` for that. A reset takes effect in all instances within a
//! second, because each caches a denial for at most that time.

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde::Deserialize;
use serde::de::value::{Error as NoKey, MapDeserializer, StrDeserializer};
use tower_redis_ratelimit::check::Decision;
use tower_redis_ratelimit::store::{StoreError, StoredCount};
use tower_redis_ratelimit::{Key, Limiter, Policy, RedisStore};

/// Maximum number of callers in a list.
const TOP: usize = 20;
/// Number of callers that are queried concurrently, in one call of the store.
const TOGETHER: usize = 128;

#[tokio::main]
async fn main() -> ExitCode {
    let Err(error) = run().await else {
        return ExitCode::SUCCESS;
    };
    let mut causes = Some(&*error);
    while let Some(cause) = causes {
        eprintln!("{cause}");
        causes = cause.source();
    }
    ExitCode::FAILURE
}

async fn run() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    // An operator can wait longer than a request.
    let store = RedisStore::builder(&url)
        .timeout(Duration::from_secs(10))
        .connect()
        .await?;
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => policies(&store).await?,
        [text] => hottest(&store, policy(text)?).await?,
        [text, caller] => show(&store, policy(text)?, key(caller)?).await?,
        [text, caller, "reset"] => {
            let (policy, key) = (policy(text)?, key(caller)?);
            show(&store, policy.clone(), key).await?;
            let limiter = Limiter::new(store, policy);
            let _ = limiter.reset(key).await?;
            print(key, &limiter.peek(key, 1).await?);
        }
        _ => {
            return Err(
                "write nothing, a policy, or a policy and a caller, with `reset` behind them"
                    .into(),
            );
        }
    }
    Ok(())
}

/// Parses `name quota` or `name strategy quota`.
fn policy(text: &str) -> Result<Policy, NoKey> {
    let (name, rest) = text.trim().split_once(' ').unwrap_or((text, ""));
    // A strategy may contain a number, but none of its words begins with a digit.
    let mut digits = rest
        .match_indices(|c: char| c.is_ascii_digit())
        .map(|(at, _)| at);
    let (strategy, quota) = rest.split_at(
        digits
            .find(|at| rest[..*at].trim_end().len() < *at || *at == 0)
            .unwrap_or(0),
    );
    let strategy = Some(("strategy", strategy.trim())).filter(|(_, strategy)| !strategy.is_empty());
    let fields = [("name", name), ("quota", quota)]
        .into_iter()
        .chain(strategy);
    Policy::deserialize(MapDeserializer::new(fields))
}

/// Parses a caller as in a file of settings, or as in Redis.
fn key(text: &str) -> Result<Key, NoKey> {
    Key::deserialize(StrDeserializer::new(text))
}

/// Returns the number of callers of each count, by name, strategy and span.
async fn callers(
    store: &RedisStore,
) -> Result<BTreeMap<(String, &'static str, String), usize>, StoreError> {
    let (mut callers, mut scan) = (BTreeMap::new(), store.scan());
    while let Some(counts) = scan.next().await? {
        for count in counts {
            *callers
                .entry((count.policy, count.strategy, count.span))
                .or_default() += 1;
        }
    }
    Ok(callers)
}

/// Prints the number of callers of each policy.
async fn policies(store: &RedisStore) -> Result<(), StoreError> {
    let callers = callers(store).await?;
    println!(
        "{:<24} {:<16} {:<12} {:>8}",
        "policy", "strategy", "span", "callers"
    );
    let mut before = "";
    for ((policy, strategy, span), callers) in &callers {
        let shown = if span.is_empty() { "-" } else { span };
        println!("{policy:<24} {strategy:<16} {shown:<12} {callers:>8}");
        if policy == before {
            println!(
                "  ^ two counts under one name: programs that share this prefix differ, and do not count together"
            );
        }
        before = policy;
    }
    Ok(())
}

/// Returns the name of a policy's strategy in counts.
fn strategy(policy: &Policy) -> String {
    let text = policy
        .strategy()
        .map_or_else(|| "in-flight".to_owned(), |strategy| strategy.to_string());
    text.split('(').next().unwrap_or_default().to_owned()
}

/// If there are no counts under this policy, prints the counts that exist. Returns `true` if so.
async fn is_missing(store: &RedisStore, policy: &Policy) -> Result<bool, StoreError> {
    let mut scan = store.scan();
    while let Some(counts) = scan.next().await? {
        if counts.iter().any(|count| count.is_of(policy)) {
            return Ok(false);
        }
    }
    let (callers, strategy) = (callers(store).await?, strategy(policy));
    let others: Vec<String> = callers
        .keys()
        .map(|(name, strategy, span)| format!("`{name} {strategy} {span}`"))
        .collect();
    let others = if others.is_empty() {
        "nothing else".to_owned()
    } else {
        others.join(", ")
    };
    println!(
        "nothing is counted as `{} {strategy}`; there is {others}",
        policy.name()
    );
    Ok(true)
}

/// Prints the callers who have used most of a policy.
async fn hottest(store: &RedisStore, policy: Policy) -> Result<(), StoreError> {
    let limiter = Limiter::new(store.clone(), policy.clone());
    let (mut top, mut scan) = (Vec::<(Key, Decision)>::new(), store.scan());
    while let Some(counts) = scan.next().await? {
        let is_of = |count: &StoredCount| count.is_of(&policy);
        let callers: Vec<Key> = counts
            .into_iter()
            .filter(is_of)
            .map(|count| count.key)
            .collect();
        for callers in callers.chunks(TOGETHER) {
            let decisions =
                try_join_all(callers.iter().map(|caller| limiter.peek(*caller, 1))).await?;
            top.extend(callers.iter().copied().zip(decisions));
        }
        top.sort_by_key(|(key, decision)| (decision.remaining(), key.reveal().to_owned()));
        top.dedup_by_key(|(key, _)| *key);
        top.truncate(TOP);
    }
    if top.is_empty() {
        is_missing(store, &policy).await?;
    }
    for (key, decision) in top {
        print(key, &decision);
    }
    Ok(())
}

/// Prints the counts of one caller.
async fn show(store: &RedisStore, policy: Policy, key: Key) -> Result<(), StoreError> {
    let decision = Limiter::new(store.clone(), policy.clone())
        .peek(key, 1)
        .await?;
    if decision.remaining() < decision.capacity() || !is_missing(store, &policy).await? {
        print(key, &decision);
    }
    Ok(())
}

fn print(key: Key, decision: &Decision) {
    let (left, most) = (decision.remaining(), decision.capacity());
    let next = match decision.retry_after() {
        Some(wait) => format!("denied for {:.1} s", wait.as_secs_f64()),
        None => "passes".to_owned(),
    };
    let reset = decision.reset_after().as_secs_f64();
    println!(
        "{:<40} {left:>7} of {most} left, {next}, all back in {reset:.1} s",
        key.reveal()
    );
}
