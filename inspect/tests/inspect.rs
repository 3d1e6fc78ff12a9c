//! `ratelimit-inspect` as it runs: on a single server, over TLS, behind sentinels, and in a cluster.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(
    clippy::disallowed_methods,
    dead_code,
    unreachable_pub,
    reason = "the servers are shared with other tests"
)]

#[path = "../../tests/support/cluster.rs"]
mod cluster;
#[path = "../../tests/support/sentinel.rs"]
mod sentinel;
#[path = "../../tests/support/mod.rs"]
mod support;
#[path = "../../tests/support/tls.rs"]
mod with_tls;

use std::convert::Infallible;
use std::fs;
use std::process::Command;

use http::{Request, Response};
use serde_json::Value;
use tempfile::TempDir;
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig};
use tower_redis_ratelimit::{Key, Policies, Policy, RateLimitLayer, Strategy};

use crate::support::{RedisServer, until};
use crate::with_tls::{Authority, TlsServer};

const CALLERS: u32 = 60;

/// A service: its settings as a file, and its store.
struct Service {
    store: AnyStore,
    settings: String,
    url: String,
    _dir: TempDir,
}

impl Service {
    fn new(url: &str) -> Self {
        Self::with(url, "")
    }

    /// With more lines about the store.
    fn with(url: &str, more: &str) -> Self {
        let settings = format!(
            r#"
            listen = "127.0.0.1:3000"

            [store]
            url = "{url}"
            prefix = "shop"
            timeout = "20s"
            kind = "redis"
            {more}

            [limits]
            default = {{ name = "api", quota = "100/h" }}

            [limits.tiers]
            pro = [
                {{ name = "api.v2", quota = "10/h" }},
                {{ name = "daily", strategy = "fixed-window", quota = "3 per day" }},
            ]
            exempt = "exempt"

            [disk]
            quota = 7
            "#
        );
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("service.toml");
        fs::write(&file, &settings).unwrap();
        let table: toml::Table = settings.parse().unwrap();
        let config: StoreConfig = table["store"].clone().try_into().unwrap();
        Self {
            store: AnyStore::from_config(&config).unwrap(),
            settings: file.to_str().unwrap().to_owned(),
            url: url.to_owned(),
            _dir: dir,
        }
    }

    async fn take(&self, caller: Key, policy: &Policy, cost: u32) {
        let policies = Policies::from(policy.clone());
        let take = Check::take(caller, &policies, cost).with_id("once");
        assert!(self.store.check(take).await.unwrap().is_allowed());
    }

    /// Returns the output with the settings and these arguments.
    fn inspect(&self, args: &[&str]) -> String {
        run("", &[&["--settings", &self.settings], args].concat()).unwrap()
    }

    /// Returns the output and the notes without the settings.
    fn without_settings(&self, args: &[&str]) -> String {
        let url = &self.url;
        let separator = if url.contains('?') { '&' } else { '?' };
        run(&format!("{url}{separator}prefix=shop"), args).unwrap()
    }
}

/// Returns the output of the program, with its notes at the end, or its error message.
fn run(url: &str, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ratelimit-inspect"));
    command.env_remove("REDIS_URL").args(args);
    if !url.is_empty() {
        command.env("REDIS_URL", url);
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (printed, notes) = (text(output.stdout), text(output.stderr));
    println!("$ ratelimit-inspect {args:?}\n{printed}{notes}");
    if output.status.success() {
        Ok(printed + &notes)
    } else {
        Err(notes)
    }
}

fn bucket(name: &str, quota: &str) -> Policy {
    Policy::new(name, Strategy::Gcra, quota.parse().unwrap()).unwrap()
}

fn daily() -> Policy {
    Policy::new(
        "daily",
        Strategy::FixedWindow(Default::default()),
        "3 per day".parse().unwrap(),
    )
    .unwrap()
}

/// The words of a row.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Counts callers, and inspects them by every command.
async fn inspect(service: &Service) {
    let (api, other) = (bucket("api", "100/h"), bucket("api.v2", "10/h"));
    for number in 0..CALLERS {
        service
            .take(Key::new(format!("user-{number}")), &api, number + 1)
            .await;
    }
    let secret = Key::secret("sk-1");
    service.take(secret, &api, 100).await;
    service
        .take(Key::ip([192, 0, 2, 7].into()), &other, 1)
        .await;
    service.take(Key::new("user-7"), &daily(), 3).await;

    // The settings file has the server and the policies, so the command needs no other argument.
    let limited = service.inspect(&["limited"]);
    let lines: Vec<&str> = limited.lines().collect();
    assert_eq!(lines.len(), 3, "{limited}");
    let digits = format!("{:?}", Key::new("user-7"));
    let digits = digits.trim_start_matches("Key(").trim_end_matches(')');
    assert_eq!(
        words(lines[0])[..9],
        [
            "user-7", digits, "daily", "0", "of", "3", "left,", "denied", "for"
        ]
    );
    assert!(
        lines[1].starts_with(secret.reveal()) && lines[1].contains(" 0 of 100 left, denied for 3"),
        "{limited}"
    );
    assert_eq!(lines[2], "2 of 63 counts deny the next request");

    // The key of a bucket contains its quota. The limit of the window is unknown without the settings.
    let limited = service.without_settings(&["limited"]);
    assert!(
        limited.contains("1 of 62 counts deny the next request\n"),
        "{limited}"
    );
    let note = "the limit of `daily fixed-window 1d` is not in Redis: use --settings FILE, or --policy 'daily fixed-window LIMIT/PERIOD'\n";
    assert!(limited.ends_with(note), "{limited}");
    let typed = service.without_settings(&["limited", "--policy", "daily fixed-window 3/d"]);
    assert!(
        typed.starts_with("user-7 ") && typed.ends_with("1 of 1 counts deny the next request\n"),
        "{typed}"
    );

    let top = service.inspect(&["top"]);
    let lines: Vec<&str> = top.lines().collect();
    assert_eq!(lines.len(), 20);
    assert!(
        lines[2].starts_with("user-59 ") && lines[2].contains(" 40 of 100 left, passes"),
        "{top}"
    );
    assert_eq!(
        service.inspect(&["top", "--number", "3"]).lines().count(),
        3
    );

    let policies = service.inspect(&["policies"]);
    let rows: Vec<Vec<&str>> = policies.lines().map(words).collect();
    assert_eq!(rows[0], ["policy", "strategy", "span", "callers"]);
    assert_eq!(rows[1], ["api", "gcra", "100/h", "61"]);
    assert_eq!(rows[2], ["api.v2", "gcra", "10/h", "1"]);
    assert_eq!(rows[3], ["daily", "fixed-window", "1d", "1"]);
    assert_eq!(rows.len(), 4);

    // One caller: as in the log, as in Redis, and as in a request.
    let shown = format!("{secret:?}");
    let short = shown.trim_start_matches("Key(").trim_end_matches(')');
    for caller in [
        short,
        &shown,
        secret.reveal(),
        "secret:sk-1",
        "x-api-key:  sk-1 ",
    ] {
        for one in [
            service.inspect(&["caller", caller]),
            service.without_settings(&["caller", caller]),
        ] {
            let line = one.lines().next().unwrap();
            assert!(
                line.contains(" 0 of 100 left, denied for 3") && !one.contains("sk-1"),
                "{one}"
            );
        }
    }
    let readable = service.inspect(&["caller", "x-user: user-7"]);
    assert_eq!(readable.lines().count(), 2, "{readable}");

    let json: Value =
        serde_json::from_str(&service.inspect(&["caller", "user-7", "--json"])).unwrap();
    let fields = [
        "caller",
        "log",
        "policy",
        "strategy",
        "quota",
        "capacity",
        "remaining",
    ];
    let of = |row: usize| fields.map(|field| json[row][field].to_string()).join(" ");
    assert_eq!(
        of(0),
        format!(r#""user-7" "{digits}" "api" "gcra" "100/h" 100 92"#)
    );
    assert_eq!(
        of(1),
        format!(r#""user-7" "{digits}" "daily" "fixed-window" "3/d" 3 0"#)
    );
    assert!(json[0]["denied_for"].is_null() && json[1]["denied_for"].as_f64().unwrap() > 0.0);

    let nothing = service.inspect(&["caller", "a"]);
    assert_eq!(
        nothing,
        "nothing is counted of `a`: if it comes from a header, write `secret:a`\n"
    );
    let nothing = service.inspect(&["reset", "#000000"]);
    assert!(
        nothing.starts_with("nothing is counted of `#000000`: its counts have expired"),
        "{nothing}"
    );
    assert_eq!(service.inspect(&["caller", "a", "--json"]), "[]\n");

    let reset = service.inspect(&["reset", "secret:sk-1"]);
    let expected = format!(
        "reset `api` of {}: 0 of 100 were left, and 100 are\n\
         Redis counts the next request from zero. An instance that has denied the caller may deny it for up to a second more. An \
         instance that decides without Redis, or from a leased block, still has its own count.\n",
        secret.reveal()
    );
    assert_eq!(reset, expected);
    let limited = service.inspect(&["limited", "--json"]);
    let limited: Value = serde_json::from_str(&limited).unwrap();
    assert_eq!(limited.as_array().unwrap().len(), 1);
    let reset = service.inspect(&["reset", "user-7", "--json"]);
    let reset: Value = serde_json::from_str(&reset).unwrap();
    let of = |row: usize| {
        (
            reset[row]["remaining"].as_u64(),
            reset[row]["remaining_after_reset"].as_u64(),
        )
    };
    assert_eq!((of(0), of(1)), ((Some(92), Some(100)), (Some(0), Some(3))));
    assert_eq!(service.inspect(&["caller", "user-7", "--json"]), "[]\n");
}

#[tokio::test]
async fn a_single_server_is_inspected() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let nothing = "nothing is counted: the counts have expired, or the service uses another server or prefix\n";
    assert_eq!(service.inspect(&["limited"]), nothing);
    inspect(&service).await;
}

#[tokio::test]
async fn a_cluster_is_inspected() {
    let cluster = cluster::Cluster::start(false).await;
    inspect(&Service::new(&cluster.url())).await;
}

#[tokio::test]
async fn a_master_behind_sentinels_is_inspected() {
    let group = sentinel::Group::start().await;
    inspect(&Service::new(&group.url())).await;
}

#[tokio::test]
async fn a_server_with_tls_is_inspected() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "redis.example");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.pem");
    fs::write(&file, authority.pem()).unwrap();
    let more = format!("root_certificates = {file:?}\nserver_name = \"redis.example\"");
    let service = Service::with(&server.url(), &more);
    service.take(Key::new("ann"), &daily(), 3).await;
    let limited = service.inspect(&["limited"]);
    assert!(
        limited.starts_with("ann ") && limited.contains(" 0 of 3 left, denied for "),
        "{limited}"
    );
    let error = run(&server.url(), &["limited"]).unwrap_err();
    assert!(error.contains("untrusted CA"), "{error}");
}

/// Counts of a dry run belong to their caller.
#[tokio::test]
async fn dry_runs_are_marked() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let by_user = HeaderKey::new("x-user").unwrap().readable();
    let layer = RateLimitLayer::new(service.store.clone(), by_user, bucket("api", "100/h"));
    let hello = service_fn(|_| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let limited = layer.shadow(bucket("trial", "10/h")).layer(hello);
    let request = Request::get("/")
        .header("x-user", "ann")
        .body(String::new())
        .unwrap();
    limited.oneshot(request).await.unwrap();
    until("both are counted", || async {
        server.command::<usize>("DBSIZE").await == 2
    })
    .await;
    let rows = service.without_settings(&["caller", "ann"]);
    let rows: Vec<&str> = rows.lines().collect();
    assert!(
        rows[0].starts_with("ann  ") && rows[0].contains(" api "),
        "{rows:?}"
    );
    assert!(
        rows[1].starts_with("ann (dry run) ") && rows[1].contains(" trial "),
        "{rows:?}"
    );
}

#[test]
fn errors_name_the_fix() {
    let of = |args: &[&str]| run("", args).unwrap_err();
    let url = "redis://127.0.0.1:1/";
    for (args, expected) in [
        (
            &["limited"][..],
            "no server: set REDIS_URL, or use --url or --settings\n",
        ),
        (
            &["limited", "--polcy", "api 1/s"],
            "\"--polcy\" is unknown: see --help\n",
        ),
        (&["limited", "--url"], "--url has no value\n"),
        (
            &["top", "--number", "many"],
            "--number is \"many\": use an integer\n",
        ),
        (
            &["user-42"],
            "\"user-42\" is no command: use `limited`, `top`, `policies`, `caller CALLER` or `reset CALLER`\n",
        ),
        (
            &["caller", "#12"],
            "\"#12\" is no caller: the log has six digits, such as #684888\n",
        ),
        (
            &["top", "--policy", "api 10"],
            "--policy \"api 10\": \"10\" is not a valid quota: ",
        ),
        (
            &["caller", "192.0.2.7"],
            "\"192.0.2.7\" is not a valid caller: ",
        ),
        (
            &["caller", "cookie: a"],
            "\"cookie\" is not a valid header to count by: ",
        ),
        (&["limited", "--settings", "/none.toml"], "/none.toml: "),
        (
            &["limited", "--url", url],
            "the server 127.0.0.1:1 cannot be reached: check the URL",
        ),
    ] {
        let error = of(args);
        assert!(error.starts_with(expected), "{args:?}: {error}");
    }
    let help = run("", &[]).unwrap();
    assert!(help.starts_with("Shows the counts") && help.contains("ratelimit-inspect limited"));
}
