//! A server, or a device in front of it, that accepts connections and then gets no further.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{ErrorKind, RedisStoreBuilder, Store};

use crate::support::{assert_helpful, check, until};
use crate::with_tls::{Authority, TlsServer};

const SHORT: Duration = Duration::from_millis(300);

/// How far a new connection gets.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stall {
    Never,
    /// The server does not reply to the client's first message.
    InHandshake,
    /// The handshake is complete, and the client's greeting gets no reply.
    AfterHandshake,
}

/// Forwards to a server, and stalls new connections on demand.
struct Device {
    url: String,
    stall: watch::Sender<Stall>,
    /// Number of connections that the client has opened and not closed.
    open: Arc<AtomicUsize>,
    stalled: Arc<AtomicUsize>,
}

impl Device {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("rediss://{}/", listener.local_addr().unwrap());
        let (stall, stalls) = watch::channel(Stall::Never);
        let open = Arc::new(AtomicUsize::new(0));
        let stalled = Arc::new(AtomicUsize::new(0));
        let (opened, stuck) = (Arc::clone(&open), Arc::clone(&stalled));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let now = *stalls.borrow();
                let open = Arc::clone(&opened);
                open.fetch_add(1, SeqCst);
                if now != Stall::Never {
                    stuck.fetch_add(1, SeqCst);
                }
                tokio::spawn(async move {
                    let _ended = forward(client, port, now).await;
                    open.fetch_sub(1, SeqCst);
                });
            }
        });
        Self {
            url,
            stall,
            open,
            stalled,
        }
    }

    fn builder(&self, ca: &Authority, connections: usize) -> RedisStoreBuilder {
        RedisStore::builder(&*self.url)
            .root_certificates(ca.pem())
            .connections(NonZeroUsize::new(connections).unwrap())
            .timeout(SHORT)
            .connect_timeout(SHORT)
    }
}

async fn forward(mut client: TcpStream, port: u16, stall: Stall) -> std::io::Result<()> {
    let mut server = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut buffer = vec![0; 65_536];
    match stall {
        Stall::Never => return copy_bidirectional(&mut client, &mut server).await.map(drop),
        Stall::InHandshake => {}
        Stall::AfterHandshake => {
            let length = client.read(&mut buffer).await?;
            server.write_all(&buffer[..length]).await?;
            let length = server.read(&mut buffer).await?;
            client.write_all(&buffer[..length]).await?;
        }
    }
    while client.read(&mut buffer).await? > 0 {}
    Ok(())
}

/// The error names the setting, and no connection or task is left.
#[tokio::test]
async fn a_stalled_connection_is_left_in_time() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    for stall in [Stall::InHandshake, Stall::AfterHandshake] {
        let device = Device::to(server.port).await;
        device.stall.send_replace(stall);
        let before = Handle::current().metrics().num_alive_tasks();
        let error = device.builder(&ca, 1).connect().await.unwrap_err();
        assert_helpful(&error, ErrorKind::Timeout, "raise `connect_timeout`");
        until("all connections are closed", async || {
            device.open.load(SeqCst) == 0
        })
        .await;
        let tasks = || Handle::current().metrics().num_alive_tasks();
        until("no task is left", async || tasks() <= before).await;
    }
}

/// A store with one connection decides again soon after the server does.
#[tokio::test]
async fn the_place_of_a_stalled_connection_is_freed() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    for (stall, name) in [(Stall::InHandshake, "ann"), (Stall::AfterHandshake, "eve")] {
        let device = Device::to(server.port).await;
        device.stall.send_replace(stall);
        let store = device.builder(&ca, 1).connect_lazy().unwrap();
        until("several connections have stalled", async || {
            let error = store.check(check(name, "10/h")).await.unwrap_err();
            assert!(error.is_not_sent(), "{error:?}");
            device.stalled.load(SeqCst) > 3
        })
        .await;
        // One is being opened, and the reason for the stall is searched over another.
        assert!(device.open.load(SeqCst) <= 2, "{stall:?}");
        device.stall.send_replace(Stall::Never);
        until("Redis decides", async || {
            store.check(check("bob", "10000/h")).await.is_ok()
        })
        .await;
        let charged = store.check(check(name, "10/h")).await.unwrap();
        assert_eq!(charged.remaining(), 9, "{stall:?}");
    }
}

/// A second connection that stalls delays no check: the first one is shared.
#[tokio::test]
async fn a_stalled_connection_delays_no_check() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    for stall in [Stall::InHandshake, Stall::AfterHandshake] {
        let device = Device::to(server.port).await;
        let store = device
            .builder(&ca, 8)
            .batch(NonZeroUsize::MIN)
            .connect()
            .await
            .unwrap();
        device.stall.send_replace(stall);
        until("a further connection stalls", async || {
            let checks = (0..64).map(|_| store.check(check("ann", "1000000/h")));
            for decided in futures_util::future::join_all(checks).await {
                assert!(decided.unwrap().is_allowed(), "{stall:?}");
            }
            device.stalled.load(SeqCst) > 16
        })
        .await;
    }
}
