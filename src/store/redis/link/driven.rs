//! A connection that is driven by the task that sends a command over it.
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
use std::task::{Context, Waker};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Fuse, FusedFuture};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::task::coop::{Unconstrained, unconstrained};

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
