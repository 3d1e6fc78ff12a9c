//! `examples/client.rs` as it runs: alone, and as three processes on one Redis that is killed during the run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "processes run in real time")]

use std::env::consts::EXE_SUFFIX;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{env, thread};

/// The quota that the calls wait for, and a quota with a burst.
const RATE: usize = 50;
const BURST: usize = 5;
const SECONDS: usize = 4;

fn client() -> Command {
    let mut path = env::current_exe().unwrap();
    // From `deps` to `examples`.
    path.pop();
    path.pop();
    let mut command = Command::new(path.join("examples").join(format!("client{EXE_SUFFIX}")));
    command
        .env("RATE", format!("{RATE}/s burst {BURST}"))
        .env("SECONDS", SECONDS.to_string());
    command
        .env_remove("REDIS_URL")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Number of calls of each instance, from its last line.
fn calls(output: &Output) -> Vec<usize> {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let last = text
        .lines()
        .rfind(|line| line.starts_with("second "))
        .expect("a line for each second");
    let each = last.split_once('[').unwrap().1.trim_end_matches(']');
    each.split(", ")
        .map(|calls| calls.parse().unwrap())
        .collect()
}

#[test]
fn three_instances_keep_the_rate_without_redis() {
    let each = calls(&client().output().unwrap());
    assert_eq!(each.len(), 3);
    let all: usize = each.iter().sum();
    assert!(all <= BURST + RATE * SECONDS + RATE / 10, "{each:?}");
    assert!(
        each.iter().all(|calls| *calls > all / 6),
        "each gets its share: {each:?}"
    );
}

/// An API that records the times of its calls.
#[derive(Clone, Default)]
struct Api(Arc<Mutex<Vec<Instant>>>);

impl Api {
    fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let api = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let api = api.clone();
                thread::spawn(move || api.answer(stream.unwrap()));
            }
        });
        url
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut buffer = [0; 4_096];
        while let Ok(1..) = stream.read(&mut buffer) {
            self.0.lock().unwrap().push(Instant::now());
            if stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                .is_err()
            {
                return;
            }
        }
    }
}

struct Redis {
    process: Child,
    port: u16,
}

impl Redis {
    fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let process = Command::new("redis-server")
            .args([
                "--port",
                &port.to_string(),
                "--save",
                "",
                "--dir",
                env!("CARGO_TARGET_TMPDIR"),
            ])
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server");
        let redis = Self { process, port };
        let start = Instant::now();
        while redis.ask("PING").is_none() {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "redis-server does not come up"
            );
            thread::sleep(Duration::from_millis(10));
        }
        redis
    }

    fn ask(&self, command: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "{command}\r\nQUIT\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Number of scripts that it has run.
    fn scripts(&self) -> usize {
        let stats = self.ask("INFO commandstats").unwrap();
        let calls = |line: &str| {
            line.split_once("calls=")?
                .1
                .split(',')
                .next()?
                .parse::<usize>()
                .ok()
        };
        stats
            .lines()
            .filter(|line| line.starts_with("cmdstat_eval"))
            .filter_map(calls)
            .sum()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn three_processes(redis: &Redis, api: &str) -> Vec<Child> {
    let mut client = client();
    client
        .env("REDIS_URL", format!("redis://127.0.0.1:{}/", redis.port))
        .env("API", api)
        .env("INSTANCES", "1");
    (0..3).map(|_| client.spawn().unwrap()).collect()
}

#[test]
fn three_processes_keep_the_rate_cheaply() {
    let (redis, api) = (Redis::start(), Api::default());
    let clients = three_processes(&redis, &api.start());
    let each: Vec<usize> = clients
        .into_iter()
        .map(|client| calls(&client.wait_with_output().unwrap())[0])
        .collect();
    let times = api.0.lock().unwrap();
    let all = times.len();
    // The processes start and end at different times.
    let took = times[all - 1].duration_since(times[0]).as_secs_f64();
    assert!(
        all as f64 <= BURST as f64 + RATE as f64 * took + 5.0,
        "{all} in {took} s"
    );
    assert!(each.iter().all(|calls| *calls > 0), "{each:?}");
    let scripts = redis.scripts();
    // The slot is free once the server has noticed the hang-up.
    assert!(
        scripts as f64 <= 1.2 * all as f64 + 12.0,
        "{scripts} calls of Redis for {all}"
    );
}

#[test]
fn calls_go_on_when_redis_is_killed() {
    let (redis, api) = (Redis::start(), Api::default());
    let clients = three_processes(&redis, &api.start());
    while api.0.lock().unwrap().len() < RATE {
        thread::sleep(Duration::from_millis(10));
    }
    drop(redis);
    let before = api.0.lock().unwrap().len();
    let outputs: Vec<Output> = clients
        .into_iter()
        .map(|client| client.wait_with_output().unwrap())
        .collect();
    for output in &outputs {
        assert!(calls(output)[0] > 0);
    }
    let times = api.0.lock().unwrap();
    assert!(
        times.len() > before + RATE / 2,
        "{} after {before}",
        times.len()
    );
}
