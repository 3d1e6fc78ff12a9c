//! `examples/llm_gateway.rs` as it runs: no user gets more tokens than the quota, or more concurrent answers than
//! allowed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::Read;
use std::net::TcpStream;
use std::thread;

use support::{Answer, Example};

/// A gateway with a quota that does not refill noticeably while the test runs.
fn gateway() -> Example {
    with_tokens("1000/h")
}

fn with_tokens(tokens: &str) -> Example {
    let keys = "alice=a bob=b carol=c dave=d ZXJpbg===e";
    Example::start(
        "llm_gateway",
        &[("TOKENS", tokens), ("STREAMS", "4"), ("KEYS", keys)],
    )
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

/// Finds the remaining tokens by a request for more than the quota.
fn remaining(gateway: &Example, key: &str) -> u32 {
    let denied = Answer::read(ask(gateway, key, 1_000_000, 0));
    assert_eq!(denied.status, 429, "{}", denied.head);
    denied.remaining("tokens")
}

/// Waits until an answer has been settled.
fn wait_until_remaining(gateway: &Example, key: &str, wanted: u32) {
    for _ in 0..10_000 {
        if remaining(gateway, key) == wanted {
            return;
        }
    }
    panic!("{} tokens remain, not {wanted}", remaining(gateway, key));
}

#[test]
fn a_response_is_charged_its_tokens() {
    let gateway = gateway();
    let answer = Answer::read(ask(&gateway, "alice", 300, 5));
    assert_eq!(
        (answer.status, answer.remaining("tokens")),
        (200, 695),
        "what it may cost: {}",
        answer.head
    );
    assert_eq!(answer.body.matches("word").count(), 15);
    // 5 for the question and 15 for the answer.
    wait_until_remaining(&gateway, "alice", 980);
    // Answers that may be too long are denied, and cost nothing.
    for _ in 0..20 {
        let denied = Answer::read(ask(&gateway, "alice", 976, 5));
        assert_eq!(
            (denied.status, denied.remaining("tokens")),
            (429, 980),
            "{}",
            denied.head
        );
    }
    assert_eq!(Answer::read(ask(&gateway, "alice", 975, 5)).status, 200);
}

#[test]
fn an_answer_ends_at_its_maximum() {
    let gateway = gateway();
    let answer = Answer::read(ask(&gateway, "alice", 4, 5));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.body.matches("word").count(), 4);
    wait_until_remaining(&gateway, "alice", 991);
    assert_eq!(Answer::read(ask(&gateway, "alice", 0, 5)).status, 422);
    wait_until_remaining(&gateway, "alice", 991);
}

#[test]
fn only_known_keys_get_answers() {
    let gateway = gateway();
    for key in ["eve", "a", "Alice", "", "\u{e9}", "ZXJpbg"] {
        let answer = Answer::read(ask(&gateway, key, 10, 5));
        assert_eq!(answer.status, 401, "{key}: {}", answer.head);
        assert!(answer.head.contains("www-authenticate: apikey"));
    }
    let erin = Answer::read(ask(&gateway, "ZXJpbg==", 10, 5));
    assert_eq!(erin.status, 200, "a key in base64: {}", erin.head);
}

/// With long prompts, short maxima and clients that hang up, prompts and answers together stay within the quota.
#[test]
fn an_attack_gets_at_most_the_quota() {
    let gateway = with_tokens("200/h");
    let attack = |number: u32| {
        let mut tokens = 0;
        for round in 0..40 {
            let (max, words) = match (number + round) % 4 {
                0 => (0, 50),
                1 => (1, 60),
                2 => (100, 1),
                _ => (5, 30),
            };
            let stream = ask(&gateway, "alice", max, words);
            let answer = if round % 3 == 0 {
                read_a_little(stream)
            } else {
                Answer::read(stream)
            };
            if answer.status == 200 {
                tokens += words + answer.body.matches("word").count();
            }
        }
        tokens
    };
    let tokens: usize = thread::scope(|scope| {
        let attacks: Vec<_> = (0..4)
            .map(|number| scope.spawn(move || attack(number)))
            .collect();
        attacks
            .into_iter()
            .map(|attack| attack.join().unwrap())
            .sum()
    });
    assert!((100..=200).contains(&tokens), "{tokens} tokens of 200");
}

/// Reads the head and the first part of the body, and hangs up.
fn read_a_little(mut stream: TcpStream) -> Answer {
    let (mut text, mut said) = (String::new(), [0; 2_048]);
    while !text.contains("\r\n\r\n") {
        let read = stream.read(&mut said).unwrap();
        text += &String::from_utf8_lossy(&said[..read]);
    }
    Answer::of(&text)
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
    let mut left = 0;
    while left < 200 {
        left = remaining(&gateway, "bob");
    }
    // 20 for the question, and fewer than the 60 of the whole answer: writing fails soon after the client has hung up.
    assert!((920..=977).contains(&left), "{left} remain");
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
    // The slot is free once the server has noticed the hang-up.
    while Answer::read(ask(&gateway, "carol", 1, 1)).status == 429 {}
}
