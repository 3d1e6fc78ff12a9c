//! Credentials that change, of a master and of its sentinels.

use std::fs;

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{Credentials, ErrorKind, Servers};

use crate::nodes::{Sentinel, url};
use crate::rotation::Rotation;
use crate::support::{RedisServer, assert_helpful};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_under_load_is_not_noticed() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "requirepass hunter2");
    let rotation = Rotation::start(&[&server]).await;
    let builder = RedisStore::builder(url(&[sentinel.port]))
        .sentinel_credentials(|| async { Ok(Credentials::new("", "hunter2")) });
    rotation.is_not_noticed(&[&server], builder).await;
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
