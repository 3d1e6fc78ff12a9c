//! `examples/llm_gateway.rs` as it runs: what answers cost is known at their ends, and few run at a time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::Read;
use std::net::TcpStream;

use support::{Answer, Example};

/// A gateway with so many tokens that nothing flows back while the test runs.
fn gateway() -> Example {
    Example::start("llm_gateway", &[("TOKENS", "1000/h"), ("STREAMS", "4")])
}

fn ask(gateway: &Example, key: &str, max: u32, words: usize) -> TcpStream {
    let question = format!(
        r#"{{"prompt":"{}","max_tokens":{max}}}"#,
        "word ".repeat(words)
    );
    gateway.post(
        "/chat",
        &[
            &format!("x-api-key: {key}"),
            "content-type: application/json",
        ],
        &question,
    )
}

/// Waits until so many tokens remain, by an answer that costs nothing.
fn wait_until_remaining(gateway: &Example, key: &str, wanted: u32) {
    let mut remaining = 0;
    for _ in 0..10_000 {
        let answer = Answer::read(ask(gateway, key, 0, 0));
        if answer.status == 200 {
            remaining = answer.remaining("tokens");
            if remaining == wanted {
                return;
            }
        }
    }
    panic!("{remaining} tokens remain, not {wanted}");
}

#[test]
fn a_response_is_charged_its_tokens() {
    let gateway = gateway();
    let answer = Answer::read(ask(&gateway, "alice", 300, 5));
    assert_eq!(
        (answer.status, answer.remaining("tokens")),
        (200, 700),
        "what it may cost: {}",
        answer.head
    );
    assert_eq!(answer.body.matches("word").count(), 15);
    // 5 of the question and 15 of the answer.
    wait_until_remaining(&gateway, "alice", 980);
    // More than was reserved is charged too.
    assert_eq!(Answer::read(ask(&gateway, "alice", 10, 5)).status, 200);
    wait_until_remaining(&gateway, "alice", 960);
    // Answers that may have too many are denied, and cost nothing.
    for _ in 0..20 {
        let denied = Answer::read(ask(&gateway, "alice", 961, 5));
        assert_eq!(
            (denied.status, denied.remaining("tokens")),
            (429, 960),
            "{}",
            denied.head
        );
    }
    assert_eq!(Answer::read(ask(&gateway, "alice", 960, 0)).status, 200);
}

#[test]
fn a_disconnected_client_pays_for_tokens_sent() {
    let gateway = gateway();
    let mut stream = ask(&gateway, "bob", 900, 20);
    let mut said = [0; 2_048];
    let mut text = String::new();
    while text.matches("word").count() < 3 {
        let read = stream.read(&mut said).unwrap();
        text += &String::from_utf8_lossy(&said[..read]);
    }
    drop(stream);
    let mut remaining = 0;
    while remaining < 200 {
        let answer = Answer::read(ask(&gateway, "bob", 0, 0));
        remaining = if answer.status == 200 {
            answer.remaining("tokens")
        } else {
            0
        };
    }
    // 20 of the question, and fewer than the 60 that the whole answer has: writing fails soon after the client is gone.
    assert!((920..=977).contains(&remaining), "{remaining} remain");
}

#[test]
fn at_most_four_answers_at_once() {
    let gateway = gateway();
    let mut streams: Vec<_> = (0..4).map(|_| ask(&gateway, "carol", 100, 50)).collect();
    let mut heads = vec![];
    for stream in &mut streams {
        let mut head = [0; 512];
        let read = stream.read(&mut head).unwrap();
        heads.push(String::from_utf8_lossy(&head[..read]).into_owned());
    }
    assert!(
        heads.iter().all(|head| head.starts_with("HTTP/1.1 200")),
        "{heads:?}"
    );
    let fifth = Answer::read(ask(&gateway, "carol", 100, 1));
    assert_eq!(
        (fifth.status, fifth.remaining("streams")),
        (429, 0),
        "{}",
        fifth.head
    );
    assert_eq!(Answer::read(ask(&gateway, "dave", 100, 1)).status, 200);
    drop(streams.pop());
    // There is room again when the server has seen it.
    while Answer::read(ask(&gateway, "carol", 1, 0)).status == 429 {}
}
