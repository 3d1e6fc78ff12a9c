//! Streams: a call is counted once, and its messages by a `Limiter`, as in the recipe.

#[path = "../../examples/recipes/stream_messages.rs"]
mod stream_messages;

use std::convert::Infallible;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;
use tonic::body::Body;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status, Streaming, client, server};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt;
use tower::service_fn;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Limiter};

use self::stream_messages::paced;
use crate::support::*;

/// A service whose one method echoes each message when its permit has come; 2 calls an hour.
fn echo<S: Store<Future: Send + Sync>>(limiter: Limiter<S>) -> Channel {
    let (channel, connections) = in_memory();
    let method = move |request: Request<Streaming<String>>| {
        let paced = paced(limiter.clone(), Key::new("alice"), request.into_inner());
        async move { Ok::<_, Status>(Response::new(paced)) }
    };
    let service = service_fn(move |request: http::Request<Body>| {
        let method = service_fn(method.clone());
        async move {
            let codec = ProstCodec::<String, String>::default();
            Ok::<_, Infallible>(server::Grpc::new(codec).streaming(method, request).await)
        }
    });
    tokio::spawn(
        Server::builder()
            .layer(layer(gcra("calls", "2/h")))
            .serve_with_incoming(service, connections),
    );
    channel
}

async fn open(channel: &Channel, messages: &'static [&str]) -> Result<Streaming<String>, Status> {
    let mut grpc = client::Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let mut request = Request::new(stream::iter(messages).map(|message| (*message).to_owned()));
    request
        .metadata_mut()
        .insert("x-user", "alice".parse().unwrap());
    let path = http::uri::PathAndQuery::from_static("/test.Echo/Echo");
    Ok(grpc
        .streaming(request, path, ProstCodec::<String, String>::default())
        .await?
        .into_inner())
}

#[tokio::test(start_paused = true)]
async fn a_stream_counts_once() {
    let echo = echo(Limiter::new(
        tower_redis_ratelimit::LocalStore::default(),
        gcra("messages", "1000/s"),
    ));
    for _ in 0..2 {
        let answers: Vec<String> = open(&echo, &["a", "b", "c", "d"])
            .await
            .unwrap()
            .try_collect()
            .await
            .unwrap();
        assert_eq!(answers, ["a", "b", "c", "d"]);
    }
    assert_eq!(
        open(&echo, &["a"]).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
}

#[tokio::test(start_paused = true)]
async fn each_message_waits_for_a_permit() {
    let echo = echo(Limiter::new(
        tower_redis_ratelimit::LocalStore::default(),
        gcra("messages", "1/s"),
    ));
    let start = Instant::now();
    let mut answers = open(&echo, &["a", "b", "c"]).await.unwrap();
    for (seconds, expected) in [(0, "a"), (1, "b"), (2, "c")] {
        assert_eq!(answers.message().await.unwrap().as_deref(), Some(expected));
        let (waited, wait) = (start.elapsed(), Duration::from_secs(seconds));
        assert!(
            (wait..wait + Duration::from_millis(10)).contains(&waited),
            "{expected}: {waited:?}"
        );
    }
    assert_eq!(answers.message().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn too_long_message_waits_end_the_stream() {
    let echo = echo(Limiter::new(
        tower_redis_ratelimit::LocalStore::default(),
        gcra("messages", "1/min"),
    ));
    let mut answers = open(&echo, &["a", "b"]).await.unwrap();
    assert_eq!(answers.message().await.unwrap().as_deref(), Some("a"));
    let denied = answers.message().await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert_eq!(
        denied.get_details_retry_info().unwrap().retry_delay,
        Some(Duration::from_secs(60))
    );
    assert_eq!(
        denied.get_details_quota_failure().unwrap().violations[0].subject,
        "messages"
    );
    assert_eq!(field(&denied, PUSHBACK), Some("60000"));
}

#[tokio::test]
async fn a_store_failure_ends_the_stream() {
    let echo = echo(Limiter::new(Broken, gcra("messages", "1/s")));
    let failed = open(&echo, &["a"])
        .await
        .unwrap()
        .message()
        .await
        .unwrap_err();
    assert_eq!(
        (failed.code(), field(&failed, PUSHBACK)),
        (Code::Unavailable, Some("1000"))
    );
    tells_no_secret(&failed);
}
