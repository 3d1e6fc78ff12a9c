//! The gRPC servers among the examples, under clients that send what no honest client does: memory and descriptors stay bounded,
//! and other clients get replies. Linux only, for `/proc`.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "clients wait in real time")]

#[path = "../grpc.rs"]
mod grpc;
#[path = "../listen.rs"]
mod listen;
mod support;

use std::fs::{self, File};
use std::future::poll_fn;
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use futures_util::future::join_all;
use hyper::body::Body as _;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::ReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::support::Example;

/// Maximum memory of a server in MiB.
const MEMORY: u64 = 200;
const CONNECTIONS: usize = 100;
/// Streams of each connection.
const STREAMS: u32 = 1_000;
/// Maximum time to wait for a condition, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
const DECIDE: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

// Kinds and flags of frames.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Reads a frame: its kind, its stream and its payload. `None` at the end of the connection.
async fn read_frame(from: &mut ReadHalf<'_>) -> Option<(u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    from.read_exact(&mut head).await.ok()?;
    let [a, b, c, kind, _, stream @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    from.read_exact(&mut payload).await.ok()?;
    Some((kind, u32::from_be_bytes(stream), payload))
}

/// The longest header list that the server accepts, from the settings that it sends first.
async fn longest_list(from: &mut ReadHalf<'_>) -> usize {
    let (kind, _, settings) = read_frame(from).await.unwrap();
    assert_eq!(kind, SETTINGS);
    // SETTINGS_MAX_HEADER_LIST_SIZE.
    let longest = settings.chunks(6).find(|setting| setting[..2] == [0, 6]);
    u32::from_be_bytes(longest.unwrap()[2..].try_into().unwrap()) as usize
}

/// The preface of a client whose streams have this window.
fn preface(window: u32) -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // SETTINGS_INITIAL_WINDOW_SIZE.
    let mut setting = vec![0, 4];
    setting.extend(window.to_be_bytes());
    bytes.extend(frame(SETTINGS, 0, 0, &setting));
    bytes
}

/// The header list of a gRPC call: literals without an index.
fn header_list(path: &str) -> Vec<u8> {
    // `:method: POST` and `:scheme: http`; the names are those of the static table.
    let mut list = vec![0x83, 0x86];
    let mut field = |name: &[u8], value: &str| {
        list.extend(name);
        list.push(u8::try_from(value.len()).unwrap());
        list.extend(value.as_bytes());
    };
    field(&[0x04], path);
    field(&[0x01], "localhost");
    field(&[0x0f, 0x10], "application/grpc");
    field(b"\0\x02te", "trailers");
    list
}

fn call(path: &str, stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &header_list(path))
}

/// An empty message, which ends the stream.
fn empty_message(stream: u32) -> Vec<u8> {
    frame(DATA, END_STREAM, stream, &[0; 5])
}

/// The length of a string in a header list.
fn length(bytes: usize) -> Vec<u8> {
    let Some(mut rest) = bytes.checked_sub(0x7f) else {
        return vec![u8::try_from(bytes).unwrap()];
    };
    let mut digits = vec![0x7f];
    while rest >= 0x80 {
        digits.push(0x80 | u8::try_from(rest & 0x7f).unwrap());
        rest >>= 7;
    }
    digits.push(u8::try_from(rest).unwrap());
    digits
}

/// Number of fields that the first call adds to the table of the connection. Two letters name each of them.
const ENTRIES: u8 = 64;
/// The length of such a field, as the server counts it.
const FIELD: usize = 34;
/// The maximum length of [`header_list`], as the server counts it.
const CALL: usize = 400;

/// A call with as many fields as the server accepts. One byte refers to each, and takes a hundred in the server's memory.
fn call_with_many_fields(path: &str, stream: u32, longest: usize) -> Vec<u8> {
    let list = match stream {
        1 => {
            let entry = |number| [0x40, 2, b'a' + number / 8, b'a' + number % 8, 0];
            let entries: Vec<u8> = (0..ENTRIES).flat_map(entry).collect();
            [header_list(path), entries].concat()
        }
        _ => [header_list(path), references(longest)].concat(),
    };
    frame(HEADERS, END_HEADERS, stream, &list)
}

fn references(longest: usize) -> Vec<u8> {
    // The static table has 61 fields.
    let indexes = (62..62 + ENTRIES).map(|index| 0x80 | index);
    indexes.cycle().take((longest - CALL) / FIELD).collect()
}

/// A client's behavior.
struct Attack {
    name: &'static str,
    window: u32,
    reads: bool,
    /// The length of the data in the frames, if the server would end a connection that sends more than the server's window.
    data: u32,
    /// The frames for a stream, and for a server that accepts header lists of this length.
    frames: fn(u32, usize) -> Vec<u8>,
}

const ATTACKS: [Attack; 16] = [
    Attack {
        name: "endless requests",
        window: 65_535,
        reads: true,
        data: 0,
        frames: |stream, _| call(CHECK, stream),
    },
    Attack {
        name: "endless requests of a client that does not read",
        window: 65_535,
        reads: false,
        data: 0,
        frames: |stream, _| call(CHECK, stream),
    },
    Attack {
        name: "endless responses",
        window: 65_535,
        reads: true,
        data: 0,
        frames: |stream, _| [call(WATCH, stream), empty_message(stream)].concat(),
    },
    Attack {
        name: "responses without a window",
        window: 0,
        reads: true,
        data: 0,
        frames: |stream, _| [call(CHECK, stream), empty_message(stream)].concat(),
    },
    Attack {
        name: "responses that are not read",
        window: 65_535,
        reads: false,
        data: 0,
        frames: |stream, _| [call(CHECK, stream), empty_message(stream)].concat(),
    },
    Attack {
        name: "endless header lists",
        window: 65_535,
        reads: true,
        data: 0,
        frames: |stream, _| match stream {
            1 => frame(HEADERS, 0, 1, &header_list(CHECK)),
            _ => {
                let mut field = b"\0\x01x\x7f\xa1\x1f".to_vec();
                field.extend([b'x'; 4_128]);
                frame(CONTINUATION, 0, 1, &field)
            }
        },
    },
    Attack {
        name: "many fields, and messages that claim to be long",
        window: 65_535,
        reads: true,
        data: 6,
        frames: |stream, longest| {
            let begun = frame(DATA, 0, stream, &[0, 0, 1, 0, 0, 0]);
            [call_with_many_fields(DECIDE, stream, longest), begun].concat()
        },
    },
    Attack {
        name: "many fields after the message",
        window: 65_535,
        reads: true,
        data: 5,
        frames: |stream, longest| {
            let trailers = match stream {
                1 => vec![],
                _ => references(longest),
            };
            [
                call_with_many_fields(WATCH, stream, longest),
                frame(DATA, 0, stream, &[0; 5]),
                frame(HEADERS, END_STREAM | END_HEADERS, stream, &trailers),
            ]
            .concat()
        },
    },
    Attack {
        name: "long fields",
        window: 65_535,
        reads: true,
        data: 0,
        frames: |stream, longest| {
            let value = vec![b'x'; longest - CALL - FIELD];
            let field = [b"\0\x01x", &length(value.len())[..], &value].concat();
            let list = [header_list(CHECK), field].concat();
            frame(HEADERS, END_HEADERS, stream, &list)
        },
    },
    Attack {
        name: "unfinished messages",
        window: 65_535,
        reads: true,
        data: 60_000,
        frames: |stream, _| {
            // The length is 60 KiB, and the last bytes never come.
            let mut begun = vec![0, 0, 0, 0xf0, 0];
            begun.resize(15_000, 0);
            let more = frame(DATA, 0, stream, &[0; 15_000]);
            let first = frame(DATA, 0, stream, &begun);
            [call(DECIDE, stream), first, more.repeat(3)].concat()
        },
    },
    Attack {
        name: "requests that are reset",
        window: 65_535,
        reads: false,
        data: 0,
        frames: |stream, _| {
            [
                call(CHECK, stream),
                frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]),
            ]
            .concat()
        },
    },
    Attack {
        name: "requests that the server resets",
        window: 65_535,
        reads: false,
        data: 0,
        // A window may not grow by 0.
        frames: |stream, _| {
            [
                call(CHECK, stream),
                frame(WINDOW_UPDATE, 0, stream, &[0; 4]),
            ]
            .concat()
        },
    },
    Attack {
        name: "empty frames",
        window: 65_535,
        reads: true,
        data: 0,
        frames: |stream, _| match stream {
            1 => call(CHECK, 1),
            _ => frame(DATA, 0, 1, &[]).repeat(100),
        },
    },
    Attack {
        name: "empty continuations",
        window: 65_535,
        reads: true,
        data: 0,
        frames: |stream, _| match stream {
            1 => frame(HEADERS, 0, 1, &header_list(CHECK)),
            _ => frame(CONTINUATION, 0, 1, &[]).repeat(100),
        },
    },
    Attack {
        name: "windows that grow by a byte, and change",
        window: 0,
        reads: true,
        data: 0,
        frames: |stream, _| {
            let more = |stream| frame(WINDOW_UPDATE, 0, stream, &[0, 0, 0, 1]);
            let size = |bytes| frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, bytes]);
            let begun = [call(WATCH, stream), empty_message(stream), more(stream)];
            [begun.concat(), more(0), size(1), size(0)].concat()
        },
    },
    Attack {
        name: "pings and settings that are not read",
        window: 65_535,
        reads: false,
        data: 0,
        frames: |_, _| {
            [frame(PING, 0, 0, &[0; 8]), frame(SETTINGS, 0, 0, &[])]
                .concat()
                .repeat(10)
        },
    },
];

impl Attack {
    /// Sends the frames of many streams over one connection, until the server ends it or does not read.
    async fn connect(&self, port: u16) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (mut from, mut to) = stream.split();
        let window = Semaphore::new(65_535);
        let mut sent = to.write_all(&preface(self.window)).await;
        let longest = longest_list(&mut from).await;
        let send = async {
            for number in 0..STREAMS {
                if sent.is_err() {
                    return;
                }
                window.acquire_many(self.data).await.unwrap().forget();
                sent = to.write_all(&(self.frames)(2 * number + 1, longest)).await;
            }
        };
        let read = async {
            while self.reads
                && let Some((kind, stream, payload)) = read_frame(&mut from).await
            {
                if (kind, stream) == (WINDOW_UPDATE, 0) {
                    let more = u32::from_be_bytes(payload.try_into().unwrap());
                    window.add_permits(more as usize);
                }
            }
            // The connection stays open.
            std::future::pending::<()>().await;
        };
        let both = async {
            tokio::select! { () = send => {}, () = read => {} }
        };
        drop(timeout(Duration::from_secs(5), both).await);
        stream
    }
}

/// Waits until the server has handled all that it was sent.
async fn wait_until_idle(example: &Example) {
    let start = Instant::now();
    let mut used = example.processor_time();
    loop {
        sleep(Duration::from_millis(200)).await;
        let now = example.processor_time();
        if now - used < Duration::from_millis(30) || start.elapsed() > PATIENCE {
            return;
        }
        used = now;
    }
}

/// The status of the server, by a new connection.
async fn check(port: u16) -> tonic::Status {
    let endpoint = Endpoint::new(format!("http://127.0.0.1:{port}")).unwrap();
    let channel = endpoint.timeout(PATIENCE).connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    match client.check(HealthCheckRequest::default()).await {
        Ok(_) => tonic::Status::ok(""),
        Err(status) => status,
    }
}

fn envoy() -> Command {
    let mut command = Example::command("envoy");
    command.envs([("LISTEN", "127.0.0.1:0"), ("ADMIN", "127.0.0.1:0")]);
    command
}

/// It lives as long as its client waits: an hour after the first call.
fn tonic() -> Command {
    let mut command = Example::command("tonic");
    command.env("RATE_LIMIT", "1/h");
    command
}

#[tokio::test]
async fn memory_stays_bounded() {
    for (name, command) in [("envoy", envoy as fn() -> Command), ("tonic", tonic)] {
        for attack in &ATTACKS {
            let example = Example::spawn(command());
            let connections = (0..CONNECTIONS).map(|_| attack.connect(example.port));
            let connections = join_all(connections).await;
            wait_until_idle(&example).await;
            let memory = example.peak_memory();
            assert!(memory < MEMORY, "{name}, {}: {memory} MiB", attack.name);
            let code = check(example.port).await.code();
            let expected = match name {
                "envoy" => tonic::Code::Ok,
                _ => tonic::Code::ResourceExhausted,
            };
            assert_eq!(code, expected, "{name}, {}", attack.name);
            drop(connections);
        }
    }
}

#[tokio::test]
async fn silent_connections_end() {
    let example = Example::spawn(envoy());
    let whole = preface(65_535);
    let silent = [&[][..], &whole[..3], &whole[..23]].map(async |begun| {
        let address = ("127.0.0.1", example.port);
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(begun).await.unwrap();
        let start = Instant::now();
        let ended = timeout(PATIENCE, stream.read_to_end(&mut vec![])).await;
        drop(ended.expect("the server ends the connection"));
        start.elapsed()
    });
    for elapsed in join_all(silent).await {
        assert!(elapsed > Duration::from_secs(9), "{elapsed:?}");
    }
}

#[tokio::test]
async fn descriptors_that_run_out_cost_no_core() {
    let directory = TempDir::new().unwrap();
    let log = directory.path().join("log");
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -n 64; exec \"$0\""])
        .arg(envoy().get_program())
        .envs([("LISTEN", "127.0.0.1:0"), ("ADMIN", "127.0.0.1:0")])
        .stderr(File::create(&log).unwrap());
    let example = Example::spawn(command);
    let connect = || TcpStream::connect(("127.0.0.1", example.port));
    let connections = join_all((0..80).map(|_| connect())).await;
    let lines = || {
        fs::read_to_string(&log)
            .unwrap()
            .matches("new connections wait")
            .count()
    };
    let start = Instant::now();
    while lines() == 0 {
        assert!(start.elapsed() < PATIENCE, "no line in the log");
        sleep(Duration::from_millis(20)).await;
    }
    let (before, start) = (example.processor_time(), Instant::now());
    sleep(Duration::from_secs(2)).await;
    let used = example.processor_time() - before;
    assert!(used < start.elapsed() / 20, "{used:?} of the processor");
    assert_eq!(lines(), 1);

    drop(connections);
    let start = Instant::now();
    assert_eq!(check(example.port).await.code(), tonic::Code::Ok);
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
}

/// Reads until the head of a response to this stream.
async fn wait_for_head(from: &mut ReadHalf<'_>, wanted: u32) {
    while let Some((kind, stream, _)) = read_frame(from).await {
        if (kind, stream) == (HEADERS, wanted) {
            return;
        }
    }
    panic!("the connection has ended");
}

#[tokio::test]
async fn frames_add_nothing_to_the_log() {
    let directory = TempDir::new().unwrap();
    let log = directory.path().join("log");
    let mut command = envoy();
    command.stderr(File::create(&log).unwrap());
    let example = Example::spawn(command);
    let mut stream = TcpStream::connect(("127.0.0.1", example.port))
        .await
        .unwrap();
    let (mut from, mut to) = stream.split();
    let before = fs::read_to_string(&log).unwrap();
    let replies = frame(PING, ACK, 0, &[0; 8]).repeat(1_000);
    let last = [call(CHECK, 1), empty_message(1)].concat();
    let frames = [preface(65_535), replies, last].concat();
    to.write_all(&frames).await.unwrap();
    wait_for_head(&mut from, 1).await;
    assert_eq!(fs::read_to_string(&log).unwrap(), before);
}

#[tokio::test]
async fn short_messages_pass_without_free_memory() {
    let full = Arc::new(Semaphore::new(0));
    let first = async |length: usize| {
        let body = Body::new("x".repeat(length));
        let mut body = grpc::bounded(body, Arc::clone(&full));
        poll_fn(|cx| Pin::new(&mut body).poll_frame(cx))
            .await
            .unwrap()
    };
    first(1_024).await.unwrap();
    let error = first(1_025).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::ResourceExhausted);
}

/// A client that answers pings, and has one call that never ends: when it is told to leave, and when the connection ends.
async fn told_and_ended(port: u16) -> (Duration, Duration) {
    let start = tokio::time::Instant::now();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let (mut from, mut to) = stream.split();
    let watch = [call(WATCH, 1), empty_message(1)].concat();
    let begin = [preface(65_535), watch].concat();
    to.write_all(&begin).await.unwrap();
    let mut told = None;
    while let Some((kind, _, payload)) = read_frame(&mut from).await {
        match kind {
            PING => to.write_all(&frame(PING, ACK, 0, &payload)).await.unwrap(),
            GOAWAY => _ = told.get_or_insert(start.elapsed()),
            _ => {}
        }
    }
    (told.expect("a GOAWAY"), start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn an_old_connection_ends_after_its_requests() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = grpc::server()
        .add_service(health)
        .serve_with_incoming(grpc::incoming(listener));
    tokio::spawn(server);
    let (told, ended) = told_and_ended(port).await;
    let seconds = (told.as_secs(), ended.as_secs());
    assert_eq!(seconds, (3_600, 3_610));
}

#[tokio::test]
async fn ten_thousand_concurrent_calls_are_answered() {
    let example = Example::spawn(envoy());
    let endpoint = Endpoint::new(format!("http://127.0.0.1:{}", example.port)).unwrap();
    // The streams of 250 connections are 10,000.
    let channels = (0..250).map(|_| endpoint.connect());
    let calls = join_all(channels).await.into_iter().flat_map(|channel| {
        let client = RateLimitServiceClient::new(channel.unwrap());
        (0..40).map(move |_| {
            let mut client = client.clone();
            let request = RateLimitRequest {
                domain: "unknown".to_owned(),
                descriptors: vec![RateLimitDescriptor::default()],
                hits_addend: 0,
            };
            async move { client.should_rate_limit(request).await }
        })
    });
    for answer in join_all(calls).await {
        answer.unwrap();
    }
}

#[tokio::test]
async fn a_watch_outlives_the_timeout() {
    let example = Example::spawn(envoy());
    let endpoint = Endpoint::new(format!("http://127.0.0.1:{}", example.port)).unwrap();
    let mut client = HealthClient::new(endpoint.connect().await.unwrap());
    let watch = client.watch(HealthCheckRequest::default()).await.unwrap();
    let mut watch = watch.into_inner();
    watch.message().await.unwrap().unwrap();
    // Longer than the timeout of a call.
    let next = timeout(Duration::from_secs(7), watch.message()).await;
    assert!(next.is_err(), "{next:?}");
}
