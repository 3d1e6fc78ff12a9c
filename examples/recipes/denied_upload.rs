//! A denied upload, whose client reads its 429 instead of failing to write.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header::EXPECT};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::{Router, routing::post};
use futures_util::{Stream, StreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, RateLimitLayer, Strategy};

/// Maximum number of bytes of a denied upload that are read.
const BYTES: usize = 16 << 20;
/// Maximum time to read them.
const TIME: Duration = Duration::from_secs(5);

/// The body of a request. If it is dropped early, as by a denial, its rest returns to the owner.
struct Lent {
    body: Option<BodyDataStream>,
    owner: Option<oneshot::Sender<BodyDataStream>>,
}

impl Stream for Lent {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match &mut self.body {
            Some(body) => body.poll_next_unpin(cx),
            None => Poll::Ready(None),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(rest), Some(owner)) = (self.body.take(), self.owner.take()) {
            drop(owner.send(rest));
        }
    }
}

/// Reads the rest of a denied upload before the response.
async fn read_on(request: Request, next: Next) -> Response {
    // Such a client sends nothing before the response.
    let is_waiting = request.headers().contains_key(EXPECT);
    let (owner, mut returned) = oneshot::channel();
    let lent = request.map(|body| {
        let (body, owner) = (Some(body.into_data_stream()), Some(owner));
        Body::from_stream(Lent { body, owner })
    });
    let response = next.run(lent).await;
    if response.status() == StatusCode::TOO_MANY_REQUESTS
        && !is_waiting
        && let Ok(rest) = returned.try_recv()
    {
        drop(timeout(TIME, discard(rest)).await);
    }
    response
}

async fn discard(mut rest: BodyDataStream) {
    let mut left = BYTES;
    while left > 0
        && let Some(Ok(bytes)) = rest.next().await
    {
        left = left.saturating_sub(bytes.len());
    }
}

/// Allows one upload an hour.
fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("uploads", Strategy::Gcra, "1/h")?;
    let limits = RateLimitLayer::new(LocalStore::default(), Global, policy);
    Ok(Router::new()
        .route("/", post(|_: Bytes| async {}))
        .layer(limits)
        .layer(from_fn(read_on)))
}

#[tokio::test]
async fn a_denied_upload_reads_its_429() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, app()?).into_future());
    let megabyte = vec![0; 1 << 20];
    for expected in ["200", "429", "429"] {
        // As some clients do: it writes all of a body before it reads.
        let megabytes = if expected == "200" { 1 } else { 8 };
        let mut client = TcpStream::connect(address).await?;
        let head = format!(
            "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            megabytes << 20
        );
        client.write_all(head.as_bytes()).await?;
        for _ in 0..megabytes {
            client.write_all(&megabyte).await?;
        }
        let mut response = String::new();
        client.read_to_string(&mut response).await?;
        assert!(
            response.starts_with(&format!("HTTP/1.1 {expected} ")),
            "{response}"
        );
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_endless_upload_is_not_read_on() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    let upload = |body| app.clone().oneshot(Request::post("/").body(body).unwrap());
    assert_eq!(upload(Body::empty()).await?.status(), 200);

    let (sent, mut count) = tokio::sync::mpsc::unbounded_channel();
    let endless = stream::repeat_with(move || {
        let _ = sent.send(());
        Ok::<_, axum::Error>(Bytes::from_static(&[0; 1 << 16]))
    });
    assert_eq!(upload(Body::from_stream(endless)).await?.status(), 429);
    let mut read = 0;
    while count.recv().await.is_some() {
        read += 1 << 16;
    }
    assert_eq!(read, BYTES);

    let silent = stream::pending::<Result<Bytes, axum::Error>>();
    let start = Instant::now();
    assert_eq!(upload(Body::from_stream(silent)).await?.status(), 429);
    assert_eq!(start.elapsed().as_secs(), TIME.as_secs());

    let start = Instant::now();
    let waiting = Body::from_stream(stream::pending::<Result<Bytes, axum::Error>>());
    let waiting = Request::post("/")
        .header(EXPECT, "100-continue")
        .body(waiting)?;
    assert_eq!(app.clone().oneshot(waiting).await?.status(), 429);
    assert!(start.elapsed().is_zero());
    Ok(())
}
