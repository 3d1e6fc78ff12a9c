//! A rejection on the wire: one HEADERS frame that ends the stream.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{once, pending};
use futures_util::{StreamExt, future::ready as now};
use http::{Request, Version};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::time::advance;
use tonic::transport::Server;
use tonic_types::pb;

use crate::support::*;

/// A client's end of a connection, which keeps what it reads.
struct Recorded {
    stream: DuplexStream,
    read: Arc<Mutex<Vec<u8>>>,
}

impl AsyncRead for Recorded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.read
            .lock()
            .unwrap()
            .extend_from_slice(&buf.filled()[filled..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Recorded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A frame of HTTP/2 (RFC 9113): its type, flags and stream.
type Frame = (u8, u8, u32);

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

fn frames(mut bytes: &[u8]) -> Vec<Frame> {
    let mut frames = vec![];
    while let Some((head, rest)) = bytes.split_at_checked(9) {
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        frames.push((
            head[3],
            head[4],
            u32::from_be_bytes([head[5], head[6], head[7], head[8]]),
        ));
        bytes = &rest[len..];
    }
    assert!(bytes.is_empty());
    frames
}

/// A field of a protobuf message: its number, and bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    match u8::try_from(bytes.len()).unwrap() {
        len @ 0..=0x7f => field.push(len),
        len => field.extend([len, 1]),
    }
    field.extend(bytes);
    field
}

/// `google.rpc.Status` with both details, in base64 without padding.
const DETAILS: &str = "CAgSPFRoZSBxdW90YSBvZiAxIHBlciA5MCBzZWNvbmRzIGlzIHVzZWQgdXAuIFRyeSBhZ2FpbiBpbiA\
    5MCBzLho2Cih0eXBlLmdvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuUmV0cnlJbmZvEgoKCAhZEODRzNwDGnQKK3R5cGUuZ29vZ2x\
    lYXBpcy5jb20vZ29vZ2xlLnJwYy5RdW90YUZhaWx1cmUSRQpDCgNhcGkSPFRoZSBxdW90YSBvZiAxIHBlciA5MCBzZWNvbmRzIGl\
    zIHVzZWQgdXAuIFRyeSBhZ2FpbiBpbiA5MCBzLg";

#[tokio::test(start_paused = true)]
async fn a_denial_is_one_frame_of_headers() {
    let (client, connection) = tokio::io::duplex(1 << 16);
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder()
        .layer(layer(gcra("api", "1/90s")))
        .add_service(health);
    tokio::spawn(
        server.serve_with_incoming(once(now(Ok::<_, io::Error>(connection))).chain(pending())),
    );

    let read = Arc::new(Mutex::new(vec![]));
    let client = Recorded {
        stream: client,
        read: Arc::clone(&read),
    };
    let (mut client, connection) = h2::client::handshake(client).await.unwrap();
    tokio::spawn(connection);

    let mut responses = vec![];
    for _ in 0..2 {
        let request = Request::post("http://in.memory/grpc.health.v1.Health/Check")
            .version(Version::HTTP_2)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("x-user", "alice")
            .body(())
            .unwrap();
        client = client.ready().await.unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        // A message that is not compressed, and has no bytes.
        body.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
        let (head, mut body) = response.await.unwrap().into_parts();
        while body.data().await.is_some() {}
        responses.push((head, body.trailers().await.unwrap()));
        advance(Duration::from_micros(500)).await;
    }

    let of_stream = |stream| {
        let frames = frames(&read.lock().unwrap())
            .into_iter()
            .filter(move |frame| frame.2 == stream);
        frames
            .map(|(kind, flags, _)| (kind, flags))
            .collect::<Vec<_>>()
    };
    // A granted call has headers, a message, and a status in the trailers.
    assert_eq!(
        of_stream(1),
        [
            (HEADERS, END_HEADERS),
            (DATA, 0),
            (HEADERS, END_HEADERS | END_STREAM)
        ]
    );
    assert!(responses[0].1.is_some());
    assert_eq!(of_stream(3), [(HEADERS, END_HEADERS | END_STREAM)]);

    let (head, trailers) = &responses[1];
    assert_eq!((head.status.as_u16(), trailers), (200, &None));
    let mut fields: Vec<_> = head
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
        .collect();
    fields.sort_unstable();
    fields.retain(|(name, _)| *name != "date");
    assert_eq!(
        fields,
        [
            ("content-type", "application/grpc"),
            (
                "grpc-message",
                "The%20quota%20of%201%20per%2090%20seconds%20is%20used%20up.%20Try%20again%20in%2090%20s."
            ),
            ("grpc-retry-pushback-ms", "90000"),
            ("grpc-status", "8"),
            ("grpc-status-details-bin", DETAILS),
            ("ratelimit", "\"api\";r=0;t=90"),
            ("ratelimit-policy", "\"api\";q=1;w=90"),
            ("retry-after", "90"),
        ]
    );

    // These bytes, written by hand from the definitions of `google.rpc.Status` and its details.
    let status = tonic::Status::from_header_map(&head.headers).unwrap();
    let sentence = b"The quota of 1 per 90 seconds is used up. Try again in 90 s.";
    let any = |kind: &[u8], bytes: &[u8]| {
        let url = [b"type.googleapis.com/google.rpc.", kind].concat();
        field(3, &[field(1, &url), field(2, bytes)].concat())
    };
    // 89 s, and 999,500,000 ns as a varint.
    let retry_info = field(1, &[0x08, 89, 0x10, 0xe0, 0xd1, 0xcc, 0xdc, 0x03]);
    let quota_failure = field(1, &[field(1, b"api"), field(2, sentence)].concat());
    let expected = [
        vec![0x08, 8],
        field(2, sentence),
        any(b"RetryInfo", &retry_info),
        any(b"QuotaFailure", &quota_failure),
    ];
    assert_eq!(status.details(), expected.concat());

    let status = pb::Status::decode(status.details()).unwrap();
    let [retry_info, quota_failure] = status.details.try_into().unwrap();
    let delay = pb::RetryInfo::decode(&*retry_info.value)
        .unwrap()
        .retry_delay
        .unwrap();
    assert_eq!((delay.seconds, delay.nanos), (89, 999_500_000));
    let violations = pb::QuotaFailure::decode(&*quota_failure.value)
        .unwrap()
        .violations;
    assert_eq!(
        (
            violations.len(),
            &*violations[0].subject,
            violations[0].description.as_bytes()
        ),
        (1, "api", &sentence[..])
    );
}
