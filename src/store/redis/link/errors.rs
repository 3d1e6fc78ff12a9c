//! Converts errors of redis-rs and of Redis to errors of a store.

use std::future::Future;
use std::time::Duration;

use super::tls;
use crate::error::{ErrorKind, StoreError, printable};
use crate::store::redis::script::no_command;
use crate::util::patient;
use futures_util::FutureExt;
use redis::{ErrorKind as Kind, RedisConnectionInfo, RedisError, ServerErrorKind};

const NO_LOGIN: &str = "the server requires a password: add it to the URL, as in `redis://:password@host/`, or \
                        `redis://user:password@host/`; that of sentinels as `?sentinel_password=password`";

/// The commands whose absence ends a script. It reports the absence of others itself.
const CALLED: &str = "`TIME` (or, for `RedisStore::announce`, `ZREMRANGEBYSCORE`, `ZADD`, `ZCARD` or `PEXPIRE`; for \
                      blocks, `ZADD`, `ZREM`, `ZCARD`, `ZSCORE`, `ZPOPMIN`, `ZRANGEBYSCORE`, `ZREVRANGE` or `PEXPIREAT`; in \
                      a Redis Cluster, `MGET` or `SET`)";

/// Converts an error of redis-rs, by the fix that it needs.
pub(crate) fn error_of(error: &RedisError) -> StoreError {
    let detail = detail(error);
    if detail.contains("command called from") {
        // A script of checks calls `TIME` before any write.
        return no_command(CALLED).not_sent();
    }
    let kind = match error.kind() {
        Kind::AuthenticationFailed => ErrorKind::Authentication,
        // The connection ended in the middle of a reply.
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
        ) => ErrorKind::ClusterNode,
        _ if error.is_timeout() => ErrorKind::Timeout,
        Kind::Io => tls::problem(error).unwrap_or(ErrorKind::Unreachable),
        _ => kind_of_code(error),
    };
    let mut reason = message(error);
    if kind == ErrorKind::Refused && detail.contains("unknown command") {
        reason += ", which `RedisStore` needs: enable it; for a Redis Sentinel, use `redis+sentinel://HOST:PORT/MASTER`";
    }
    let mut result = StoreError::explained(kind, reason);
    if lacks_login(error) {
        result = result.with_message(NO_LOGIN);
    }
    if was_not_run(kind, error) {
        result = result.not_sent();
    }
    result
}

pub(super) fn detail(error: &RedisError) -> &str {
    error.detail().unwrap_or_default()
}

/// Returns the kind of a server's error that redis-rs does not know.
fn kind_of_code(error: &RedisError) -> ErrorKind {
    match error.code() {
        Some("OOM") => return ErrorKind::OutOfMemory,
        Some("WRONGPASS") => return ErrorKind::Authentication,
        Some("NOPERM") => return ErrorKind::Permission,
        _ if lacks_login(error) => return ErrorKind::Authentication,
        _ => {}
    }
    let detail = detail(error);
    // Inside a script: the wording of Redis 7.2 and later, then the earlier one.
    if detail.contains("ACL failure in script") || detail.contains("can't run this command") {
        return ErrorKind::Permission;
    }
    ErrorKind::Refused
}

/// Returns `true` if the server requires a login that the client has not sent.
fn lacks_login(error: &RedisError) -> bool {
    // Redis rejects commands with many arguments from unauthenticated clients by another error.
    error.code() == Some("NOAUTH") || detail(error).contains("unauthenticated")
}

/// Converts an error of a connection's greeting.
pub(super) fn error_of_greeting(error: &RedisError, settings: &RedisConnectionInfo) -> StoreError {
    let result = error_of(error);
    // The greeting contains the password, which the server's error might repeat.
    if error.is_io_error() || settings.password().is_none() {
        return result;
    }
    StoreError::explained(
        result.kind(),
        format!("its reply to the greeting: {}", error.category()),
    )
}

/// Maximum length of a server's line in an error, in bytes.
const MAX_LINE: usize = 200;

/// Returns the error of a server that replies to anyone with this error line. `None` if it only wants a login or another
/// command.
pub(super) fn error_of_line(line: &str) -> Option<StoreError> {
    const OF_COMMANDS: [&str; 3] = [
        "unknown command",
        "Protocol error",
        "wrong number of arguments",
    ];
    let (code, text) = line.split_once(' ').unwrap_or((line, ""));
    let is_of_login = matches!(code, "NOAUTH" | "NOPERM" | "WRONGPASS" | "NOPROTO");
    if is_of_login || OF_COMMANDS.iter().any(|words| text.contains(words)) {
        return None;
    }
    let shown = printable(line, MAX_LINE);
    if matches!(code, "LOADING" | "MASTERDOWN") {
        let message = format!("the server is not ready (`{shown}`): wait until it is");
        return Some(StoreError::new(ErrorKind::NotReady).with_message(message));
    }
    let fix = if code == "DENIED" {
        "set a password on the server and in the URL, or `protected-mode no`"
    } else if text.contains("max number of clients") {
        "raise its `maxclients`, or close some of its connections"
    } else {
        "see its configuration and its log"
    };
    let message = format!("the server closes the connection (`{shown}`): {fix}");
    Some(StoreError::new(ErrorKind::Unreachable).with_message(message))
}

/// Number of graces for a reply: enough for the task that reads it, and for the task that awaits it.
const REPLY: u32 = 2;
/// Number of graces for a connection, and for each call of the source of its credentials. Few, because their times have room
/// for delays.
pub(super) const CONNECT: u32 = 2;
/// Number of graces for several steps, such as to connect: each step waits for a thread of the runtime.
pub(crate) const STEPS: u32 = 16;

/// Returns the result of an attempt of several steps, or [`ErrorKind::Timeout`] after `time` and its
/// [graces](crate::util::Patience).
///
/// Not an `async fn`, whose future would contain the attempt twice: as an argument, and while it is
/// polled.
pub(crate) fn within<T>(
    time: Duration,
    attempt: impl Future<Output = Result<T, StoreError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    patient(time, STEPS, attempt).map(|result| match result {
        Ok(result) => result,
        Err(_) => Err(timed_out()),
    })
}

/// Returns the replies to calls, or [`ErrorKind::Timeout`] after `time` and its graces.
pub(super) fn replies_within<T>(
    time: Duration,
    replies: impl Future<Output = Result<T, RedisError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    patient(time, REPLY, replies).map(|replies| match replies {
        Ok(Ok(replies)) => Ok(replies),
        Ok(Err(error)) => Err(error_of(&error)),
        Err(_) => Err(timed_out()),
    })
}

fn timed_out() -> StoreError {
    StoreError::new(ErrorKind::Timeout)
}

/// The error of a connection that was not opened in its time.
pub(super) fn connecting_timed_out() -> StoreError {
    timed_out().with_message(
        "connecting to the server took longer than `connect_timeout`: check its load and the network, or raise \
         `connect_timeout`",
    )
}

/// Converts the error of a call that was not executed.
pub(crate) fn not_run(kind: ErrorKind, error: &RedisError) -> StoreError {
    StoreError::explained(kind, message(error)).not_sent()
}

/// Returns `true` if this error shows that a script call was not executed, so that nothing was
/// charged.
///
/// Redis rejects a call with these errors before it runs the script. Commands inside the script may
/// fail with some of them too, but the script catches those, except an error of `TIME`, which comes
/// before any write. Any other error, such as `ERR`, may have stopped the script in the middle.
fn was_not_run(kind: ErrorKind, error: &RedisError) -> bool {
    match kind {
        ErrorKind::Authentication
        | ErrorKind::Permission
        | ErrorKind::ReadOnly
        | ErrorKind::OutOfMemory
        | ErrorKind::NotReady
        | ErrorKind::ClusterNode => true,
        // Another script is running; or writes are disabled, since persistence or replicas fail.
        _ => matches!(error.code(), Some("BUSY" | "MISCONF" | "NOREPLICAS")),
    }
}

/// Returns the message of redis-rs without the command: the original would show callers' keys, and
/// repeats its text.
fn message(error: &RedisError) -> String {
    let mut text = error.to_string();
    if error.is_io_error() {
        return text;
    }
    // A server may repeat the arguments of a rejected command: `unknown command 'EVALSHA', with
    // args beginning with: 'da121a' '2' 'rl:{ann}:api:g'`. A password may be an argument too. Every
    // caller's key follows a brace.
    for mark in [", with args", "{"] {
        if let Some(end) = text.find(mark) {
            text.truncate(end);
        }
    }
    text
}
