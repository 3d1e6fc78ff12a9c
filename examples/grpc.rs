//! A tonic server with bounds. tonic's defaults have none: a client could open any number of streams that never end, with a few
//! bytes each.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::{Stream, stream};
use http::Request;
use hyper::body::{Bytes, Frame};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tower::layer::util::{Identity, Stack};
use tower::util::MapRequestLayer;

use super::listen::{Connection, Listen};

/// Maximum number of concurrent streams of a connection. A client such as Envoy opens another connection for more.
const STREAMS: u32 = 40;
/// Maximum length in bytes of a header list, with 32 for each field. In memory, a list of many fields takes three times as much.
const HEADER_LIST: u32 = 4 * 1024;
/// Maximum length in bytes of all messages that are incomplete, over all connections, without the start of each.
const UNFINISHED: usize = 64 * 1024 * 1024;
/// The length in bytes of a message's start. So clients that hold all of the above do not affect short messages.
const START: usize = 1_024;
/// Maximum length in bytes of a message that has not been read, of a stream and of a connection.
const STREAM_WINDOW: u32 = 64 * 1024;
const CONNECTION_WINDOW: u32 = 256 * 1024;
/// The time for a request and for the head of its response. A stream of responses may take longer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the pings that find dead connections, and the time for the reply.
const PING: Duration = Duration::from_secs(30);
/// The age at which a connection takes no more requests, so that clients find new instances.
const CONNECTION_AGE: Duration = Duration::from_secs(3_600);
/// Maximum age of a connection. tonic's `max_connection_age_grace` would end it without the notice at `CONNECTION_AGE`.
const MAX_AGE: Duration = Duration::from_secs(3_610);
/// The length of the bytes with which a client begins an HTTP/2 connection.
const PREFACE: usize = 24;

type BoundedServer<F> = Server<Stack<MapRequestLayer<F>, Identity>>;

/// A server with bounds: [`incoming`] has those of its connections. A message needs another one, `max_decoding_message_size`.
pub(crate) fn server() -> BoundedServer<impl Fn(Request<Body>) -> Request<Body> + Clone> {
    let free = Arc::new(Semaphore::new(UNFINISHED));
    Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(HEADER_LIST)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .timeout(TIMEOUT)
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING))
        .max_connection_age(CONNECTION_AGE)
        .layer(MapRequestLayer::new(move |request: Request<Body>| {
            let free = Arc::clone(&free);
            request.map(|body| bounded(body, free))
        }))
}

/// A body that fails if it takes more bytes than are free, beyond its start.
pub(crate) fn bounded(body: Body, free: Arc<Semaphore>) -> Body {
    Body::new(RequestBody {
        body,
        start: START,
        free,
        held: None,
    })
}

/// The connections of a listener, for `serve_with_incoming`.
pub(crate) fn incoming(listener: TcpListener) -> impl Stream<Item = std::io::Result<Connection>> {
    stream::unfold(
        Listen::new(listener, PREFACE, MAX_AGE),
        async |mut listen| Some((listen.accept().await, listen)),
    )
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        TcpConnectInfo {
            local_addr: None,
            remote_addr: Some(self.peer),
        }
    }
}

struct RequestBody {
    body: Body,
    /// The rest of the message's start.
    start: usize,
    free: Arc<Semaphore>,
    /// A permit for each received byte after the start.
    held: Option<OwnedSemaphorePermit>,
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &polled
            && let Some(data) = frame.data_ref()
        {
            let beyond = data.len().saturating_sub(self.start);
            self.start = self.start.saturating_sub(data.len());
            let bytes = u32::try_from(beyond).unwrap_or(u32::MAX);
            let Ok(received) = Arc::clone(&self.free).try_acquire_many_owned(bytes) else {
                let status = Status::resource_exhausted("too many incomplete messages");
                return Poll::Ready(Some(Err(status)));
            };
            match &mut self.held {
                Some(held) => held.merge(received),
                None => self.held = Some(received),
            }
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
