//! Faults of one master under load, behind a fallback: the guarantees for its callers and for all
//! others.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::Store;

use crate::fault::{Admin, Fault};
use crate::load::{CALLERS, DEADLINE, Kind, Load, Sums, TASKS, peek};
use crate::nodes::{Cluster, MASTERS};
use crate::proxy::{Mode, Proxy};
use crate::support::until;
use crate::table::{Outcome, SLACK};

/// An ample caller. The fault affects its master, the victim.
const VICTIMS: usize = 2;
/// Maximum recovery time on a busy machine. The promised time is two seconds after the cluster's
/// own recovery.
const RECOVERY: Duration = Duration::from_secs(10);

/// Passes all rows to another macro, which generates tests or a table.
macro_rules! rows {
    ($to:ident) => {
        $to! {
            a_killed_master_degrades_its_callers_only: "`kill -9`, its replica takes over" => Fault::Killed;
            a_frozen_master_degrades_its_callers_only: "SIGSTOP, its replica takes over" => Fault::Frozen;
            cut_connections_are_reestablished: "`CLIENT KILL TYPE normal`, every 50 ms" => Fault::Cut;
            a_slightly_late_master_decides: "50 ms slower" => Fault::Path(Mode::Delay(Duration::from_millis(50)));
            a_master_late_by_about_the_deadline: "60 to 130 ms slower, bursts while degraded" => Fault::Path(Mode::Waver(Duration::from_millis(60), Duration::from_millis(130)));
            a_slow_master_degrades_its_callers_only: "500 ms slower" => Fault::Path(Mode::Delay(Duration::from_millis(500)));
            a_connection_cut_mid_reply_charges_once: "cut in the middle of a reply" => Fault::Path(Mode::Half);
            a_black_hole_degrades_its_callers_only: "black hole" => Fault::Path(Mode::BlackHole);
            a_silent_master_degrades_its_callers_only: "accepts and never answers" => Fault::Path(Mode::Silent);
            lost_replies_are_not_charged_again: "charges, and the replies are lost" => Fault::Path(Mode::Swallow);
            a_refusing_master_degrades_its_callers_only: "refuses connections" => Fault::Path(Mode::Refuse);
            unexpected_replies_degrade_their_callers_only: "a reply of another shape" => Fault::Path(Mode::Answer(b"*1\r\n:1\r\n"));
            a_loading_master_degrades_its_callers_only: "loading its data" => Fault::Path(Mode::Answer(b"-LOADING Redis is loading the dataset in memory\r\n"));
            a_clusterdown_error_degrades_its_callers_only: "`CLUSTERDOWN`" => Fault::Path(Mode::Answer(b"-CLUSTERDOWN Hash slot not served\r\n"));
            a_full_master_degrades_its_callers_only: "`maxclients` reached" => Fault::Full;
            masters_without_memory_degrade_their_callers_only: "`maxmemory` reached, `noeviction`" => Fault::OutOfMemory;
            masters_without_replicas_degrade_their_callers_only: "`min-replicas-to-write` not met" => Fault::NoReplicas;
            a_flushed_script_is_not_noticed: "`SCRIPT FLUSH`, every 50 ms" => Fault::ScriptFlush;
            a_flushed_master_goes_on: "`FLUSHALL`" => Fault::FlushAll;
            a_changed_password_degrades_its_callers_only: "password changed" => Fault::Password;
            a_forbidden_script_degrades_its_callers_only: "ACL without EVALSHA" => Fault::Forbidden;
        }
    };
}

rows!(table);

/// Returns `true` if a replica takes over.
fn has_successor(fault: Fault) -> bool {
    matches!(fault, Fault::Killed | Fault::Frozen)
}

/// Returns the master of each caller.
async fn masters(cluster: &Cluster) -> Vec<usize> {
    let mut masters = vec![];
    for (name, _) in CALLERS {
        for (i, node) in cluster.nodes.iter().enumerate().take(MASTERS) {
            if !node
                .server
                .command::<Vec<String>>(&format!("KEYS *{{{name}}}*"))
                .await
                .is_empty()
            {
                masters.push(i);
            }
        }
    }
    assert_eq!(masters.len(), CALLERS.len());
    masters
}

fn sum(counts: &[AtomicU64; CALLERS.len()], of: impl Fn(usize) -> bool) -> u64 {
    counts
        .iter()
        .enumerate()
        .filter(|(caller, _)| of(*caller))
        .map(|(_, count)| count.load(SeqCst))
        .sum()
}

/// A cluster under load, in which the spent callers have used up their limits.
struct Scene {
    cluster: Cluster,
    /// One proxy per master, if the fault is one of the path.
    proxies: Vec<Proxy>,
    load: Load,
    /// The master of each caller.
    masters: Vec<usize>,
    /// The master that the fault affects.
    victim: usize,
    /// The connection to the victim.
    admin: Admin,
}

impl Scene {
    async fn start(fault: Fault) -> Self {
        let (cluster, proxies) = match fault {
            Fault::Path(_) => behind_proxies().await,
            _ => (Cluster::start(has_successor(fault)).await, vec![]),
        };
        let mut load = Load::new(&cluster.url(), fault.setup());
        load.introduce().await;
        let masters = masters(&cluster).await;
        let victim = masters[VICTIMS];
        let admin = Admin::of(&cluster.nodes[victim].server).await;
        load.start();
        until("the spent callers are spent", async || {
            load.instances
                .iter()
                .all(|instance| instance.has_denied(Kind::Spent, Source::Redis))
        })
        .await;
        Self {
            cluster,
            proxies,
            load,
            masters,
            victim,
            admin,
        }
    }

    fn others(&self) -> (u64, u64) {
        let sums = &self.load.sums;
        let of = |counts| sum(counts, |caller| self.masters[caller] != self.victim);
        (of(&sums.redis), of(&sums.local))
    }

    /// Returns a sum over the victim's callers.
    fn hit(&self, counts: impl Fn(&Sums) -> &[AtomicU64; CALLERS.len()]) -> u64 {
        sum(counts(&self.load.sums), |caller| {
            self.masters[caller] == self.victim
        })
    }

    /// The victim's callers whose limits are used up during the fault.
    fn tight(&self) -> impl Iterator<Item = usize> {
        (0..CALLERS.len()).filter(|caller| {
            CALLERS[*caller].1 == Kind::Tight && self.masters[*caller] == self.victim
        })
    }

    async fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::Killed => self.cluster.nodes[self.victim].server.kill(),
            Fault::Frozen => self.cluster.nodes[self.victim].server.freeze(),
            Fault::Path(mode) => self.proxies[self.victim].set(mode),
            _ => self.admin.inject(fault).await,
        }
    }

    /// Ends the fault, or waits until a replica has taken over.
    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::Killed | Fault::Frozen => {
                let successor = &self.cluster.nodes[self.victim + MASTERS];
                until("its replica takes over", async || {
                    successor.is_master().await && successor.sees("cluster_state:ok").await
                })
                .await;
            }
            Fault::Path(_) => self.proxies[self.victim].set(Mode::Pass),
            _ => self.admin.heal(fault).await,
        }
    }

    /// Waits until all instances decide locally about the victim's callers, and still in Redis
    /// about the others.
    async fn wait_for_outage(&self) {
        let instances = &self.load.instances;
        until("the instances notice", async || {
            instances
                .iter()
                .all(|instance| instance.store.is_degraded())
        })
        .await;
        let local = self.hit(|sums| &sums.local);
        until("the victim's callers are decided locally", async || {
            self.hit(|sums| &sums.local) > local + 100
        })
        .await;
        let redis = self.others().0;
        until("the other callers are still decided in Redis", async || {
            self.others().0 > redis + 200
        })
        .await;
        until("every share is used up", async || {
            instances.iter().all(|instance| {
                self.tight()
                    .all(|caller| instance.denies(caller, Source::Local))
            })
        })
        .await;
    }

    /// Waits until the cluster decides about all callers again. Returns how long that took.
    async fn wait_for_recovery(&self) -> Duration {
        let since = Instant::now();
        let instances = &self.load.instances;
        until("all are back", async || {
            instances
                .iter()
                .all(|instance| !instance.store.is_degraded())
        })
        .await;
        let recovery = since.elapsed();
        let redis = self.hit(|sums| &sums.redis);
        until("Redis decides about the victim's callers", async || {
            self.hit(|sums| &sums.redis) > redis + 100
        })
        .await;
        until("the tight limits are used up in Redis", async || {
            instances
                .iter()
                .all(|instance| instance.has_denied(Kind::Tight, Source::Redis))
        })
        .await;
        recovery
    }

    /// Asserts the guarantees of every fault. `forgotten` contains the grants per caller that the
    /// victim had counted before it lost its data.
    async fn end(
        mut self,
        fault: Fault,
        recovery: Duration,
        before: (u64, u64),
        forgotten: &[u64],
    ) -> Outcome {
        self.load.stop().await;
        let sums = &self.load.sums;
        let worst = Duration::from_micros(sums.worst.load(SeqCst));
        let others = self.others();
        assert_eq!(sums.errors.load(SeqCst), 0);
        assert!(worst < DEADLINE + SLACK + sums.longest_stall(), "{worst:?}");
        assert!(recovery < RECOVERY + sums.longest_stall(), "{recovery:?}");

        // After everything is reconciled, the counts contain the grants, and none twice.
        let store = RedisStore::connect(self.cluster.url()).await.unwrap();
        let unknown =
            self.load.total(|events| &events.failed) + self.load.total(|events| &events.dropped);
        let (mut all_granted, mut allowed, mut tight) = (0, 0, 0);
        for (caller, (name, kind)) in CALLERS.into_iter().enumerate() {
            let granted = sum(&sums.redis, |other| other == caller)
                + sum(&sums.local, |other| other == caller);
            let charged =
                kind.limit() - u64::from(store.check(peek(caller)).await.unwrap().remaining());
            eprintln!("{name}: {granted} granted, {charged} charged, {unknown} unknown");
            let may = kind.limit() + forgotten[caller];
            match kind {
                // On a machine that stalls, some checks failed before the callers were spent.
                Kind::Spent => assert!(granted <= may + unknown, "{name}: {granted} granted"),
                Kind::Ample => {
                    assert!(
                        charged <= granted,
                        "{name}: {granted} granted, {charged} charged"
                    );
                    continue;
                }
                Kind::Tight => tight += kind.limit(),
            }
            all_granted += granted;
            allowed += may;
        }
        // `tests/faults/matrix.rs` explains the bound. It does not hold with a replica, which may
        // miss recent charges.
        let count = self.load.instances.len() as u64;
        let mut bound = unknown + count * TASKS as u64;
        if !fault.is_outage() || sums.stalls() > 0 {
            bound += tight - tight / count;
        }
        if !has_successor(fault) {
            assert!(
                all_granted <= allowed + bound,
                "granted {all_granted} of {allowed}, and at most {bound} more"
            );
        }
        let (healthy_p99, open_p99) = sums.p99();
        Outcome {
            requests: sums.requests.load(SeqCst),
            errors: sums.errors.load(SeqCst),
            worst,
            granted: all_granted,
            allowed,
            bound,
            unanswered: self.load.total(|events| &events.failed),
            reconciled: self.load.total(|events| &events.charged),
            recovery: Some(recovery),
            healthy_p99,
            open_p99,
            others: Some((others.0 - before.0, others.1 - before.1)),
        }
    }
}

/// Starts a cluster whose nodes announce proxies to clients, and reach each other.
pub async fn behind_proxies() -> (Cluster, Vec<Proxy>) {
    let proxies: Mutex<HashMap<u16, Proxy>> = Mutex::default();
    let port_of = |proxy: &Proxy| -> u16 {
        let url = proxy.url();
        url.trim_end_matches('/')
            .rsplit(':')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    let known_as = |port| {
        let proxy = Proxy::start(port, Mode::Pass);
        let known_as = port_of(&proxy);
        proxies.lock().unwrap().insert(port, proxy);
        known_as
    };
    let cluster = Cluster::start_known_as(false, known_as).await;
    let mut proxies = proxies.into_inner().unwrap();
    let proxies: Vec<Proxy> = cluster
        .nodes
        .iter()
        .map(|node| proxies.remove(&node.server.port()).unwrap())
        .collect();
    until("the nodes know each other by the proxies", async || {
        let maps = join_all(
            cluster
                .nodes
                .iter()
                .map(|node| node.server.command::<String>("CLUSTER NODES")),
        )
        .await;
        maps.iter().all(|map| {
            proxies
                .iter()
                .all(|proxy| map.contains(&format!(":{}@", port_of(proxy))))
        })
    })
    .await;
    (cluster, proxies)
}

/// Runs a row, and asserts the guarantees of every fault.
pub async fn run(fault: Fault) -> Outcome {
    let mut scene = Scene::start(fault).await;
    let others = scene.others();
    let since = Instant::now();
    scene.inject(fault).await;
    let mut forgotten = vec![0; CALLERS.len()];
    if fault.forgets() {
        for (caller, forgotten) in forgotten
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| scene.masters[*i] == scene.victim)
        {
            // Includes grants recorded after the flush, which also are no longer counted.
            *forgotten = scene.load.sums.redis[caller].load(SeqCst);
        }
    }
    scene.load.tighten();
    if matches!(fault, Fault::Path(Mode::Waver(..))) {
        scene.load.burst();
    }
    if fault.is_outage() {
        scene.wait_for_outage().await;
    }
    if !has_successor(fault) {
        while since.elapsed() < fault.lasts() {
            // The fault lasts for a fixed time.
            tokio::time::sleep(Duration::from_millis(50)).await;
            if fault.is_repeated() {
                scene.inject(fault).await;
            }
        }
    }
    scene.heal(fault).await;
    let recovery = scene.wait_for_recovery().await;
    if fault == Fault::Frozen {
        tokio::time::sleep(fault.lasts().saturating_sub(since.elapsed())).await;
        let former = &scene.cluster.nodes[scene.victim].server;
        former.thaw();
        until("it follows its successor", async || {
            former
                .command::<String>("INFO replication")
                .await
                .contains("master_link_status:up")
        })
        .await;
    }
    scene.end(fault, recovery, others, &forgotten).await
}
