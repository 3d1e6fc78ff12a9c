//! `examples/login.rs` as it runs: right passwords are free, and neither guesses in parallel nor spellings nor many users help.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::net::TcpStream;

use support::{Answer, Example};

/// A login that limits users only.
fn with_failures(quota: &str) -> Example {
    Example::start("login", &[("FAILURES", quota), ("ADDRESS", "1000/h")])
}

fn attempt(login: &Example, user: &str, password: &str) -> TcpStream {
    let body = format!(r#"{{"user":"{user}","password":"{password}"}}"#);
    login.post("/login", &["content-type: application/json"], &body)
}

#[test]
fn only_failures_count_even_in_parallel() {
    let login = with_failures("5/h");
    for _ in 0..10 {
        assert_eq!(
            Answer::read(attempt(&login, "alice", "open sesame")).status,
            200
        );
    }

    let guess = |guess| attempt(&login, "alice", if guess % 2 == 0 { "abc" } else { "123" });
    let guesses: Vec<_> = (0..100).map(guess).collect();
    let answers: Vec<u16> = guesses
        .into_iter()
        .map(|guess| Answer::read(guess).status)
        .collect();
    let of = |status| answers.iter().filter(|answer| **answer == status).count();
    assert_eq!((of(401), of(429)), (5, 95), "{answers:?}");

    let denied = Answer::read(attempt(&login, "alice", "open sesame"));
    assert_eq!(
        (denied.status, denied.remaining("login")),
        (429, 0),
        "{}",
        denied.head
    );
    assert!(denied.head.contains("\r\nretry-after: "), "{}", denied.head);
    assert!(
        denied.body.contains("The quota of 5 per hour is used up."),
        "{}",
        denied.body
    );
    assert_eq!(
        Answer::read(attempt(&login, "bob", "open sesame")).status,
        200
    );
}

#[test]
fn disconnecting_early_counts_as_an_attempt() {
    let login = with_failures("2/h");
    let guess = attempt(&login, "carol", "abc");
    login.wait_for(r#""carol" tries"#);
    drop(guess);
    // A client that hangs up gets no answer and no refund.
    let answers = [(); 2].map(|()| Answer::read(attempt(&login, "carol", "abc")).status);
    assert_eq!(answers, [401, 429]);
}

/// The user lookup and JSON accept many spellings of a user.
#[test]
fn spellings_of_a_user_share_one_count() {
    let login = with_failures("3/h");
    let guess = |user: &str| Answer::read(attempt(&login, user, "abc")).status;
    let spellings = [
        "alice",
        r"\u0061lice",
        "Alice",
        " ALICE ",
        r"a\u006Cice",
        r"\talic\u0065",
    ];
    assert_eq!(spellings.map(guess), [401, 401, 401, 429, 429, 429]);
    assert_eq!(guess("alicia"), 401, "another user");
    assert_eq!(guess(r"\ud800"), 400, "an unknown name");
}

#[test]
fn an_address_guesses_for_few_users() {
    let login = Example::start("login", &[("FAILURES", "2/h"), ("ADDRESS", "5/h")]);
    let attempt = |user: &str, password| Answer::read(attempt(&login, user, password));
    for _ in 0..10 {
        assert_eq!(attempt("alice", "open sesame").status, 200);
    }
    let victims = ["bob", "bob", "bob", "carol", "dave", "erin", "alice"];
    let statuses = victims.map(|user| attempt(user, "abc").status);
    assert_eq!(statuses, [401, 401, 429, 401, 401, 429, 429]);
    let denied = attempt("alice", "open sesame");
    assert_eq!((denied.status, denied.remaining("login-address")), (429, 0));
}

/// A name cannot forge a line of the log, or fill it.
#[test]
fn names_are_logged_safely() {
    let login = with_failures("5/h");
    let guess = |user: &str| Answer::read(attempt(&login, user, "abc")).status;
    assert_eq!(guess(r"bob\nroot\u001b[2J"), 401);
    login.wait_for(r#""bob\nroot\u{1b}[2j" tries"#);
    assert_eq!(guess(&"x".repeat(1_000)), 413);
}

#[test]
fn logins_work_without_a_reader_of_the_log() {
    let login = Example::spawn_unread(Example::command("login"));
    let answer = Answer::read(attempt(&login, "alice", "open sesame"));
    assert_eq!(answer.status, 200);
}
