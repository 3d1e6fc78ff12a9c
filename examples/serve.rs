//! Serves an app like `axum::serve`, but closes a connection whose client does not send a complete request or read the
//! response in time. Without timeouts, a client could keep any number of connections open forever by sending nothing, or one
//! byte per minute. `listen.rs` bounds the number of connections.
//!
//! SIGTERM and Ctrl-C end it after the requests in flight. Without handlers, PID 1 of a container would ignore them.

use std::error::Error;
use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use futures_util::{StreamExt, stream};
use http::Request;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

use super::listen::Listen;

/// The time for the head of a request, and for the next one on an idle connection.
const HEAD: Duration = Duration::from_secs(5);
/// Maximum length of the head of a request in bytes. hyper's default is 400 KiB.
const HEAD_LENGTH: usize = 16 * 1024;
/// The time for the body of a request. Uploads may need more.
const BODY: Duration = Duration::from_secs(10);
/// Maximum duration of a shutdown. Kubernetes kills the process after 30 s, Docker after 10 s.
const SHUTDOWN: Duration = Duration::from_secs(9);

/// Serves HTTP/1. Each request has the peer's address, as with `into_make_service_with_connect_info::<SocketAddr>()`.
///
/// # Errors
///
/// If no signal handler can be installed.
pub(crate) async fn serve(listener: TcpListener, app: Router) -> io::Result<()> {
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let (stop, stopped) = watch::channel(());
    // Not hyper-util's builder, which reads the HTTP version first, without a timeout.
    let mut http = Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_LENGTH);
    // The head has a timeout, and a response may take long.
    let mut listen = Listen::new(listener, 0, Duration::MAX);
    loop {
        let accepted = tokio::select! {
            accepted = listen.accept() => accepted?,
            _ = terminated.recv() => break,
            _ = interrupted.recv() => break,
        };
        let peer = accepted.peer;
        let app = app.clone().map_request(move |mut request: Request<_>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            request.map(in_time)
        });
        let (http, mut stopped) = (http.clone(), stopped.clone());
        tokio::spawn(async move {
            let service = TowerToHyperService::new(app);
            let connection = http.serve_connection(TokioIo::new(accepted), service);
            let mut connection = pin!(connection.with_upgrades());
            // An error means that the client hung up or was too slow.
            tokio::select! {
                ended = &mut connection => drop(ended),
                _ = stopped.changed() => {
                    connection.as_mut().graceful_shutdown();
                    drop(connection.await);
                }
            }
        });
    }
    drop((listen, stopped));
    stop.send_replace(());
    // Each connection has a receiver.
    drop(timeout(SHUTDOWN, stop.closed()).await);
    Ok(())
}

/// Returns the body, which fails if it does not end in time.
fn in_time(body: hyper::body::Incoming) -> Body {
    let body = Body::new(body).into_data_stream();
    let begun = (body, Box::pin(sleep(BODY)));
    Body::from_stream(stream::try_unfold(
        begun,
        |(mut body, mut late)| async move {
            tokio::select! {
                bytes = body.next() => Ok(bytes.transpose()?.map(|bytes| (bytes, (body, late)))),
                () = &mut late => Err(Box::<dyn Error + Send + Sync>::from("the body is late")),
            }
        },
    ))
}
