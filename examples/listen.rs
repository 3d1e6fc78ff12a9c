//! Accepts connections within bounds, for servers that clients of the internet reach. Without them, silent clients and clients
//! that do not read could keep any number of connections, and a server without a free descriptor would try to accept as fast
//! as it can.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep};

/// Maximum number of open connections. Others wait in the queue of the kernel.
const CONNECTIONS: usize = 1_000;
/// The time for the first bytes of a connection, and for a client to read some bytes of a response.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a read costs of the 128 steps that Tokio gives a task before others run.
const STEPS: usize = 16;
/// Interval of the attempts to accept while the process has no free descriptor.
const RETRY: Duration = Duration::from_millis(100);
/// Minimum interval between two lines of the log.
const REPORT: Duration = Duration::from_secs(60);

/// A listener with bounds.
pub(crate) struct Listen {
    listener: TcpListener,
    /// The number of first bytes that a client must send in time.
    greeting: usize,
    max_age: Duration,
    places: Arc<Semaphore>,
    reported_at: Option<Instant>,
}

impl Listen {
    pub(crate) fn new(listener: TcpListener, greeting: usize, max_age: Duration) -> Self {
        Self {
            listener,
            greeting,
            max_age,
            places: Arc::new(Semaphore::new(CONNECTIONS)),
            reported_at: None,
        }
    }

    /// Returns the next connection. Tries again after errors, such as too many open files.
    ///
    /// # Errors
    ///
    /// None, unless the semaphore is closed.
    pub(crate) async fn accept(&mut self) -> io::Result<Connection> {
        if self.places.available_permits() == 0 {
            self.report(&format!("{CONNECTIONS} connections are open"));
        }
        let places = Arc::clone(&self.places);
        let place = places.acquire_owned().await.map_err(io::Error::other)?;
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    // Otherwise the kernel delays a short reply until the client has acknowledged the previous one. An
                    // error means that the client has hung up.
                    drop(stream.set_nodelay(true));
                    return Ok(Connection {
                        stream,
                        peer,
                        awaited: self.greeting,
                        silent: Box::pin(sleep(PATIENCE)),
                        old: Box::pin(sleep(self.max_age)),
                        unread: None,
                        _place: place,
                    });
                }
                // The client has hung up.
                Err(error) if is_of_client(error.kind()) => {}
                Err(error) => {
                    self.report(&error.to_string());
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// Logs, at most once a minute, the reason why connections wait.
    #[allow(clippy::disallowed_methods, reason = "the log has real time")]
    fn report(&mut self, reason: &str) {
        let now = Instant::now();
        if self.reported_at.is_none_or(|last| now - last >= REPORT) {
            self.reported_at = Some(now);
            tracing::error!(
                "new connections wait: {reason}: raise `ulimit -n` or start more instances"
            );
        }
    }
}

fn is_of_client(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset
    )
}

/// A connection that ends if its client does not send the first bytes in time, or does not read, and at its maximum age.
pub(crate) struct Connection {
    stream: TcpStream,
    pub(crate) peer: SocketAddr,
    /// The number of first bytes that the client has not sent.
    awaited: usize,
    silent: Pin<Box<Sleep>>,
    old: Pin<Box<Sleep>>,
    /// Since a write has to wait for the client.
    unread: Option<Pin<Box<Sleep>>>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    /// Returns the result of a write, or an error if the client has not read for too long.
    fn in_time<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.unread = None;
            return written;
        }
        let unread = self.unread.get_or_insert_with(|| Box::pin(sleep(PATIENCE)));
        ready!(unread.as_mut().poll(cx));
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Let other tasks run after few reads, because frames that a client sends without pause may take long.
        for _ in 1..STEPS {
            ready!(coop::poll_proceed(cx)).made_progress();
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            let count = buffer.filled().len() - before;
            self.awaited = self.awaited.saturating_sub(count);
            return read;
        }
        let deadline = match self.awaited {
            0 => &mut self.old,
            _ => &mut self.silent,
        };
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.in_time(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.in_time(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
