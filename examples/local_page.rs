//! A page for the browser on this machine, as `dashboard` and `strategies` have it.

use std::env;
use std::error::Error;
use std::hash::{BuildHasher, RandomState};

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{Html, IntoResponse, Response};
use http::header::{CONTENT_SECURITY_POLICY, HOST, ORIGIN};
use http::{HeaderValue, Method, StatusCode};
use tokio::net::TcpListener;

/// Listens at `PORT` (3000), and prints what to do there.
pub(crate) async fn listen(then: &str) -> Result<TcpListener, Box<dyn Error>> {
    let port: u16 = env::var("PORT")
        .unwrap_or_else(|_| "3000".to_owned())
        .parse()?;
    let listener = TcpListener::bind(("127.0.0.1", port))
        .await
        .map_err(|error| format!("PORT {port}: {error}"))?;
    let port = listener.local_addr()?.port();
    println!("Open http://localhost:{port}/ and {then}. Ctrl-C ends it.");
    Ok(listener)
}

/// The page, with `NONCE` replaced. It may load only its own script and style, and connect only to this server.
pub(crate) fn page(html: &str) -> impl IntoResponse + use<> {
    let nonce = format!("{:016x}", RandomState::new().hash_one(()));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    (
        [(CONTENT_SECURITY_POLICY, policy)],
        Html(html.replace("NONCE", &nonce)),
    )
}

/// Rejects requests that another site makes a browser send: they have another host name or another origin.
pub(crate) async fn only_our_page(request: Request, next: Next) -> Response {
    let host = request
        .headers()
        .get(HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default();
    let is_local = matches!(host.split(':').next(), Some("localhost" | "127.0.0.1"));
    let is_same = request.headers().get(ORIGIN).map(HeaderValue::as_bytes)
        == Some(format!("http://{host}").as_bytes());
    match is_local && (is_same || request.method() == Method::GET) {
        true => next.run(request).await,
        false => (StatusCode::FORBIDDEN, "for the page of this example only").into_response(),
    }
}
