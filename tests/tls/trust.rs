//! Trust between client and server, and the error if it fails.

use std::error::Error as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rcgen::date_time_ymd;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::redis::{Client, IntoConnectionInfo, TlsCertificates};
use tower_redis_ratelimit::store::{
    AnyStore, ErrorKind, RedisStoreBuilder, Servers, Store, StoreConfig, StoreError,
};

use crate::support::{RedisServer, assert_helpful, check, until};
use crate::with_tls::{Authority, TlsServer};

fn builder(servers: impl Into<Servers>) -> RedisStoreBuilder {
    RedisStore::builder(servers).timeout(Duration::from_secs(20))
}

async fn refused(builder: RedisStoreBuilder, kind: ErrorKind, remedy: &str, cause: &str) {
    let error: StoreError = builder.connect().await.unwrap_err();
    assert_helpful(&error, kind, remedy);
    let text = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(text.contains(cause), "{text:?} lacks {cause:?}");
}

/// Works without an installed crypto provider.
#[tokio::test]
async fn a_private_ca_is_trusted() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let store = builder(server.url())
        .root_certificates(ca.pem())
        .connect()
        .await
        .unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    // One CA among several.
    let several = format!("{}{}", Authority::new().pem(), ca.pem());
    builder(server.url())
        .root_certificates(several)
        .connect()
        .await
        .unwrap();
    // A certificate that was set in the connection info is kept.
    let certificates = TlsCertificates {
        client_tls: None,
        root_cert: Some(ca.pem().into_bytes()),
    };
    let client = Client::build_with_tls(server.url(), certificates).unwrap();
    builder(client.get_connection_info().clone())
        .connect()
        .await
        .unwrap();
}

/// A task of redis-rs drives a connection over TLS, and ends with it.
#[tokio::test]
async fn closed_connections_are_replaced() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let store = builder(server.url())
        .root_certificates(ca.pem())
        .connections(NonZeroUsize::MIN)
        .connect_lazy()
        .unwrap();
    for remaining in [99, 98, 97] {
        let decision = store.check(check("ann", "100/100d")).await.unwrap();
        assert_eq!(decision.remaining(), remaining);
        let killed: u64 = server.server.command("CLIENT KILL TYPE normal").await;
        assert_eq!(killed, 1);
        tokio::time::pause();
        tokio::time::advance(Duration::from_millis(500)).await;
        tokio::time::resume();
    }
}

#[tokio::test]
async fn the_ca_is_not_trusted() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let (kind, remedy) = (
        ErrorKind::CertificateUntrusted,
        "`RedisStoreBuilder::root_certificates`",
    );
    refused(
        builder(server.url()).root_certificates(Authority::new().pem()),
        kind,
        remedy,
        "certificate",
    )
    .await;
    refused(builder(server.url()), kind, remedy, "UnknownIssuer").await;
}

#[tokio::test]
async fn the_certificate_has_expired() {
    let ca = Authority::new();
    for (from, to) in [(2000, 2001), (4000, 4001)] {
        let certificate = ca.sign_with("127.0.0.1", |params| {
            params.not_before = date_time_ymd(from, 1, 1);
            params.not_after = date_time_ymd(to, 1, 1);
        });
        let server = TlsServer::start_with(&ca, &certificate, &["--tls-auth-clients", "no"]);
        let builder = builder(server.url()).root_certificates(ca.pem());
        refused(
            builder,
            ErrorKind::CertificateExpired,
            "renew it, and check the clocks",
            "certificate",
        )
        .await;
    }
}

#[tokio::test]
async fn the_certificate_is_for_another_host() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "redis.example");
    let builder = || builder(server.url()).root_certificates(ca.pem());
    let (kind, remedy) = (
        ErrorKind::CertificateMismatch,
        "`RedisStoreBuilder::server_name`",
    );
    refused(builder(), kind, remedy, "not valid for name").await;
    refused(
        builder().server_name("127.0.0.1"),
        kind,
        remedy,
        "not valid for name",
    )
    .await;
    let store = builder()
        .server_name("redis.example")
        .connect()
        .await
        .unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
}

#[tokio::test]
async fn the_server_requires_a_certificate() {
    let ca = Authority::new();
    let server = TlsServer::start_with(&ca, &ca.sign("127.0.0.1"), &[]);
    let builder = || builder(server.url()).root_certificates(ca.pem());
    let (kind, remedy) = (
        ErrorKind::ClientCertificate,
        "`RedisStoreBuilder::client_certificate`",
    );
    refused(builder(), kind, remedy, "").await;
    let strange = Authority::new().sign("service.example");
    refused(
        builder().client_certificate(strange.pem, strange.key),
        kind,
        remedy,
        "",
    )
    .await;
    let own = ca.sign("service.example");
    let store = builder()
        .client_certificate(own.pem, own.key)
        .connect()
        .await
        .unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
}

#[tokio::test]
async fn the_server_does_not_speak_tls() {
    for args in [&[][..], &["--requirepass", "secret"]] {
        let server = RedisServer::start_with(args);
        let url = format!("rediss://127.0.0.1:{}/", server.port());
        let wrong = "does not use TLS on this port: use `redis://`";
        // The handshake may take three quarters of the timeout.
        let builder = builder(url).timeout(Duration::from_secs(4));
        refused(
            builder,
            ErrorKind::Tls,
            "check that the URL's port serves TLS",
            wrong,
        )
        .await;
    }
    refused(
        builder(answering(b"-ERR unknown command\r\n")),
        ErrorKind::Tls,
        "serves TLS",
        "corrupt",
    )
    .await;
}

#[tokio::test]
async fn the_url_does_not_use_tls() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let url = format!("redis://127.0.0.1:{}/", server.port);
    refused(
        builder(url),
        ErrorKind::TlsRequired,
        "use `rediss://` instead of `redis://`",
        "",
    )
    .await;
}

/// A frozen server is not reported as one without TLS: its port has served TLS before.
#[tokio::test]
async fn a_frozen_tls_server_times_out() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let builder = RedisStore::builder(server.url())
        .root_certificates(ca.pem())
        .timeout(Duration::from_millis(500));
    let store = builder
        .connections(std::num::NonZeroUsize::MIN)
        .connect_lazy()
        .unwrap();
    until("it decides", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;
    server.server.freeze();
    // The first check uses the existing connection, the second waits for a new one.
    for _ in 0..2 {
        let error = store.check(check("ann", "10/s")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
        assert!(!format!("{error:?}").contains("TLS"), "{error:?}");
    }
    server.server.thaw();
}

/// A server that never replies is not reported as one without TLS either.
#[tokio::test]
async fn a_silent_server_times_out() {
    for scheme in ["redis", "rediss"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("{scheme}://{}/", listener.local_addr().unwrap());
        let error = RedisStore::builder(url)
            .timeout(Duration::from_millis(200))
            .connect_timeout(Duration::from_millis(200))
            .connect()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
    }
}

/// A server that sends a fixed reply to any request.
fn answering(reply: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("rediss://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let (_, _) = (stream.read(&mut [0; 4096]), stream.write_all(reply));
        }
    });
    url
}

/// By the constructor, not by the first check.
#[test]
fn insecure_servers_are_rejected() {
    let info = "rediss://127.0.0.1/#insecure";
    let info = info.into_connection_info().unwrap();
    let url = "rediss://127.0.0.1:1/#insecure";
    for servers in [
        Servers::from(url),
        Servers::from(info.clone()),
        Servers::from("rediss+cluster://127.0.0.1:1,127.0.0.1:2#insecure"),
        Servers::from("rediss+sentinel://127.0.0.1:1/mymaster/0#insecure"),
        Servers::cluster(["rediss://127.0.0.1:1", url]),
        Servers::sentinel("mymaster", [info]),
        Servers::sentinel("rediss://mymaster/#insecure", ["rediss://127.0.0.1"]),
    ] {
        let error = RedisStore::connect_lazy(servers.clone()).unwrap_err();
        for fix in [
            "without verification",
            "`root_certificates`",
            "`server_name`",
        ] {
            assert!(error.to_string().contains(fix), "{servers:?}: {error}");
        }
    }
    let mut config = StoreConfig::default();
    config.url = Some(url.to_owned());
    let error = AnyStore::from_config(&config).unwrap_err().to_string();
    assert!(error.contains("`root_certificates`"), "{error}");
}

/// Starts a proxy that delays every reply, and records the first bytes of each connection.
fn slow(port: u16, delay: Duration) -> (u16, Arc<Mutex<Vec<Vec<u8>>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (own, beginnings) = (
        listener.local_addr().unwrap().port(),
        Arc::new(Mutex::new(vec![])),
    );
    let begun = Arc::clone(&beginnings);
    std::thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let begun = Arc::clone(&begun);
            std::thread::spawn(move || -> std::io::Result<()> {
                let mut server = TcpStream::connect(("127.0.0.1", port))?;
                let (mut replies, mut back) = (server.try_clone()?, client.try_clone()?);
                std::thread::spawn(move || -> std::io::Result<()> {
                    let mut buffer = [0; 65_536];
                    while let length @ 1.. = replies.read(&mut buffer)? {
                        std::thread::sleep(delay);
                        back.write_all(&buffer[..length])?;
                    }
                    Ok(())
                });
                let mut buffer = [0; 65_536];
                let mut first = true;
                while let length @ 1.. = client.read(&mut buffer)? {
                    if std::mem::take(&mut first) {
                        begun.lock().unwrap().push(buffer[..length].to_vec());
                    }
                    server.write_all(&buffer[..length])?;
                }
                Ok(())
            });
        }
    });
    (own, beginnings)
}

/// A TLS port receives nothing but the handshake while that is in progress.
#[tokio::test]
async fn a_slow_handshake_is_waited_for() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let (port, beginnings) = slow(server.port, Duration::from_millis(600));
    let url = format!("rediss://127.0.0.1:{port}/");
    let store = builder(url)
        .root_certificates(ca.pem())
        .connect()
        .await
        .unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let beginnings = beginnings.lock().unwrap();
    assert!(
        !beginnings.is_empty() && beginnings.iter().all(|bytes| bytes[0] == 0x16),
        "{beginnings:?}"
    );
}

/// What Redis says after the handshake is shown.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_server_in_protected_mode_is_reported() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let url = crate::devices::from_elsewhere(server.port).await;
    let url = url.replace("redis://", "rediss://");
    let builder = RedisStore::builder(url).root_certificates(ca.pem());
    let error = builder.connect().await.unwrap_err();
    let line = "(`DENIED Redis is running in protected mode because";
    assert_helpful(&error, ErrorKind::Unreachable, line);
}

/// Over TLS, redis-rs opens the connection.
#[tokio::test]
async fn connections_have_a_name() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let builder = builder(server.url()).root_certificates(ca.pem());
    let _store = builder.client_name("shop-api").connect().await.unwrap();
    let clients: String = server.server.command("CLIENT LIST TYPE normal").await;
    assert!(clients.contains(" name=shop-api "), "{clients}");
}
