//! A master goes away under load, behind a fallback, and its replica takes over.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tower_redis_ratelimit::{RedisStore, Source, Store};

use crate::load::{CALLERS, DEADLINE, Kind, Load, Setup, peek};
use crate::nodes::{Cluster, MASTERS};
use crate::support::until;

/// What a busy machine may add to a wait, beside a stall.
const SLACK: Duration = Duration::from_millis(900);
/// The promise is two seconds after the cluster's own recovery; this is for a busy machine.
const RECOVERY: Duration = Duration::from_secs(10);

/// For each caller, the master that has its keys.
async fn masters(cluster: &Cluster) -> Vec<usize> {
    let mut masters = vec![];
    for (name, _) in CALLERS {
        for (i, node) in cluster.nodes.iter().enumerate().take(MASTERS) {
            if !node.server.command::<Vec<String>>(&format!("KEYS *{{{name}}}*")).await.is_empty() {
                masters.push(i);
            }
        }
    }
    assert_eq!(masters.len(), CALLERS.len());
    masters
}

fn sum(counts: &[AtomicU64; CALLERS.len()], of: impl Fn(usize) -> bool) -> u64 {
    counts.iter().enumerate().filter(|(caller, _)| of(*caller)).map(|(_, count)| count.load(SeqCst)).sum()
}

enum Fault {
    Killed,
    Frozen,
}

async fn a_master_goes_away(fault: Fault) {
    let mut cluster = Cluster::start(true).await;
    let mut load = Load::new(&cluster.url(), Setup::default());
    load.introduce().await;
    let masters = masters(&cluster).await;
    load.start();
    until("the spent callers are spent", async || {
        load.instances.iter().all(|instance| instance.has_denied(Kind::Spent, Source::Redis))
    })
    .await;

    // The master of an ample caller goes away.
    let victim = masters[2];
    let is_hit = |caller: usize| masters[caller] == victim;
    match fault {
        Fault::Killed => cluster.nodes[victim].server.kill(),
        Fault::Frozen => cluster.nodes[victim].server.freeze(),
    }
    let gone = Instant::now();
    until("the instances notice", async || load.instances.iter().all(|instance| instance.store.is_degraded())).await;
    let local = sum(&load.sums.local, is_hit);
    until("they go on", async || sum(&load.sums.local, is_hit) > local + 100).await;
    let heir = &cluster.nodes[victim + MASTERS];
    until("its replica takes over", async || heir.is_master().await && heir.sees("cluster_state:ok").await).await;
    let (over, taken) = (Instant::now(), gone.elapsed());
    until("all are back", async || load.instances.iter().all(|instance| !instance.store.is_degraded())).await;
    let recovery = over.elapsed();
    if matches!(fault, Fault::Frozen) {
        tokio::time::sleep(Duration::from_secs(5).saturating_sub(gone.elapsed())).await;
        cluster.nodes[victim].server.thaw();
        until("it follows its heir", async || {
            cluster.nodes[victim].server.command::<String>("INFO replication").await.contains("master_link_status:up")
        })
        .await;
    }
    let redis = sum(&load.sums.redis, is_hit);
    until("the heir decides", async || sum(&load.sums.redis, is_hit) > redis + 100).await;
    load.stop().await;

    let sums = &load.sums;
    let worst = Duration::from_micros(sums.worst.load(SeqCst));
    let others = (sum(&sums.redis, |caller| !is_hit(caller)), sum(&sums.local, |caller| !is_hit(caller)));
    println!(
        "taken over after {taken:?}, back after {recovery:?}; {} requests, worst {worst:?}; of other masters {others:?}; {} stalls",
        sums.requests.load(SeqCst),
        sums.stalls(),
    );
    assert_eq!(sums.errors.load(SeqCst), 0);
    assert!(worst < DEADLINE + SLACK + sums.longest_stall(), "{worst:?}");
    assert!(recovery < RECOVERY, "{recovery:?}");
    if sums.stalls() == 0 {
        assert!(others.1 * 100 <= others.0, "the callers of other masters are degraded too: {others:?}");
    }
    // Clients see what they charged, once all of it is settled.
    let store = RedisStore::connect(cluster.url()).await.unwrap();
    for (caller, (name, kind)) in CALLERS.into_iter().enumerate() {
        let granted = sum(&sums.redis, |other| other == caller) + sum(&sums.local, |other| other == caller);
        match kind {
            Kind::Spent => assert!(granted <= kind.limit(), "{name}: {granted} of {}", kind.limit()),
            Kind::Ample => {
                let left = store.check(peek(caller)).await.unwrap().remaining();
                let charged = kind.limit() - u64::from(left);
                println!("{name}: {granted} granted, {charged} charged");
                assert!(charged <= granted, "{name}: {granted} granted, {charged} charged");
            }
            Kind::Tight => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_degrades_its_callers_only() {
    a_master_goes_away(Fault::Killed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_master_degrades_its_callers_only() {
    a_master_goes_away(Fault::Frozen).await;
}
