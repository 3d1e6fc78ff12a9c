//! How much of a quota the waiters use, which of them get it, and in which order, with distant stores.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{CallLimitLayer, Key, Limiter, LocalStore, Policies, Policy, Strategy};

use crate::late::Late;
use crate::support::policy;

const ANN: Key = Key::GLOBAL;
const LONG: Duration = Duration::from_secs(3_600);

/// Returns the times of the grants to each instance. `there` has the one-way delays of the instances in microseconds.
/// Each of the `waiters` of an instance waits again after each grant, until `time` has passed.
async fn passed(
    policies: &Policies,
    there: &[u64],
    waiters: usize,
    time: Duration,
) -> Vec<Vec<Duration>> {
    let (local, start) = (LocalStore::default(), Instant::now());
    let instances = there.iter().map(|there| {
        let store = Late::new(&local, Duration::from_micros(*there));
        let limiter = Limiter::new(store, policies.clone());
        let times = Arc::new(Mutex::new(vec![]));
        let tasks = (0..waiters).map(|_| {
            let (limiter, times) = (limiter.clone(), Arc::clone(&times));
            tokio::spawn(timeout(time, async move {
                loop {
                    assert!(limiter.wait(ANN, 1, LONG).await.unwrap().is_allowed());
                    times.lock().unwrap().push(start.elapsed());
                }
            }))
        });
        (tasks.collect::<Vec<_>>(), times)
    });
    let times = instances
        .collect::<Vec<_>>()
        .into_iter()
        .map(|(tasks, times)| async move {
            join_all(tasks).await;
            times.lock().unwrap().clone()
        });
    join_all(times).await
}

/// A round trip must not limit the rate: the whole quota is used.
#[tokio::test(start_paused = true)]
async fn the_round_trip_limits_no_rate() {
    for (quota, there, waiters, least) in [
        ("1000/s burst 1", &[2_500][..], 100, 0.95),
        ("2000/s burst 10", &[5_000], 100, 0.95),
        ("10000/s burst 10", &[1_000], 100, 0.9),
        ("10000/s burst 10", &[1_000; 3], 100, 0.9),
    ] {
        let (policies, time) = (policy(Strategy::Gcra, quota), Duration::from_secs(3));
        let each = passed(&policies, there, waiters, time).await;
        let all = each.iter().map(Vec::len).sum::<usize>() as f64;
        let may = f64::from(policies[0].quota().limit()) * time.as_secs_f64();
        let used = all / may;
        println!("{quota}, {there:?}: {used:.3}");
        assert!(used >= least, "{quota}, {there:?}: {used} used");
        assert!(all <= may + 11.0, "{quota}, {there:?}: {all} of {may}");
    }
}

/// A distant instance gets its part.
#[tokio::test(start_paused = true)]
async fn the_farthest_instance_gets_its_part() {
    // There are more waiters than the quota allows in a window.
    for (strategy, waiters, time, least, most) in [
        (Strategy::Gcra, 30, 30, 0.3, 0.36),
        // Each window goes to one of them, by chance.
        (Strategy::FixedWindow(Align::default()), 150, 300, 0.2, 0.45),
        (Strategy::SlidingLog, 150, 300, 0.2, 0.45),
    ] {
        let policies = policy(strategy, "100/s");
        let time = Duration::from_secs(time);
        let each = passed(&policies, &[200, 200, 25_000], waiters, time).await;
        let each: Vec<_> = each.iter().map(Vec::len).collect();
        let all: usize = each.iter().sum();
        let part = each[2] as f64 / all as f64;
        println!("{strategy:?}: {each:?}, {part:.3}");
        assert!((least..=most).contains(&part), "{strategy:?}: {each:?}");
        let may = 100 * time.as_secs() as usize;
        assert!(all * 10 >= may * 9, "{strategy:?}: {all} of {may}");
    }
}

/// A second instance starts while calls of the first one hold every slot.
#[tokio::test(start_paused = true)]
async fn an_instance_that_comes_later_gets_places() {
    let (local, calls) = (
        LocalStore::default(),
        Arc::new([AtomicU32::new(0), AtomicU32::new(0)]),
    );
    let mut tasks = vec![];
    for (i, from) in [0, 2].into_iter().enumerate() {
        let layer = CallLimitLayer::new(
            Late::new(&local, Duration::from_micros(200)),
            |_: &()| Some(ANN),
            Policy::in_flight("jobs", 10).unwrap(),
        );
        let calls = Arc::clone(&calls);
        let service = layer.wait(LONG).layer(service_fn(move |()| {
            let calls = Arc::clone(&calls);
            async move {
                sleep(Duration::from_millis(80 + fastrand::u64(..40))).await;
                calls[i].fetch_add(1, SeqCst);
                Ok::<_, Infallible>(())
            }
        }));
        for _ in 0..50 {
            let service = service.clone();
            tasks.push(tokio::spawn(async move {
                sleep(Duration::from_secs(from)).await;
                let _ = timeout(Duration::from_secs(602 - from), async {
                    loop {
                        service.clone().oneshot(()).await.unwrap();
                    }
                })
                .await;
            }));
        }
    }
    sleep(Duration::from_secs(2)).await;
    let before = calls[0].load(SeqCst);
    join_all(tasks).await;
    let each = [calls[0].load(SeqCst) - before, calls[1].load(SeqCst)];
    let part = f64::from(each[1]) / f64::from(each[0] + each[1]);
    println!("in flight: {each:?}, {part:.3}");
    assert!(part >= 0.3, "{each:?}");
}

/// Waiters that leave before their turn cost no quota, and their turns cause no early grant.
#[tokio::test(start_paused = true)]
async fn a_storm_of_leavers_wastes_and_exceeds_nothing() {
    for (leaves, least) in [(10, 0.95), (50, 0.95), (90, 0.66)] {
        let (policies, time) = (
            policy(Strategy::Gcra, "500/s burst 1"),
            Duration::from_secs(10),
        );
        let (local, start) = (LocalStore::default(), Instant::now());
        let times = Arc::new(Mutex::new(vec![]));
        let mut tasks = vec![];
        for instance in 0..3 {
            let limiter = Limiter::new(
                Late::new(&local, Duration::from_micros(2_500)),
                policies.clone(),
            );
            for i in 0..60 {
                let (limiter, times) = (limiter.clone(), Arc::clone(&times));
                tasks.push(tokio::spawn(timeout(time, async move {
                    let mut rng = Rng::with_seed(instance * 1_000 + i);
                    loop {
                        let patience = if rng.u32(..100) < leaves {
                            Duration::from_millis(rng.u64(..300))
                        } else {
                            LONG
                        };
                        if let Ok(answer) = timeout(patience, limiter.wait(ANN, 1, LONG)).await {
                            assert!(answer.unwrap().is_allowed());
                            times.lock().unwrap().push(start.elapsed());
                        }
                    }
                })));
            }
        }
        join_all(tasks).await;
        let times = times.lock().unwrap().clone();
        let used = times.len() as f64 / (500.0 * time.as_secs_f64());
        let above = above(&times, 500.0, 1.0);
        println!("{leaves} % leave: {used:.3} used, {above:.2} above");
        assert!(used >= least, "{leaves} % leave: {used} used");
        // A reply arrives up to half a round trip and a timer tick after its turn is due.
        assert!(above <= 3.0, "{leaves} % leave: {above} too many");
    }
}

/// Returns by how many grants the rate and the burst were exceeded at most, in any interval.
fn above(times: &[Duration], rate: f64, burst: f64) -> f64 {
    let (mut level, mut last, mut most) = (0.0_f64, Duration::ZERO, 0.0_f64);
    for time in times {
        level = (level - (*time - last).as_secs_f64() * rate).max(0.0) + 1.0;
        (last, most) = (*time, most.max(level - burst));
    }
    most
}

/// FIFO order, even if the replies of the store arrive in another order.
#[tokio::test(start_paused = true)]
async fn no_waiter_is_overtaken() {
    for strategy in [Strategy::Gcra, Strategy::SlidingLog] {
        let store = Late::new(&LocalStore::default(), Duration::from_millis(5))
            .jittered(Duration::from_millis(10));
        let limiter = Limiter::new(store, policy(strategy, "200/s burst 200"));
        let order = Arc::new(Mutex::new(vec![]));
        let waits = (0..800).map(|i| {
            let (limiter, order) = (limiter.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                sleep(Duration::from_millis(i)).await;
                assert!(limiter.wait(ANN, 1, LONG).await.unwrap().is_allowed());
                order.lock().unwrap().push(i);
            })
        });
        join_all(waits.collect::<Vec<_>>()).await;
        let order = order.lock().unwrap();
        let inversions = order.windows(2).filter(|pair| pair[0] > pair[1]).count();
        println!("{strategy:?}: {inversions} inversions");
        // Requests within the burst do not wait.
        let waited = &order[250..];
        assert!(waited.is_sorted(), "{strategy:?}: {order:?}");
    }
}

/// A large cost is granted although small costs always wait: of this process under every strategy, and of another
/// instance if turns are reserved.
#[tokio::test(start_paused = true)]
async fn small_costs_do_not_starve_a_large_one() {
    for (strategy, is_elsewhere) in [
        (Strategy::SlidingCounter, false),
        (Strategy::SlidingLog, false),
        (Strategy::SlidingWindow { cells: 10 }, false),
        (Strategy::Gcra, false),
        (Strategy::Gcra, true),
    ] {
        let (local, policies) = (LocalStore::default(), policy(strategy, "100/s"));
        let there = Duration::from_micros(200);
        let small = Limiter::new(Late::new(&local, there), policies.clone());
        let passed = Arc::new(AtomicU32::new(0));
        let tasks: Vec<_> = (0..50)
            .map(|_| {
                let (small, passed) = (small.clone(), Arc::clone(&passed));
                tokio::spawn(async move {
                    loop {
                        assert!(small.wait(ANN, 1, LONG).await.unwrap().is_allowed());
                        passed.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        sleep(Duration::from_secs(2)).await;
        let large = match is_elsewhere {
            true => Limiter::new(Late::new(&local, there), policies),
            false => small,
        };
        let (start, before) = (Instant::now(), passed.load(SeqCst));
        let decision = large.wait(ANN, 20, Duration::from_secs(40)).await.unwrap();
        let (took, others) = (start.elapsed(), passed.load(SeqCst) - before);
        println!(
            "{strategy:?}: {} after {took:?}, {others} small ones",
            decision.is_allowed()
        );
        assert!(
            decision.is_allowed(),
            "{strategy:?}: {others} small ones passed in {took:?}"
        );
        assert!(took < Duration::from_secs(10), "{strategy:?}: {took:?}");
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Under several policies a turn is charged on arrival, and due when the slowest policy allows it. So if the queue of that
/// one gets shorter, turns of another policy are due together: at most its rate times the longest wait. Over time it
/// passes no more than its quota.
#[tokio::test(start_paused = true)]
async fn lists_that_share_a_policy_delay_its_turns() {
    let (store, start) = (LocalStore::default(), Instant::now());
    let tenant = policy(Strategy::Gcra, "100/s");
    let search = Policy::new("search", Strategy::Gcra, "10/s").unwrap();
    let both = Policies::new([tenant[0].clone(), search]).unwrap();
    let wait = |policies: &Policies| {
        let limiter = Limiter::new(store.clone(), policies.clone());
        tokio::spawn(async move {
            let asked = start.elapsed();
            assert!(limiter.wait(ANN, 1, LONG).await.unwrap().is_allowed());
            (start.elapsed(), start.elapsed() - asked)
        })
    };
    // A queue of 10 s, which nothing adds to.
    let others: Vec<_> = (0..1_100).map(|_| wait(&tenant)).collect();
    let mut searches = vec![];
    for _ in 0..200 {
        sleep(Duration::from_millis(100)).await;
        searches.push(wait(&both));
    }
    let mut passed: Vec<_> = join_all(searches).await.into_iter().flatten().collect();
    assert!(join_all(others).await.iter().all(Result::is_ok));
    passed.sort_unstable();
    let longest = passed.iter().map(|(_, waited)| *waited).max().unwrap();
    let (mut level, mut before, mut highest) = (0.0_f64, Duration::ZERO, 0.0_f64);
    for (i, (at, _)) in passed.iter().enumerate() {
        level = (level - 10.0 * (*at - before).as_secs_f64()).max(0.0) + 1.0;
        (before, highest) = (*at, highest.max(level));
        assert!(i as f64 <= 10.0 + 10.0 * at.as_secs_f64(), "{i} by {at:?}");
    }
    let most = 10.0 + 10.0 * longest.as_secs_f64();
    assert!(
        10.0 < highest && highest <= most + 1.0,
        "{highest} of {most}"
    );
}
