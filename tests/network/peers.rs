//! Connections that tonic's server distinguishes: TCP, TLS and unix sockets.

use std::path::Path;

use hyper_util::rt::TokioIo;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};
use tower::service_fn;
use tower_redis_ratelimit::extract::{ClientIp, KeyExtractor, PeerIp};
use tower_redis_ratelimit::reject::{GrpcReject, Reason, Rejection};
use tower_redis_ratelimit::{Key, LocalStore, RateLimitLayer};

use crate::support::*;

/// One call a day for each address.
fn once_a_day<K: KeyExtractor>(by: K) -> RateLimitLayer<LocalStore, K, GrpcReject> {
    RateLimitLayer::new(LocalStore::default(), by, gcra("api", "1/d")).reject(GrpcReject::new())
}

#[tokio::test]
async fn tcp_clients_are_counted_by_address() {
    for layer in [
        once_a_day(Either::Peer(PeerIp)),
        once_a_day(Either::Client(ClientIp::peer())),
    ] {
        let incoming = TcpIncoming::from(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let address = incoming.local_addr().unwrap();
        let (_, health) = tonic_health::server::health_reporter();
        tokio::spawn(
            Server::builder()
                .layer(layer)
                .add_service(health)
                .serve_with_incoming(incoming),
        );
        let url = format!("http://{address}");
        // The second client has another connection, and another port.
        for code in [None, Some(Code::ResourceExhausted)] {
            let channel = Endpoint::new(url.clone()).unwrap().connect().await.unwrap();
            assert_eq!(
                call(&channel, from("alice"))
                    .await
                    .err()
                    .map(|status| status.code()),
                code
            );
        }
    }
}

/// Two extractors of one type.
enum Either {
    Peer(PeerIp),
    Client(ClientIp),
}

impl KeyExtractor for Either {
    fn extract(
        &self,
        request: &http::request::Parts,
    ) -> Result<Key, tower_redis_ratelimit::extract::MissingKey> {
        let key = match self {
            Self::Peer(peer) => peer.extract(request),
            Self::Client(client) => client.extract(request),
        };
        assert_eq!(key, Ok(Key::ip([127, 0, 0, 1].into())));
        key
    }
}

#[tokio::test]
async fn tls_clients_are_counted_by_address() {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let identity = Identity::from_pem(cert.pem(), signing_key.serialize_pem());
    let incoming = TcpIncoming::from(TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = format!("https://{}", incoming.local_addr().unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder()
        .tls_config(ServerTlsConfig::new().identity(identity))
        .unwrap();
    let server = server
        .layer(once_a_day(Either::Peer(PeerIp)))
        .add_service(health);
    tokio::spawn(server.serve_with_incoming(incoming));

    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(cert.pem()))
        .domain_name("localhost");
    for code in [None, Some(Code::ResourceExhausted)] {
        let channel = Endpoint::new(url.clone())
            .unwrap()
            .tls_config(tls.clone())
            .unwrap()
            .connect()
            .await
            .unwrap();
        assert_eq!(
            call(&channel, from("alice"))
                .await
                .err()
                .map(|status| status.code()),
            code
        );
    }
}

#[tokio::test]
async fn unix_socket_clients_share_a_count() {
    let directory = tempfile::tempdir().unwrap();
    let path: &Path = &directory.path().join("socket");
    let incoming = UnixListenerStream::new(UnixListener::bind(path).unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    tokio::spawn(
        Server::builder()
            .layer(once_a_day(PeerIp))
            .add_service(health)
            .serve_with_incoming(incoming),
    );
    for code in [None, Some(Code::ResourceExhausted)] {
        let path = path.to_owned();
        let connect = service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://unix")
            .connect_with_connector(connect)
            .await
            .unwrap();
        assert_eq!(
            call(&channel, from("alice"))
                .await
                .err()
                .map(|status| status.code()),
            code
        );
    }
}

#[tokio::test]
async fn a_closure_adds_to_the_status() {
    let reject = |rejection: Rejection<'_>| {
        let mut status = tonic::Status::from(rejection.reason());
        if let Reason::Denied(decision) = rejection.reason() {
            status
                .metadata_mut()
                .insert("x-policy", decision.policy().name().parse().unwrap());
        }
        status.into_http::<tonic::body::Body>()
    };
    let server = serve(layer(gcra("api", "1/d")).reject(reject));
    call(&server, from("alice")).await.unwrap();
    let denied = call(&server, from("alice")).await.unwrap_err();
    assert_eq!(
        (denied.code(), field(&denied, "x-policy")),
        (Code::ResourceExhausted, Some("api"))
    );
}
