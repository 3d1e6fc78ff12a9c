//! A cluster of healthy nodes.

use std::env;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::store::{AnyStore, ErrorKind, Store, StoreConfig};
use tower_redis_ratelimit::{Key, RedisStore, redis};

use crate::nodes::{Cluster, MASTERS, slot_of};
use crate::support::{RedisServer, STRATEGIES, assert_helpful, check, policy, unused_port};

const PROCESSES: usize = 4;
const TASKS: usize = 64;
/// Callers per strategy.
const CALLERS: usize = 4;
const LIMIT: usize = 512;
/// The environment variable with the cluster's URL, for the processes of a test.
const WORKER: &str = "CLUSTER_WORKER_URL";
const PATIENT: Duration = Duration::from_secs(20);

/// With every strategy, the tasks of several processes are granted exactly the limit. The callers
/// are spread over the cluster. The test starts itself as the processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_the_limit_is_granted() {
    if let Ok(url) = env::var(WORKER) {
        return work(&url).await;
    }
    let cluster = Cluster::start(false).await;
    let start = || {
        let mut worker = Command::new(env::current_exe().unwrap());
        worker
            .args([
                "--exact",
                "topology::cluster::healthy::exactly_the_limit_is_granted",
                "--nocapture",
            ])
            .env(WORKER, cluster.url());
        worker
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let workers: Vec<_> = (0..PROCESSES).map(|_| start()).collect();
    let mut granted = vec![0; STRATEGIES.len() * CALLERS];
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let counts = text
            .lines()
            .find_map(|line| line.strip_prefix("granted "))
            .unwrap();
        for (place, count) in counts.split(' ').enumerate() {
            granted[place] += count.parse::<usize>().unwrap();
        }
    }
    assert_eq!(
        granted,
        vec![LIMIT; STRATEGIES.len() * CALLERS],
        "{STRATEGIES:?}"
    );
    for node in &cluster.nodes {
        assert!(
            node.server.calls("evalsha").await > 100,
            "each master decides"
        );
    }
}

/// Sends checks for twice the process's share of each caller's limit, with every strategy.
async fn work(url: &str) {
    let store = RedisStore::builder(url)
        .timeout(PATIENT)
        .connect()
        .await
        .unwrap();
    let mut granted = vec![];
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let policies = policy(strategy, &format!("{LIMIT}/100d"));
        let tasks = (0..TASKS).map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            tokio::spawn(async move {
                let mut granted = [0; CALLERS];
                for turn in 0..CALLERS * (2 * LIMIT / TASKS / PROCESSES + 1) {
                    // Includes the strategy's index, since both alignments of a fixed window have
                    // similar keys.
                    let key = Key::new(format!("caller-{i}-{}", turn % CALLERS));
                    let decision = store.check(Check::take(key, &policies, 1)).await.unwrap();
                    granted[turn % CALLERS] += usize::from(decision.is_allowed());
                }
                granted
            })
        });
        let all: Vec<[usize; CALLERS]> = join_all(tasks)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        granted.extend(
            (0..CALLERS).map(|caller| all.iter().map(|granted| granted[caller]).sum::<usize>()),
        );
    }
    let granted: Vec<String> = granted.iter().map(usize::to_string).collect();
    // Start a new line: the test runner prints too.
    println!("\ngranted {}", granted.join(" "));
}

/// All counts of a caller are in one slot.
#[tokio::test]
async fn several_policies_and_ids_decide_atomically() {
    use tower_redis_ratelimit::{Policies, Policy, Quota, Strategy};

    let cluster = Cluster::start(false).await;
    let store = RedisStore::connect(cluster.url()).await.unwrap();
    let policies = Policies::new([
        Policy::new("few", Strategy::Gcra, Quota::per_hour(5)).unwrap(),
        Policy::new("many", Strategy::SlidingLog, Quota::per_day(100)).unwrap(),
    ])
    .unwrap();
    for caller in 0..20 {
        let key = Key::new(format!("caller-{caller}"));
        let checks = (0..8).map(|_| store.check(Check::take(key, &policies, 1)));
        let decisions: Vec<_> = join_all(checks)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert_eq!(
            decisions
                .iter()
                .filter(|decision| decision.is_allowed())
                .count(),
            5
        );
        let left = store.check(Check::peek(key, &policies, 1)).await.unwrap();
        assert!(
            left.each().map(|each| each.remaining()).eq([0, 95]),
            "{left:?}"
        );
        let once =
            || store.check(Check::take(key, &policy(Strategy::Gcra, "5/d"), 1).with_id("id"));
        assert_eq!(
            (
                once().await.unwrap().remaining(),
                once().await.unwrap().remaining()
            ),
            (4, 4)
        );
    }
}

/// Concurrent checks share script calls, even if they are for different callers.
#[tokio::test]
async fn checks_of_a_partition_share_a_call() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let before = cluster.calls("evalsha").await;
    for _ in 0..10 {
        let checks = (0..256).map(|i| store.check(check(&format!("caller-{i}"), "1000/h")));
        for decision in join_all(checks).await {
            assert!(decision.unwrap().is_allowed());
        }
    }
    let calls = cluster.calls("evalsha").await - before;
    println!("2560 checks took {calls} script calls");
    assert!(calls <= 2_560 / 8, "2560 checks took {calls} script calls");
}

/// Each node loads the script separately.
#[tokio::test]
async fn no_request_notices_a_script_flush() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    for round in 0..10 {
        for node in &cluster.nodes {
            let _: String = node.server.command("SCRIPT FLUSH").await;
        }
        let checks = (0..100).map(|i| store.check(check(&format!("caller-{i}"), "1000/100d")));
        for decision in join_all(checks).await {
            assert_eq!(decision.unwrap().remaining(), 999 - round);
        }
    }
    assert!(cluster.calls("eval").await >= 30);
}

/// A cluster URL works wherever a URL is accepted, and the instances find each other.
#[tokio::test]
async fn a_cluster_is_a_url() {
    let cluster = Cluster::start(false).await;
    let mut config = StoreConfig::default();
    config.url = Some(cluster.url());
    (config.deadline, config.timeout) = (Some(PATIENT), PATIENT);
    let any = AnyStore::from_config(&config).unwrap();
    let lazy = RedisStore::connect_lazy(cluster.url().as_str()).unwrap();
    // One node names the others.
    let one = RedisStore::cluster([format!(
        "redis://127.0.0.1:{}/",
        cluster.nodes[1].server.port()
    )])
    .unwrap();
    for i in 0..30 {
        let check = || check(&format!("caller-{i}"), "1000/100d");
        assert_eq!(lazy.check(check()).await.unwrap().remaining(), 999);
        assert_eq!(one.check(check()).await.unwrap().remaining(), 998);
        let decision = any.check(check()).await.unwrap();
        assert_eq!(
            (decision.remaining(), decision.source()),
            (997, Source::Redis)
        );
    }
    let stores = [(); 3].map(|()| RedisStore::connect_lazy(cluster.url().as_str()).unwrap());
    let instances: Vec<_> = stores
        .iter()
        .map(|store| store.announce().unwrap())
        .collect();
    crate::support::until("the instances see each other", async || {
        instances
            .iter()
            .all(|instances| instances.alive().get() == 3)
    })
    .await;
}

#[tokio::test]
async fn another_number_of_partitions_is_refused() {
    let cluster = Cluster::start(false).await;
    let number = |number| NonZeroUsize::new(number).unwrap();
    let first = cluster
        .builder()
        .partitions(number(32))
        .connect()
        .await
        .unwrap();
    assert!(
        first
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let error = cluster.builder().connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert!(
        error
            .to_string()
            .contains("12 partitions, and others have 32"),
        "{error}"
    );
    let lazy = cluster.builder().connect_lazy().unwrap();
    for _ in 0..2 {
        let error = lazy.check(check("ann", "10/s")).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Configuration && error.is_not_sent(),
            "{error:?}"
        );
    }
    cluster
        .builder()
        .partitions(number(32))
        .connect()
        .await
        .unwrap();
    cluster.builder().prefix("other").connect().await.unwrap();
    let many = cluster.builder().partitions(number(1_025)).connect_lazy();
    assert!(
        many.unwrap_err()
            .to_string()
            .starts_with("1025 partitions: ")
    );
    // Every key has an expiry.
    for node in &cluster.nodes {
        let keys: Vec<String> = node.server.command("KEYS *").await;
        for key in keys {
            // -2 is allowed: the key may have expired since.
            assert_ne!(
                node.server.command::<i64>(&format!("PTTL {key}")).await,
                -1,
                "{key}"
            );
        }
    }
}

/// Includes the right to query the importing node of a slot migration.
#[tokio::test]
async fn the_documented_permissions_are_enough() {
    let cluster = Cluster::start(false).await;
    let needed = "+evalsha +eval +time +mget +set +setrange +del +asking +cluster|slots";
    for node in &cluster.nodes {
        let _: String = node
            .server
            .command(&format!("ACL SETUSER app on >hunter2 ~rl:* {needed}"))
            .await;
    }
    let url = cluster.url().replace("://", "://app:hunter2@");
    let store = RedisStore::connect(url.as_str()).await.unwrap();
    for decision in
        join_all((0..60).map(|i| store.check(check(&format!("caller-{i}"), "10/h")))).await
    {
        assert!(decision.unwrap().is_allowed());
    }
    let (mut key, mut home) = (String::new(), 0);
    for (i, node) in cluster.nodes.iter().enumerate() {
        if let [found] = node
            .server
            .command::<Vec<String>>("KEYS *{caller-7}*")
            .await
            .as_slice()
        {
            (key, home) = (found.clone(), i);
        }
    }
    let slot = slot_of(&cluster, &key).await;
    let _: i64 = cluster.nodes[home]
        .server
        .command(&format!("DEL {key}"))
        .await;
    cluster.begin_move(slot, home, (home + 1) % MASTERS).await;
    assert_eq!(
        store
            .check(check("caller-7", "10/h"))
            .await
            .unwrap()
            .remaining(),
        9
    );

    for node in &cluster.nodes {
        let _: String = node.server.command("ACL SETUSER app -cluster").await;
    }
    let error = RedisStore::connect(url).await.unwrap_err();
    assert!(
        error.kind() == ErrorKind::Permission && error.to_string().contains("+cluster|slots"),
        "{error:?}"
    );
}

/// Nodes may announce host names, or no endpoint, which means the address that the client has used.
#[tokio::test]
async fn nodes_have_names_or_none() {
    let cluster = Cluster::start(false).await;
    for (i, endpoint) in ["hostname", "unknown-endpoint"].into_iter().enumerate() {
        for node in &cluster.nodes {
            let _: String = node
                .server
                .command("CONFIG SET cluster-announce-hostname localhost")
                .await;
            let _: String = node
                .server
                .command(&format!(
                    "CONFIG SET cluster-preferred-endpoint-type {endpoint}"
                ))
                .await;
        }
        crate::support::until("all nodes announce the endpoint", async || {
            let node = cluster.nodes[0]
                .server
                .command::<redis::Value>("CLUSTER SLOTS")
                .await;
            let text = format!("{node:?}");
            if i == 0 {
                text.matches("bulk-string('\"localhost\"')").count() == MASTERS
            } else {
                text.contains("nil")
            }
        })
        .await;
        let store = cluster.builder().prefix(endpoint).connect().await.unwrap();
        for decision in
            join_all((0..60).map(|i| store.check(check(&format!("caller-{i}"), "10/h")))).await
        {
            assert!(decision.unwrap().is_allowed());
        }
    }
}

/// Every check fails, since the nodes prefer a host name and have none.
#[tokio::test]
async fn a_node_without_an_address_is_reported() {
    let server = RedisServer::start_with(&[
        "--cluster-enabled",
        "yes",
        "--cluster-preferred-endpoint-type",
        "hostname",
    ]);
    let _: String = server.command("CLUSTER ADDSLOTSRANGE 0 16383").await;
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let error = RedisStore::connect(url.as_str()).await.unwrap_err();
    let fix = "reports a node of the cluster without its address (`?`): set `cluster-announce-hostname` on that node, or \
               `cluster-preferred-endpoint-type ip`";
    assert_helpful(&error, ErrorKind::NotReady, fix);
}

/// Reports a server without cluster mode, and a cluster that is unreachable.
#[tokio::test]
async fn a_non_cluster_is_reported() {
    let server = RedisServer::start();
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let error = RedisStore::connect(url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error:?}");
    let address = format!("127.0.0.1:{}", server.port());
    assert!(
        error.to_string().contains(&format!(
            "the server {address} is not a node of a Redis Cluster"
        )),
        "{error}"
    );
    assert!(error.to_string().contains(&format!(
        "write `redis://{address}`, and connect with `RedisStore::connect`"
    )));
    let unreachable =
        RedisStore::connect_lazy(format!("redis+cluster://127.0.0.1:{}", unused_port())).unwrap();
    for _ in 0..2 {
        let error = unreachable.check(check("ann", "10/s")).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Unreachable && error.is_not_sent(),
            "{error:?}"
        );
        assert!(
            error.to_string().starts_with("the server 127.0.0.1:"),
            "{error}"
        );
    }
    // A node without slots.
    let empty = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let error = RedisStore::connect(format!("redis+cluster://127.0.0.1:{}", empty.port()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error:?}");
}
