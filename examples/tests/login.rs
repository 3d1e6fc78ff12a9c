//! `examples/login.rs` as it runs: right passwords are free, and many guesses at once are no way around.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use support::{Answer, Example};

#[test]
fn only_failures_count_even_in_parallel() {
    let login = Example::start("login", &[("FAILURES", "5/h")]);
    let attempt = |user: &str, password| login.post(&format!("/login/{user}"), &[], password);
    for _ in 0..10 {
        let answer = Answer::read(attempt("alice", "open sesame"));
        assert_eq!((answer.status, answer.remaining("login")), (200, 5), "{}", answer.head);
        assert_eq!(answer.body, "Welcome, alice!\n");
    }

    let guesses: Vec<_> = (0..100).map(|guess| attempt("alice", if guess % 2 == 0 { "abc" } else { "123" })).collect();
    let answers: Vec<u16> = guesses.into_iter().map(|guess| Answer::read(guess).status).collect();
    let of = |status| answers.iter().filter(|answer| **answer == status).count();
    assert_eq!((of(401), of(429)), (5, 95), "{answers:?}");
    assert_eq!(Answer::read(attempt("alice", "open sesame")).status, 429);
    assert_eq!(Answer::read(attempt("bob", "open sesame")).status, 200);
}

#[test]
fn disconnecting_early_counts_as_an_attempt() {
    let login = Example::start("login", &[("FAILURES", "5/h")]);
    let remaining = || Answer::read(login.post("/login/carol", &[], "open sesame")).remaining("login");
    assert_eq!(remaining(), 5);
    login.wait_for("carol tries");
    let guess = login.post("/login/carol", &[], "abc");
    login.wait_for("carol tries");
    drop(guess);
    // Who hangs up gets no answer, and no refund.
    assert_eq!(remaining(), 4);
    assert_eq!(remaining(), 4);
}

/// One user has as many paths as one likes to write.
#[test]
fn spellings_of_a_user_share_one_count() {
    let login = Example::start("login", &[("FAILURES", "3/h")]);
    let guess = |user: &str| Answer::read(login.post(&format!("/login/{user}"), &[], "abc")).status;
    let spellings = ["alice", "%61lice", "a%6cice", "a%6Cice", "alic%65", "%61%6c%69%63%65", "alice?", "alice?a=b"];
    let answers = spellings.map(guess);
    assert_eq!(answers, [401, 401, 401, 429, 429, 429, 429, 429]);
    assert_eq!(guess("Alice"), 401, "another user");
    assert_eq!(guess("%ff"), 400, "nobody's name");
    assert_eq!(guess("alice/"), 404);
}
