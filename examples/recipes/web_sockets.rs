//! WebSockets: few at a time, and few messages.

use std::net::SocketAddr;

use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::{Router, routing::any};
use futures_util::{SinkExt, StreamExt};
use tokio_tungstenite::{connect_async, tungstenite};
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::settle::RequestCost;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    ConfigError, Key, Limiter, LocalStore, Policy, Quota, RateLimitLayer, Strategy,
};

async fn upgrade<S: Store>(
    State(messages): State<Limiter<S>>,
    cost: RequestCost,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Response {
    // With authentication, use its user.
    let user = Key::new(
        headers
            .get("x-user")
            .map_or(&b""[..], |user| user.as_bytes()),
    );
    upgrade.on_upgrade(move |mut socket| async move {
        let _ = echo(&mut socket, messages, user).await;
        // Before the socket closes, so that the client's next one is not denied.
        drop(cost);
    })
}

async fn echo<S: Store>(
    socket: &mut WebSocket,
    messages: Limiter<S>,
    user: Key,
) -> Result<(), Box<dyn std::error::Error>> {
    while let Some(message) = socket.recv().await {
        let message = message?;
        if !messages.take(user, 1).await?.is_allowed() {
            let reason = "too many messages".into();
            socket
                .send(Message::Close(Some(CloseFrame {
                    code: close_code::POLICY,
                    reason,
                })))
                .await?;
            break;
        }
        if let Message::Text(_) = message {
            socket.send(message).await?;
        }
    }
    Ok(())
}

pub(crate) fn app<S: Store>(store: S) -> Result<Router, ConfigError> {
    let messages = Policy::new("messages", Strategy::Gcra, Quota::per_minute(3))?;
    let sockets = Policy::in_flight("sockets", 2)?;
    let limits =
        RateLimitLayer::new(store.clone(), HeaderKey::new("x-user")?, sockets).until_body_end();
    Ok(Router::new()
        .route("/", any(upgrade::<S>))
        .layer(limits)
        .with_state(Limiter::new(store, messages)))
}

pub(crate) type Socket =
    tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

/// A socket of this user, or the status of the answer.
pub(crate) async fn connect(address: SocketAddr, user: &str) -> Result<Socket, u16> {
    use tungstenite::client::IntoClientRequest;

    let mut request = format!("ws://{address}/")
        .into_client_request()
        .expect("a good URL");
    request
        .headers_mut()
        .insert("x-user", user.parse().expect("a good name"));
    match connect_async(request).await {
        Ok((socket, _)) => Ok(socket),
        Err(tungstenite::Error::Http(response)) => Err(response.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn sockets_and_messages_are_limited() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let (address, app) = (listener.local_addr()?, app(LocalStore::default())?);
    tokio::spawn(async move { axum::serve(listener, app).await });

    let first = connect(address, "ann").await.expect("one");
    let mut sockets = [first, connect(address, "ann").await.expect("two")];
    assert_eq!(connect(address, "ann").await.err(), Some(429));
    assert!(connect(address, "bob").await.is_ok());

    // Three messages a minute, by whichever socket.
    for (socket, is_echoed) in [(0, true), (1, true), (0, true), (1, false)] {
        sockets[socket].send("hello".into()).await?;
        let answer = sockets[socket].next().await.ok_or("an answer")??;
        assert_eq!(
            (answer.is_text(), answer.is_close()),
            (is_echoed, !is_echoed)
        );
    }

    // The server has closed one. It frees the other when it has noticed the disconnect.
    let third = connect(address, "ann").await.expect("one is free");
    drop(sockets);
    while connect(address, "ann").await.is_err() {}
    drop(third);
    Ok(())
}
