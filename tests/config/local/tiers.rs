//! Tiers: the policies of each plan and caller, read from a file.

use std::sync::Arc;

use http::Request;
use http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
#[cfg(feature = "axum")]
use tower_redis_ratelimit::extract::{KeyExtractor, MatchedRoute};
use tower_redis_ratelimit::observe::Observer;
use tower_redis_ratelimit::select::{PolicySelector, Tier, Tiers};
use tower_redis_ratelimit::{Key, Policies, Policy, Quota};

use crate::mocks::Problems;

fn request(tier: &'static str) -> Parts {
    Request::builder()
        .extension(Tier::new(tier))
        .body(())
        .unwrap()
        .into_parts()
        .0
}

/// Returns the names of the policies of a caller in a plan; empty for an exempt caller.
fn names(tiers: &Tiers, tier: &'static str, caller: Key) -> String {
    let policies = tiers.policies(&request(tier), Some(&caller));
    policies
        .iter()
        .flatten()
        .map(Policy::name)
        .collect::<Vec<_>>()
        .join(" ")
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn ip(address: &str) -> Key {
    Key::ip(address.parse().unwrap())
}

fn policy(name: &str) -> Policy {
    Policy::new(name, Default::default(), Quota::per_minute(10)).unwrap()
}

const FILE: &str = r#"
    default = { name = "free", quota = "60/min" }

    [tiers]
    pro = [{ name = "pro", quota = "6000/min" }, { name = "daily", quota = "100000/d", strategy = "fixed-window" }]
    internal = "exempt"

    [callers]
    tenant-7 = { name = "large", quota = "100000/min" }
    "secret:sk-live-1" = { name = "partner", quota = "600/min" }
    "ip:192.0.2.7" = "exempt"
    "ip:192.0.2.66" = "blocked"
"#;

#[test]
fn toml() {
    let tiers: Tiers = toml::from_str(FILE).unwrap();
    let nobody = Key::new("nobody");
    assert_eq!(names(&tiers, "pro", nobody), "pro daily");
    assert_eq!(names(&tiers, "internal", nobody), "");
    assert_eq!(names(&tiers, "unknown", nobody), "free");
    assert_eq!(names(&tiers, "pro", Key::new("tenant-7")), "large");
    assert_eq!(names(&tiers, "pro", Key::secret("sk-live-1")), "partner");
    assert_eq!(
        names(&tiers, "pro", Key::ip("192.0.2.7".parse().unwrap())),
        ""
    );
    assert_eq!(names(&tiers, "pro", ip("192.0.2.66")), "blocked");
    assert_eq!(
        names(&tiers, "unknown", Key::new("sk-live-1")),
        "free",
        "a secret is not what is spelled like it"
    );
}

#[test]
fn yaml_and_json() {
    let yaml = "
        default: [{ name: free, quota: 60/min }]
        tiers:
          pro: { name: pro, quota: 6000/min }
        callers:
          7: { name: seven, quota: 7/s }
          ip:2001:db8::/64: exempt";
    let json = r#"{
        "default": { "name": "free", "quota": "60/min" },
        "tiers": { "pro": [{ "name": "pro", "quota": "6000/min" }] },
        "callers": { "7": { "name": "seven", "quota": "7/s" }, "ip:2001:db8::/64": "exempt" }
    }"#;
    for tiers in [
        yaml_serde::from_str::<Tiers>(yaml).unwrap(),
        serde_json::from_str(json).unwrap(),
    ] {
        assert_eq!(names(&tiers, "free", Key::new("nobody")), "free");
        assert_eq!(names(&tiers, "pro", Key::new("nobody")), "pro");
        assert_eq!(names(&tiers, "pro", Key::new("7")), "seven");
        assert_eq!(
            names(&tiers, "pro", Key::ip("2001:db8::ffff".parse().unwrap())),
            "",
            "the same /64"
        );
    }
}

#[test]
fn plan_names_come_from_code() {
    let tiers: Tiers = toml::from_str(FILE).unwrap();
    let tiers = tiers.tier_by(|request| request.headers.get("plan")?.to_str().ok());
    let request = Request::builder()
        .header("plan", "internal")
        .body(())
        .unwrap()
        .into_parts()
        .0;
    assert_eq!(tiers.policies(&request, None), None);
}

/// Every kind of key, in its form in Redis and in the form that people write.
#[test]
fn callers_are_found_by_their_keys() {
    let long = "a long name that does not fit into a key in Redis";
    let hashed = Key::new(long);
    for (text, key) in [
        ("tenant-7", Key::new("tenant-7")),
        (" tenant-7", Key::new(" tenant-7")),
        ("caf\u{e9}", Key::new("caf\u{e9}")),
        ("urn:user:7", Key::new("urn:user:7")),
        (long, hashed),
        (hashed.reveal(), hashed),
        ("secret:sk-live-1", Key::secret("sk-live-1")),
        ("secret:one, two", Key::secret("one, two")),
        (Key::secret("sk-live-1").reveal(), Key::secret("sk-live-1")),
        ("ip:192.0.2.7", ip("192.0.2.7")),
        ("ip:::ffff:192.0.2.7", ip("192.0.2.7")),
        ("ip:2001:db8::/64", ip("2001:db8::")),
        ("ip:2001:0db8:0000:0000::/64", ip("2001:db8::")),
        (
            "tenant-7,ip:192.0.2.7",
            Key::tuple(&[Key::new("tenant-7"), ip("192.0.2.7")]),
        ),
        // Not a list of addresses, whose commas have a blank.
        (
            "ip:192.0.2.7,ip:192.0.2.7",
            Key::tuple(&[ip("192.0.2.7"), ip("192.0.2.7")]),
        ),
        ("a,secret:b", Key::tuple(&[Key::new("a"), Key::secret("b")])),
        ("*", Key::GLOBAL),
        #[cfg(feature = "axum")]
        (
            "route:none",
            MatchedRoute.extract(&request("free")).unwrap(),
        ),
    ] {
        let text =
            json!({ "default": { "name": "free", "quota": "1/s" }, "callers": { text: "exempt" } });
        let tiers: Tiers = read(text.clone()).unwrap();
        assert_eq!(tiers.policies(&request("free"), Some(&key)), None, "{text}");
        assert!(
            tiers
                .policies(&request("free"), Some(&Key::new("another")))
                .is_some(),
            "{text}"
        );
    }
}

/// The exact key counts first, then the longest network that contains the whole key.
#[test]
fn callers_are_found_by_network() {
    let named = |name: &str| json!({ "name": name, "quota": "1/s" });
    let tiers: Tiers = read(json!({
        "default": named("free"),
        "callers": {
            "ip:10.0.0.0/8, ip:2001:db8::/32": named("large"),
            "ip:10.1.0.0/16, ip:2001:db8:1::/48": named("small"),
            "ip:10.1.0.7": "exempt",
            "ip:2001:db8:1:2::/64": named("host"),
            "ip:20010db8000300040000000000000001/128": named("one"),
            "ip:::ffff:192.0.2.0/120": named("mapped"),
        },
    }))
    .unwrap();
    let written: Tiers = read(serde_json::to_value(&tiers).unwrap()).unwrap();
    let code = Tiers::new(policy("free"))
        .network("10.0.0.0/8".parse().unwrap(), policy("large"))
        .and_then(|tiers| tiers.exempt_network("10.1.0.0/16".parse().unwrap()))
        .unwrap()
        .caller(Key::ip([10, 1, 0, 7].into()), policy("own"));
    let name = |tiers: &Tiers, key: Key| match tiers.policies(&request("free"), Some(&key)) {
        Some(policies) => policies.iter().next().unwrap().name().to_owned(),
        None => "none".to_owned(),
    };
    for (address, expected, of_code) in [
        ("10.2.3.4", "large", "large"),
        ("10.1.3.4", "small", "none"),
        ("10.1.0.7", "none", "own"),
        ("11.0.0.1", "free", "free"),
        ("192.0.2.7", "mapped", "free"),
        ("2001:db8:9::1", "large", "free"),
        ("2001:db8:1::1", "small", "free"),
        ("2001:db8:1:2::1", "host", "free"),
        ("2001:db9::1", "free", "free"),
        // The address is a part of this key.
        ("2001:db8:3:4::1", "large", "free"),
    ] {
        assert_eq!(name(&tiers, ip(address)), expected, "{address}");
        assert_eq!(name(&written, ip(address)), expected, "{address}");
        assert_eq!(name(&code, ip(address)), of_code, "{address}");
    }
    let key = |address: &str, prefix| Key::network(address.parse().unwrap(), prefix);
    assert_eq!(name(&tiers, key("2001:db8:3:4::1", 128)), "one");
    assert_eq!(name(&tiers, key("2001:db8:1::", 40)), "large");
    assert_eq!(name(&tiers, key("2001::", 16)), "free");
    assert_eq!(name(&tiers, Key::new("tenant-7")), "free");
    let invalid = Tiers::new(policy("free")).exempt_network("10.0.0.1/8".parse().unwrap());
    assert!(invalid.is_err());
}

/// Its keys are /64 networks.
#[test]
fn an_address_within_a_key_is_reported() {
    let tiers: Tiers = read(json!({
        "default": { "name": "free", "quota": "1/s" },
        "callers": { "ip:2001:db8:5::1": "exempt", "ip:2001:db8:6::/80": "exempt" },
    }))
    .unwrap();
    let problems = Problems::default();
    let observer: Arc<dyn Observer> = Arc::new(problems.clone());
    PolicySelector::<Key>::observe(&tiers, &observer);
    for address in ["2001:db8:4::1", "192.0.2.7"] {
        assert!(
            tiers
                .policies(&request("free"), Some(&ip(address)))
                .is_some()
        );
    }
    assert_eq!(problems.0.lock().unwrap().len(), 0);
    for address in ["2001:db8:5::1", "2001:db8:5::2", "2001:db8:6::1"] {
        assert!(
            tiers
                .policies(&request("free"), Some(&ip(address)))
                .is_some()
        );
    }
    let reports = problems.0.lock().unwrap();
    let [report] = &reports[..] else {
        panic!("one report is expected: {reports:?}");
    };
    assert!(
        report.starts_with("the policies of the network 2001:db8:5::1/128 apply to nothing")
            && report.ends_with("#narrow-network)"),
        "{report}"
    );
}

#[test]
fn errors() {
    let free = json!({ "name": "free", "quota": "60/min" });
    let caller = |text: &str| json!({ "default": free, "callers": { text: "exempt" } });
    let no_caller = |text: &str| {
        format!(
            "{text:?} is not a valid caller: use a caller's key in clear, addresses or networks such as \
             `ip:192.0.2.7, ip:2001:db8::/32`, `secret:` followed by an API key, or `~` followed by 32 digits as in Redis"
        )
    };
    for (value, text) in [
        (json!({}), "missing field `default`".to_owned()),
        (
            json!({ "default": free, "plans": {} }),
            "unknown field `plans`, expected one of `default`, `tiers`, `callers`".to_owned(),
        ),
        (
            json!({ "default": "exempt" }),
            "\"exempt\" is not a valid policy: use a policy such as `{ name = \"api\", quota = \"100/s\" }`, a list of policies, or \
             `blocked`"
                .to_owned(),
        ),
        (
            json!({ "default": free, "tiers": { "pro": "exmept" } }),
            "\"exmept\" is not a valid policy: use `exempt`, `blocked`, a policy such as `{ name = \"pro\", quota = \"100/s\" }`, \
             or a list of policies"
                .to_owned(),
        ),
        (
            json!({ "default": free, "tiers": { "pro": 60 } }),
            "\"60\" is not a valid policy: use `exempt`, `blocked`, a policy such as `{ name = \"pro\", quota = \"100/s\" }`, \
             or a list of policies"
                .to_owned(),
        ),
        (
            json!({ "default": free, "tiers": { "pro": { "name": "pro", "quota": "60" } } }),
            "\"60\" is not a valid quota: there is no `/` and no `per`; use the form `100/s`, `10/60s` or `1000/h burst 50`"
                .to_owned(),
        ),
        (
            json!({ "default": free, "tiers": { "pro": [free, free] } }),
            "two policies are named \"free\": use different names, since the name is part of the key".to_owned(),
        ),
        (json!({ "default": free, "tiers": ["pro"] }), "invalid type: sequence, expected a table of tiers".to_owned()),
        (json!({ "default": free, "callers": 7 }), "invalid type: integer `7`, expected a table of callers".to_owned()),
        (caller(""), no_caller("")),
        (caller("secret:"), no_caller("secret:")),
        (caller("ip:tenant-7"), no_caller("ip:tenant-7")),
        (
            caller("ip:10.0.0.1/8"),
            "no callers are in the network \"10.0.0.1/8\": it is an address within a network: use `10.0.0.1` or `10.0.0.0/8`".to_owned(),
        ),
        (
            caller("ip:192.0.2.7, ip:2001:db8::1/32"),
            "no callers are in the network \"2001:db8::1/32\": it is an address within a network: use `2001:db8::1` or \
             `2001:db8::/32`"
                .to_owned(),
        ),
        (
            caller("ip:0.0.0.0/0"),
            "no callers are in the network \"0.0.0.0/0\": it covers every address: set the default policies instead".to_owned(),
        ),
        (caller("ip:10.0.0.0/33"), no_caller("ip:10.0.0.0/33")),
        (caller("ip:10.0.0.0/8,tenant-7"), no_caller("ip:10.0.0.0/8,tenant-7")),
        (
            caller("ip:10.0.0.0/8,~8c3ba5a8f35d8b6e55c7e9ba2d0bbf3c"),
            no_caller("ip:10.0.0.0/8,~8c3ba5a8f35d8b6e55c7e9ba2d0bbf3c"),
        ),
        (caller("ip:2001/64"), no_caller("ip:2001/64")),
        (
            caller("ip:::/0"),
            "no callers are in the network \"::/0\": it covers every address: set the default policies instead".to_owned(),
        ),
        (caller("ip:2001:db8::/129"), no_caller("ip:2001:db8::/129")),
        (caller("~8c3ba5a8"), no_caller("~8c3ba5a8")),
        (caller("~8C3BA5A8F35D8B6E55C7E9BA2D0BBF3C"), no_caller("~8C3BA5A8F35D8B6E55C7E9BA2D0BBF3C")),
        (caller("tenant-7,"), no_caller("tenant-7,")),
    ] {
        assert_eq!(read::<Tiers>(value).unwrap_err(), text);
    }
}

/// A name that looks like another kind of key would match no caller.
#[test]
fn impossible_callers_are_refused() {
    let caller = |text: &str| json!({ "default": { "name": "free", "quota": "1/s" }, "callers": { text: "exempt" } });
    for text in [
        "192.0.2.7",
        " 192.0.2.7",
        "2001:db8::7",
        "::ffff:192.0.2.7",
        "10.0.0.0/8",
        "2001:db8::/64",
        "tenant-7,192.0.2.7",
        "IP:192.0.2.7",
        "Ip:2001:db8::/64",
        " ip:192.0.2.7",
        "ip: 192.0.2.7",
        "ip:192.0.2.7 ",
        "ip:192.0.2.7, ",
        "ip:UNIX",
        "ip:192.0.2.7, tenant-7",
        "ip:192.0.2.7 ,tenant-7",
        "tenant-7, ip:192.0.2.7",
        "tenant-7,\ttenant-8",
        "ROUTE:none",
        "route:None",
        " *",
        "* ",
        "~8c3ba5a8f35d8b6e55c7e9ba2d0bbf3c ",
        " ~8c3ba5a8f35d8b6e55c7e9ba2d0bbf3c",
    ] {
        let error = read::<Tiers>(caller(text)).expect_err(text);
        assert!(
            error.starts_with(&format!(
                "{text:?} is not a valid caller: use a caller's key in clear"
            )),
            "{error}"
        );
    }
}

#[test]
fn no_error_shows_a_secret() {
    let caller = |text: &str| json!({ "default": { "name": "free", "quota": "1/s" }, "callers": { text: "exempt" } });
    for text in [
        "SECRET:sk-live-1",
        "Secret:sk-live-1",
        " secret:sk-live-1",
        "secret :sk-live-1, a",
        "ip:x,secret:sk-live-1",
        "a, secret:sk-live-1",
        "a,,secret:sk-live-1",
        "~secret:sk-live-1",
        "a,SECRET:sk-live-1",
    ] {
        let error = read::<Tiers>(caller(text)).expect_err(text);
        assert!(
            error.contains("is not a valid caller") && !error.contains("sk-live"),
            "{error}"
        );
    }
    let turned_round = json!({ "default": { "name": "free", "quota": "1/s" }, "callers": { "a": "secret:sk-live-1" } });
    let error = read::<Tiers>(turned_round).unwrap_err();
    assert!(
        error.starts_with("\"secret:\u{2026}\" is not a valid policy"),
        "{error}"
    );
}

/// A key that could not be read again is not written.
#[test]
fn unwritable_callers_are_an_error() {
    let tiers = Tiers::new(policy("free")).exempt_caller(Key::new("192.0.2.7"));
    let error = serde_json::to_string(&tiers).unwrap_err().to_string();
    assert!(
        error.starts_with("\"192.0.2.7\" is not a valid caller"),
        "{error}"
    );
}

/// Some formats allow duplicate names, and two texts may name one caller. The error shows no
/// secret.
#[test]
fn duplicates_are_refused() {
    let secret = Key::secret("sk-live-1");
    for (tables, text) in [
        (
            r#""tiers": { "pro": "exempt", "pro": "exempt" }"#.to_owned(),
            "duplicate tier \"pro\"".to_owned(),
        ),
        (
            r#""callers": { "ip:10.0.0.0/8, ip:2001:db8::1": "exempt", "ip:2001:db8:0::1": "exempt" }"#.to_owned(),
            "duplicate caller \"ip:2001:db8::1\"".to_owned(),
        ),
        (
            r#""callers": { "ip:10.0.0.0/8, ip:10.0.0.0/8": "exempt" }"#.to_owned(),
            "duplicate caller \"ip:10.0.0.0/8\"".to_owned(),
        ),
        (
            format!(
                r#""callers": {{ "secret:sk-live-1": "exempt", {:?}: "exempt" }}"#,
                secret.reveal()
            ),
            format!("duplicate caller {:?}", secret.reveal()),
        ),
    ] {
        let file = format!(r#"{{ "default": {{ "name": "free", "quota": "1/s" }}, {tables} }}"#);
        let error = serde_json::from_str::<Tiers>(&file)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("{text}: remove one at line 1")),
            "{error}"
        );
        assert!(!error.contains("sk-live"), "{error}");
    }
}

#[test]
fn errors_name_their_line() {
    for (wrong, line, column) in [
        ("pro = \"exmept\"", 3, 7),
        ("pro = { name = \"pro\", quota = \"5/M\" }", 3, 31),
        ("[callers]\n\"ip:x\" = \"exempt\"", 4, 1),
    ] {
        let file =
            format!("default = {{ name = \"free\", quota = \"60/min\" }}\n[tiers]\n{wrong}\n");
        let error = toml::from_str::<Tiers>(&file).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!(
                "TOML parse error at line {line}, column {column}\n"
            )),
            "{error}"
        );
    }
}

#[test]
fn blocked_is_a_limit_everywhere() {
    let tiers: Tiers = read(json!({
        "default": "blocked",
        "tiers": {
            "banned": "blocked",
            "free": { "name": "free", "quota": "60/min" },
            "mixed": [{ "name": "api", "quota": "60/min" }, "blocked"],
        },
        "callers": { "ip:10.0.0.0/8": "blocked", "tenant-7": { "name": "large", "quota": "9/s" } },
    }))
    .unwrap();
    let again: Tiers = read(serde_json::to_value(&tiers).unwrap()).unwrap();
    // The names alone do not tell a blocked caller from a policy with that name.
    for tiers in [tiers, again] {
        let blocked = Policies::blocked();
        assert_eq!(tiers.default_policies(), &blocked);
        for (tier, caller) in [
            ("banned", Key::new("ann")),
            ("unknown", Key::new("ann")),
            ("free", ip("10.1.2.3")),
        ] {
            let policies = tiers.policies(&request(tier), Some(&caller));
            assert_eq!(policies.as_ref(), Some(&blocked), "{tier}");
        }
        let mixed = tiers.policies(&request("mixed"), None).unwrap();
        assert!(mixed.iter().any(|policy| *policy == blocked[0]));
        assert_eq!(names(&tiers, "free", Key::new("ann")), "free");
        assert_eq!(names(&tiers, "banned", Key::new("tenant-7")), "large");
    }
    let policies: Policies = read(json!("blocked")).unwrap();
    assert_eq!(policies, Policies::blocked());
    let error = read::<Policies>(json!("Blocked")).unwrap_err();
    assert!(error.contains("or `blocked`"), "{error}");
}

#[test]
fn written_settings_are_readable() {
    let tiers = Tiers::new(policy("free"))
        .tier(
            "pro",
            Policies::new([policy("pro"), policy("daily")]).unwrap(),
        )
        .exempt("internal")
        .exempt_caller(Key::ip("192.0.2.7".parse().unwrap()))
        .caller(ip("192.0.2.66"), Policies::blocked())
        .caller(Key::new("tenant-7"), policy("large"));
    assert_eq!(
        toml::to_string(&tiers).unwrap(),
        r#"[[default]]
name = "free"
strategy = "gcra"
quota = "10/m"

[tiers]
internal = "exempt"

[[tiers.pro]]
name = "pro"
strategy = "gcra"
quota = "10/m"

[[tiers.pro]]
name = "daily"
strategy = "gcra"
quota = "10/m"

[callers]
"ip:192.0.2.66" = "blocked"
"ip:192.0.2.7" = "exempt"

[[callers.tenant-7]]
name = "large"
strategy = "gcra"
quota = "10/m"
"#
    );
}
