//! Connects to one server, and explains a failure: if only one end uses TLS, neither end reports
//! that.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::select_ok;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisError};
use tokio::net::TcpStream;

use super::errors::{STEPS, connecting_timed_out, error_of_greeting};
use super::login::{LoggedIn, Login};
use super::names::{self, Host};
use super::pool::Driven;
use crate::error::{ErrorKind, StoreError};
use crate::util::patient;

#[derive(Debug)]
pub(crate) struct Dialer {
    /// Maximum time of a connection, which the callers of `dial` limit.
    time: Duration,
    /// The name in the server's certificate, if it differs from the host.
    server_name: Option<String>,
    /// The user and password, if they change. Otherwise they are in the settings of the server.
    login: Option<Arc<Login>>,
    /// Whether a connection has succeeded, which proves that both ends agree on TLS.
    connected: AtomicBool,
}

/// Idle time after which the system sends a TCP keep-alive probe: before NATs and load balancers
/// drop a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

impl Dialer {
    /// Creates a dialer whose connections take at most `time`.
    pub(crate) fn new(time: Duration, server_name: Option<String>) -> Self {
        Self {
            time,
            server_name,
            login: None,
            connected: AtomicBool::new(false),
        }
    }

    /// Sets a login whose credentials change.
    pub(crate) fn with_login(self, login: Option<Arc<Login>>) -> Self {
        Self { login, ..self }
    }

    /// Opens a connection to a server.
    pub(crate) async fn dial(&self, server: &ConnectionInfo) -> Result<Driven, StoreError> {
        let connection = match &self.login {
            Some(login) => self.log_in(login, server).await,
            None => self.dial_as(server).await,
        };
        connection.map_err(|error| error.with_server(server.addr()))
    }

    /// Opens a connection with the newest credentials. If the server rejects them, uses newer ones.
    async fn log_in(
        &self,
        login: &Arc<Login>,
        server: &ConnectionInfo,
    ) -> Result<Driven, StoreError> {
        let mut issued = login.credentials().await?;
        loop {
            let server = issued.apply(server);
            match self.dial_as(&server).await {
                Ok(mut connection) => {
                    connection.login = Some(LoggedIn::new(login, issued));
                    return Ok(connection);
                }
                Err(error) if error.kind() == ErrorKind::Authentication => issued.reject(),
                Err(error) => return Err(error),
            }
            let newer = login.credentials().await?;
            if Arc::ptr_eq(&issued, &newer) {
                return Err(login.rejection());
            }
            issued = newer;
        }
    }

    /// Opens a connection with the credentials in these settings.
    async fn dial_as(&self, server: &ConnectionInfo) -> Result<Driven, StoreError> {
        let connection = match self.connected.load(Relaxed) {
            true => self
                .open(server)
                .await
                .map_err(|error| error_of_greeting(&error, server)),
            false => self.open_first(server).await,
        };
        self.connected.fetch_or(connection.is_ok(), Relaxed);
        connection
    }

    async fn open(&self, server: &ConnectionInfo) -> Result<Driven, RedisError> {
        // Disable redis-rs's own timeouts: the callers of `dial` and of commands have theirs.
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        if let ConnectionAddr::Tcp(host, port) = server.addr() {
            let stream = connect(host, *port, server.tcp_settings(), self.time / 4).await?;
            let opening =
                MultiplexedConnection::new_with_config(server.redis_settings(), stream, config);
            let (connection, driver) = opening.await?;
            return Ok(Driven {
                connection,
                driver: Some(driver.boxed().fuse()),
                login: None,
            });
        }
        if let ConnectionAddr::TcpTls { host, .. } = server.addr() {
            config = config.set_dns_resolver(Host(host.clone()));
        }
        // Redis-rs verifies the certificate against the host, so replace the host; the resolver
        // still uses the real one.
        let named = match (&self.server_name, server.addr()) {
            (Some(name), ConnectionAddr::TcpTls { port, .. }) => with_address(server, name, *port),
            _ => server.clone(),
        };
        let connection = Client::open(named)?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        Ok(Driven {
            connection,
            driver: None,
            login: None,
        })
    }

    /// Connects for the first time, and detects a mismatch of TLS. A Redis without TLS takes a TLS
    /// greeting for the start of a command, and waits for the rest. A Redis with TLS closes a
    /// connection without it. Only after a failed or timed-out handshake, a second connection
    /// probes the other protocol. A quarter of the time is reserved for that.
    async fn open_first(&self, server: &ConnectionInfo) -> Result<Driven, StoreError> {
        let opened = match server.addr() {
            ConnectionAddr::TcpTls { host, port, .. } => {
                let time = self.time - self.time / 4;
                match patient(time, STEPS, self.open(server)).await {
                    Ok(opened) => opened,
                    Err(_)
                        if self
                            .replies_with(host, *port, b"PING\r\n", |reply| b"+-".contains(&reply))
                            .await =>
                    {
                        let reason = "the server does not use TLS on this port: use `redis://`, or its TLS port";
                        return Err(StoreError::explained(ErrorKind::Tls, reason));
                    }
                    Err(_) => return Err(connecting_timed_out()),
                }
            }
            ConnectionAddr::Tcp(host, port) => match self.open(server).await {
                // An incomplete TLS greeting: only a server with TLS responds, with an alert.
                Err(error)
                    if error.is_io_error()
                        && !error.is_connection_refusal()
                        && self
                            .replies_with(host, *port, b"\x16\x03\x01\0\x04\x01\0\0\0", |reply| {
                                reply == 0x15
                            })
                            .await =>
                {
                    return Err(StoreError::new(ErrorKind::TlsRequired));
                }
                opened => opened,
            },
            _ => self.open(server).await,
        };
        opened.map_err(|error| error_of_greeting(&error, server))
    }

    /// Sends these bytes to a server, and returns `true` if the first byte of its reply is as
    /// expected.
    async fn replies_with(
        &self,
        host: &str,
        port: u16,
        bytes: &[u8],
        expected: impl Fn(u8) -> bool,
    ) -> bool {
        let asking = async {
            let stream = TcpStream::connect(&*names::addresses(host, port).await.ok()?)
                .await
                .ok()?;
            stream.writable().await.ok()?;
            stream.try_write(bytes).ok()?;
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
        matches!(patient(self.time / 4, STEPS, asking).await, Ok(Some(reply)) if expected(reply))
    }
}

/// Opens a TCP stream without TLS, as redis-rs would. Begins again after `time`: the system sends a lost packet again
/// only after a second, and then after two more.
async fn connect(
    host: &str,
    port: u16,
    settings: &TcpSettings,
    time: Duration,
) -> io::Result<TcpStream> {
    let stream = loop {
        let addresses = names::addresses(host, port).await?;
        let mut connecting = vec![];
        for address in addresses {
            connecting.push(Box::pin(TcpStream::connect(address)));
        }
        if let Ok(connected) = patient(time, STEPS, select_ok(connecting)).await {
            break connected?.0;
        }
    };
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    Ok(stream)
}

/// Returns the settings of `other` for another address.
pub(crate) fn with_address(other: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let host = host.to_owned();
    let addr = match other.addr() {
        ConnectionAddr::TcpTls {
            insecure,
            tls_params,
            ..
        } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    other.clone().set_addr(addr)
}

/// Returns the settings of a server, with keep-alive.
pub(crate) fn kept_alive(server: ConnectionInfo) -> ConnectionInfo {
    let tcp = tcp_settings(server.tcp_settings());
    server.set_tcp_settings(tcp)
}

/// Adds this crate's TCP settings to the application's.
fn tcp_settings(given: &TcpSettings) -> TcpSettings {
    // A batch is one write. Without nodelay, the end of a long one waits until the server has
    // acknowledged its beginning.
    let settings = given.clone().set_nodelay(true);
    if settings.keepalive().is_some() {
        return settings;
    }
    settings.set_keepalive(TcpKeepalive::new().with_time(KEEP_ALIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_have_nodelay_and_keepalive() {
        let ours = tcp_settings(&TcpSettings::default());
        assert!(ours.nodelay());
        let default = TcpKeepalive::new().with_time(KEEP_ALIVE);
        assert_eq!(
            format!("{:?}", ours.keepalive()),
            format!("{:?}", Some(default))
        );
    }

    #[tokio::test]
    async fn streams_have_their_settings() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let settings = tcp_settings(&TcpSettings::default());
        let stream = connect("127.0.0.1", port, &settings, Duration::from_secs(20))
            .await
            .unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEP_ALIVE);
    }

    /// A network that loses everything: Linux ignores connections while the listener's queue is full.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn lost_connections_are_begun_again() {
        use std::pin::pin;
        use tokio::net::TcpSocket;
        use tokio::time::timeout;

        const TRY: Duration = Duration::from_millis(50);
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut queued = vec![];
        while let Ok(stream) = timeout(TRY, TcpStream::connect(address)).await {
            queued.push(stream.unwrap());
        }
        let settings = TcpSettings::default();
        let mut connecting = pin!(connect("127.0.0.1", address.port(), &settings, TRY));
        assert!(connecting.as_mut().now_or_never().is_none());
        for _ in queued {
            drop(listener.accept().await.unwrap());
        }
        // The system tries again after a second.
        let system = Duration::from_millis(950);
        let connected = timeout(system, connecting).await;
        drop(connected.expect("begun again").unwrap());
    }

    #[test]
    fn tcp_settings_of_the_application_stay() {
        let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(7));
        let ours = tcp_settings(&TcpSettings::default().set_keepalive(keepalive.clone()));
        assert_eq!(
            format!("{:?}", ours.keepalive()),
            format!("{:?}", Some(keepalive))
        );
    }
}
