//! `examples/llm_gateway.rs` as it runs: no user gets more tokens than the quota, or more concurrent answers than
//! allowed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

#[path = "../llm_gateway.rs"]
#[allow(dead_code, reason = "a test calls the gateway without its server")]
mod program;
#[path = "../../tests/support/mod.rs"]
mod servers;
mod support;

use std::io::Read;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use futures_util::StreamExt;
use futures_util::future::join_all;
use http::Request;
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_redis_ratelimit::{LocalStore, Quota, RedisStore};

use servers::RedisServer;
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

/// The tokens that a user has got, with the time of each.
#[derive(Clone, Default)]
struct Tokens(Arc<Mutex<Vec<(Duration, usize)>>>);

impl Tokens {
    fn total(&self) -> usize {
        self.0
            .lock()
            .unwrap()
            .iter()
            .map(|(_, tokens)| tokens)
            .sum()
    }

    /// The most in any period.
    fn most_in(&self, period: Duration) -> usize {
        let mut all = self.0.lock().unwrap().clone();
        all.sort_unstable();
        let (mut first, mut sum, mut most) = (0, 0, 0);
        for &(at, tokens) in &all {
            sum += tokens;
            while all[first].0 + period <= at {
                sum -= all[first].1;
                first += 1;
            }
            most = most.max(sum);
        }
        most
    }
}

/// A client of the gateway on a clock that a test has paused.
#[derive(Clone)]
struct Client {
    app: Router,
    start: Instant,
    tokens: Tokens,
}

impl Client {
    /// Sends a question of `words` words. Reads at most `limit` words of the answer, and rests for `pause` after the first one. Returns the
    /// status, and the words that were read.
    async fn ask(
        &self,
        key: &str,
        [words, max, limit]: [usize; 3],
        pause: Duration,
    ) -> (u16, usize) {
        let question = format!(
            r#"{{"prompt":"{}","max_tokens":{max}}}"#,
            "word ".repeat(words)
        );
        let request = Request::post("/chat")
            .header("x-api-key", key)
            .header("content-type", "application/json")
            .body(Body::from(question))
            .unwrap();
        let response = self.app.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        if status != 200 {
            return (status, 0);
        }
        self.got(words);
        let mut body = response.into_body().into_data_stream();
        let mut read = 0;
        while read < limit && body.next().await.transpose().unwrap().is_some() {
            self.got(1);
            read += 1;
            if read == 1 {
                sleep(pause).await;
            }
        }
        (status, read)
    }

    /// Sends alice's questions until `end`, and returns their number.
    async fn attack(&self, number: usize, period: Duration, end: Instant) -> usize {
        let never = Duration::ZERO;
        let mut asked = 0;
        while Instant::now() < end {
            let round = number + asked;
            let (question, pause) = match round % 6 {
                0 => ([400, 1, 1], never),
                // The model does not end at its maximum.
                1 => ([60, 20, usize::MAX], never),
                2 => ([1, 500, usize::MAX], never),
                3 => ([5, 100, 2], never),
                // Held back for more than a period.
                4 => ([100, 150, usize::MAX], period + period / 2),
                _ => ([10, 10_000, usize::MAX], never),
            };
            asked += 1;
            let (status, _) = self.ask("alice", question, pause).await;
            if status != 200 {
                assert_eq!(status, 429);
                let wait = 3 + (round * 7_919 + number * 104_729) % 100;
                sleep(period * wait as u32 / 4_000).await;
            }
        }
        asked
    }

    fn got(&self, tokens: usize) {
        let mut all = self.tokens.0.lock().unwrap();
        all.push((self.start.elapsed(), tokens));
    }
}

#[tokio::test(start_paused = true)]
async fn long_questions_are_refused() {
    let quota = Quota::per_minute(1_000);
    let client = Client {
        app: program::app(LocalStore::default().into(), quota, 4, "alice=a").unwrap(),
        start: Instant::now(),
        tokens: Tokens::default(),
    };
    // 100,000 bytes.
    let question = [20_000, 1, 1];
    assert_eq!(
        client.ask("alice", question, Duration::ZERO).await,
        (413, 0)
    );
    assert_eq!(
        client.ask("alice", [999, 1, 1], Duration::ZERO).await,
        (200, 1)
    );
}

/// An hour of 1,000 tokens a minute. Eight clients with the key of one user send long questions, request short and long answers, hang up, and
/// hold answers back; others guess keys. `cargo test --package examples --test llm_gateway an_hour -- --nocapture` prints the figures.
#[tokio::test(start_paused = true)]
async fn an_hour_of_attacks_gets_the_quota() {
    const QUOTA: usize = 1_000;
    const MINUTE: Duration = Duration::from_secs(60);
    let quota = Quota::per_minute(QUOTA as u32);
    let app = program::app(LocalStore::default().into(), quota, 4, "alice=a bob=b").unwrap();
    let start = Instant::now();
    let end = start + 60 * MINUTE;
    let client = || Client {
        app: app.clone(),
        start,
        tokens: Tokens::default(),
    };
    let (alice, bob, eve) = (client(), client(), client());
    let never = Duration::ZERO;

    let attacks = (0..8).map(|number| alice.attack(number, MINUTE, end));
    let guess = async || {
        let mut number = 0;
        while Instant::now() < end {
            let (status, _) = eve.ask(&format!("key-{number}"), [50, 50, 50], never).await;
            assert_eq!(status, 401);
            number += 1;
            sleep(Duration::from_millis(500)).await;
        }
        number
    };
    let be_polite = async || {
        let mut answers = 0;
        while Instant::now() < end {
            assert_eq!(bob.ask("bob", [10, 30, usize::MAX], never).await, (200, 30));
            answers += 1;
            sleep(Duration::from_secs(10)).await;
        }
        answers
    };
    let (asked, guesses, answers) = tokio::join!(join_all(attacks), guess(), be_polite());

    let (total, most) = (alice.tokens.total(), alice.tokens.most_in(MINUTE));
    println!(
        "{} questions of alice in an hour: {total} tokens of {}, at most {most} in a minute; {guesses} guessed keys: {} tokens; bob: {answers} of \
         {answers} questions answered, {} tokens",
        asked.iter().sum::<usize>(),
        60 * QUOTA,
        eve.tokens.total(),
        bob.tokens.total()
    );
    assert!((50 * QUOTA..=61 * QUOTA).contains(&total), "{total} tokens");
    assert!(most <= 5 * QUOTA, "{most} tokens in a minute");
}

/// Two gateways with one Redis, and quotas of half a second.
#[tokio::test]
async fn two_gateways_share_the_quota_under_attack() {
    const QUOTA: usize = 500;
    const PERIOD: Duration = Duration::from_millis(500);
    let server = RedisServer::start();
    let start = Instant::now();
    let mut clients = vec![];
    for _ in 0..2 {
        let store = RedisStore::builder(server.url()).timeout(Duration::from_secs(20));
        let store = store.connect().await.unwrap().into();
        let quota = Quota::per(QUOTA as u32, PERIOD);
        let app = program::app(store, quota, 64, "alice=a").unwrap();
        let tokens = clients
            .first()
            .map_or_else(Tokens::default, |first: &Client| first.tokens.clone());
        clients.push(Client { app, start, tokens });
    }
    let end = start + 10 * PERIOD;
    let attacks = (0..32).map(|number| clients[number % 2].attack(number, PERIOD, end));
    let requests: usize = join_all(attacks).await.into_iter().sum();

    // The last answers end later.
    let periods = start.elapsed().as_secs_f64() / PERIOD.as_secs_f64();
    let (total, max) = (clients[0].tokens.total(), (periods + 1.0) * QUOTA as f64);
    println!("{requests} requests: {total} tokens; the bound in {periods:.1} periods is {max:.0}");
    assert!(total > 2 * QUOTA && total as f64 <= max, "{total} tokens");
}
