//! Credentials that change, of a master and of its sentinels.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{Credentials, ErrorKind, Servers, Store};

use crate::nodes::{Sentinel, url};
use crate::rotation::Rotation;
use crate::support::{RedisServer, assert_helpful, check, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_under_load_is_not_noticed() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "requirepass hunter2");
    let rotation = Rotation::start(&[&server]).await;
    let builder = RedisStore::builder(url(&[sentinel.port]))
        .sentinel_credentials(|| async { Ok(Credentials::new("", "hunter2")) });
    rotation.is_not_noticed(&[&server], builder).await;
}

/// A sentinel closes the connection of a user that is deleted. The next query opens another one.
#[tokio::test]
async fn a_sentinel_is_queried_by_the_newest_user() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "");
    let add = async |user: &str| {
        let rule = format!("ACL SETUSER {user} on >hunter2 ~* &* +@all");
        let _: String = sentinel.command(&rule).await.unwrap();
    };
    let asks = async |user: &str| {
        let clients: String = sentinel.command("CLIENT LIST").await.unwrap();
        clients.contains(&format!("user={user} "))
    };
    add("first").await;
    let user = Arc::new(Mutex::new("first"));
    let current = Arc::clone(&user);
    let builder = RedisStore::builder(url(&[sentinel.port]))
        .timeout(Duration::from_secs(20))
        .sentinel_credentials(move || {
            let user = *current.lock().unwrap();
            async move { Ok(Credentials::new(user, "hunter2")) }
        });
    let store = builder.connect().await.unwrap();
    let _ = store.check(check("ann", "10/s")).await.unwrap();
    until("the first user asks", async || asks("first").await).await;
    add("second").await;
    *user.lock().unwrap() = "second";
    let _: u32 = sentinel.command("ACL DELUSER first").await.unwrap();
    until("the second user asks", async || asks("second").await).await;
}

#[tokio::test]
async fn sentinels_have_a_file_of_their_own() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "requirepass hunter2");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("password");
    fs::write(&path, "hunter2").unwrap();
    let file = format!("sentinel_password_file={}", path.display());
    let servers = || Servers::from(format!("{}?{file}", url(&[sentinel.port])));
    RedisStore::connect(servers()).await.unwrap();
    let builder = RedisStore::builder(url(&[sentinel.port])).sentinel_password_file(&path);
    builder.connect().await.unwrap();
    fs::write(&path, "hunter2-2").unwrap();
    let error = RedisStore::connect(servers()).await.unwrap_err();
    assert_helpful(&error, ErrorKind::Authentication, "`password_file`");
    fs::remove_file(&path).unwrap();
    let error = RedisStore::connect(servers()).await.unwrap_err();
    assert_helpful(
        &error,
        ErrorKind::Authentication,
        "is missing or unreadable (",
    );
}
