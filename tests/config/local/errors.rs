//! Invalid settings: the error names the field, the value and the fix.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tower_redis_ratelimit::extract::ClientIp;
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::select::{Routes, Tiers};
use tower_redis_ratelimit::store::StoreConfig;
use tower_redis_ratelimit::{Policies, Policy, Strategy};

fn error<T: DeserializeOwned>(value: &Value) -> String {
    match serde_json::from_value::<T>(value.clone()) {
        Ok(_) => panic!("{value} is taken"),
        Err(error) => error.to_string(),
    }
}

const FIELDS: &str = "`kind`, `url`, `password_file`, `sentinel_password_file`, `root_certificates`, `client_certificate`, `client_key`, \
                      `server_name`, `address_map`, `prefix`, `connections`, `timeout`, `connect_timeout`, `client_name`, `queue`, `batch`, `partitions`, `denials`, `deadline`, `failures`, `share`, \
                      `local_keys`";

#[test]
fn of_a_store() {
    let unknown = format!("unknown field `conections`, expected one of {FIELDS}");
    for (value, text) in [
        (json!({ "conections": 2 }), unknown.as_str()),
        (
            json!({ "timeout": 250 }),
            "invalid type: integer `250`, expected a duration such as `250ms` as `timeout`",
        ),
        (
            json!({ "timeout": "250" }),
            "timeout: \"250\" is not a valid duration: the duration has no unit; use the form `250ms`, `2s` or `15m`",
        ),
        (
            json!({ "deadline": "1.5s" }),
            "deadline: \"1.5s\" is not a valid duration: the duration is not a whole number with one unit; \
             use the form `250ms`, `2s` or `15m`",
        ),
        (
            json!({ "connections": 0 }),
            "connections: \"0\" is not a valid number: use an integer >= 1",
        ),
        (
            json!({ "queue": -1 }),
            "queue: \"-1\" is not a valid number: use an integer >= 1",
        ),
        (
            json!({ "batch": "two" }),
            "batch: \"two\" is not a valid number: use an integer >= 1",
        ),
        (
            json!({ "local_keys": null }),
            "invalid type: null, expected an integer >= 1 as `local_keys`",
        ),
        (
            json!({ "partitions": true }),
            "invalid type: boolean `true`, expected an integer >= 1 as `partitions`",
        ),
        (
            json!({ "denials": 1.5 }),
            "invalid type: floating point `1.5`, expected an integer >= 0 as `denials`",
        ),
        (
            json!({ "failures": "4294967296" }),
            "failures: \"4294967296\" is not a valid number: use an integer from 1 to 4294967295",
        ),
        (
            json!({ "share": 0 }),
            "share: \"0\" is not a valid share: use a number of instances such as `4`, or `alive`",
        ),
        (
            json!({ "share": "all" }),
            "share: \"all\" is not a valid share: use a number of instances such as `4`, or `alive`",
        ),
        (
            json!({ "kind": "memory" }),
            "kind: \"memory\" is not a valid kind of store: use `auto`, `fallback`, `redis` or `local`",
        ),
        (
            json!({ "prefix": 1 }),
            "invalid type: integer `1`, expected text as `prefix`",
        ),
        (
            json!({ "url": ["hunter2"] }),
            "invalid type: sequence, expected text as `url`",
        ),
        (
            json!({ "address_map": "a:1" }),
            "address_map: \"a:1\" is not a valid pair of addresses: use the form `10.0.0.1:6379=127.0.0.1:7000`, and each \
             address once",
        ),
        (
            json!({ "address_map": "a:1=b:1, a:1=b:2" }),
            "address_map: \" a:1=b:2\" is not a valid pair of addresses: use the form `10.0.0.1:6379=127.0.0.1:7000`, and \
             each address once",
        ),
        (
            json!({ "address_map": ["a:1"] }),
            "invalid type: sequence, expected a table such as `{ \"10.0.0.1:6379\" = \"127.0.0.1:7000\" }` as `address_map`",
        ),
        (
            json!({ "client_key": 1 }),
            "invalid type: integer `1`, expected a path as `client_key`",
        ),
    ] {
        assert_eq!(error::<StoreConfig>(&value), text);
    }
    for (text, name) in [
        (r#"{ "batch": 1, "batch": 2 }"#, "batch"),
        (r#"{ "url": "a", "url": "a" }"#, "url"),
    ] {
        let error = serde_json::from_str::<StoreConfig>(text)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("duplicate field `{name}` at line 1")),
            "{error}"
        );
    }
}

#[test]
fn of_a_policy() {
    let names: String = Strategy::ALL
        .iter()
        .map(|strategy| format!("`{strategy}`, "))
        .collect();
    let misnamed = format!(
        "\"gcar\" is not a valid strategy: no strategy has this name (names are in lower case); use {names}or in a policy `in-flight`"
    );
    for (value, text) in [
        (json!({ "name": "api" }), "missing field `quota`"),
        (json!({ "quota": "10/s" }), "missing field `name`"),
        (
            json!({ "name": "api", "quota": "10/s", "burst": 5 }),
            "unknown field `burst`, expected one of `name`, `strategy`, `quota`, `leased`",
        ),
        (
            json!({ "name": "a b", "quota": "10/s" }),
            "\"a b\" is not a valid policy name: use 1 to 64 ASCII letters, digits, `-`, `_`, `.` or `/`",
        ),
        (
            json!({ "name": "api", "quota": 10 }),
            "invalid type: integer `10`, expected a quota such as `100/s burst 200`",
        ),
        (
            json!({ "name": "api", "quota": "10/60" }),
            "\"10/60\" is not a valid quota: the duration has no unit; use the form `100/s`, `10/60s` or `1000/h burst 50`",
        ),
        (
            json!({ "name": "api", "quota": "0/s" }),
            "invalid quota `0/s`: its limit must be at least 1",
        ),
        (
            json!({ "name": "api", "quota": "10/s", "strategy": "gcar" }),
            misnamed.as_str(),
        ),
        (
            json!({ "name": "api", "quota": "10/s", "strategy": "sliding-window(0 cells)" }),
            "a sliding window of 0 cells: use 1 to 1000 cells",
        ),
        (
            json!({ "name": "api", "quota": "5/s burst 6", "strategy": "fixed-window" }),
            "policy \"api\": a burst of 6 for a window of 5: remove the burst, which is always the limit, \
             or use a strategy with a burst, such as GCRA",
        ),
        (
            json!({ "name": "log", "quota": "100001/s", "strategy": "sliding-log" }),
            "policy \"log\": a limit of 100001 is too high for a sliding log, which stores every charge: use at most 100000, \
             or a sliding window",
        ),
        (
            json!({ "name": "plan", "quota": "10/month", "strategy": "gcra" }),
            "policy \"plan\": the quota `10/month` under gcra, which counts no calendar: use the strategy \
             `fixed-window(month)`, or a period such as `31d`",
        ),
        (
            json!({ "name": "plan", "quota": "10/month", "strategy": "fixed-window(month from 32)" }),
            "\"month from 32\" is not a valid calendar: a month starts on a day from 1 to 31, where 31 is the last day of \
             shorter ones; use the form `month`, `month from 15, +02:00` or `week from sunday, Europe/Berlin`",
        ),
    ] {
        assert_eq!(error::<Policy>(&value), text);
        assert_eq!(error::<Policies>(&value), text);
        assert_eq!(
            error::<Policies>(&json!([{ "name": "good", "quota": "1/s" }, value])),
            text
        );
    }
}

#[test]
fn of_a_list() {
    let policy = json!({ "name": "api", "quota": "5/s" });
    for (value, text) in [
        (
            json!([]),
            "the list of policies is empty: add at least one policy",
        ),
        (
            json!([policy, policy]),
            "two policies are named \"api\": use different names, since the name is part of the key",
        ),
        (
            json!("10/s"),
            "\"10/s\" is not a valid policy: use a policy such as `{ name = \"api\", quota = \"100/s\" }`, a list of policies, or \
             `blocked`",
        ),
        (
            json!(["10/s"]),
            "invalid type: string \"10/s\", expected a policy such as `{ name = \"api\", quota = \"100/s\" }`, or `blocked`",
        ),
    ] {
        assert_eq!(error::<Policies>(&value), text);
    }
}

#[test]
fn of_a_choice() {
    let text = "\"pass\" is not a valid answer to an error: use `reject` or `allow`";
    assert_eq!(error::<OnError>(&json!("pass")), text);
    let text = "\"Reject\" is not a valid answer to a missing key: use `reject` or `allow`";
    assert_eq!(error::<OnMissingKey>(&json!("Reject")), text);
}

#[test]
fn of_header_fields() {
    let forms = "`draft-11`, `github`, `x-seconds` or `draft-6`";
    let two =
        |first, second| format!("`{first}` and `{second}` exclude each other: use one of them");
    for (value, text) in [
        (
            json!(["draft-11", "gitlab"]),
            format!("\"gitlab\" is not a valid form of header fields: use {forms}"),
        ),
        (
            json!("draft-11; github"),
            format!("\"draft-11; github\" is not a valid form of header fields: use {forms}"),
        ),
        (json!(["github", "x-seconds"]), two("github", "x-seconds")),
        (json!("draft-6, github"), two("draft-6", "github")),
        (
            json!([6]),
            format!("invalid type: integer `6`, expected {forms}"),
        ),
        (
            json!(true),
            format!("invalid type: boolean `true`, expected a list, each {forms}"),
        ),
    ] {
        assert_eq!(error::<Headers>(&value), text);
    }
}

#[derive(Debug, Deserialize)]
struct File {
    #[serde(default)]
    #[allow(dead_code, reason = "it is only read from files that are wrong")]
    store: StoreConfig,
    #[serde(default)]
    #[allow(dead_code, reason = "it is only read from files that are wrong")]
    policies: Option<Policies>,
    #[serde(default)]
    #[allow(dead_code, reason = "it is only read from files that are wrong")]
    limits: Option<Tiers>,
}

/// A secret in the place of another setting, such as a URL that is not in a table.
#[test]
fn errors_show_no_secret() {
    let policy = || json!({ "name": "api", "quota": "10/s" });
    let refused = |pattern: &str| {
        // The brace makes each pattern wrong.
        let pattern = format!("{pattern}{{");
        let error = Routes::new(None::<Policies>).exempt(&pattern).unwrap_err();
        error.to_string().to_lowercase()
    };
    for secret in [
        "redis://user:hunter2@host/",
        "user:hunter2@host:6379",
        "secret:hunter2",
        "Secret: hunter2",
        "-----BEGIN PRIVATE KEY-----\nhunter2",
    ] {
        for text in [
            error::<StoreConfig>(&json!(secret)),
            error::<StoreConfig>(&json!({ secret: "exempt" })),
            error::<StoreConfig>(&json!({ "kind": secret })),
            error::<StoreConfig>(&json!({ "share": secret })),
            error::<Tiers>(&json!(secret)),
            error::<Tiers>(&json!({ "default": policy(), secret: "exempt" })),
            error::<Tiers>(&json!({ "default": policy(), "callers": secret })),
            error::<Tiers>(&json!({ "default": policy(), "tiers": secret })),
            error::<Tiers>(&json!({ "default": policy(), "callers": { "a": secret } })),
            error::<Tiers>(
                &json!({ "default": { "name": "api", "quota": "10/s", secret: "exempt" } }),
            ),
            error::<Policies>(&json!([secret])),
            error::<ClientIp>(&json!({ secret: 1 })),
            error::<ClientIp>(&json!({ "header": secret })),
            error::<ClientIp>(&json!({ "header": "x-forwarded-for", "trust": [secret] })),
            refused(secret),
            refused(&format!("/{secret}")),
            refused(&format!("get /{secret}")),
            refused(&format!("{secret} /users")),
        ] {
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
    let text = "invalid type: string \"redis:\u{2026}\", expected the settings of a store, such as `{ url = \"redis://127.0.0.1/\" }`";
    assert_eq!(error::<StoreConfig>(&json!("redis://:hunter2@host/")), text);
}

/// For formats with line numbers, the error names the line. It shows no other line, such as that of
/// the URL.
#[test]
fn errors_name_the_line() {
    let url = "url = \"redis://:hunter2@host/\"\n";
    for (text, line, column) in [
        (format!("[store]\n{url}timeout = \"250\"\n"), 3, 11),
        (format!("[store]\n{url}conections = 2\n"), 3, 1),
        (
            format!("[store]\n{url}[[policies]]\nname = \"api\"\nquota = \"5/M\"\n"),
            5,
            9,
        ),
        (
            format!("[store]\n{url}[policies]\nname = \"api\"\nquotas = \"5/m\"\n"),
            5,
            1,
        ),
        ("[limits]\nsecret = 1\n".to_owned(), 2, 1),
    ] {
        let error = toml::from_str::<File>(&text).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!(
                "TOML parse error at line {line}, column {column}\n"
            )),
            "{error}"
        );
        assert!(!error.contains("hunter2"), "{error}");
    }
    let error = toml::from_str::<File>("[store]\ntimeout = 250\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("timeout: \"250\" is not a valid duration: the duration has no unit"),
        "{error}"
    );
    let error = yaml_serde::from_str::<File>(
        "policies:\n- { name: api, quota: 1/s }\n- { name: log, quota: 5/M }\n",
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("policies")
            && error.contains("\"5/M\" is not a valid quota")
            && error.contains("line 3"),
        "{error}"
    );
}
