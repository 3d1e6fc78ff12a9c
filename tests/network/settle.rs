//! The settled cost of a request, over real connections: responses without a body, upgrades, clients that disconnect,
//! streams of gRPC.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::routing::{any, get, post};
use futures_util::{FutureExt, Stream, StreamExt, stream};
use http::{Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tonic::body::Body as TonicBody;
use tonic::transport::{Channel, Server};
use tonic::{Code, Status, Streaming, client, server};
use tonic_prost::ProstCodec;
use tower::service_fn;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::extract::key_fn;
use tower_redis_ratelimit::reject::GrpcReject;
use tower_redis_ratelimit::settle::{RequestCost, Settlement};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, LocalStore, Policy, RateLimitLayer, Strategy};

use crate::support::in_memory;

const CALLER: Key = Key::GLOBAL;

/// 1,000 units, and none refills while a test runs.
fn policy() -> Policy {
    Policy::new("units", Strategy::FixedWindow(Align::FirstHit), "1000/d").unwrap()
}

fn charged(store: &LocalStore) -> u32 {
    1_000
        - store
            .check(Check::peek(CALLER, &policy().into(), 0))
            .now_or_never()
            .unwrap()
            .unwrap()
            .remaining()
}

async fn settled(store: &LocalStore, cost: u32) {
    let all = async {
        while charged(store) != cost {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(
        timeout(Duration::from_secs(20), all).await.is_ok(),
        "{} charged instead of {cost}",
        charged(store)
    );
}

/// A stream without an end, whose parts cost one each.
async fn endless(request: Request) -> Body {
    let charge = request.extensions().get::<RequestCost>().unwrap().clone();
    Body::from_stream(stream::unfold(charge, |charge| async {
        charge.add(1);
        sleep(Duration::from_millis(1)).await;
        Some((Ok::<_, Infallible>(Bytes::from_static(b"part")), charge))
    }))
}

/// Takes the connection over, and gives each byte back. A byte costs one.
async fn upgrade(request: Request) -> Response<Body> {
    let charge = request.extensions().get::<RequestCost>().unwrap().clone();
    tokio::spawn(async move {
        let mut connection = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
        charge.set(0);
        while let Ok(byte) = connection.read_u8().await {
            charge.add(1);
            connection.write_u8(byte).await.unwrap();
        }
    });
    switch()
}

/// Takes the connection over without the handle.
async fn forgets(request: Request) -> Response<Body> {
    let (mut parts, body) = request.into_parts();
    parts.extensions.remove::<RequestCost>();
    let upgrading = hyper::upgrade::on(Request::from_parts(parts, body));
    tokio::spawn(async move {
        let _connection = upgrading.await.unwrap();
        std::future::pending::<()>().await;
    });
    switch()
}

fn switch() -> Response<Body> {
    let upgrade = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
    upgrade
        .header("connection", "upgrade")
        .header("upgrade", "echo")
        .body(Body::empty())
        .unwrap()
}

/// A server behind a layer that reserves 10, and its count.
async fn start(settlement: Settlement) -> (SocketAddr, LocalStore) {
    let store = LocalStore::default();
    let layer = RateLimitLayer::new(store.clone(), key_fn(|_| Some(CALLER)), policy()).cost(|_| 10);
    let app = Router::new()
        .route("/text", get(async || "0123456789"))
        .route("/text", post(async |body: String| body))
        .route("/204", get(async || StatusCode::NO_CONTENT))
        .route("/304", get(async || StatusCode::NOT_MODIFIED))
        .route("/endless", get(endless))
        .route("/upgrade", any(upgrade))
        .layer(layer.settle(move |_| settlement));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (address, store)
}

/// Sends a request, and reads until the connection is closed.
async fn ask(address: SocketAddr, request: &str) -> String {
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection
        .write_all(format!("{request}\r\nhost: test\r\nconnection: close\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn charged_bytes_are_the_bytes_sent() {
    let (address, store) = start(Settlement::Bytes {
        per: NonZeroU32::new(4).unwrap(),
    })
    .await;
    assert!(
        ask(address, "GET /text HTTP/1.1")
            .await
            .ends_with("0123456789")
    );
    settled(&store, 3).await;
    for path in ["HEAD /text", "GET /204", "GET /304"] {
        assert!(
            ask(address, &format!("{path} HTTP/1.1"))
                .await
                .starts_with("HTTP/1.1 ")
        );
        settled(&store, 3).await;
    }
}

#[tokio::test]
async fn bodiless_responses_keep_the_reservation() {
    let (address, store) = start(Settlement::AtEnd).await;
    for (i, path) in (1..).zip(["HEAD /text", "GET /204", "GET /304"]) {
        assert!(
            ask(address, &format!("{path} HTTP/1.1"))
                .await
                .starts_with("HTTP/1.1 ")
        );
        settled(&store, 10 * i).await;
    }
}

/// `100 Continue` is no response.
#[tokio::test]
async fn an_interim_response_settles_nothing() {
    let (address, store) = start(Settlement::Cost(7)).await;
    let mut connection = TcpStream::connect(address).await.unwrap();
    let head = "POST /text HTTP/1.1\r\nhost: test\r\ncontent-length: 5\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n";
    connection.write_all(head.as_bytes()).await.unwrap();
    let mut interim = vec![0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    connection.read_exact(&mut interim).await.unwrap();
    assert!(
        interim.starts_with(b"HTTP/1.1 100"),
        "{}",
        String::from_utf8_lossy(&interim)
    );
    assert_eq!(charged(&store), 10, "reserved");
    connection.write_all(b"hello").await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("hello"),
        "{answer}"
    );
    settled(&store, 7).await;
}

/// The task that has the connection keeps the handle.
#[tokio::test]
async fn an_upgraded_connection_settles_on_close() {
    let (address, store) = start(Settlement::AtEnd).await;
    let (mut connection, answer) = upgraded(address, "/upgrade").await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    for byte in 0..25 {
        connection.write_u8(byte).await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), byte);
        assert_eq!(charged(&store), 10, "the response has ended long since");
    }
    drop(connection);
    settled(&store, 25).await;
}

/// Requests an upgrade, and reads the head of the response.
async fn upgraded(address: SocketAddr, path: &str) -> (TcpStream, String) {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n"
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(connection.read_u8().await.unwrap());
    }
    (connection, String::from_utf8(answer).unwrap())
}

/// The task of the connection ends it by the handle: the response has ended before it begins.
#[tokio::test]
async fn an_upgraded_connection_stays_in_flight() {
    let store = LocalStore::default();
    let streams = Policy::in_flight("streams", 2).unwrap();
    let layer = RateLimitLayer::new(store.clone(), key_fn(|_| Some(CALLER)), streams.clone())
        .until_body_end();
    let app = Router::new()
        .route("/upgrade", any(upgrade))
        .route("/forgets", any(forgets))
        .layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });

    let mut open = vec![];
    for number in 0..20 {
        let (mut connection, answer) = upgraded(address, "/upgrade").await;
        if number >= 2 {
            assert!(answer.starts_with("HTTP/1.1 429"), "{number}: {answer}");
            continue;
        }
        assert!(answer.starts_with("HTTP/1.1 101"), "{number}: {answer}");
        connection.write_u8(7).await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), 7);
        open.push(connection);
    }
    // Each that is closed makes room for one.
    let free = || {
        let peek = Check::peek(CALLER, &streams.clone().into(), 1);
        store
            .check(peek)
            .now_or_never()
            .unwrap()
            .unwrap()
            .remaining()
    };
    open.pop();
    let freed = async {
        while free() == 0 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(
        timeout(Duration::from_secs(20), freed).await.is_ok(),
        "it is not refunded"
    );
    let (_connection, answer) = upgraded(address, "/forgets").await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    // As docs/choosing.md says: without the handle it ends with its response.
    let freed = async {
        while free() == 0 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(
        timeout(Duration::from_secs(20), freed).await.is_ok(),
        "it is held"
    );
}

#[tokio::test]
async fn disconnected_clients_pay_for_work_done() {
    let (address, store) = start(Settlement::AtEnd).await;
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection
        .write_all(b"GET /endless HTTP/1.1\r\nhost: test\r\n\r\n")
        .await
        .unwrap();
    let mut some = [0; 400];
    connection.read_exact(&mut some).await.unwrap();
    assert_eq!(charged(&store), 10);
    drop(connection);
    let ended = async {
        while charged(&store) == 10 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(
        timeout(Duration::from_secs(20), ended).await.is_ok(),
        "it is not settled"
    );
    assert!(charged(&store) > 10, "{} charged", charged(&store));
}

type Messages = std::pin::Pin<Box<dyn Stream<Item = Result<String, Status>> + Send>>;

/// A method that streams an answer to each message, at a cost of one for each, but to `fail` and `hang`.
fn echo() -> (Channel, LocalStore) {
    let (channel, connections) = in_memory();
    let store = LocalStore::default();
    let method = |request: tonic::Request<Streaming<String>>| {
        let charge = request.extensions().get::<RequestCost>().unwrap().clone();
        let answers = request.into_inner().then(move |message| {
            charge.add(1);
            async {
                match message? {
                    text if text == "fail" => Err(Status::internal(text)),
                    text if text == "hang" => std::future::pending().await,
                    text => Ok(text),
                }
            }
        });
        async move { Ok::<_, Status>(tonic::Response::new(Box::pin(answers) as Messages)) }
    };
    let service = service_fn(move |request: http::Request<TonicBody>| {
        let method = service_fn(method);
        async move {
            let codec = ProstCodec::<String, String>::default();
            Ok::<_, Infallible>(server::Grpc::new(codec).streaming(method, request).await)
        }
    });
    let layer = RateLimitLayer::new(store.clone(), key_fn(|_| Some(CALLER)), policy()).cost(|_| 10);
    let layer = layer
        .reject(GrpcReject::new())
        .settle(|_| Settlement::AtEnd);
    tokio::spawn(
        Server::builder()
            .layer(layer)
            .serve_with_incoming(service, connections),
    );
    (channel, store)
}

async fn open(
    channel: &Channel,
    messages: impl Stream<Item = String> + Send + 'static,
) -> Streaming<String> {
    let mut grpc = client::Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/test.Echo/Echo");
    let codec = ProstCodec::<String, String>::default();
    grpc.streaming(tonic::Request::new(messages), path, codec)
        .await
        .unwrap()
        .into_inner()
}

#[tokio::test]
async fn grpc_streams_settle_however_they_end() {
    let (channel, store) = echo();
    // To its end, with its trailers.
    let texts = |texts: &'static [&str]| stream::iter(texts).map(|text| (*text).to_owned());
    let answers: Vec<_> = open(&channel, texts(&["a", "b", "c"]))
        .await
        .collect()
        .await;
    assert_eq!(
        answers.iter().flatten().collect::<Vec<_>>(),
        ["a", "b", "c"]
    );
    settled(&store, 3).await;
    // To an error.
    let mut answers = open(&channel, texts(&["a", "fail"])).await;
    assert_eq!(answers.message().await.unwrap().as_deref(), Some("a"));
    assert_eq!(answers.message().await.unwrap_err().code(), Code::Internal);
    settled(&store, 5).await;
    // Until the client disconnects.
    let mut answers = open(&channel, texts(&["a", "b", "hang"])).await;
    for _ in 0..2 {
        assert!(answers.message().await.unwrap().is_some());
    }
    assert_eq!(charged(&store), 15);
    drop(answers);
    settled(&store, 8).await;
}
