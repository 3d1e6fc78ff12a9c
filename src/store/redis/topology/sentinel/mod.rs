//! Redis Sentinel: one master at a time, at the address that its sentinels report.
//!
//! For each new connection, all sentinels are queried concurrently, and the [`quorum`] ranks the
//! masters that they report: a sentinel may be cut off from the others and report a former master.
//! The chosen server must confirm that it is a master.
//!
//! A former master may keep replying for many seconds, since Sentinel is slow to make it a replica,
//! and then loses the charges of that time. So a watch polls the sentinels for the master, and
//! connections to any other server are closed. It polls one sentinel at a time, in turn: that is
//! four small commands per second and instance, and needs no further permission. A subscription to
//! the sentinels' messages would not replace the polling, since a message may be lost together with
//! its connection.
//!
//! Plain connections are used. Redis-rs's client for sentinels queries one after the other, so a
//! slow one delays all, and does not report a failover to existing connections.

mod quorum;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{
    ConnectionAddr, ConnectionInfo, ErrorKind as RedisErrorKind, ServerError, ServerErrorKind,
    Value,
};
use tokio::time::{sleep, timeout, timeout_at};

use self::quorum::{Master, Quorum};
use super::addresses::AddressMap;
use crate::background::{Task, TaskOwner};
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::store::redis::link::{Dialer, Driven, Epoch, Link, error_of, with_address, within};
use crate::util::{RandomState, instant, jittered, lock};

/// Interval between two polls of the watch: short enough to notice a failover within a second, even
/// if one sentinel is slow.
const WATCH: Duration = Duration::from_millis(250);
/// Longest wait of the watch for one sentinel.
const LONGEST_LOOK: Duration = Duration::from_secs(2);

/// Outcome of a query of all sentinels.
struct Election {
    /// The servers to try, best first.
    candidates: Vec<Master>,
    /// The error if there is no candidate.
    failure: StoreError,
    /// The number of the epoch in which the sentinels were queried.
    epoch: u64,
}

pub(crate) struct Sentinels {
    name: Box<str>,
    /// The settings of the master, except its address.
    master: ConnectionInfo,
    to_master: Dialer,
    sentinels: Box<[ConnectionInfo]>,
    to_sentinels: Dialer,
    addresses: AddressMap,
    time_to_connect: Duration,
    /// The last known master.
    known: Mutex<Option<Master>>,
    /// The number of the current epoch; it changes with the master.
    epoch: Arc<AtomicU64>,
    watch: TaskOwner,
}

impl Sentinels {
    pub(crate) fn new(
        name: String,
        master: ConnectionInfo,
        to_master: Dialer,
        sentinels: Vec<ConnectionInfo>,
        to_sentinels: Dialer,
        addresses: AddressMap,
        time_to_connect: Duration,
    ) -> Self {
        Self {
            name: name.into(),
            master,
            to_master,
            sentinels: sentinels.into(),
            to_sentinels,
            addresses,
            time_to_connect,
            known: Mutex::default(),
            epoch: Arc::default(),
            watch: TaskOwner::new(),
        }
    }

    /// Maximum wait for a server that another one can replace: a sentinel, or a candidate that is not the last one.
    fn patience(&self) -> Duration {
        self.time_to_connect / 4
    }

    /// Opens a connection to the master.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<Link, StoreError> {
        self.connect_to(self.elect().await).await
    }

    /// Queries all sentinels, and ranks the servers that they report.
    async fn elect(&self) -> Election {
        let epoch = self.epoch.load(Ordering::Acquire);
        let known = lock(&self.known).clone();
        let (candidates, failure) = self.ask_all(known.is_some()).await.end(known);
        Election {
            candidates,
            failure,
            epoch,
        }
    }

    /// Connects to the first candidate that confirms that it is a master.
    async fn connect_to(&self, election: Election) -> Result<Link, StoreError> {
        let Election {
            candidates,
            mut failure,
            epoch,
        } = election;
        let announced = candidates.iter();
        let announced = announced.map(|master| (&*master.host, master.port));
        self.addresses.check(announced)?;
        let last = candidates.len();
        for (i, candidate) in (1..).zip(candidates) {
            // A candidate that does not respond must leave time for the others.
            let patience = if i == last {
                self.time_to_connect
            } else {
                self.patience()
            };
            match within(patience, self.verify(&candidate)).await {
                Ok(inner) => {
                    return Ok(Link {
                        inner,
                        epoch: Some(self.found(candidate, epoch)),
                    });
                }
                // The error of the best candidate is the most useful one.
                Err(error) if i == 1 => failure = error.with_server(candidate),
                Err(_) => {}
            }
        }
        Err(failure)
    }

    /// Queries all sentinels, until most of them agree or the time for one is up.
    async fn ask_all(&self, is_known: bool) -> Quorum {
        let ask = async |sentinel| self.ask(&mut None, sentinel).await;
        let mut answers: FuturesUnordered<_> = self.sentinels.iter().map(ask).collect();
        let mut quorum = Quorum::new(self.sentinels.len());
        let until = instant() + self.patience();
        while !quorum.is_decided() {
            let answer = if quorum.is_empty() && !is_known {
                answers.next().await
            } else {
                timeout_at(until, answers.next()).await.ok().flatten()
            };
            let Some(answer) = answer else { break };
            quorum.add(answer);
        }
        quorum
    }

    /// Queries a sentinel, over this connection if there is one. Without a reply, the connection is
    /// dropped.
    async fn ask(
        &self,
        connection: &mut Option<Driven>,
        server: &ConnectionInfo,
    ) -> Result<Master, StoreError> {
        let mut open = match connection.take() {
            Some(open) => open,
            None => self.to_sentinels.dial(server).await?,
        };
        let mut cmd = redis::cmd("SENTINEL");
        cmd.arg("MASTER").arg(&*self.name);
        let reply = open
            .send_packed_command(&cmd)
            .await
            .map_err(|error| error_of(&error).with_server(server.addr()))?;
        *connection = Some(open);
        match reply {
            Value::ServerError(error) => Err(self.refusal(error, server.addr())),
            reply => match read(reply) {
                Some(master) => Ok(master),
                None => Err(StoreError::new(ErrorKind::Protocol).with_server(server.addr())),
            },
        }
    }

    /// The error of a sentinel's error reply.
    fn refusal(&self, error: ServerError, sentinel: &ConnectionAddr) -> StoreError {
        let text = error.details().unwrap_or_default();
        match error.kind() {
            Some(ServerErrorKind::ResponseError) if text.contains("No such master") => {
                no_master(sentinel, &self.name).into()
            }
            Some(ServerErrorKind::ResponseError) if text.contains("unknown command") => {
                no_sentinel(sentinel).into()
            }
            _ => error_of(&error.into()).with_server(sentinel),
        }
    }

    /// Connects to a server and verifies that it is a master.
    async fn verify(&self, master: &Master) -> Result<Driven, StoreError> {
        let server = with_address(&self.master, &master.host, master.port);
        let reached = self.addresses.reach(&master.host, master.port)?;
        let mut connection = self.to_master.dial_at(&server, reached).await?;
        let verified = match connection.send_packed_command(&redis::cmd("ROLE")).await {
            Ok(Value::Array(role)) => match role.first() {
                Some(Value::BulkString(role)) if role == b"master" => Ok(connection),
                // The sentinels may be outdated.
                _ => {
                    let reason = "the sentinels report this server, which is not a master";
                    Err(StoreError::explained(ErrorKind::NotReady, reason))
                }
            },
            // Without permission for `ROLE`, the first script shows whether it is a master.
            Ok(Value::ServerError(error))
                if matches!(
                    error.kind(),
                    Some(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError)
                ) =>
            {
                Ok(connection)
            }
            Ok(Value::ServerError(error)) => Err(error_of(&error.into())),
            Ok(_) => Err(error_of(
                &(RedisErrorKind::UnexpectedReturnType, "a role is expected").into(),
            )),
            Err(error) => Err(error_of(&error)),
        };
        verified.map_err(|error| error.with_server(server.addr()))
    }

    /// Returns the address of the last known master; without one, the name of the master and its
    /// sentinels.
    pub(crate) fn address(&self) -> String {
        match &*lock(&self.known) {
            Some(master) => master.to_string(),
            None => {
                let sentinels = self.sentinels.iter();
                let sentinels: Vec<_> = sentinels.map(|it| it.addr().to_string()).collect();
                format!("{:?} of the sentinels {}", self.name, sentinels.join(", "))
            }
        }
    }

    /// Returns the epoch of a new connection to `master`, which the sentinels reported in the epoch
    /// `asked_in`.
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
            // Another connection has found another master since, possibly from later reports: this
            // connection is outdated.
            number = asked_in;
        }
        Epoch {
            current: Arc::clone(&self.epoch),
            number,
        }
    }

    /// Starts the watch, unless it is running.
    pub(crate) fn watch(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.watch.spawn(None, |task| Self::run_watch(this, task));
    }

    /// Queries one sentinel after the other until the store is dropped. If one reports another master, queries all of
    /// them, and connects to what they elect. A report that loses this election is remembered, and starts no
    /// other election.
    async fn run_watch(this: Weak<Self>, _task: Task) {
        let mut connections: Vec<Option<Driven>> = vec![];
        // The last report of each sentinel that lost an election.
        let mut outvoted: Vec<Option<Master>> = vec![];
        let mut turn = RandomState::new().hash_one(0) as usize;
        loop {
            sleep(jittered(WATCH, 0.8..1.2)).await;
            let Some(this) = this.upgrade() else { return };
            connections.resize_with(this.sentinels.len(), || None);
            outvoted.resize(this.sentinels.len(), None);
            turn = turn.wrapping_add(1) % connections.len();
            let connection = &mut connections[turn];
            // Connecting takes several round trips. A sentinel that never replies must not keep the others waiting for long.
            let patience = if connection.is_some() {
                WATCH.max(this.patience() / 2)
            } else {
                (2 * WATCH).max(this.patience())
            };
            let patience = patience.min(LONGEST_LOOK);
            let report = timeout(patience, this.ask(connection, &this.sentinels[turn])).await;
            let Ok(Ok(master)) = report else { continue };
            let is_news = match &*lock(&this.known) {
                Some(known) => !known.is_at(&master),
                None => false,
            };
            if !is_news || outvoted[turn].as_ref() == Some(&master) {
                continue;
            }
            let election = this.elect().await;
            match election.candidates.first() {
                // Connect only for the effect: a new epoch closes the connections to the former master.
                Some(first) if first.is_at(&master) => {
                    let _ = timeout(this.time_to_connect, this.connect_to(election)).await;
                }
                _ => outvoted[turn] = Some(master),
            }
        }
    }
}

/// Parses a sentinel's reply about a master.
fn read(reply: Value) -> Option<Master> {
    let fields: HashMap<String, String> = redis::from_redis_value(reply).ok()?;
    let host = fields.get("ip")?;
    let port = fields.get("port")?.parse().ok()?;
    if host.is_empty() || port == 0 {
        return None;
    }
    let epoch = match fields.get("config-epoch") {
        Some(epoch) => epoch.parse().unwrap_or(0),
        None => 0,
    };
    Some(Master {
        host: host.as_str().into(),
        port,
        epoch,
    })
}

fn no_master(address: &redis::ConnectionAddr, name: &str) -> ConfigError {
    ConfigError::new(format!(
        "the sentinel {address} knows no master named {name:?}: use the name from `sentinel monitor` in its configuration"
    ))
}

fn no_sentinel(address: &redis::ConnectionAddr) -> ConfigError {
    ConfigError::new(format!(
        "the server {address} is not a Redis Sentinel: use the port of the sentinel, usually 26379; for a Redis without \
         sentinels, use `redis://host:6379`"
    ))
}
