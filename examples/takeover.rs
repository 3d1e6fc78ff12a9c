//! `cargo run --example takeover redis-rate rate: api '1000/h'`
//!
//! Moves the counts of redis_rate (v9, v10) or redis-cell to a policy of this crate, so that callers do not get a
//! second burst. Build it in advance, and run it immediately after your service has switched. Requests that were
//! allowed in between become a debt, which drains. A second run within a period of the policy charges nothing twice.
//!
//! The arguments are `redis-rate` or `redis-cell`, the prefix of its keys, and the name and the quota of your policy,
//! which must use `Gcra`. The rest of a key must be the caller as your extractor names it; otherwise change the
//! function `caller`, for example to `Key::ip` for addresses. `REDIS_URL` names the server (`redis://127.0.0.1/`), with
//! your service's prefix if there is one (`?prefix=shop`). The old keys stay until they expire.
//!
//! A key whose name or value is not UTF-8 is skipped, counted and reported: its count is not moved.

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
        return Err("write redis-rate or redis-cell, what its keys begin with, and the policy's name and quota".into());
    };
    let free_at = match system.as_str() {
        "redis-rate" => of_redis_rate,
        "redis-cell" => of_redis_cell,
        other => {
            return Err(
                format!("{other:?} is not known: write `redis-rate` or `redis-cell`").into(),
            );
        }
    };
    let policy = Policy::new(name.as_str(), Strategy::Gcra, quota.parse()?)?;
    let interval = policy.quota().period().as_secs_f64() / f64::from(policy.quota().limit());
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
        let charges = keys.iter().zip(&values).filter_map(|(key, value)| {
            let value = value.as_deref()?;
            let (Ok(name), Ok(value)) = (str::from_utf8(key), str::from_utf8(value)) else {
                skipped.push(key.escape_ascii());
                return None;
            };
            let used = ((free_at(value)? - now) / interval).ceil() as u32;
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
        eprintln!(
            "skipped {number} keys, since the name or the value is not UTF-8, such as \"{first}\""
        );
    }
    Ok(())
}

/// Returns the caller in the rest of a key.
fn caller(rest: &str) -> Key {
    Key::new(rest)
}

/// Returns the time in seconds since 1970 at which all grants will have expired, or `None` for an invalid value.
fn of_redis_rate(value: &str) -> Option<f64> {
    Some(value.parse::<f64>().ok()? + YEAR_2017)
}

/// redis-cell counts in nanoseconds.
fn of_redis_cell(value: &str) -> Option<f64> {
    Some(value.parse::<u64>().ok()? as f64 / 1e9)
}
