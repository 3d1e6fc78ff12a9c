//! The local store: exact under threads, bounded, and driven by Tokio's clock.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, LocalStore, Strategy};

use crate::support::{STRATEGIES, check, policy};

fn ask(store: &LocalStore, check: Check) -> Decision {
    store
        .check(check)
        .now_or_never()
        .expect("it never waits")
        .unwrap()
}

#[test]
fn many_threads_are_granted_exactly_the_limit() {
    for strategy in STRATEGIES {
        let (store, policies, granted) = (
            LocalStore::default(),
            policy(strategy, "1000/100d"),
            AtomicU32::new(0),
        );
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        granted.fetch_add(
                            ask(&store, Check::take(Key::GLOBAL, &policies, 1)).granted(),
                            Relaxed,
                        );
                    }
                });
            }
        });
        assert_eq!(granted.into_inner(), 1000, "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_passes_exactly_on_time() {
    for strategy in STRATEGIES {
        let (store, policies) = (LocalStore::default(), policy(strategy, "3/s"));
        let take = || ask(&store, Check::take(Key::new("ann"), &policies, 2));
        assert!(take().is_allowed());
        let wait = take().retry_after().unwrap();
        // Tokio's paused clock has a resolution of a millisecond, decisions one of a microsecond.
        tokio::time::advance(wait - Duration::from_micros(1)).await;
        assert_eq!(
            take().retry_after(),
            Some(Duration::from_micros(1)),
            "{strategy:?}"
        );
        tokio::time::advance(Duration::from_micros(1)).await;
        assert!(take().is_allowed(), "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn counts_are_kept_only_while_meaningful() {
    // Without windows of the clock, which may end at any time.
    for strategy in STRATEGIES
        .into_iter()
        .filter(|strategy| *strategy != Strategy::FixedWindow(Align::default()))
    {
        let (store, policies) = (LocalStore::default(), policy(strategy, "10/10s"));
        let take = || ask(&store, Check::take(Key::new("ann"), &policies, 1)).is_allowed();
        assert!((0..10).all(|_| take()), "{strategy:?}");
        // Enough time for the state of a single charge to expire under most strategies.
        tokio::time::advance(Duration::from_millis(1_500)).await;
        let more = (0..10).filter(|_| take()).count();
        assert!(
            more <= 2,
            "{strategy:?}: a charge was dropped, {more} more are allowed"
        );
        let _ = ask(&store, Check::reset(Key::new("ann"), &policies));
        assert!(store.is_empty(), "{strategy:?}: an empty state is kept");
    }
}

#[test]
fn debug_shows_no_secret() {
    let store = LocalStore::default();
    let _ = ask(&store, check("ann", "10/s"));
    assert_eq!(format!("{store:?}"), "LocalStore { keys: 1, .. }");
}

#[tokio::test(start_paused = true)]
async fn expired_keys_make_room() {
    let store = LocalStore::with_capacity(NonZeroUsize::new(6_400).unwrap());
    for round in 0..20 {
        for i in 0..1_000 {
            let _ = ask(&store, check(&format!("{round}-{i}"), "10/s"));
        }
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert!(
        store.len() <= 2_500,
        "{} of 20,000 keys are still held",
        store.len()
    );
}

/// Even the smallest store holds all policies of a caller.
#[test]
fn a_small_store_counts_too() {
    use tower_redis_ratelimit::{Policies, Policy};
    for keys in [1, 16, 64, 1000] {
        let store = LocalStore::with_capacity(NonZeroUsize::new(keys).unwrap());
        let policies = (0..Policies::MAX).map(|i| {
            Policy::new(&i.to_string(), Strategy::Gcra, format!("{}/100d", i + 2)).unwrap()
        });
        let policies = Policies::new(policies).unwrap();
        let granted: u32 = (0..50)
            .map(|_| ask(&store, Check::take(Key::GLOBAL, &policies, 1)).granted())
            .sum();
        assert_eq!(granted, 2, "a store of {keys}");
    }
}

/// New keys replace other new keys, but not a caller that has used up its limit.
#[tokio::test(start_paused = true)]
async fn a_full_store_keeps_exhausted_callers() {
    let store = LocalStore::with_capacity(NonZeroUsize::new(640).unwrap());
    let policies = policy(Strategy::Gcra, "100/h");
    for _ in 0..100 {
        let _ = ask(&store, Check::take(Key::new("greedy"), &policies, 1));
    }
    for i in 0..100_000 {
        let _ = ask(
            &store,
            Check::take(Key::new(format!("flood-{i}")), &policies, 1),
        );
    }
    assert!(store.len() <= 640 + 63, "{} keys", store.len());
    assert!(
        !ask(&store, Check::take(Key::new("greedy"), &policies, 1)).is_allowed(),
        "the flood gave a caller a fresh start"
    );
}

/// Under every strategy, an exhausted caller stays denied until its reset, independent of the
/// number of new keys.
#[tokio::test(start_paused = true)]
async fn a_flood_of_new_keys_frees_nobody() {
    // A twentieth of the default capacity, and ten new keys per entry.
    const KEYS: usize = LocalStore::DEFAULT_KEYS.get() / 20;
    let mut freed = vec![];
    // New keys that use a hundredth of their limit, and new keys that use it up.
    for (strategy, limit) in STRATEGIES
        .into_iter()
        .flat_map(|strategy| [(strategy, 100), (strategy, 1)])
    {
        let store = LocalStore::with_capacity(NonZeroUsize::new(KEYS).unwrap());
        let policies = policy(strategy, &format!("{limit}/100d"));
        let ann = |cost| ask(&store, Check::take(Key::new("ann"), &policies, cost));
        assert!(ann(limit).is_allowed());
        for i in 0..10 * KEYS {
            if i % 100 == 0 {
                tokio::time::advance(Duration::from_millis(1)).await;
                if ask(&store, Check::peek(Key::new("ann"), &policies, 1)).is_allowed() {
                    freed.push((strategy, limit, i));
                    break;
                }
            }
            let _ = ask(
                &store,
                Check::take(Key::new(format!("new-{i}")), &policies, 1),
            );
        }
        let Some(wait) = ann(1).retry_after() else {
            continue;
        };
        tokio::time::advance(wait - Duration::from_micros(1)).await;
        assert!(!ann(1).is_allowed(), "{strategy:?}");
        tokio::time::advance(Duration::from_micros(1)).await;
        assert!(ann(1).is_allowed(), "{strategy:?}");
    }
    assert!(
        freed.is_empty(),
        "freed, and after how many new keys: {freed:?}"
    );
}

/// A store full of exhausted callers keeps a few entries for newcomers, which replace each other.
#[tokio::test(start_paused = true)]
async fn newcomers_do_not_evict_all_exhausted_callers() {
    const KEYS: usize = 2_048;
    let mut freed = vec![];
    for strategy in [Strategy::Gcra, Strategy::FixedWindow(Align::FirstHit)] {
        let store = LocalStore::with_capacity(NonZeroUsize::new(KEYS).unwrap());
        let policies = policy(strategy, "100/100d");
        let take = |name: String, cost| {
            ask(&store, Check::take(Key::new(name), &policies, cost)).granted()
        };
        for i in 0..2 * KEYS {
            take(format!("exhausted-{i}"), 100);
        }
        tokio::time::advance(Duration::from_millis(1)).await;
        // A peek does not add a new caller to the store.
        let peek = |i| {
            ask(
                &store,
                Check::peek(Key::new(format!("exhausted-{i}")), &policies, 1),
            )
        };
        let known = || {
            (0..2 * KEYS)
                .map(peek)
                .filter(|peek| !peek.is_allowed())
                .count()
        };
        let before = known();
        assert!(before > KEYS * 9 / 10, "{before}");
        for i in 0..20 * KEYS {
            take(format!("new-{i}"), 1);
        }
        // A caller that keeps returning is counted, except for its first few requests. The number
        // of these is random: four on average, sometimes forty. So the test uses the median of
        // several callers.
        let mut granted = [0; 7];
        for (who, granted) in granted.iter_mut().enumerate() {
            for i in 0..3_000 {
                take(format!("passing-{i}"), 1);
                if i % 20 == 0 {
                    *granted += take(format!("stays-{who}"), 1);
                }
            }
        }
        granted.sort_unstable();
        let granted = granted[granted.len() / 2];
        let after = known();
        if after < before * 8 / 10 || granted > 130 {
            freed.push(format!(
                "{strategy:?}: {after} of {before} are denied, and one was granted {granted} of 100"
            ));
        }
    }
    assert!(freed.is_empty(), "{freed:?}");
}

/// Each list of policies repeats its own answer to an id, as in Redis.
#[test]
fn ids_are_kept_per_policy_list() {
    use tower_redis_ratelimit::{Policies, Policy};
    let store = LocalStore::default();
    let of = |name: &str| Policy::new(name, Strategy::Gcra, "100/100d").unwrap();
    let lists = [
        Policies::from(of("one")),
        Policies::from(of("two")),
        Policies::new([of("one"), of("two")]).unwrap(),
    ];
    for _ in 0..10 {
        for list in &lists {
            assert!(
                ask(
                    &store,
                    Check::take(Key::GLOBAL, list, 1).with_id("request-1")
                )
                .is_allowed()
            );
        }
    }
    let used = |list: &Policies| 100 - ask(&store, Check::peek(Key::GLOBAL, list, 1)).remaining();
    assert_eq!(
        lists.each_ref().map(used),
        [2, 2, 2],
        "each list charges once"
    );
}

/// A rolling deploy: quotas of 10 and 11 per minute, checked alternately, twice a second for 20
/// minutes. They share a window's count; each bucket has its own.
#[tokio::test(start_paused = true)]
async fn two_limits_per_window_do_not_add() {
    for strategy in STRATEGIES {
        let granted = async |quotas: [&str; 2]| {
            let (store, policies) = (
                LocalStore::default(),
                quotas.map(|quota| policy(strategy, quota)),
            );
            let mut granted = 0;
            for i in 0..2_400 {
                granted += ask(&store, Check::take(Key::GLOBAL, &policies[i % 2], 1)).granted();
                tokio::time::advance(Duration::from_millis(500)).await;
            }
            granted
        };
        let (tighter, looser) = (granted(["10/m"; 2]).await, granted(["11/m"; 2]).await);
        let both = granted(["10/m", "11/m"]).await;
        let is_bucket = matches!(
            strategy,
            Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(_)
        );
        let most = if is_bucket { tighter + looser } else { looser };
        assert!(
            both * 10 >= tighter * 9 && both <= most,
            "{strategy:?}: {tighter}, {looser} and {both}"
        );
    }
}
