//! Nodes that announce other addresses than those at which this process reaches them.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{
    AnyStore, ErrorKind, RedisStoreBuilder, Store, StoreConfig, StoreKind,
};
use tower_redis_ratelimit::{RedisStore, Strategy};

use super::moves::neighbors;
use crate::nodes::Cluster;
use crate::proxy::{Mode, Proxy};
use crate::support::{assert_helpful, check, policy, until, unused_port};

const PATIENT: Duration = Duration::from_secs(20);

/// Starts a cluster whose nodes announce ports at which nothing listens. Returns it, and the map to the real ports.
async fn behind_a_nat() -> (Cluster, HashMap<u16, u16>) {
    let ports = Mutex::new(HashMap::new());
    let cluster = Cluster::start_known_as(false, |port| {
        let announced = unused_port();
        ports.lock().unwrap().insert(announced, port);
        announced
    })
    .await;
    (cluster, ports.into_inner().unwrap())
}

fn builder(cluster: &Cluster, ports: &HashMap<u16, u16>) -> RedisStoreBuilder {
    let ports = ports.clone();
    let builder = cluster.builder().timeout(PATIENT);
    builder.address_map(move |host, port| Some((host.to_owned(), *ports.get(&port)?)))
}

async fn assert_decides(cluster: &Cluster, store: &impl Store) {
    let before = cluster.calls("evalsha").await;
    let checks = (0..60).map(|i| store.check(check(&format!("caller-{i}"), "10/h")));
    for decision in join_all(checks).await {
        assert!(decision.unwrap().is_allowed());
    }
    assert!(cluster.calls("evalsha").await > before);
}

#[tokio::test]
async fn a_map_reaches_the_nodes() {
    let (cluster, ports) = behind_a_nat().await;
    let error = cluster.builder().connect().await.unwrap_err();
    assert_helpful(&error, ErrorKind::Unreachable, "check the URL");
    assert!(
        ports
            .keys()
            .any(|port| error.to_string().contains(&format!(":{port} "))),
        "{error}"
    );

    let store = builder(&cluster, &ports).connect().await.unwrap();
    assert_decides(&cluster, &store).await;
    let mut config = StoreConfig::default();
    config.kind = StoreKind::Redis;
    config.url = Some(cluster.url());
    config.timeout = PATIENT;
    config.prefix = "settings".to_owned();
    for (announced, port) in &ports {
        let announced = format!("127.0.0.1:{announced}");
        config
            .address_map
            .insert(announced, format!("localhost:{port}"));
    }
    assert_decides(&cluster, &AnyStore::from_config(&config).unwrap()).await;
}

/// While the address in the URL is down, only announced ones lead to the map of slots.
#[tokio::test]
async fn the_slots_are_queried_through_the_map() {
    let (cluster, ports) = behind_a_nat().await;
    let proxy = Proxy::start(cluster.nodes[0].server.port(), Mode::Pass);
    let seed = proxy.url().replace("redis:", "redis+cluster:");
    let store = RedisStore::builder(seed).timeout(PATIENT);
    let store = store.address_map(move |host, port| Some((host.to_owned(), *ports.get(&port)?)));
    let store = store.connect().await.unwrap();
    proxy.set(Mode::Refuse);
    let policies = policy(Strategy::Gcra, "1000/h");
    let (slot, callers) = neighbors(&cluster, &store, &policies).await;
    let take = async || store.check(Check::take(callers[0], &policies, 1)).await;
    assert!(take().await.unwrap().is_allowed());
    move_to_next(&cluster, slot).await;
    // Redis 6.2 counts all subcommands together.
    let queries = async || cluster.calls("cluster|slots").await + cluster.calls("cluster").await;
    let before = queries().await;
    assert!(take().await.unwrap().is_allowed());
    until("a node is queried", async || queries().await > before).await;
}

/// `MOVED` and `ASK` name announced addresses too.
#[tokio::test]
async fn redirects_go_through_the_map() {
    let (cluster, ports) = behind_a_nat().await;
    let store = builder(&cluster, &ports).connect().await.unwrap();
    let policies = policy(Strategy::Gcra, "1000/h");
    let (slot, callers) = neighbors(&cluster, &store, &policies).await;
    let take = async || {
        let decision = store.check(Check::take(callers[0], &policies, 1)).await;
        decision.unwrap().remaining()
    };
    assert_eq!(take().await, 999);
    let mut from = 0;
    while keys(&cluster, from).await == 0 {
        from += 1;
    }
    let to = (from + 1) % 3;
    cluster.begin_move(slot, from, to).await;
    while cluster.move_keys(slot, from, to, 10).await > 0 {}
    assert_eq!(take().await, 998, "asked");
    cluster.end_move(slot, from, to).await;
    assert_eq!(take().await, 997, "moved");
    assert_eq!(
        (keys(&cluster, from).await, keys(&cluster, to).await),
        (0, 1)
    );
}

/// Moves this slot, which has the only count of the cluster, to the next node.
async fn move_to_next(cluster: &Cluster, slot: u16) {
    let mut from = 0;
    while keys(cluster, from).await == 0 {
        from += 1;
    }
    let to = (from + 1) % 3;
    cluster.begin_move(slot, from, to).await;
    while cluster.move_keys(slot, from, to, 10).await > 0 {}
    cluster.end_move(slot, from, to).await;
}

/// Returns the number of counts on a node.
async fn keys(cluster: &Cluster, node: usize) -> usize {
    let keys: Vec<String> = cluster.nodes[node].server.command("KEYS *:test:*").await;
    keys.len()
}

/// Each wrong map is an error that names its addresses.
#[tokio::test]
async fn wrong_maps_are_named() {
    let (cluster, ports) = behind_a_nat().await;
    let first = cluster.nodes[0].server.port();
    let refused = async |builder: RedisStoreBuilder, words: &[&str]| {
        let error = builder.connect().await.unwrap_err();
        assert_helpful(&error, ErrorKind::Configuration, "the address map ");
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{text} lacks {word}");
        }
        assert!(
            ports
                .keys()
                .any(|port| text.contains(&format!("127.0.0.1:{port}"))),
            "{text}"
        );
        text
    };
    let one = builder(&cluster, &ports);
    let one = one.address_map(move |host, _| Some((host.to_owned(), first)));
    let to = format!(" to 127.0.0.1:{first}: map each announced address to a different one");
    let text = refused(one, &[" and ", &to]).await;
    let named = ports
        .keys()
        .filter(|port| text.contains(&format!(":{port} ")));
    assert_eq!(named.count(), 2, "{text}");
    let none = builder(&cluster, &ports).address_map(|_, _| Some((String::new(), 0)));
    refused(none, &["to \":0\", which is no address: map it"]).await;
    let panics = builder(&cluster, &ports).address_map(|_, port| panic!("no port {port}"));
    refused(panics, &["panicked for 127.0.0.1:", ": return `None`"]).await;
}

/// A node without a name or an address is reported as that: also by a redirect to it.
#[tokio::test]
async fn a_redirect_to_no_address_is_reported() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect().await.unwrap();
    let policies = policy(Strategy::Gcra, "1000/h");
    let (slot, callers) = neighbors(&cluster, &store, &policies).await;
    let from = cluster.owner(slot).await;
    cluster.move_slot(slot, from, (from + 1) % 3).await;
    for node in &cluster.nodes {
        let endpoint = "CONFIG SET cluster-preferred-endpoint-type hostname";
        let _: String = node.server.command(endpoint).await;
    }
    let error = store.check(Check::take(callers[0], &policies, 1)).await;
    let error = error.unwrap_err();
    assert_helpful(
        &error,
        ErrorKind::NotReady,
        "without its address (`?`): set `cluster-announce-hostname`",
    );
    assert!(error.is_not_sent(), "{error:?}");
    for node in &cluster.nodes {
        let _: String = node
            .server
            .command("CONFIG SET cluster-preferred-endpoint-type ip")
            .await;
    }
    until("it is decided", async || {
        store
            .check(Check::take(callers[0], &policies, 1))
            .await
            .is_ok()
    })
    .await;
}

#[tokio::test]
async fn addresses_of_a_url_are_not_mapped() {
    let cluster = Cluster::start(false).await;
    let ports: Vec<u16> = cluster
        .nodes
        .iter()
        .map(|node| node.server.port())
        .collect();
    let seed = format!("redis+cluster://localhost:{}", ports[0]);
    let store = RedisStore::builder(seed).timeout(PATIENT);
    let store = store.address_map(|host, port| {
        assert_eq!(host, "127.0.0.1");
        (port == 1).then(|| ("nowhere.invalid".to_owned(), 1))
    });
    assert_decides(&cluster, &store.connect().await.unwrap()).await;
}
