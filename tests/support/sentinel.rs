//! Real servers and sentinels, and fake sentinels, on free ports. They stop with the test.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures_util::future::join_all;
use tempfile::TempDir;
use tower_redis_ratelimit::redis;

use crate::support::{RedisServer, cmd, free_port, until};

pub const NAME: &str = "mymaster";

/// Milliseconds until a sentinel considers a server down. A sentinel retries a lost server once a
/// second, and the new leader no sooner: with a shorter time it would consider the new master down
/// too, and fail over again.
const DOWN_AFTER: u32 = 2_000;

/// A real sentinel.
pub struct Sentinel {
    child: Child,
    pub port: u16,
    _dir: TempDir,
}

impl Sentinel {
    /// Starts a sentinel with more configuration lines.
    pub fn start(master: u16, quorum: usize, more: &str) -> Self {
        for _ in 0..20 {
            let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
            let (path, file) = (dir.path().display(), dir.path().join("sentinel.conf"));
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {path}\nsentinel monitor {NAME} 127.0.0.1 {master} {quorum}\n\
                 sentinel down-after-milliseconds {NAME} {DOWN_AFTER}\nsentinel failover-timeout {NAME} 3000\n\
                 sentinel parallel-syncs {NAME} 2\n{more}"
            );
            fs::write(&file, text).unwrap();
            let mut command = Command::new("redis-server");
            command
                .arg(&file)
                .arg("--sentinel")
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            let mut sentinel = Self {
                child: command.spawn().unwrap(),
                port,
                _dir: dir,
            };
            if sentinel.is_up() {
                return sentinel;
            }
        }
        panic!("no sentinel came up on any of 20 ports");
    }

    fn is_up(&mut self) -> bool {
        let end = Instant::now() + std::time::Duration::from_secs(20);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            if std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return true;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        false
    }

    pub fn client(&self) -> redis::Client {
        redis::Client::open(format!("redis://127.0.0.1:{}/", self.port)).unwrap()
    }

    pub async fn command<T: redis::FromRedisValue>(&self, command: &str) -> redis::RedisResult<T> {
        cmd(command)
            .query_async(&mut self.client().get_multiplexed_async_connection().await?)
            .await
    }

    /// Returns a field of the sentinel's report on the master.
    async fn field(&self, name: &str) -> String {
        let fields: redis::RedisResult<std::collections::HashMap<String, String>> =
            self.command(&format!("SENTINEL MASTER {NAME}")).await;
        fields
            .ok()
            .and_then(|mut fields| fields.remove(name))
            .unwrap_or_default()
    }

    pub async fn master(&self) -> u16 {
        self.field("port").await.parse().unwrap_or(0)
    }

    fn signal(&self, signal: &str) {
        assert!(
            Command::new("kill")
                .args([signal, &self.child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }

    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Three servers, one of which is the master, and three sentinels.
pub struct Group {
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<Sentinel>,
    /// The time of each switch to another master, and the sentinel that reported it.
    pub switches: Arc<Mutex<Vec<(Instant, usize)>>>,
}

impl Group {
    pub async fn start() -> Self {
        let start = || {
            RedisServer::start_with(&[
                "--repl-diskless-sync-delay",
                "0",
                "--repl-ping-replica-period",
                "1",
            ])
        };
        let servers: Vec<RedisServer> = (0..3).map(|_| start()).collect();
        let master = servers[0].port();
        for replica in &servers[1..] {
            let _: String = replica
                .command(&format!("REPLICAOF 127.0.0.1 {master}"))
                .await;
        }
        let sentinels: Vec<Sentinel> = (0..3).map(|_| Sentinel::start(master, 2, "")).collect();
        let group = Self {
            servers,
            sentinels,
            switches: Arc::default(),
        };
        for (i, sentinel) in group.sentinels.iter().enumerate() {
            let (client, switches) = (sentinel.client(), Arc::clone(&group.switches));
            std::thread::spawn(move || {
                let mut connection = client.get_connection().unwrap();
                let mut messages = connection.as_pubsub();
                messages.subscribe("+switch-master").unwrap();
                while messages.get_message().is_ok() {
                    switches.lock().unwrap().push((Instant::now(), i));
                }
            });
        }
        group.is_well().await;
        group
    }

    /// Waits until every sentinel knows the same master, two other sentinels and two replicas that
    /// follow the master.
    pub async fn is_well(&self) {
        until("all sentinels know all of the group", async || {
            let mut masters = vec![];
            for sentinel in &self.sentinels {
                masters.push(sentinel.master().await);
                let replicas: redis::RedisResult<Vec<std::collections::HashMap<String, String>>> =
                    sentinel.command(&format!("SENTINEL REPLICAS {NAME}")).await;
                let follow = |replica: &std::collections::HashMap<String, String>| {
                    replica["flags"] == "slave"
                        && replica["master-link-status"] == "ok"
                        && replica["master-port"] == masters[0].to_string()
                };
                if sentinel.field("num-other-sentinels").await != "2"
                    || sentinel.field("flags").await != "master"
                    || replicas
                        .unwrap_or_default()
                        .iter()
                        .filter(|replica| follow(replica))
                        .count()
                        != 2
                {
                    return false;
                }
            }
            masters.iter().all(|master| *master == masters[0])
        })
        .await;
    }

    /// Returns the server that all sentinels report.
    pub async fn master(&self) -> Option<usize> {
        let masters = join_all(self.sentinels.iter().map(Sentinel::master)).await;
        let all = masters.iter().all(|port| *port == masters[0]);
        self.servers
            .iter()
            .position(|server| server.port() == masters[0])
            .filter(|_| all)
    }

    pub fn url(&self) -> String {
        url(&self
            .sentinels
            .iter()
            .map(|sentinel| sentinel.port)
            .collect::<Vec<_>>())
    }
}

/// A fake sentinel that reports the master that the test sets.
pub struct Fake {
    pub port: u16,
    /// The port of the reported master, and the epoch.
    master: Arc<(AtomicU64, AtomicU64)>,
    /// The number of queries.
    pub queries: Arc<AtomicU64>,
}

impl Fake {
    pub fn start(master: u16, epoch: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let fake = Self {
            port,
            master: Arc::default(),
            queries: Arc::default(),
        };
        fake.set_master(master, epoch);
        let (master, queries) = (Arc::clone(&fake.master), Arc::clone(&fake.queries));
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let (master, queries) = (Arc::clone(&master), Arc::clone(&queries));
                std::thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().unwrap());
                    let mut stream = stream;
                    while let Some(words) = command(&mut lines) {
                        let reply = if words[0] == "SENTINEL" {
                            assert_eq!(words[1..], ["MASTER", NAME]);
                            queries.fetch_add(1, SeqCst);
                            let (port, epoch) = (
                                master.0.load(SeqCst).to_string(),
                                master.1.load(SeqCst).to_string(),
                            );
                            let fields = [
                                "name",
                                NAME,
                                "ip",
                                "127.0.0.1",
                                "port",
                                &port,
                                "config-epoch",
                                &epoch,
                            ];
                            let texts = fields.map(|text| format!("${}\r\n{text}\r\n", text.len()));
                            format!("*{}\r\n{}", texts.len(), texts.concat())
                        } else {
                            "+OK\r\n".to_owned()
                        };
                        if stream.write_all(reply.as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        fake
    }

    pub fn set_master(&self, port: u16, epoch: u64) {
        self.master.0.store(port.into(), SeqCst);
        self.master.1.store(epoch, SeqCst);
    }
}

/// Reads one command.
fn command(lines: &mut impl BufRead) -> Option<Vec<String>> {
    let number = |lead: char, lines: &mut dyn BufRead| -> Option<usize> {
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        line.trim().strip_prefix(lead)?.parse().ok()
    };
    let count = number('*', lines)?;
    (0..count)
        .map(|_| {
            let length = number('$', lines)?;
            let mut text = vec![0; length + 2];
            lines.read_exact(&mut text).ok()?;
            String::from_utf8(text[..length].to_vec()).ok()
        })
        .collect()
}

/// Returns the URL of the master behind these sentinels.
pub fn url(sentinels: &[u16]) -> String {
    let hosts: Vec<String> = sentinels
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    format!("redis+sentinel://{}/{NAME}", hosts.join(","))
}
