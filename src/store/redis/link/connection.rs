use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};
use smallvec::{SmallVec, smallvec};
use tokio::time::{Instant, timeout};

use super::driven::Driven;
use super::errors::error_of;
use crate::error::StoreError;
use crate::store::redis::script::Script;
use crate::util::instant;

/// A new connection.
pub(crate) struct Link {
    pub(crate) inner: Driven,
    /// For how long its server is the one to ask. None for as long as it answers.
    pub(crate) epoch: Option<Epoch>,
}

/// The time for which a server is the one to ask, though it would answer for longer.
#[derive(Debug, Clone)]
pub(crate) struct Epoch {
    /// The number of the present one.
    pub(crate) current: Arc<AtomicU64>,
    pub(crate) number: u64,
}

/// What the server has said to each call.
pub(crate) type Replies = SmallVec<[Result<Value, RedisError>; 1]>;

/// A connection that knows whether the last use of it failed.
pub(crate) struct Connection {
    link: Link,
    pub(super) broken: bool,
    /// Whether it has been of use.
    pub(super) proven: bool,
    /// What broke it.
    pub(super) failure: Option<StoreError>,
    /// When the server was last heard.
    used: Instant,
    /// How long a ping may take.
    patience: Duration,
}

impl Connection {
    /// A connection that has rested so long may have been closed by the server, or by something between.
    const RESTED: Duration = Duration::from_millis(500);

    pub(super) fn new(link: Link, patience: Duration) -> Self {
        Self {
            link,
            broken: false,
            proven: false,
            failure: None,
            used: instant(),
            patience,
        }
    }

    /// Whether its server has closed it, or is not the one to ask any more.
    pub(super) fn is_over(&mut self) -> bool {
        self.link.inner.is_lost()
            || self
                .link
                .epoch
                .as_ref()
                .is_some_and(|epoch| epoch.current.load(Ordering::Acquire) != epoch.number)
    }

    pub(super) fn has_rested(&self) -> bool {
        self.used.elapsed() >= Self::RESTED
    }

    /// Whether the server is still there. Any reply shows it, even that this user may not PING.
    pub(super) async fn answers(&mut self) -> bool {
        self.broken = true;
        // A NAT, for one, forgets connections that rest, and tells nobody.
        let reply = timeout(
            self.patience,
            self.link.inner.send_packed_command(&redis::cmd("PING")),
        )
        .await;
        self.ended_by(None);
        self.broken = !matches!(reply, Ok(Ok(_)));
        !self.broken
    }

    /// Notes what came of a use: what broke the connection, if anything did.
    fn ended_by(&mut self, failure: Option<&RedisError>) {
        self.failure = failure.map(error_of);
        self.broken = failure.is_some();
        self.used = instant();
    }

    /// Has the pool make another connection, which may lead to another server; perhaps because this one is of no use.
    pub(crate) fn give_up(&mut self, failure: Option<StoreError>) {
        self.failure = failure;
        self.broken = true;
    }

    /// Runs the script of each of these calls in one round trip. A call is `true` if its slot is being moved to this
    /// node. Returns the replies in the order of the calls; an error reply does not affect the other calls.
    ///
    /// A call is sent by the script's hash, and again by its text if the server does not know the hash: then it has run
    /// nothing, so that nothing is charged twice. `command` makes a call, by its number, the name of the command and
    /// what stands for the script there.
    ///
    /// # Errors
    ///
    /// What befell the connection before all replies had come. The pool drops a connection whose next use would likely
    /// fail as this one did, or if this future is dropped before.
    pub(crate) async fn run<'a>(
        &mut self,
        script: impl Fn(usize) -> &'a Script,
        calls: &[bool],
        command: impl Fn(usize, &str, &str) -> Cmd,
    ) -> Result<Replies, RedisError> {
        let all: SmallVec<[usize; 1]> = (0..calls.len()).collect();
        let mut replies = self
            .send(calls, &all, |call| {
                command(call, "EVALSHA", script(call).hash())
            })
            .await?;
        let is_unknown = |reply: &Result<_, RedisError>| {
            reply
                .as_ref()
                .is_err_and(|error| error.kind() == ServerErrorKind::NoScript.into())
        };
        let unknown: SmallVec<[usize; 1]> = all
            .into_iter()
            .filter(|call| is_unknown(&replies[*call]))
            .collect();
        if !unknown.is_empty() {
            // What the others said is known: a failure is of these alone.
            match self
                .send(calls, &unknown, |call| {
                    command(call, "EVAL", script(call).text)
                })
                .await
            {
                Ok(again) => unknown
                    .into_iter()
                    .zip(again)
                    .for_each(|(call, reply)| replies[call] = reply),
                Err(error) => unknown
                    .into_iter()
                    .for_each(|call| replies[call] = Err(error.clone())),
            }
        }
        Ok(replies)
    }

    /// Sends a command that is no script.
    ///
    /// # Errors
    ///
    /// What befell the connection, or what the server has said.
    pub(crate) async fn ask(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let nothing = || Err((ErrorKind::UnexpectedReturnType, "no reply").into());
        self.send(&[false], &[0], |_| command.clone())
            .await?
            .pop()
            .unwrap_or_else(nothing)
    }

    /// Sends these calls, and returns the replies to them.
    async fn send(
        &mut self,
        calls: &[bool],
        these: &[usize],
        command: impl Fn(usize) -> Cmd,
    ) -> Result<Replies, RedisError> {
        self.broken = true;
        let sent = match *these {
            // Needs no room of its own.
            [call] if !calls[call] => {
                let reply = self.link.inner.send_packed_command(&command(call)).await;
                reply.map(|reply| smallvec![reply])
            }
            _ => {
                let mut pipeline = Pipeline::with_capacity(these.len());
                for &call in these {
                    if calls[call] {
                        pipeline.add_command(redis::cmd("ASKING"));
                    }
                    pipeline.add_command(command(call));
                }
                let replies = self.link.inner.send_packed_commands(&pipeline).await;
                replies.map(SmallVec::<[Value; 1]>::from_vec)
            }
        };
        let mut told = sent
            .inspect_err(|error| self.ended_by(Some(error)))?
            .into_iter();
        let mut replies = Replies::with_capacity(these.len());
        for &call in these {
            // That it may ask is not told apart: the next reply says what came of it.
            let reply = if calls[call] {
                told.nth(1)
            } else {
                told.next()
            };
            replies.push(match reply {
                Some(Value::ServerError(error)) => Err(error.into()),
                Some(reply) => Ok(reply),
                None => {
                    return Err((
                        ErrorKind::UnexpectedReturnType,
                        "fewer replies than commands",
                    )
                        .into());
                }
            });
        }
        self.ended_by(
            replies
                .iter()
                .filter_map(|reply| reply.as_ref().err())
                .find(|error| is_lasting(error)),
        );
        Ok(replies)
    }
}

/// Whether the next call on this connection would likely fail too, while one on a new connection may not: this one is
/// broken, or leads to a server that is not the master any more, or to one that wants another password. That a slot is
/// elsewhere says nothing of the others.
fn is_lasting(error: &RedisError) -> bool {
    error.code() == Some("NOAUTH")
        || !error.is_cluster_error()
            && !matches!(
                error.kind(),
                ErrorKind::Server(
                    ServerErrorKind::NoScript
                        | ServerErrorKind::ResponseError
                        | ServerErrorKind::NoPerm
                        | ServerErrorKind::ExecAbort
                ) | ErrorKind::Extension
            )
}
