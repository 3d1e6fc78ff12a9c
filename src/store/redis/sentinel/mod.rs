//! Redis Sentinel: one master at a time, at the address that its sentinels tell.
//!
//! Whenever a connection is made all sentinels are asked at once, and the [`quorum`] says in which order to try what they
//! tell: one of them may be cut off from the others, and know of a former master only. The server must say itself that it
//! is a master. A former one may go on answering, and taking charges that it is going to lose, for many seconds: Sentinel makes
//! it a replica late. So a [`watch`] asks after the master, and the connections to another one are given up.
//!
//! This is over plain connections. Redis-rs's client for sentinels asks them one after the other, so that a slow one delays
//! all, and says nothing of a failover to those that are connected.

mod quorum;
mod watch;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ConnectionInfo, ErrorKind as Kind, ServerErrorKind, Value};
use tokio::runtime;
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};

use self::quorum::Quorum;
use super::dial::Dialer;
use super::errors::{error_at, error_of, not_a_master};
use super::transport::{Epoch, Link, with_address};
use crate::limit::ConfigError;
use crate::store::clock::instant;
use crate::store::{ErrorKind, StoreError, lock};

pub(super) struct Sentinels {
    name: Box<str>,
    /// How to reach the master, but for its address.
    master: ConnectionInfo,
    to_master: Dialer,
    sentinels: Box<[ConnectionInfo]>,
    to_sentinels: Dialer,
    timeout: Duration,
    /// The master that was found last.
    known: Mutex<Option<Master>>,
    /// The number of its epoch.
    epoch: Arc<AtomicU64>,
    /// The runtimes that have a watch.
    watching: Mutex<Vec<runtime::Id>>,
}

/// Where a sentinel says that the master is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Master {
    host: Box<str>,
    port: u16,
    /// Of the failover that made it the master: each has a higher one.
    epoch: u64,
}

impl Master {
    fn is_at(&self, other: &Self) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }
}

impl Sentinels {
    pub(super) fn new(
        master: ConnectionInfo,
        to_master: Dialer,
        sentinels: Vec<ConnectionInfo>,
        to_sentinels: Dialer,
        timeout: Duration,
    ) -> Self {
        let name = match master.addr() {
            ConnectionAddr::Tcp(name, _) | ConnectionAddr::TcpTls { host: name, .. } => name.as_str(),
            _ => "",
        };
        Self {
            name: name.into(),
            master,
            to_master,
            sentinels: sentinels.into(),
            to_sentinels,
            timeout,
            known: Mutex::default(),
            epoch: Arc::default(),
            watching: Mutex::default(),
        }
    }

    /// How long to wait for what may do without: there are four steps.
    fn patience(&self) -> Duration {
        self.timeout / 4
    }

    /// A new connection to the master.
    pub(super) async fn connect(self: &Arc<Self>) -> Result<Link, StoreError> {
        self.watch();
        let asked_in = self.epoch.load(Ordering::Acquire);
        let known = lock(&self.known).clone();
        let quorum = self.ask_all(known.is_some()).await;
        let (candidates, mut failure) = quorum.end(known);
        let last = candidates.len();
        for (i, candidate) in (1..).zip(candidates) {
            // One that does not answer must not use up the time for the others.
            let patience = if i == last { self.timeout } else { self.patience() };
            let verified = timeout(patience, self.verify(&candidate)).await;
            match verified.unwrap_or_else(|_| Err(StoreError::new(ErrorKind::Timeout))) {
                Ok(inner) => return Ok(Link { inner, epoch: Some(self.found(candidate, asked_in)) }),
                // That of the likeliest one tells most.
                Err(error) if i == 1 => failure = error,
                Err(_) => {}
            }
        }
        Err(failure)
    }

    /// Asks all sentinels, until most of them agree or one has had the time to.
    async fn ask_all(self: &Arc<Self>, is_known: bool) -> Quorum {
        let mut asking = JoinSet::new();
        for sentinel in 0..self.sentinels.len() {
            let this = Arc::clone(self);
            asking.spawn(async move { this.ask(&mut None, sentinel).await });
        }
        let mut quorum = Quorum::new(self.sentinels.len());
        let until = instant() + self.patience();
        while !quorum.is_decided() {
            let answer = if quorum.is_empty() && !is_known {
                asking.join_next().await
            } else {
                timeout_at(until, asking.join_next()).await.ok().flatten()
            };
            let Some(answer) = answer else { break };
            quorum.add(answer.unwrap_or_else(|_| Err(StoreError::new(ErrorKind::NoRuntime))));
        }
        quorum
    }

    /// Asks a sentinel, over this connection if there is one. It is gone if the sentinel does not answer.
    async fn ask(&self, connection: &mut Option<MultiplexedConnection>, sentinel: usize) -> Result<Master, StoreError> {
        let server = &self.sentinels[sentinel];
        let mut open = match connection.take() {
            Some(open) => open,
            None => self.to_sentinels.dial(server).await?,
        };
        let mut cmd = redis::cmd("SENTINEL");
        cmd.arg("MASTER").arg(&*self.name);
        let reply = open.send_packed_command(&cmd).await.map_err(|error| error_at(server.addr(), &error))?;
        let told = match reply {
            Value::ServerError(error) => {
                let text = error.details().unwrap_or_default();
                Err(match error.kind() {
                    Some(ServerErrorKind::ResponseError) if text.contains("No such master") => {
                        ConfigError::NoMaster(self.name.to_string()).into()
                    }
                    Some(ServerErrorKind::ResponseError) if text.contains("unknown command") => {
                        ConfigError::NoSentinel(server.addr().to_string()).into()
                    }
                    _ => error_at(server.addr(), &error.into()),
                })
            }
            reply => read(reply).ok_or_else(|| StoreError::new(ErrorKind::Protocol)),
        };
        *connection = Some(open);
        told
    }

    /// A connection to a server that says that it is a master.
    async fn verify(&self, master: &Master) -> Result<MultiplexedConnection, StoreError> {
        let server = with_address(&self.master, &master.host, master.port);
        let mut connection = self.to_master.dial(&server).await?;
        match connection.send_packed_command(&redis::cmd("ROLE")).await {
            Ok(Value::Array(role)) => match role.first() {
                Some(Value::BulkString(role)) if role == b"master" => Ok(connection),
                _ => Err(not_a_master(server.addr())),
            },
            // A user who may not ask is told by the first script.
            Ok(Value::ServerError(error))
                if matches!(error.kind(), Some(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError)) =>
            {
                Ok(connection)
            }
            Ok(Value::ServerError(error)) => Err(error_of(&error.into())),
            Ok(_) => Err(error_of(&(Kind::UnexpectedReturnType, "a role is expected").into())),
            Err(error) => Err(error_of(&error)),
        }
    }

    /// The epoch of a connection to a server that the sentinels, who were asked in the epoch of this number, took for the master.
    fn found(&self, master: Master, asked_in: u64) -> Epoch {
        let mut known = lock(&self.known);
        let mut number = self.epoch.load(Ordering::Acquire);
        if known.as_ref().is_some_and(|known| known.is_at(&master)) {
            *known = Some(master);
        } else if number == asked_in {
            *known = Some(master);
            number += 1;
            self.epoch.store(number, Ordering::Release);
        } else {
            // Another one has been found meanwhile, perhaps by a later word. Who asks again will know.
            number = asked_in;
        }
        Epoch { current: Arc::clone(&self.epoch), number }
    }
}

/// What a sentinel tells of a master.
fn read(reply: Value) -> Option<Master> {
    let fields: HashMap<String, String> = redis::from_redis_value(reply).ok()?;
    let (host, port) = (fields.get("ip").filter(|host| !host.is_empty())?, fields.get("port")?.parse().ok()?);
    let epoch = fields.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
    (port > 0).then(|| Master { host: host.as_str().into(), port, epoch })
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels").field("name", &self.name).field("known", &self.known).finish_non_exhaustive()
    }
}
