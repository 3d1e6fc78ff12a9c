//! Runs an example as a separate process on a free port, and sends requests to it.

#![allow(dead_code, reason = "each test uses its part")]

use std::env::consts::EXE_SUFFIX;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;
use std::{env, fs, io, thread};

pub(crate) struct Example {
    process: Child,
    pub(crate) port: u16,
    /// The port for metrics. The same if it prints one only.
    pub(crate) admin_port: u16,
    /// The lines that it prints.
    lines: Mutex<Receiver<String>>,
}

impl Example {
    /// The program to start.
    pub(crate) fn command(name: &str) -> Command {
        let mut path = env::current_exe().unwrap();
        // From `deps` to `examples`.
        path.pop();
        path.pop();
        let mut command = Command::new(path.join("examples").join(format!("{name}{EXE_SUFFIX}")));
        command.env("PORT", "0").env_remove("REDIS_URL");
        command
    }

    /// Starts it with these environment variables, and waits until it listens.
    pub(crate) fn start(name: &str, settings: &[(&str, &str)]) -> Self {
        let mut command = Self::command(name);
        command.envs(settings.iter().copied());
        Self::spawn(command)
    }

    /// Starts this program, and waits until it listens.
    pub(crate) fn spawn(command: Command) -> Self {
        let (example, lines, printed) = Self::open(command);
        thread::spawn(move || lines.for_each(|line| drop(printed.send(line))));
        example
    }

    /// Starts this program, waits until it listens, and closes the pipe of its output.
    pub(crate) fn spawn_unread(command: Command) -> Self {
        Self::open(command).0
    }

    fn open(mut command: Command) -> (Self, impl Iterator<Item = String>, Sender<String>) {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        let ports = lines.find_map(|line| {
            let mut addresses = line.split("localhost:").skip(1);
            let port = |address: &str| {
                let mut parts = address.split(|other: char| !other.is_ascii_digit());
                parts.next()?.parse().ok()
            };
            let first = addresses.next().or(line.split("127.0.0.1:").nth(1));
            let port_of_first = port(first?)?;
            Some((port_of_first, addresses.find_map(port)))
        });
        let (port, admin_port) = ports.expect("it prints where it listens");
        let (printed, later) = mpsc::channel();
        let example = Self {
            process,
            port,
            admin_port: admin_port.unwrap_or(port),
            lines: Mutex::new(later),
        };
        (example, lines, printed)
    }

    /// Waits until it has printed this line.
    pub(crate) fn wait_for(&self, line: &str) {
        let lines = self.lines.lock().unwrap();
        while lines
            .recv_timeout(Duration::from_secs(60))
            .expect("it prints the line")
            != line
        {}
    }

    /// Waits until it has printed a line with this text.
    pub(crate) fn wait_for_part(&self, text: &str) {
        let lines = self.lines.lock().unwrap();
        while !lines
            .recv_timeout(Duration::from_secs(60))
            .expect("it prints the text")
            .contains(text)
        {}
    }

    /// Sends a request with these header lines. The answer is not read yet.
    pub(crate) fn post(&self, path: &str, head: &[&str], body: &str) -> TcpStream {
        let head: String = head.iter().map(|line| format!("{line}\r\n")).collect();
        self.send(
            &format!(
                "POST {path} HTTP/1.1\r\ncontent-length: {}\r\n{head}",
                body.len()
            ),
            body,
        )
    }

    /// Requests a page. The answer is not read yet.
    pub(crate) fn get(&self, path: &str) -> TcpStream {
        self.get_with(path, &[])
    }

    /// Requests a page with these header lines. Does not read the response.
    pub(crate) fn get_with(&self, path: &str, head: &[&str]) -> TcpStream {
        let head: String = head.iter().map(|line| format!("{line}\r\n")).collect();
        self.send(&format!("GET {path} HTTP/1.1\r\n{head}"), "")
    }

    fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = connect(self.port).unwrap();
        stream
            .write_all(
                format!("{head}host: localhost\r\nconnection: close\r\n\r\n{body}").as_bytes(),
            )
            .unwrap();
        stream
    }

    /// Stops it like Ctrl-C, so that it cleans up.
    pub(crate) fn interrupt(&mut self) {
        self.signal("-INT");
        self.wait();
    }

    pub(crate) fn signal(&self, signal: &str) {
        Command::new("kill")
            .args([signal, &self.process.id().to_string()])
            .status()
            .unwrap();
    }

    /// The largest amount of memory that it has had, in MiB.
    pub(crate) fn peak_memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let peak = status.split_once("VmHWM:").expect(&status).1;
        let kib: u64 = peak.split_whitespace().next().unwrap().parse().unwrap();
        kib / 1_024
    }

    /// The processor time that it has used.
    pub(crate) fn processor_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        // The fields after the name, which may have blanks: the times are the 14th and the 15th of all.
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .collect();
        let ticks = |field: &str| field.parse::<u64>().unwrap();
        Duration::from_millis(10 * (ticks(fields[11]) + ticks(fields[12])))
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }
}

pub(crate) fn connect(port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

impl Drop for Example {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// An answer: the status, the header fields, and the body as sent.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    /// Reads the answer to its end.
    pub(crate) fn read(mut stream: TcpStream) -> Self {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        Self::of(&text)
    }

    /// Parses an answer.
    pub(crate) fn of(text: &str) -> Self {
        let (head, body) = text
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("no whole head: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            status,
            head: head.to_lowercase(),
            body: body.to_owned(),
        }
    }

    /// The remaining capacity of a policy, from the `RateLimit` field.
    #[allow(dead_code, reason = "not every example answers with it")]
    pub(crate) fn remaining(&self, policy: &str) -> u32 {
        let item = self
            .head
            .split_once(&format!("\"{policy}\";r="))
            .unwrap_or_else(|| panic!("{}", self.head))
            .1;
        item.split(|other: char| !other.is_ascii_digit())
            .next()
            .unwrap()
            .parse()
            .unwrap()
    }
}
