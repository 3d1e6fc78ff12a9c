//! `cargo run --example takeover redis-rate rate: api '1000/h'`
//! `cargo run --example takeover redis-cell throttle/ api '1000/h'`
//! `cargo run --example takeover incr 'old:*' api '100/10m'`
//! `cargo run --example takeover incr 'old:*' api '100/10m' 'fixed-window(first-hit)'`
//!
//! Moves the counts of redis_rate (v9, v10), redis-cell, or a limiter of INCR and EXPIRE to a policy of this crate, so that callers do
//! not get a second burst. Build it in advance, and run it immediately after your service has switched. Requests that were
//! allowed in between become a debt, which drains. A second run within a period of the policy charges nothing twice.
//!
//! The arguments are the system, the prefix of its keys, and the name, the quota and the strategy of your policy. The strategy is
//! `gcra` by default, and may be `fixed-window(first-hit)` for `incr`. The rest of a key must be the caller as your extractor names
//! it; otherwise change the function `caller`, for example to `Key::ip` for addresses. `REDIS_URL` names the server
//! (`redis://127.0.0.1/`), with your service's prefix if there is one (`?prefix=shop`). The old keys stay until they expire.
//!
//! A counter of INCR and EXPIRE is charged under `gcra` as if all of it had been charged when its window began, with the quota's
//! period: a part has refilled since, and the rest is free when the window would have ended. Under `fixed-window(first-hit)`, a
//! charge begins a window of a whole period. So the program runs until the last old window has ended, and resets each caller when
//! the caller's window ends. If it is stopped earlier, the remaining callers wait until a period after the takeover.
//!
//! Keys whose name is not UTF-8, values that the system does not write, times that are more than three years away, and counters that
//! never expire are skipped, counted and reported. It is an error if no caller had a count left, so that a typing error does not look
//! like a takeover.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::time::{Instant, sleep_until};
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::redis::aio::MultiplexedConnection;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, Policies, Policy, RedisStore, Strategy, redis};

/// Seconds from 1970 to 2017, the epoch of redis_rate.
const YEAR_2017: f64 = 1_483_228_800.0;
/// Three years in seconds. The system writes no time that is further away.
const FAR: f64 = 3.0 * 365.0 * 86_400.0;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let (system, prefix, name, quota, strategy) = match &args[..] {
        [system, prefix, name, quota] => (system, prefix, name, quota, "gcra"),
        [system, prefix, name, quota, strategy] => (system, prefix, name, quota, &**strategy),
        _ => return Err("write `redis-rate`, `redis-cell` or `incr`, the prefix of its keys, and the policy's name, quota and strategy".into()),
    };
    if !["redis-rate", "redis-cell", "incr"].contains(&system.as_str()) {
        return Err(format!(
            "unknown limiter `{system}`: use `redis-rate`, `redis-cell` or `incr`"
        )
        .into());
    }
    let strategy: Strategy = strategy.parse()?;
    let has_windows = strategy == Strategy::FixedWindow(Align::FirstHit) && system == "incr";
    if strategy != Strategy::Gcra && !has_windows {
        return Err(format!(
            "counts of `{system}` cannot become counts of `{strategy}`: write `gcra`, or for `incr` `fixed-window(first-hit)`"
        )
        .into());
    }
    let prefix = prefix.strip_suffix('*').unwrap_or(prefix);
    let policy = Policy::new(name.as_str(), strategy, quota)?;
    let period = policy.quota().period().as_secs_f64();
    let limit = f64::from(policy.quota().limit());
    let interval = period / limit;
    // The units that have not refilled, or `None` for an invalid value. Times are in seconds.
    let until = |left: f64| (left.abs() <= FAR).then_some(left / interval);
    let used = |value: &str, now: f64, age: f64| match system.as_str() {
        "redis-rate" => until(value.parse::<f64>().ok()? + YEAR_2017 - now),
        "redis-cell" => until(value.parse::<u64>().ok()? as f64 / 1e9 - now),
        // The counter also counts denied requests.
        _ => {
            let granted = f64::from(value.parse::<u32>().ok()?).min(limit);
            Some(granted - if has_windows { 0.0 } else { age / interval })
        }
    };
    let policies = Policies::from(policy);

    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let store = RedisStore::connect(&url).await?;
    let mut redis = redis::Client::open(url)?
        .get_multiplexed_async_connection()
        .await?;
    let keys = keys(&mut redis, prefix).await?;
    let (mut charged, mut example, mut skipped, mut windows) = (0, None, vec![], vec![]);
    for keys in keys.chunks(1_000) {
        let mut read = redis::pipe();
        read.cmd("MGET").arg(keys).cmd("TIME");
        let (values, now): (Vec<Option<Vec<u8>>>, (f64, f64)) =
            read.query_async(&mut redis).await?;
        let now = now.0 + now.1 / 1_000_000.0;
        let mut read = redis::pipe();
        for key in keys {
            read.cmd("PTTL").arg(key);
        }
        let left: Vec<f64> = read.query_async(&mut redis).await?;
        let read_at = instant();
        let old = keys.iter().zip(values).zip(left);
        let charges = old.filter_map(|((key, value), left)| {
            // It has expired since.
            if left == -2.0 {
                return None;
            }
            // The age of a counter's window.
            let age = (period - left / 1_000.0).max(0.0);
            let read = || {
                let rest = str::from_utf8(key).ok()?.strip_prefix(prefix)?;
                let used = used(str::from_utf8(&value?).ok()?, now, age)?;
                (system != "incr" || left != -1.0).then_some((rest, used.ceil() as u32))
            };
            let Some((rest, used)) = read() else {
                skipped.push(key.escape_ascii());
                return None;
            };
            let key = caller(rest);
            let charge = Check::charge(key, &policies, used).with_id("takeover");
            (used > 0).then(|| {
                example.get_or_insert(rest);
                let charge = store.check(charge);
                async move { Ok::<_, Box<dyn Error>>((key, left, charge.await?)) }
            })
        });
        for (key, left, decision) in try_join_all(charges).await? {
            charged += 1;
            let left = Duration::from_secs_f64(left.max(0.0) / 1_000.0);
            // A window that began before the takeover may end before the old one.
            if has_windows && left < decision.reset_after() {
                windows.push((read_at + left, key));
            }
        }
    }
    if let [first, ..] = &skipped[..] {
        let number = skipped.len();
        eprintln!(
            "skipped {number} keys that `{system}` cannot read or that never expire, such as \"{first}\""
        );
    }
    let found = format!("{} keys begin with {prefix:?}", keys.len());
    let Some(example) = example else {
        return Err(format!("took over nothing: {found}, and no caller has a count left").into());
    };
    println!("{found}; took over the counts of {charged} callers, such as {example:?}");

    windows.sort_unstable_by_key(|(end, _)| *end);
    if let Some((end, _)) = windows.last() {
        let last = end.saturating_duration_since(instant()).as_secs() + 1;
        println!(
            "keep this running: it resets each caller when the old window ends, the last one in {last} s"
        );
    }
    for (end, key) in &windows {
        sleep_until(*end).await;
        let _: Decision = store.check(Check::reset(*key, &policies)).await?;
    }
    if has_windows {
        println!("all old windows have ended");
    }
    Ok(())
}

/// Returns the keys with a prefix.
async fn keys(redis: &mut MultiplexedConnection, prefix: &str) -> redis::RedisResult<Vec<Vec<u8>>> {
    // Redis's patterns escape by a backslash.
    let mut pattern = String::new();
    for char in prefix.chars() {
        if matches!(char, '\\' | '*' | '?' | '[' | ']') {
            pattern.push('\\');
        }
        pattern.push(char);
    }
    pattern.push('*');
    // SCAN may return a key twice.
    let (mut keys, mut cursor) = (BTreeSet::new(), 0_u64);
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(&pattern)
            .arg("COUNT")
            .arg(1_000);
        let found: Vec<Vec<u8>>;
        (cursor, found) = scan.query_async(redis).await?;
        keys.extend(found);
        if cursor == 0 {
            return Ok(keys.into_iter().collect());
        }
    }
}

/// Returns the caller in the rest of a key.
fn caller(rest: &str) -> Key {
    Key::new(rest)
}

#[allow(clippy::disallowed_methods, reason = "old windows end in real time")]
fn instant() -> Instant {
    Instant::now()
}
