//! Compares the names in `examples/ops` with the exported metrics and labels. All of them must be shown, and each alert
//! needs a section in `docs/runbook.md`. `cargo xtask ops` checks that Prometheus can read the files.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde::Deserialize;
use serde_json::Value;
use tower_redis_ratelimit::check::{Check, Source, Verdict};
use tower_redis_ratelimit::extract::{ClientIp, MissingKey};
use tower_redis_ratelimit::observe::{Event, MetricsObserver, Observer, UncountedReason};
use tower_redis_ratelimit::select::Tiers;
use tower_redis_ratelimit::store::{ErrorKind, ShareConfig, StoreConfig, StoreError};
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, Strategy};

const ALERTS: &str = include_str!("../ops/alerts.yml");
const ALERT_TESTS: &str = include_str!("../ops/alerts.test.yml");
const DASHBOARD: &str = include_str!("../ops/dashboard.json");
const OBSERVER: &str = include_str!("../../src/observe/metrics.rs");
const RUNBOOK: &str = include_str!("../../docs/runbook.md");

/// The values of labels, by name.
type Labels = BTreeMap<String, BTreeSet<String>>;

/// Labels with a small, fixed set of values.
const CLOSED: [&str; 6] = ["outcome", "source", "dry_run", "kind", "code", "reason"];

/// Produces every event, with all label values that rules may use.
fn notify(observer: &impl Observer) {
    let policies = Policy::new("api", Strategy::Gcra, Quota::per_hour(1))
        .unwrap()
        .into();
    let check = Check::take(Key::new("ann"), &policies, 1);
    for source in [Source::Redis, Source::Cached, Source::Local] {
        for verdict in [
            Verdict::allowed(),
            Verdict::denied(Duration::from_secs(1)),
            Verdict::exceeds_capacity(),
        ] {
            let decision = check.decided(source, 1, |_| verdict);
            for dry_run in [false, true] {
                let elapsed = Duration::from_millis(1);
                observer.notify(&Event::decided(check.key(), &decision, elapsed, dry_run));
            }
        }
    }
    for kind in [ErrorKind::Timeout, ErrorKind::Unreachable] {
        observer.notify(&Event::failed(None, &StoreError::new(kind), false));
    }
    let problem = MissingKey::new("no API key");
    for reason in [UncountedReason::NoKey(&problem), UncountedReason::Skipped] {
        for allowed in [true, false] {
            observer.notify(&Event::uncounted(reason, allowed));
        }
    }
    for code in ["no-extension", "not-leased"] {
        let problem = format!("no address (see #{code})");
        observer.notify(&Event::misconfigured(&problem));
    }
    observer.notify(&Event::recovered(Duration::from_secs(3), 0, 0, 0, 0));
    observer.notify(&Event::leased_block_ended(64, 3, 2, 0));
    observer.notify(&Event::sent(128, 5));
}

/// The series that Prometheus gets, by name and labels. As in the recipe, times have buckets.
fn exported() -> BTreeMap<String, Labels> {
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &[0.1])
        .unwrap();
    let recorder = builder.build_recorder();
    metrics::with_local_recorder(&recorder, || notify(&MetricsObserver::new()));
    let mut exported = BTreeMap::<String, Labels>::new();
    for line in recorder.handle().render().lines() {
        for (name, labels) in named(line) {
            let known = exported.entry(name).or_default();
            // Prometheus adds this label.
            known.entry("job".into()).or_default();
            known.entry("instance".into()).or_default();
            for (label, value) in labels {
                known.entry(label).or_default().insert(value);
            }
        }
    }
    exported
}

/// The metrics named in a text, each with the labels in the braces after it.
fn named(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let names = text
        .match_indices("ratelimit_")
        .filter(|(at, _)| !text[..*at].ends_with(is_name));
    let of_name = |(at, _)| {
        let rest: &str = &text[at..];
        let (name, rest) = rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()));
        let braces = rest
            .strip_prefix('{')
            .and_then(|rest| rest.split_once('}'))
            .map(|(braces, _)| braces);
        let matchers = braces
            .unwrap_or_default()
            .split(',')
            .filter(|matcher| !matcher.is_empty());
        let of_matcher = |matcher: &str| {
            let (label, value) = matcher
                .split_once('=')
                .unwrap_or_else(|| panic!("{matcher} of {name}"));
            (
                label.trim_end_matches('!').to_owned(),
                value.trim_matches(['~', '"']).to_owned(),
            )
        };
        (name.to_owned(), matchers.map(of_matcher).collect())
    };
    names.map(of_name).collect()
}

/// The labels that a text groups by.
fn grouped(text: &str) -> BTreeSet<&str> {
    let lists = ["by (", "on (", "label_values("]
        .iter()
        .flat_map(|start| text.split(start).skip(1));
    let labels = lists
        .filter_map(|rest| rest.split(')').next())
        .flat_map(|list| list.split(", "));
    labels
        .filter(|label| !label.starts_with("ratelimit_"))
        .collect()
}

/// All texts in the directory.
fn strings<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => found.push(text),
        Value::Array(values) => values.iter().for_each(|value| strings(value, found)),
        Value::Object(fields) => fields.values().for_each(|value| strings(value, found)),
        _ => {}
    }
}

/// The metric of a series.
fn metric(series: &str) -> &str {
    ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|suffix| series.strip_suffix(suffix))
        .unwrap_or(series)
}

#[test]
fn rules_and_dashboard_name_what_is_exported() {
    let exported = exported();
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut texts = vec![ALERTS, ALERT_TESTS];
    strings(&dashboard, &mut texts);

    let known: BTreeSet<&str> = exported
        .values()
        .flat_map(BTreeMap::keys)
        .map(String::as_str)
        .collect();
    for text in &texts {
        for (name, labels) in named(text) {
            let series = exported
                .get(&name)
                .unwrap_or_else(|| panic!("{name} is not exported"));
            for (label, asked) in labels {
                let values = series
                    .get(&label)
                    .unwrap_or_else(|| panic!("{name} has no label {label}"));
                // A template of an alert fills in `%q`.
                let mut asked = asked
                    .split('|')
                    .filter(|asked| CLOSED.contains(&label.as_str()) && *asked != "%q");
                let unknown = asked.find(|asked| !values.contains(*asked));
                assert_eq!(unknown, None, "of the label {label} of {name}");
            }
        }
        let unknown = grouped(text)
            .into_iter()
            .find(|label| !known.contains(label));
        assert_eq!(unknown, None, "in {text}");
    }

    // This test exports every name of the crate, and every exported name is shown.
    let names = |text: &str| -> BTreeSet<String> {
        named(text).into_iter().map(|(name, _)| name).collect()
    };
    let exported: BTreeSet<&str> = exported.keys().map(|series| metric(series)).collect();
    let shown: BTreeSet<String> = texts[2..].iter().flat_map(|text| names(text)).collect();
    assert_eq!(
        exported,
        names(OBSERVER).iter().map(String::as_str).collect()
    );
    assert_eq!(
        exported,
        shown.iter().map(|series| metric(series)).collect()
    );
}

#[test]
fn each_alert_has_a_paragraph_and_tests() {
    let after = |text: &'static str, start: &'static str| {
        text.lines()
            .filter_map(move |line| line.trim().strip_prefix(start))
    };
    let alerts: Vec<&str> = after(ALERTS, "- alert: ").collect();
    let paragraphs: Vec<&str> = after(RUNBOOK, "## ")
        .filter(|title| title.starts_with("RateLimit"))
        .collect();
    assert_eq!(alerts, paragraphs);

    let page = "https://docs.rs/tower-redis-ratelimit/latest/tower_redis_ratelimit/guide/runbook/index.html#";
    let links: Vec<&str> = after(ALERTS, "runbook_url: ").collect();
    assert_eq!(
        links,
        alerts
            .iter()
            .map(|alert| format!("{page}{}", alert.to_lowercase()))
            .collect::<Vec<_>>()
    );

    for alert in alerts {
        assert!(
            ALERT_TESTS.contains(&format!("- alertname: {alert}\n")),
            "no test fires {alert}"
        );
        assert!(
            ALERT_TESTS.contains(&format!("- {{ alertname: {alert}, ")),
            "no test keeps {alert} silent"
        );
    }
}

/// The text of a file in `examples/ops`.
fn ops(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ops").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn containers_mount_files_that_exist() {
    let compose = ops("compose.yml");
    let mounts = compose
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- ./")?.split(':').next());
    let mounts: Vec<&str> = mounts.collect();
    assert_eq!(mounts.len(), 6, "{mounts:?}");
    mounts.into_iter().for_each(|file| drop(ops(file)));
    drop(ops("../../examples/ops/compose/Dockerfile"));
}

/// The settings of `examples/gateway.rs`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "that they are valid is enough")]
struct Gateway {
    listen: SocketAddr,
    client_ip: ClientIp,
    store: StoreConfig,
    limits: Tiers,
    trial: Policies,
    users: toml::Table,
}

#[test]
fn settings_in_containers_are_valid() {
    let kubernetes = ops("kubernetes.yml");
    let (_, block) = kubernetes.split_once("gateway.toml: |\n").unwrap();
    let lines = block
        .lines()
        .map(|line| line.strip_prefix("    ").or(line.is_empty().then_some("")));
    let settings: Vec<&str> = lines.map_while(|line| line).collect();
    for text in [settings.join("\n"), ops("compose/gateway.toml")] {
        let settings: Gateway = toml::from_str(&text).unwrap();
        assert_eq!(settings.store.share, ShareConfig::Alive, "{text}");
    }
    // Changed limits apply while a gateway runs, and Kubernetes never replaces a file that is mounted by itself.
    assert!(kubernetes.contains("args: [/settings/gateway.toml]"));
    assert!(!kubernetes.contains("subPath:"));
}
