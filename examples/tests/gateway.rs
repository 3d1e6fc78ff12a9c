//! `examples/gateway.rs` as it runs: the commands that it prints, and changes of its file.
//!
//! Cargo builds examples before the tests of their package, unless only one test is built.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::env::consts::EXE_SUFFIX;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, fs, thread};

const FILE: &str = include_str!("../gateway.toml");

/// A gateway with a separate file, on a free port.
struct Gateway {
    process: Child,
    file: PathBuf,
    /// The curl commands that it prints.
    lines: Vec<String>,
    log: Arc<Mutex<String>>,
}

impl Gateway {
    fn start(name: &str) -> Self {
        let file = file(name);
        fs::write(&file, on_a_free_port(FILE)).unwrap();
        let mut process = command(&file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();

        let log = Arc::new(Mutex::new(String::new()));
        let (stderr, lines) = (process.stderr.take().unwrap(), Arc::clone(&log));
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                *lines.lock().unwrap() += &(line.unwrap() + "\n");
            }
        });
        let stdout = BufReader::new(process.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        let mut lines: Vec<String> = vec![];
        for line in stdout.filter(|line| line.starts_with("curl ")) {
            lines.push(line);
            if lines.last().unwrap().ends_with("/metrics") {
                break;
            }
        }
        assert!(
            !lines.is_empty(),
            "it does not start: {}",
            log.lock().unwrap()
        );
        Self {
            process,
            file,
            lines,
            log,
        }
    }

    fn address(&self) -> &str {
        self.lines[0]
            .split_once("127.0.0.1")
            .unwrap()
            .1
            .split_once('/')
            .map(|(port, _)| port)
            .unwrap()
    }

    /// Sends a request with these header lines.
    fn get(&self, path: &str, head: &[&str]) -> Answer {
        let mut stream = TcpStream::connect(format!("127.0.0.1{}", self.address())).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let head: String = head.iter().map(|line| format!("{line}\r\n")).collect();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n{head}\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        Answer(answer)
    }

    /// Sends the request of a curl command.
    fn curl(&self, line: &str) -> Answer {
        let command = line.split(" #").next().unwrap();
        let head: Vec<&str> = command.split('\'').skip(1).step_by(2).collect();
        let path = command.split_once(self.address()).unwrap().1.trim();
        self.get(path, &head)
    }

    fn alice(&self, path: &str) -> Answer {
        self.get(path, &["x-api-key: key-of-alice"])
    }

    /// Replaces the file like an editor.
    fn change(&self, text: &str) {
        let new = self.file.with_extension("new");
        fs::write(&new, on_a_free_port(text)).unwrap();
        fs::rename(new, &self.file).unwrap();
    }

    fn until_the_log_has(&self, text: &str) {
        until(&format!("{text} in the log"), || {
            self.log.lock().unwrap().contains(text)
        });
    }

    fn until_the_free_plan_is(&self, policy: &str) {
        until(policy, || {
            self.alice("/").field("ratelimit-policy") == Some(policy)
        });
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        if thread::panicking() {
            eprintln!("{}", self.log.lock().unwrap());
        }
    }
}

/// A response in full.
struct Answer(String);

impl Answer {
    fn status(&self) -> u16 {
        self.0[9..12].parse().unwrap()
    }

    fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self
            .0
            .lines()
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.split_once(": "));
        fields.find_map(|(field, value)| (field == name).then_some(value))
    }

    /// The value of the first policy in `RateLimit`.
    fn remaining(&self) -> u32 {
        let field = self.field("ratelimit").expect(&self.0);
        field
            .split_once("r=")
            .unwrap()
            .1
            .split_once(';')
            .unwrap()
            .0
            .parse()
            .unwrap()
    }
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.toml"))
}

fn on_a_free_port(text: &str) -> String {
    text.replace("127.0.0.1:3000", "127.0.0.1:0")
}

/// Starts the example with this file.
fn command(file: &PathBuf) -> Command {
    let test = env::current_exe().unwrap();
    let example = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join(format!("examples/gateway{EXE_SUFFIX}"));
    assert!(
        example.exists(),
        "it is not built: `cargo build --package examples --examples`"
    );
    let mut command = Command::new(example);
    command.arg(file).env("NO_COLOR", "1");
    command
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..1_500 {
        if condition() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("not within 30 s: {what}");
}

#[test]
fn printed_commands_work() {
    let gateway = Gateway::start("printed_commands_work");
    let free = "\"free\";q=30;w=60";
    let pro = "\"pro\";q=600;w=60, \"pro-daily\";q=100000;w=86400";
    let expected = [
        ("/ ", Some("\"anonymous\";q=10;w=60"), 9..=9),
        ("192.0.2.7", Some("\"anonymous\";q=10;w=60"), 9..=9),
        ("key-of-alice' 127", Some(free), 29..=29),
        // On a slow machine, a part of the quota has refilled.
        ("/report", Some(free), 19..=27),
        ("/usage", Some(free), 19..=30),
        ("key-of-bob", Some(pro), 99..=99),
        ("key-of-carol", Some("\"carol\";q=50;w=60"), 49..=49),
        ("key-of-monitor", None, 0..=0),
        ("192.0.2.66", None, 0..=0),
        ("/health", None, 0..=0),
        ("/metrics", None, 0..=0),
    ];
    assert_eq!(gateway.lines.len(), expected.len());
    for (line, (part, policy, remaining)) in gateway.lines.iter().zip(expected) {
        assert!(line.contains(part), "{line}");
        let answer = gateway.curl(line);
        let status = if part == "192.0.2.66" { 429 } else { 200 };
        assert_eq!(
            (answer.status(), answer.field("ratelimit-policy")),
            (status, policy),
            "{line}"
        );
        if part == "/health" {
            assert!(answer.0.ends_with("\r\n\r\nok\n"), "{}", answer.0);
        }
        match policy {
            Some(_) => assert!(
                remaining.contains(&answer.remaining()),
                "{line}: {}",
                answer.0
            ),
            None => assert_eq!(answer.field("ratelimit"), None, "{line}"),
        }
    }

    // It uses nothing, and is shown to a caller who has used everything.
    let carol = ["x-api-key: key-of-carol"];
    let usage = || gateway.get("/usage", &carol).0;
    assert!(
        usage().contains("\r\n\r\ncarol: 1 of 50 used, "),
        "{}",
        usage()
    );
    for _ in 0..5 {
        gateway.get("/report", &carol);
    }
    let used_up = usage();
    assert!(
        used_up.starts_with("HTTP/1.1 200 ") && used_up.contains("of 50 used"),
        "{used_up}"
    );
    let exempt = gateway.get("/usage", &["x-api-key: key-of-monitor"]).0;
    assert!(exempt.ends_with("\r\n\r\nno limit\n"), "{exempt}");

    let metrics = gateway.get("/metrics", &[]).0;
    for series in [
        r#"policy="anonymous",outcome="allowed",source="local",dry_run="false"} 2"#,
        r#"policy="pro",outcome="allowed",source="local",dry_run="false"} 1"#,
        r#"policy="blocked",outcome="exceeds_capacity",source="blocked",dry_run="false"} 1"#,
        r#"ratelimit_check_seconds_bucket{store="default",le="1"} "#,
    ] {
        assert!(metrics.contains(series), "{series} is missing in {metrics}");
    }
}

#[test]
fn reloads_valid_files_and_rejects_invalid_ones() {
    const CAROL: &str = "carol = { name = \"carol\", quota = \"50/min\" }";
    let gateway = Gateway::start("a_change_of_the_file");
    assert_eq!(
        gateway.alice("/").field("ratelimit-policy"),
        Some("\"free\";q=30;w=60")
    );
    let with = |quota: &str| FILE.replace("30/min", quota);

    gateway.change(&with("3000/h"));
    gateway.until_the_free_plan_is("\"free\";q=3000;w=3600");

    for (text, problems) in [
        (with("5/M"), ["line 19", "\"5/M\" is not a valid quota"]),
        (
            with("5/min").replace("carol = {", "carol = 5 #"),
            ["line 27", "`exempt`, `blocked`, a policy such as"],
        ),
        (
            with("5/min").replace("[trial]", "[trail]"),
            ["unknown field `trail`", "`trial`"],
        ),
        (
            with("5/min").replace(
                CAROL,
                "\"secret:sk-live-1\" = { name = \"a\", quota = \"6/M\" }",
            ),
            ["line 27", "\"6/M\" is not a valid quota"],
        ),
        (
            with("5/min").replace("key-of-bob = {", "key-of-bob = 7 #"),
            ["line 39", "invalid type: integer `7`"],
        ),
    ] {
        gateway.change(&text);
        problems
            .into_iter()
            .for_each(|problem| gateway.until_the_log_has(problem));
        assert_eq!(
            gateway.alice("/").field("ratelimit-policy"),
            Some("\"free\";q=3000;w=3600"),
            "{problems:?}"
        );
    }
    let log = gateway.log.lock().unwrap().clone();
    assert!(
        !log.contains("sk-live") && !log.contains("key-of-"),
        "it shows a key: {log}"
    );
    fs::remove_file(&gateway.file).unwrap();
    gateway.until_the_log_has("No such file");
    assert_eq!(
        gateway.alice("/").field("ratelimit-policy"),
        Some("\"free\";q=3000;w=3600")
    );

    gateway.change(&with("7/h").replace("10/min", "2/h"));
    gateway.until_the_free_plan_is("\"free\";q=7;w=3600");
    until("a denial", || gateway.alice("/").status() == 429);
    let denied = gateway.alice("/");
    assert!(denied.field("retry-after").is_some(), "{}", denied.0);
    assert_eq!(
        denied.field("content-type"),
        Some("application/problem+json")
    );
    gateway.until_the_log_has("policy=\"free\" caller=\"alice\" denied=1 dry_run=false");

    // The part to the left of the proxy's entry comes from the client, and must not bypass the limit.
    let statuses = ["192.0.2.9", "1.1.1.1, 192.0.2.9", "\"2.2.2.2, 192.0.2.9"].map(|addresses| {
        gateway
            .get(
                "/",
                &[
                    &format!("x-forwarded-for: {addresses}"),
                    "x-api-key: guessed",
                ],
            )
            .status()
    });
    assert_eq!(statuses, [200, 200, 429]);
}

#[test]
fn an_invalid_file_is_reported_at_startup() {
    let file = file("a_wrong_file");
    fs::write(
        &file,
        on_a_free_port(&FILE.replace("[\"loopback\"]", "[\"0.0.0.0/0\"]")),
    )
    .unwrap();
    let output = command(&file).output().unwrap();
    let problem = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{problem}");
    let file = file.display().to_string();
    for part in [
        &*file,
        "line 7",
        "\"0.0.0.0/0\" cannot be trusted",
        "write the proxies' network like",
    ] {
        assert!(problem.contains(part), "{part}: {problem}");
    }
}
