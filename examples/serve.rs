//! Serves an app like `axum::serve`, but closes a connection that does not send a complete request head in time.
//! Without a timeout, a client could keep any number of connections open forever by sending nothing, or one byte per
//! minute.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::serve::Listener;
use http::Request;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::ServiceExt;

/// The time for the head of a request, and for the next one on an idle connection.
const HEAD: Duration = Duration::from_secs(5);

/// Serves HTTP/1. Each request has the peer's address, as with `into_make_service_with_connect_info::<SocketAddr>()`.
pub(crate) async fn serve(mut listener: TcpListener, app: Router) -> Infallible {
    // Not hyper-util's builder, which reads the HTTP version first, without a timeout.
    let mut http = Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD);
    loop {
        // `accept` retries after errors, such as too many open files.
        let (stream, peer): (_, SocketAddr) = Listener::accept(&mut listener).await;
        let app = app.clone().map_request(move |mut request: Request<_>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            request
        });
        let http = http.clone();
        tokio::spawn(async move {
            let service = TowerToHyperService::new(app);
            let connection = http.serve_connection(TokioIo::new(stream), service);
            // An error means that the client hung up or was too slow.
            drop(connection.with_upgrades().await);
        });
    }
}
