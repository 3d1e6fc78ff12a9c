//! The table "What people sell" of `docs/choosing.md`.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use http::request::Parts;
use serde_json::json;
use tower_redis_ratelimit::extract::key_fn;
use tower_redis_ratelimit::select::{Live, Tiers};
use tower_redis_ratelimit::strategy::{Align, Calendar};
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Strategy};

use crate::mocks::{gcra, layer};

/// The lines of the table, without its head.
fn table() -> impl Iterator<Item = &'static str> {
    let page = include_str!("../../../docs/choosing.md");
    let (_, section) = page.split_once("## What people sell").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    section
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(1)
}

/// Returns the text of a cell that is only code.
fn code(cell: &str) -> Option<&str> {
    let code = cell.trim().strip_prefix('`')?.strip_suffix('`')?;
    (!code.contains('`')).then_some(code)
}

#[test]
fn each_text_is_a_policy() {
    let mut policies = 0;
    for line in table() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        let [_, strategy, quota] = cells[..] else {
            panic!("three cells: {line}")
        };
        let (Some(strategy), Some(quota)) = (code(strategy), code(quota)) else {
            continue;
        };
        if strategy.starts_with("Align::") {
            continue;
        }
        let policy = json!({ "name": "plan", "strategy": strategy, "quota": quota });
        let policy: Result<Policy, _> = serde_json::from_value(policy);
        let is_known = cfg!(feature = "time-zones") || !strategy.contains("Europe/");
        assert_eq!(policy.is_ok(), is_known, "{line}: {policy:?}");
        policies += 1;
    }
    assert_eq!(policies, 9);
}

/// Compiles code that the table has.
macro_rules! sold {
    (= $($code:tt)+) => {{
        in_table(stringify!($($code)+));
        $($code)+
    }};
    ($receiver:ident $($code:tt)+) => {{
        in_table(stringify!($($code)+));
        $receiver $($code)+
    }};
}

fn in_table(code: &str) {
    let joined = |text: &str| text.split_whitespace().collect::<String>();
    let code = format!("`{}`", joined(code));
    assert!(table().any(|line| joined(line).contains(&code)), "{code}");
}

/// Weeks since the Unix epoch.
fn window_of(now: SystemTime) -> Range<SystemTime> {
    const WEEK: u64 = 7 * 86_400;
    let since = now.duration_since(SystemTime::UNIX_EPOCH);
    let number = since.unwrap_or_default().as_secs() / WEEK;
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(number * WEEK);
    start..start + Duration::from_secs(WEEK)
}

fn idempotency_key(request: &Parts) -> Option<Key> {
    request.headers.get("idempotency-key").map(Key::new)
}

#[tokio::test(start_paused = true)]
async fn each_line_of_code_compiles() -> Result<(), Box<dyn std::error::Error>> {
    let billing = sold!(= Align::Calendar(Calendar::custom("billing", window_of)?));
    let plan = Policy::new("plan", Strategy::FixedWindow(billing), "10000/month")?;

    let limits = layer("100/min");
    let limits = sold!(limits.block_after("20/min", Duration::from_secs(600))?);
    let by_company = key_fn(|request| request.headers.get("x-company").map(Key::new));
    let per_company = gcra("company", "10000/min");
    let limits = sold!(limits.and(by_company, per_company));
    let limits = sold!(limits.id(idempotency_key));
    drop(limits);

    let limiter = Limiter::new(LocalStore::default(), plan);
    let key = Key::new("ann");
    let decision = limiter.take(key, 7).await?;
    let used = sold!(= decision.used());
    let capacity = sold!(= decision.capacity());
    assert_eq!((used, capacity), (7, 10_000));
    let bought = Policies::from(gcra("api", "9/s"));
    let raised = sold!(= limiter.under(&bought));
    assert_eq!(raised.take(key, 1).await?.capacity(), 9);
    let live = Live::new(Tiers::new(gcra("free", "1/s")));
    let tiers = Tiers::new(gcra("free", "2/s")).tier("banned", sold!(= Policies::blocked()));
    sold!(= live.replace(tiers));

    let limiter = limiter.with_blocks();
    sold!(= limiter.block(key, Duration::from_secs(86_400)).await?);
    assert!(!limiter.take(key, 1).await?.is_allowed());
    Ok(())
}
