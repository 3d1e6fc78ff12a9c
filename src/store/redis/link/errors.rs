//! What redis-rs and Redis say is wrong, as errors of a store.

use std::future::Future;
use std::time::Duration;

use redis::{ConnectionInfo, ErrorKind as Kind, ProtocolVersion, RedisError, ServerErrorKind};
use tokio::time::timeout;

use super::tls;
use crate::error::{ErrorKind, StoreError};

/// A failure of redis-rs by what to do about it.
pub(crate) fn error_of(error: &RedisError) -> StoreError {
    let kind = match error.kind() {
        Kind::AuthenticationFailed => ErrorKind::Authentication,
        // The connection ended within a reply.
        Kind::Parse if error.to_string().contains("end of input") => ErrorKind::Unreachable,
        Kind::Parse | Kind::UnexpectedReturnType | Kind::RESP3NotSupported => ErrorKind::Protocol,
        Kind::InvalidClientConfig => ErrorKind::Configuration,
        Kind::Server(ServerErrorKind::NoPerm) => ErrorKind::Permission,
        Kind::Server(ServerErrorKind::ReadOnly) => ErrorKind::ReadOnly,
        Kind::Server(ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown) => {
            ErrorKind::NotReady
        }
        Kind::Server(
            ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::CrossSlot,
        ) => ErrorKind::Cluster,
        _ if error.is_timeout() => ErrorKind::Timeout,
        Kind::Io => tls::problem(error).unwrap_or(ErrorKind::Unreachable),
        _ => match error.code() {
            Some("OOM") => ErrorKind::OutOfMemory,
            Some("NOAUTH" | "WRONGPASS") => ErrorKind::Authentication,
            Some("NOPERM") => ErrorKind::Permission,
            _ => match error.detail().unwrap_or_default() {
                // Redis takes no command of many arguments from whom it does not know.
                detail if detail.contains("unauthenticated") => ErrorKind::Authentication,
                // In a script: from Redis 7.2 on, and before.
                detail if detail.contains("ACL failure in script") => ErrorKind::Permission,
                detail if detail.contains("can't run this command") => ErrorKind::Permission,
                _ => ErrorKind::Refused,
            },
        },
    };
    let mut reason = said(error);
    if kind == ErrorKind::Refused
        && error
            .detail()
            .is_some_and(|text| text.contains("unknown command"))
    {
        reason += ", which `RedisStore` needs: allow it; or, to a Redis Sentinel, write `redis+sentinel://HOST:PORT/MASTER`";
    }
    let told = StoreError::explained(kind, reason);
    if was_not_run(kind, error) {
        told.unsent()
    } else {
        told
    }
}

/// A failure to log in or to agree on the protocol.
pub(crate) fn error_of_greeting(error: &RedisError, server: &ConnectionInfo) -> StoreError {
    let greeting = server.redis_settings();
    let told = error_of(error);
    // `HELLO` has the password in it, and its refusal is handed on as the server words it.
    if error.is_io_error()
        || greeting.password().is_none()
        || greeting.protocol() == ProtocolVersion::RESP2
    {
        return told;
    }
    StoreError::explained(
        told.kind(),
        format!("its answer to the greeting: {}", error.category()),
    )
}

/// What comes of this in time, or [`ErrorKind::Timeout`].
pub(crate) async fn within<T>(
    time: Duration,
    attempt: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    timeout(time, attempt)
        .await
        .unwrap_or_else(|_| Err(StoreError::new(ErrorKind::Timeout)))
}

/// A call that was not run has failed like this, which is a failure of this kind.
pub(crate) fn not_run(kind: ErrorKind, error: &RedisError) -> StoreError {
    StoreError::explained(kind, said(error)).unsent()
}

/// Whether a script call of a check that failed like this was not run, so that nothing was charged.
///
/// Redis refuses a call with these errors before it runs the script. The commands inside the script may meet some of them
/// too, but it catches those; all but that of `TIME`, which comes before anything is written. Any other error, such as
/// `ERR`, may have stopped the script half-way.
fn was_not_run(kind: ErrorKind, error: &RedisError) -> bool {
    match kind {
        ErrorKind::Authentication
        | ErrorKind::Permission
        | ErrorKind::ReadOnly
        | ErrorKind::OutOfMemory
        | ErrorKind::NotReady
        | ErrorKind::Cluster => true,
        // Another script runs already; or no writes are taken, without a disk or replicas to write to.
        _ => matches!(error.code(), Some("BUSY" | "MISCONF" | "NOREPLICAS")),
    }
}

/// What redis-rs said, without what we sent: its own error would show callers' keys, and tells its text twice.
fn said(error: &RedisError) -> String {
    let mut text = error.to_string();
    // A server may repeat the arguments of a command that it refuses, such as Redis:
    // `unknown command 'EVALSHA', with args beginning with: 'da121a' '2' 'rl:{ann}:api:g'`.
    // A password is an argument too, and before each caller stands a brace.
    if !error.is_io_error()
        && let Some(end) = [", with args", "{"]
            .iter()
            .filter_map(|mark| text.find(mark))
            .min()
    {
        text.truncate(end);
    }
    text
}
