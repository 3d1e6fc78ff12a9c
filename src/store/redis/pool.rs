//! The pool's connections: bb8-redis's manager, with what a limiter needs besides.

use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, FromRedisValue, IntoConnectionInfo, RedisError, ScriptInvocation, ServerErrorKind, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::store::clock::instant;

/// bb8-redis's own manager never finds a connection broken, and relies on a ping at every checkout. This one remembers
/// whether the last use failed, so that no ping is needed.
#[derive(Debug)]
pub(super) struct Manager {
    inner: RedisConnectionManager,
    timeout: Duration,
}

impl Manager {
    pub(super) fn new(url: impl IntoConnectionInfo, timeout: Duration) -> Result<Self, RedisError> {
        Ok(Self { inner: RedisConnectionManager::new(url)?, timeout })
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

/// Hands on why a connection could not be made, which bb8 keeps from those who wait for one.
#[derive(Debug, Clone)]
pub(super) struct Failures(watch::Sender<Option<RedisError>>);

impl Failures {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Option<RedisError>> {
        self.0.subscribe()
    }
}

impl bb8::ErrorSink<RedisError> for Failures {
    fn sink(&self, error: RedisError) {
        self.0.send_replace(Some(error));
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<RedisError>> {
        Box::new(self.clone())
    }
}
