//! What redis-rs and Redis say is wrong, as errors of a store.

use std::fmt;

use redis::{ConnectionInfo, ErrorKind as Kind, ProtocolVersion, RedisError, ServerErrorKind};

use super::tls;
use crate::store::{ErrorKind, StoreError};

/// A failure of redis-rs by what to do about it.
pub(super) fn error_of(error: &RedisError) -> StoreError {
    let kind = match error.kind() {
        Kind::AuthenticationFailed => ErrorKind::Authentication,
        Kind::Parse | Kind::UnexpectedReturnType | Kind::RESP3NotSupported => ErrorKind::Protocol,
        Kind::InvalidClientConfig => ErrorKind::Configuration,
        Kind::Server(ServerErrorKind::NoPerm) => ErrorKind::Permission,
        Kind::Server(ServerErrorKind::ReadOnly) => ErrorKind::ReadOnly,
        Kind::Server(ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown) => ErrorKind::NotReady,
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
    let told = StoreError::with_source(kind, Cause::new(error));
    if was_not_run(kind, error) { told.unsent() } else { told }
}

/// A failure to log in or to agree on the protocol.
pub(super) fn error_of_greeting(error: &RedisError, server: &ConnectionInfo) -> StoreError {
    let greeting = server.redis_settings();
    let told = error_of(error);
    // `HELLO` has the password in it, and its refusal is handed on as the server words it.
    if error.is_io_error() || greeting.password().is_none() || greeting.protocol() == ProtocolVersion::RESP2 {
        return told;
    }
    StoreError::with_source(told.kind(), Cause(format!("the server refused the greeting: {}", error.category())))
}

/// A node of a cluster has said that nobody decides a check just now.
pub(super) fn not_ready(error: &RedisError) -> StoreError {
    StoreError::with_source(ErrorKind::NotReady, Cause::new(error)).unsent()
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

/// A server that answers without TLS, where a URL asks for it.
pub(super) fn no_tls() -> StoreError {
    StoreError::with_source(
        ErrorKind::Tls,
        Cause("the server answers without TLS: write `redis://`, or its port for TLS".to_owned()),
    )
}

/// A server that answers with TLS only, where a URL does not ask for it.
pub(super) fn tls_wanted() -> StoreError {
    StoreError::new(ErrorKind::TlsWanted)
}

/// The sentinels tell of a server that says that it is no master. They may be late.
pub(super) fn not_a_master(server: &impl fmt::Display) -> StoreError {
    let cause = Cause(format!("the sentinels tell of {server}, which is no master"));
    StoreError::with_source(ErrorKind::NotReady, cause)
}

/// A server at the address of a node of the cluster that is none.
pub(super) fn other_cluster(server: &impl fmt::Display) -> StoreError {
    let cause = Cause(format!("{server} is not of this cluster any more: another one may have its address now"));
    StoreError::with_source(ErrorKind::NotReady, cause)
}

/// The same error, with the server that it is of.
pub(super) fn error_at(server: &impl fmt::Display, error: &RedisError) -> StoreError {
    let told = error_of(error);
    let at = StoreError::with_source(told.kind(), Cause(format!("{server}: {}", Cause::new(error))));
    if told.is_unsent() { at.unsent() } else { at }
}

/// What redis-rs said, without what we sent: its own error would show callers' keys, and tells its text twice.
#[derive(Debug)]
struct Cause(String);

impl Cause {
    fn new(error: &RedisError) -> Self {
        let mut text = error.to_string();
        // A server may repeat the arguments of a command that it refuses, such as Redis:
        // `unknown command 'EVALSHA', with args beginning with: 'da121a' '2' 'rl:{ann}:api:g'`.
        // A password is an argument too, and before each caller stands a brace.
        if !error.is_io_error()
            && let Some(end) = [", with args", "{"].iter().filter_map(|mark| text.find(mark)).min()
        {
            text.truncate(end);
        }
        Self(text)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Cause {}
