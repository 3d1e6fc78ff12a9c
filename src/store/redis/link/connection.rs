//! A connection to one server, driven by the task that sends a command over it.
//!
//! Redis-rs would spawn a task per connection, which writes the commands and forwards the replies.
//! This costs two more scheduler turns per call. If more than three tasks in a row wake each other,
//! Tokio also wakes another thread to share the work; with one request at a time, that takes longer
//! than the work.
//!
//! So nothing reads while no command is in flight. Before each use, the pool checks whether the
//! connection was lost in the meantime.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Fuse, FusedFuture};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};
use smallvec::{SmallVec, smallvec};
use tokio::task::coop::{Unconstrained, unconstrained};
use tokio::time::{Instant, timeout};

use super::errors::error_of;
use crate::error::StoreError;
use crate::store::redis::script::Script;
use crate::util::instant;

/// A new connection.
pub(crate) struct Link {
    pub(crate) inner: Driven,
    /// The time for which its server is valid. `None` if it is valid for as long as the connection
    /// lasts.
    pub(crate) epoch: Option<Epoch>,
}

/// The time for which a server is valid as the master, even if it replies for longer.
#[derive(Debug, Clone)]
pub(crate) struct Epoch {
    /// The number of the current epoch.
    pub(crate) current: Arc<AtomicU64>,
    pub(crate) number: u64,
}

/// The server's reply to each call.
pub(crate) type Replies = SmallVec<[Result<Value, RedisError>; 1]>;

/// A connection that records whether its last use failed.
pub(crate) struct Connection {
    link: Link,
    pub(super) broken: bool,
    /// Whether it has been used successfully.
    pub(super) was_used: bool,
    /// The error that broke it.
    pub(super) failure: Option<StoreError>,
    /// Time of the last reply.
    used: Instant,
    /// Maximum time of a ping.
    patience: Duration,
}

impl Connection {
    /// A connection that was idle for this long may have been closed, by the server or by a device
    /// in between.
    const IDLE_THRESHOLD: Duration = Duration::from_millis(500);

    pub(super) fn new(link: Link, patience: Duration) -> Self {
        Self {
            link,
            broken: false,
            was_used: false,
            failure: None,
            used: instant(),
            patience,
        }
    }

    /// Returns `true` if the server has closed the connection, or is no longer the master.
    pub(super) fn is_closed(&mut self) -> bool {
        self.link.inner.is_lost()
            || self
                .link
                .epoch
                .as_ref()
                .is_some_and(|epoch| epoch.current.load(Ordering::Acquire) != epoch.number)
    }

    pub(super) fn was_idle(&self) -> bool {
        self.used.elapsed() >= Self::IDLE_THRESHOLD
    }

    /// Returns `true` if the server still responds. Any reply shows that, even an error that this
    /// user may not PING.
    pub(super) async fn responds_to_ping(&mut self) -> bool {
        self.broken = true;
        // NATs and others drop idle connections silently.
        let reply = timeout(
            self.patience,
            self.link.inner.send_packed_command(&redis::cmd("PING")),
        )
        .await;
        self.record_outcome(None);
        self.broken = !matches!(reply, Ok(Ok(_)));
        !self.broken
    }

    /// Records the outcome of a use: the error that broke the connection, if any.
    fn record_outcome(&mut self, failure: Option<&RedisError>) {
        self.failure = failure.map(error_of);
        self.broken = failure.is_some();
        self.used = instant();
    }

    /// Discards the connection, so that the pool creates another one, possibly to another server.
    /// With a `failure`, this connection was of no use.
    pub(crate) fn give_up(&mut self, failure: Option<StoreError>) {
        self.failure = failure;
        self.broken = true;
    }

    /// Runs the script of each of these calls in one round trip. A call that is `true` belongs
    /// to a slot that is migrating to this node. Returns one reply per call, in order: an error in
    /// one does not affect the others.
    ///
    /// A call is sent with the script's hash, and again with its text if the server does not know
    /// the hash: the server has then executed nothing, so nothing is charged twice. `command`
    /// builds a call from its index, the name of the command, and the hash or text of the script.
    ///
    /// # Errors
    ///
    /// The connection error that prevented some replies. The pool drops a connection if its next
    /// use would probably fail too, or if this future is dropped before completion.
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
            // The other replies have arrived: a failure concerns only the calls sent again.
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

    /// Sends a command other than a script.
    ///
    /// # Errors
    ///
    /// The connection error, or the error reply.
    pub(crate) async fn ask(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let nothing = || Err((ErrorKind::UnexpectedReturnType, "no reply").into());
        self.send(&[false], &[0], |_| command.clone())
            .await?
            .pop()
            .unwrap_or_else(nothing)
    }

    /// Sends these calls, and returns their replies.
    async fn send(
        &mut self,
        calls: &[bool],
        these: &[usize],
        command: impl Fn(usize) -> Cmd,
    ) -> Result<Replies, RedisError> {
        self.broken = true;
        let sent = match *these {
            // A single call needs no pipeline.
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
        let mut received = sent
            .inspect_err(|error| self.record_outcome(Some(error)))?
            .into_iter();
        let mut replies = Replies::with_capacity(these.len());
        for &call in these {
            // Skip the reply to `ASKING`; the reply to the call reports any error.
            let reply = if calls[call] {
                received.nth(1)
            } else {
                received.next()
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
        self.record_outcome(
            replies
                .iter()
                .filter_map(|reply| reply.as_ref().err())
                .find(|error| is_lasting(error)),
        );
        Ok(replies)
    }
}

/// Returns `true` if the next call on this connection would probably fail too, while a call on a
/// new connection may succeed: this connection is broken, or its server is no longer the master or
/// requires another password. That a slot is elsewhere does not affect calls for other slots.
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

/// Reads and writes a connection, until the connection is lost.
pub(super) type Driver = Fuse<BoxFuture<'static, ()>>;

/// A connection and its driver. The driver is empty if a task of redis-rs drives the connection.
pub(crate) struct Driven {
    pub(super) connection: MultiplexedConnection,
    pub(super) driver: Driver,
}

impl Driven {
    /// Returns `true` if the connection was lost while idle, as far as the runtime has noticed.
    /// Also replaces the waker that the last user left in the driver, so that later events do not
    /// wake that task.
    pub(super) fn is_lost(&mut self) -> bool {
        (&mut self.driver).now_or_never().is_some()
    }

    /// As redis-rs's method of this name.
    pub(crate) async fn send_packed_command(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let request = pin!(unconstrained(self.connection.send_packed_command(command)));
        drive(&mut self.driver, request).await
    }

    /// Sends a pipeline; returns the replies to all its commands.
    pub(crate) async fn send_packed_commands(
        &mut self,
        pipeline: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        let request = self
            .connection
            .send_packed_commands(pipeline, 0, pipeline.len());
        drive(&mut self.driver, pin!(unconstrained(request))).await
    }
}

/// Drives a connection until the reply has arrived.
///
/// The request wakes the driver and the reply wakes the requester. Both are the current task, which
/// would be scheduled again. So `request` gets a no-op waker, and only the driver registers the
/// real one, for data from the server. Tokio's cooperative budget would suspend the request, which
/// nothing would resume: it is [unconstrained].
async fn drive<T>(
    driver: &mut Driver,
    mut request: Pin<&mut Unconstrained<impl Future<Output = T>>>,
) -> T {
    if let Some(answer) = request.as_mut().now_or_never() {
        return answer;
    }
    poll_fn(|cx| {
        let _ = driver.poll_unpin(cx);
        let waker = if driver.is_terminated() {
            cx.waker()
        } else {
            Waker::noop()
        };
        request.as_mut().poll(&mut Context::from_waker(waker))
    })
    .await
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// A wake-up may come before, during or after the poll, and after any delay.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_is_lost() {
        let (sender, mut asked) = mpsc::unbounded_channel::<oneshot::Sender<u32>>();
        let (echo, mut echoes) = mpsc::unbounded_channel::<oneshot::Sender<u32>>();
        // A separate task replies, at its own pace.
        tokio::spawn(async move {
            while let Some(answer) = echoes.recv().await {
                answer.send(7).unwrap();
            }
        });
        let driver = async move {
            for i in 0.. {
                let Some(answer) = asked.recv().await else {
                    return;
                };
                let (ask, told) = oneshot::channel();
                // Immediately, many times in a row, as if Tokio had nothing else to run.
                if i % 1_000 < 500 {
                    ask.send(7).unwrap()
                } else {
                    echo.send(ask).unwrap()
                }
                answer.send(told.await.unwrap()).unwrap();
            }
        };
        let mut driver = driver.boxed().fuse();
        for _ in 0..10_000 {
            let ask = async {
                let (answer, told) = oneshot::channel();
                sender.send(answer).unwrap();
                told.await
            };
            assert_eq!(drive(&mut driver, pin!(unconstrained(ask))).await, Ok(7));
        }
    }
}
