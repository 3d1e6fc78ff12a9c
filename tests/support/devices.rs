//! Devices between a store and Redis: a NAT that drops connections, a name that changes, a pooling
//! proxy.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tokio::io::{
    AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy, copy_bidirectional,
};
#[cfg(target_os = "linux")]
use tokio::net::TcpSocket;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tower_redis_ratelimit::redis::aio::MultiplexedConnection;
use tower_redis_ratelimit::redis::{Cmd, Value};

use crate::support::RedisServer;

/// Forwards to one server, which can be changed.
pub(crate) struct Path {
    address: SocketAddr,
    port: Arc<AtomicU16>,
    pub(crate) connections: Arc<AtomicUsize>,
    /// Number of bytes that were dropped.
    pub(crate) dropped: Arc<AtomicUsize>,
    forgotten: watch::Sender<()>,
}

impl Path {
    pub(crate) async fn to(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (port, connections) = (
            Arc::new(AtomicU16::new(server.port())),
            Arc::new(AtomicUsize::new(0)),
        );
        let (forgotten, forget) = watch::channel(());
        let (to, count) = (Arc::clone(&port), Arc::clone(&connections));
        let dropped = Arc::new(AtomicUsize::new(0));
        let drops = Arc::clone(&dropped);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                count.fetch_add(1, SeqCst);
                let (to, mut forget) = (to.load(SeqCst), forget.clone());
                let drops = Arc::clone(&drops);
                forget.mark_unchanged();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(("127.0.0.1", to)).await?;
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => return Ok(()),
                        _ = forget.changed() => {}
                    }
                    // Forward nothing, silently.
                    let mut buffer = vec![0; 65_536];
                    while let length @ 1.. = client.read(&mut buffer).await? {
                        drops.fetch_add(length, SeqCst);
                    }
                    Ok::<(), io::Error>(())
                });
            }
        });
        Self {
            address,
            port,
            connections,
            dropped,
            forgotten,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Drops all data on existing connections. New ones work.
    pub(crate) fn forget(&self) {
        self.forgotten.send_replace(());
    }

    /// Forwards new connections to this server.
    pub(crate) fn lead_to(&self, server: &RedisServer) {
        self.port.store(server.port(), SeqCst);
    }
}

/// Forwards to one server, and delays the data towards it on demand.
pub(crate) async fn holding(server: &RedisServer) -> (String, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (url, port) = (
        format!("redis://{}/", listener.local_addr().unwrap()),
        server.port(),
    );
    let (holds, held) = watch::channel(false);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let mut held = held.clone();
            tokio::spawn(async move {
                let server = TcpStream::connect(("127.0.0.1", port)).await?;
                let ((mut from, mut back), (mut replies, mut to)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(async move { copy(&mut replies, &mut back).await });
                let mut buffer = vec![0; 65_536];
                while let length @ 1.. = from.read(&mut buffer).await? {
                    held.wait_for(|holds| !holds)
                        .await
                        .map_err(io::Error::other)?;
                    to.write_all(&buffer[..length]).await?;
                }
                Ok::<(), io::Error>(())
            });
        }
    });
    (url, holds)
}

/// Forwards to the server on this port, as a client that is not local to it.
#[cfg(target_os = "linux")]
pub(crate) async fn from_elsewhere(port: u16) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let elsewhere = TcpSocket::new_v4()?;
                elsewhere.bind(SocketAddr::from(([127, 0, 0, 2], 0)))?;
                let server = SocketAddr::from(([127, 0, 0, 1], port));
                let mut server = elsewhere.connect(server).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    url
}

/// Forwards to the server on this port, with this delay each way.
pub(crate) async fn far(port: u16, way: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(connect_far(client, port, way));
        }
    });
    url
}

async fn connect_far(client: TcpStream, port: u16, way: Duration) -> io::Result<()> {
    // The round trip of the TCP connection, which this machine has accepted immediately.
    sleep(2 * way).await;
    let server = TcpStream::connect(("127.0.0.1", port)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from, back) = client.into_split();
    let (replies, to) = server.into_split();
    tokio::spawn(delayed(from, to, way));
    tokio::spawn(delayed(replies, back, way));
    Ok(())
}

async fn delayed(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, way: Duration) -> io::Result<()> {
    let (sender, mut under_way) = unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((at, bytes)) = under_way.recv().await {
            sleep_until(at).await;
            to.write_all(&bytes).await?;
        }
        Ok::<(), io::Error>(())
    });
    let mut buffer = vec![0; 65_536];
    while let length @ 1.. = from.read(&mut buffer).await? {
        let _ = sender.send((Instant::now() + way, buffer[..length].to_vec()));
    }
    Ok(())
}

/// Sends each command over another of its connections, to the server of the command's first key. A
/// strict proxy accepts only scripts, and closes a connection at any other command.
pub(crate) async fn pooling(servers: &[&RedisServer], strict: bool) -> String {
    const CONNECTIONS: usize = 3;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let mut pools: Vec<Vec<MultiplexedConnection>> = vec![];
    for server in servers {
        let mut pool = vec![];
        for _ in 0..CONNECTIONS {
            pool.push(server.connection().await);
        }
        pools.push(pool);
    }
    let pools = Arc::new(pools);
    tokio::spawn(async move {
        let turn = Arc::new(AtomicUsize::new(0));
        while let Ok((client, _)) = listener.accept().await {
            let (pools, turn) = (Arc::clone(&pools), Arc::clone(&turn));
            tokio::spawn(async move {
                let mut client = BufReader::new(client);
                loop {
                    let command = read_command(&mut client).await?;
                    if strict && !command[0].starts_with(b"EVAL") {
                        return Ok::<(), io::Error>(());
                    }
                    // EVALSHA, its script, the number of keys, the first key.
                    let shard = command.get(3).map_or(0, |key| shard(key, pools.len()));
                    let turn = turn.fetch_add(1, SeqCst) % CONNECTIONS;
                    let mut upstream = pools[shard][turn].clone();
                    let mut cmd = Cmd::new();
                    for arg in &command {
                        cmd.arg(arg.as_slice());
                    }
                    let reply = upstream
                        .send_packed_command(&cmd)
                        .await
                        .map_err(io::Error::other)?;
                    let mut bytes = vec![];
                    write_reply(&mut bytes, &reply);
                    client.write_all(&bytes).await?;
                }
            });
        }
    });
    url
}

/// Hashes the part in braces, as such proxies do.
pub(crate) fn shard(key: &[u8], shards: usize) -> usize {
    let open = key
        .iter()
        .position(|byte| *byte == b'{')
        .map_or(0, |at| at + 1);
    let close = key[open..]
        .iter()
        .position(|byte| *byte == b'}')
        .map_or(key.len(), |at| open + at);
    key[open..close]
        .iter()
        .map(|byte| usize::from(*byte))
        .sum::<usize>()
        % shards
}

async fn read_command(client: &mut BufReader<TcpStream>) -> io::Result<Vec<Vec<u8>>> {
    let count = read_number(client).await?;
    let mut command = vec![];
    for _ in 0..count {
        let length = read_number(client).await?;
        let mut arg = vec![0; length + 2];
        client.read_exact(&mut arg).await?;
        arg.truncate(length);
        command.push(arg);
    }
    Ok(command)
}

/// Reads a line such as `*3` or `$17`.
async fn read_number(client: &mut BufReader<TcpStream>) -> io::Result<usize> {
    let mut line = String::new();
    client.read_line(&mut line).await?;
    let number = line
        .trim_end()
        .get(1..)
        .and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn write_reply(bytes: &mut Vec<u8>, reply: &Value) {
    match reply {
        Value::Int(number) => bytes.extend(format!(":{number}\r\n").bytes()),
        Value::Okay => bytes.extend(b"+OK\r\n"),
        Value::SimpleString(text) => bytes.extend(format!("+{text}\r\n").bytes()),
        Value::BulkString(string) => {
            bytes.extend(format!("${}\r\n", string.len()).bytes());
            bytes.extend(string);
            bytes.extend(b"\r\n");
        }
        Value::ServerError(error) => {
            bytes.extend(
                format!(
                    "-{} {}\r\n",
                    error.code(),
                    error.details().unwrap_or_default()
                )
                .bytes(),
            );
        }
        other => panic!("no script answers {other:?}"),
    }
}
