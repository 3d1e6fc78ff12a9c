//! TLS: it works with a private CA, and each thing that is wrong with it has its own advice.

#[cfg(not(feature = "tls"))]
#[tokio::test]
async fn without_the_feature_the_url_is_refused() {
    use tower_redis_ratelimit::{ConfigError, ErrorKind, RedisStore};

    let error = RedisStore::connect_lazy("rediss://127.0.0.1/").unwrap_err();
    assert_eq!(error, ConfigError::NoTls);
    let error = RedisStore::connect("rediss://127.0.0.1/").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert!(error.to_string().contains("turn on the feature `tls`"), "{error}");
}

#[cfg(feature = "tls")]
mod with_the_feature {
    use std::error::Error as _;
    use std::fs;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tempfile::TempDir;
    use tower_redis_ratelimit::redis::{Client, ConnectionInfo, TlsCertificates};
    use tower_redis_ratelimit::{Error, ErrorKind, RedisStore, Servers, Store};

    use crate::support::{RedisServer, check, free_port, until};

    /// A server with a certificate for this host.
    struct TlsServer {
        server: RedisServer,
        _dir: TempDir,
        port: u16,
        /// The certificate of its CA.
        ca: String,
    }

    impl TlsServer {
        fn start(host: &str) -> Self {
            Self::start_with(host, &[])
        }

        fn start_with(host: &str, more: &[&str]) -> Self {
            let mut params = CertificateParams::new([]).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new([host.to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let write = |name: &str, text: &str| {
                fs::write(dir.path().join(name), text).unwrap();
                dir.path().join(name).to_str().unwrap().to_owned()
            };
            let port = free_port();
            let (tls_port, certificate) = (port.to_string(), write("certificate", &certificate.pem()));
            let (key, ca_file) = (write("key", &key.serialize_pem()), write("ca", &ca.pem()));
            let own = [
                "--tls-port",
                &tls_port,
                "--tls-cert-file",
                &certificate,
                "--tls-key-file",
                &key,
                "--tls-ca-cert-file",
                &ca_file,
                "--tls-auth-clients",
                "no",
            ];
            let args: Vec<&str> = own.iter().copied().chain(more.iter().copied()).collect();
            let server = RedisServer::start_with(&args);
            Self { server, port, ca: ca.pem(), _dir: dir }
        }

        /// How to reach it with trust in this CA.
        fn trusting(&self, ca: &str) -> ConnectionInfo {
            let certificates = TlsCertificates { client_tls: None, root_cert: Some(ca.as_bytes().to_vec()) };
            let client = Client::build_with_tls(format!("rediss://127.0.0.1:{}/", self.port), certificates);
            client.unwrap().get_connection_info().clone()
        }
    }

    async fn connect(info: impl Into<Servers>) -> Result<RedisStore, Error> {
        RedisStore::builder(info).timeout(Duration::from_secs(20)).connect().await
    }

    async fn assert_refused(info: impl Into<Servers>, cause: &str) {
        let error = connect(info).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Tls, "{error:?}");
        assert!(error.to_string().contains("trusts the server's certificate"), "{error}");
        let text = error.source().unwrap().to_string();
        assert!(text.contains(cause), "{text:?} lacks {cause:?}");
    }

    /// Nobody has installed a crypto provider.
    /// The nodes of a cluster tell of each other by the ports that speak TLS.
    #[tokio::test]
    async fn a_cluster_that_speaks_tls() {
        let bus = free_port().to_string();
        let cluster = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--tls-cluster", "yes"];
        let node = TlsServer::start_with("127.0.0.1", &cluster);
        let _: String = node.server.command("CLUSTER ADDSLOTSRANGE 0 16383").await;
        until("it serves its slots", async || {
            node.server.command::<String>("CLUSTER INFO").await.contains("cluster_state:ok")
        })
        .await;
        let store = connect(Servers::cluster([node.trusting(&node.ca)])).await.unwrap();
        // Only the port that speaks TLS is left.
        let _: String = node.server.command("CONFIG SET port 0").await;
        assert!(store.check(check("ann", "10/s")).await.unwrap().is_allowed());
        let url = format!("rediss+cluster://127.0.0.1:{}", node.port);
        assert_eq!(connect(url.as_str()).await.unwrap_err().kind(), ErrorKind::Tls);
    }

    #[tokio::test]
    async fn a_private_ca_is_trusted() {
        let server = TlsServer::start("127.0.0.1");
        let store = connect(server.trusting(&server.ca)).await.unwrap();
        assert!(store.check(check("ann", "10/s")).await.unwrap().is_allowed());
    }

    #[tokio::test]
    async fn the_ca_is_another() {
        let (server, other) = (TlsServer::start("127.0.0.1"), TlsServer::start("127.0.0.1"));
        assert_refused(server.trusting(&other.ca), "certificate").await;
        assert_refused(format!("rediss://127.0.0.1:{}/", server.port), "UnknownIssuer").await;
    }

    #[tokio::test]
    async fn the_certificate_is_for_another_host() {
        let server = TlsServer::start("redis.example");
        assert_refused(server.trusting(&server.ca), "not valid for name").await;
    }

    #[tokio::test]
    async fn the_server_does_not_speak_tls() {
        let server = RedisServer::start();
        let url = format!("rediss://127.0.0.1:{}/", server.port());
        let error = RedisStore::builder(url).timeout(Duration::from_millis(200)).connect().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
        assert!(error.source().unwrap().to_string().contains("check that the URL's port speaks TLS"), "{error:?}");
        let answers = answering(b"-ERR unknown command\r\n");
        assert_refused(answers, "corrupt").await;
    }

    /// Whatever else may keep it from answering, its port speaks TLS.
    #[tokio::test]
    async fn a_server_that_falls_silent_has_spoken_tls() {
        let server = TlsServer::start("127.0.0.1");
        let builder = RedisStore::builder(server.trusting(&server.ca)).timeout(Duration::from_millis(500));
        let store = builder.connections(std::num::NonZeroUsize::MIN).connect_lazy().unwrap();
        until("it decides", async || store.check(check("ann", "10/s")).await.is_ok()).await;
        server.server.freeze();
        // The first is sent on the connection that there was, and the second waits for another one.
        for _ in 0..2 {
            let error = store.check(check("ann", "10/s")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
            assert!(!format!("{error:?}").contains("TLS"), "{error:?}");
        }
        server.server.thaw();
    }

    /// A server that answers whatever it is sent.
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

    /// Redis-rs can check nothing at all only with a feature of its own.
    #[tokio::test]
    async fn an_insecure_url_is_set_up_wrongly() {
        let error = connect("rediss://127.0.0.1:1/#insecure").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error:?}");
    }
}
