//! Callers that keep sending checks while Redis is unreachable or refuses them do not connect each
//! time.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{ErrorKind, Store};

use crate::devices::Path;
use crate::support::{RedisServer, check, until};

const PATIENT: Duration = Duration::from_secs(20);

/// Returns the number of connections that failing checks make, and the maximum that they may make.
async fn connections_of(path: &Path, store: &RedisStore, kind: ErrorKind) -> (usize, usize) {
    let (before, since) = (path.connections.load(SeqCst), Instant::now());
    for _ in 0..200 {
        let error = store.check(check("ann", "10/s")).await.unwrap_err();
        assert!(error.kind() == kind && error.is_not_sent(), "{error:?}");
    }
    // The first three failures cause no delay.
    (
        path.connections.load(SeqCst) - before,
        4 + since.elapsed().as_millis() as usize / 50,
    )
}

#[tokio::test]
async fn failing_checks_connect_rarely() {
    let server = RedisServer::start_with(&["--requirepass", "right"]);
    let master = RedisServer::start();
    let replica =
        RedisServer::start_with(&["--replicaof", "127.0.0.1", &master.port().to_string()]);
    until("the replica has synchronized", async || {
        replica
            .command::<String>("INFO replication")
            .await
            .contains("master_link_status:up")
    })
    .await;
    for (server, login, kind) in [
        (&server, ":wrong@", ErrorKind::Authentication),
        (&server, "", ErrorKind::Authentication),
        (&replica, "", ErrorKind::ReadOnly),
    ] {
        let path = Path::to(server).await;
        let url = path.url().replace("://", &format!("://{login}"));
        let store = RedisStore::builder(url)
            .timeout(PATIENT)
            .connect_lazy()
            .unwrap();
        let (made, most) = connections_of(&path, &store, kind).await;
        println!("{kind:?}: {made} connections for 200 checks, {most} may be");
        assert!(
            made <= most,
            "{kind:?}: {made} connections, more than {most}"
        );
        // The store keeps trying.
        if login.is_empty() {
            path.lead_to(&master);
            until("it decides", async || {
                store.check(check("ann", "10000/s")).await.is_ok()
            })
            .await;
        }
    }
}

/// A server may reply to the greeting and then close the connection.
#[tokio::test]
async fn lost_connections_are_replaced_rarely() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, SeqCst);
            let _ = stream.read(&mut [0; 4_096]).await;
            let _ = stream.write_all(b"+OK\r\n+OK\r\n+OK\r\n").await;
        }
    });
    let store = RedisStore::builder(url)
        .timeout(PATIENT)
        .connect_lazy()
        .unwrap();
    let since = Instant::now();
    for _ in 0..200 {
        let error = store.check(check("ann", "10/s")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    }
    let (made, most) = (
        made.load(SeqCst),
        4 + since.elapsed().as_millis() as usize / 50,
    );
    assert!(made <= most, "{made} connections, more than {most}");
}

/// A server that refuses a second connection keeps deciding over the first.
#[tokio::test]
async fn one_connection_is_enough() {
    let server = RedisServer::start();
    let one = NonZeroUsize::MIN;
    let store = RedisStore::builder(server.url())
        .batch(one)
        .timeout(PATIENT)
        .connect_lazy()
        .unwrap();
    assert!(
        store
            .check(check("ann", "10000/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let _: String = server.command("CONFIG SET maxclients 1").await;
    for _ in 0..5 {
        let checks = (0..20).map(|i| store.check(check(&format!("caller-{i}"), "10000/s")));
        for decision in join_all(checks).await {
            assert!(decision.unwrap().is_allowed());
        }
    }
}
