//! Makes a connection to one server, and says why it cannot be made: of two ends of which only one speaks TLS, neither tells
//! the other so.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisError};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::errors::{error_of_greeting, no_tls, tls_wanted};
use super::names::{self, Host};
use super::tls::ServerName;
use crate::store::StoreError;

#[derive(Debug)]
pub(super) struct Dialer {
    timeout: Duration,
    server_name: ServerName,
    /// Whether it has ever made a connection: then both ends agree on TLS.
    connected: AtomicBool,
}

/// A server that has said nothing for so long is asked whether it speaks TLS.
const LONGEST_DOUBT: Duration = Duration::from_millis(500);

impl Dialer {
    /// A dialer whose callers wait for so long.
    pub(super) fn new(timeout: Duration, server_name: ServerName) -> Self {
        Self { timeout, server_name, connected: AtomicBool::new(false) }
    }

    /// A new connection to a server.
    pub(super) async fn dial(&self, server: &ConnectionInfo) -> Result<MultiplexedConnection, StoreError> {
        let connection = match self.connected.load(Relaxed) {
            true => self.open(server).await.map_err(|error| error_of_greeting(&error, server)),
            false => self.open_first(server).await,
        };
        self.connected.fetch_or(connection.is_ok(), Relaxed);
        connection
    }

    async fn open(&self, server: &ConnectionInfo) -> Result<MultiplexedConnection, RedisError> {
        // Redis-rs has times of its own.
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout.saturating_mul(2)));
        if let ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } = server.addr() {
            config = config.set_dns_resolver(Host(host.clone()));
        }
        Client::open(self.server_name.of(server))?.get_multiplexed_async_connection_with_config(&config).await
    }

    /// A Redis without TLS takes the greeting for the beginning of a command, and waits for the rest; one with TLS closes a
    /// connection without it.
    async fn open_first(&self, server: &ConnectionInfo) -> Result<MultiplexedConnection, StoreError> {
        let mut opening = pin!(self.open(server));
        let opened = match server.addr() {
            ConnectionAddr::TcpTls { host, port, .. } => {
                match timeout((self.timeout / 2).min(LONGEST_DOUBT), opening.as_mut()).await {
                    Ok(opened) => opened,
                    Err(_) if self.hears(host, *port, b"PING\r\n", |reply| b"+-".contains(&reply)).await => {
                        return Err(no_tls());
                    }
                    Err(_) => opening.await,
                }
            }
            ConnectionAddr::Tcp(host, port) => match opening.await {
                // A greeting that says nothing, which only TLS answers: by an alert.
                Err(error)
                    if error.is_io_error()
                        && !error.is_connection_refusal()
                        && self.hears(host, *port, b"\x16\x03\x01\0\x04\x01\0\0\0", |reply| reply == 0x15).await =>
                {
                    return Err(tls_wanted());
                }
                opened => opened,
            },
            _ => opening.await,
        };
        opened.map_err(|error| error_of_greeting(&error, server))
    }

    /// Whether a server answers these bytes by one that begins so.
    async fn hears(&self, host: &str, port: u16, said: &[u8], expected: impl Fn(u8) -> bool) -> bool {
        let asking = async {
            let stream = TcpStream::connect(&*names::addresses(host, port).await.ok()?).await.ok()?;
            stream.writable().await.ok()?;
            stream.try_write(said).ok()?;
            let mut reply = [0];
            loop {
                stream.readable().await.ok()?;
                match stream.try_read(&mut reply) {
                    Ok(1) => return Some(reply[0]),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    _ => return None,
                }
            }
        };
        matches!(timeout(self.timeout / 4, asking).await, Ok(Some(reply)) if expected(reply))
    }
}
