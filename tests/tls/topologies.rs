//! TLS settings for a cluster, and for sentinels with their master.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{ErrorKind, RedisStoreBuilder, Servers, Store};

use crate::busy::{Work, keeps_the_limit};
use crate::support::{check, free_port, until};
use crate::with_tls::{Authority, Certificate, Files, TlsServer};

const HOST: &str = "redis.example";

fn builder(servers: impl Into<Servers>, ca: &Authority, own: &Certificate) -> RedisStoreBuilder {
    RedisStore::builder(servers)
        .root_certificates(ca.pem())
        .client_certificate(own.pem.as_str(), own.key.as_str())
        .server_name(HOST)
        .timeout(Duration::from_secs(20))
}

/// Starts a cluster of one node with TLS, and more options.
pub(crate) async fn cluster_of_one(
    ca: &Authority,
    certificate: &Certificate,
    options: &[&str],
) -> TlsServer {
    let bus = free_port().to_string();
    let mut args = vec!["--cluster-enabled", "yes", "--cluster-port", &bus];
    args.extend(["--tls-cluster", "yes"]);
    args.extend(options);
    let node = TlsServer::start_with(ca, certificate, &args);
    let _: String = node.server.command("CLUSTER ADDSLOTSRANGE 0 16383").await;
    until("it serves its slots", async || {
        let info: String = node.server.command("CLUSTER INFO").await;
        info.contains("cluster_state:ok")
    })
    .await;
    node
}

/// The nodes of a cluster announce their TLS ports.
#[tokio::test]
async fn a_cluster() {
    let ca = Authority::new();
    let own = ca.sign("service.example");
    let node = cluster_of_one(&ca, &ca.sign(HOST), &[]).await;
    let url = format!("rediss+cluster://127.0.0.1:{}", node.port);
    let store = builder(url.as_str(), &ca, &own).connect().await.unwrap();
    // Close the port without TLS.
    let _: String = node.server.command("CONFIG SET port 0").await;
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let error = RedisStore::connect(url.as_str()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CertificateUntrusted, "{error:?}");
    let error = builder(url.as_str(), &ca, &own)
        .server_name("other.example")
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CertificateMismatch, "{error:?}");
    let plain = format!("redis+cluster://127.0.0.1:{}", node.port);
    let error = RedisStore::builder(plain)
        .timeout(Duration::from_secs(8))
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TlsRequired, "{error:?}");
}

pub(crate) struct Sentinel {
    child: Child,
    _files: Files,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a sentinel that accepts TLS only, with a certificate for this host, and returns its port.
pub(crate) fn sentinel(master: u16, host: &str, ca: &Authority) -> (Sentinel, u16) {
    let files = Files::new(ca, &ca.sign(host));
    let port = free_port();
    let settings: String = files
        .settings
        .iter()
        .map(|[name, value]| format!("{name} {value}\n"))
        .collect();
    let dir = std::path::Path::new(&files.settings[0][1])
        .parent()
        .unwrap()
        .to_owned();
    let text = format!(
        "port 0\ntls-port {port}\ntls-replication yes\nbind 127.0.0.1\ndir {}\n{settings}\
         sentinel monitor mymaster 127.0.0.1 {master} 1\n",
        dir.display()
    );
    std::fs::write(dir.join("sentinel.conf"), text).unwrap();
    let mut command = Command::new("redis-server");
    command
        .arg(dir.join("sentinel.conf"))
        .arg("--sentinel")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    (
        Sentinel {
            child: command.spawn().unwrap(),
            _files: files,
        },
        port,
    )
}

#[tokio::test]
async fn sentinels_and_their_master() {
    let ca = Authority::new();
    let own = ca.sign("service.example");
    let server = TlsServer::start_with(&ca, &ca.sign(HOST), &[]);
    let (_sentinel, port) = sentinel(server.port, HOST, &ca);
    until("the sentinel is up", async || {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    })
    .await;
    let url = format!("rediss+sentinel://127.0.0.1:{port}/mymaster");
    let store = builder(url.as_str(), &ca, &own).connect().await.unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let error = RedisStore::connect(url.as_str()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CertificateUntrusted, "{error:?}");
    // The master and the sentinels have separate URLs.
    let mixed = |master: &str, scheme: &str| {
        Servers::sentinel(master, [format!("{scheme}://127.0.0.1:{port}")])
    };
    builder(mixed("mymaster", "rediss"), &ca, &own)
        .connect()
        .await
        .unwrap();
    let error = builder(mixed("rediss://mymaster", "redis"), &ca, &own)
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TlsRequired, "{error:?}");
    let error = builder(mixed("redis://mymaster", "rediss"), &ca, &own)
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TlsRequired, "{error:?}");
}

/// A task of redis-rs reads the replies, and waits for a thread too.
#[test]
fn a_busy_runtime_keeps_the_limit() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, HOST);
    let redis = || {
        RedisStore::builder(server.url().as_str())
            .root_certificates(ca.pem())
            .server_name(HOST)
            .connect_lazy()
            .unwrap()
    };
    keeps_the_limit(2, true, Work::Sleep, redis);
}

/// The certificate has the announced name, not the address at which the node is reached.
#[tokio::test]
async fn a_mapped_node_has_a_certificate_for_its_name() {
    let ca = Authority::new();
    let certificate = ca.sign_with(HOST, |params| {
        let name = "localhost".try_into().unwrap();
        params.subject_alt_names.push(rcgen::SanType::DnsName(name));
    });
    let options = [
        "--tls-auth-clients",
        "no",
        "--cluster-announce-hostname",
        HOST,
        "--cluster-preferred-endpoint-type",
        "hostname",
    ];
    let node = cluster_of_one(&ca, &certificate, &options).await;
    let connect = async |reached: &'static str, server_name: Option<&str>| {
        let url = format!("rediss+cluster://localhost:{}", node.port);
        let mut builder = RedisStore::builder(url).root_certificates(ca.pem());
        if let Some(name) = server_name {
            builder = builder.server_name(name);
        }
        let builder = builder.timeout(Duration::from_secs(20));
        let map = move |host: &str, port| (host == HOST).then(|| (reached.to_owned(), port));
        builder.address_map(map).connect().await
    };
    let store = connect("127.0.0.1", None).await.unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    connect("127.0.0.1", Some("localhost")).await.unwrap();
    let error = connect("127.0.0.1", Some("other.example"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CertificateMismatch, "{error:?}");
}
