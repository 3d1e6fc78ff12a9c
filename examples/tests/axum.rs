//! `examples/axum.rs` as `docs/start.md` runs it: alone, and as two instances whose Redis is killed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(unreachable_pub, reason = "the servers are shared with other tests")]

#[path = "../../tests/support/mod.rs"]
mod servers;
mod support;

use servers::RedisServer;
use support::{Answer, Example};

const PAGE: &str = include_str!("../../docs/start.md");

fn get(instance: &Example, key: &str) -> Answer {
    Answer::read(instance.get_with("/", &[&format!("x-api-key: {key}")]))
}

/// Checks that the page has a block with all these lines.
fn is_quoted(lines: &[&str]) {
    let quoted = |block: &str| lines.iter().all(|line| block.contains(line));
    assert!(PAGE.split("```").any(quoted), "the page lacks {lines:?}");
}

/// The page is one file, and serves by axum.
#[test]
fn the_page_shows_the_program() {
    let (_, program) = include_str!("../axum.rs").split_once("\n\n").unwrap();
    let of_page = [
        ("mod listen;\nmod serve;\n", "use std::net::SocketAddr;\n"),
        (
            "    serve::serve(listener, app).await?;\n",
            "    axum::serve(\n        listener,\n        app.into_make_service_with_connect_info::<SocketAddr>(),\n    )\n    .await?;\n",
        ),
    ];
    let mut program = program.to_owned();
    for (bounded, unbounded) in of_page {
        assert!(program.contains(bounded), "{bounded}");
        program = program.replace(bounded, unbounded);
    }
    assert!(PAGE.contains(&format!("```rust,no_run\n{program}```")));
}

/// Sends requests to the instances in turn until all deny; returns the number of grants. A busy machine may take longer
/// than the 6 s of a refill, or than the deadline of a check.
fn grants(instances: &[&Example], key: &str) -> usize {
    let round = |_: usize| {
        let answers = instances.iter().map(|instance| get(instance, key));
        answers.filter(|answer| answer.status == 200).count()
    };
    (0..30).map(round).take_while(|granted| *granted > 0).sum()
}

#[test]
fn the_eleventh_request_gets_a_429() {
    let service = Example::start("axum", &[]);
    let first = Answer::read(service.get("/"));
    for line in [
        r#"ratelimit-policy: "api";q=10;w=60"#,
        r#"ratelimit: "api";r=9;t=54"#,
    ] {
        assert!(first.head.contains(line), "{}", first.head);
        is_quoted(&["200 OK", line]);
    }
    let granted = grants(&[&service], "k-1");
    assert!((10..12).contains(&granted), "{granted}");
    let denied = get(&service, "k-1");
    assert_eq!(denied.status, 429);
    assert!(denied.head.contains("\r\nretry-after: "), "{}", denied.head);
    assert!(
        denied
            .body
            .contains("The quota of 10 per minute is used up."),
        "{}",
        denied.body
    );
    is_quoted(&[
        "429 Too Many Requests",
        "The quota of 10 per minute is used up.",
    ]);
}

#[test]
fn instances_share_a_count_and_survive_an_outage() {
    let mut redis = RedisServer::start();
    let start = || Example::start("axum", &[("REDIS_URL", &redis.url())]);
    let (first, second) = (start(), start());
    let granted = grants(&[&first, &second], "k-1");
    assert!((10..15).contains(&granted), "{granted}");

    redis.kill();
    let granted = grants(&[&first], "k-2");
    assert!((10..12).contains(&granted), "{granted}");
    let lost = "shared store unavailable, enforcing rate limits locally";
    first.wait_for_part(lost);
    is_quoted(&[lost]);

    redis.restart();
    let back = "shared store recovered";
    first.wait_for_part(back);
    is_quoted(&[back]);
    let charged = get(&second, "k-2");
    assert!(charged.remaining("api") < 5, "{}", charged.head);
}
