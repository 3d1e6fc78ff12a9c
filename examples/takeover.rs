//! `cargo run --example takeover redis-rate rate: api '1000/h'`
//! `cargo run --example takeover redis-cell throttle/ api '1000/h'`
//! `cargo run --example takeover incr 'old:*' api '100/10m'`
//!
//! Moves the counts of redis_rate (v9, v10), redis-cell, or a limiter of INCR and EXPIRE to a policy of this crate, so that callers do
//! not get a second burst. Build it in advance, and run it immediately after your service has switched. Requests that were
//! allowed in between become a debt, which drains. A second run within a period of the policy charges nothing twice.
//!
//! The arguments are the system, the prefix of its keys, and the name and the quota of your policy,
//! which must use `Gcra`. The rest of a key must be the caller as your extractor names it; otherwise change the
//! function `caller`, for example to `Key::ip` for addresses. `REDIS_URL` names the server (`redis://127.0.0.1/`), with
//! your service's prefix if there is one (`?prefix=shop`). The old keys stay until they expire.
//!
//! A counter of INCR and EXPIRE is charged as if all of it had been charged when its window began, with the quota's period: a part has
//! refilled since, and the rest is free when the window would have ended.
//!
//! Keys whose name or value is not UTF-8, and counters that never expire, are skipped, counted and reported.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;

use futures_util::future::try_join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, RedisStore, Strategy, redis};

/// Seconds from 1970 to 2017, the epoch of redis_rate.
const YEAR_2017: f64 = 1_483_228_800.0;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [system, prefix, name, quota] = &args[..] else {
        return Err("write `redis-rate`, `redis-cell` or `incr`, the prefix of its keys, and the policy's name and quota".into());
    };
    if !["redis-rate", "redis-cell", "incr"].contains(&system.as_str()) {
        return Err(
            format!("{system:?} is not known: write `redis-rate`, `redis-cell` or `incr`").into(),
        );
    }
    let prefix = prefix.strip_suffix('*').unwrap_or(prefix);
    let policy = Policy::new(name.as_str(), Strategy::Gcra, quota.parse()?)?;
    let period = policy.quota().period().as_secs_f64();
    let limit = f64::from(policy.quota().limit());
    let interval = period / limit;
    // The units that have not refilled, or `None` for an invalid value. Times are in seconds.
    let used = |value: &str, now: f64, age: f64| match system.as_str() {
        "redis-rate" => Some((value.parse::<f64>().ok()? + YEAR_2017 - now) / interval),
        "redis-cell" => Some((value.parse::<u64>().ok()? as f64 / 1e9 - now) / interval),
        // The counter also counts denied requests.
        _ => Some(f64::from(value.parse::<u32>().ok()?).min(limit) - age / interval),
    };
    let policies = Policies::from(policy);

    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let store = RedisStore::connect(&url).await?;
    let mut redis = redis::Client::open(url)?
        .get_multiplexed_async_connection()
        .await?;
    // SCAN may return a key twice.
    let (mut keys, mut cursor) = (BTreeSet::new(), 0_u64);
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(format!("{prefix}*"))
            .arg("COUNT")
            .arg(1_000);
        let found: Vec<Vec<u8>>;
        (cursor, found) = scan.query_async(&mut redis).await?;
        keys.extend(found);
        if cursor == 0 {
            break;
        }
    }
    let keys: Vec<Vec<u8>> = keys.into_iter().collect();
    let (mut charged, mut example, mut skipped) = (0, None, vec![]);
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
        let old = keys.iter().zip(values).zip(left);
        let charges = old.filter_map(|((key, value), left)| {
            let value = value?;
            let (Ok(name), Ok(value)) = (str::from_utf8(key), str::from_utf8(&value)) else {
                skipped.push(key.escape_ascii());
                return None;
            };
            if system == "incr" && left == -1.0 {
                skipped.push(key.escape_ascii());
                return None;
            }
            // Of the window of a counter.
            let age = (period - left / 1_000.0).max(0.0);
            let used = used(value, now, age)?.ceil() as u32;
            let rest = name.strip_prefix(prefix)?;
            let charge = Check::charge(caller(rest), &policies, used);
            (used > 0).then(|| {
                example.get_or_insert(rest);
                store.check(charge.with_id("takeover"))
            })
        });
        charged += try_join_all(charges).await?.len();
    }
    let such_as = example
        .map(|rest| format!(", such as {rest:?}"))
        .unwrap_or_default();
    println!(
        "{} keys begin with {prefix:?}; took over the counts of {charged} callers{such_as}",
        keys.len()
    );
    if let [first, ..] = &skipped[..] {
        let number = skipped.len();
        eprintln!("skipped {number} keys that are not UTF-8 or never expire, such as \"{first}\"");
    }
    Ok(())
}

/// Returns the caller in the rest of a key.
fn caller(rest: &str) -> Key {
    Key::new(rest)
}
