//! Names of connections in `CLIENT LIST`.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::redis::{IntoConnectionInfo, RedisConnectionInfo};
use tower_redis_ratelimit::store::{AnyStore, RedisStoreBuilder, Servers, Store, StoreConfig};

use crate::support::{RedisServer, check};

const DEFAULT: &str = concat!("tower-redis-ratelimit/", env!("CARGO_PKG_VERSION"));

/// Returns a field of each connection that runs scripts.
async fn fields(server: &RedisServer, field: &str) -> Vec<String> {
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    let mut values = vec![];
    for line in clients.lines().filter(|line| !line.contains("cmd=client")) {
        let start = format!("{field}=");
        let value = line.split(' ').find_map(|part| part.strip_prefix(&start));
        values.extend(value.map(str::to_owned));
    }
    values
}

/// Asserts that the connections of a new store have this name.
async fn assert_named(server: &RedisServer, builder: RedisStoreBuilder, name: &str) {
    let store = builder.connect().await.unwrap();
    let _ = store.check(check("ann", "10/s")).await.unwrap();
    let names = fields(server, "name").await;
    assert_eq!(names, [name]);
    assert!(store.scan().next().await.unwrap().is_some());
    drop(store);
    let _: i64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
}

/// A user may have a name too, and every kind of address.
#[tokio::test]
async fn connections_have_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock").to_str().unwrap().to_owned();
    let server = RedisServer::start_with(&["--unixsocket", &socket]);
    let _: String = server
        .command("ACL SETUSER limiter on >hunter2 ~* +@all")
        .await;
    let host = format!("127.0.0.1:{}", server.port());
    for url in [
        format!("redis://{host}"),
        format!("redis://limiter:hunter2@{host}/7"),
        format!("redis://limiter:hunter2@{host}/7?protocol=resp3"),
        format!("redis+unix://{socket}"),
    ] {
        assert_named(&server, RedisStore::builder(&url), DEFAULT).await;
        let builder = RedisStore::builder(&url).client_name("shop-api");
        assert_named(&server, builder, "shop-api").await;
    }
    let mut config = StoreConfig::default();
    config.url = Some(server.url());
    config.client_name = Some("of-settings".to_owned());
    let store = AnyStore::from_config(&config).unwrap();
    let _ = store.check(check("ann", "10/s")).await.unwrap();
    assert_eq!(fields(&server, "name").await, ["of-settings"]);
}

/// Redis knows libraries since 7.2.
#[tokio::test]
async fn the_library_is_this_crate_or_that_of_the_application() {
    let server = RedisServer::start();
    let assert_library = async |change: fn(RedisConnectionInfo) -> RedisConnectionInfo,
                                expected: [&str; 3]| {
        let info = server.url().into_connection_info().unwrap();
        let settings = change(info.redis_settings().clone());
        let store = RedisStore::connect(info.set_redis_settings(settings))
            .await
            .unwrap();
        let [name, library, version] = expected;
        assert_eq!(fields(&server, "name").await, [name]);
        for (field, value) in [("lib-name", library), ("lib-ver", version)] {
            let shown = fields(&server, field).await;
            assert!(shown.is_empty() || shown == [value], "{field}: {shown:?}");
        }
        drop(store);
        let _: i64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
    };
    let ours = [DEFAULT, "tower-redis-ratelimit", env!("CARGO_PKG_VERSION")];
    assert_library(|settings| settings, ours).await;
    let theirs = [DEFAULT, "shop", "7"];
    assert_library(|settings| settings.set_lib_name("shop", "7"), theirs).await;
    assert_library(|settings| settings.set_skip_set_lib_name(), ["", "", ""]).await;
    // No command precedes the script.
    assert_eq!(server.calls("client|setname").await, 2);
}

/// Neither a name nor a library is worth an error.
#[tokio::test]
async fn without_the_right_there_is_no_name() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del +get";
    let rule = format!("ACL SETUSER limiter on >hunter2 ~rl:* -@all {rights}");
    let _: String = server.command(&rule).await;
    let url = format!("redis://limiter:hunter2@127.0.0.1:{}/", server.port());
    let mut stores = vec![];
    for url in [url.clone(), format!("{url}?protocol=resp3")] {
        let store = RedisStore::builder(url).client_name("shop");
        let store = store.connect().await.unwrap();
        let _ = store.check(check("ann", "10/s")).await.unwrap();
        stores.push(store);
    }
    assert_eq!(fields(&server, "name").await, ["", ""]);
    let _: String = server.command("ACL SETUSER limiter +client|setname").await;
    let url = format!("redis://limiter:hunter2@127.0.0.1:{}/", server.port());
    let _store = RedisStore::connect(url).await.unwrap();
    assert!(fields(&server, "name").await.contains(&DEFAULT.to_owned()));
}

/// A server that replies to the greeting only after all of it has arrived.
#[tokio::test]
async fn the_name_takes_no_round_trip() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap();
    let greeted = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut greeting = vec![];
        while !String::from_utf8_lossy(&greeting).contains("SETNAME\r\n$4\r\nshop\r\n") {
            assert_ne!(stream.read_buf(&mut greeting).await.unwrap(), 0);
        }
        let commands = greeting.iter().filter(|byte| **byte == b'*').count();
        stream
            .write_all(&b"+OK\r\n".repeat(commands))
            .await
            .unwrap();
        let mut next = vec![];
        stream.read_buf(&mut next).await.unwrap();
        (greeting, next)
    });
    let store = RedisStore::builder(format!("redis://:hunter2@{host}/3")).client_name("shop");
    let store = store.connect_lazy().unwrap();
    let checking = tokio::spawn(async move { store.check(check("ann", "10/s")).await });
    let (greeting, next) = greeted.await.unwrap();
    checking.abort();
    let (greeting, next) = (
        String::from_utf8_lossy(&greeting),
        String::from_utf8_lossy(&next),
    );
    assert!(
        greeting.contains("hunter2") && greeting.contains("SELECT"),
        "{greeting}"
    );
    assert!(next.contains("EVALSHA"), "{next}");
}

#[test]
fn an_invalid_name_is_refused() {
    let fix =
        "is not a valid client name: use ASCII letters, digits and punctuation without blanks";
    for name in [
        "",
        " ",
        "a b",
        "a\nb",
        "a\r\nFLUSHALL",
        "caf\u{e9}",
        "a\u{7f}",
    ] {
        let builder = RedisStore::builder("redis://127.0.0.1/").client_name(name);
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(error.starts_with(&format!("{name:?} {fix}")), "{error}");
        let mut config = StoreConfig::default();
        config.url = Some("redis://127.0.0.1/".to_owned());
        config.client_name = Some(name.to_owned());
        let error = AnyStore::from_config(&config).unwrap_err().to_string();
        assert!(error.contains(&format!("{name:?} {fix}")), "{error}");
    }
    let servers = Servers::cluster(["redis://127.0.0.1"]);
    for name in ["shop-api", "eu/shop:7", "!"] {
        let builder = RedisStore::builder(servers.clone()).client_name(name);
        builder.connect_lazy().unwrap();
    }
}
