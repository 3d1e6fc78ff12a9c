//! Consecutive failovers under load, behind a fallback.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{RedisStore, redis};

use crate::load::{CALLERS, DEADLINE, Kind, Load, Setup, TASKS, peek};
use crate::nodes::{Group, NAME};
use crate::support::until;

/// Extra time that a busy machine may need, in addition to a stall.
const SLACK: Duration = Duration::from_millis(900);
/// Maximum recovery time on a busy machine. The promised time is a second; the test prints the
/// actual one.
const RECOVERY: Duration = Duration::from_secs(10);

/// Failovers per load: few enough that the ample callers do not use up their limits.
const IN_A_ROW: usize = 4;

/// The number of loads, one after the other: `FAILOVERS=20` means five.
fn loads() -> usize {
    std::env::var("FAILOVERS").map_or(1, |count| {
        count.parse::<usize>().expect("a number").div_ceil(IN_A_ROW)
    })
}

/// Returns `true` if a store has an open connection to the server.
async fn is_used(group: &Group, server: usize) -> bool {
    let clients: String = group.servers[server]
        .command("CLIENT LIST TYPE normal")
        .await;
    clients
        .lines()
        .any(|line| line.contains("cmd=evalsha") || line.contains("cmd=role"))
}

/// Waits until both replicas have received the master's writes, which may take a while on a busy
/// machine.
async fn both_replicas_have_it(group: &Group, master: usize) {
    let connection = group.servers[master].connection().await;
    until("both replicas have it", || {
        let mut connection = connection.clone();
        async move {
            // `WAIT` covers the writes of this connection, and therefore all earlier writes.
            let _: () = redis::cmd("SET")
                .arg("written")
                .arg(1)
                .query_async(&mut connection)
                .await
                .expect("a master");
            let have: u64 = redis::cmd("WAIT")
                .arg(2)
                .arg(200)
                .query_async(&mut connection)
                .await
                .expect("a count");
            have == 2
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failovers_in_a_row() {
    let mut group = Group::start().await;
    for _ in 0..loads() {
        survive(&mut group).await;
        let master = group.master().await.expect("a master");
        let _: String = group.servers[master].command("FLUSHALL").await;
    }
}

async fn survive(group: &mut Group) {
    let mut load = Load::new(&group.url(), Setup::default());
    load.introduce().await;
    load.start();
    until("the spent callers are spent", async || {
        load.instances
            .iter()
            .all(|instance| instance.has_denied(Kind::Spent, Source::Redis))
    })
    .await;
    // Checks that failed before the callers were spent, as on a machine that stalls, may or may not
    // have been charged.
    let early = load.total(|events| &events.failed);
    // The grants during the change of masters: at most these can be lost.
    let mut at_risk = [0; CALLERS.len()];
    for failover in 0..IN_A_ROW {
        let old = group.master().await.expect("a master");
        let kill = failover % 2 == 1;
        group.switches.lock().unwrap().clear();
        let granted = || {
            std::array::from_fn::<u64, { CALLERS.len() }, _>(|caller| {
                load.sums.redis[caller].load(SeqCst)
            })
        };
        let granted_before = granted();
        both_replicas_have_it(group, old).await;
        let begun = Instant::now();
        if kill {
            group.servers[old].kill();
        } else {
            until("the failover begins", async || {
                group.sentinels[failover % 3]
                    .command::<String>(&format!("SENTINEL FAILOVER {NAME}"))
                    .await
                    .is_ok()
            })
            .await;
        }
        until("a sentinel has switched", async || {
            !group.switches.lock().unwrap().is_empty()
        })
        .await;
        let before: Vec<u64> = load
            .instances
            .iter()
            .map(|instance| instance.by_redis())
            .collect();
        if !kill {
            until("the former master is left", async || {
                !is_used(group, old).await
            })
            .await;
        }
        let left = Instant::now();
        until("all instances are back", async || {
            load.instances
                .iter()
                .zip(&before)
                .all(|(instance, before)| {
                    !instance.store.is_degraded() && instance.by_redis() > *before
                })
        })
        .await;
        let (back, mut granted_after) = (Instant::now(), granted());
        until("all sentinels have switched", async || {
            let switches = group.switches.lock().unwrap();
            (0..3).all(|sentinel| switches.iter().any(|(_, of)| *of == sentinel))
        })
        .await;
        let (first, last) = {
            let switches = group.switches.lock().unwrap();
            (switches[0].0, switches.last().unwrap().0)
        };
        println!(
            "{} {failover}: +switch-master after {:?} to {:?}; after the first, the former was left in {:?}, all were back in {:?}",
            if kill { "kill -9" } else { "SENTINEL FAILOVER" },
            first - begun,
            last - begun,
            left.saturating_duration_since(first),
            back.saturating_duration_since(first),
        );
        assert!(back.saturating_duration_since(first) < RECOVERY + load.sums.longest_stall());

        let new = group.master().await.expect("another master");
        assert_ne!(new, old);
        // Sentinel would need many seconds to do this.
        if kill {
            group.servers[old].restart();
        }
        let _: String = group.servers[old]
            .command(&format!(
                "REPLICAOF 127.0.0.1 {}",
                group.servers[new].port()
            ))
            .await;
        group.is_well().await;
        if group.switches.lock().unwrap().len() > group.sentinels.len() {
            println!("the machine stalled, and the sentinels failed over again");
            granted_after = granted();
        }
        for (at_risk, (after, before)) in at_risk
            .iter_mut()
            .zip(granted_after.into_iter().zip(granted_before))
        {
            // Includes checks in flight.
            *at_risk += after - before + (load.instances.len() * TASKS) as u64;
        }
    }
    load.stop().await;

    let sums = &load.sums;
    let worst = Duration::from_micros(sums.worst.load(SeqCst));
    println!(
        "{} requests, worst {worst:?}; {} stalls",
        sums.requests.load(SeqCst),
        sums.stalls()
    );
    assert_eq!(sums.errors.load(SeqCst), 0, "requests failed");
    assert!(worst < DEADLINE + SLACK + sums.longest_stall(), "{worst:?}");
    let store = RedisStore::connect(group.url()).await.unwrap();
    for (caller, (name, kind)) in CALLERS.into_iter().enumerate() {
        let (redis, local) = (
            sums.redis[caller].load(SeqCst),
            sums.local[caller].load(SeqCst),
        );
        let granted = redis + local;
        match kind {
            Kind::Spent => assert!(
                granted <= kind.limit() + early,
                "{name}: {redis} granted by Redis and {local} locally, of {}, after {early} failed checks",
                kind.limit()
            ),
            Kind::Ample => {
                let left = store.check(peek(caller)).await.unwrap().remaining();
                let charged = kind.limit() - u64::from(left);
                let lost = granted.saturating_sub(charged);
                println!(
                    "{name}: {granted} granted, {charged} charged, so {lost} lost of {} at risk",
                    at_risk[caller]
                );
                assert!(
                    charged <= granted,
                    "{name}: {granted} granted, {charged} charged"
                );
                assert!(
                    lost <= at_risk[caller],
                    "{name}: more was lost than {}",
                    at_risk[caller]
                );
            }
            Kind::Tight => {}
        }
    }
}
