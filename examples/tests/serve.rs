//! The examples of servers: a client that sends no whole head does not keep its connection.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;

use support::{Answer, Example, connect};

#[test]
fn unfinished_heads_end() {
    let settings = tempfile::NamedTempFile::new().unwrap();
    let text = include_str!("../gateway.toml");
    let free = text.replace("127.0.0.1:3000", "127.0.0.1:0");
    assert_ne!(text, free);
    std::fs::write(settings.path(), free).unwrap();
    let mut gateway = Example::command("gateway");
    gateway.arg(settings.path());
    let servers = [
        Example::spawn(gateway),
        Example::start("llm_gateway", &[]),
        Example::start("login", &[]),
    ];
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
    let mut streams: Vec<TcpStream> = silent.chain(slow).chain(idle).collect();
    for stream in &mut streams {
        // It fails after a minute if the server does not close the connection.
        stream.read_to_end(&mut vec![]).unwrap();
    }
    for server in &servers {
        assert!(Answer::read(server.get("/nothing")).status >= 400);
    }
}
