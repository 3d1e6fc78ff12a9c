//! `examples/dashboard` as it runs, without a browser: the data for its page, and the effects of its buttons. `cargo
//! xtask screenshots` tests the page itself.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::{BufRead, BufReader, Lines};
use std::net::TcpStream;

use serde_json::Value;

use crate::support::{Answer, Example};

/// The header fields that the page sends with its requests.
const OURS: &str = "origin: http://localhost";

struct Dashboard(Example);

impl Dashboard {
    fn start(settings: &[(&str, &str)]) -> Self {
        Self(Example::start("dashboard", settings))
    }

    fn post(&self, path: &str, body: &str) -> Answer {
        Answer::read(self.0.post(path, &[OURS], body))
    }

    fn records(&self) -> Records {
        Records(BufReader::new(self.0.get("/records")).lines())
    }
}

impl Drop for Dashboard {
    /// Its Redis ends with it.
    fn drop(&mut self) {
        self.0.interrupt();
    }
}

struct Records(Lines<BufReader<TcpStream>>);

impl Records {
    fn next(&mut self) -> Value {
        let mut lines = self.0.by_ref().map(Result::unwrap);
        let json = lines.find_map(|line| line.strip_prefix("data: ").map(str::to_owned));
        serde_json::from_str(&json.expect("one record after the other")).unwrap()
    }

    /// Returns the first of the next records for which `is_so` holds.
    fn find(&mut self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        (0..60)
            .map(|_| self.next())
            .find(is_so)
            .unwrap_or_else(|| panic!("no record in a minute has {what}"))
    }
}

/// Number of decisions with this outcome from this source.
fn count(record: &Value, outcome: &str, source: &str) -> u64 {
    record[outcome][source].as_u64().unwrap_or_default()
}

#[test]
fn an_outage_and_its_end_are_recorded() {
    let dashboard = Dashboard::start(&[]);
    let mut records = dashboard.records();
    let by_redis = |record: &Value| record["local"] == 0 && count(record, "denied", "redis") > 0;
    let shared = records.find("denials by Redis", by_redis);
    assert_eq!(shared["redis"], "running");
    assert!(
        shared["p50"].as_u64() <= shared["p99"].as_u64() && shared["p50"].is_u64(),
        "{shared}"
    );
    let of_one = |record: &Value| record["policies"]["free"]["callers"][0].clone();
    assert!(
        of_one(&shared)[0] == "user-01" && of_one(&shared)[2].as_u64() > Some(0),
        "{shared}"
    );
    let batches: u64 = shared["batches"]
        .as_object()
        .unwrap()
        .values()
        .map(|calls| calls.as_u64().unwrap())
        .sum();
    assert!(
        batches > 0 && batches <= shared["checks"].as_u64().unwrap(),
        "{shared}"
    );

    for (action, state) in [("kill", "stopped"), ("freeze", "frozen")] {
        assert_eq!(dashboard.post(&format!("/redis/{action}"), "").status, 204);
        let local = records.find("an outage", |record| {
            record["local"] == 3 && count(record, "allowed", "local") > 0
        });
        assert_eq!(local["redis"], state);
        let back = if action == "kill" {
            "restart"
        } else {
            "resume"
        };
        assert_eq!(dashboard.post(&format!("/redis/{back}"), "").status, 204);
        records.find("what was reconciled", |record| {
            record["reconciled"].as_u64() > Some(0)
        });
        records.find("Redis again", |record| {
            record["local"] == 0 && count(record, "allowed", "redis") > 0
        });
    }

    // A page that is opened later gets all records.
    let mut later = dashboard.records();
    let mut notes = String::new();
    for text in [
        "You killed",
        "the fallback decides",
        "You started Redis again, empty: each caller has its burst again, less what the fallback granted",
        "Redis decides again",
        "Reconciled",
        "You froze",
    ] {
        while !notes.contains(text) {
            notes += &later.next()["notes"].to_string();
        }
    }
}

#[test]
fn buttons_change_load_and_limits() {
    let dashboard = Dashboard::start(&[]);
    let mut records = dashboard.records();
    assert_eq!(records.next()["rate"], 1_000);
    assert_eq!(dashboard.post("/rate/less", "").status, 204);
    records.find("the next rate", |record| record["rate"] == 500);

    assert_eq!(dashboard.post("/limit/free", "5/s burst 30").status, 204);
    let changed = records.find("the new limit", |record| {
        record["policies"]["free"]["capacity"] == 30
    });
    assert_eq!(changed["quotas"]["free"], "5/s burst 30");
    let refused = dashboard.post("/limit/free", "0/s");
    assert_eq!(
        (
            refused.status,
            refused.body.contains("its limit must be at least 1")
        ),
        (400, true)
    );
    assert_eq!(dashboard.post("/limit/gold", "5/s").status, 404);
    let refused = dashboard.post("/redis/resume", "");
    assert_eq!(
        (refused.status, refused.body.contains("in another state")),
        (409, true)
    );
}

#[test]
fn the_page_may_load_nothing_else() {
    let page = Answer::read(Dashboard::start(&[]).0.get("/"));
    let nonce = page
        .head
        .split_once("default-src 'none'; script-src 'nonce-")
        .unwrap()
        .1
        .split_once('\'')
        .unwrap()
        .0;
    assert_eq!(
        page.body.matches(&format!("nonce=\"{nonce}\"")).count(),
        2,
        "its script and its style"
    );
}

#[test]
fn other_sites_can_press_no_button() {
    let dashboard = Dashboard::start(&[]);
    for head in [
        &[][..],
        &["origin: https://evil.test"],
        &["origin: null"],
        &["origin: http://localhost:1"],
    ] {
        assert_eq!(
            Answer::read(dashboard.0.post("/redis/kill", head, "")).status,
            403,
            "{head:?}"
        );
    }
    assert_eq!(dashboard.records().next()["redis"], "running");
}

#[test]
fn without_redis_it_counts_locally() {
    let dashboard = Dashboard::start(&[("PATH", "")]);
    let record = dashboard
        .records()
        .find("denials", |record| count(record, "denied", "local") > 0);
    assert_eq!(
        (&record["redis"], &record["local"]),
        (&"missing".into(), &0.into())
    );
    assert_eq!(dashboard.post("/redis/kill", "").status, 409);
}
