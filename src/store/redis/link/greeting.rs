//! The greeting of a new connection: its login, protocol, database and names, in one write.
//!
//! The greeting of redis-rs sets no name of the connection. So it is left out, and this one is sent as the connection's
//! first commands.

use redis::{Cmd, ProtocolVersion, RedisConnectionInfo, RedisError, Value, cmd};

use super::errors::{detail, error_of, error_of_greeting};
use super::pool::Driven;
use crate::error::{ConfigError, ErrorKind, StoreError};

/// The name of this crate in `CLIENT LIST`, and its version.
const LIBRARY: &str = env!("CARGO_PKG_NAME");
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The default name of a connection. Redis 7.0 and earlier show no library.
const DEFAULT_NAME: &str = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"));

/// Returns the error of a connection name that Redis would reject.
pub(crate) fn check_client_name(name: &str) -> Result<(), ConfigError> {
    if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    let fix = "use ASCII letters, digits and punctuation without blanks, such as `shop-api`";
    Err(ConfigError::invalid("client name", name, fix))
}

/// Returns the settings of a connection to which redis-rs sends no greeting.
pub(super) fn without_greeting() -> RedisConnectionInfo {
    RedisConnectionInfo::default().set_skip_set_lib_name()
}

/// Sends the greeting. `name` is the application's name for its connections.
pub(super) async fn greet(
    connection: &mut Driven,
    settings: &RedisConnectionInfo,
    name: Option<&str>,
) -> Result<(), StoreError> {
    let greeting = Greeting::new(settings, name);
    let replies = connection.send_each(&greeting.commands).await;
    for (place, reply) in replies.into_iter().enumerate() {
        match reply {
            Err(error) => return Err(error_of_greeting(&error, settings)),
            Ok(Value::ServerError(error)) => greeting.check(place, &error.into(), settings)?,
            // An error that shows no reply: a proxy might repeat the password.
            Ok(reply) if greeting.login == Some(place) && !is_login_reply(&reply, settings) => {
                return Err(StoreError::new(ErrorKind::Protocol));
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

struct Greeting {
    commands: Vec<Cmd>,
    /// The place of the login.
    login: Option<usize>,
    /// The place of the database's selection.
    database: Option<usize>,
}

impl Greeting {
    fn new(settings: &RedisConnectionInfo, name: Option<&str>) -> Self {
        let mut commands = vec![];
        let mut login_at = None;
        if let Some(login) = login(settings) {
            login_at = Some(commands.len());
            commands.push(login);
        }
        let mut database = None;
        if settings.db() != 0 {
            database = Some(commands.len());
            commands.push(cmd("SELECT").arg(settings.db()).take());
        }
        // The library may be the application's, or none, as for a proxy that closes a connection at `CLIENT`.
        let mut default_name = None;
        if !settings.skip_set_lib_name() {
            default_name = Some(DEFAULT_NAME);
            let library = settings.lib_name().unwrap_or(LIBRARY);
            commands.push(set_info("LIB-NAME", library));
            let version = settings.lib_ver().unwrap_or(VERSION);
            commands.push(set_info("LIB-VER", version));
        }
        if let Some(name) = name.or(default_name) {
            commands.push(cmd("CLIENT").arg("SETNAME").arg(name).take());
        }
        Self {
            commands,
            login: login_at,
            database,
        }
    }

    /// Returns the error of an error reply, unless the connection is worth keeping without what it has rejected.
    fn check(
        &self,
        place: usize,
        error: &RedisError,
        settings: &RedisConnectionInfo,
    ) -> Result<(), StoreError> {
        if self.login == Some(place) {
            return Err(login_error(error, settings));
        }
        if self.database == Some(place) {
            return Err(database_error(error, settings.db()));
        }
        if is_about_names(error) {
            return Ok(());
        }
        Err(error_of_greeting(error, settings))
    }
}

/// Returns the error of a database that the server does not select.
fn database_error(error: &RedisError, database: i64) -> StoreError {
    let detail = detail(error);
    if detail.contains("out of range") {
        let reason = format!(
            "it has no database {database}: use one below its `databases`, which are 0 to 15 by default, or a `prefix` in \
             database 0"
        );
        return StoreError::explained(ErrorKind::Refused, reason);
    }
    if detail.contains("cluster mode") {
        return StoreError::new(ErrorKind::ClusterNode);
    }
    error_of(error)
}

fn login(settings: &RedisConnectionInfo) -> Option<Cmd> {
    let password = settings.password();
    if is_resp2(settings) {
        return Some(auth(settings.username(), password?));
    }
    let mut hello = cmd("HELLO");
    hello.arg(3);
    if let Some(password) = password {
        let user = settings.username().unwrap_or("default");
        hello.arg("AUTH").arg(user).arg(password);
    }
    Some(hello)
}

/// The command that logs in as this user, or as the default one.
pub(super) fn auth(user: Option<&str>, password: &str) -> Cmd {
    cmd("AUTH").arg(user).arg(password).take()
}

fn set_info(field: &str, value: &str) -> Cmd {
    cmd("CLIENT").arg("SETINFO").arg(field).arg(value).take()
}

fn is_resp2(settings: &RedisConnectionInfo) -> bool {
    settings.protocol() == ProtocolVersion::RESP2
}

fn is_login_reply(reply: &Value, settings: &RedisConnectionInfo) -> bool {
    match reply {
        Value::Okay => is_resp2(settings),
        Value::Map(_) | Value::Array(_) => !is_resp2(settings),
        _ => false,
    }
}

fn login_error(error: &RedisError, settings: &RedisConnectionInfo) -> StoreError {
    let detail = detail(error);
    if !is_resp2(settings) && detail.contains("unknown command") {
        return StoreError::new(ErrorKind::Protocol).with_message(
            "the server does not support RESP3: remove `protocol=resp3` from the URL",
        );
    }
    if is_resp2(settings) && error.code() == Some("ERR") {
        // A server without users, and some proxies, reject a password with a general error.
        let kind = if detail.contains("max number of clients") {
            ErrorKind::Unreachable
        } else {
            ErrorKind::Authentication
        };
        return StoreError::explained(kind, "the server rejected AUTH");
    }
    error_of_greeting(error, settings)
}

/// Returns `true` if an error reply to a name concerns only this name: the command does not exist, or the user may not
/// run it. Other errors reject the whole connection.
fn is_about_names(error: &RedisError) -> bool {
    matches!(error.code(), Some("ERR" | "NOPERM" | "NOAUTH"))
}
