//! A TCP proxy in front of Redis that misbehaves on demand.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The behavior of the proxy, for existing and for new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Forwards everything.
    Pass,
    /// Forwards every reply after this delay.
    Delay(Duration),
    /// Forwards every reply after a random delay between these two.
    Waver(Duration, Duration),
    /// Forwards half of a reply, and then cuts the connection.
    Half,
    /// Forwards nothing, closes nothing, and accepts no connection.
    BlackHole,
    /// Accepts and reads, but never replies. Redis receives nothing.
    Silent,
    /// Forwards every request to Redis, and drops the replies.
    Swallow,
    /// Replies to every command with these bytes, after Redis has replied to the earlier ones.
    /// Redis receives no further commands.
    Answer(&'static [u8]),
    /// Refuses connections, and cuts existing ones.
    Refuse,
}

pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    listener: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port, in front of the Redis on this port.
    pub fn start(redis: u16, mode: Mode) -> Self {
        let socket = bind("127.0.0.1:0".parse().unwrap());
        let address = socket.local_addr().unwrap();
        let (mode, watched) = watch::channel(mode);
        let listener = tokio::spawn(listen(socket, address, redis, watched));
        Self {
            address,
            mode,
            listener,
        }
    }

    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

fn bind(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).expect("the proxy's port");
    socket
}

async fn listen(
    socket: TcpSocket,
    address: SocketAddr,
    redis: u16,
    mut mode: watch::Receiver<Mode>,
) {
    // A socket that is bound but does not listen refuses connections, and reserves the port.
    let (mut refusing, mut listening) = (Some(socket), None::<TcpListener>);
    loop {
        let now = *mode.borrow_and_update();
        if now == Mode::Refuse {
            if listening.take().is_some() {
                refusing = Some(bind(address));
            }
        } else if let Some(socket) = refusing.take() {
            listening = Some(socket.listen(1024).unwrap());
        }
        let accept = async {
            match &listening {
                Some(listener) if now != Mode::BlackHole => listener.accept().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = mode.changed() => if changed.is_err() { return },
            accepted = accept => if let Ok((client, _)) = accepted {
                tokio::spawn(serve(client, redis, mode.clone()));
            },
        }
    }
}

/// Serves one connection. Its client sends one command at a time, so one task can handle both
/// directions.
async fn serve(mut client: TcpStream, redis: u16, mut mode: watch::Receiver<Mode>) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", redis)).await else {
        return;
    };
    let (mut asked, mut answered) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        let now = *mode.borrow_and_update();
        if now == Mode::Refuse {
            return;
        }
        let flows = now != Mode::BlackHole;
        tokio::select! {
            changed = mode.changed() => if changed.is_err() { return },
            read = client.read(&mut asked), if flows => {
                let Ok(length @ 1..) = read else { return };
                let asked = &asked[..length];
                let sent = match now {
                    Mode::Silent => Ok(()),
                    Mode::Answer(reply) => client.write_all(&reply.repeat(commands(asked))).await,
                    _ => server.write_all(asked).await,
                };
                if sent.is_err() {
                    return;
                }
            }
            read = server.read(&mut answered), if flows => {
                let Ok(length @ 1..) = read else { return };
                let answered = &answered[..length];
                let sent = match now {
                    Mode::Swallow | Mode::Silent => Ok(()),
                    Mode::Half => {
                        let _ = client.write_all(&answered[..length / 2]).await;
                        return;
                    }
                    Mode::Delay(delay) => {
                        sleep(delay).await;
                        client.write_all(answered).await
                    }
                    Mode::Waver(from, to) => {
                        sleep(from + (to - from).mul_f64(fastrand::f64())).await;
                        client.write_all(answered).await
                    }
                    _ => client.write_all(answered).await,
                };
                if sent.is_err() {
                    return;
                }
            }
        }
    }
}

/// Returns the number of commands that begin in these bytes.
fn commands(bytes: &[u8]) -> usize {
    let starts = bytes
        .iter()
        .enumerate()
        .filter(|(i, byte)| **byte == b'*' && (*i == 0 || bytes[i - 1] == b'\n'));
    starts.count()
}
