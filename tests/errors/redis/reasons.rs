//! A server that accepts a connection and then refuses to serve it says why. The error shows that line.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{ErrorKind, Store, StoreError};

use crate::support::{RedisServer, assert_helpful, check, until};

/// What happens after the line of a server.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    Closes,
    /// Waits, and replies to nothing.
    Waits,
}

/// Returns the address of a server that sends this line to each client.
async fn refusing(line: &str, then: Then) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let line = format!("{line}\r\n");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let line = line.clone();
            tokio::spawn(async move {
                let _ = stream.write_all(line.as_bytes()).await;
                let mut ignored = vec![];
                while then == Then::Waits
                    && stream
                        .read_buf(&mut ignored)
                        .await
                        .is_ok_and(|read| read > 0)
                {}
            });
        }
    });
    address
}

async fn refused(url: String) -> StoreError {
    RedisStore::connect(url).await.unwrap_err()
}

const DENIED: &str = "DENIED Redis is running in protected mode";
const CLIENTS: &str = "ERR max number of clients reached";
const LOADING: &str = "LOADING Redis is loading the dataset in memory";

/// Returns the kind of the error that shows this line, and its fix.
fn expected(line: &str) -> (ErrorKind, String) {
    let (kind, fix) = match line {
        DENIED => (ErrorKind::Unreachable, "set a password on the server"),
        CLIENTS => (ErrorKind::Unreachable, "raise its `maxclients`"),
        LOADING => (ErrorKind::NotReady, "wait until it is"),
        _ => (ErrorKind::Unreachable, "see its configuration"),
    };
    (kind, format!("(`{line}`): {fix}"))
}

/// Also after a login, whose reply the line seems to be.
#[tokio::test]
async fn the_line_is_shown() {
    for line in [DENIED, CLIENTS, LOADING, "NEW and unknown"] {
        let address = refusing(&format!("-{line}"), Then::Closes).await;
        for login in ["", ":hunter2@", "limiter:hunter2@"] {
            for rest in ["/", "/3", "/?protocol=resp3"] {
                let error = refused(format!("redis://{login}{address}{rest}")).await;
                let (kind, text) = expected(line);
                assert_helpful(&error, kind, &text);
            }
        }
    }
}

/// A proxy may keep the connection. The line is found within the time to connect.
#[tokio::test]
async fn the_line_of_a_server_that_waits_is_shown() {
    for line in [DENIED, LOADING] {
        let address = refusing(&format!("-{line}"), Then::Waits).await;
        let (kind, text) = expected(line);
        assert_helpful(&refused(format!("redis://{address}")).await, kind, &text);
    }
}

/// A line may be long, and contain anything.
#[tokio::test]
async fn the_line_is_short_and_printable() {
    let long = format!("-DENIED \u{1b}[31m\u{7}\u{85}caf\u{e9} {}", "x".repeat(600));
    let address = refusing(&long, Then::Closes).await;
    let text = refused(format!("redis://{address}")).await.to_string();
    let shown = text.split('`').nth(1).unwrap();
    let start = "DENIED \\u{1b}[31m\\u{7}\\u{85}caf\u{e9} xxx";
    let line = shown.strip_suffix('\u{2026}').unwrap();
    assert!(line.starts_with(start) && line.len() == 200, "{shown}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

/// A server with a free place again is used.
#[tokio::test]
async fn a_server_has_too_many_clients() {
    let server = RedisServer::start();
    let other = server.connection().await;
    let _: String = server.command("CONFIG SET maxclients 1").await;
    until("the connection of the command is gone", async || {
        let error = RedisStore::connect(server.url()).await.unwrap_err();
        let text = "(`ERR max number of clients reached`): raise its `maxclients`";
        assert_helpful(&error, ErrorKind::Unreachable, text);
        true
    })
    .await;
    drop(other);
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    until("it connects", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;
}

/// A refusal also has its reason after a connection has worked.
#[tokio::test]
async fn a_later_refusal_has_its_reason() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    let mut other = server.connection().await;
    let mut command = async |command: &str| {
        let cmd = crate::support::cmd(command);
        other.send_packed_command(&cmd).await.unwrap()
    };
    command("CONFIG SET maxclients 1").await;
    command("CLIENT KILL TYPE normal SKIPME yes").await;
    until("it is reported", async || {
        let error = store.check(check("ann", "10/s")).await.unwrap_err();
        error
            .to_string()
            .contains("(`ERR max number of clients reached`)")
    })
    .await;
    command("CONFIG SET maxclients 100").await;
    until("it connects", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;
}

/// Redis serves clients of other machines only with a password.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_server_is_in_protected_mode() {
    let server = RedisServer::start();
    let url = crate::devices::from_elsewhere(server.port()).await;
    let error = RedisStore::connect(url).await.unwrap_err();
    let line = "(`DENIED Redis is running in protected mode because protected mode is enabled";
    assert_helpful(&error, ErrorKind::Unreachable, line);
    let text = error.to_string();
    assert!(
        text.ends_with("`): set a password on the server and in the URL, or `protected-mode no`"),
        "{text}"
    );
}
