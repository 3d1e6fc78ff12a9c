//! Slot migrations while checks of the slot's callers are sent.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinSet;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{ErrorKind, Instances, Store};
use tower_redis_ratelimit::{
    Fallback, Key, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

use crate::nodes::{Cluster, slot_of};
use crate::support::{policy, until};

const PATIENT: Duration = Duration::from_secs(20);
const LIMIT: u32 = 10_000_000;
const TASKS: usize = 32;

/// Returns callers whose keys are in the same slot, and that slot.
pub async fn neighbors(
    cluster: &Cluster,
    store: &RedisStore,
    policies: &Policies,
) -> (u16, Vec<Key>) {
    let mut slots: HashMap<u16, Vec<Key>> = HashMap::new();
    for i in 0..200 {
        let name = format!("caller-{i}");
        let _ = store
            .check(Check::take(Key::new(&name), policies, 0))
            .await
            .unwrap();
        let _ = store
            .check(Check::take(Key::new(&name), policies, 1))
            .await
            .unwrap();
        let mut found = vec![];
        for node in &cluster.nodes {
            found.extend(
                node.server
                    .command::<Vec<String>>(&format!("KEYS *{{{name}}}*"))
                    .await,
            );
        }
        slots
            .entry(slot_of(cluster, &found[0]).await)
            .or_default()
            .push(Key::new(&name));
        let _ = store
            .check(Check::reset(Key::new(&name), policies))
            .await
            .unwrap();
    }
    slots
        .into_iter()
        .max_by_key(|(_, callers)| callers.len())
        .unwrap()
}

/// Tasks that send checks for the callers in turn until they are stopped, and the grants per
/// caller.
struct Load {
    tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
    granted: Arc<Vec<AtomicU64>>,
    /// Maximum duration of a check, in microseconds.
    worst: Arc<AtomicU64>,
}

impl Load {
    fn granted(&self) -> u64 {
        self.granted
            .iter()
            .map(|granted| granted.load(SeqCst))
            .sum()
    }

    /// Waits until more than `checks` further units are granted.
    async fn wait_for(&self, what: &str, checks: u64) {
        let before = self.granted();
        until(what, async || self.granted() > before + checks).await;
    }

    fn start(store: &impl Store, callers: &[Key], policies: &Policies) -> Self {
        let mut load = Self {
            tasks: JoinSet::new(),
            stop: Arc::default(),
            granted: Arc::new(callers.iter().map(|_| AtomicU64::new(0)).collect()),
            worst: Arc::default(),
        };
        for task in 0..TASKS {
            let (store, callers, policies) = (store.clone(), callers.to_vec(), policies.clone());
            let (stop, granted, worst) = (
                Arc::clone(&load.stop),
                Arc::clone(&load.granted),
                Arc::clone(&load.worst),
            );
            load.tasks.spawn(async move {
                for turn in task.. {
                    if stop.load(SeqCst) {
                        break;
                    }
                    let (caller, since) = (turn % callers.len(), Instant::now());
                    let decision = store
                        .check(Check::take(callers[caller], &policies, 1))
                        .await
                        .expect("a decision");
                    worst.fetch_max(since.elapsed().as_micros() as u64, SeqCst);
                    granted[caller].fetch_add(u64::from(decision.granted()), SeqCst);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
        }
        load
    }

    async fn stop(&mut self) -> Vec<u64> {
        self.stop.store(true, SeqCst);
        while let Some(task) = self.tasks.join_next().await {
            task.expect("a task of the load");
        }
        self.granted
            .iter()
            .map(|granted| granted.load(SeqCst))
            .collect()
    }
}

/// Counts continue under another quota in each partition, also of a slot whose keys are on two nodes, and a scan reads
/// the quota that has counted last from their values.
#[tokio::test]
async fn a_changed_quota_keeps_counts_of_a_moving_slot() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let [old, raised, lowered] =
        ["100/100d", "200/100d burst 150", "120/100d"].map(|quota| policy(Strategy::Gcra, quota));
    let (slot, moving) = neighbors(&cluster, &store, &old).await;
    let others = (0..30).map(|number| Key::new(format!("other-{number}")));
    let callers: Vec<Key> = moving.into_iter().chain(others).collect();
    let up_to = async |policies: &Policies| -> Vec<u32> {
        let checks = callers
            .iter()
            .map(|caller| store.check(Check::up_to(*caller, policies, 1_000)));
        let decisions = join_all(checks).await;
        decisions
            .into_iter()
            .map(|decision| decision.unwrap().granted())
            .collect()
    };
    assert_eq!(up_to(&old).await, vec![100; callers.len()]);
    let from = cluster.owner(slot).await;
    let to = (from + 1) % cluster.nodes.len();
    cluster.begin_move(slot, from, to).await;
    cluster.move_keys(slot, from, to, 2).await;
    assert_eq!(up_to(&raised).await, vec![50; callers.len()]);
    cluster.move_keys(slot, from, to, 1_000).await;
    cluster.end_move(slot, from, to).await;
    assert_eq!(up_to(&lowered).await, vec![0; callers.len()]);

    let mut found = 0;
    let mut scan = store.scan();
    while let Some(counts) = scan.next().await.unwrap() {
        for count in counts {
            // 200 in 100 days, with a burst of 150.
            assert_eq!(count.bucket().unwrap().quota().to_string(), "150/75d");
            found += 1;
        }
    }
    assert_eq!(found, callers.len());
}

async fn charged(store: &RedisStore, callers: &[Key], policies: &Policies) -> Vec<u64> {
    let mut charged = vec![];
    for caller in callers {
        let left = store
            .check(Check::peek(*caller, policies, 1))
            .await
            .unwrap();
        charged.push(u64::from(
            LIMIT - left.each().map(|each| each.remaining()).min().unwrap(),
        ));
    }
    charged
}

/// No check fails, and each is charged once: while a slot migrates, on a new node, and after that
/// node has left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moving_slots_charge_every_check_once() {
    let mut cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let policies = policy(
        Strategy::FixedWindow(Default::default()),
        &format!("{LIMIT}/366d"),
    );
    let (slot, callers) = neighbors(&cluster, &store, &policies).await;
    assert!(callers.len() >= 5);
    let mut load = Load::start(&store, &callers, &policies);
    let home = cluster.owner(slot).await;
    let away = (home + 1) % 3;
    for _ in 0..3 {
        for (from, to) in [(home, away), (away, home)] {
            cluster.begin_move(slot, from, to).await;
            // For a while, the keys are on two nodes.
            while cluster.move_keys(slot, from, to, 1).await > 0 {
                load.wait_for("checks continue", 100).await;
            }
            cluster.end_move(slot, from, to).await;
        }
    }
    let new = cluster.add().await;
    cluster.move_slot(slot, home, new).await;
    let before = cluster.nodes[new].server.calls("evalsha").await;
    until("the new node decides", async || {
        cluster.nodes[new].server.calls("evalsha").await > before + 20
    })
    .await;
    cluster.move_slot(slot, new, home).await;
    let gone = cluster.nodes.pop().unwrap();
    for node in &cluster.nodes {
        let _: String = node
            .server
            .command(&format!("CLUSTER FORGET {}", gone.id))
            .await;
    }
    drop(gone);
    load.wait_for("checks continue without the node", 1_000)
        .await;
    let granted = load.stop().await;
    let mut moved = 0;
    for node in &cluster.nodes {
        let stats: String = node.server.command("INFO errorstats").await;
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix("errorstat_MOVED:count="));
        moved += line.map_or(0, |count| count.trim().parse::<u64>().unwrap());
    }
    println!(
        "{granted:?}, at worst {} us, {moved} redirected",
        load.worst.load(SeqCst)
    );
    // Each of the 8 migrations redirects at most the checks in flight.
    assert!(
        moved <= 8 * 2 * TASKS as u64,
        "{moved} calls were redirected"
    );
    assert_eq!(charged(&store, &callers, &policies).await, granted);
}

/// No node decides about a caller whose two keys are on two nodes: the fallback decides, and
/// reconciles its grants.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_split_across_nodes_are_decided() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let one = |name| {
        Policy::new(
            name,
            Strategy::FixedWindow(Default::default()),
            Quota::per_day(LIMIT),
        )
        .unwrap()
    };
    let policies = Policies::new([one("one"), one("two")]).unwrap();
    let (slot, callers) = neighbors(&cluster, &store, &policies).await;
    let fallback = Fallback::builder(
        cluster.builder().connect().await.unwrap(),
        LocalStore::default(),
    )
    .deadline(Duration::from_secs(2))
    .unwrap()
    .build();
    let mut load = Load::start(&fallback, &callers, &policies);
    let home = cluster.owner(slot).await;
    let away = (home + 1) % 3;
    for (from, to) in [(home, away), (away, home)] {
        cluster.begin_move(slot, from, to).await;
        while cluster.move_keys(slot, from, to, 1).await > 0 {
            load.wait_for("checks continue", 100).await;
        }
        cluster.end_move(slot, from, to).await;
    }
    let granted = load.stop().await;
    let worst = Duration::from_micros(load.worst.load(SeqCst));
    println!("{granted:?}, at worst {worst:?}");
    assert!(
        !fallback.is_degraded() && worst < Duration::from_secs(2),
        "{worst:?}"
    );
    until("all is settled", async || {
        charged(&store, &callers, &policies).await == granted
    })
    .await;
}

/// Starts the migration of a slot, and returns a caller of it whose keys have not moved yet.
async fn begin(
    cluster: &Cluster,
    store: &RedisStore,
    policies: &[Policies],
) -> (Key, (u16, usize, usize)) {
    let takes = |caller| {
        policies
            .iter()
            .map(|policies| Check::take(caller, policies, 1))
            .collect()
    };
    begin_with(cluster, store, &policies[0], takes).await
}

async fn begin_with(
    cluster: &Cluster,
    store: &RedisStore,
    first: &Policies,
    takes: impl FnOnce(Key) -> Vec<Check>,
) -> (Key, (u16, usize, usize)) {
    let (slot, callers) = neighbors(cluster, store, first).await;
    for take in takes(callers[0]) {
        assert!(store.check(take).await.unwrap().is_allowed());
    }
    let home = cluster.owner(slot).await;
    cluster.begin_move(slot, home, (home + 1) % 3).await;
    (callers[0], (slot, home, (home + 1) % 3))
}

/// A node creates no key in a slot that it is exporting, and a growing log becomes a list, which is
/// a new key.
#[tokio::test]
async fn a_log_grows_while_its_slot_moves() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let policies = policy(Strategy::SlidingLog, "100/h");
    let (caller, (slot, from, to)) = begin(&cluster, &store, std::slice::from_ref(&policies)).await;
    let take = async || {
        store
            .check(Check::take(caller, &policies, 1))
            .await
            .unwrap()
            .remaining()
    };
    for left in (30..99).rev() {
        assert_eq!(take().await, left);
    }
    while cluster.move_keys(slot, from, to, 1).await > 0 {}
    cluster.end_move(slot, from, to).await;
    for left in (0..30).rev() {
        assert_eq!(take().await, left);
    }
    assert_eq!(
        store
            .check(Check::take(caller, &policies, 1))
            .await
            .unwrap()
            .granted(),
        0
    );
}

/// A check deletes a key, and the next check in the same call charges it again.
#[tokio::test]
async fn checks_after_a_deletion_are_decided_once() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let cells = policy(Strategy::SlidingWindow { cells: 10 }, "40/h");
    let all = [
        Policy::in_flight("streams", 4).unwrap().into(),
        cells,
        policy(Strategy::Gcra, "40/h"),
    ];
    let mut stream = None;
    let takes = |caller| {
        let takes: Vec<_> = all
            .iter()
            .map(|policies| Check::take(caller, policies, 1))
            .collect();
        stream = takes[0].slot();
        takes
    };
    let (caller, _) = begin_with(&cluster, &store, &all[0], takes).await;
    for (policies, left) in all.iter().zip([3, 39, 39]) {
        let release = stream
            .take()
            .map(|stream| Check::release(caller, policies, stream));
        let first = release.unwrap_or_else(|| Check::reset(caller, policies));
        let checks = [
            first,
            Check::take(caller, policies, 1),
            Check::peek(caller, policies, 1),
        ];
        let answers = join_all(checks.map(|check| store.check(check))).await;
        let answers: Vec<_> = answers
            .into_iter()
            .map(|answer| answer.unwrap().remaining())
            .collect();
        assert_eq!(answers, [left + 1, left, left], "{policies:?}");
    }
}

/// While a slot migrates, a node rejects a check that needs a missing key, and the key of a new id
/// is always missing.
#[tokio::test]
async fn new_ids_wait_for_a_moving_slot() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let policies = policy(Strategy::Gcra, "40/h");
    let (caller, (slot, from, to)) = begin(&cluster, &store, std::slice::from_ref(&policies)).await;
    let take = async |id| {
        store
            .check(Check::take(caller, &policies, 1).with_id(id))
            .await
    };
    for id in ["here", "there"] {
        let error = take(id).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::NotReady && error.is_not_sent() && error.is_check_only(),
            "{error:?}"
        );
        while cluster.move_keys(slot, from, to, 1).await > 0 {}
    }
    cluster.end_move(slot, from, to).await;
    assert_eq!(take("there").await.unwrap().remaining(), 38);
}

/// The instances are counted on the node that serves their key, also after its slot has moved.
#[tokio::test]
async fn instances_find_each_other_after_a_move() {
    let cluster = Cluster::start(false).await;
    let store = || cluster.builder().timeout(PATIENT).connect();
    let all_see = async |instances: &[Instances], count| {
        until("the instances see each other", async || {
            instances.iter().all(|each| each.alive().get() == count)
        })
        .await;
    };
    let mut stores = vec![store().await.unwrap(), store().await.unwrap()];
    let mut instances: Vec<_> = stores
        .iter()
        .map(|store| store.announce().unwrap())
        .collect();
    all_see(&instances, 2).await;

    let slot = slot_of(&cluster, "rl:{rl}:instances").await;
    let from = cluster.owner(slot).await;
    cluster.move_slot(slot, from, (from + 1) % 3).await;
    // This one learns the new node when it connects, and the others when the former node redirects them.
    stores.push(store().await.unwrap());
    instances.push(stores[2].announce().unwrap());
    all_see(&instances, 3).await;
}
