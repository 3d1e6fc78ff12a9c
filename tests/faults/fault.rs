//! The faults of a server, single or a cluster's master, and the commands that begin and end them.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tower_redis_ratelimit::redis;
use tower_redis_ratelimit::store::ErrorKind;

use crate::load::{DEADLINE, Setup};
use crate::proxy::Mode;
use crate::support::{RedisServer, unused_port};
use crate::table::FAULT;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "not every matrix has all faults")]
pub enum Fault {
    /// `kill -9`, and a restart without data.
    KilledEmpty,
    /// `kill -9`; a restart with its data, or its replica takes over.
    Killed,
    /// SIGSTOP; SIGCONT after 5 s, or after its replica has taken over.
    Frozen,
    /// All connections are cut, repeatedly.
    Cut,
    /// The path of clients to it fails, while other nodes of a cluster reach it.
    Path(Mode),
    /// `maxclients` reached.
    Full,
    /// `maxmemory` is reached, and eviction is disabled.
    OutOfMemory,
    /// It has fewer replicas than writes require.
    NoReplicas,
    /// A read-only replica.
    Replica,
    /// The scripts are flushed, repeatedly.
    ScriptFlush,
    FlushAll,
    /// Another password, and all connections cut.
    Password,
    /// The user may not call scripts.
    Forbidden,
    /// The host name never resolves.
    NoName,
    /// The port refuses connections at startup.
    StartDown,
}

#[allow(dead_code, reason = "not every matrix has all faults")]
impl Fault {
    /// Minimum duration.
    pub const fn lasts(self) -> Duration {
        match self {
            Self::Frozen => Duration::from_secs(5),
            // Each breaker opens several times.
            Self::Path(Mode::Waver(..)) => Duration::from_secs(5),
            _ => FAULT,
        }
    }

    pub fn setup(self) -> Setup {
        match self {
            // A single task: each late reply is about the whole limit; with many connections,
            // replies arrive one by one.
            Self::Path(Mode::Waver(..)) => Setup {
                instances: 1,
                connections: 16,
                ..Setup::default()
            },
            _ => Setup::default(),
        }
    }

    /// Returns `true` if every instance must become degraded. Otherwise an instance may.
    pub fn is_outage(self) -> bool {
        match self {
            Self::Cut | Self::ScriptFlush | Self::FlushAll => false,
            Self::Path(Mode::Delay(delay)) => delay > DEADLINE,
            Self::Path(Mode::Waver(..)) => false,
            _ => true,
        }
    }

    /// Returns `true` if the fault is an action that is repeated.
    pub const fn is_repeated(self) -> bool {
        matches!(self, Self::Cut | Self::ScriptFlush)
    }

    /// Returns `true` if Redis loses all data.
    pub const fn forgets(self) -> bool {
        matches!(self, Self::KilledEmpty | Self::FlushAll)
    }

    /// Some check must fail with one of these errors, so that the row tests its fault. If connections
    /// are cut first, the breaker may open before any other error occurs, and an idle connection
    /// then reports none.
    pub fn shows_as(self) -> &'static [ErrorKind] {
        match self {
            Self::KilledEmpty | Self::Killed | Self::Cut | Self::StartDown => {
                &[ErrorKind::Unreachable]
            }
            Self::Path(Mode::Half | Mode::Refuse) => &[ErrorKind::Unreachable],
            Self::Path(Mode::Answer(reply)) if reply.starts_with(b"-LOADING") => {
                &[ErrorKind::NotReady]
            }
            Self::Path(Mode::Answer(_)) => &[ErrorKind::Protocol],
            Self::Path(Mode::Delay(delay)) if delay < DEADLINE => &[],
            Self::Frozen | Self::Path(_) => &[ErrorKind::Timeout],
            Self::OutOfMemory => &[ErrorKind::OutOfMemory],
            Self::NoReplicas => &[ErrorKind::Refused],
            Self::Replica => &[ErrorKind::ReadOnly],
            Self::Forbidden => &[ErrorKind::Permission],
            Self::Full => &[ErrorKind::Unreachable],
            Self::Password => &[ErrorKind::Unreachable, ErrorKind::Authentication],
            Self::ScriptFlush | Self::FlushAll | Self::NoName => &[],
        }
    }

    /// Returns `true` if some instances may be degraded while Redis decides for others.
    pub fn is_partial(self) -> bool {
        !self.is_outage() && !self.is_unnoticed()
    }

    /// Returns `true` if a connection that was opened during the fault gets no reply even after it.
    pub const fn hangs(self) -> bool {
        matches!(self, Self::Path(Mode::Silent | Mode::Swallow))
    }

    /// Returns `true` if Redis executes all commands, and only its replies are late.
    pub const fn only_delays(self) -> bool {
        matches!(self, Self::Path(Mode::Delay(_) | Mode::Waver(..)))
    }

    /// Returns `true` if Redis keeps deciding, so that no check fails.
    pub const fn is_unnoticed(self) -> bool {
        matches!(self, Self::ScriptFlush | Self::FlushAll)
    }

    /// Returns `true` if the instances have never reached Redis when the fault begins.
    pub const fn starts_down(self) -> bool {
        matches!(self, Self::NoName | Self::StartDown)
    }
}

/// A connection to a server from before the fault, and so usable throughout it.
pub struct Admin(MultiplexedConnection);

impl Admin {
    pub async fn of(server: &RedisServer) -> Self {
        Self(server.connection().await)
    }

    /// Begins a fault that commands cause.
    pub async fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::Cut => self.cut().await,
            Fault::Full => {
                self.set("maxclients", "1").await;
                self.cut().await;
            }
            Fault::OutOfMemory => self.set("maxmemory", "1").await,
            Fault::NoReplicas => self.set("min-replicas-to-write", "1").await,
            Fault::Replica => {
                let port = unused_port().to_string();
                self.command(&["REPLICAOF", "127.0.0.1", &port]).await;
            }
            Fault::ScriptFlush => self.command(&["SCRIPT", "FLUSH"]).await,
            Fault::FlushAll => self.command(&["FLUSHALL"]).await,
            Fault::Password => {
                self.set("requirepass", "another").await;
                self.cut().await;
            }
            Fault::Forbidden => {
                self.command(&["ACL", "SETUSER", "default", "-evalsha"])
                    .await
            }
            Fault::KilledEmpty | Fault::Killed | Fault::Frozen | Fault::Path(_) => {}
            Fault::NoName | Fault::StartDown => {}
        }
    }

    /// Ends such a fault.
    pub async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::Full => self.set("maxclients", "1000").await,
            Fault::OutOfMemory => self.set("maxmemory", "0").await,
            Fault::NoReplicas => self.set("min-replicas-to-write", "0").await,
            Fault::Replica => self.command(&["REPLICAOF", "NO", "ONE"]).await,
            Fault::Password => self.set("requirepass", "").await,
            Fault::Forbidden => {
                self.command(&["ACL", "SETUSER", "default", "+evalsha"])
                    .await
            }
            Fault::KilledEmpty | Fault::Killed | Fault::Frozen | Fault::Path(_) => {}
            Fault::Cut | Fault::ScriptFlush | Fault::FlushAll => {}
            Fault::NoName | Fault::StartDown => {}
        }
    }

    async fn set(&mut self, name: &str, value: &str) {
        self.command(&["CONFIG", "SET", name, value]).await;
    }

    async fn cut(&mut self) {
        self.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    }

    async fn command(&mut self, words: &[&str]) {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..]);
        let _: redis::Value = cmd.query_async(&mut self.0).await.expect(words[0]);
    }
}
