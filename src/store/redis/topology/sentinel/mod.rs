//! Redis Sentinel: one master at a time, at the address that its sentinels tell.
//!
//! Whenever a connection is made all sentinels are asked at once, and the [`quorum`] says in which order to try what
//! they tell: one of them may be cut off from the others, and know of a former master only. The server must say itself
//! that it is a master. A former one may go on answering, and taking charges that it is going to lose, for many
//! seconds: Sentinel makes it a replica late. So a watch asks after the master, and the connections to another one are
//! given up. It asks one sentinel at a time, each in its turn: that is four small commands a second for an instance,
//! and needs no permission more. A message that sentinels publish may be lost with its connection, so it would have to
//! be asked all the same.
//!
//! This is over plain connections. Redis-rs's client for sentinels asks them one after the other, so that a slow one
//! delays all, and says nothing of a failover to those that are connected.

mod quorum;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{ConnectionInfo, ErrorKind as Kind, ServerErrorKind, Value};
use tokio::time::{sleep, timeout, timeout_at};

use self::quorum::{Master, Quorum};
use crate::background::{Task, TaskOwner};
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::store::redis::link::{Dialer, Driven, Epoch, Link, error_of, with_address, within};
use crate::util::{RandomState, instant, jittered, lock};

/// How often a sentinel is asked after the master: so that a second is enough though one is slow.
const WATCH: Duration = Duration::from_millis(250);

/// Outcome of a query of all sentinels.
struct Election {
    /// The servers to try, the likeliest first.
    candidates: Vec<Master>,
    /// Why there may be no candidate.
    failure: StoreError,
    /// The number of the epoch in which the sentinels were queried.
    epoch: u64,
}

pub(crate) struct Sentinels {
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
    watch: TaskOwner,
}

impl Sentinels {
    pub(crate) fn new(
        name: String,
        master: ConnectionInfo,
        to_master: Dialer,
        sentinels: Vec<ConnectionInfo>,
        to_sentinels: Dialer,
        timeout: Duration,
    ) -> Self {
        Self {
            name: name.into(),
            master,
            to_master,
            sentinels: sentinels.into(),
            to_sentinels,
            timeout,
            known: Mutex::default(),
            epoch: Arc::default(),
            watch: TaskOwner::new(),
        }
    }

    /// How long to wait for what may do without: there are four steps.
    fn patience(&self) -> Duration {
        self.timeout / 4
    }

    /// A new connection to the master.
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

    /// A connection to the first candidate that confirms that it is a master.
    async fn connect_to(&self, election: Election) -> Result<Link, StoreError> {
        let Election {
            candidates,
            mut failure,
            epoch,
        } = election;
        let last = candidates.len();
        for (i, candidate) in (1..).zip(candidates) {
            // One that does not answer must not use up the time for the others.
            let patience = if i == last {
                self.timeout
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
                // That of the likeliest one tells most.
                Err(error) if i == 1 => failure = error.at(candidate),
                Err(_) => {}
            }
        }
        Err(failure)
    }

    /// Asks all sentinels, until most of them agree or one has had the time to.
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

    /// Asks a sentinel, over this connection if there is one. It is gone if the sentinel does not answer.
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
            .map_err(|error| error_of(&error).at(server.addr()))?;
        let told = match reply {
            Value::ServerError(error) => {
                let text = error.details().unwrap_or_default();
                Err(match error.kind() {
                    Some(ServerErrorKind::ResponseError) if text.contains("No such master") => {
                        no_master(server.addr(), &self.name).into()
                    }
                    Some(ServerErrorKind::ResponseError) if text.contains("unknown command") => {
                        no_sentinel(server.addr()).into()
                    }
                    _ => error_of(&error.into()).at(server.addr()),
                })
            }
            reply => {
                read(reply).ok_or_else(|| StoreError::new(ErrorKind::Protocol).at(server.addr()))
            }
        };
        *connection = Some(open);
        told
    }

    /// A connection to a server that says that it is a master.
    async fn verify(&self, master: &Master) -> Result<Driven, StoreError> {
        let server = with_address(&self.master, &master.host, master.port);
        let mut connection = self.to_master.dial(&server).await?;
        let verified = match connection.send_packed_command(&redis::cmd("ROLE")).await {
            Ok(Value::Array(role)) => match role.first() {
                Some(Value::BulkString(role)) if role == b"master" => Ok(connection),
                // The sentinels may be late.
                _ => {
                    let reason = "the sentinels report this server, which is not a master";
                    Err(StoreError::explained(ErrorKind::NotReady, reason))
                }
            },
            // A user who may not ask is told by the first script.
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
                &(Kind::UnexpectedReturnType, "a role is expected").into(),
            )),
            Err(error) => Err(error_of(&error)),
        };
        verified.map_err(|error| error.at(server.addr()))
    }

    /// The last known master, or who is asked for it.
    pub(crate) fn address(&self) -> String {
        match &*lock(&self.known) {
            Some(master) => master.to_string(),
            None => {
                let sentinels: Vec<String> = self
                    .sentinels
                    .iter()
                    .map(|server| server.addr().to_string())
                    .collect();
                format!("{:?} of the sentinels {}", self.name, sentinels.join(", "))
            }
        }
    }

    /// The epoch of a connection to a server that the sentinels, who were asked in the epoch of this number, took for
    /// the master.
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
            let told = timeout(
                WATCH,
                this.ask(&mut connections[turn], &this.sentinels[turn]),
            )
            .await;
            let Ok(Ok(master)) = told else { continue };
            let is_news = lock(&this.known)
                .as_ref()
                .is_some_and(|known| !known.is_at(&master));
            if !is_news || outvoted[turn].as_ref() == Some(&master) {
                continue;
            }
            let election = this.elect().await;
            if election
                .candidates
                .first()
                .is_some_and(|first| first.is_at(&master))
            {
                // Finds the master, and closes the connections to the former one.
                let _ = timeout(this.timeout, this.connect_to(election)).await;
            } else {
                outvoted[turn] = Some(master);
            }
        }
    }
}

/// What a sentinel tells of a master.
fn read(reply: Value) -> Option<Master> {
    let fields: HashMap<String, String> = redis::from_redis_value(reply).ok()?;
    let (host, port) = (
        fields.get("ip").filter(|host| !host.is_empty())?,
        fields.get("port")?.parse().ok()?,
    );
    let epoch = fields
        .get("config-epoch")
        .and_then(|epoch| epoch.parse().ok())
        .unwrap_or(0);
    (port > 0).then(|| Master {
        host: host.as_str().into(),
        port,
        epoch,
    })
}

fn no_master(address: &redis::ConnectionAddr, name: &str) -> ConfigError {
    ConfigError::new(format!(
        "the sentinel {address} knows no master named {name:?}: write the name that `sentinel monitor` has in their configuration"
    ))
}

fn no_sentinel(address: &redis::ConnectionAddr) -> ConfigError {
    ConfigError::new(format!(
        "the server {address} is not a Redis Sentinel: write the sentinel's port, mostly 26379; or for a Redis without \
         sentinels, `redis://host:6379`"
    ))
}
