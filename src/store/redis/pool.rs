//! The pool's connections: bb8-redis's manager, with what a limiter needs besides.
//!
//! A connection, and whatever bb8 does for it, is driven by the tokio runtime that it was made on. So each runtime has a
//! pool of its own, which is gone with it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::{
    Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, FromRedisValue, RedisError, ScriptInvocation, ServerErrorKind,
    Value,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::store::clock::instant;
use crate::store::{Error, ErrorKind as Kind};

/// bb8-redis's own manager never finds a connection broken, and relies on a ping at every checkout. This one remembers
/// whether the last use failed, so that no ping is needed.
#[derive(Debug, Clone)]
pub(super) struct Manager {
    inner: RedisConnectionManager,
    timeout: Duration,
    tls: bool,
}

impl Manager {
    pub(super) fn new(url: ConnectionInfo, timeout: Duration) -> Result<Self, RedisError> {
        let tls = matches!(url.addr(), ConnectionAddr::TcpTls { .. });
        Ok(Self { inner: RedisConnectionManager::new(url)?, timeout, tls })
    }

    pub(super) fn is_tls(&self) -> bool {
        self.tls
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    inner: MultiplexedConnection,
    broken: bool,
    /// When it was used last.
    used: Instant,
}

impl Connection {
    /// A connection that has rested so long may have been closed by the server, or by something between.
    const RESTED: Duration = Duration::from_millis(500);

    /// Whether it may be relied on. One that has been used just now is not asked.
    pub(super) async fn is_alive(&mut self) -> bool {
        self.used.elapsed() < Self::RESTED || self.call(&redis::cmd("PING")).await.is_ok()
    }

    /// Sends one command. If it fails in a way that the next one would too, or is dropped before its reply has come,
    /// the pool does not keep the connection.
    pub(super) async fn call(&mut self, cmd: &Cmd) -> Result<Value, RedisError> {
        self.broken = true;
        let reply = match self.inner.send_packed_command(cmd).await {
            Ok(Value::ServerError(error)) => Err(error.into()),
            reply => reply,
        };
        self.broken = reply.as_ref().is_err_and(is_lasting);
        self.used = instant();
        reply
    }

    /// Runs a script of its own, which may be run again.
    pub(super) async fn invoke<T: FromRedisValue>(&mut self, call: &ScriptInvocation<'_>) -> Result<T, RedisError> {
        self.broken = true;
        let reply = call.invoke_async(&mut self.inner).await;
        self.broken = reply.as_ref().is_err_and(is_lasting);
        reply
    }

    /// Has the pool make another connection, which may lead to another server.
    pub(super) fn give_up(&mut self) {
        self.broken = true;
    }
}

/// Whether the connection itself is at fault, or leads to a server that another connection may not lead to.
fn is_lasting(error: &RedisError) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::Server(
            ServerErrorKind::NoScript
                | ServerErrorKind::ResponseError
                | ServerErrorKind::NoPerm
                | ServerErrorKind::ExecAbort
        ) | ErrorKind::Extension
    )
}

impl bb8::ManageConnection for Manager {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> Result<Connection, RedisError> {
        match tokio::time::timeout(self.timeout, self.inner.connect()).await {
            Ok(connected) => {
                let mut inner = connected?;
                // The lanes have their own, which is shorter.
                inner.set_response_timeout(self.timeout.saturating_mul(2));
                Ok(Connection { inner, broken: false, used: instant() })
            }
            Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
        }
    }

    async fn is_valid(&self, connection: &mut Connection) -> Result<(), RedisError> {
        self.inner.is_valid(&mut connection.inner).await
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.broken
    }
}

/// The connections of one runtime.
#[derive(Debug)]
pub(super) struct Pool {
    connections: bb8::Pool<Manager>,
    failures: Failures,
}

impl Pool {
    /// A pool of at most so many, each of which is made when it is needed.
    pub(super) fn new(manager: Manager, max: usize) -> Self {
        let failures = Failures(watch::Sender::new(None));
        let connections = bb8::Pool::builder()
            .max_size(u32::try_from(max).unwrap_or(u32::MAX))
            .test_on_check_out(false)
            .retry_connection(false)
            .connection_timeout(manager.timeout)
            // Without these bb8 runs no task of its own.
            .idle_timeout(None)
            .max_lifetime(None)
            .error_sink(Box::new(failures.clone()))
            .build_unchecked(manager);
        Self { connections, failures }
    }

    /// For [`checkout`](Self::checkout).
    pub(super) fn failures(&self) -> watch::Receiver<Option<RedisError>> {
        self.failures.0.subscribe()
    }

    /// A connection that is alive, or why there is none.
    pub(super) async fn checkout(
        &self,
        failures: &mut watch::Receiver<Option<RedisError>>,
    ) -> Result<bb8::PooledConnection<'_, Manager>, Error> {
        loop {
            let mut connection = self.get(failures).await?;
            if connection.is_alive().await {
                return Ok(connection);
            }
        }
    }

    /// A connection, or why there is none: bb8 alone would leave us waiting after a failure to connect.
    async fn get(
        &self,
        failures: &mut watch::Receiver<Option<RedisError>>,
    ) -> Result<bb8::PooledConnection<'_, Manager>, Error> {
        failures.mark_unchanged();
        let mut getting = pin!(self.connections.get());
        let got = {
            let mut failing = pin!(failures.changed());
            poll_fn(|cx| match getting.as_mut().poll(cx) {
                Poll::Ready(got) => Poll::Ready(Some(got)),
                Poll::Pending => failing.as_mut().poll(cx).map(|_| None),
            })
            .await
        };
        match got {
            Some(Ok(connection)) => Ok(connection),
            Some(Err(bb8::RunError::User(error))) => Err(super::error(&error)),
            Some(Err(bb8::RunError::TimedOut)) => Err(Error::new(Kind::Timeout)),
            None => Err(match &*failures.borrow() {
                Some(error) => super::error(error),
                None => Error::new(Kind::Unreachable),
            }),
        }
    }
}

/// Hands on why a connection could not be made, which bb8 keeps from those who wait for one.
#[derive(Debug, Clone)]
struct Failures(watch::Sender<Option<RedisError>>);

impl bb8::ErrorSink<RedisError> for Failures {
    fn sink(&self, error: RedisError) {
        self.0.send_replace(Some(error));
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<RedisError>> {
        Box::new(self.clone())
    }
}
