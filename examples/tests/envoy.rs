//! `examples/envoy` as it runs: its replies to Envoy, and Envoy's replies to clients.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "Envoy waits in real time")]

#[path = "../../tests/support/mod.rs"]
mod servers;
mod support;

use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use tempfile::TempDir;
use tokio::time::sleep;
use tonic::transport::Channel;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use yaml_serde::Value;

use crate::servers::RedisServer;
use crate::support::{Answer, Example, connect};

/// Maximum time to wait for a condition, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const OK: Code = Code::Ok;
const OVER: Code = Code::OverLimit;

/// Starts the service with these files.
struct Service {
    directory: TempDir,
    example: Example,
    client: RateLimitServiceClient<Channel>,
}

impl Service {
    async fn start(files: &[&str]) -> Self {
        Self::with(("STORE", "{}"), files).await
    }

    /// Starts the service with this setting. Its log is in the directory.
    async fn with(setting: (&str, &str), files: &[&str]) -> Self {
        let directory = TempDir::new().unwrap();
        for (number, text) in files.iter().enumerate() {
            fs::write(directory.path().join(format!("{number}.yaml")), text).unwrap();
        }
        let mut command = Example::command("envoy");
        command
            .envs([("LISTEN", "127.0.0.1:0"), ("ADMIN", "127.0.0.1:0"), setting])
            .env("CONFIG", directory.path())
            .stderr(File::create(directory.path().join("log")).unwrap());
        let example = Example::spawn(command);
        let client = RateLimitServiceClient::connect(format!("http://127.0.0.1:{}", example.port))
            .await
            .unwrap();
        Self {
            directory,
            example,
            client,
        }
    }

    /// Its log.
    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    async fn wait_for_log(&self, text: &str) {
        let start = Instant::now();
        while !self.log().contains(text) {
            assert!(start.elapsed() < PATIENCE, "no {text:?} in {}", self.log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until `calls` script calls were sent to Redis.
    async fn wait_for_checks(&self, calls: &str) {
        let sent = format!("ratelimit_batch_checks_count{{store=\"default\"}} {calls}\n");
        let start = Instant::now();
        loop {
            let metrics = self.admin("/metrics").body;
            if metrics.contains(&sent) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "no {sent:?} in {metrics}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Requests a page of the port for metrics.
    fn admin(&self, path: &str) -> Answer {
        let mut stream = connect(self.example.admin_port).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        Answer::read(stream)
    }

    /// Changes the first file like an editor.
    fn change(&self, text: &str) {
        let (new, file) = (
            self.directory.path().join("new"),
            self.directory.path().join("0.yaml"),
        );
        fs::write(&new, text).unwrap();
        fs::rename(new, file).unwrap();
    }

    async fn ask(&mut self, request: RateLimitRequest) -> RateLimitResponse {
        self.client
            .should_rate_limit(request)
            .await
            .unwrap()
            .into_inner()
    }

    /// Sends one descriptor. Returns its code, its limit, and the remaining capacity.
    async fn one(&mut self, domain: &str, entries: &[(&str, &str)]) -> (Code, Option<u32>, u32) {
        let response = self.ask(request(domain, [descriptor(entries)])).await;
        let [status] = &response.statuses[..] else {
            panic!("{response:?}")
        };
        assert_eq!(response.overall_code(), status.code());
        seen(status)
    }
}

fn request(
    domain: &str,
    descriptors: impl IntoIterator<Item = RateLimitDescriptor>,
) -> RateLimitRequest {
    let descriptors = descriptors.into_iter().collect();
    RateLimitRequest {
        domain: domain.to_owned(),
        descriptors,
        hits_addend: 0,
    }
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |&(key, value): &(&str, &str)| Entry {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        ..RateLimitDescriptor::default()
    }
}

/// A descriptor with `hits_addend`.
fn hits(entries: &[(&str, &str)], hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value: hits }),
        ..descriptor(entries)
    }
}

fn seen(status: &DescriptorStatus) -> (Code, Option<u32>, u32) {
    (
        status.code(),
        status
            .current_limit
            .as_ref()
            .map(|limit| limit.requests_per_unit),
        status.limit_remaining,
    )
}

/// The second and third example of Envoy's README, with limits per day.
const MESSAGING: &str = "
domain: messaging
descriptors:
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit: { unit: day, requests_per_unit: 5 }
  - key: to_number
    rate_limit: { unit: day, requests_per_unit: 100 }
";
const ADDRESSES: &str = "
domain: edge_proxy_per_ip
descriptors:
  - key: remote_address
    rate_limit: { unit: day, requests_per_unit: 10 }
  - key: remote_address
    value: 50.0.0.5
    rate_limit: { unit: day, requests_per_unit: 0 }
";

#[tokio::test]
async fn each_descriptor_has_its_limit() {
    let mut service = Service::start(&[MESSAGING]).await;
    let marketing = |number| descriptor(&[("message_type", "marketing"), ("to_number", number)]);
    let number = descriptor(&[("to_number", "2061111111")]);
    for left in (0..5).rev() {
        let response = service
            .ask(request(
                "messaging",
                [marketing("2061111111"), number.clone()],
            ))
            .await;
        assert_eq!(response.overall_code(), OK);
        assert_eq!(
            response.statuses.iter().map(seen).collect::<Vec<_>>(),
            [(OK, Some(5), left), (OK, Some(100), left + 95),]
        );
    }
    // One descriptor exceeds its limit; the other one is charged nevertheless.
    let response = service
        .ask(request(
            "messaging",
            [marketing("2061111111"), number.clone()],
        ))
        .await;
    assert_eq!(response.overall_code(), OVER);
    assert_eq!(
        response.statuses.iter().map(seen).collect::<Vec<_>>(),
        [(OVER, Some(5), 0), (OK, Some(100), 94)]
    );
    let status = &response.statuses[0];
    assert_eq!(status.current_limit.as_ref().unwrap().unit(), Unit::Day);
    assert!(
        (1..=86_400).contains(&status.duration_until_reset.as_ref().unwrap().seconds),
        "{status:?}"
    );

    let response = service
        .ask(request("messaging", [marketing("2062222222"), number]))
        .await;
    assert_eq!(
        response.statuses.iter().map(seen).collect::<Vec<_>>(),
        [(OK, Some(5), 4), (OK, Some(100), 93)]
    );
}

/// By `quota`, and by a `unit` with the strategy of a calendar.
#[tokio::test]
async fn months_and_years_may_be_of_a_calendar() {
    const PLANS: &str = "
domain: plans
descriptors:
  - { key: week, rate_limit: { unit: week, requests_per_unit: 5, strategy: fixed-window(week from sunday) } }
  - { key: month, rate_limit: { unit: month, requests_per_unit: 5, strategy: fixed-window(month from 15) } }
  - { key: months, rate_limit: { quota: 5/month } }
  - { key: year, rate_limit: { unit: year, requests_per_unit: 5, strategy: fixed-window(year) } }
  - { key: years, rate_limit: { quota: 5/year } }
  - { key: days, rate_limit: { unit: month, requests_per_unit: 5 } }
";
    let mut service = Service::start(&[PLANS]).await;
    for (key, unit) in [
        ("week", Unit::Week),
        ("month", Unit::Month),
        ("months", Unit::Month),
        ("year", Unit::Year),
        ("years", Unit::Year),
        ("days", Unit::Month),
    ] {
        let descriptors = [descriptor(&[(key, "ann")])];
        let response = service.ask(request("plans", descriptors)).await;
        let status = &response.statuses[0];
        assert_eq!(seen(status), (OK, Some(5), 4), "{key}");
        assert_eq!(status.current_limit.as_ref().unwrap().unit(), unit, "{key}");
    }
}

#[tokio::test]
async fn the_most_specific_rule_applies() {
    let paths = "
domain: paths
descriptors:
  - key: path
    rate_limit: { unit: day, requests_per_unit: 1 }
  - key: path
    value: /api/*/action
    rate_limit: { unit: day, requests_per_unit: 2 }
  - key: path
    value: /api/1/action
    rate_limit: { unit: day, requests_per_unit: 3 }
  - key: path
    value: files/*
    share_threshold: true
    rate_limit: { unit: day, requests_per_unit: 4 }
";
    let mut service = Service::start(&[ADDRESSES, paths]).await;
    let address = |address| [("remote_address", address)];
    assert_eq!(
        service.one("edge_proxy_per_ip", &address("50.0.0.1")).await,
        (OK, Some(10), 9)
    );
    assert_eq!(
        service.one("edge_proxy_per_ip", &address("50.0.0.5")).await,
        (OVER, Some(0), 0)
    );
    for (path, limit, left) in [
        ("/api/1/action", 3, 2),
        ("/api/2/action", 2, 1),
        ("/api/2/x/action", 2, 1),
        ("/api/2/other", 1, 0),
        ("/api/action", 1, 0),
        ("files/a.pdf", 4, 3),
        ("files/b.pdf", 4, 2),
    ] {
        assert_eq!(
            service.one("paths", &[("path", path)]).await,
            (OK, Some(limit), left),
            "{path}"
        );
    }
}

#[tokio::test]
async fn what_has_no_limit_passes() {
    let internal = "
domain: internal
descriptors:
  - key: ldap
    rate_limit: { unlimited: true }
  - key: key
    value: value
    rate_limit: { unit: day, requests_per_unit: 1 }
    descriptors:
      - key: subkey
        rate_limit: { unit: day, requests_per_unit: 300 }
      - key: exempt
";
    let mut service = Service::start(&[internal]).await;
    for (domain, entries) in [
        ("elsewhere", &[("ldap", "")][..]),
        ("internal", &[("key", "other")]),
        ("internal", &[("key", "value"), ("exempt", "x")]),
        ("internal", &[("key", "value"), ("unknown", "x")]),
        (
            "internal",
            &[("key", "value"), ("subkey", "x"), ("third", "x")],
        ),
        ("internal", &[]),
    ] {
        assert_eq!(
            service.one(domain, entries).await,
            (OK, None, 0),
            "{domain} {entries:?}"
        );
    }
    assert_eq!(
        service.one("internal", &[("ldap", "x")]).await,
        (OK, None, u32::MAX)
    );
    assert_eq!(
        service
            .one("internal", &[("key", "value"), ("subkey", "x")])
            .await,
        (OK, Some(300), 299)
    );
    assert_eq!(
        service.one("internal", &[("key", "value")]).await,
        (OK, Some(1), 0),
        "a level above"
    );
}

#[tokio::test]
async fn a_shadow_never_denies() {
    let services = "
domain: services
descriptors:
  - key: service
    descriptors:
      - key: user
        value: user-a
        rate_limit: { unit: day, requests_per_unit: 1 }
        shadow_mode: true
      - key: user
        value: user-b
        rate_limit: { unit: day, requests_per_unit: 1 }
      - key: user
        value: nobody
        rate_limit: { unit: day, requests_per_unit: 0 }
        shadow_mode: true
";
    let mut service = Service::start(&[services]).await;
    for (user, code) in [("user-a", OK), ("user-b", OVER)] {
        let entries = [("service", "auth-service"), ("user", user)];
        assert_eq!(service.one("services", &entries).await, (OK, Some(1), 0));
        assert_eq!(service.one("services", &entries).await, (code, Some(1), 0));
        let response = service
            .ask(request("services", [descriptor(&entries)]))
            .await;
        assert_eq!(
            response.response_headers_to_add.is_empty(),
            user == "user-a",
            "clients get no header fields about it"
        );
    }
    assert_eq!(
        service
            .one("services", &[("service", "x"), ("user", "nobody")])
            .await,
        (OK, Some(0), 0)
    );
    let metrics = service.admin("/metrics").body;
    let of_denials =
        |line: &&str| line.starts_with("ratelimit_decisions_total") && line.contains("=\"denied\"");
    let mut denials: Vec<&str> = metrics.lines().filter(of_denials).collect();
    denials.sort_unstable();
    let [shadow, limit] = denials[..] else {
        panic!("{metrics}")
    };
    assert!(
        shadow.contains("policy=\"services.service.user_user-a\"")
            && shadow.ends_with("dry_run=\"true\"} 2")
    );
    assert!(
        limit.contains("policy=\"services.service.user_user-b\"")
            && limit.ends_with("dry_run=\"false\"} 2")
    );
}

#[tokio::test]
async fn a_limit_replaces_another() {
    let replacing = "
domain: replacing
descriptors:
  - key: key_1
    value: value_1
    descriptors:
      - key: user
        rate_limit: { name: specific_limit, unit: day, requests_per_unit: 5 }
  - key: key_2
    value: value_2
    descriptors:
      - key: user
        rate_limit:
          replaces: [{ name: specific_limit }]
          unit: day
          requests_per_unit: 10
";
    let mut service = Service::start(&[replacing]).await;
    let one = descriptor(&[("key_1", "value_1"), ("user", "bkthomps")]);
    let two = descriptor(&[("key_2", "value_2"), ("user", "bkthomps")]);
    for (descriptors, statuses) in [
        (vec![one.clone()], vec![(OK, Some(5), 4)]),
        (vec![two.clone()], vec![(OK, Some(10), 9)]),
        (
            vec![one.clone(), two],
            vec![(OK, None, 0), (OK, Some(10), 8)],
        ),
        (vec![one], vec![(OK, Some(5), 3)]),
    ] {
        let response = service.ask(request("replacing", descriptors)).await;
        assert_eq!(
            response.statuses.iter().map(seen).collect::<Vec<_>>(),
            statuses
        );
    }
}

#[tokio::test]
async fn hits_are_of_request_or_descriptor() {
    let mut service = Service::start(&[MESSAGING]).await;
    let number = [("to_number", "1")];
    for (of_request, of_descriptor, code, left) in [
        (0, None, OK, 99),
        (9, None, OK, 90),
        (9, Some(20), OK, 70),
        (9, Some(0), OK, 70),
        // As in Envoy's own service, hits that do not fit use up the rest: they may be the cost of a response that was
        // sent.
        (0, Some(71), OVER, 0),
        (0, Some(0), OVER, 0),
        (0, None, OVER, 0),
        (0, Some(u64::MAX), OVER, 0),
    ] {
        let descriptor = of_descriptor.map_or(descriptor(&number), |of_descriptor| {
            hits(&number, of_descriptor)
        });
        let request = RateLimitRequest {
            hits_addend: of_request,
            ..request("messaging", [descriptor])
        };
        let response = service.ask(request).await;
        assert_eq!(
            seen(&response.statuses[0]),
            (code, Some(100), left),
            "{of_request} {of_descriptor:?}"
        );
        assert_eq!(response.overall_code(), code);
    }
    let back = RateLimitDescriptor {
        is_negative_hits: true,
        ..hits(&number, 30)
    };
    assert_eq!(
        seen(&service.ask(request("messaging", [back])).await.statuses[0]),
        (OK, Some(100), 30)
    );
}

#[tokio::test]
async fn a_request_may_bring_its_limit() {
    let mut service = Service::start(&[MESSAGING]).await;
    let limited = |requests_per_unit, unit: Unit| {
        let limit = Some(RateLimitOverride {
            requests_per_unit,
            unit: unit.into(),
        });
        RateLimitDescriptor {
            limit,
            ..descriptor(&[("tenant", "a")])
        }
    };
    for (descriptor, status) in [
        (limited(2, Unit::Day), (OK, Some(2), 1)),
        (limited(3, Unit::Day), (OK, Some(3), 1)),
        (limited(0, Unit::Day), (OVER, Some(0), 0)),
        (limited(7, Unit::Year), (OK, Some(7), 6)),
    ] {
        let response = service
            .ask(request("messaging", [descriptor.clone()]))
            .await;
        assert_eq!(seen(&response.statuses[0]), status, "{descriptor:?}");
    }
    let elsewhere = service
        .ask(request("elsewhere", [limited(0, Unit::Day)]))
        .await;
    assert_eq!(elsewhere.overall_code(), OK, "the domain is unknown");
    let problem = service
        .client
        .should_rate_limit(request("messaging", [limited(2, Unit::Unknown)]))
        .await;
    assert_eq!(problem.unwrap_err().code(), tonic::Code::InvalidArgument);
}

/// Names are truncated to 64 characters.
#[tokio::test]
async fn overrides_of_long_domains_count_apart() {
    let domain = "d".repeat(60);
    let file = format!("domain: {domain}\ndescriptors: [{{ key: k }}]");
    let mut service = Service::start(&[&file]).await;
    let mut name_and_left = async |requests_per_unit, unit: Unit| {
        let limited = RateLimitDescriptor {
            limit: Some(RateLimitOverride {
                requests_per_unit,
                unit: unit.into(),
            }),
            ..descriptor(&[("k", "v")])
        };
        let response = service.ask(request(&domain, [limited])).await;
        let policy = &response.response_headers_to_add[0].value;
        let name = policy.split('"').nth(1).unwrap().to_owned();
        (name, response.statuses[0].limit_remaining)
    };
    for left in [4, 3] {
        let (name, remaining) = name_and_left(5, Unit::Day).await;
        assert!(name.starts_with("override.day.ddd"), "{name}");
        assert_eq!(remaining, left);
    }
    let (name, remaining) = name_and_left(10, Unit::Week).await;
    assert!(name.starts_with("override.week.ddd"), "{name}");
    assert_eq!(remaining, 9);
}

#[tokio::test]
async fn malformed_requests_are_invalid() {
    let mut service = Service::start(&[MESSAGING]).await;
    let number = descriptor(&[("to_number", "1")]);
    let many = |count| request("messaging", vec![number.clone(); count]);
    for (request, problem) in [
        (request("", [number.clone()]), "the domain is empty"),
        (many(0), "0 descriptors: send 1 to 100"),
        (many(101), "101 descriptors: send 1 to 100"),
        (many(3_000), "3000 descriptors: send 1 to 100"),
    ] {
        let status = service.client.should_rate_limit(request).await.unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (tonic::Code::InvalidArgument, problem)
        );
    }
    let most = service.ask(many(100)).await;
    assert_eq!((most.statuses.len(), most.overall_code()), (100, OK));
}

#[tokio::test]
async fn long_requests_are_refused() {
    let mut service = Service::start(&[MESSAGING]).await;
    let long = "a".repeat(64 * 1024);
    let request = request("messaging", [descriptor(&[("to_number", &long)])]);
    let error = service.client.should_rate_limit(request).await.unwrap_err();
    assert!(
        error.message().contains("decoded message length too large"),
        "{error}"
    );
}

#[tokio::test]
async fn limits_are_ready_and_in_metrics() {
    let service = Service::start(&[MESSAGING, ADDRESSES]).await;
    let get = |path: &str| service.admin(path);
    let ready = get("/ready");
    assert_eq!(
        (ready.status, ready.body.as_str()),
        (200, "2 domains, 4 limits\n")
    );
    let limits = || {
        let metrics = get("/metrics").body;
        let lines = metrics
            .lines()
            .filter(|line| line.starts_with("ratelimit_limit{"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let numbers =
        r#"ratelimit_limit{policy="messaging.message_type_marketing.to_number",quota="5/d"} 5"#;
    let others = [
        r#"ratelimit_limit{policy="edge_proxy_per_ip.remote_address",quota="10/d"} 10"#,
        r#"ratelimit_limit{policy="messaging.to_number",quota="100/d"} 100"#,
    ];
    assert_eq!(limits(), [others[0], numbers, others[1]]);
    // Not where Envoy sends its requests.
    let mut reply = vec![];
    // It may end with a reset.
    drop(service.example.get("/metrics").read_to_end(&mut reply));
    assert!(!String::from_utf8_lossy(&reply).contains("ratelimit"));
    service.change(&MESSAGING.replace("requests_per_unit: 5", "requests_per_unit: 6"));
    service
        .wait_for_log("new limits: 2 domains, 4 limits")
        .await;
    let changed = numbers.replace("5/d", "6/d").replace("} 5", "} 6");
    assert_eq!(limits(), [others[0], &changed, others[1]]);
}

/// After SIGTERM, the service ends once it has replied to the requests in flight.
#[tokio::test]
async fn a_shutdown_answers_requests_in_flight() {
    let redis = RedisServer::start();
    let store = format!("{{ url: \"{}\", kind: redis, timeout: 20s }}", redis.url());
    let mut service = Service::with(("STORE", &store), &[MESSAGING]).await;
    let entries = [("to_number", "2061111111")];
    assert_eq!(
        service.one("messaging", &entries).await,
        (OK, Some(100), 99)
    );
    redis.freeze();
    let mut client = service.client.clone();
    let in_flight = async move {
        let request = request("messaging", [descriptor(&entries)]);
        client
            .should_rate_limit(request)
            .await
            .unwrap()
            .into_inner()
    };
    let in_flight = tokio::spawn(in_flight);
    service.wait_for_checks("2").await;
    service.example.signal("-TERM");
    service.wait_for_log("shutting down").await;
    redis.thaw();
    assert_eq!(in_flight.await.unwrap().overall_code(), OK);
    assert!(service.example.wait().success());
}

#[tokio::test]
async fn an_unknown_domain_is_warned_of_once() {
    let mut service = Service::start(&[MESSAGING]).await;
    for domain in ["shop", "shop", "messaging", "other", "shop"] {
        service.one(domain, &[("to_number", "1")]).await;
    }
    let log = service.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains(" WARN ")).collect();
    let [shop, other] = warnings[..] else {
        panic!("{log}")
    };
    assert!(shop.ends_with("no file has the domain \"shop\": its requests pass"));
    assert!(other.ends_with("no file has the domain \"other\": its requests pass"));
}

#[tokio::test]
async fn files_that_vanish_are_reported() {
    let mut service = Service::start(&[MESSAGING, ADDRESSES]).await;
    let path = |name: &str| service.directory.path().join(name);
    let (first, second) = (path("0.yaml"), path("1.yml"));
    assert!(
        service.log().contains(" INFO ") && service.log().contains("2 domains, 4 limits from ")
    );
    // The lock of an editor, and a directory, are no files with limits.
    std::os::unix::fs::symlink("nowhere", path(".#0.yaml")).unwrap();
    fs::create_dir(path("old.yaml")).unwrap();
    fs::rename(path("1.yaml"), &second).unwrap();
    service
        .wait_for_log("new limits: 2 domains, 4 limits")
        .await;

    // The file is read while it is being written.
    service.change("domain: messaging\n");
    service.wait_for_log("the old limits stay: ").await;
    assert_eq!(
        service.one("messaging", &[("to_number", "1")]).await,
        (OK, Some(100), 99)
    );
    fs::remove_file(first).unwrap();
    service
        .wait_for_log("the domain \"messaging\" was removed: its requests pass")
        .await;
    service
        .wait_for_log("new limits: 1 domains, 2 limits")
        .await;
    fs::remove_file(second).unwrap();
    service
        .wait_for_log("no file: add a `*.yaml` or `*.yml`")
        .await;
    assert_eq!(
        service
            .one("edge_proxy_per_ip", &[("remote_address", "192.0.2.7")])
            .await,
        (OK, Some(10), 9)
    );
}

#[tokio::test]
async fn clients_get_header_fields() {
    let own = "
domain: own
descriptors:
  - key: user
    rate_limit: { quota: 3/h burst 1 }
  - key: all
    rate_limit: { unit: week, requests_per_unit: 100, strategy: sliding-log }
";
    let mut service = Service::start(&[own]).await;
    let both = || {
        request(
            "own",
            [descriptor(&[("all", "")]), descriptor(&[("user", "ann")])],
        )
    };
    assert_eq!(service.ask(both()).await.overall_code(), OK);
    let response = service.ask(both()).await;
    assert_eq!(response.overall_code(), OVER);
    let field = |HeaderValue { key, value, .. }: &HeaderValue| format!("{key}: {value}");
    let fields: Vec<String> = response.response_headers_to_add.iter().map(field).collect();
    assert_eq!(
        fields[..3],
        [
            "ratelimit-policy: \"own.user\";q=3;w=3600",
            "ratelimit-policy: \"own.all\";q=100;w=604800",
            "ratelimit: \"own.user\";r=0;t=1200",
        ]
    );
    // Long after a window boundary of the clock.
    assert_eq!(
        fields[3..],
        ["ratelimit: \"own.all\";r=98;t=604800", "retry-after: 1200"]
    );

    let mut silent = Service::with(("HEADERS", "[]"), &[own]).await;
    assert!(silent.ask(both()).await.response_headers_to_add.is_empty());
}

#[tokio::test]
async fn a_changed_file_keeps_counts() {
    let file = |limit| {
        format!(
            "domain: d\ndescriptors: [{{ key: k, rate_limit: {{ unit: day, requests_per_unit: {limit} }} }}]"
        )
    };
    let mut service = Service::start(&[&file("10")]).await;
    for left in [9, 8, 7] {
        assert_eq!(service.one("d", &[("k", "v")]).await, (OK, Some(10), left));
    }
    // Not a number: the old limits stay until the file is valid again.
    service.change(&file("many"));
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(service.one("d", &[("k", "v")]).await, (OK, Some(10), 6));
    service.change(&file("20"));
    let peek = request("d", [hits(&[("k", "v")], 0)]);
    while seen(&service.ask(peek.clone()).await.statuses[0]).1 != Some(20) {
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(service.one("d", &[("k", "v")]).await, (OK, Some(20), 15));
}

#[tokio::test]
async fn instances_share_their_counts() {
    let server = RedisServer::start();
    let store = format!("{{ kind: redis, url: {:?}, timeout: 20s }}", server.url());
    let mut one = Service::with(("STORE", &store), &[MESSAGING]).await;
    let mut two = Service::with(("STORE", &store), &[MESSAGING]).await;
    assert_eq!(
        one.one("messaging", &[("to_number", "1")]).await,
        (OK, Some(100), 99)
    );
    assert_eq!(
        two.one("messaging", &[("to_number", "1")]).await,
        (OK, Some(100), 98)
    );
}

/// With Nagle's algorithm a reply would take 40 ms, and Envoy waits for 20 ms.
#[tokio::test]
async fn answers_come_within_envoys_timeout() {
    let mut service = Service::start(&[MESSAGING]).await;
    let number = ("to_number", "1");
    let both = request(
        "messaging",
        [
            descriptor(&[number]),
            descriptor(&[("message_type", "marketing"), number]),
        ],
    );
    let mut in_time = 0;
    for _ in 0..40 {
        let start = Instant::now();
        service.ask(both.clone()).await;
        in_time += u32::from(start.elapsed() < Duration::from_millis(20));
    }
    assert!(in_time >= 20, "{in_time} of 40");
}

/// An error lets Envoy apply `failure_mode_deny`.
#[tokio::test]
async fn a_failed_store_is_unavailable() {
    let mut service = Service::with(
        ("STORE", "{ kind: redis, url: redis://127.0.0.1:1/ }"),
        &[MESSAGING],
    )
    .await;
    let number = request("messaging", [descriptor(&[("to_number", "1")])]);
    assert_eq!(
        service
            .client
            .should_rate_limit(number)
            .await
            .unwrap_err()
            .code(),
        tonic::Code::Unavailable
    );

    let channel =
        Channel::from_shared(format!("http://127.0.0.1:{}", service.example.port)).unwrap();
    let mut health = HealthClient::new(channel.connect().await.unwrap());
    for service in ["", "envoy.service.ratelimit.v3.RateLimitService"] {
        let service = service.to_owned();
        assert_eq!(
            health
                .check(HealthCheckRequest { service })
                .await
                .unwrap()
                .into_inner()
                .status,
            1,
            "it serves"
        );
    }
}

#[test]
fn a_wrong_file_is_reported_at_startup() {
    let limit =
        |text| format!("domain: d\ndescriptors: [{{ key: k, value: v, rate_limit: {text} }}]");
    for (files, problem) in [
        (vec![], "no file: add a `*.yaml` or `*.yml`"),
        (
            vec!["domain: ''\ndescriptors: [{ key: k }]".to_owned()],
            "0.yaml: the domain is empty",
        ),
        (
            vec!["domain: d".to_owned()],
            "0.yaml: missing field `descriptors`",
        ),
        (
            vec!["domain: d\ndescriptors: []".to_owned()],
            "0.yaml: the domain \"d\" has no descriptors: add one",
        ),
        (
            vec![limit("{ unlimited: true, replaces: [{ name: '' }] }")],
            "0.yaml: d.k_v: `replaces` needs the `name` of another limit",
        ),
        (
            vec![limit("{ unit: fortnight, requests_per_unit: 1 }")],
            "0.yaml: d.k_v: use `second`, `minute`, ",
        ),
        (
            vec![limit("{ unit: day }")],
            "0.yaml: d.k_v: write `unit` and `requests_per_unit`, or `quota`",
        ),
        (
            vec![limit("{ quota: often }")],
            "0.yaml: descriptors[0].rate_limit.quota: ",
        ),
        (
            vec![limit("{ quota: 1/s burst 2, strategy: sliding-log }")],
            "0.yaml: d.k_v: ",
        ),
        (
            vec![limit("{ unlimited: true }"), limit("{ unlimited: true }")],
            "1.yaml: the domain \"d\" is in another",
        ),
        (
            vec!["domain: d\ndescriptors: [{ key: k }, { key: k }]".to_owned()],
            "0.yaml: d.k: appears more than once",
        ),
        (
            vec!["domain: d\ndescriptors: [{ key: k, quota_mode: true }]".to_owned()],
            "unknown field `quota_mode`",
        ),
        (
            vec![limit("{ quota: 5/m, block_after: 20/min for 10m }")],
            "unknown field `block_after`",
        ),
    ] {
        let directory = TempDir::new().unwrap();
        for (number, text) in files.iter().enumerate() {
            fs::write(directory.path().join(format!("{number}.yaml")), text).unwrap();
        }
        // If it accepted the files, it would end, because it cannot listen on this address.
        let mut command = Example::command("envoy");
        let output = command
            .env("CONFIG", directory.path())
            .env("LISTEN", "192.0.2.1:0")
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && told.contains(problem), "{told}");
    }
}

/// The limits of the README are the tested ones, and Istio's settings equal Envoy's.
#[test]
fn the_page_and_istio_match_the_tested_files() {
    let yaml = |text: &str| yaml_serde::from_str::<Value>(text).unwrap();
    let page = include_str!("../envoy/README.md");
    let (_, block) = page.split_once("```yaml\n").unwrap();
    assert_eq!(
        yaml(block.split("```").next().unwrap()),
        yaml(include_str!("../envoy/config/shop.yaml"))
    );

    let envoy = yaml(include_str!("../envoy/envoy.yaml"));
    let manager = &envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let filter = &manager["http_filters"][0];
    let host = &manager["route_config"]["virtual_hosts"][0];

    let istio = include_str!("../envoy/istio.yaml");
    let istio: Vec<Value> = istio.split("---\n").map(yaml).collect();
    let patch = |number: usize| istio[number]["spec"]["configPatches"][0]["patch"]["value"].clone();
    let mut inserted = patch(1);
    let grpc = ["typed_config", "rate_limit_service", "grpc_service"]
        .iter()
        .fold(&mut inserted, |at, key| &mut at[*key]);
    *grpc = filter["typed_config"]["rate_limit_service"]["grpc_service"].clone();
    assert_eq!(&inserted, filter, "except for the name of the cluster");
    assert_eq!(patch(2)["rate_limits"], host["rate_limits"]);
}

/// Envoy with the example's configuration file.
struct Envoy {
    _directory: TempDir,
    process: Child,
    port: u16,
}

impl Envoy {
    /// It trusts a proxy in front of it, so that the test chooses the clients' addresses.
    async fn start(service: &Service) -> Self {
        // These ports are free when they are chosen, but another program may take one.
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [port, upstream] = listeners.map(|listener| listener.local_addr().unwrap().port());
        let text = include_str!("../envoy/envoy.yaml");
        let on = |text: &str, of: u16, port: u16| {
            text.replace(
                &format!("port_value: {of} "),
                &format!("port_value: {port} "),
            )
        };
        let text = on(
            &on(&on(text, 10_000, port), 10_001, upstream),
            8_081,
            service.example.port,
        );
        let peer = "use_remote_address: true\n";
        let proxy = format!("{peer}{}xff_num_trusted_hops: 1\n", " ".repeat(16));
        let directory = TempDir::new().unwrap();
        let file = directory.path().join("envoy.yaml");
        let text = text.replace(peer, &proxy);
        let text = text.replace(
            "request_headers_timeout: 5s",
            "request_headers_timeout: 0.3s",
        );
        fs::write(&file, text).unwrap();
        let mut command = Command::new(env::var("ENVOY").unwrap());
        command
            .arg("-c")
            .arg(file)
            .args(["--use-dynamic-base-id", "--log-level", "error"]);
        let envoy = Self {
            _directory: directory,
            process: command.spawn().unwrap(),
            port,
        };
        while connect(port).is_err() {
            sleep(Duration::from_millis(50)).await;
        }
        envoy
    }

    fn get(&self, path: &str, client: &str) -> Answer {
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nhost: shop\r\nx-forwarded-for: {client}\r\nconnection: close\r\n\r\n"
        ))
    }

    fn send(&self, head: &str) -> Answer {
        let mut stream = connect(self.port).unwrap();
        write!(stream, "{head}").unwrap();
        Answer::read(stream)
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// `cargo xtask envoy` downloads Envoy.
#[tokio::test]
#[ignore = "needs Envoy: `cargo xtask envoy`"]
async fn envoy_rejects_what_is_over() {
    let service = Service::start(&[include_str!("../envoy/config/shop.yaml")]).await;
    let envoy = Envoy::start(&service).await;
    let client = "192.0.2.7";
    for left in (0..5).rev() {
        let passed = envoy.get("/login?user=ann", client);
        assert_eq!((passed.status, passed.body.as_str()), (200, "Hello!\n"));
        assert_eq!(
            passed.remaining("shop.route_login.masked_remote_address"),
            left
        );
    }
    let denied = envoy.get("/login?user=bob", client);
    assert_eq!(denied.status, 429);
    assert!(
        denied.head.contains("\r\nretry-after: ")
            && denied.head.contains("\r\nx-envoy-ratelimited: true")
    );
    assert_eq!(envoy.get("/", client).status, 200);
    for path in [
        "//login",
        "/./login",
        "/x/../login",
        "/%6cogin",
        "/%2flogin",
        "/login/",
        "/login;x",
        "/LOGIN",
        "/Login.",
        "/login%20",
        "/login/;x/y?z",
    ] {
        assert_eq!(envoy.get(path, client).status, 429, "{path}");
    }
    assert_eq!(envoy.get("/login-help", client).status, 200);
    // As `failure_mode_deny: false` says.
    drop(service);
    assert_eq!(envoy.get("/login", client).status, 200);
}

#[tokio::test]
#[ignore = "needs Envoy: `cargo xtask envoy`"]
async fn addresses_of_a_network_share_a_count() {
    let service = Service::start(&[include_str!("../envoy/config/shop.yaml")]).await;
    let envoy = Envoy::start(&service).await;
    let passed = |network: &str| {
        let addresses = (1..20).map(|host| format!("2001:db8:0:{network}::{host:x}"));
        addresses
            .filter(|address| envoy.get("/login", address).status == 200)
            .count()
    };
    assert_eq!(passed("1"), 5);
    assert_eq!(passed("2"), 5);
    // A client is identified by its full IPv4 address.
    assert_eq!(envoy.get("/login", "192.0.2.7").status, 200);
}

#[tokio::test]
#[ignore = "needs Envoy: `cargo xtask envoy`"]
async fn the_listener_is_hardened() {
    let service = Service::start(&[include_str!("../envoy/config/shop.yaml")]).await;
    let envoy = Envoy::start(&service).await;
    let start = Instant::now();
    // A head that does not end.
    assert_eq!(envoy.send("GET / HTTP/1.1\r\nhost: shop\r\nx-").status, 408);
    assert!(start.elapsed() < PATIENCE);
    let twice = "GET / HTTP/1.1\r\nhost: shop\r\nx_user: ann\r\nconnection: close\r\n\r\n";
    assert_eq!(envoy.send(twice).status, 400);
}
