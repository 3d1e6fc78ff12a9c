//! The examples of servers: a client that sends no whole request does not keep its connection, and signals end a server after the
//! requests in flight.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use support::{Answer, Example, connect};

/// The gateway on a free port.
fn gateway() -> Example {
    let settings = tempfile::NamedTempFile::new().unwrap();
    let text = include_str!("../gateway.toml");
    let free = text.replace("127.0.0.1:3000", "127.0.0.1:0");
    assert_ne!(text, free);
    std::fs::write(settings.path(), free).unwrap();
    let mut gateway = Example::command("gateway");
    gateway.arg(settings.path());
    Example::spawn(gateway)
}

/// The programs that serve HTTP/1.
fn http_servers() -> [Example; 5] {
    [
        gateway(),
        Example::start("llm_gateway", &[]),
        Example::start("login", &[]),
        Example::start("axum", &[]),
        // Without a Redis, which would not end with this test.
        Example::start("dashboard", &[("PATH", "")]),
    ]
}

#[test]
fn unfinished_requests_end() {
    let servers = http_servers();
    let open = |text: &'static str| {
        move |server: &Example| -> TcpStream {
            let mut stream = connect(server.port).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream
        }
    };
    let silent = servers.iter().map(open(""));
    let slow = servers.iter().map(open("GET / HTTP/1.1\r\nhost: x\r\nx-"));
    let idle = servers
        .iter()
        .map(open("GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"));
    let without_body = [
        "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{",
        "POST /chat HTTP/1.1\r\nhost: x\r\nx-api-key: key-of-alice\r\ncontent-type: application/json\r\n\
            content-length: 50\r\n\r\n{",
        "POST /login HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
    ];
    let without_body: Vec<_> = servers
        .iter()
        .zip(without_body)
        .map(|(server, text)| open(text)(server))
        .collect();
    let mut streams: Vec<TcpStream> = silent.chain(slow).chain(idle).collect();
    for stream in without_body {
        assert!(Answer::read(stream).status >= 400);
    }
    for stream in &mut streams {
        // It fails after a minute if the server does not close the connection.
        stream.read_to_end(&mut vec![]).unwrap();
    }
    for server in &servers {
        assert!(Answer::read(server.get("/nothing")).status >= 400);
    }
}

#[test]
fn long_heads_are_refused() {
    for server in &http_servers() {
        let status = |length| {
            let field = format!("x-long: {}", "x".repeat(length));
            Answer::read(server.get_with("/nothing", &[&field])).status
        };
        assert_ne!(status(15_000), 431);
        assert_eq!(status(17_000), 431);
    }
}

#[test]
fn unread_responses_end_a_connection() {
    let server = Example::start("login", &[]);
    let mut stream = connect(server.port).unwrap();
    // More responses than the kernel buffers. Writing fails after a minute if the server does not close the connection.
    stream
        .set_write_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let requests = "GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1_000);
    let error = loop {
        if let Err(error) = stream.write_all(requests.as_bytes()) {
            break error.kind();
        }
    };
    assert!(
        matches!(error, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
        "{error:?}"
    );
}

#[test]
fn signals_let_requests_end() {
    for signal in ["-TERM", "-INT"] {
        let mut servers = [
            gateway(),
            Example::start("llm_gateway", &[]),
            Example::start("login", &[]),
        ];
        let open = |server: &Example| connect(server.port).unwrap();
        let mut silent: Vec<TcpStream> = servers.iter().map(open).collect();
        // The silent connection was accepted earlier.
        assert_eq!(Answer::read(servers[0].get("/health")).status, 200);
        let json = "content-type: application/json";
        let question = format!(r#"{{"prompt":"{}","max_tokens":30}}"#, "word ".repeat(10));
        let key = "x-api-key: key-of-alice";
        let mut answer = servers[1].post("/chat", &[key, json], &question);
        let mut begun = [0];
        answer.read_exact(&mut begun).unwrap();
        let attempt = r#"{"user":"alice","password":"open sesame"}"#;
        let login = servers[2].post("/login", &[json], attempt);
        servers[2].wait_for(r#""alice" tries"#);

        servers.iter().for_each(|server| server.signal(signal));
        assert_eq!(Answer::read(login).status, 200);
        let answer = Answer::read(answer);
        assert_eq!(answer.body.matches("word").count(), 30);
        for stream in &mut silent {
            stream.read_to_end(&mut vec![]).unwrap();
        }
        for server in &mut servers {
            assert!(server.wait().success(), "{signal}");
        }
    }
}
