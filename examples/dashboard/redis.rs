//! A `redis-server` process that the page can kill and freeze.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) struct Redis {
    process: Child,
    port: u16,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Running,
    Frozen,
    Stopped,
    /// There is no `redis-server` on this machine.
    Missing,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Kill,
    Freeze,
    Resume,
    Restart,
}

impl Redis {
    /// Starts it on a free port, and waits until it accepts connections. `None` if it is not on the PATH.
    pub(crate) fn start() -> io::Result<Option<Self>> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let process = match spawn(port) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            process => process?,
        };
        let mut redis = Self {
            process,
            port,
            state: State::Running,
        };
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if redis.state() == State::Stopped {
                return Err(io::Error::other(
                    "redis-server ended immediately: start it by hand to see why",
                ));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(redis))
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub(crate) fn state(&mut self) -> State {
        if matches!(self.process.try_wait(), Ok(Some(_))) {
            self.state = State::Stopped;
        }
        self.state
    }

    pub(crate) fn act(&mut self, action: Action) -> io::Result<()> {
        self.state = match (action, self.state()) {
            (Action::Kill, State::Running | State::Frozen) => {
                self.process.kill()?;
                self.process.wait()?;
                State::Stopped
            }
            (Action::Restart, State::Stopped) => {
                self.process = spawn(self.port)?;
                State::Running
            }
            (Action::Freeze, State::Running) => {
                self.signal("-STOP")?;
                State::Frozen
            }
            (Action::Resume, State::Frozen) => {
                self.signal("-CONT")?;
                State::Running
            }
            _ => {
                return Err(io::Error::other(
                    "Redis is in another state: reload the page",
                ));
            }
        };
        Ok(())
    }

    fn signal(&self, signal: &str) -> io::Result<()> {
        let status = Command::new("kill")
            .args([signal, &self.process.id().to_string()])
            .status()?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("kill {signal} fails")))
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(port: u16) -> io::Result<Child> {
    Command::new("redis-server")
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ])
        .stdout(Stdio::null())
        .spawn()
}
