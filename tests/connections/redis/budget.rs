//! Connecting may take longer than a check waits.

use std::io::Write;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{AnyStore, ErrorKind, RedisStoreBuilder, Store, StoreConfig};

use crate::devices::holding;
use crate::support::{RedisServer, assert_helpful, check, until};

const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(20);

fn builder(url: &str) -> RedisStoreBuilder {
    RedisStore::builder(url)
        .connections(NonZeroUsize::MIN)
        .timeout(SHORT)
        .connect_timeout(LONG)
}

/// Returns the number of connections, without that of this command.
async fn connections(server: &RedisServer) -> usize {
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    clients.lines().count() - 1
}

/// Each check waits for the timeout, and the connection that the first one began is used in the end.
#[tokio::test]
async fn checks_do_not_begin_connecting_again() {
    let server = RedisServer::start();
    let (url, holds) = holding(&server).await;
    holds.send_replace(true);
    let store = builder(&url).connect_lazy().unwrap();
    for _ in 0..5 {
        let error = store.check(check("ann", "10/h")).await.unwrap_err();
        assert_helpful(&error, ErrorKind::Timeout, "still connecting to the server");
        assert!(error.is_not_sent(), "{error:?}");
    }
    until("it is connected", async || connections(&server).await > 0).await;
    assert_eq!(connections(&server).await, 1);
    holds.send_replace(false);
    until("Redis decides", async || {
        store.check(check("bob", "10000/h")).await.is_ok()
    })
    .await;
    assert_eq!(connections(&server).await, 1);
    let charged = store.check(check("ann", "10/h")).await.unwrap();
    assert_eq!(charged.remaining(), 9, "a check that failed was sent");
}

/// Accepts connections, and never replies.
fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    (listener, url)
}

/// `connect` waits for longer than a check.
#[tokio::test]
async fn the_error_names_the_connect_timeout() {
    let (_listener, url) = silent();
    let builder = builder(&url).connect_timeout(2 * SHORT);
    let error = builder.connect().await.unwrap_err();
    assert_helpful(&error, ErrorKind::Timeout, "raise `connect_timeout`");
}

/// A check that does not wait for the end of a failing try learns the reason of the last one.
#[tokio::test]
async fn the_last_reason_is_reported() {
    let (_listener, url) = silent();
    let store = builder(&url).connect_timeout(2 * SHORT);
    let store = store.connect_lazy().unwrap();
    let failure = async || store.check(check("ann", "10/s")).await.unwrap_err();
    let has_reason = async || failure().await.to_string().contains("took longer than");
    until("a try has failed", has_reason).await;
    for _ in 0..10 {
        assert!(has_reason().await, "another try is under way");
    }
}

/// Repeats these bytes as fast as a client reads them. The receiver learns when a client closes the connection.
fn flooding(bytes: &str) -> (String, UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let chunk = bytes.repeat(65_536 / bytes.len());
    let (closes, closed) = unbounded_channel();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let (chunk, closes) = (chunk.clone(), closes.clone());
            thread::spawn(move || {
                while stream.write_all(chunk.as_bytes()).is_ok() {}
                let _ = closes.send(());
            });
        }
    });
    (url, closed)
}

/// A connection is closed in time if its server never stops sending data while it is opened.
#[tokio::test]
async fn an_endless_reply_ends_with_the_time_to_connect() {
    for bytes in [
        "+x",
        "+x\r\n",
        "*9223372036854775807\r\n",
        "$9223372036854775807\r\n",
    ] {
        let (url, mut closed) = flooding(bytes);
        let builder = builder(&url).connect_timeout(2 * SHORT);
        let connecting = timeout(LONG, builder.connect()).await;
        let error = connecting.expect(bytes).unwrap_err();
        assert!(error.to_string().len() < 1_000, "{bytes:?}: {error}");
        let closed = timeout(LONG, closed.recv()).await;
        assert_eq!(closed, Ok(Some(())), "{bytes:?}: is closed");
    }
}

#[tokio::test]
async fn a_dropped_store_stops_connecting() {
    let (_listener, url) = silent();
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let store = builder(&url).connect_timeout(4 * SHORT);
    let store = store.connect_lazy().unwrap();
    store.check(check("ann", "10/s")).await.unwrap_err();
    assert!(tasks() > before, "it connects");
    drop(store);
    until("no task is left", async || tasks() <= before).await;
}

#[test]
fn a_connect_timeout_below_the_timeout_is_refused() {
    let fix = "a connect_timeout of 40ms below the timeout of 50ms: use a longer one";
    let time = Duration::from_millis(40);
    let builder = builder("redis://127.0.0.1/").connect_timeout(time);
    let error = builder.connect_lazy().unwrap_err();
    assert!(error.to_string().contains(fix), "{error}");
    let mut config = StoreConfig::default();
    config.url = Some("redis://127.0.0.1/".to_owned());
    config.timeout = SHORT;
    config.connect_timeout = Some(time);
    let error = AnyStore::from_config(&config).unwrap_err();
    assert!(error.to_string().contains(fix), "{error}");
    // The default follows the timeout.
    let builder = RedisStore::builder("redis://127.0.0.1/").timeout(LONG);
    builder.connect_lazy().unwrap();
}
