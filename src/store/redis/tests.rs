//! The Lua and the Rust half of every strategy agree on random traces, bit for bit.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use futures_util::future::{join, join_all};
use futures_util::{StreamExt as _, stream};

use super::RedisStore;
use crate::error::{ConfigError, ErrorKind};
use crate::limit::{
    Align, Calendar, Check, Decision, Extra, JointCheck, Key, Mode, Model, Policies, Policy,
    PolicyKind, Quota, Refill, SlotId, Source, State, Strategy, any_quota, strategies,
    vary as any_parameters,
};
use crate::store::{BoxStore, Counts, Fallback, LocalStore, Store};
use crate::support::RedisServer;

/// Number of checks per strategy. All callers of a trace check at every time.
const STEPS: usize = 100_000;
const CALLERS: usize = 64;

/// Creates a test of both halves for each strategy.
macro_rules! agree {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, $kinds:tt;)*) => {$(
        #[tokio::test]
        async fn $module() {
            let is_of_module = |strategy: &&Strategy| matches!(strategy, Strategy::$variant { .. });
            for strategy in Strategy::ALL.iter().filter(is_of_module) {
                agree($number, (*strategy).into()).await;
            }
        }
    )*};
}

strategies!(agree);

#[tokio::test]
async fn in_flight() {
    agree(0, PolicyKind::InFlight).await;
}

/// Returns the strategy with random parameters, if it has any, for a quota of this period.
fn vary(rng: &mut Rng, kind: PolicyKind, period: Duration) -> PolicyKind {
    match kind {
        PolicyKind::Rate(Strategy::FixedWindow(Align::Clock { .. })) => {
            let offset = Duration::from_micros(rng.u64(..period.as_micros() as u64));
            Strategy::FixedWindow(Align::Clock { offset }).into()
        }
        PolicyKind::Rate(Strategy::SlidingWindow { .. }) => Strategy::SlidingWindow {
            cells: rng.u16(1..=20),
        }
        .into(),
        same => same,
    }
}

/// Returns a random strategy, or requests in flight.
fn any(rng: &mut Rng) -> PolicyKind {
    nth(rng.usize(..=Strategy::ALL.len()))
}

/// Returns each strategy in turn, then requests in flight.
fn nth(i: usize) -> PolicyKind {
    Strategy::ALL
        .get(i % (Strategy::ALL.len() + 1))
        .map_or(PolicyKind::InFlight, |strategy| (*strategy).into())
}

#[tokio::test]
async fn several_policies() {
    let server = RedisServer::start();
    let mut trace = Trace::new(10, &server);
    let policies: Vec<Policies> = (0..CALLERS)
        .map(|_| {
            let count = trace.rng.usize(1..=3);
            let any = |i: usize| policy(&i.to_string(), any(&mut trace.rng), &mut trace.rng);
            let policies: Vec<_> = (0..count).map(any).collect();
            Policies::new(policies).unwrap()
        })
        .collect();
    trace.run(&policies, STEPS).await;
}

/// Random checks of one to four keys, in any order. Redis and a local store make the same decisions, bit for bit. A check is allowed
/// exactly if the definition of each of its policies allows it, where only allowed checks were charged.
#[tokio::test]
async fn several_keys() {
    let server = RedisServer::start();
    let Trace {
        mut rng,
        now,
        redis,
        ..
    } = Trace::new(26, &server);
    let local = LocalStore::default();
    let (mut granted, mut denied, mut repeated) = (0, 0, 0);
    for round in 0..150 {
        let mut lists = vec![];
        for part in ["user", "org", "region", "all"] {
            let mut policies = vec![];
            for number in 0..rng.usize(1..=2) {
                let strategy = *rng.choice(Strategy::ALL).unwrap();
                let quota = any_quota(&mut rng, strategy);
                let strategy = any_parameters(&mut rng, strategy, quota.period());
                let name = format!("{part}-{number}");
                policies.push(Policy::new(&name, strategy, quota).unwrap());
            }
            lists.push(Policies::new(policies).unwrap());
        }
        let has_slots = rng.u8(..4) == 0;
        if has_slots {
            lists[3] = Policy::in_flight("jobs", rng.u32(1..20)).unwrap().into();
        }
        let mut models: HashMap<(Key, u64), Model> = HashMap::new();
        let mut last: Option<JointCheck> = None;
        let mut waits = vec![1];
        for _ in 0..40 {
            let mut parts = vec![];
            for list in &lists {
                // A key may be in several parts.
                parts.push((Key::new(format!("{round}-{}", rng.u8(..3))), list));
            }
            rng.shuffle(&mut parts);
            parts.truncate(rng.usize(1..=4));
            let (_, list) = parts[rng.usize(..parts.len())];
            let capacity = list[0].quota().capacity();
            let cost = match rng.u8(..8) {
                0 => capacity.saturating_add(1),
                1 => rng.u32(..=capacity),
                2 | 3 => rng.u32(..=capacity) / 4,
                4 => 0,
                _ => 1,
            };
            let id = rng.bool().then(|| Key::from(rng.u64(..3)));
            let mut joint = JointCheck::take(parts, cost).unwrap().with_key_as_id(id);
            if rng.u8(..4) == 0
                && let Some(last) = last
            {
                // With an id, this is a repetition.
                joint = last;
            }
            last = Some(joint.clone());
            let cost = joint.cost();
            let time = now.load(Relaxed);
            let of_redis = redis.check_all(joint.clone()).await.unwrap();
            let one = joint.as_one();
            let verdicts = local.joint_verdicts(&one, || time);
            let of_local = joint.split(one.answer(verdicts, Source::Redis));
            let context = format!("round {round}, {joint:?} at {time}");
            assert_eq!(of_redis.decision(), of_local.decision(), "{context}");
            assert_eq!(of_redis.parts(), of_local.parts(), "{context}");

            let whole = of_redis.decision();
            if whole.is_repeated() {
                repeated += 1;
                continue;
            }
            let mut is_expected = true;
            for part in joint.parts() {
                for policy in part.policies() {
                    if let PolicyKind::Rate(strategy) = policy.kind() {
                        let model = models
                            .entry((*part.key(), policy.id()))
                            .or_insert_with(|| Model::new(strategy, policy.quota()));
                        is_expected &= model.allows(cost.into(), time.into());
                    }
                }
            }
            if has_slots {
                assert!(is_expected || !whole.is_allowed(), "{context}");
            } else {
                assert_eq!(whole.is_allowed(), is_expected, "{context}");
            }
            if whole.is_allowed() {
                granted += 1;
                for part in joint.parts() {
                    for policy in part.policies() {
                        if let Some(model) = models.get_mut(&(*part.key(), policy.id()))
                            && cost > 0
                        {
                            model.grants.push((time.into(), cost.into()));
                        }
                    }
                }
            } else {
                denied += 1;
            }
            for decision in whole.each() {
                let wait = decision.retry_after().unwrap_or(decision.reset_after());
                waits.push(wait.as_micros() as i64);
            }
            let wait = *rng.choice(&waits).unwrap();
            let elapsed = [
                0,
                1,
                wait,
                wait - 1,
                rng.i64(0..=wait),
                rng.i64(0..=wait / 8),
            ];
            now.fetch_add(elapsed[rng.usize(..6)].max(0), Relaxed);
        }
    }
    assert!(
        granted.min(denied) > 1_000 && repeated > 50,
        "{granted} granted, {denied} denied, {repeated} repeated"
    );
}

/// A quota may change at any time, and both halves continue the same count: of a bucket to any other one, of a window
/// with its period.
#[tokio::test]
async fn changing_quotas() {
    // Takes under GCRA alone are decided by another script.
    for kind_of in [nth, |_| Strategy::Gcra.into()] {
        let server = RedisServer::start();
        let mut trace = Trace::new(11, &server);
        let kinds: Vec<PolicyKind> = (0..CALLERS).map(kind_of).collect();
        let first: Vec<Policy> = kinds
            .iter()
            .map(|kind| policy("changing", *kind, &mut trace.rng))
            .collect();
        for _ in 0..150 {
            let change = |(first, kind): (&Policy, &PolicyKind)| {
                if first.frees().has_burst() && trace.rng.bool() {
                    return policy("changing", *kind, &mut trace.rng).into();
                }
                let quota = Quota::per(
                    trace.rng.u32(1..=2 * first.quota().limit().min(50_000)),
                    first.quota().period(),
                );
                let changed = of_kind("changing", *kind, quota)
                    .ok()
                    .filter(|policy| policy.id() == first.id());
                changed.unwrap_or_else(|| first.clone()).into()
            };
            let policies: Vec<Policies> = first.iter().zip(&kinds).map(change).collect();
            trace.run(&policies, CALLERS * 10).await;
        }
    }
}

/// Each of some extreme quotas after each other one.
#[tokio::test]
async fn extreme_quotas_change_alike() {
    const EXTREMES: [&str; 10] = [
        "1/us burst 1",
        "4294967295/us",
        "4294967295/us burst 1",
        "1/366d",
        "4294967295/366d",
        "1/366d burst 4294967295",
        "1000003/s burst 4294967295",
        "999983/30d",
        "999983/30d burst 1",
        "100000/366d burst 100000",
    ];
    let server = RedisServer::start();
    let mut trace = Trace::new(24, &server);
    let buckets = Strategy::ALL
        .iter()
        .filter(|strategy| strategy.frees().has_burst());
    for strategy in buckets {
        // A token bucket's state is of one type for both refills.
        trace.states.clear();
        trace.granted.clear();
        let lists: Vec<[Policies; 1]> = EXTREMES
            .iter()
            .filter_map(|quota| Policy::new("extreme", *strategy, *quota).ok())
            .map(|policy| [policy.into()])
            .collect();
        assert!(lists.len() > 5, "{strategy}");
        for one in &lists {
            for other in &lists {
                trace.run(one, 6).await;
                trace.run(other, 6).await;
            }
        }
    }
}

/// Several quotas of a window under one name, and callers that choose between them: each count is just what its
/// definition says, in Redis and in a local store.
#[tokio::test]
async fn every_quota_of_a_name_holds_alone() {
    let server = RedisServer::start();
    let Trace {
        mut rng,
        now,
        redis,
        ..
    } = Trace::new(21, &server);
    let local = LocalStore::default();
    let (mut granted, mut denied, mut shared) = (0, 0, 0);
    let windows: Vec<Strategy> = Strategy::ALL
        .iter()
        .copied()
        .filter(|strategy| !strategy.frees().has_burst())
        .collect();
    for round in 0..60 * windows.len() {
        let strategy = windows[round % windows.len()];
        let periods = [1_000_000, 1_500_000, 10_000_000, 60_000_000];
        let quotas: Vec<Policies> = (0..rng.usize(2..=3))
            .map(|_| {
                let limit = [5, 10, 20, 40][rng.usize(..4)];
                let quota = Quota::per(limit, Duration::from_micros(periods[rng.usize(..4)]));
                Policy::new("p", strategy, quota).unwrap().into()
            })
            .collect();
        let mut models: HashMap<u64, Model> = HashMap::new();
        let key = Key::new(format!("caller-{round}"));
        let (mut which, manner) = (0, rng.u8(..3));
        for _ in 0..120 {
            let (policies, time) = (&quotas[which], now.load(Relaxed));
            let policy = &policies[0];
            let model = models
                .entry(policy.id())
                .or_insert_with(|| Model::new(strategy, policy.quota()));
            model.limit = policy.quota().limit().into();
            let expected = model.allows(1, time.into());
            let check = Check::take(key, policies, 1);
            let in_redis = redis.check(check.clone()).await.unwrap().is_allowed();
            let in_local = local.verdicts(&check, || time).granted == 1;
            assert_eq!(
                (in_redis, in_local),
                (expected, expected),
                "round {round}, {policy:?} of {quotas:?}"
            );
            if expected {
                model.grants.push((time.into(), 1));
                granted += 1;
            } else {
                denied += 1;
            }
            // Choose the first quota until it denies, then another one once; or each in turn; or a random one.
            which = match manner {
                0 if which == 0 && expected => 0,
                0 if which > 0 => 0,
                0 => rng.usize(1..quotas.len()),
                1 => (which + 1) % quotas.len(),
                _ => rng.usize(..quotas.len()),
            };
            now.fetch_add([0, 1_000, rng.i64(0..1_000_000)][rng.usize(..3)], Relaxed);
        }
        shared += u32::from(models.len() < quotas.len());
    }
    assert!(
        granted > 5_000 && denied > 5_000 && shared > 20,
        "{granted} granted, {denied} denied, {shared} shared"
    );
}

/// Instances with two quotas of a bucket, for 60 seconds: together they grant at most what the looser quota does, and at
/// least what the first one does.
#[tokio::test]
async fn two_quotas_of_a_bucket_grant_as_one() {
    let server = RedisServer::start();
    let Trace {
        now, redis, others, ..
    } = Trace::new(23, &server);
    let policies = |quota: &str| Policies::from(Policy::new("p", Strategy::Gcra, quota).unwrap());
    for (number, (other, most)) in [
        ("100/10s", 700),
        ("100/10s burst 10", 700),
        ("10/10s", 700),
        ("2/s", 700),
        ("20/s", 1_300),
    ]
    .into_iter()
    .enumerate()
    {
        let key = Key::new(format!("caller-{number}"));
        let (one, other) = (policies("100/10s"), policies(other));
        let start = now.load(Relaxed);
        let mut granted = 0;
        for step in 0..1_200 {
            while redis
                .check(Check::take(key, &one, 1))
                .await
                .unwrap()
                .is_allowed()
            {
                granted += 1;
            }
            let others = &others[step % others.len()];
            granted += others
                .check(Check::take(key, &other, 1))
                .await
                .unwrap()
                .granted();
            now.store(start + 50_000 * (step as i64 + 1), Relaxed);
        }
        println!(
            "100/10s and {}: {granted}, at most {most}",
            other[0].quota()
        );
        assert!((600..=most).contains(&granted), "{granted} of {most}");
    }
}

/// Checks with ids, repeated around the age at which the ids expire. Both stores keep an id equally long, and repeat
/// its decision regardless of later refills.
#[tokio::test]
async fn ids() {
    let server = RedisServer::start();
    let mut trace = Trace::new(12, &server);
    let local = LocalStore::default();
    let of = |name: &str, kind, quota: &str| of_kind(name, kind, quota.parse().unwrap()).unwrap();
    let (mut differ, mut repeated, mut given) = (vec![], 0, 0);
    for i in 0..3_000 {
        let key = Key::new(format!("caller-{i}"));
        let (one, two) = (
            of("one", any(&mut trace.rng), "5/1s"),
            of("two", any(&mut trace.rng), "9/1500ms"),
        );
        let lists: [Policies; 3] = [
            one.clone().into(),
            two.clone().into(),
            Policies::new([one, two]).unwrap(),
        ];
        // An id under another list is a different id.
        let asked = if trace.rng.bool() {
            &lists[..1]
        } else {
            &lists[..]
        };
        let period = longest_period(&lists[trace.rng.usize(..asked.len())]);
        let start = trace.now.load(Relaxed) + trace.rng.i64(1..10_000_000);
        // The end of the window of the clock, or any other time.
        let window = period - start % period;
        let mut ages = [
            0,
            trace.rng.i64(0..period),
            window - 1,
            window,
            window + 1,
            period - 1,
            period,
            period + 1,
            period + trace.rng.i64(1..2_000),
        ];
        ages.sort();
        let mut first = None;
        for age in ages {
            trace.now.store(start + age, Relaxed);
            for policies in asked {
                let cost = trace.rng.u32(1..=4);
                let check = match trace.rng.u8(..8) {
                    0 => Check::up_to(key, policies, cost),
                    1 => Check::charge(key, policies, cost),
                    2 => Check::refund(key, policies, cost),
                    3 => Check::take_ahead(
                        key,
                        policies,
                        cost,
                        Duration::from_millis(trace.rng.u64(..2_000)),
                    ),
                    4 => Check::charge(key, policies, 0)
                        .with_extra(Extra::Recorded(Key::new("request-1"), cost)),
                    _ => Check::take(key, policies, cost),
                };
                let check = if trace.rng.u8(..4) == 0 {
                    check
                } else {
                    check.with_id("request-1")
                };
                let in_redis = trace
                    .redis
                    .check(check.clone())
                    .await
                    .expect("an answer of Redis");
                let verdicts = local.verdicts(&check, || start + age);
                let decision = check.clone().answer(verdicts, Source::Redis);
                if decision != in_redis {
                    first = first.or(Some(age - period));
                }
                repeated += u32::from(
                    check.id().is_some() && in_redis.is_allowed() && age > 0 && age < period,
                );
                let back = |decision: &Decision| decision.refund(key, cost, Duration::ZERO);
                if trace.rng.u8(..4) == 0
                    && let (Some(back), Some(in_rust)) = (back(&in_redis), back(&decision))
                {
                    let in_redis = trace.redis.check(back).await.expect("an answer of Redis");
                    let verdicts = local.verdicts(&in_rust, || start + age);
                    if in_rust.answer(verdicts, Source::Redis) != in_redis {
                        first = first.or(Some(age - period));
                    }
                    given += 1;
                }
            }
        }
        differ.extend(first);
    }
    assert!(
        repeated > 1_000 && given > 1_000,
        "{repeated} were repeated, {given} gave something back"
    );
    assert!(
        differ.is_empty(),
        "{} of 3000 callers differ, first differences, in us after the period: {differ:?}",
        differ.len()
    );
}

/// After the clock has gone back, an id is kept for one period and no longer.
#[tokio::test]
async fn ids_of_a_later_clock_are_forgotten() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(20, &server);
    let policies = Policy::new("api", Strategy::Gcra, "10/s").unwrap().into();
    let mut left = vec![];
    for elapsed in [3_600_000_000, -3_600_000_000, 999_999, 1] {
        now.fetch_add(elapsed, Relaxed);
        let take = Check::take(Key::new("ann"), &policies, 5).with_id("a");
        let _ = redis.check(take).await.unwrap();
        left.push(
            redis
                .check(Check::take(Key::new("ann"), &policies, 0))
                .await
                .unwrap()
                .remaining(),
        );
    }
    assert_eq!(left, [5, 5, 10, 5], "it is charged twice");
}

/// Returns policies of one count whose limits differ by less than a tenth. For a bucket, the policies are equal.
fn near_policies(kind: PolicyKind, rng: &mut Rng) -> [Policies; 3] {
    let first = policy("near", kind, rng);
    [0, 1, 2].map(|_| {
        let quota = first.quota();
        let limit = quota.limit() - rng.u32(0..=quota.limit() / 16);
        let near = of_kind("near", kind, Quota::per(limit, quota.period())).ok();
        near.filter(|near| near.id() == first.id())
            .unwrap_or_else(|| first.clone())
            .into()
    })
}

/// The policy of each caller alternates between three similar limits of one count.
#[tokio::test]
async fn near_quotas() {
    let server = RedisServer::start();
    let mut trace = Trace::new(12, &server);
    for _ in 0..10 {
        let all: Vec<[Policies; 3]> = (0..CALLERS)
            .map(|i| near_policies(nth(i), &mut trace.rng))
            .collect();
        for i in 0..100 {
            let policies: Vec<Policies> = all.iter().map(|near| near[i % 3].clone()).collect();
            trace.run(&policies, 1).await;
        }
        // Continue with new callers.
        trace.states.clear();
        trace.granted.clear();
        let _: String = server.command("FLUSHALL").await;
    }
}

/// Logs of several blocks, with large refunds at any place.
#[tokio::test]
async fn long_logs() {
    let server = RedisServer::start();
    let Trace {
        mut rng,
        now,
        redis,
        ..
    } = Trace::new(14, &server);
    // With a period of 2 s, charges expire throughout the trace.
    let quotas = [(10_000, 20), (10_000, 2), (3_000, 20), (700, 2)];
    let mut callers = quotas.map(|(limit, seconds)| {
        let quota = Quota::per(limit, Duration::from_secs(seconds));
        let policy = Policy::new("log", Strategy::SlidingLog, quota).unwrap();
        (
            Policies::from(policy),
            vec![],
            [State::fresh(Strategy::SlidingLog)],
        )
    });
    let (mut given, mut longest) = (0, 0);
    for round in 0..8_000 {
        let elapsed = match rng.u16(..1_000) {
            0 => rng.i64(0..3_000_000),
            1 => -rng.i64(0..100_000),
            _ => rng.i64(0..1_500),
        };
        let time = now.fetch_add(elapsed, Relaxed) + elapsed;
        let checks = callers.iter_mut().enumerate().map(
            |(i, (policies, open, _)): (_, &mut (_, Vec<(Decision, i64)>, _))| {
                let (key, limit) = (Key::new(format!("{i}")), quotas[i].0);
                if rng.u8(..3) == 0 && !open.is_empty() {
                    // Usually the whole charge; for the first callers usually a recent one.
                    let nth = if rng.usize(..4) > i {
                        open.len() - 1 - rng.usize(..open.len().min(40))
                    } else {
                        rng.usize(..open.len())
                    };
                    let (decision, at) = open.swap_remove(nth);
                    let cost = if rng.u8(..4) > 0 {
                        decision.granted()
                    } else {
                        rng.u32(0..=decision.granted())
                    };
                    let late = [0, 0, rng.i64(0..5_000)][rng.usize(..3)];
                    let age = Duration::from_micros((time - at + late).max(0) as u64);
                    if let Some(check) = decision.refund(key, cost, age) {
                        given += 1;
                        return check;
                    }
                }
                match rng.u16(..400) {
                    0 => Check::up_to(key, policies, 100),
                    1 => Check::refund(key, policies, rng.u32(..100)),
                    2 => Check::peek(key, policies, limit),
                    3 => Check::peek(key, policies, limit - rng.u32(..700)),
                    4 => Check::take(key, policies, 600),
                    _ => Check::take(key, policies, rng.u32(1..=3)),
                }
            },
        );
        let checks: Vec<Check> = checks.collect();
        let in_redis = join_all(checks.iter().map(|check| redis.check(check.clone()))).await;
        for ((check, in_redis), (_, open, state)) in
            checks.into_iter().zip(in_redis).zip(&mut callers)
        {
            let context = format!("Redis and Rust differ: round {round}, {check:?}");
            let in_redis = in_redis.unwrap();
            assert_eq!(in_redis, in_rust(&check, state, time), "{context}");
            if check.mode() != Mode::Refund && in_redis.granted() > 0 {
                open.push((in_redis, time));
            }
        }
        if round % 500 == 499 {
            longest = longest.max(server.command::<u64>("LLEN rl:{0}:log:o:20s").await);
        }
    }
    assert!(
        given > 5_000 && longest > 4,
        "{given} were refunded, of {longest} elements at most"
    );
    // Blocks have left, and others were dropped between their neighbors.
    let (left, dropped) = (server.calls("ltrim").await, server.calls("lrem").await);
    assert!(
        left > 20 && dropped > 10,
        "{left} times blocks have left, {dropped} times they were dropped"
    );
}

/// Expired charges take no memory, even if many expire together.
#[tokio::test]
async fn an_expired_log_frees_its_memory() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(16, &server);
    let quota = Quota::per(2_010, Duration::from_secs(10));
    let policies = Policy::new("log", Strategy::SlidingLog, quota)
        .unwrap()
        .into();
    for i in 0..2_004 {
        now.fetch_add(if i < 2_000 { 1 } else { 6_000_000 }, Relaxed);
        assert!(
            redis
                .check(Check::take(Key::new("ann"), &policies, 1))
                .await
                .unwrap()
                .is_allowed()
        );
    }
    let bytes: u64 = server
        .command("MEMORY USAGE rl:{ann}:log:o:10s SAMPLES 0")
        .await;
    assert!(bytes < 500, "{bytes} bytes");
}

/// MGET returns nil for a log that has become a list.
#[tokio::test]
async fn a_long_log_is_kept_beside_new_callers() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(17, &server);
    let policies = Policy::new("log", Strategy::SlidingLog, Quota::per_hour(1_000))
        .unwrap()
        .into();
    let take = |name| redis.check(Check::take(Key::new(name), &policies, 1));
    for _ in 0..500 {
        now.fetch_add(1, Relaxed);
        assert!(take("ann").await.unwrap().is_allowed());
    }
    assert_eq!(
        server.command::<String>("TYPE rl:{ann}:log:o:1h").await,
        "list"
    );
    let decisions = join_all(["eve", "ann"].map(take)).await;
    let left: Vec<u32> = decisions
        .into_iter()
        .map(|decision| decision.unwrap().remaining())
        .collect();
    assert_eq!(left, [999, 499]);
}

#[tokio::test]
async fn unequal_takes_of_one_call_add_up() {
    let server = RedisServer::start();
    let Trace { redis, .. } = Trace::new(18, &server);
    let policies = Policy::new("api", Strategy::Gcra, Quota::per_hour(10))
        .unwrap()
        .into();
    let take = |cost| redis.check(Check::take(Key::new("ann"), &policies, cost));
    let decisions = join_all([1, 2, 3].map(take)).await;
    let left: Vec<u32> = decisions
        .into_iter()
        .map(|decision| decision.unwrap().remaining())
        .collect();
    assert_eq!(left, [9, 7, 4]);
}

/// Calls of many takes under one meter, which `takes.lua` decides. Each step uses one of three quotas.
#[tokio::test]
async fn takes_under_one_plan() {
    let [greedy, interval] = [Refill::Greedy, Refill::Interval].map(Strategy::TokenBucket);
    for kind in [Strategy::Gcra, Strategy::LeakyBucket, greedy, interval] {
        let server = RedisServer::start();
        let mut trace = Trace::new(19, &server);
        let mut waits = vec![Duration::from_micros(1)];
        let mut states: HashMap<(usize, u64), [State; 1]> = HashMap::new();
        for _ in 0..100 {
            let quotas: Vec<Policies> = (0..3)
                .map(|_| policy("p", kind.into(), &mut trace.rng).into())
                .collect();
            for step in 0..20 {
                let policies = &quotas[trace.rng.usize(..quotas.len())];
                let cost = trace.cost(policies);
                // At most one batch of checks, so that there is one call.
                let mut checks: Vec<(usize, Check)> = vec![];
                for i in (0..CALLERS).filter(|i| i % 20 <= step) {
                    let times = [0, 1, 1, 2, 5][trace.rng.usize(..5)];
                    let take = Check::take(Key::new(format!("caller-{i}")), policies, cost);
                    checks.extend(vec![(i, take); times]);
                }
                checks.truncate(128);
                let in_redis = join_all(
                    checks
                        .iter()
                        .map(|(_, check)| trace.redis.check(check.clone())),
                )
                .await;
                let mut seen = vec![];
                for ((i, check), in_redis) in checks.iter().zip(in_redis) {
                    let in_redis = in_redis.unwrap();
                    let state = states
                        .entry((*i, policies[0].id()))
                        .or_insert_with(|| [State::fresh(kind)]);
                    let in_rust = in_rust(check, state, trace.now.load(Relaxed));
                    assert_eq!(in_redis, in_rust, "Redis and Rust differ: {check:?}");
                    seen.extend(in_redis.retry_after());
                    seen.push(in_redis.reset_after());
                }
                if !seen.is_empty() {
                    waits = seen;
                }
                trace.step(&waits);
            }
        }
    }
}

/// Each script starts from the same state of any time and level, or from a foreign value. The Redis user may lack the
/// permission for GET, which only `take.lua` uses.
#[tokio::test]
async fn all_scripts_decide_and_store_alike() {
    let server = RedisServer::start();
    let mut trace = Trace::new(22, &server);
    let mut connection = server.connection().await;
    let greedy = Strategy::TokenBucket(Refill::Greedy);
    let (mut granted, mut denied) = (0, 0);
    for round in 0..4_000 {
        if round % 500 == 0 {
            let right = ["+", "-"][round / 500 % 2];
            let _: String = server
                .command(&format!("ACL SETUSER default {right}get"))
                .await;
            let _: String = server.command("SCRIPT FLUSH").await;
        }
        let kind = [Strategy::Gcra, Strategy::LeakyBucket, greedy][round % 3];
        let policies: Policies = policy("p", kind.into(), &mut trace.rng).into();
        let params = policies[0].params();
        let other = policy("p", kind.into(), &mut trace.rng);
        let (cost, now) = (trace.cost(&policies), trace.now.load(Relaxed));
        let rng = &mut trace.rng;
        let near = |rng: &mut Rng, number: i64| number + rng.i64(-1..=1);
        let value: Vec<u8> = if rng.u8(..4) == 0 {
            let length = [0, 8, 16, 15 + 8, 15 + 16][rng.usize(..5)];
            (0..rng.usize(17..21) + length)
                .map(|_| rng.u8(..))
                .collect()
        } else {
            let of_writer = [&policies[0], &other][rng.usize(..2)];
            let writer = of_writer.params().writer.to_bytes();
            let reset = params.full / params.ticks;
            let elapsed = [0, -1_000, reset, 2 * reset, rng.i64(0..=2 * reset)][rng.usize(..5)];
            let level = [
                0,
                params.full,
                2 * params.full,
                params.deepest,
                params.highest,
                -params.full,
                rng.i64(0..=params.full),
            ];
            let level = level[rng.usize(..7)];
            let at = near(rng, now - elapsed).to_le_bytes();
            let level = near(rng, level).to_le_bytes();
            let until = near(rng, now + reset).to_le_bytes();
            let rate = other.params().rate.to_le_bytes();
            let changed = [&rate[..], &until[..7]].concat();
            let changed = [&changed[..], &[]][rng.usize(..2)];
            [&at[..7], &level[..7], &[rng.u8(..); 5], &writer, changed].concat()
        };
        let command = ["SET", "SET", "SET", "SET", "RPUSH", "DEL"][rng.usize(..6)];
        let times = [1, 1, 2, 3][rng.usize(..4)];
        let mut results = vec![];
        // `take.lua` decides a single take, `takes.lua` several, and `check.lua` takes with a peek.
        for (caller, beside) in [
            ("one", None),
            ("some", Some(Mode::Take)),
            ("any", Some(Mode::Peek)),
        ] {
            let name = format!("rl:{{{caller}}}:p:{}", policies[0].kind().letter());
            let mut write = redis::pipe();
            write.cmd("DEL").arg(&name).ignore();
            let write = match command {
                "DEL" => &mut write,
                _ => write.cmd(command).arg(&name).arg(&value).ignore(),
            };
            let write = write.cmd("PEXPIRE").arg(&name).arg(60_000).ignore();
            let () = write.query_async(&mut connection).await.unwrap();
            let take = Check::take(Key::new(caller), &policies, cost);
            let other = Key::new("other");
            let beside = beside.map(|mode| match mode {
                Mode::Take => Check::take(other, &policies, 1),
                _ => Check::peek(other, &policies, 1),
            });
            let checks = vec![take; times].into_iter().chain(beside);
            let asked = join_all(checks.map(|check| trace.redis.check(check))).await;
            let asked: Vec<_> = asked.into_iter().take(times).map(Result::unwrap).collect();
            let mut read = redis::pipe();
            read.cmd("TYPE").arg(&name).cmd("PTTL").arg(&name);
            let (is, ttl): (String, i64) = read.query_async(&mut connection).await.unwrap();
            let bytes: Vec<u8> = match is.as_str() {
                "string" => redis::cmd("MGET")
                    .arg(&name)
                    .query_async::<[Vec<u8>; 1]>(&mut connection)
                    .await
                    .unwrap()
                    .concat(),
                _ => vec![],
            };
            results.push((asked, is, bytes, ttl));
        }
        let context = format!("round {round}, {command}, {policies:?}, {cost}, {value:?}");
        let (answers, is, bytes, ttl) = &results[0];
        for (others, other_is, other_bytes, other_ttl) in &results[1..] {
            assert_eq!((answers, is), (others, other_is), "{context}");
            // The expiry is by Redis's clock, which advances in between.
            assert_eq!(bytes.get(..14), other_bytes.get(..14), "{context}");
            assert_eq!(bytes.get(19..), other_bytes.get(19..), "{context}");
            assert!(
                (ttl - other_ttl).abs() < 20_000,
                "{ttl}, {other_ttl}: {context}"
            );
        }
        for decision in answers {
            *(if decision.is_allowed() {
                &mut granted
            } else {
                &mut denied
            }) += 1;
        }
        trace.now.fetch_add(1, Relaxed);
    }
    assert!(
        granted > 500 && denied > 500,
        "{granted} granted, {denied} denied"
    );
}

/// The part of a value about earlier writers keeps a caller from the shortest script: it is dropped once their charges have
/// drained, although the key never expires.
#[tokio::test]
async fn a_busy_caller_forgets_earlier_quotas() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(25, &server);
    for strategy in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        Strategy::TokenBucket(Refill::Greedy),
        Strategy::TokenBucket(Refill::Interval),
    ] {
        let [old, new] = ["60/m", "90/m"]
            .map(|quota| Policies::from(Policy::new("p", strategy, quota).unwrap()));
        let take = |policies: &Policies| {
            let check = Check::take(Key::new("ann"), policies, 1);
            redis.check(check)
        };
        let interval = if new[0].frees().is_gradual() {
            ""
        } else {
            ":i"
        };
        let length = format!("STRLEN rl:{{ann}}:p:{}{interval}", new[0].kind().letter());
        assert!(take(&old).await.unwrap().is_allowed());
        assert!(take(&new).await.unwrap().is_allowed());
        let changed: usize = server.command(&length).await;
        for _ in 0..180 {
            now.fetch_add(1_000_000, Relaxed);
            assert!(take(&new).await.unwrap().is_allowed());
        }
        let alone: usize = server.command(&length).await;
        assert_eq!((changed, alone), (42, 27), "{strategy}");
    }
}

/// Two keys that expire in the same millisecond may have different levels: the script must not store one caller's
/// packed state for another caller.
#[tokio::test]
async fn levels_of_one_millisecond_stay_apart() {
    for kind in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        Strategy::TokenBucket(Refill::Greedy),
    ] {
        let server = RedisServer::start();
        let Trace { redis, .. } = Trace::new(20, &server);
        // A unit drains in less than a microsecond, so both keys expire in one millisecond.
        let policies = Policy::new("p", kind, Quota::per_second(2_000_000))
            .unwrap()
            .into();
        let take = |name, cost| redis.check(Check::take(Key::new(name), &policies, cost));
        assert!(take("ann", 1).await.unwrap().is_allowed());
        assert!(take("bob", 3).await.unwrap().is_allowed());
        for left in [[1_999_998, 1_999_996], [1_999_997, 1_999_995]] {
            // Then both need a later expiry, and are not written in place.
            tokio::time::sleep(Duration::from_millis(5)).await;
            let decisions = join_all(["ann", "bob"].map(|name| take(name, 1))).await;
            let all: Vec<u32> = decisions
                .into_iter()
                .map(|decision| decision.unwrap().remaining())
                .collect();
            assert_eq!(all, left);
        }
    }
}

/// A refund uses the claimed age or the age by Redis's clock, whichever is greater.
#[tokio::test]
async fn delayed_refunds_keep_their_real_age() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(15, &server);
    let policies = Policy::new("p", Strategy::Gcra, Quota::per_second(100))
        .unwrap()
        .into();
    // Refund immediately; 900 ms later; by a clock 10 s behind; by a clock 10 s ahead.
    for (later, age, given) in [
        (0, 0, 100),
        (900, 0, 10),
        (900, 950, 5),
        (-10_000, 900, 10),
        (10_000, 900, 0),
    ] {
        let key = Key::new(format!("{later} {age}"));
        let decision = redis.check(Check::take(key, &policies, 100)).await.unwrap();
        let back = decision
            .refund(key, 100, Duration::from_millis(age))
            .unwrap();
        let start = now.fetch_add(1_000 * later, Relaxed);
        // Take the units that have refilled since.
        let _ = redis
            .check(Check::up_to(key, &policies, 100))
            .await
            .unwrap();
        assert_eq!(
            redis.check(back).await.unwrap().granted(),
            given,
            "{later} ms later, at an age of {age} ms"
        );
        now.store(start, Relaxed);
    }
}

/// A repeated decision has the age of its charge: its refund frees nothing of later charges.
#[tokio::test]
async fn refunds_of_repeated_answers_keep_their_age() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(17, &server);
    let local = LocalStore::default();
    let policies = Policy::new("log", Strategy::SlidingLog, "100/10s")
        .unwrap()
        .into();
    let key = Key::new("ann");
    let start = now.load(Relaxed);
    let ask = async |check: Check, later| {
        now.store(start + later, Relaxed);
        let verdicts = local.verdicts(&check, || start + later);
        let in_rust = check.clone().answer(verdicts, Source::Local);
        [redis.check(check).await.unwrap(), in_rust]
    };
    let first = || Check::take(key, &policies, 50).with_id("request-1");
    let _ = ask(first(), 0).await;
    let _ = ask(Check::take(key, &policies, 50), 9_000_000).await;
    let repeated = ask(first(), 9_500_000).await;
    let [of_redis, of_local] =
        repeated.map(|decision| decision.refund(key, 50, Duration::ZERO).unwrap());
    assert_eq!(redis.check(of_redis).await.unwrap().granted(), 50);
    assert_eq!(local.verdicts(&of_local, || start + 9_500_000).granted, 50);
    // The charge at 9 s still counts.
    let granted = ask(Check::up_to(key, &policies, 100), 10_500_000)
        .await
        .map(|decision| decision.granted());
    assert_eq!(granted, [50; 2], "in Redis and in a local store");
}

/// A denied check under one quota does not change the count of another.
#[tokio::test]
async fn uncharged_checks_write_nothing() {
    let server = RedisServer::start();
    let mut trace = Trace::new(13, &server);
    let (mut compared, mut wrote) = (0, vec![]);
    for i in 0..700 {
        let near = near_policies(nth(i), &mut trace.rng);
        let [one, other, _] = &near;
        let key = format!("caller-{i}");
        let take = |policies: &Policies, cost| Check::take(Key::new(&key), policies, cost);
        let capacity = one[0].quota().capacity();
        assert!(
            trace
                .redis
                .check(take(one, capacity))
                .await
                .unwrap()
                .is_allowed()
        );
        let period = one[0].quota().period().as_micros() as i64;
        trace.now.fetch_add(trace.rng.i64(0..=period / 4), Relaxed);
        let (letter, span) = (one[0].kind().letter(), one[0].span());
        let between = if span.is_empty() { "" } else { ":" };
        let dump = format!("DUMP rl:{{{key}}}:near:{letter}{between}{span}");
        let before: Vec<u8> = server.command(&dump).await;
        for check in [
            take(other, other[0].quota().capacity()),
            Check::peek(Key::new(&key), other, 1),
            take(one, capacity),
        ] {
            let is_faster = one[0].frees().has_burst()
                && check.mode() == Mode::Take
                && check.policies()[0].params().rate > one[0].params().rate;
            if is_faster {
                // A faster quota writes, so that it does not wait for a slower one.
                continue;
            }
            if trace.redis.check(check.clone()).await.unwrap().granted() == 0 {
                compared += 1;
                if server.command::<Vec<u8>>(&dump).await != before {
                    wrote.push(format!("{check:?} after {one:?}"));
                }
            } else {
                break;
            }
        }
    }
    assert!(compared > 1_000, "only {compared} were compared");
    assert!(wrote.is_empty(), "{wrote:#?}");
}

async fn agree(seed: u64, kind: PolicyKind) {
    let server = RedisServer::start();
    let mut trace = Trace::new(seed, &server);
    // Callers of one policy share a run of the call.
    let mut policies: Vec<Policies> = (0..CALLERS)
        .map(|_| {
            let quota = quota(kind, &mut trace.rng);
            let kind = vary(&mut trace.rng, kind, quota.period());
            policy_of("p", kind, quota, &mut trace.rng).into()
        })
        .collect();
    let (first, second) = policies.split_at_mut(CALLERS / 2);
    second
        .iter_mut()
        .for_each(|policies| *policies = first[0].clone());
    trace.run(&policies, STEPS).await;
}

/// A policy of a random calendar. Half of the zones change their offset.
fn any_calendar(name: &str, rng: &mut Rng) -> Policy {
    let unit = match rng.u8(..5) {
        0 => "day".to_owned(),
        1 => "week from friday".to_owned(),
        2 => "month".to_owned(),
        3 => format!("month from {}", rng.u8(1..=31)),
        _ => "year from february 29".to_owned(),
    };
    let zones: &[&str] = if cfg!(feature = "time-zones") {
        &["UTC", "-11:30", "Europe/Berlin", "America/Havana"]
    } else {
        &["UTC", "-11:30"]
    };
    let zone = rng.choice(zones).copied().unwrap_or("UTC");
    let calendar: Calendar = format!("{unit}, {zone}").parse().unwrap();
    let strategy = Strategy::FixedWindow(Align::Calendar(calendar));
    Policy::new(name, strategy, calendar.quota(rng.u32(1..=50)).unwrap()).unwrap()
}

/// Every jump of the trace makes the estimates of Redis's time wrong.
#[tokio::test]
async fn calendars() {
    const DAY: i64 = 86_400_000_000;
    let server = RedisServer::start();
    let mut trace = Trace::new(21, &server);
    for round in 0..20 {
        let start = trace.rng.i64(20_000..40_000) * DAY;
        trace.now.store(start, Relaxed);
        let policies: Vec<Policies> = (0..CALLERS)
            .map(|i| {
                let one = any_calendar("one", &mut trace.rng);
                if i % 2 == round % 2 {
                    return one.into();
                }
                let two = any_calendar("two", &mut trace.rng);
                Policies::new([one, two]).unwrap()
            })
            .collect();
        trace.run(&policies, STEPS / 20).await;
        trace.states.clear();
        trace.granted.clear();
        let _: String = server.command("FLUSHALL").await;
    }
}

fn plan(strategy: &str, quota: &str) -> Policies {
    Policy::new("plan", strategy.parse().unwrap(), quota)
        .unwrap()
        .into()
}

/// Number of scripts that the server has run.
async fn scripts_run(server: &RedisServer) -> u32 {
    let stats: String = server.command("INFO commandstats").await;
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:calls="));
    let calls = line.and_then(|line| line.split(['=', ',']).nth(1));
    calls.map_or(0, |calls| calls.parse().unwrap())
}

/// Around a border, instances with wrong clocks grant exactly the limit of each month. Only a clock that is wrong by months
/// costs a second call, once.
#[tokio::test]
async fn wrong_clocks_decide_the_same() {
    const SECOND: i64 = 1_000_000;
    const HOUR: i64 = 3_600 * SECOND;
    // Midnight of February 1, 2027.
    let border = 1_801_440_000 * SECOND;
    for errors in [
        [2 * SECOND, -2 * SECOND, 0],
        [2 * HOUR, -2 * HOUR, 2 * SECOND],
        [100 * 24 * HOUR, -100 * 24 * HOUR, 0],
    ] {
        let server = RedisServer::start();
        let Trace {
            now, redis, others, ..
        } = Trace::new(22, &server);
        let instances = [&redis, &others[0], &others[1]];
        let policies = plan("fixed-window(month)", "100/month");
        let take = || Check::take(Key::new("ann"), &policies, 1);
        now.store(border - 1, Relaxed);
        for (instance, error) in instances.iter().zip(errors) {
            instance.inner.clock.set(border + error);
        }
        let before = scripts_run(&server).await;
        for (at, rest) in [(border - 1, 1), (border, 28 * 24 * HOUR)] {
            now.store(at, Relaxed);
            let mut granted = 0;
            for number in 0..150 {
                let decision = instances[number % 3].check(take()).await.unwrap();
                granted += decision.granted();
                assert_eq!(decision.reset_after().as_micros() as i64, rest);
                let wait = decision.retry_after().map(|wait| wait.as_micros() as i64);
                assert_eq!(wait, (!decision.is_allowed()).then_some(rest));
            }
            assert_eq!(granted, 100, "{errors:?} at {at}");
        }
        let asked_twice = errors
            .iter()
            .filter(|error| error.abs() > 24 * HOUR)
            .count();
        let scripts = scripts_run(&server).await - before;
        // The first call of all sends the text of the script.
        assert_eq!(scripts, 300 + asked_twice as u32, "{errors:?}");
    }
}

/// Other borders for the same count: another first day or time zone, or a time zone database that differs. The count ends
/// with its own window, or with that of the check if it ends in the second half of that.
#[tokio::test]
async fn other_borders_never_give_two_windows() {
    const HOUR: i64 = 3_600_000_000;
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(23, &server);
    let [utc, east, west] = ["day", "day, +01:00", "day, -10:00"]
        .map(|calendar| plan(&format!("fixed-window({calendar})"), "5/d"));
    let midnight = 20_000 * 24 * HOUR;
    let mut states = [State::fresh(utc[0].kind())];
    for (policies, hours, allowed, rest) in [
        // In the east, this day ends at 23:00. In UTC, that is in the second half of the day.
        (&east, -2, true, 1),
        (&utc, -2, false, 2),
        (&east, -1, false, 1),
        (&utc, -1, false, 1),
        (&utc, 0, true, 24),
        // The count ends in the first half of the day in the east that begins at 23:00.
        (&east, 22, false, 2),
        (&east, 23, false, 1),
        (&east, 24, true, 23),
        // In the west, a day begins at 10:00, and the count ends in its second half.
        (&west, 46, false, 12),
        (&east, 47, false, 11),
        (&east, 58, true, 13),
        (&west, 58, false, 24),
        (&west, 82, true, 24),
        (&utc, 95, false, 11),
        (&utc, 97, false, 9),
        (&utc, 106, true, 14),
    ] {
        // A count that is extended ends a microsecond later than the window.
        let at = midnight + hours * HOUR + 2;
        now.store(at, Relaxed);
        let check = Check::take(Key::new("ann"), policies, 5);
        let in_redis = redis.check(check.clone()).await.unwrap();
        assert_eq!(in_redis, in_rust(&check, &mut states, at));
        let reset = in_redis.reset_after().as_micros() as i64;
        assert_eq!(
            (in_redis.is_allowed(), (reset + 2) & !1),
            (allowed, rest * HOUR),
            "{policies:?} at {hours}"
        );
    }
}

/// A count is extended once, so that a caller of three regions is not denied for ever.
#[tokio::test]
async fn three_calendars_do_not_extend_each_other() {
    const HOUR: i64 = 3_600_000_000;
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(25, &server);
    let calendars = ["day", "day, +08:00", "day, -08:00"]
        .map(|calendar| plan(&format!("fixed-window({calendar})"), "5/d"));
    let midnight = 20_000 * 24 * HOUR;
    let mut states = [State::fresh(calendars[0][0].kind())];
    let mut granted = 0;
    for hour in 0..240 {
        for policies in &calendars {
            let at = midnight + hour * HOUR;
            now.store(at, Relaxed);
            let check = Check::take(Key::new("ann"), policies, 1);
            let in_redis = redis.check(check.clone()).await.unwrap();
            assert_eq!(in_redis, in_rust(&check, &mut states, at));
            granted += in_redis.granted();
        }
    }
    // Between a limit for each day and one for each day and a half.
    assert!((6 * 5..=10 * 5).contains(&granted), "{granted}");
}

/// Customers move the first day of their month on any day. None of them gets more than the limit until the count has ended.
#[tokio::test]
async fn a_moved_month_is_no_second_one() {
    const DAY: i64 = 86_400_000_000;
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(24, &server);
    // January 1, 2027.
    let new_year = 20_819 * DAY;
    for day in 0..31 {
        let key = Key::from(day as u64);
        let before = plan("fixed-window(month)", "5/month");
        let take = |policies: &Policies| Check::take(key, policies, 5);
        now.store(new_year, Relaxed);
        assert!(redis.check(take(&before)).await.unwrap().is_allowed());
        now.store(new_year + day * DAY + DAY / 2, Relaxed);
        let first_day = rng_day(day);
        let after = plan(&format!("fixed-window(month from {first_day})"), "5/month");
        let denied = redis.check(take(&after)).await.unwrap();
        assert!(!denied.is_allowed(), "moved on day {day} to {first_day}");
        let rest = denied.retry_after().unwrap().as_micros() as i64;
        let ends = new_year + 31 * DAY - (new_year + day * DAY + DAY / 2);
        assert!(rest >= ends, "not before February: {rest} of {ends}");
        assert!(rest <= ends + 16 * DAY, "half a month more at most");
        now.fetch_add(rest, Relaxed);
        let next = redis.check(take(&after)).await.unwrap();
        assert!(next.is_allowed(), "moved on day {day} to {first_day}");
    }
}

/// Another first day for each day of the move.
fn rng_day(day: i64) -> i64 {
    (day * 7 + 3) % 31 + 1
}

/// Windows of 100 s.
fn hundreds(now: SystemTime) -> Range<SystemTime> {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs() / 100 * 100);
    start..start + Duration::from_secs(100)
}

fn custom_plan(name: &'static str, window_of: fn(SystemTime) -> Range<SystemTime>) -> Policies {
    let calendar = Calendar::custom(name, window_of).unwrap();
    let strategy = Strategy::FixedWindow(Align::Calendar(calendar));
    Policy::new("plan", strategy, "5/month").unwrap().into()
}

/// By functions of one's own, over instances whose clocks are wrong by seconds and by many windows.
#[tokio::test]
async fn custom_windows_are_those_of_redis() {
    const SECOND: i64 = 1_000_000;
    let server = RedisServer::start();
    let Trace {
        now, redis, others, ..
    } = Trace::new(25, &server);
    let policies = custom_plan("hundreds", hundreds);
    let border = 18_000_000 * 100 * SECOND;
    now.store(border - 1, Relaxed);
    for (instance, error) in [&redis, &others[0], &others[1]]
        .into_iter()
        .zip([0, 20, 9_000])
    {
        instance.inner.clock.set(border + error * SECOND);
    }
    for (at, rest) in [(border - 1, 1), (border, 100 * SECOND)] {
        now.store(at, Relaxed);
        let mut granted = 0;
        for instance in [&redis, &others[0], &others[1]].into_iter().cycle().take(9) {
            let check = Check::take(Key::new("ann"), &policies, 1);
            let decision = instance.check(check).await.unwrap();
            granted += decision.granted();
            assert_eq!(decision.reset_after().as_micros() as i64, rest);
        }
        assert_eq!(granted, 5);
    }
    let names: Vec<String> = server.command("KEYS *").await;
    assert_eq!(names, ["rl:{ann}:plan:f:@hundreds"]);
    let mut scan = redis.scan();
    let found = scan.next().await.unwrap().unwrap();
    assert_eq!(
        (found[0].strategy, &*found[0].span),
        ("fixed-window", "@hundreds")
    );
}

/// The check fails, and the other checks of its call do not.
#[tokio::test]
async fn wrong_custom_windows_grant_nothing() {
    let server = RedisServer::start();
    let redis = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(60))
        .connect_lazy()
        .unwrap();
    let wrong = custom_plan("wrong", |now| now..now + Duration::from_millis(1));
    let right = custom_plan("hundreds", hundreds);
    let stores = [
        BoxStore::new(redis.clone()),
        BoxStore::new(LocalStore::default()),
        BoxStore::new(Fallback::new(redis.clone(), LocalStore::default())),
    ];
    for store in stores {
        let ask = |policies: &Policies| store.check(Check::take(Key::new("ann"), policies, 1));
        let (failed, granted) = join(ask(&wrong), ask(&right)).await;
        assert!(granted.unwrap().is_allowed());
        let error = failed.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        let text = error.to_string();
        assert!(
            text.contains(
                "the calendar `wrong` of the policy \"plan\" is invalid: its window that starts "
            ),
            "{text}"
        );
    }
    let names: Vec<String> = server.command("KEYS *wrong*").await;
    assert!(names.is_empty(), "{names:?}");
    let check = Check::take(Key::new("ann"), &wrong, 1);
    let decision = Counts::default().decide(&check, SystemTime::UNIX_EPOCH, Source::Local);
    assert!(!decision.is_allowed());
}

/// The function is wrong at Redis's time only, which the instance has not known.
#[tokio::test]
async fn windows_wrong_at_the_time_of_redis_grant_nothing() {
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(27, &server);
    let policies = custom_plan("early", |now| {
        let Range { start, end } = hundreds(now);
        let last = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        if start > last {
            start..start
        } else {
            start..end
        }
    });
    redis.inner.clock.set(1_700_000_000_000_000);
    now.store(1_900_000_000_000_000, Relaxed);
    let check = Check::take(Key::new("ann"), &policies, 1);
    let error = redis.check(check).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    // It is no failure of Redis.
    assert!(error.is_check_only());
    let text = error.to_string();
    assert!(
        text.contains("no window at the time of the server"),
        "{text}"
    );
    let names: Vec<String> = server.command("KEYS *").await;
    assert!(names.is_empty(), "{names:?}");
}

#[tokio::test]
async fn a_key_expires_with_its_window() {
    let server = RedisServer::start();
    let redis = RedisStore::connect_lazy(server.url()).unwrap();
    let policies = plan("fixed-window(year from june 1, -12:00)", "5/year");
    let decision = redis
        .check(Check::take(Key::new("ann"), &policies, 1))
        .await
        .unwrap();
    let ttl: i64 = server.command("PTTL rl:{ann}:plan:f:year").await;
    let rest = decision.reset_after().as_millis() as i64;
    assert!((rest - 10_000..=rest + 1).contains(&ttl), "{ttl} of {rest}");
}

/// A repetition after the border is charged in the next month.
#[tokio::test]
async fn an_id_ends_with_its_month() {
    const MS: i64 = 1_000;
    let server = RedisServer::start();
    let Trace { now, redis, .. } = Trace::new(26, &server);
    let policies = plan("fixed-window(month)", "9/month");
    let take = || Check::take(Key::new("ann"), &policies, 4).with_id("job-7");
    // Midnight of February 1, 2027.
    let border = 1_801_440_000_000 * MS;
    let local = LocalStore::default();
    for (at, left, is_repeated) in [
        (border - 30 * 86_400_000 * MS, 5, false),
        (border - 20 * 86_400_000 * MS, 5, true),
        (border - 1, 5, true),
        (border + 5 * MS, 5, false),
        (border + 6 * MS, 5, true),
    ] {
        now.store(at, Relaxed);
        let in_redis = redis.check(take()).await.unwrap();
        let in_local = local.verdicts(&take(), || at);
        for verdicts in [in_redis.verdicts(), &in_local] {
            let seen = (verdicts.each[0].remaining, verdicts.age > 0);
            assert_eq!(
                seen,
                (left, is_repeated),
                "{} before the border",
                border - at
            );
        }
    }
}

/// Returns the decision of the Rust halves as if Redis had made it.
fn in_rust(check: &Check, states: &mut [State], now: i64) -> Decision {
    let verdicts = check.decide(states, now);
    check.clone().answer(verdicts, Source::Redis)
}

/// Quotas of every size: usual ones, and extreme ones.
fn policy(name: &str, kind: PolicyKind, rng: &mut Rng) -> Policy {
    let quota = quota(kind, rng);
    policy_of(name, kind, quota, rng)
}

/// Returns a random quota without a burst.
fn quota(kind: PolicyKind, rng: &mut Rng) -> Quota {
    const DAY: u64 = 86_400_000_000;
    let (limit, period) = match rng.u8(..10) {
        0 => (3, 1_000_000),
        1 => (7, 10_000_000),
        2 => (1, DAY),
        3 => (300_000, 1_000_000),
        4 => (1_000_003, 1_000_000),
        5 => (999_983, 30 * DAY),
        6 => (u32::MAX, 366 * DAY),
        7 => (rng.u32(1..10), rng.u64(1..100)),
        8 => (rng.u32(1..1_000), rng.u64(1..1_000_000)),
        _ => (rng.u32(1..1_000_000), rng.u64(1..100 * DAY)),
    };
    // The maximum limit of a sliding log.
    let limit = if kind == Strategy::SlidingLog.into() {
        limit.min(100_000)
    } else {
        limit
    };
    Quota::per(limit, Duration::from_micros(period))
}

fn longest_period(policies: &Policies) -> i64 {
    let periods = policies.iter().map(|policy| policy.params().period);
    periods.max().unwrap()
}

fn of_kind(name: &str, kind: PolicyKind, quota: Quota) -> Result<Policy, ConfigError> {
    match kind {
        PolicyKind::Rate(strategy) => Policy::new(name, strategy, quota),
        PolicyKind::InFlight => Policy::in_flight(name, quota.limit())?.slot_ttl(quota.period()),
    }
}

/// Returns a policy of this quota, with a random burst and lease if it may have them.
fn policy_of(name: &str, kind: PolicyKind, quota: Quota, rng: &mut Rng) -> Policy {
    let limit = quota.limit();
    if kind == PolicyKind::InFlight {
        let lease = quota
            .period()
            .clamp(Duration::from_secs(1), Duration::from_secs(3_600));
        return of_kind(name, kind, Quota::per(limit.min(rng.u32(1..=100)), lease)).unwrap();
    }
    let burst = match rng.u8(..4) {
        0 => 1,
        1 => rng.u32(1..100),
        2 => limit.saturating_mul(2),
        _ => limit,
    };
    let policy = of_kind(name, kind, quota.burst(burst))
        .or_else(|_| of_kind(name, kind, quota))
        .unwrap();
    // A leased policy counts under a tighter quota.
    let leased = policy.clone().leased(Duration::from_micros(
        quota.period().as_micros() as u64 / rng.u64(2..100),
    ));
    leased.ok().filter(|_| rng.bool()).unwrap_or(policy)
}

struct Trace {
    rng: Rng,
    seed: u64,
    now: Arc<AtomicI64>,
    redis: RedisStore,
    /// More instances. A random instance sends the checks of each step.
    others: Vec<RedisStore>,
    /// The states of each caller in the Rust halves, one per policy.
    states: Vec<Vec<State>>,
    /// Some grants of each caller, with their times.
    granted: Vec<Vec<(Decision, i64)>>,
    /// For each caller some of the slots that were taken.
    slots: Vec<Vec<SlotId>>,
    steps: usize,
}

impl Trace {
    fn new(seed: u64, server: &RedisServer) -> Self {
        let now = Arc::new(AtomicI64::new(1_790_000_000_000_000));
        // One connection, so that Redis decides the checks of a caller in order.
        let store = || {
            let builder = RedisStore::builder(server.url())
                .connections(NonZeroUsize::MIN)
                .denials(0);
            let mut builder = builder.timeout(Duration::from_secs(60));
            builder.now = Arc::clone(&now);
            builder.connect_lazy().unwrap()
        };
        let (redis, others) = (store(), vec![store(), store()]);
        let rng = Rng::with_seed(seed);
        Self {
            rng,
            seed,
            now,
            redis,
            others,
            states: vec![],
            granted: vec![],
            slots: vec![],
            steps: 0,
        }
    }

    /// Sends random checks and compares the decisions. `policies` contains a list for each caller.
    async fn run(&mut self, policies: &[Policies], steps: usize) {
        // A caller with a new strategy has another key in Redis, and starts empty.
        self.states.resize(policies.len(), Vec::new());
        self.granted.resize(policies.len(), Vec::new());
        self.slots.resize(policies.len(), Vec::new());
        for (states, policies) in self.states.iter_mut().zip(policies) {
            let fresh = policies.iter().map(|policy| State::fresh(policy.kind()));
            let same =
                |a: &State, b: &State| std::mem::discriminant(a) == std::mem::discriminant(b);
            if states.len() != policies.iter().len()
                || !states.iter().zip(fresh.clone()).all(|(a, b)| same(a, &b))
            {
                *states = fresh.collect();
            }
        }
        let keys: Vec<Key> = (0..policies.len())
            .map(|i| Key::new(format!("caller-{i}")))
            .collect();
        let mut waits = vec![Duration::from_micros(1)];
        let end = self.steps + steps;
        while self.steps < end {
            // `takes.lua` decides a call that has only takes; see also `takes_under_one_plan`.
            let only_takes = self.rng.bool();
            // Some callers send several checks together, which share an entry of the batch.
            let checks: Vec<(usize, Check)> = (0..keys.len())
                .flat_map(|i| {
                    let times = [1, 1, 2, 5][self.rng.usize(..4)];
                    let within = waits[self.rng.usize(..waits.len())];
                    let check = if only_takes {
                        Check::take(keys[i], &policies[i], self.cost(&policies[i]))
                    } else {
                        self.check(i, keys[i], &policies[i], within)
                    };
                    let mut checks = vec![(i, check); times];
                    for (_, check) in checks
                        .iter_mut()
                        .filter(|(_, check)| check.mode() == Mode::Take)
                    {
                        // Half of the takes get a new slot. The others take the same slot again.
                        if self.rng.bool() {
                            *check = Check::take(*check.key(), check.policies(), check.cost());
                        }
                    }
                    checks
                })
                .collect();
            let instance = self.rng.usize(..=self.others.len());
            let redis = self.others.get(instance).unwrap_or(&self.redis);
            let asked = checks.iter().map(|(_, check)| redis.check(check.clone()));
            // `take.lua` decides a take that is alone in its call.
            let in_redis = if self.rng.u8(..8) == 0 {
                stream::iter(asked).then(|asked| asked).collect().await
            } else {
                join_all(asked).await
            };
            let mut seen = Vec::new();
            for ((i, check), in_redis) in checks.iter().zip(in_redis) {
                let in_redis = in_redis.expect("an answer of Redis");
                let in_rust = in_rust(check, &mut self.states[*i], self.now.load(Relaxed));
                assert_eq!(
                    in_redis, in_rust,
                    "Redis and Rust differ: seed {}, step {}, {check:?}",
                    self.seed, self.steps
                );
                self.steps += 1;
                if let Some(slot) = check.slot().filter(|_| in_redis.is_allowed()) {
                    let slots = &mut self.slots[*i];
                    slots.truncate(7);
                    slots.insert(self.rng.usize(..=slots.len()), slot);
                }
                if in_redis.granted() > 0 && self.rng.u8(..4) == 0 {
                    let granted = &mut self.granted[*i];
                    granted.truncate(7);
                    granted.insert(
                        self.rng.usize(..=granted.len()),
                        (in_redis.clone(), self.now.load(Relaxed)),
                    );
                }
                seen.extend(in_redis.retry_after());
                seen.push(in_redis.reset_after());
            }
            if !seen.is_empty() {
                waits = seen;
            }
            self.step(&waits);
        }
    }

    fn check(&mut self, caller: usize, key: Key, policies: &Policies, within: Duration) -> Check {
        let rng = &mut self.rng;
        if rng.u8(..6) == 0
            && let Some((decision, at)) = rng.choice(&self.granted[caller])
        {
            // Include ages above and below the real one, and far below.
            let late = [0, 0, 1, rng.i64(0..1_000_000), -rng.i64(0..10_000_000)][rng.usize(..5)];
            let age = Duration::from_micros((self.now.load(Relaxed) - at + late).max(0) as u64);
            let check = decision.refund(key, rng.u32(1..=decision.granted()), age);
            // A refund omits policies of requests in flight, which the states here have.
            if let Some(check) =
                check.filter(|check| check.policies().iter().len() == policies.iter().len())
            {
                return check;
            }
        }
        let cost = self.cost(policies);
        let rng = &mut self.rng;
        if policies.iter().any(Policy::is_in_flight) {
            let slot = rng
                .choice(&self.slots[caller])
                .copied()
                .unwrap_or_else(SlotId::unique);
            match rng.u8(..16) {
                0..=2 => return Check::renew(key, policies, slot),
                3..=6 => return Check::release(key, policies, slot),
                _ => {}
            }
        }
        match rng.u8(..12) {
            0 => Check::peek(key, policies, cost),
            1 => Check::up_to(key, policies, cost),
            2 => Check::charge(key, policies, cost),
            3 => Check::refund(key, policies, cost),
            4 if rng.u8(..8) == 0 => Check::reset(key, policies),
            5 | 6 => Check::take_ahead(key, policies, cost, within),
            _ => Check::take(key, policies, cost),
        }
    }

    fn cost(&mut self, policies: &Policies) -> u32 {
        let rng = &mut self.rng;
        let capacity = policies[rng.usize(..policies.iter().len())]
            .quota()
            .capacity();
        match rng.u8(..8) {
            0 => 0,
            1 => capacity,
            2 => capacity.saturating_add(1),
            3 => rng.u32(..=capacity),
            4 => rng.u32(..=capacity) / 8,
            _ => 1,
        }
    }

    /// Sets the time to the end of a caller's wait, just before or after it, or to a random time; sometimes back.
    fn step(&mut self, waits: &[Duration]) {
        let rng = &mut self.rng;
        let wait = waits[rng.usize(..waits.len())].as_micros() as i64;
        let now = self.now.load(Relaxed);
        let now = match rng.u8(..16) {
            0 | 1 => now,
            2..=5 => now + wait,
            6 => now + wait - 1,
            7 => now + wait + 1,
            8 | 9 => now + rng.i64(0..=wait.max(0)),
            10 => now - [1, 1_000, 1_000_000][rng.usize(..3)],
            11 => now + rng.i64(0..1_000),
            12 => now + rng.i64(0..1_000_000),
            _ => now + rng.i64(0..=wait / 16),
        };
        // The latest time to which a clock can be set.
        self.now.store(now.min(4_000_000_000_000_000), Relaxed);
    }
}
