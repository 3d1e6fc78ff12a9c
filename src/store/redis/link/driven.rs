//! A connection that the task that asks over it drives itself.
//!
//! Redis-rs would have a task for each connection, which writes what is asked and hands on the reply: two more turns of
//! the runtime for a call. Where more than three tasks in a row wake each other, tokio also wakes another thread to take
//! a part of the work, which takes longer than the work where one request comes at a time.
//!
//! So nobody reads while nobody asks: whoever is about to ask looks first whether the connection was lost meanwhile.

use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Waker};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Fuse, FusedFuture};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::task::unconstrained;

/// What reads and writes a connection, until that is lost.
pub(super) type Driver = Fuse<BoxFuture<'static, ()>>;

/// A connection, with what reads and writes it; or nothing, where a task of redis-rs does.
pub(crate) struct Driven {
    pub(super) connection: MultiplexedConnection,
    pub(super) driver: Driver,
}

impl Driven {
    /// Whether it was lost while nobody asked, as far as this runtime has been told. Also takes the waker of who asked
    /// last from the driver, so that it wakes nobody when it is asked.
    pub(super) fn is_lost(&mut self) -> bool {
        (&mut self.driver).now_or_never().is_some()
    }

    /// As redis-rs calls it.
    pub(crate) async fn send_packed_command(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        drive(
            &mut self.driver,
            self.connection.send_packed_command(command),
        )
        .await
    }

    /// The replies to all commands of a pipeline.
    pub(crate) async fn send_packed_commands(
        &mut self,
        pipeline: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        drive(
            &mut self.driver,
            self.connection
                .send_packed_commands(pipeline, 0, pipeline.len()),
        )
        .await
    }
}

/// Drives a connection until the answer is there.
///
/// To ask wakes the driver, and its answer wakes who asks. Both are this task, which runs just then: it would be
/// scheduled once more. So neither gets to know its waker but the driver, for what comes from the server.
async fn drive<T>(driver: &mut Driver, asking: impl Future<Output = T>) -> T {
    // Tokio would interrupt what has no waker, and not go on with it.
    let mut asking = pin!(unconstrained(asking));
    if let Some(answer) = asking.as_mut().now_or_never() {
        return answer;
    }
    poll_fn(|cx| {
        let _ = driver.poll_unpin(cx);
        let waker = if driver.is_terminated() {
            cx.waker()
        } else {
            Waker::noop()
        };
        asking.as_mut().poll(&mut Context::from_waker(waker))
    })
    .await
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// Whether it comes before, while or after the task is polled, and however long that goes on.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_is_lost() {
        let (sender, mut asked) = mpsc::unbounded_channel::<oneshot::Sender<u32>>();
        let (echo, mut echoes) = mpsc::unbounded_channel::<oneshot::Sender<u32>>();
        // Something else answers, at its own time.
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
                // At once for many times, as if tokio need not run anything else.
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
            assert_eq!(drive(&mut driver, ask).await, Ok(7));
        }
    }
}
