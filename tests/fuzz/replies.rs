//! Damaged replies of a server and of a cluster node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, RedisStore};

use crate::damage::damage;
use crate::each_seed;
use crate::support::{RedisServer, STRATEGIES, check, policy, until};

/// Short, since a reply that was cut is awaited for this time.
const TIMEOUT: Duration = Duration::from_millis(50);

/// A proxy of a server that damages one reply in four while `damages` is set.
struct Proxy {
    port: u16,
    damages: Arc<AtomicBool>,
}

impl Proxy {
    async fn start(redis: impl FnOnce(u16) -> RedisServer) -> (Self, RedisServer) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = redis(port);
        let (damages, server_port) = (Arc::new(AtomicBool::new(false)), server.port());
        let seen = Arc::clone(&damages);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, server_port, Arc::clone(&seen)));
            }
        });
        (Self { port, damages }, server)
    }
}

async fn serve(client: TcpStream, port: u16, damages: Arc<AtomicBool>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
        return;
    };
    let (mut replies, mut requests) = server.into_split();
    let (mut from, mut to) = client.into_split();
    let forward = async { tokio::io::copy(&mut from, &mut requests).await };
    let back = async {
        let mut rng = fastrand::Rng::new();
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = replies.read(&mut buffer).await {
            let reply = match damages.load(SeqCst) && rng.u8(0..4) == 0 {
                true => damage(&mut rng, &buffer[..length]),
                false => buffer[..length].to_vec(),
            };
            if to.write_all(&reply).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = forward => {}
        () = back => {}
    }
}

/// Sends checks while replies are damaged. Afterwards the store must decide again.
async fn send_checks(proxy: &Proxy, store: &RedisStore) {
    each_seed(8, async |mut rng| {
        proxy.damages.store(true, SeqCst);
        for _ in 0..20 {
            let checks = (0..8).map(|i| {
                let strategy = STRATEGIES[rng.usize(..STRATEGIES.len())];
                let (key, policies) = (Key::new(format!("caller-{i}")), policy(strategy, "1000/h"));
                let cost = rng.u32(0..5);
                match rng.u8(0..5) {
                    0 => Check::up_to(key, &policies, cost),
                    1 => Check::charge(key, &policies, cost),
                    2 => Check::refund(key, &policies, cost),
                    3 => Check::take(key, &policies, cost).with_id("id"),
                    _ => Check::take(key, &policies, cost),
                }
            });
            let answers = futures_util::future::join_all(checks.map(|check| store.check(check)));
            let answers = tokio::time::timeout(Duration::from_secs(30), answers)
                .await
                .expect("an answer in bounded time");
            for decision in answers.into_iter().flatten() {
                // No getter may panic, for any numbers.
                let _ = format!(
                    "{decision:?} {:?} {:?}",
                    decision.outcome(),
                    decision.reset_after()
                );
                let _ = decision.refund(Key::new("caller-0"), 1, Duration::MAX);
            }
        }
        proxy.damages.store(false, SeqCst);
        until("Redis decides again", async || {
            store
                .check(check("another", "1000000/s"))
                .await
                .is_ok_and(|decision| decision.source() == Source::Redis)
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_replies_do_no_harm() {
    let (proxy, _server) = Proxy::start(|_| RedisServer::start()).await;
    let url = format!("redis://127.0.0.1:{}/", proxy.port);
    let store = RedisStore::builder(url)
        .timeout(TIMEOUT)
        .connect_lazy()
        .unwrap();
    send_checks(&proxy, &store).await;
}

/// The damage includes the slot map and redirections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_replies_of_a_cluster_do_no_harm() {
    let start = |port: u16| {
        RedisServer::start_with(&[
            "--cluster-enabled",
            "yes",
            "--cluster-announce-ip",
            "127.0.0.1",
            "--cluster-announce-port",
            &port.to_string(),
        ])
    };
    let (proxy, server) = Proxy::start(start).await;
    let _: String = server.command("CLUSTER ADDSLOTSRANGE 0 16383").await;
    until("the cluster is up", async || {
        server
            .command::<String>("CLUSTER INFO")
            .await
            .contains("cluster_state:ok")
    })
    .await;
    let url = format!("redis+cluster://127.0.0.1:{}", proxy.port);
    let store = RedisStore::builder(url)
        .timeout(TIMEOUT)
        .connect_lazy()
        .unwrap();
    send_checks(&proxy, &store).await;
}
