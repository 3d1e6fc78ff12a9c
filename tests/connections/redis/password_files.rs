//! Passwords in files that are replaced, such as mounted secrets.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
#[cfg(target_os = "linux")]
use std::process::Command;
#[cfg(target_os = "linux")]
use std::sync::mpsc;
#[cfg(target_os = "linux")]
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
#[cfg(target_os = "linux")]
use tokio::runtime::Builder;
use tower_redis_ratelimit::store::{
    AnyStore, ErrorKind, RedisStoreBuilder, Store, StoreConfig, StoreKind,
};
use tower_redis_ratelimit::{RedisStore, redis};

use crate::support::{RedisServer, assert_helpful, check, until};

const PATIENT: Duration = Duration::from_secs(20);

/// A folder with a secret, mounted as Kubernetes does: each version is in another folder, and a link leads to the newest.
struct Mounted {
    dir: TempDir,
    versions: usize,
}

impl Mounted {
    fn with(content: impl AsRef<[u8]>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        symlink("..data/password", dir.path().join("password")).unwrap();
        let mut mounted = Self { dir, versions: 0 };
        mounted.replace(content);
        mounted
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("password")
    }

    fn replace(&mut self, content: impl AsRef<[u8]>) {
        self.versions += 1;
        let version = format!("..{}", self.versions);
        let folder = self.dir.path().join(&version);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("password"), content).unwrap();
        let link = self.dir.path().join("..data_tmp");
        symlink(version, &link).unwrap();
        fs::rename(link, self.dir.path().join("..data")).unwrap();
    }
}

async fn server() -> RedisServer {
    let server = RedisServer::start();
    let _: String = server
        .command("ACL SETUSER limiter on >hunter2-1 >hunter2-2 ~* +@all")
        .await;
    server
}

/// Returns a URL that names the file.
fn url(server: &RedisServer, path: &Path) -> String {
    let port = server.port();
    format!(
        "redis://limiter@127.0.0.1:{port}/?password_file={}",
        path.display()
    )
}

fn builder_at(server: &RedisServer, path: &Path) -> RedisStoreBuilder {
    RedisStore::builder(url(server, path)).timeout(PATIENT)
}

async fn decides(store: &RedisStore) -> bool {
    store.check(check("ann", "10000/s")).await.is_ok()
}

/// Advances the clock of the store to its next look at the file.
async fn look_again() {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(5)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_replaced_file_is_read_again() {
    let server = server().await;
    let mut secret = Mounted::with("hunter2-1\n");
    let store = builder_at(&server, &secret.path()).connect().await.unwrap();
    let _: String = server.command("CONFIG RESETSTAT").await;
    secret.replace("hunter2-2\n");
    look_again().await;
    until("the connection is authenticated again", async || {
        server.calls("auth").await > 0
    })
    .await;
    let _: String = server
        .command("ACL SETUSER limiter resetpass >hunter2-2")
        .await;
    assert!(decides(&store).await);
    // A new connection reads the file too.
    let _: String = server
        .command("ACL SETUSER limiter resetpass >hunter2-3")
        .await;
    secret.replace("hunter2-3");
    let _: u32 = server.command("CLIENT KILL USER limiter").await;
    until("it decides", async || decides(&store).await).await;
}

#[tokio::test]
async fn a_wrong_file_is_named() {
    let server = server().await;
    let mut secret = Mounted::with("");
    let path = secret.path();
    let builder = || builder_at(&server, &path);
    let too_long = "hunter2".repeat(10_000);
    for (content, remedy) in [
        (&b"\n"[..], "is empty: write the password into it"),
        (b"hunter2\xff", "is not UTF-8: write"),
        (too_long.as_bytes(), "is longer than 64 KiB: use"),
    ] {
        secret.replace(content);
        for error in [
            builder().connect().await.unwrap_err(),
            builder()
                .connect_lazy()
                .unwrap()
                .check(check("ann", "10/s"))
                .await
                .unwrap_err(),
        ] {
            assert_helpful(&error, ErrorKind::Authentication, remedy);
            let named = format!("cannot be read: the file {path:?} ");
            assert!(error.to_string().contains(&named), "{error}");
            assert!(error.is_not_sent(), "{error:?}");
        }
    }
    let missing = secret.dir.path().join("missing");
    let error = builder_at(&server, &missing).connect().await.unwrap_err();
    assert_helpful(
        &error,
        ErrorKind::Authentication,
        "is missing or unreadable (",
    );
    // The store looks again.
    let store = builder_at(&server, &path).connect_lazy().unwrap();
    assert!(!decides(&store).await);
    secret.replace("hunter2-1");
    until("it decides", async || decides(&store).await).await;
}

/// A file that is emptied or removed leaves the last password in use.
#[tokio::test]
async fn a_lost_file_leaves_the_last_password() {
    let server = server().await;
    let mut secret = Mounted::with("hunter2-1");
    let store = builder_at(&server, &secret.path()).connect().await.unwrap();
    secret.replace("");
    look_again().await;
    assert!(decides(&store).await);
    fs::remove_file(secret.path()).unwrap();
    let _: u32 = server.command("CLIENT KILL USER limiter").await;
    until("it decides", async || decides(&store).await).await;
}

/// A writer that does not replace the file in one step: half of a password is rejected, and the whole is read about a second later.
#[tokio::test]
async fn a_half_written_file_is_read_again() {
    let server = server().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("password");
    fs::write(&path, "hunter2-1").unwrap();
    let store = builder_at(&server, &path).connect().await.unwrap();
    fs::write(&path, "hunter2").unwrap();
    look_again().await;
    until("the half is rejected", async || {
        let log: Vec<redis::Value> = server.command("ACL LOG").await;
        !log.is_empty()
    })
    .await;
    fs::write(&path, "hunter2-2").unwrap();
    let since = Instant::now();
    until("it decides", async || decides(&store).await).await;
    println!("back after {:?}", since.elapsed());
    assert!(since.elapsed() < Duration::from_secs(10));
}

/// Nothing opens the other end of a pipe. A runtime that shuts down does not wait for it, and a hundred looks keep one
/// thread.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_hangs_keeps_one_thread() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("password");
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let servers = format!("redis://127.0.0.1:1/?password_file={}", path.display());
    let (ended, ends) = mpsc::channel();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let builder = RedisStore::builder(servers).timeout(Duration::from_millis(20));
            let builder = builder.connect_timeout(Duration::from_millis(40));
            let store = builder.connect_lazy().unwrap();
            until("the file is named", async || {
                let error = store.check(check("ann", "10/s")).await.unwrap_err();
                error.to_string().contains("did not open or end in time")
            })
            .await;
            for _ in 0..100 {
                look_again().await;
                let _ = store.check(check("ann", "10/s")).await.unwrap_err();
            }
        });
        ended.send(threads_of("redis-password")).unwrap();
        drop(runtime);
        ended.send(0).unwrap();
    });
    let threads = ends.recv_timeout(PATIENT).unwrap();
    let runtime_ended = ends.recv_timeout(PATIENT);
    // Lets the thread end.
    fs::write(&path, "hunter2").unwrap();
    assert_eq!(threads, 1);
    runtime_ended.expect("the runtime waits for the file");
}

/// Returns the number of threads of this name.
#[cfg(target_os = "linux")]
fn threads_of(name: &str) -> usize {
    let mut threads = 0;
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let found = fs::read_to_string(task.unwrap().path().join("comm"));
        threads += usize::from(found.is_ok_and(|found| found.trim() == name));
    }
    threads
}

#[tokio::test]
async fn settings_name_a_file() {
    let server = server().await;
    let secret = Mounted::with("hunter2-1");
    let mut config = StoreConfig::default();
    config.kind = StoreKind::Redis;
    config.url = Some(format!("redis://limiter@127.0.0.1:{}/", server.port()));
    config.password_file = Some(secret.path());
    config.timeout = PATIENT;
    let store = AnyStore::from_config(&config).unwrap();
    let decision = store.check(check("ann", "10/s")).await.unwrap();
    assert!(decision.is_allowed());
    let text = format!("{config:?} {store:?}");
    assert!(!text.contains("hunter2"), "{text}");

    for (url, problem) in [
        (
            "redis://limiter:hunter2@a/",
            "remove the password from the URL",
        ),
        ("redis://:hunter2@a/", "remove the password from the URL"),
        ("redis://limiter@a/?password_file=/run/b", "two sources"),
    ] {
        config.url = Some(url.to_owned());
        let error = AnyStore::from_config(&config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{url}");
        assert!(error.to_string().contains(problem), "{url}: {error}");
        assert!(!error.to_string().contains("hunter2"), "{url}: {error}");
    }
}

/// Each form of URL may name a file.
#[test]
fn every_url_may_name_a_file() {
    for url in [
        "redis://limiter@a/?password_file=/run/b",
        "redis://a/3?prefix=shop&password_file=b",
        "redis+unix:///tmp/redis?user=limiter&password_file=/run/b",
        "redis+cluster://limiter@a,b?password_file=/run/b",
        "redis+sentinel://limiter@a/m?password_file=/run/b",
        "redis+sentinel://a/m?sentinel_user=asker&sentinel_password_file=/run/b",
        "redis+sentinel://u@a/m?sentinel_user=asker&sentinel_password_file=/run/b&password_file=c",
    ] {
        RedisStore::connect_lazy(url).unwrap();
    }
    for (url, problem) in [
        (
            "redis+sentinel://:hunter2@a/m?password_file=b",
            "remove the password from the URL",
        ),
        (
            "redis+sentinel://a/m?sentinel_password=hunter2&sentinel_password_file=b",
            "remove the password from the URL",
        ),
        (
            "redis+cluster://u:hunter2@a?password_file=b",
            "remove the password from the URL",
        ),
        ("redis://a?sentinel_password_file=b", "is unknown"),
        // A password with a question mark.
        (
            "redis://u:6379?password_file=hunter2@host/",
            "in a password a `?` as `%3F`",
        ),
        ("redis+sentinel://limiter@a/m", "add the user's password"),
    ] {
        let error = RedisStore::connect_lazy(url).unwrap_err().to_string();
        assert!(error.contains(problem), "{url}: {error}");
        assert!(!error.contains("hunter2"), "{url}: {error}");
    }
}
