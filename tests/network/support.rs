//! Shared by the tests: layers, servers in memory, and the results of a client.

use std::future::Pending;
use std::io;
use std::time::Duration;

use http::{HeaderValue, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower::service_fn;
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor};
use tower_redis_ratelimit::reject::{GrpcReject, Reject};
use tower_redis_ratelimit::store::{Answer, ErrorKind, Store, StoreError};
use tower_redis_ratelimit::{LocalStore, Policies, Policy, RateLimitLayer, Strategy};

pub(crate) const PUSHBACK: &str = "grpc-retry-pushback-ms";

/// A text that no client may read.
pub(crate) const SECRET: &str = "hunter2";

pub(crate) fn gcra(name: &str, quota: &str) -> Policy {
    Policy::new(name, Strategy::Gcra, quota).unwrap()
}

/// Counts by user in this process, and answers over gRPC.
pub(crate) fn layer(
    policies: impl Into<Policies>,
) -> RateLimitLayer<LocalStore, HeaderKey, GrpcReject> {
    layer_with(LocalStore::default(), policies)
}

/// Counts in `store` instead.
pub(crate) fn layer_with<S: Store>(
    store: S,
    policies: impl Into<Policies>,
) -> RateLimitLayer<S, HeaderKey, GrpcReject> {
    RateLimitLayer::new(store, HeaderKey::new("x-user").unwrap(), policies.into())
        .reject(GrpcReject::new())
}

/// A client's way to a server in memory, and the server's ends of the connections.
pub(crate) fn in_memory() -> (Channel, UnboundedReceiverStream<io::Result<DuplexStream>>) {
    let (sender, connections) = mpsc::unbounded_channel();
    let connect = move |_: Uri| {
        let (client, server) = tokio::io::duplex(1 << 16);
        let sent = sender
            .send(Ok(server))
            .map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused));
        async move { sent.map(|()| TokioIo::new(client)) }
    };
    let channel =
        Endpoint::from_static("http://in.memory").connect_with_connector_lazy(service_fn(connect));
    (channel, UnboundedReceiverStream::new(connections))
}

/// A health service behind a layer, with the way to it.
pub(crate) fn serve<S, K, R>(layer: RateLimitLayer<S, K, R>) -> Channel
where
    S: Store<Future: Send>,
    K: KeyExtractor + Send + Sync + 'static,
    R: Reject<Body> + Send + Sync + 'static,
{
    let (channel, connections) = in_memory();
    let (_, health) = tonic_health::server::health_reporter();
    tokio::spawn(
        Server::builder()
            .layer(layer)
            .add_service(health)
            .serve_with_incoming(connections),
    );
    channel
}

pub(crate) fn from(user: &str) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest::default());
    request
        .metadata_mut()
        .insert("x-user", user.parse().unwrap());
    request
}

/// Calls the health service, which is well.
pub(crate) async fn call(
    channel: &Channel,
    request: Request<HealthCheckRequest>,
) -> Result<(), Status> {
    let mut client = HealthClient::new(channel.clone());
    // A lost wake-up is to fail the test, not to hang it.
    let answer = timeout(Duration::from_secs(600), client.check(request))
        .await
        .expect("an answer");
    answer.map(|response| assert_eq!(response.into_inner().status, 1))
}

pub(crate) fn field<'a>(status: &'a Status, name: &str) -> Option<&'a str> {
    status
        .metadata()
        .get(name)
        .map(|value| value.to_str().unwrap())
}

/// Makes sure that nothing of a status contains a secret.
pub(crate) fn tells_no_secret(status: &Status) {
    let details = String::from_utf8_lossy(status.details());
    for text in [&format!("{status:?}"), status.message(), &details] {
        assert!(!text.contains(SECRET), "{text}");
    }
}

/// A store that cannot decide.
#[derive(Debug, Clone)]
pub(crate) struct Broken;

impl Store for Broken {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::ready(Err(StoreError::with_source(
            ErrorKind::Configuration,
            io::Error::other(SECRET),
        )))
    }
}

pub(crate) const API_KEY: HeaderValue = HeaderValue::from_static("ApiKey");
