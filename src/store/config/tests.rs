use std::ffi::OsString;

use super::*;
use crate::store::any::{fallback, local, redis};
use crate::store::{AnyStore, RedisStore, RedisStoreBuilder};

const URL: &str = "redis://user:hunter2@127.0.0.1:6380/3";

/// Every setting differs from its default, except those for TLS and the password files.
fn other() -> StoreConfig {
    let number = |number| NonZeroUsize::new(number).unwrap();
    StoreConfig {
        kind: StoreKind::Fallback,
        url: Some(URL.to_owned()),
        password_file: None,
        sentinel_password_file: None,
        root_certificates: None,
        client_certificate: None,
        client_key: None,
        server_name: None,
        address_map: [("10.0.0.1:6379".to_owned(), "[::1]:7000".to_owned())].into(),
        prefix: "shop".to_owned(),
        connections: number(3),
        timeout: Duration::from_millis(500),
        connect_timeout: Some(Duration::from_secs(3)),
        client_name: Some("shop-api".to_owned()),
        queue: number(4),
        batch: number(5),
        partitions: number(10),
        denials: 6,
        deadline: Some(Duration::from_millis(50)),
        failures: NonZeroU32::new(7).unwrap(),
        share: ShareConfig::Fixed(NonZeroU32::new(8).unwrap()),
        local_keys: number(9_000),
    }
}

fn builder() -> RedisStoreBuilder {
    RedisStore::builder(URL)
}

/// Returns the settings in the `Debug` text of a fallback, which follow the stores' settings.
fn settings(store: &Fallback<RedisStore, LocalStore>) -> String {
    let text = format!("{store:#?}");
    text.rsplit_once("settings: ").unwrap().1.to_owned()
}

/// Returns the names of the fields of the struct at the start of this `Debug` text.
fn fields(text: &str) -> Vec<&str> {
    let mut lines = text.lines().skip(1);
    let first = lines.clone().next().unwrap();
    let indent = first.len() - first.trim_start().len();
    lines
        .by_ref()
        .map_while(|line| {
            line.split_at_checked(indent)
                .filter(|(spaces, _)| spaces.trim().is_empty())
        })
        .filter_map(|(_, line)| line.split_once(": ").map(|(name, _)| name))
        .filter(|name| !name.starts_with(' '))
        .collect()
}

#[test]
fn defaults_are_those_of_the_stores() {
    let config = StoreConfig::default();
    assert_eq!(
        format!("{:?}", redis(&config, URL).unwrap()),
        format!("{:?}", builder())
    );
    let store = || builder().connect_lazy().unwrap();
    let expected = Fallback::new(store(), LocalStore::default());
    assert_eq!(
        settings(&fallback(&config, store()).unwrap()),
        settings(&expected)
    );
    assert_eq!(config.local_keys, LocalStore::DEFAULT_KEYS);
}

#[test]
fn every_setting_reaches_its_store() {
    let config = other();
    let expected = builder()
        .prefix("shop")
        .connections(config.connections)
        .timeout(Duration::from_millis(500))
        .connect_timeout(Duration::from_secs(3))
        .client_name("shop-api")
        .address_map(|_, _| None)
        .queue(config.queue)
        .batch(config.batch)
        .partitions(config.partitions)
        .denials(6);
    assert_eq!(
        format!("{:?}", redis(&config, URL).unwrap()),
        format!("{expected:?}")
    );
    let store = || builder().connect_lazy().unwrap();
    let expected = Fallback::builder(store(), LocalStore::default())
        .deadline(Duration::from_millis(50))
        .unwrap()
        .failures(config.failures)
        .share(8)
        .build();
    assert_eq!(
        settings(&fallback(&config, store()).unwrap()),
        settings(&expected)
    );
}

/// Fails if a builder gains a setting that `StoreConfig` lacks.
#[test]
fn the_stores_have_no_other_settings() {
    let text = format!("{:#?}", builder());
    // `tests/tls` covers `tls`, whose settings are files, and `tests/topology` the map of `addresses`. `StoreConfig` declares the fields of
    // `settings`.
    assert_eq!(
        fields(&text),
        ["servers", "tls", "addresses", "settings", "observer", "now"]
    );
    let fallback = Fallback::new(builder().connect_lazy().unwrap(), LocalStore::default());
    assert_eq!(
        fields(&settings(&fallback)),
        ["deadline", "failures", "share", "observer"]
    );
}

#[tokio::test]
async fn the_local_store_has_its_capacity() {
    use crate::limit::{Check, Key, Policies, Policy, Quota, Strategy};
    use crate::store::Store;
    let policies: Policies = Policy::new("api", Strategy::Gcra, Quota::per_day(1))
        .unwrap()
        .into();
    let config = StoreConfig {
        local_keys: NonZeroUsize::new(50).unwrap(),
        ..StoreConfig::default()
    };
    let AnyStore::Local(store) = AnyStore::from_config(&config).unwrap() else {
        panic!("no URL, but not local")
    };
    for caller in 0..500 {
        let _ = store
            .check(Check::take(Key::new(caller.to_string()), &policies, 1))
            .await
            .unwrap();
    }
    assert_eq!(store.len(), 50);
    let config = StoreConfig {
        url: Some(URL.to_owned()),
        ..config
    };
    let AnyStore::Fallback(store) = AnyStore::from_config(&config).unwrap() else {
        panic!("a URL, but no fallback")
    };
    assert!(
        format!("{store:?}").contains("fallback: LocalStore"),
        "{store:?}"
    );
    assert_eq!(
        format!("{:?}", local(&config)),
        "LocalStore { keys: 0, .. }"
    );
}

#[test]
fn kind_and_url_choose_the_store() {
    let store = |kind, url: Option<&str>| {
        AnyStore::from_config(&StoreConfig {
            kind,
            url: url.map(str::to_owned),
            ..StoreConfig::default()
        })
    };
    for (kind, url) in [
        (StoreKind::Auto, None),
        (StoreKind::Local, None),
        (StoreKind::Local, Some(URL)),
    ] {
        assert!(
            matches!(store(kind, url), Ok(AnyStore::Local(_))),
            "{kind} {url:?}"
        );
    }
    for kind in [StoreKind::Auto, StoreKind::Fallback] {
        assert!(
            matches!(store(kind, Some(URL)), Ok(AnyStore::Fallback(_))),
            "{kind}"
        );
    }
    assert!(matches!(
        store(StoreKind::Redis, Some(URL)),
        Ok(AnyStore::Redis(_))
    ));
    for kind in [StoreKind::Redis, StoreKind::Fallback] {
        assert_eq!(
            store(kind, None).unwrap_err().to_string(),
            format!(
                "invalid store configuration: the Redis URL cannot be used: it is missing, and a store of the \
                 kind `{kind}` needs it; write it like `redis://:password@host:6379/0`"
            )
        );
    }
}

#[test]
fn impossible_settings_are_refused() {
    let refused = |config: StoreConfig| AnyStore::from_config(&config).unwrap_err();
    let zero = refused(StoreConfig {
        timeout: Duration::ZERO,
        ..other()
    });
    assert!(
        zero.to_string().contains("a timeout of 0 for Redis: use"),
        "{zero}"
    );
    let zero = refused(StoreConfig {
        deadline: Some(Duration::ZERO),
        ..other()
    });
    assert!(zero.to_string().contains("a deadline of 0ns"), "{zero}");
    let nanosecond = refused(StoreConfig {
        deadline: Some(Duration::from_nanos(1)),
        ..other()
    });
    assert!(
        nanosecond.to_string().contains("a deadline of 1ns"),
        "{nanosecond}"
    );
    let short = StoreConfig {
        deadline: Some(Duration::from_millis(1)),
        ..other()
    };
    assert!(AnyStore::from_config(&short).is_ok());
    let prefix = refused(StoreConfig {
        prefix: "{shop}".to_owned(),
        ..other()
    });
    assert!(
        prefix
            .to_string()
            .contains("\"{shop}\" is not a valid key prefix: use"),
        "{prefix}"
    );
    let url = refused(StoreConfig {
        url: Some("http://user:hunter2@host/".to_owned()),
        ..other()
    });
    assert!(
        url.to_string()
            .contains("its scheme is unknown: use `redis://"),
        "{url}"
    );
    assert!(!format!("{url} {url:?}").contains("hunter2"), "{url:?}");
    let alone = refused(StoreConfig {
        share: ShareConfig::Alive,
        ..other()
    });
    assert_eq!(alone.kind(), crate::error::ErrorKind::NoRuntime, "{alone}");
}

#[test]
fn a_deadline_that_no_reply_meets_is_refused() {
    let [micros, half, one] = [
        Duration::from_micros(999),
        Duration::from_millis(500),
        Duration::from_secs(1),
    ];
    let store = |timeout| builder().timeout(timeout).connect_lazy().unwrap();
    for (deadline, text) in [
        (
            one,
            "a deadline of 1s above the timeout of 500ms, which ends a call to Redis first: use a timeout above two deadlines, such \
             as 2.5s",
        ),
        (
            micros,
            "a deadline of 999\u{b5}s for Redis: use at least 1 ms, such as 100 ms",
        ),
    ] {
        let in_code = Fallback::builder(store(half), LocalStore::default()).deadline(deadline);
        assert_eq!(in_code.unwrap_err().to_string(), text);
        let config = StoreConfig {
            deadline: Some(deadline),
            timeout: half,
            ..other()
        };
        let in_settings = AnyStore::from_config(&config).unwrap_err().to_string();
        assert_eq!(in_settings, format!("invalid store configuration: {text}"));
    }
    for deadline in [half, Duration::from_millis(1)] {
        let accepted = Fallback::builder(store(half), LocalStore::default()).deadline(deadline);
        assert!(accepted.is_ok(), "{deadline:?}");
    }
    let timeout = Duration::from_millis(40);
    let short = Fallback::new(store(timeout), LocalStore::default());
    assert!(settings(&short).contains("deadline: 40ms"), "{short:?}");
    let config = StoreConfig {
        timeout,
        deadline: None,
        ..other()
    };
    let AnyStore::Fallback(short) = AnyStore::from_config(&config).unwrap() else {
        panic!("no fallback")
    };
    assert!(settings(&short).contains("deadline: 40ms"), "{short:?}");
}

#[tokio::test]
async fn live_instances_can_share() {
    let AnyStore::Fallback(store) = AnyStore::from_config(&StoreConfig {
        share: ShareConfig::Alive,
        ..other()
    })
    .unwrap() else {
        panic!("no fallback")
    };
    assert!(settings(&store).contains("Instances(1 alive)"), "{store:?}");

    let named = StoreConfig::default().url(format!("{URL}?share=alive"));
    let AnyStore::Fallback(store) = AnyStore::from_config(&named).unwrap() else {
        panic!("no fallback")
    };
    assert!(settings(&store).contains("Instances(1 alive)"), "{store:?}");
    let shared = AnyStore::from_config(&named.kind(StoreKind::Redis)).unwrap();
    assert!(matches!(shared, AnyStore::Redis(_)), "{shared:?}");
}

#[test]
fn debug_shows_the_address_and_no_password() {
    let text = format!("{:?}", other());
    assert!(
        text.contains(r#"url: Some("127.0.0.1:6380")"#) && !text.contains("hunter2"),
        "{text}"
    );
    let text = format!(
        "{:?}",
        StoreConfig {
            url: Some("hunter2".to_owned()),
            ..other()
        }
    );
    assert!(
        text.contains(r#"url: Some("unreadable")"#) && !text.contains("hunter2"),
        "{text}"
    );
    let misplaced = StoreConfig {
        client_key: Some("-----BEGIN PRIVATE KEY-----\nhunter2".into()),
        prefix: URL.to_owned(),
        ..other()
    };
    let text = format!("{misplaced:?}");
    assert!(!text.contains("hunter2"), "{text}");
    let url = "redis+cluster://:hunter2@a:1,b:2".to_owned();
    let text = format!(
        "{:?}",
        StoreConfig {
            url: Some(url),
            ..other()
        }
    );
    assert!(
        text.contains(r#"url: Some("a:1,b:2")"#) && !text.contains("hunter2"),
        "{text}"
    );
}

#[test]
fn a_variable_must_hold_the_url() {
    let of = |value| StoreConfig::of_variable("REDIS_URL", value);
    assert_eq!(of(Ok(URL.to_owned())).unwrap().url.as_deref(), Some(URL));
    let local = of(Ok("local ".to_owned())).unwrap();
    assert_eq!((local.kind, local.url), (StoreKind::Local, None));
    for (value, problem) in [
        (
            Err(VarError::NotPresent),
            "REDIS_URL is not set (set REDIS_URL=local for no Redis)",
        ),
        (
            Ok(" ".to_owned()),
            "REDIS_URL is empty (set REDIS_URL=local for no Redis)",
        ),
        (
            Err(VarError::NotUnicode(OsString::new())),
            "REDIS_URL is not Unicode (set REDIS_URL=local for no Redis)",
        ),
    ] {
        assert_eq!(of(value), Err(wrong_url(problem)));
    }
    assert!(matches!(
        AnyStore::from_env("A_VARIABLE_THAT_NOBODY_SETS"),
        Ok(AnyStore::Local(_))
    ));
    let error = AnyStore::from_env("PATH").unwrap_err();
    assert!(
        error.to_string().contains("the Redis URL cannot be used"),
        "{error}"
    );
}

#[test]
fn a_wrong_map_of_addresses_is_named() {
    let error = |pairs: &[(&str, &str)]| {
        let mut config = StoreConfig::default();
        for (from, to) in pairs {
            config
                .address_map
                .insert((*from).to_owned(), (*to).to_owned());
        }
        redis(&config, URL).err().map(|error| error.to_string())
    };
    assert_eq!(error(&[("a:1", "b:1"), ("a:2", "b:2")]), None);
    let both = "the address map leads from a:1 and a:2 to b:1: map each announced address to a different one";
    assert_eq!(
        error(&[("a:1", "b:1"), ("a:2", "b:1")]).as_deref(),
        Some(both)
    );
    for (from, to) in [
        ("a:1", ""),
        ("a:1", "b"),
        ("a:1", "b:0"),
        ("a:1", ":1"),
        ("a:1", "b:port"),
        ("a", "b:1"),
        ("", "b:1"),
    ] {
        let text =
            format!("`address_map` leads from {from:?} to {to:?}: write both like `10.0.0.1:6379`");
        assert_eq!(error(&[(from, to)]), Some(text));
    }
}
