//! A rolling deploy that changes quotas, with an outage in its middle.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::block::ann;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Policies, Policy, Quota, Source, Strategy};
use crate::simulation::check_spent;
use crate::store::{Answer, Fallback, LocalStore, Store};
use crate::util::{instant, lock};
use crate::{Leased, Limiter};

/// The shared store, which may be unavailable.
#[derive(Clone, Default)]
struct Shared(LocalStore, Arc<AtomicBool>);

impl Store for Shared {
    type Future = <LocalStore as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Self(local, is_away) = self;
        if is_away.load(Relaxed) {
            let error = StoreError::new(ErrorKind::Unreachable);
            return Answer::ready(Err(error.check_only().not_sent()));
        }
        local.check(check)
    }
}

/// A store, a version and its leased policy.
type Instance = (Leased<Fallback<Shared, LocalStore>>, usize, Policies);

/// One version of the program: the quota of its leased policy, and its limit of calls in flight.
#[derive(Clone, Copy)]
struct Quotas {
    quota: Quota,
    calls: u32,
}

/// The grants of all instances.
#[derive(Default)]
struct Granted {
    /// Time in microseconds and cost of each grant, under the old and the new quota.
    spent: [Mutex<Vec<(i64, u32)>>; 2],
    from_memory: AtomicU32,
    /// Calls in flight, and their maximum outside and during the outage.
    calls: AtomicI64,
    max_calls: [AtomicI64; 2],
}

const INSTANCES: u32 = 6;
const LEASE: Duration = Duration::from_millis(200);
/// In milliseconds since the start of the deploy, which takes 60 s.
const OUTAGE: Range<u64> = 25_000..35_000;
const VERSIONS: [Quotas; 2] = [
    Quotas {
        quota: Quota::per(200, Duration::from_secs(2)),
        calls: 8,
    },
    Quotas {
        quota: Quota::per_second(300),
        calls: 12,
    },
];

fn instance(shared: &Shared, version: usize, strategy: Strategy) -> Instance {
    let policy = Policy::new("p", strategy, VERSIONS[version].quota);
    let policy = policy.and_then(|policy| policy.leased(LEASE)).unwrap();
    let fallback = Fallback::builder(shared.clone(), LocalStore::default())
        .share(INSTANCES)
        .build();
    (
        Leased::builder(fallback).share(INSTANCES).build(),
        version,
        policy.into(),
    )
}

/// Takes one unit, and records the time of the grant.
fn take(
    tasks: &mut JoinSet<()>,
    granted: &Arc<Granted>,
    start: Instant,
    (store, version, policies): &Instance,
) {
    let answer = store.check(Check::take(ann(), policies, 1));
    let (granted, version) = (Arc::clone(granted), *version);
    tasks.spawn(async move {
        let decision: Decision = answer.await.unwrap();
        if decision.is_allowed() {
            let at = (instant() - start).as_micros() as i64;
            lock(&granted.spent[version]).push((at, 1));
            let is_leased = decision.source() == Source::Leased;
            granted.from_memory.fetch_add(is_leased.into(), Relaxed);
        }
    });
}

/// Makes a call of 45 ms.
fn call(tasks: &mut JoinSet<()>, granted: &Arc<Granted>, is_outage: bool, limiter: &Calls) {
    let (granted, limiter) = (Arc::clone(granted), limiter.clone());
    tasks.spawn(async move {
        if let Ok(reservation) = limiter.reserve(ann(), 1).await {
            let calls = granted.calls.fetch_add(1, Relaxed) + 1;
            granted.max_calls[usize::from(is_outage)].fetch_max(calls, Relaxed);
            sleep(Duration::from_millis(45)).await;
            granted.calls.fetch_sub(1, Relaxed);
            drop(reservation);
        }
    });
}

type Calls = Limiter<Leased<Fallback<Shared, LocalStore>>>;

/// The calls in flight of an instance.
fn calls((store, version, _): &Instance) -> Calls {
    let policy = Policy::in_flight("calls", VERSIONS[*version].calls).unwrap();
    Limiter::new(store.clone(), policy)
}

/// Each quota of a window holds, and that of a bucket which grants more, with at most one burst more in the outage.
#[tokio::test(start_paused = true)]
async fn a_deploy_with_an_outage_keeps_each_quota() {
    for &strategy in Strategy::ALL {
        let (shared, granted, start) = (Shared::default(), Arc::new(Granted::default()), instant());
        let mut instances: Vec<Instance> = (0..INSTANCES)
            .map(|_| instance(&shared, 0, strategy))
            .collect();
        let mut limiters: Vec<Calls> = instances.iter().map(calls).collect();
        let mut tasks = JoinSet::new();
        for millis in (0..60_000).step_by(10) {
            shared.1.store(OUTAGE.contains(&millis), Relaxed);
            // Calls that began during the outage end soon after it.
            let is_outage = (OUTAGE.start..OUTAGE.end + 200).contains(&millis);
            if millis % 10_000 == 4_000 {
                let (i, next) = ((millis / 10_000) as usize, instance(&shared, 1, strategy));
                let (old, ..) = std::mem::replace(&mut instances[i], next);
                limiters[i] = calls(&instances[i]);
                old.shutdown().await;
            }
            for (instance, limiter) in instances.iter().zip(&limiters) {
                // Above the quota in every second second.
                if millis / 1_000 % 2 == 0 {
                    take(&mut tasks, &granted, start, instance);
                }
                if millis % 20 == 0 {
                    call(&mut tasks, &granted, is_outage, limiter);
                }
            }
            sleep(Duration::from_millis(10)).await;
            while tasks.try_join_next().is_some() {}
        }
        tasks.join_all().await;
        let [mut old, mut new] = granted.spent.each_ref().map(|spent| lock(spent).clone());
        let began = OUTAGE.start as i64 * 1_000;
        let lasts = (OUTAGE.end - OUTAGE.start) as i64 * 1_000 + 4_000_000;
        let check = |quota: Quota, spent: &mut Vec<(i64, u32)>| {
            spent.sort_unstable();
            if let Err(problem) = check_spent(strategy, quota, spent, &[began], lasts) {
                panic!("{strategy:?}, {quota}: {problem}");
            }
        };
        let [Quotas { quota: first, .. }, Quotas { quota: second, .. }] = VERSIONS;
        if strategy.frees().is_gradual() {
            // Both are one count, which grants at most what the faster one does: it also has the larger burst.
            check(second, &mut [&old[..], &new[..]].concat());
        } else if strategy.frees().has_burst() {
            // A started interval counts for the next quota: two refills more.
            check(
                second.burst(3 * second.limit()),
                &mut [&old[..], &new[..]].concat(),
            );
        } else {
            check(first, &mut old);
            check(second, &mut new);
        }
        let max = granted.max_calls.each_ref().map(|max| max.load(Relaxed));
        let from_memory = granted.from_memory.load(Relaxed);
        println!(
            "{strategy:?}: {} and {} granted, {from_memory} from memory, at most {max:?} calls",
            old.len(),
            new.len()
        );
        let limit = i64::from(VERSIONS[1].calls);
        assert!((8..=limit).contains(&max[0]), "{strategy:?}: {max:?}");
        assert!(max[1] <= 2 * limit, "{strategy:?}: {max:?}");
        let local = old.iter().chain(&new).filter(|(at, _)| {
            let millis = (at / 1_000) as u64;
            (OUTAGE.start + 3_000..OUTAGE.end).contains(&millis)
        });
        assert!(local.count() > 100, "{strategy:?}");
        assert!(
            old.len() > 2_000 && new.len() > 3_000 && from_memory > 500,
            "{strategy:?}: {} and {}, {from_memory}",
            old.len(),
            new.len()
        );
    }
}
