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
use std::time::Duration;

use http::{Request, Response};
use serde_json::Value;
use tempfile::TempDir;
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, Source};
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::select::{Tier, Tiers};
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig};
use tower_redis_ratelimit::{Key, Limiter, Policies, Policy, RateLimitLayer, Strategy};

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
        let (dir, file) = file(&settings);
        let table: toml::Table = settings.parse().unwrap();
        let config: StoreConfig = table["store"].clone().try_into().unwrap();
        Self {
            store: AnyStore::from_config(&config).unwrap(),
            settings: file,
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

/// Writes a file of settings.
fn file(text: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("service.toml");
    fs::write(&file, text).unwrap();
    (dir, file.to_str().unwrap().to_owned())
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
    Policy::new(name, Strategy::Gcra, quota).unwrap()
}

fn daily() -> Policy {
    Policy::new(
        "daily",
        Strategy::FixedWindow(Default::default()),
        "3 per day",
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
    assert_eq!(lines.len(), 4, "{limited}");
    assert_eq!(
        words(lines[0]),
        [
            "caller", "log", "policy", "left", "next", "passes", "all", "back"
        ]
    );
    // Each column begins below its head.
    for (column, text) in [
        ("policy", "daily"),
        ("left", "0 of 3"),
        ("next passes", "in "),
    ] {
        let at = lines[0].find(column).unwrap();
        assert!(lines[1][at..].starts_with(text), "{limited}");
    }
    let digits = format!("{:?}", Key::new("user-7"));
    let digits = digits.trim_start_matches("Key(").trim_end_matches(')');
    assert_eq!(
        words(lines[1])[..7],
        ["user-7", digits, "daily", "0", "of", "3", "in"]
    );
    assert!(
        lines[2].starts_with(secret.reveal()) && lines[2].contains(" 0 of 100  in 3"),
        "{limited}"
    );
    assert_eq!(lines[3], "2 of 63 counts deny the next request");

    // The value of a bucket names its quota. The limit of the window is unknown without the settings.
    let limited = service.without_settings(&["limited"]);
    assert!(
        limited.contains("1 of 62 counts deny the next request\n"),
        "{limited}"
    );
    let note = "the limit of `daily fixed-window 1d` is not in Redis: use --settings FILE, or --policy 'daily fixed-window LIMIT/PERIOD'\n";
    assert!(limited.ends_with(note), "{limited}");
    let typed = service.without_settings(&["limited", "--policy", "daily fixed-window 3/d"]);
    assert!(
        typed.contains("\nuser-7 ") && typed.ends_with("1 of 1 counts deny the next request\n"),
        "{typed}"
    );

    let top = service.inspect(&["top"]);
    let lines: Vec<&str> = top.lines().collect();
    assert_eq!(lines.len(), 21);
    assert!(
        lines[3].starts_with("user-59 ") && lines[3].contains(" 40 of 100  now "),
        "{top}"
    );
    assert_eq!(service.inspect(&["top", "--number=3"]).lines().count(), 4);

    let policies = service.inspect(&["policies"]);
    let rows: Vec<Vec<&str>> = policies.lines().map(words).collect();
    assert_eq!(rows[0], ["policy", "strategy", "span", "callers"]);
    assert_eq!(rows[1], ["api", "gcra", "-", "61"]);
    assert_eq!(rows[2], ["api.v2", "gcra", "-", "1"]);
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
            let line = one.lines().nth(1).unwrap();
            assert!(
                line.contains(" 0 of 100  in 3") && !one.contains("sk-1"),
                "{one}"
            );
        }
    }
    let readable = service.inspect(&["caller", "x-user: user-7"]);
    assert_eq!(readable.lines().count(), 3, "{readable}");

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
    for command in ["limited", "top", "policies"] {
        assert_eq!(service.inspect(&[command]), nothing);
    }
    let of_policy = service.inspect(&["top", "--policy", "other 1/s"]);
    assert!(
        of_policy.starts_with("nothing is counted under this policy: "),
        "{of_policy}"
    );
    inspect(&service).await;
}

/// A deploy has changed the strategy. The settings have only the last one.
#[tokio::test]
async fn strategies_under_one_name_are_separate() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let names = ["gcra", "token-bucket", "leaky-bucket"];
    for strategy in names {
        let strategy = strategy.parse().unwrap();
        let policy = Policy::new("api", strategy, "5/h").unwrap();
        service.take(Key::new("ann"), &policy, 5).await;
    }
    for args in [&["limited"][..], &["caller", "ann"]] {
        for shown in [service.inspect(args), service.without_settings(args)] {
            for name in names {
                let row = format!(" api {name} ");
                assert_eq!(shown.matches(&row).count(), 1, "{row}: {shown}");
            }
            assert_eq!(shown.matches(" 0 of 5  in ").count(), 3, "{shown}");
        }
    }
    let reset = service.inspect(&["reset", "ann"]);
    for name in names {
        let row = format!("reset `api {name}` of ann: 0 of 5 were left, and 5 are\n");
        assert!(reset.contains(&row), "{row}: {reset}");
    }
    assert_eq!(service.inspect(&["caller", "ann", "--json"]), "[]\n");
}

/// A caller has changed its plan: the quota that has counted last is shown, in the text of the settings.
#[tokio::test]
async fn a_bucket_is_shown_under_its_last_quota() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    for (quota, shown) in [
        ("60/m", "60/m"),
        ("1000/h burst 50", "50/3m"),
        ("100/s burst 200", "100/s burst 200"),
        ("7/10s", "7/10s"),
        ("100/h", "100/h"),
    ] {
        let policies = Policies::from(bucket("api", quota));
        let take = Check::take(Key::new("ann"), &policies, 1);
        assert!(service.store.check(take).await.unwrap().is_allowed());
        let json = service.without_settings(&["caller", "ann", "--json"]);
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json[0]["quota"], shown, "{quota}");
    }
    let json: Value = serde_json::from_str(&service.inspect(&["caller", "ann", "--json"])).unwrap();
    assert_eq!(
        (&json[0]["quota"], json.as_array().unwrap().len()),
        (&"100/h".into(), 1)
    );
}

#[tokio::test]
async fn plans_of_one_name_are_one_count() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let window = |quota: &str| {
        let strategy = Strategy::FixedWindow(Default::default());
        Policy::new("login", strategy, quota).unwrap()
    };
    service.take(Key::new("ann"), &window("500/h"), 9).await;
    let (_dir, file) = file(&format!(
        r#"
        store = {{ url = "{}", prefix = "shop" }}
        default = {{ name = "login", strategy = "fixed-window", quota = "5/h" }}
        tiers.pro = {{ name = "login", strategy = "fixed-window", quota = "500/h" }}
        "#,
        server.url()
    ));
    let inspect = |args: &[&str]| run("", &[args, &["--settings", &file]].concat()).unwrap();
    let note = "`login` has the limits `5/h`, `500/h`, and the largest one is shown: for another, use --policy 'login fixed-window 5/h'\n";
    assert_eq!(
        inspect(&["limited"]),
        format!("0 of 1 counts deny the next request\n{note}")
    );
    let caller = inspect(&["caller", "ann"]);
    assert!(
        caller.lines().count() == 3 && caller.contains(" 491 of 500  now "),
        "{caller}"
    );
    let typed = inspect(&["limited", "--policy", "login fixed-window 5/h"]);
    assert!(typed.contains(" 0 of 5  in "), "{typed}");
    let reset = inspect(&["reset", "ann"]);
    assert_eq!(
        reset.matches("reset `login` of ann: ").count(),
        1,
        "{reset}"
    );
    assert_eq!(inspect(&["caller", "ann", "--json"]), "[]\n");
}

#[tokio::test]
async fn a_monthly_plan_is_shown() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let months = "fixed-window(month from 15, +02:00)".parse().unwrap();
    let plan = Policy::new("plan", months, "10/month").unwrap();
    service.take(Key::new("ann"), &plan, 10).await;
    let typed = "plan fixed-window(month from 15, +02:00) 10/month";
    let limited = service.without_settings(&["limited", "--policy", typed]);
    assert!(
        limited.contains("ann") && limited.contains(" 0 of 10  in "),
        "{limited}"
    );
    let unknown = service.without_settings(&["limited"]);
    let note = "the limit of `plan fixed-window month` is not in Redis: use --settings FILE, or --policy \
                'plan fixed-window(CALENDAR) LIMIT/PERIOD'\n";
    assert!(unknown.ends_with(note), "{unknown}");
}

/// Settings may name a zone of the IANA database.
#[tokio::test]
async fn a_plan_of_a_named_zone_is_shown() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let days = "fixed-window(day, +01:00)".parse().unwrap();
    let plan = Policy::new("plan", days, "9/d").unwrap();
    service.take(Key::new("ann"), &plan, 4).await;
    let (_dir, file) = file(&format!(
        r#"
        store = {{ url = "{}", prefix = "shop" }}
        plan = {{ name = "plan", strategy = "fixed-window(day, Europe/Berlin)", quota = "9/d" }}
        "#,
        server.url()
    ));
    let caller = run("", &["caller", "ann", "--settings", &file]).unwrap();
    assert!(caller.contains(" 5 of 9 "), "{caller}");
}

/// A page of a caller's usage has the numbers of `inspect caller`. The layer and the page are those of `examples/gateway.rs`.
#[tokio::test]
async fn a_usage_page_shows_the_same() {
    let server = RedisServer::start();
    let store = format!(
        "[store]\nurl = \"{}\"\nkind = \"redis\"\ntimeout = \"20s\"",
        server.url()
    );
    let text = include_str!("../../examples/gateway.toml").replace("[store]", &store);
    // So slow that nothing drains during the test.
    let text = text.replace("50/min", "50/d");
    let (_dir, file) = file(&text);
    let settings: toml::Table = text.parse().unwrap();
    let config: StoreConfig = settings["store"].clone().try_into().unwrap();
    let store = AnyStore::from_config(&config).unwrap();
    let limits: Tiers = settings["limits"].clone().try_into().unwrap();
    let by_user = HeaderKey::new("x-user").unwrap().readable();
    let layer =
        RateLimitLayer::new(store, by_user, limits).cost(|request| match request.uri.path() {
            "/report" => 10,
            "/usage" => 0,
            _ => 1,
        });
    let service = layer.layer(service_fn(async |request: Request<String>| {
        let decision = request.extensions().get::<Decision>().unwrap();
        let mut page = String::new();
        for each in decision.each() {
            let (used, of) = (each.used(), each.capacity());
            page += &format!("{}: {used} of {of}\n", each.policy().name());
        }
        Ok::<_, Infallible>(Response::new(page))
    }));
    let get = async |user: &'static str, path: &str| {
        let request = Request::get(path).header("x-user", user);
        let request = request.extension(Tier::new("pro"));
        let request = request.body(String::new()).unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        response.into_body()
    };
    for user in ["carol", "bob"] {
        for path in ["/", "/report", "/"] {
            get(user, path).await;
        }
    }
    let inspected = |user: &str| {
        let json = run("", &["caller", user, "--json", "--settings", &file]).unwrap();
        let rows: Vec<Value> = serde_json::from_str(&json).unwrap();
        let mut page = String::new();
        for row in rows {
            let policy = row["policy"].as_str().unwrap();
            page += &format!("{policy}: {} of {}\n", row["used"], row["capacity"]);
        }
        page
    };
    let carol = get("carol", "/usage").await;
    assert_eq!(carol, "carol: 12 of 50\n");
    assert_eq!(inspected("carol"), carol);
    let daily = "pro-daily: 12 of 100000\n";
    for page in [get("bob", "/usage").await, inspected("bob")] {
        assert!(page.contains(daily), "{page}");
    }
}

#[tokio::test]
async fn a_reset_without_the_limit_fails() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let url = format!("{}?prefix=shop", server.url());
    let ann = Key::new("ann");
    service.take(ann, &daily(), 3).await;
    for more in [&[][..], &["--json"]] {
        let error = run(&url, &[&["reset", "ann"], more].concat()).unwrap_err();
        assert!(
            error.contains("--policy 'daily fixed-window LIMIT/PERIOD'")
                && error
                    .ends_with("nothing was reset: the caller has counts whose limit is unknown\n"),
            "{error}"
        );
    }
    service.take(ann, &bucket("api", "100/h"), 3).await;
    assert!(run(&url, &["reset", "ann"]).is_err());
    assert!(service.inspect(&["caller", "ann"]).contains(" 97 of 100 "));
    let typed = service.without_settings(&["reset", "ann", "--policy", "daily fixed-window 3/d"]);
    assert!(typed.contains("0 of 3 were left, and 3 are"), "{typed}");
}

#[tokio::test]
async fn digits_of_several_callers_reset_none() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let callers = ["user-7268", "user-9383"];
    for caller in callers {
        service
            .take(Key::new(caller), &bucket("api", "100/h"), 3)
            .await;
    }
    assert_eq!(service.inspect(&["caller", "#30f370"]).lines().count(), 3);
    let error = run("", &["reset", "#30f370", "--settings", &service.settings]);
    assert_eq!(
        error.unwrap_err(),
        "nothing was reset: #30f370 are the digits of several callers, so name one of them: `user-7268`, `user-9383`\n"
    );
    for caller in callers {
        let shown = service.inspect(&["caller", caller]);
        assert!(shown.contains(" 97 of 100 "), "{shown}");
    }
    service.inspect(&["reset", callers[0]]);
    assert_eq!(service.inspect(&["caller", "#30f370"]).lines().count(), 2);
}

#[test]
fn the_outermost_store_is_read() {
    let of = |text: &str| {
        let (_dir, file) = file(text);
        run("", &["limited", "--settings", &file]).unwrap_err()
    };
    let [one, two] =
        [1, 2].map(|port| format!("store = {{ url = \"redis://127.0.0.1:{port}/\" }}\n"));
    for text in [
        format!("{one}[cache]\n{two}"),
        format!("{one}[tier]\n{two}[cache]\n{two}"),
        format!("[limits]\n{one}"),
    ] {
        let error = of(&text);
        assert!(error.starts_with("the server 127.0.0.1:1 "), "{error}");
    }
    let error = of(&format!("[limits]\n{one}[cache]\n{two}"));
    assert!(
        error.contains(
            "the stores `cache.store`, `limits.store`: use a file with one of them, or with the service's `store` at the top level"
        ),
        "{error}"
    );
}

#[test]
fn no_error_quotes_the_settings() {
    for text in [
        "[store]\nurl = \"redis://limiter:hunter2@127.0.0.1:1/\n",
        "[store]\nurl = redis://limiter:hunter2@127.0.0.1:1/\n",
    ] {
        let (_dir, file) = file(text);
        let error = run("", &["limited", "--settings", &file]).unwrap_err();
        assert!(error.starts_with(&format!("{file}: line 2: ")), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
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
        limited.contains("\nann ") && limited.contains(" 0 of 3  in "),
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
        rows[1].starts_with("ann  ") && rows[1].contains(" api "),
        "{rows:?}"
    );
    assert!(
        rows[2].starts_with("ann (dry run) ") && rows[2].contains(" trial "),
        "{rows:?}"
    );
}

/// An operator's block reaches a running service, and its end also ends the strikes.
#[tokio::test]
async fn callers_are_blocked_and_unblocked() {
    let server = RedisServer::start();
    let service = Service::new(&server.url());
    let ann = Key::new("ann");
    let hour = Duration::from_secs(3_600);
    let limiter = Limiter::new(service.store.clone(), bucket("api", "1/h"));
    let limiter = limiter.block_after("3/h", hour).unwrap();
    let is_blocked = async || limiter.peek(ann, 0).await.unwrap().source() == Source::Blocked;

    let printed = service.inspect(&["block", "ann", "24h"]);
    let of_each = ["api", "api.v2", "daily"].map(|name| format!("blocked ann under `{name}`\n"));
    assert_eq!(printed, of_each.concat());
    until("the service has learned the block", is_blocked).await;
    let rest = limiter.peek(ann, 0).await.unwrap().retry_after().unwrap();
    assert!(rest > 23 * hour && rest <= 24 * hour, "{rest:?}");
    service.inspect(&["unblock", "ann"]);
    until("the service has learned the end", async || {
        !is_blocked().await
    })
    .await;

    for _ in 0..4 {
        let _ = limiter.take(ann, 1).await.unwrap();
    }
    until("the strikes block", is_blocked).await;
    // The strikes are no counts of their own.
    let rows = service.inspect(&["caller", "ann"]);
    assert_eq!(rows.lines().count(), 2, "{rows}");
    service.inspect(&["unblock", "ann"]);
    until("the service has learned the end", async || {
        !is_blocked().await
    })
    .await;
    let keys: Vec<String> = server.command("KEYS *~hit*").await;
    assert_eq!(keys, [""; 0]);
}

#[test]
fn blocks_need_a_policy_a_caller_and_a_time() {
    let url = "redis://127.0.0.1:1/";
    for (args, expected) in [
        (
            &["--url", url, "block", "ann", "1h"][..],
            "name it by --policy, or use --settings",
        ),
        (
            &[
                "--url", url, "--policy", "api 1/s", "block", "#684888", "1h",
            ],
            "name the caller",
        ),
        (
            &["--url", url, "block", "ann", "0s"],
            "a block of 0s is out of range",
        ),
        (
            &["--url", url, "block", "ann", "367d"],
            "use 1 second to 366 days",
        ),
        (
            &["--url", url, "block", "ann", "soon"],
            "it does not begin with a whole number",
        ),
    ] {
        let (_, _, error) = exit(args);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

/// Runs the program, and returns its exit code, output and error message.
fn exit(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ratelimit-inspect"));
    let output = command.env_remove("REDIS_URL").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

#[test]
fn wrong_usage_exits_with_2() {
    for (args, expected) in [
        (
            &["limited", "--polcy=api 1/s"][..],
            "a similar argument exists: '--policy'",
        ),
        (&["limitted"], "a similar subcommand exists: 'limited'"),
        (
            &["limited", "--url"],
            "a value is required for '--url <URL>'",
        ),
        (
            &["top", "--number=many"],
            "invalid value 'many' for '--number <N>'",
        ),
        (&["caller"], "<CALLER>"),
        (
            &["caller", "#12"],
            "\"#12\" is no caller: the log has six digits, such as #684888",
        ),
        (
            &["top", "--policy", "api 10"],
            "invalid value 'api 10' for '--policy <POLICY>': \"10\" is not a valid quota: ",
        ),
        (
            &["caller", "192.0.2.7"],
            "\"192.0.2.7\" is not a valid caller: ",
        ),
        (
            &["caller", "cookie: a"],
            "\"cookie\" is not a valid header to count by: ",
        ),
        (&[], "Usage: ratelimit-inspect"),
    ] {
        let (code, output, error) = exit(args);
        assert!(error.contains(expected), "{args:?}: {error}");
        assert_eq!((code, output.as_str()), (2, ""), "{args:?}");
    }
}

#[test]
fn failures_exit_with_1_and_name_the_fix() {
    let url = "redis://127.0.0.1:1/";
    for (args, expected) in [
        (
            &["limited"][..],
            "no server: set REDIS_URL, or use --url or --settings\n",
        ),
        (&["limited", "--settings=/none.toml"], "/none.toml: "),
        (
            &["limited", "--url", url],
            "the server 127.0.0.1:1 cannot be reached: check the URL",
        ),
    ] {
        let (code, output, error) = exit(args);
        assert!(error.starts_with(expected), "{args:?}: {error}");
        assert_eq!((code, output.as_str()), (1, ""), "{args:?}");
    }
}

#[test]
fn help_version_and_completions_are_printed() {
    for (args, expected) in [
        (
            &["--help"][..],
            "reset        Drops the counts of one caller",
        ),
        (&["limited", "--help"], "[env: REDIS_URL]"),
        (
            &["--version"],
            concat!("ratelimit-inspect ", env!("CARGO_PKG_VERSION"), "\n"),
        ),
        (&["completions", "bash"], "--settings"),
        (&["completions", "fish"], "limited"),
    ] {
        let (code, output, error) = exit(args);
        assert!(output.contains(expected), "{args:?}: {output}");
        assert_eq!((code, error.as_str()), (0, ""), "{args:?}");
    }
}
