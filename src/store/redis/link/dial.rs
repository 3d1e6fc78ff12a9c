//! Connects to one server, and explains a failure: if only one end uses TLS, neither end reports
//! that.

use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Either, select, select_ok};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ProtocolVersion, RedisError,
};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::errors::{STEPS, error_of, error_of_line};
use super::greeting::{greet, without_greeting};
use super::login::{LoggedIn, Login};
use super::names::{self, Host};
use super::pool::Driven;
use super::tls;
use crate::error::{ErrorKind, StoreError};
use crate::util::{instant, lock, patient};

#[derive(Debug)]
pub(crate) struct Dialer {
    /// Maximum time of a connection, which the callers of `dial` limit.
    time: Duration,
    /// The name in the server's certificate, if it differs from the host.
    server_name: Option<String>,
    /// The application's name for its connections.
    client_name: Option<String>,
    /// The user and password, if they change. Otherwise they are in the settings of the server.
    login: Option<Arc<Login>>,
    /// Whether a connection has succeeded, which proves that both ends agree on TLS.
    connected: AtomicBool,
    /// The last search for the reason of a refusal.
    last_reason: Mutex<Option<FoundReason>>,
}

#[derive(Debug)]
struct FoundReason {
    server: ConnectionAddr,
    at: Instant,
    reason: Option<StoreError>,
}

/// Minimum interval between two searches on one server. A search opens a connection.
const REASON_INTERVAL: Duration = Duration::from_secs(1);

/// Idle time after which the system sends a TCP keep-alive probe: before NATs and load balancers
/// drop a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// The beginning of a TLS greeting. Only a server with TLS responds, with an alert.
const TLS_GREETING: &[u8] = b"\x16\x03\x01\0\x04\x01\0\0\0";
/// The first byte of that alert.
const TLS_ALERT: u8 = 0x15;

/// The longest part of a server's reply that is read for its reason.
const MAX_LINE: usize = 1024;

/// A server to connect to.
struct DialTarget {
    /// At its reachable address.
    server: ConnectionInfo,
    /// The name in the server's certificate, if it differs from the host.
    name: Option<String>,
}

impl DialTarget {
    /// Replaces the host with the name in the certificate, against which redis-rs verifies it. The resolver still uses
    /// the real one.
    fn named(&self) -> ConnectionInfo {
        match (&self.name, self.server.addr()) {
            (Some(name), ConnectionAddr::TcpTls { port, .. }) => {
                with_address(&self.server, name, *port)
            }
            _ => self.server.clone(),
        }
    }
}

impl Dialer {
    /// Creates a dialer whose connections take at most `time`.
    pub(crate) fn new(
        time: Duration,
        server_name: Option<String>,
        client_name: Option<String>,
    ) -> Self {
        Self {
            time,
            server_name,
            client_name,
            login: None,
            connected: AtomicBool::new(false),
            last_reason: Mutex::default(),
        }
    }

    /// Sets a login whose credentials change.
    pub(crate) fn with_login(self, login: Option<Arc<Login>>) -> Self {
        Self { login, ..self }
    }

    /// Opens a connection to a server.
    pub(crate) async fn dial(&self, server: &ConnectionInfo) -> Result<Driven, StoreError> {
        self.dial_at(server, None).await
    }

    /// Opens a connection to a server that is reached at another address than the one it announces. Its certificate has
    /// the announced name.
    pub(crate) async fn dial_at(
        &self,
        announced: &ConnectionInfo,
        reached: Option<(String, u16)>,
    ) -> Result<Driven, StoreError> {
        let mut target = DialTarget {
            server: announced.clone(),
            name: self.server_name.clone(),
        };
        let mut shown = announced.addr().to_string();
        if let Some((host, port)) = &reached {
            shown = format!("{shown} (reached at {host}:{port})");
            if let ConnectionAddr::TcpTls { host, .. } = announced.addr() {
                target.name.get_or_insert_with(|| host.clone());
            }
            target.server = with_address(announced, host, *port);
        }
        let opened = match &self.login {
            Some(login) => self.log_in(login, target).await,
            None => self.dial_as(&target).await,
        };
        opened.map_err(|error| error.with_server(shown))
    }

    /// Opens a connection with the newest credentials. If the server rejects them, uses newer ones.
    async fn log_in(
        &self,
        login: &Arc<Login>,
        mut target: DialTarget,
    ) -> Result<Driven, StoreError> {
        let mut issued = login.credentials().await?;
        loop {
            target.server = issued.apply(&target.server);
            match self.dial_as(&target).await {
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
    async fn dial_as(&self, target: &DialTarget) -> Result<Driven, StoreError> {
        let opened = match self.connected.load(Relaxed) {
            true => self.open(target).await,
            false => self.open_first(target).await,
        };
        self.connected.fetch_or(opened.is_ok(), Relaxed);
        opened
    }

    /// Opens a connection. If the server does not accept its greeting, looks for the reason.
    async fn open(&self, target: &DialTarget) -> Result<Driven, StoreError> {
        let connected = self.connect(target).await;
        let mut opened = connected.map_err(|error| error_of(&error))?;
        let name = self.client_name.as_deref();
        match greet(&mut opened, target.server.redis_settings(), name).await {
            Ok(()) => Ok(opened),
            Err(error) if may_be_explained(&error) => {
                drop(opened);
                Err(self.reason(target).await.unwrap_or(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Connects without a greeting.
    async fn connect(&self, target: &DialTarget) -> Result<Driven, RedisError> {
        let mut config = without_timeouts();
        if let ConnectionAddr::Tcp(host, port) = target.server.addr() {
            let stream = connect(host, *port, target.server.tcp_settings(), self.time / 4).await?;
            let settings = without_greeting();
            let opening = MultiplexedConnection::new_with_config(&settings, stream, config);
            let (connection, driver) = opening.await?;
            return Ok(Driven {
                connection,
                driver: Some(driver.boxed().fuse()),
                login: None,
            });
        }
        if let ConnectionAddr::TcpTls { host, .. } = target.server.addr() {
            config = config.set_dns_resolver(Host(host.clone()));
        }
        let server = target.named().set_redis_settings(without_greeting());
        let connection = Client::open(server)?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        Ok(Driven {
            connection,
            driver: None,
            login: None,
        })
    }

    /// Connects for the first time. If that takes long, looks for the reason concurrently.
    async fn open_first(&self, target: &DialTarget) -> Result<Driven, StoreError> {
        let opening = pin!(self.open(target));
        let opening = match select(opening, pin!(sleep(self.time / 4))).await {
            Either::Left((opened, _)) => return opened,
            Either::Right(((), opening)) => opening,
        };
        match select(opening, pin!(self.reason_of_silence(target))).await {
            Either::Left((opened, _)) => opened,
            Either::Right((Some(reason), _)) => Err(reason),
            Either::Right((None, opening)) => opening.await,
        }
    }

    /// Returns the server's reason for its refusal. Opens at most one connection per second for that.
    async fn reason(&self, target: &DialTarget) -> Option<StoreError> {
        if let Some(last) = &*lock(&self.last_reason)
            && last.server == *target.server.addr()
            && last.at.elapsed() < REASON_INTERVAL
        {
            return last.reason.clone();
        }
        let reason = self.find_reason(target).await;
        *lock(&self.last_reason) = Some(FoundReason {
            server: target.server.addr().clone(),
            at: instant(),
            reason: reason.clone(),
        });
        reason
    }

    /// Opens another connection, and reads the server's reason there. That connection sends no password, which the server
    /// might repeat.
    async fn find_reason(&self, target: &DialTarget) -> Option<StoreError> {
        match target.server.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let line = self.first_line(host, *port, TLS_GREETING).await?;
                match line.first() {
                    Some(&TLS_ALERT) => Some(StoreError::new(ErrorKind::TlsRequired)),
                    Some(b'-') => error_of_line(&String::from_utf8_lossy(&line[1..])),
                    _ => None,
                }
            }
            ConnectionAddr::TcpTls { host, .. } => self.reason_over_tls(target, host).await,
            _ => None,
        }
    }

    /// Over TLS, only redis-rs can read what the server says: as the reply to its own greeting.
    async fn reason_over_tls(&self, target: &DialTarget, host: &str) -> Option<StoreError> {
        let config = without_timeouts().set_dns_resolver(Host(host.to_owned()));
        let hello = without_greeting().set_protocol(ProtocolVersion::RESP3);
        let client = Client::open(target.named().set_redis_settings(hello)).ok()?;
        let opening = client.get_multiplexed_async_connection_with_config(&config);
        let opened = patient(self.time / 4, STEPS, opening).await.ok()?;
        let error = opened.err()?;
        // The alert of a server that wants a certificate may come between the handshake and the greeting.
        if tls::problem(&error).is_some() {
            return Some(error_of(&error));
        }
        let code = error.code()?;
        error_of_line(&format!("{code} {}", error.detail().unwrap_or_default()))
    }

    /// Returns the reason why a server does not reply. A Redis without TLS takes a TLS greeting for the start of a command,
    /// and waits for the rest.
    async fn reason_of_silence(&self, target: &DialTarget) -> Option<StoreError> {
        let ConnectionAddr::TcpTls { host, port, .. } = target.server.addr() else {
            return self.reason(target).await;
        };
        let line = self.first_line(host, *port, b"PING\r\n").await?;
        b"+-".contains(&line[0]).then(|| {
            let reason =
                "the server does not use TLS on this port: use `redis://`, or its TLS port";
            StoreError::explained(ErrorKind::Tls, reason)
        })
    }

    /// Sends these bytes to a server, without TLS, and returns the first line that it sends: at least one byte.
    async fn first_line(&self, host: &str, port: u16, bytes: &[u8]) -> Option<Vec<u8>> {
        let asking = async {
            let addresses = names::addresses(host, port).await.ok()?;
            let stream = TcpStream::connect(&*addresses).await.ok()?;
            stream.writable().await.ok()?;
            // The server may have closed the connection already. Its reply can still be read.
            let _ = stream.try_write(bytes);
            read_line(&stream).await
        };
        patient(self.time / 4, STEPS, asking).await.ok().flatten()
    }
}

/// Disables redis-rs's own timeouts: the callers of `dial` and of commands have theirs.
fn without_timeouts() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
}

/// Returns `true` if the server may have said why it does not accept the greeting.
fn may_be_explained(error: &StoreError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Unreachable | ErrorKind::NotReady | ErrorKind::Refused
    )
}

/// Reads up to the end of a line, of the stream, or of [`MAX_LINE`].
async fn read_line(stream: &TcpStream) -> Option<Vec<u8>> {
    let mut line = vec![];
    let mut buffer = [0; MAX_LINE];
    while line.len() < MAX_LINE && !line.contains(&b'\n') && line.first() != Some(&TLS_ALERT) {
        stream.readable().await.ok()?;
        match stream.try_read(&mut buffer[..MAX_LINE - line.len()]) {
            Ok(length @ 1..) => line.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break,
        }
    }
    if let Some(end) = line.iter().position(|byte| b"\r\n".contains(byte)) {
        line.truncate(end);
    }
    (!line.is_empty()).then_some(line)
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
