//! Reading settings from every format.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use config::{Config, Environment};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tower_redis_ratelimit::extract::ClientIp;
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::store::{ShareConfig, StoreConfig, StoreKind};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Policies, Policy, Quota, Strategy};

/// The settings of an example service.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Service {
    store: StoreConfig,
    policies: Policies,
    #[serde(default)]
    on_error: OnError,
    #[serde(default)]
    on_missing_key: OnMissingKey,
}

fn expected() -> Service {
    let mut store = StoreConfig::default();
    store.kind = StoreKind::Fallback;
    store.url = Some("redis://:hunter2@10.0.0.7/".to_owned());
    store.password_file = Some("/run/secrets/redis".into());
    store.root_certificates = Some("/etc/shop/ca.pem".into());
    store.client_certificate = Some("/etc/shop/client.pem".into());
    store.client_key = Some("/etc/shop/client.key".into());
    store.server_name = Some("redis.internal".to_owned());
    store.address_map = [("10.0.0.8:6379".to_owned(), "10.0.0.7:7000".to_owned())].into();
    store.client_name = Some("shop-api".to_owned());
    store.prefix = "shop".to_owned();
    store.connections = NonZeroUsize::new(4).unwrap();
    store.timeout = Duration::from_secs(2);
    store.queue = NonZeroUsize::new(50_000).unwrap();
    store.batch = NonZeroUsize::new(64).unwrap();
    store.partitions = NonZeroUsize::new(256).unwrap();
    store.denials = 0;
    store.deadline = Some(Duration::from_millis(50));
    store.failures = NonZeroU32::new(5).unwrap();
    store.share = ShareConfig::Fixed(NonZeroU32::new(3).unwrap());
    store.local_keys = NonZeroUsize::new(1_000_000).unwrap();
    let midnight = Align::Clock {
        offset: Duration::from_secs(22 * 3_600),
    };
    let policies = Policies::new([
        Policy::new("burst", Strategy::Gcra, Quota::per_second(100).burst(200)).unwrap(),
        Policy::new(
            "daily",
            Strategy::FixedWindow(midnight),
            Quota::per_day(10_000),
        )
        .unwrap(),
    ]);
    Service {
        store,
        policies: policies.unwrap(),
        on_error: OnError::Allow,
        on_missing_key: OnMissingKey::Reject,
    }
}

#[test]
fn toml() {
    let text = r#"
        on_error = "allow"

        [store]
        kind = "fallback"
        url = "redis://:hunter2@10.0.0.7/"
        password_file = "/run/secrets/redis"
        root_certificates = "/etc/shop/ca.pem"
        client_certificate = "/etc/shop/client.pem"
        client_key = "/etc/shop/client.key"
        server_name = "redis.internal"
        address_map = { "10.0.0.8:6379" = "10.0.0.7:7000" }
        client_name = "shop-api"
        prefix = "shop"
        connections = 4
        timeout = "2s"
        queue = 50_000
        batch = 64
        partitions = 256
        denials = 0
        deadline = "50ms"
        failures = 5
        share = 3
        local_keys = 1_000_000

        [[policies]]
        name = "burst"
        quota = "100/s burst 200"

        [[policies]]
        name = "daily"
        strategy = "fixed-window(clock+22h)"
        quota = "10000 per day"
    "#;
    assert_eq!(toml::from_str::<Service>(text).unwrap(), expected());
}

/// Numbers may be text, as in environment variables.
#[test]
fn yaml() {
    let text = r#"
        on_error: allow
        on_missing_key: reject
        store:
          kind: fallback
          url: redis://:hunter2@10.0.0.7/
          password_file: /run/secrets/redis
          root_certificates: /etc/shop/ca.pem
          client_certificate: /etc/shop/client.pem
          client_key: /etc/shop/client.key
          server_name: redis.internal
          address_map: { "10.0.0.8:6379": "10.0.0.7:7000" }
          client_name: shop-api
          prefix: shop
          connections: "4"
          timeout: 2s
          queue: "50000"
          batch: "64"
          partitions: "256"
          denials: "0"
          deadline: 50 ms
          failures: "5"
          share: "3"
          local_keys: "1000000"
        policies:
          - name: burst
            quota: 100/s burst 200
          - { name: daily, strategy: fixed-window(clock + 22h), quota: 10000/d }
    "#;
    assert_eq!(yaml_serde::from_str::<Service>(text).unwrap(), expected());
}

#[test]
fn json() {
    let text = r#"{
        "on_error": "allow",
        "store": {
            "kind": "fallback", "url": "redis://:hunter2@10.0.0.7/", "prefix": "shop", "connections": 4, "timeout": "2s",
            "queue": 50000, "batch": 64, "partitions": 256, "denials": 0, "deadline": "50ms", "failures": 5, "share": 3,
            "local_keys": 1000000, "root_certificates": "/etc/shop/ca.pem", "client_certificate": "/etc/shop/client.pem",
            "client_key": "/etc/shop/client.key", "server_name": "redis.internal", "password_file": "/run/secrets/redis",
            "client_name": "shop-api", "address_map": { "10.0.0.8:6379": "10.0.0.7:7000" }
        },
        "policies": [
            { "name": "burst", "strategy": "gcra", "quota": "100/s burst 200" },
            { "name": "daily", "strategy": "fixed-window(clock+22h)", "quota": "10000/day" }
        ]
    }"#;
    assert_eq!(serde_json::from_str::<Service>(text).unwrap(), expected());
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    assert_eq!(
        serde_json::from_value::<Service>(value).unwrap(),
        expected()
    );
}

/// Reads settings from environment variables.
fn environment<T: DeserializeOwned>(
    variables: &[(&str, &str)],
    numbers: bool,
) -> Result<T, config::ConfigError> {
    let variables: HashMap<String, String> = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let source = Environment::with_prefix("APP")
        .prefix_separator("_")
        .separator("__")
        .try_parsing(numbers);
    Config::builder()
        .add_source(source.source(Some(variables)))
        .build()?
        .try_deserialize()
}

#[test]
fn environment_variables() {
    let variables = [
        ("APP_ON_ERROR", "allow"),
        ("APP_STORE__KIND", "fallback"),
        ("APP_STORE__URL", "redis://:hunter2@10.0.0.7/"),
        ("APP_STORE__PASSWORD_FILE", "/run/secrets/redis"),
        ("APP_STORE__ROOT_CERTIFICATES", "/etc/shop/ca.pem"),
        ("APP_STORE__CLIENT_CERTIFICATE", "/etc/shop/client.pem"),
        ("APP_STORE__CLIENT_KEY", "/etc/shop/client.key"),
        ("APP_STORE__SERVER_NAME", "redis.internal"),
        ("APP_STORE__ADDRESS_MAP", "10.0.0.8:6379 = 10.0.0.7:7000"),
        ("APP_STORE__CLIENT_NAME", "shop-api"),
        ("APP_STORE__PREFIX", "shop"),
        ("APP_STORE__CONNECTIONS", "4"),
        ("APP_STORE__TIMEOUT", "2s"),
        ("APP_STORE__QUEUE", "50000"),
        ("APP_STORE__BATCH", "64"),
        ("APP_STORE__PARTITIONS", "256"),
        ("APP_STORE__DENIALS", "0"),
        ("APP_STORE__DEADLINE", "50ms"),
        ("APP_STORE__FAILURES", "5"),
        ("APP_STORE__SHARE", "3"),
        ("APP_STORE__LOCAL_KEYS", "1000000"),
        ("APP_POLICIES__NAME", "api"),
        ("APP_POLICIES__STRATEGY", "sliding-window(60 cells)"),
        ("APP_POLICIES__QUOTA", "5 per 15m"),
    ];
    let sliding = Strategy::SlidingWindow { cells: 60 };
    let policy = Policy::new("api", sliding, Quota::per(5, Duration::from_secs(900))).unwrap();
    for numbers in [false, true] {
        let service: Service = environment(&variables, numbers).unwrap();
        assert_eq!(
            service,
            Service {
                policies: policy.clone().into(),
                ..expected()
            }
        );
    }
}

/// Environment variables may contain lists and tables.
#[test]
fn environment_variables_of_a_layer() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct Layer {
        client_ip: ClientIp,
        headers: Headers,
    }
    let trust = ["private", "203.0.113.0/24"];
    let client_ip = ClientIp::x_forwarded_for()
        .trust(trust)
        .unwrap()
        .ipv6_prefix(56)
        .unwrap();
    let variables = [
        ("APP_CLIENT_IP__HEADER", "x-forwarded-for"),
        ("APP_CLIENT_IP__TRUST", "private, 203.0.113.0/24"),
        ("APP_CLIENT_IP__IPV6_PREFIX", "56"),
        ("APP_HEADERS", "draft-11, github"),
    ];
    for numbers in [false, true] {
        let layer: Layer = environment(&variables, numbers).unwrap();
        assert_eq!(
            layer,
            Layer {
                client_ip: client_ip.clone(),
                headers: Headers::DRAFT_11.and(Headers::GITHUB)
            }
        );
    }
    let layer: Layer =
        environment(&[("APP_CLIENT_IP", "peer"), ("APP_HEADERS", "")], false).unwrap();
    assert_eq!(
        layer,
        Layer {
            client_ip: ClientIp::peer(),
            headers: Headers::NONE
        }
    );
}

#[test]
fn a_wrong_variable_is_named() {
    for (variable, value, texts) in [
        (
            "APP_STORE__TIMEOUT",
            "250",
            [
                "timeout: \"250\" is not a valid duration",
                "use the form `250ms`",
            ],
        ),
        (
            "APP_STORE__CONECTIONS",
            "2",
            ["unknown field `conections`", "expected one of `kind`"],
        ),
        (
            "APP_POLICIES__QUOTA",
            "10/60",
            ["\"10/60\" is not a valid quota", "use the form `100/s`"],
        ),
        (
            "APP_POLICIES__BURST",
            "5",
            ["unknown field `burst`", "expected one of `name`"],
        ),
    ] {
        // Of two variables with one name, the last one counts. Variables have no order, so only one
        // may be wrong.
        let variables = [
            ("APP_STORE__KIND", "local"),
            ("APP_POLICIES__NAME", "api"),
            ("APP_POLICIES__QUOTA", "10/min"),
            (variable, value),
        ];
        let error = environment::<Service>(&variables, false)
            .unwrap_err()
            .to_string();
        assert!(
            texts.iter().all(|text| error.contains(text)),
            "{variable}: {error}"
        );
    }
}

#[test]
fn omitted_settings_have_defaults() {
    assert_eq!(
        toml::from_str::<StoreConfig>("").unwrap(),
        StoreConfig::default()
    );
    assert_eq!(
        serde_json::from_str::<StoreConfig>(r#"{ "url": null }"#).unwrap(),
        StoreConfig::default()
    );
    let policy: Policy = toml::from_str(
        r#"name = "api"
        quota = "10/s""#,
    )
    .unwrap();
    assert_eq!(policy.strategy(), Some(Strategy::Gcra));
}

/// A quota per month or year has its calendar, and any other one GCRA.
#[test]
fn an_omitted_strategy_depends_on_the_quota() {
    for (quota, strategy) in [
        ("10000/month", "fixed-window(month)"),
        ("10000/year", "fixed-window(year)"),
        ("10000/week", "gcra"),
        ("10000/30d", "gcra"),
    ] {
        let text = format!(r#"{{ "name": "plan", "quota": "{quota}" }}"#);
        let expected = Policy::new("plan", strategy.parse().unwrap(), quota).unwrap();
        assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), expected);
        let variables = [("APP_NAME", "plan"), ("APP_QUOTA", quota)];
        assert_eq!(environment::<Policy>(&variables, false).unwrap(), expected);
    }
    let variables = [
        ("APP_NAME", "plan"),
        ("APP_STRATEGY", "fixed-window(month from 15, +02:00)"),
        ("APP_QUOTA", "10/month"),
    ];
    let policy: Policy = environment(&variables, false).unwrap();
    assert_eq!(
        policy.strategy().unwrap().to_string(),
        "fixed-window(month from 15, +02:00)"
    );
}

#[test]
fn a_policy_alone_is_a_list() {
    #[derive(Deserialize)]
    struct File {
        policies: Policies,
    }
    let api: Policies = Policy::new("api", Strategy::Gcra, Quota::per_minute(10))
        .unwrap()
        .into();
    let file: File = toml::from_str(r#"policies = { name = "api", quota = "10/min" }"#).unwrap();
    assert_eq!(file.policies, api);
    let file: File = yaml_serde::from_str("policies: { name: api, quota: 10/min }").unwrap();
    assert_eq!(file.policies, api);
    let file: File = environment(
        &[
            ("APP_POLICIES__NAME", "api"),
            ("APP_POLICIES__QUOTA", "10/min"),
        ],
        false,
    )
    .unwrap();
    assert_eq!(file.policies, api);
}

#[test]
fn the_share_may_be_alive() {
    for share in ["alive", " alive "] {
        let store: StoreConfig =
            serde_json::from_value(serde_json::json!({ "share": share })).unwrap();
        assert_eq!(store.share, ShareConfig::Alive);
    }
}

/// A format that does not know the field names in advance.
#[test]
fn a_policy_may_be_flattened() {
    #[derive(Deserialize)]
    struct Route {
        path: String,
        #[serde(flatten)]
        policy: Policy,
    }
    let route: Route = toml::from_str(
        r#"path = "/search"
        name = "search"
        quota = "5/s""#,
    )
    .unwrap();
    assert_eq!(
        (route.path.as_str(), route.policy.name()),
        ("/search", "search")
    );
}

/// Each flattened table reads its own names.
#[test]
fn settings_may_be_flattened_beside_others() {
    #[derive(Deserialize)]
    struct Log {
        level: String,
    }
    #[derive(Deserialize)]
    struct App {
        #[serde(flatten)]
        store: StoreConfig,
        #[serde(flatten)]
        policy: Policy,
        #[serde(flatten)]
        log: Log,
        #[serde(flatten)]
        rest: HashMap<String, u16>,
    }
    let text = r#"{ "url": "redis://10.0.0.7/", "name": "api", "quota": "5/s", "level": "info", "port": 80 }"#;
    let app: App = serde_json::from_str(text).unwrap();
    assert_eq!(app.store.url.as_deref(), Some("redis://10.0.0.7/"));
    assert_eq!((app.policy.name(), app.log.level.as_str()), ("api", "info"));
    assert_eq!(app.rest, HashMap::from([("port".to_owned(), 80)]));
}
