//! `examples/strategies` as it runs, without a browser: what it prints, and the answers for its page. `cargo xtask screenshots`
//! tests the page itself.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::Write;
use std::time::Duration;

use serde_json::Value;
use tower_redis_ratelimit::Strategy;

use crate::support::{Answer, Example, connect};

const HEAD: [&str; 2] = ["origin: http://localhost", "content-type: application/json"];

fn play(example: &Example, quota: &str, pattern: &str) -> Answer {
    let body = format!(r#"{{"quota":"{quota}","pattern":"{pattern}"}}"#);
    Answer::read(example.post("/play", &HEAD, &body))
}

/// Returns the numbers of granted requests, of denied ones, and of the most granted in a period.
fn numbers(answer: &Answer, strategy: &str) -> [u64; 3] {
    let json: Value = serde_json::from_str(&answer.body).unwrap();
    let plays = json["plays"].as_array().unwrap();
    let play = plays
        .iter()
        .find(|play| play["strategy"] == strategy)
        .unwrap();
    let all = play["requests"].as_array().unwrap().len() as u64;
    let granted = play["granted"].as_u64().unwrap();
    [granted, all - granted, play["most"].as_u64().unwrap()]
}

#[test]
fn nine_variants_answer_side_by_side() {
    let example = Example::start("strategies", &[]);
    let border = play(&example, "10/10s", "border");
    let json: Value = serde_json::from_str(&border.body).unwrap();
    let names = json["plays"]
        .as_array()
        .unwrap()
        .iter()
        .map(|play| play["strategy"].as_str().unwrap());
    let names: Vec<&str> = names.collect();
    assert_eq!(names[0], "gcra", "the default is the first");
    for strategy in Strategy::ALL {
        assert!(names.contains(&&*strategy.to_string()), "{strategy}");
    }
    assert_eq!(names.len(), 9);

    // Twice the limit around a border of the clock, and never more than the limit.
    assert_eq!(numbers(&border, "fixed-window"), [20, 0, 20]);
    assert_eq!(numbers(&border, "sliding-log"), [10, 10, 10]);
    // The first burst uses all, and 0.4 s refill nothing.
    assert_eq!(numbers(&border, "gcra"), [10, 10, 10]);

    // A client that obeys is denied once per refill, or once per window.
    let polite = play(&example, "10/10s", "polite");
    let [granted, denied, most] = numbers(&polite, "sliding-log");
    assert_eq!((granted, most), (30, 10));
    assert!((2..30).contains(&denied), "{denied}");
    let [granted, denied, _] = numbers(&play(&example, "10/10s", "greedy"), "gcra");
    assert!(
        granted < 40 && granted + denied == 150,
        "{granted} {denied}"
    );
}

#[test]
fn wrong_input_gets_the_reason() {
    let example = Example::start("strategies", &[]);
    for (quota, pattern, reason) in [
        ("ten", "steady", r#""ten" is not a valid quota: "#),
        (
            "10000/s",
            "greedy",
            "this pattern has 150000 requests under 10000/s, more than 10000",
        ),
        (
            "1/200d",
            "steady",
            "are more than a year: use a shorter period",
        ),
    ] {
        let answer = play(&example, quota, pattern);
        assert_eq!(answer.status, 400, "{}", answer.body);
        assert!(answer.body.contains(reason), "{}", answer.body);
    }
    // A window has no burst: the others answer.
    let burst = play(&example, "10/10s burst 20", "burst");
    let json: Value = serde_json::from_str(&burst.body).unwrap();
    let window = json["plays"]
        .as_array()
        .unwrap()
        .iter()
        .find(|play| play["strategy"] == "fixed-window");
    assert!(
        window.unwrap()["error"].as_str().unwrap().contains("burst"),
        "{}",
        burst.body
    );
    assert_eq!(numbers(&burst, "gcra")[0], 20 + 15);
}

#[test]
fn a_thousand_requests_take_100_ms() {
    let example = Example::start("strategies", &[]);
    let before = example.processor_time();
    for (quota, pattern) in [
        ("278/10s", "steady"),
        ("250/10s", "burst"),
        ("500/10s", "border"),
        ("67/10s", "greedy"),
        ("333/10s", "polite"),
    ] {
        let [granted, denied, _] = numbers(&play(&example, quota, pattern), "gcra");
        assert!(granted + denied >= 1_000, "{pattern}: {granted} {denied}");
    }
    // Not the time of the clock, in which others use the processor too.
    let time = (example.processor_time() - before) / 5;
    assert!(time < Duration::from_millis(100), "{time:?}");
}

#[test]
fn other_sites_cannot_use_the_page() {
    let example = Example::start("strategies", &[]);
    // A name of another site may lead to this machine.
    let mut stream = connect(example.port).unwrap();
    let rebound = "GET / HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n";
    stream.write_all(rebound.as_bytes()).unwrap();
    assert_eq!(Answer::read(stream).status, 403);
    let body = r#"{"quota":"1/s","pattern":"steady"}"#;
    for origin in ["origin: http://evil.example", "x: y"] {
        let answer = Answer::read(example.post("/play", &[origin, HEAD[1]], body));
        assert_eq!(answer.status, 403, "{origin}");
    }
    let page = Answer::read(example.get("/"));
    assert!(
        page.status == 200
            && page
                .head
                .contains("content-security-policy: default-src 'none'")
    );
}

#[test]
fn a_terminal_shows_the_same() {
    let output = Example::command("strategies")
        .args(["10/10s", "border"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0][..3], ["strategy", "granted", "denied"]);
    assert_eq!(rows[1][..4], ["gcra", "10", "10", "10"]);
    assert_eq!(rows[3][..4], ["fixed-window", "20", "0", "20"]);
    assert!(text.contains("Retry-After: "), "{text}");
    assert_eq!(rows.len(), 2 + 2 * Strategy::ALL.len());
    let wrong = Example::command("strategies")
        .args(["ten", "border"])
        .output()
        .unwrap();
    assert!(!wrong.status.success());
    assert!(
        String::from_utf8(wrong.stderr)
            .unwrap()
            .starts_with("\"ten\" is not a valid quota: ")
    );
}
