//! A real Redis for a test: on a free port and with its own directory, killed with the test.

#![allow(unreachable_pub, reason = "shared with tests outside of the crate")]
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(
    clippy::disallowed_methods,
    reason = "a real server is waited for in real time"
)]

use std::error::Error as _;
use std::ffi::OsString;
use std::future::Future;
use std::mem;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{ErrorKind, StoreError};
use tower_redis_ratelimit::strategy::Refill;
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, RedisStore, Strategy, redis};

pub struct RedisServer {
    child: Child,
    port: u16,
    args: Vec<String>,
    dir: TempDir,
}

impl RedisServer {
    /// Starts `redis-server`, and waits until it responds.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts it with more arguments, such as `["--maxmemory", "2mb"]`.
    pub fn start_with(args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        // Another process may take the port before redis-server does: then try another one.
        for _ in 0..20 {
            let dir = tempfile::tempdir().expect("a folder for redis-server");
            let port = free_port();
            let mut server = Self {
                child: spawn(port, &args, &dir),
                port,
                args: args.clone(),
                dir,
            };
            if server.wait_until_up() {
                return server;
            }
        }
        panic!("redis-server did not come up on any of 20 ports");
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// A store with a timeout that a busy machine does not exceed.
    pub fn store(&self) -> RedisStore {
        RedisStore::builder(self.url())
            .timeout(Duration::from_secs(60))
            .connect_lazy()
            .expect("a valid URL")
    }

    /// Kills it as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts the server again on its port, after a `kill`.
    pub fn restart(&mut self) {
        self.child = spawn(self.port, &self.args, &self.dir);
        assert!(
            self.wait_until_up(),
            "redis-server did not come up again on port {}",
            self.port
        );
    }

    /// Starts it again with more arguments, after a `kill`.
    pub fn restart_with(&mut self, args: &[&str]) {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self.restart();
    }

    /// Stops it without closing anything, as a hung machine would.
    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    pub fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "kill {signal} failed"
        );
    }

    /// Opens a direct connection, for inspection and interference.
    pub async fn connection(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.url()).expect("a URL");
        // Long enough for a busy machine.
        let patience = Some(Duration::from_secs(20));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(patience)
            .set_response_timeout(patience);
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .expect("a connection")
    }

    /// Creates the user `limiter` with these rights to the keys of the default prefix. Returns a URL with its login.
    pub async fn url_with_rights(&self, rights: &str) -> String {
        let user = format!("limiter on >hunter2 resetkeys ~rl:* -@all {rights}");
        let _: String = self.command(&format!("ACL SETUSER {user}")).await;
        format!("redis://limiter:hunter2@127.0.0.1:{}/", self.port())
    }

    /// Sends one command, such as `"SCRIPT FLUSH"`.
    pub async fn command<T: redis::FromRedisValue>(&self, command: &str) -> T {
        cmd(command)
            .query_async(&mut self.connection().await)
            .await
            .expect(command)
    }

    /// Returns the number of times that the server has run a command, such as `evalsha`.
    pub async fn calls(&self, command: &str) -> u64 {
        let stats: String = self.command("INFO commandstats").await;
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|line| line.split(',').next())
            .map_or(0, |calls| calls.parse().expect("a count"))
    }

    /// Returns a number from INFO, such as `used_memory` of `memory`.
    pub async fn info(&self, section: &str, field: &str) -> u64 {
        let info: String = self.command(&format!("INFO {section}")).await;
        let value = info
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.expect(field).trim().parse().expect("a number")
    }

    /// Returns `true` if the server that responds on the port is this one.
    fn wait_until_up(&mut self) -> bool {
        let end = Instant::now() + Duration::from_secs(20);
        let client = redis::Client::open(self.url()).expect("a URL");
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            let answer = client
                .get_connection()
                .and_then(|mut connection| redis::cmd("INFO").arg("server").query(&mut connection));
            match answer {
                Ok::<String, _>(info) => {
                    return info.contains(&format!("process_id:{}\r", self.child.id()));
                }
                // The server has started, and requires a password.
                Err(error)
                    if error
                        .code()
                        .is_some_and(|code| code == "NOAUTH" || code == "NOPERM") =>
                {
                    return true;
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        false
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the `redis-server` to run: the binary in the environment variable, or the one on the
/// PATH.
fn binary() -> OsString {
    std::env::var_os("REDIS_SERVER").unwrap_or_else(|| "redis-server".into())
}

fn spawn(port: u16, args: &[String], dir: &TempDir) -> Child {
    let binary = binary();
    let child = Command::new(&binary)
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
        ])
        .arg(dir.path())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    match child {
        Ok(child) => child,
        Err(error) if std::env::var_os("REDIS_SERVER").is_some() => {
            panic!("REDIS_SERVER={binary:?}: {error}")
        }
        Err(error) => panic!(
            "the tests need `redis-server` on the PATH: `cargo xtask test` installs it ({error})"
        ),
    }
}

/// Parses a command, such as `"SCRIPT FLUSH"`.
pub fn cmd(command: &str) -> redis::Cmd {
    let mut cmd = redis::Cmd::new();
    cmd.arg(command.split(' ').collect::<Vec<_>>());
    cmd
}

/// Returns a port that is currently free.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// Takes a port until the process ends, and does not listen at it: connections to it are refused.
pub fn unused_port() -> u16 {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(([127, 0, 0, 1], 0).into())
        .expect("a free port");
    let port = socket.local_addr().expect("its address").port();
    mem::forget(socket);
    port
}

/// Waits until the condition holds; fails if it does not within a minute, which a busy machine may need.
pub async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition().await {
        assert!(Instant::now() < end, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Asserts that the text of a store's error names the server and the fix, does not repeat its cause, and contains no secret.
#[track_caller]
pub fn assert_helpful(error: &StoreError, kind: ErrorKind, remedy: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    let text = error.to_string();
    assert!(text.contains(remedy), "{text:?} lacks {remedy:?}");
    let is_named = ["127.0.0.1:", "localhost:", "redis.invalid:6379 "]
        .iter()
        .any(|host| text.contains(&format!("the server {host}")));
    let is_of_none = matches!(kind, ErrorKind::Configuration | ErrorKind::NoRuntime);
    assert!(is_named || is_of_none, "{text:?} names no server");
    if let Some(cause) = error.source() {
        assert!(
            !text.contains(&cause.to_string()),
            "{text:?} repeats its cause {cause}"
        );
    }
    assert!(
        !format!("{error:?} {error}").contains("hunter2"),
        "{error:?} shows the password"
    );
}

/// A take of this caller, with GCRA under a quota such as `10/s`.
pub fn check(caller: &str, quota: &str) -> Check {
    Check::take(Key::new(caller), &policy(Strategy::Gcra, quota), 1)
}

/// A policy named `test`.
pub fn policy(strategy: Strategy, quota: &str) -> Policies {
    Policy::new("test", strategy, quota)
        .expect("a policy")
        .into()
}

/// A policy that may be charged ahead for `time`, and counts in Redis like [`policy`] with `limit`
/// per 100 days.
pub fn leased(strategy: Strategy, limit: u32, time: Duration) -> Policies {
    let period = Duration::from_secs(100 * 86_400);
    let quota = if is_gradual(strategy) {
        Quota::per(limit, period).burst(limit + 1)
    } else {
        Quota::per(limit, period - time)
    };
    Policy::new("test", strategy, quota)
        .and_then(|policy| policy.leased(time))
        .expect("a policy")
        .into()
}

/// Returns `true` if the strategy frees charges gradually.
pub fn is_gradual(strategy: Strategy) -> bool {
    matches!(
        strategy,
        Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy)
    )
}

/// All strategies.
pub const STRATEGIES: [Strategy; Strategy::ALL.len()] = *Strategy::ALL.first_chunk().unwrap();
