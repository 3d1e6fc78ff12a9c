//! `examples/inspect.rs` as it runs: on a single server, behind sentinels, and in a cluster.

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

#[path = "../../tests/cluster/nodes.rs"]
mod cluster;
#[path = "../../tests/sentinel/nodes.rs"]
mod sentinel;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::env;
use std::env::consts::EXE_SUFFIX;
use std::process::Command;
use std::time::Duration;

use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, RedisStore, Strategy};

use crate::support::RedisServer;

const CALLERS: u32 = 60;

/// Returns the output of the example with these arguments, or its error message.
fn inspect(url: &str, args: &[&str]) -> Result<String, String> {
    let test = env::current_exe().unwrap();
    let example = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join(format!("examples/inspect{EXE_SUFFIX}"));
    let output = Command::new(example)
        .env("REDIS_URL", url)
        .args(args)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    println!("$ inspect {args:?}\n{}", text(output.stdout.clone()));
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    }
}

/// Creates counts under this URL, and inspects them.
async fn look(url: &str) {
    let url = &format!(
        "{url}{}prefix=shop",
        if url.contains('?') { '&' } else { '?' }
    );
    let store = RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let of = |text: &str, quota: &str| -> Policies {
        Policy::new(text, Default::default(), quota.parse().unwrap())
            .unwrap()
            .into()
    };
    let log = Policy::new("api", Strategy::SlidingLog, "10/h".parse().unwrap()).unwrap();
    let (api, other) = (of("api", "100/h"), of("api.v2", "10/h"));
    for number in 0..CALLERS {
        let take = Check::take(Key::new(format!("user-{number}")), &api, number + 1);
        assert!(
            store
                .check(take.with_id(number.to_string()))
                .await
                .unwrap()
                .is_allowed()
        );
    }
    let takes = [
        Check::take(Key::secret("sk-1"), &api, 100),
        Check::take(Key::ip([192, 0, 2, 7].into()), &other, 1),
        Check::take(Key::GLOBAL, &log.into(), 1),
    ];
    for take in takes {
        assert!(store.check(take).await.unwrap().is_allowed());
    }

    let all = inspect(url, &[]).unwrap();
    let rows: Vec<Vec<&str>> = all
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0], ["policy", "strategy", "span", "callers"]);
    assert_eq!(rows[1], ["api", "gcra", "100/h", "61"]);
    assert_eq!(rows[2], ["api", "sliding-log", "1h", "1"]);
    assert!(
        all.lines()
            .nth(3)
            .unwrap()
            .contains("two counts under one name"),
        "{all}"
    );
    assert_eq!(rows[4], ["api.v2", "gcra", "10/h", "1"]);
    assert_eq!(rows.len(), 5);

    let top = inspect(url, &["api 100/h"]).unwrap();
    let lines: Vec<&str> = top.lines().collect();
    let secret = Key::secret("sk-1");
    assert_eq!(lines.len(), 20);
    assert_eq!(
        inspect(url, &["api sliding-log 10/h"])
            .unwrap()
            .lines()
            .count(),
        1
    );
    assert!(
        lines[0].starts_with(secret.reveal()) && lines[0].contains(" 0 of 100 left, denied for 3"),
        "{top}"
    );
    assert!(
        lines[1].starts_with("user-59 ") && lines[1].contains(" 40 of 100 left, passes"),
        "{top}"
    );
    assert!(
        lines[2].starts_with("user-58 ") && lines[2].contains(" 41 of 100 left"),
        "{top}"
    );

    for caller in ["secret:sk-1", secret.reveal()] {
        let one = inspect(url, &["api gcra 100/h", caller]).unwrap();
        assert!(
            one.contains(" 0 of 100 left, denied for 3") && !one.contains("sk-1"),
            "{one}"
        );
    }
    let reset = inspect(url, &["api 100/h", "secret:sk-1", "reset"]).unwrap();
    assert!(
        reset
            .lines()
            .last()
            .unwrap()
            .contains("100 of 100 left, passes, all back in 0.0 s"),
        "{reset}"
    );
    let address = inspect(url, &["api.v2 10/h", "ip:192.0.2.7"]).unwrap();
    assert!(
        address.starts_with("ip:192.0.2.7 ") && address.contains(" 9 of 10 left"),
        "{address}"
    );
    for args in [
        &["api.v2 fixed-window 10/h"][..],
        &["api.v2 fixed-window 10/h", "ip:192.0.2.7"],
    ] {
        let missing = inspect(url, args).unwrap();
        let expected = "nothing is counted as `api.v2 fixed-window`; there is `api gcra 100/h`, `api sliding-log 1h`, `api.v2 gcra 10/h`\n";
        assert_eq!(missing, expected);
    }
    let unused = inspect(url, &["api.v2 10/h", "ip:192.0.2.8"]).unwrap();
    assert!(unused.contains(" 10 of 10 left, passes"), "{unused}");
    let error = inspect(url, &["api sliding-window(10 cells) 10", "ann"]).unwrap_err();
    assert!(
        error.starts_with("\"10\" is not a valid quota: "),
        "{error}"
    );
    let error = inspect("http://127.0.0.1/", &[]).unwrap_err();
    assert!(
        error.starts_with("invalid store configuration: "),
        "{error}"
    );
}

#[tokio::test]
async fn a_single_server_is_inspected() {
    look(&RedisServer::start().url()).await;
}

#[tokio::test]
async fn a_cluster_is_inspected() {
    look(&cluster::Cluster::start(false).await.url()).await;
}

#[tokio::test]
async fn a_master_behind_sentinels_is_inspected() {
    let group = sentinel::Group::start().await;
    look(&group.url()).await;
}
