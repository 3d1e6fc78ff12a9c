//! Settings that are written and read again are the same.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use proptest::option;
use proptest::prelude::{Just, any, prop_assert_eq, prop_oneof, proptest};
use proptest::sample::select;
use proptest::strategy::Strategy as Generate;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tower_redis_ratelimit::extract::{ClientIp, KeyExtractor};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::select::{PolicySelector, Tier, Tiers};
use tower_redis_ratelimit::store::{ShareConfig, StoreConfig, StoreKind};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{ConfigError, Key, Policies, Policy, Quota, Strategy};

use crate::mocks::cases;

/// A wrapper, since TOML's top level must be a table.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct File<T> {
    value: T,
}

fn there_and_back<T: Serialize + DeserializeOwned>(value: T) -> [File<T>; 3] {
    let file = File { value };
    [
        toml::from_str(&toml::to_string(&file).unwrap()).unwrap(),
        yaml_serde::from_str(&yaml_serde::to_string(&file).unwrap()).unwrap(),
        serde_json::from_str(&serde_json::to_string(&file).unwrap()).unwrap(),
    ]
}

fn assert_same<T: Serialize + DeserializeOwned + Clone + PartialEq + Debug>(value: T) {
    for read in there_and_back(value.clone()) {
        assert_eq!(read.value, value);
    }
}

fn quotas() -> impl Generate<Value = Quota> {
    let periods = prop_oneof![
        1u64..31_000_000_000_000,
        select(&[1_000_000, 60_000_000, 900_000_000, 86_400_000_000][..])
    ];
    (1u32.., periods, option::of(1u32..)).prop_filter_map(
        "a quota that can work",
        |(limit, period, burst)| {
            let quota = Quota::per(limit, Duration::from_micros(period));
            let quota = burst.map_or(quota, |burst| quota.burst(burst));
            quota.is_valid().then_some(quota)
        },
    )
}

fn strategies() -> impl Generate<Value = Strategy> {
    // Shorter than most periods, or than the longest one.
    let offset =
        prop_oneof![1u64..1_000_000, 1u64..366 * 86_400_000_000].prop_map(Duration::from_micros);
    (select(Strategy::ALL), offset, 1u16..=1000).prop_map(
        |(strategy, offset, cells)| match strategy {
            Strategy::FixedWindow(Align::Clock { .. }) => {
                Strategy::FixedWindow(Align::Clock { offset })
            }
            Strategy::SlidingWindow { .. } => Strategy::SlidingWindow { cells },
            other => other,
        },
    )
}

fn policies() -> impl Generate<Value = Policies> {
    let policy = (
        "[a-zA-Z0-9._/-]{1,60}",
        strategies(),
        quotas(),
        option::of(1u32..=1_000),
    );
    proptest::collection::vec(policy, 1..5).prop_filter_map("policies that can work", |policies| {
        let policies = policies.into_iter().enumerate();
        // Unique names.
        let policies = policies.map(|(i, (name, strategy, quota, lease))| {
            let policy = Policy::new(&format!("{i}{name}"), strategy, quota)?;
            // A fraction of the longest lease time that most policies support.
            let lease = lease.map(|part| {
                Duration::from_micros(quota.period().as_micros() as u64 / 2_000 * u64::from(part))
            });
            Ok::<_, ConfigError>(
                lease
                    .and_then(|time| policy.clone().leased(time).ok())
                    .unwrap_or(policy),
            )
        });
        Policies::new(policies.collect::<Result<Vec<_>, _>>().ok()?).ok()
    })
}

fn stores() -> impl Generate<Value = StoreConfig> {
    // TOML's integers have 63 bits.
    let size = || (1..=i64::MAX as usize).prop_filter_map("not zero", NonZeroUsize::new);
    let time =
        || (any::<u64>(), 0u32..1_000_000_000).prop_map(|(secs, nanos)| Duration::new(secs, nanos));
    let kind = select(
        &[
            StoreKind::Auto,
            StoreKind::Fallback,
            StoreKind::Redis,
            StoreKind::Local,
        ][..],
    );
    let instances = || (1u32..).prop_filter_map("not zero", NonZeroU32::new);
    let share = prop_oneof![
        Just(ShareConfig::Alive),
        instances().prop_map(ShareConfig::Fixed)
    ];
    let optional = || option::of("\\PC{0,20}");
    let text = (
        optional(),
        "\\PC{0,20}",
        [optional(), optional(), optional(), optional()],
        [optional(), optional()],
    );
    let sizes = (
        size(),
        size(),
        size(),
        size(),
        size(),
        0..=i64::MAX as usize,
    );
    (kind, text, sizes, time(), time(), instances(), share).prop_map(
        |(kind, (url, prefix, tls, passwords), sizes, timeout, deadline, failures, share)| {
            let mut store = StoreConfig::default();
            (store.kind, store.url, store.prefix, store.share) = (kind, url, prefix, share);
            (
                store.connections,
                store.queue,
                store.batch,
                store.partitions,
                store.local_keys,
                store.denials,
            ) = sizes;
            (store.timeout, store.deadline, store.failures) = (timeout, Some(deadline), failures);
            store.connect_timeout = Some(timeout);
            let [
                root_certificates,
                client_certificate,
                client_key,
                server_name,
            ] = tls;
            store.client_name.clone_from(&server_name);
            for address in [&root_certificates, &server_name].into_iter().flatten() {
                store.address_map.insert(address.clone(), "b:1".to_owned());
            }
            store.root_certificates = root_certificates.map(Into::into);
            store.client_certificate = client_certificate.map(Into::into);
            store.client_key = client_key.map(Into::into);
            store.server_name = server_name;
            let [password_file, sentinel_password_file] = passwords;
            store.password_file = password_file.map(Into::into);
            store.sentinel_password_file = sentinel_password_file.map(Into::into);
            store
        },
    )
}

/// Generates every kind of key.
fn keys() -> impl Generate<Value = Key> {
    let address = (any::<IpAddr>(), 1u8..=128).prop_map(|(address, bits)| {
        let request = http::Request::builder()
            .extension(address)
            .body(())
            .unwrap()
            .into_parts()
            .0;
        ClientIp::peer()
            .ipv6_prefix(bits)
            .unwrap()
            .extract(&request)
            .unwrap()
    });
    let one = prop_oneof![
        any::<Vec<u8>>().prop_map(Key::new),
        "\\PC{0,45}".prop_map(Key::new),
        "[!-~]{1,39}".prop_map(Key::new),
        "\\PC{0,9}".prop_map(Key::secret),
        address,
        Just(Key::GLOBAL),
    ];
    prop_oneof![4 => one.clone(), 1 => proptest::collection::vec(one, 0..4).prop_map(|parts| Key::tuple(&parts))]
}

/// A caller without policies is exempt.
type Choices<K> = BTreeMap<K, Option<Policies>>;

fn tiers(default: Policies, named: &Choices<String>, callers: &[(Key, Option<Policies>)]) -> Tiers {
    let tiers = named.iter().fold(
        Tiers::new(default),
        |tiers, (name, policies)| match policies {
            Some(policies) => tiers.tier(name.as_str(), policies.clone()),
            None => tiers.exempt(name.as_str()),
        },
    );
    callers
        .iter()
        .fold(tiers, |tiers, (key, policies)| match policies {
            Some(policies) => tiers.caller(*key, policies.clone()),
            None => tiers.exempt_caller(*key),
        })
}

fn clients() -> impl Generate<Value = ClientIp> {
    let network = prop_oneof![
        select(&["private", "loopback", "unix"][..]).prop_map(str::to_owned),
        (any::<[u8; 4]>(), 1u8..=32).prop_map(|(v4, bits)| format!("{}/{bits}", IpAddr::from(v4))),
        (any::<[u8; 16]>(), 1u8..=128)
            .prop_map(|(v6, bits)| format!("{}/{bits}", IpAddr::from(v6))),
        any::<IpAddr>().prop_map(|address| address.to_string()),
    ];
    let trust = prop_oneof![
        proptest::collection::vec(network, 1..5).prop_map(Ok),
        (1u8..).prop_map(Err),
    ];
    let header = select(&["X-Forwarded-For", "forwarded", "x-real-ip"][..]);
    (option::of((header, trust)), 1u8..=128).prop_filter_map(
        "networks of some addresses",
        |(forwarding, bits)| {
            let client = match forwarding {
                None => ClientIp::peer(),
                Some((header, Ok(networks))) => ClientIp::header(header).trust(networks).ok()?,
                Some((header, Err(hops))) => ClientIp::header(header).hops(hops).ok()?,
            };
            client.ipv6_prefix(bits).ok()
        },
    )
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn tiers_round_trip(
        default in policies(),
        named in proptest::collection::btree_map("\\PC{0,9}", option::of(policies()), 0..4),
        callers in proptest::collection::vec((keys(), option::of(policies())), 0..6),
    ) {
        let tiers = tiers(default, &named, &callers);
        for read in there_and_back(tiers.clone()) {
            let plans = named.keys().cloned().chain(["of nobody".to_owned()]);
            for plan in plans {
                let request = http::Request::builder().extension(Tier::new(plan)).body(()).unwrap().into_parts().0;
                for key in callers.iter().map(|(key, _)| Some(key)).chain([None]) {
                    prop_assert_eq!(read.value.policies(&request, key), tiers.policies(&request, key));
                }
            }
        }
    }

    #[test]
    fn clients_round_trip(client in clients()) {
        for read in there_and_back(client.clone()) {
            prop_assert_eq!(&read.value, &client);
        }
    }

    #[test]
    fn quotas_round_trip(quota in quotas()) {
        for read in there_and_back(quota) {
            prop_assert_eq!(read.value, quota);
        }
    }

    #[test]
    fn strategies_round_trip(strategy in strategies()) {
        for read in there_and_back(strategy) {
            prop_assert_eq!(read.value, strategy);
        }
    }

    #[test]
    fn policies_round_trip(policies in policies()) {
        for read in there_and_back(policies.clone()) {
            prop_assert_eq!(&read.value, &policies);
        }
        for read in there_and_back(policies[0].clone()) {
            prop_assert_eq!(&read.value, &policies[0]);
        }
    }

    #[test]
    fn stores_round_trip(store in stores()) {
        for read in there_and_back(store.clone()) {
            prop_assert_eq!(&read.value, &store);
        }
    }
}

#[test]
fn choices_round_trip() {
    [
        StoreKind::Auto,
        StoreKind::Fallback,
        StoreKind::Redis,
        StoreKind::Local,
    ]
    .into_iter()
    .for_each(assert_same);
    [OnError::Reject, OnError::Allow]
        .into_iter()
        .for_each(assert_same);
    [OnMissingKey::Reject, OnMissingKey::Allow]
        .into_iter()
        .for_each(assert_same);
    [ShareConfig::Alive, ShareConfig::Fixed(NonZeroU32::MAX)]
        .into_iter()
        .for_each(assert_same);
    assert_same(StoreConfig::default());
    for headers in [Headers::DRAFT_11, Headers::NONE] {
        assert_same(headers);
        [Headers::GITHUB, Headers::X_SECONDS, Headers::DRAFT_6]
            .into_iter()
            .for_each(|legacy| {
                assert_same(legacy);
                assert_same(headers.and(legacy));
            });
    }
    Strategy::ALL.iter().copied().for_each(assert_same);
}

/// The written file has the form that people write.
#[test]
fn in_flight_policies_round_trip() {
    let policy = Policy::in_flight("streams", 4).unwrap();
    let text = serde_json::to_string(&policy).unwrap();
    assert_eq!(
        text,
        r#"{"name":"streams","strategy":"in-flight","quota":"4/30s"}"#
    );
    assert_same(policy.slot_ttl(Duration::from_secs(5)).unwrap());
}

#[test]
fn calendars_round_trip() {
    for (strategy, quota) in [
        ("fixed-window(month from 31, -03:30)", "10000/month"),
        ("fixed-window(year from april 6)", "7/year"),
        ("fixed-window(week from sunday)", "7/7d"),
        ("fixed-window(day, Europe/Berlin)", "7/d"),
    ] {
        let policy = Policy::new("plan", strategy.parse().unwrap(), quota).unwrap();
        assert_eq!(
            serde_json::to_string(&policy).unwrap(),
            format!(r#"{{"name":"plan","strategy":"{strategy}","quota":"{quota}"}}"#)
        );
        assert_same(policy);
    }
}

#[test]
fn blocked_policies_round_trip() {
    let blocked = Policies::blocked();
    let api = Policy::new("api", Strategy::Gcra, "9/s").unwrap();
    let listed = vec![api, blocked[0].clone()];
    for text in [
        serde_json::to_string(&blocked).unwrap(),
        serde_json::to_string(&blocked[0]).unwrap(),
        serde_json::to_string(&Policies::new(listed.clone()).unwrap()).unwrap(),
    ] {
        assert_eq!(text, r#""blocked""#);
    }
    assert_same(blocked.clone());
    assert_same(blocked[0].clone());
    assert_same(listed);
    let list: Policies =
        serde_json::from_str(r#"[{"name":"api","quota":"9/s"},"blocked"]"#).unwrap();
    assert_eq!(list[1], blocked[0]);
}

#[test]
fn written_settings_are_readable() {
    let policies = Policies::new([
        Policy::new("burst", Strategy::Gcra, Quota::per_second(100).burst(200)).unwrap(),
        Policy::new(
            "login",
            Strategy::SlidingLog,
            Quota::per(5, Duration::from_secs(900)),
        )
        .unwrap(),
    ]);
    assert_eq!(
        toml::to_string(&File {
            value: policies.unwrap()
        })
        .unwrap(),
        r#"[[value]]
name = "burst"
strategy = "gcra"
quota = "100/s burst 200"

[[value]]
name = "login"
strategy = "sliding-log"
quota = "5/15m"
"#
    );
    assert_eq!(
        toml::to_string(&StoreConfig::default()).unwrap(),
        r#"kind = "auto"
prefix = "rl"
connections = 2
timeout = "250ms"
queue = 10000
batch = 128
partitions = 12
denials = 10000
failures = 3
share = 1
local_keys = 100000
"#
    );
}
