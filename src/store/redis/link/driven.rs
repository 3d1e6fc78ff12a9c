//! A connection that the task that asks over it drives itself.
//!
//! Redis-rs has a task for each connection, which writes what is asked and hands on the reply. So a call takes two more
//! turns of the runtime; and where more than three tasks in a row wake each other, tokio wakes another thread to take a
//! part of the work. That takes longer than the work, where one request comes at a time.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, Value};

/// A connection, with what reads and writes it.
pub(crate) struct Driven {
    connection: MultiplexedConnection,
    driver: Driver,
}

/// What reads and writes a connection, while somebody asks.
struct Driver {
    /// None once the connection is lost, or where a task of redis-rs drives it.
    future: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    asker: Arc<Asker>,
    /// Wakes the asker.
    waker: Waker,
}

/// The task that asks.
#[derive(Default)]
struct Asker {
    task: AtomicWaker,
    /// Whether it is being polled. What it then does wakes itself, as to ask wakes the driver: it goes round once more,
    /// and the runtime need not know.
    is_polled: AtomicBool,
    is_woken: AtomicBool,
}

impl Driven {
    /// A connection with its driver, if that is no task.
    pub(super) fn new(
        connection: MultiplexedConnection,
        future: Option<impl Future<Output = ()> + Send + 'static>,
    ) -> Self {
        let asker = Arc::<Asker>::default();
        let future = future.map(|future| Box::pin(future) as _);
        let waker = Arc::clone(&asker).into();
        Self { connection, driver: Driver { future, asker, waker } }
    }

    /// As redis-rs calls it.
    pub(crate) async fn send_packed_command(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        self.driver.drive(self.connection.send_packed_command(command)).await
    }

    /// The replies to all commands of a pipeline.
    pub(crate) async fn send_packed_commands(&mut self, pipeline: &Pipeline) -> Result<Vec<Value>, RedisError> {
        self.driver.drive(self.connection.send_packed_commands(pipeline, 0, pipeline.len())).await
    }
}

impl fmt::Debug for Driven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driven").field(&self.connection).finish()
    }
}

impl Driver {
    /// Drives the connection until the answer is there.
    async fn drive<T>(&mut self, asking: impl Future<Output = T>) -> T {
        let mut asking = pin!(asking);
        poll_fn(|cx| {
            let Self { future, asker, waker } = self;
            asker.task.register(cx.waker());
            asker.is_polled.store(true, SeqCst);
            let own = &mut Context::from_waker(waker);
            let polled = loop {
                asker.is_woken.store(false, SeqCst);
                if let answer @ Poll::Ready(_) = asking.as_mut().poll(own) {
                    break answer;
                }
                if future.as_mut().is_some_and(|driver| driver.as_mut().poll(own).is_ready()) {
                    // What is asked learns of it by this.
                    *future = None;
                } else if !asker.is_woken.load(SeqCst) {
                    break Poll::Pending;
                }
            };
            asker.is_polled.store(false, SeqCst);
            if polled.is_pending() && asker.is_woken.load(SeqCst) {
                cx.waker().wake_by_ref();
            }
            polled
        })
        .await
    }
}

impl Wake for Asker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, SeqCst);
        if !self.is_polled.load(SeqCst) {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// Whether it comes before, while or after the task is polled.
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
        let future: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            while let Some(answer) = asked.recv().await {
                let (ask, told) = oneshot::channel();
                echo.send(ask).unwrap();
                answer.send(told.await.unwrap()).unwrap();
            }
        });
        let asker = Arc::<Asker>::default();
        let mut driver = Driver { future: Some(future), waker: Arc::clone(&asker).into(), asker };
        for _ in 0..10_000 {
            let ask = async {
                let (answer, told) = oneshot::channel();
                sender.send(answer).unwrap();
                told.await
            };
            assert_eq!(driver.drive(ask).await, Ok(7));
        }
    }
}
