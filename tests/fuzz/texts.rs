//! Damaged texts from operators and clients: settings, URLs, keys, and the addresses that proxies
//! write.

use std::net::SocketAddr;

use http::Request;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tower_redis_ratelimit::extract::{ClientIp, KeyExtractor};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::select::Tiers;
use tower_redis_ratelimit::store::StoreConfig;
use tower_redis_ratelimit::{Key, Policies, Quota, RedisStore};

use crate::damage::damage;
use crate::each_seed;

const QUOTAS: &[&str] = &[
    "10/s",
    "100/m burst 20",
    "5/1.5s",
    "1000/100d",
    "3/90m burst 7",
    "4/30s",
];

const SETTINGS: &[&str] = &[
    r#"[{"name":"api","strategy":"gcra","quota":"10/s burst 20"}]"#,
    r#"[{"name":"day","strategy":"fixed-window","quota":"1000/d"},{"name":"log","strategy":"sliding-log","quota":"5/s"}]"#,
    r#"["draft-11","github"]"#,
    r#"{"default":[{"name":"free","strategy":"token-bucket","quota":"1/s"}],"tiers":{"pro":"exempt"}}"#,
    r#"{"kind":"fallback","url":"redis://:secret@127.0.0.1:6379/0","timeout":"100ms","share":4}"#,
    r#"{"header":"x-forwarded-for","trust":["private","203.0.113.0/24"]}"#,
];

const URLS: &[&str] = &[
    "redis://user:hush-hush@127.0.0.1:6379/0?prefix=shop",
    "redis+cluster://user:hush-hush@10.0.0.1:6379,[::1]:6380?prefix=shop",
    "redis+sentinel://user:hush-hush@10.0.0.1:26379/mymaster/0?sentinel_user=u&sentinel_password=hush-hush",
    "redis+unix:///run/redis.sock?password=hush-hush",
    "rediss://:hush-hush@host:1",
];

const FORWARDED: &[&str] = &[
    "198.51.100.7, 10.0.0.2",
    "for=198.51.100.7;proto=https, for=\"[2001:db8::1]:4711\";by=10.0.0.1",
    "for=unknown, for=\"_hidden\", for=10.0.0.3",
    "\"\\\"\", [::ffff:10.0.0.1]:80",
];

/// Every value that can be read can be written and read again.
fn read<T: DeserializeOwned + Serialize>(text: &str) {
    #[derive(Serialize, Deserialize)]
    struct File<T> {
        value: T,
    }
    let json =
        |value: &T| serde_json::to_string(value).expect("every value that was read can be written");
    let Ok(value) = serde_json::from_str::<T>(text) else {
        return;
    };
    let written = json(&value);
    let again = json(
        &serde_json::from_str(&written)
            .unwrap_or_else(|error| panic!("{text} became {written}: {error}")),
    );
    assert_eq!(written, again, "{text}");
    // TOML's integers have 63 bits.
    let Ok(toml) = toml::to_string(&File { value }) else {
        return;
    };
    let again = json(
        &toml::from_str::<File<T>>(&toml)
            .unwrap_or_else(|error| panic!("{text} became {toml}: {error}"))
            .value,
    );
    assert_eq!(written, again, "{text}");
}

#[tokio::test]
async fn damaged_texts_are_errors() {
    each_seed(2_000, async |mut rng| {
        let mut damaged = |texts: &[&str]| {
            let text = texts[rng.usize(..texts.len())];
            String::from_utf8_lossy(&damage(&mut rng, text.as_bytes())).into_owned()
        };
        let text = damaged(QUOTAS);
        if let Ok(quota) = text.parse::<Quota>() {
            assert_eq!(quota.to_string().parse(), Ok(quota), "{text:?}");
        }
        let text = damaged(SETTINGS);
        read::<Policies>(&text);
        read::<Headers>(&text);
        read::<Tiers>(&text);
        read::<StoreConfig>(&text);
        read::<ClientIp>(&text);
        let text = damaged(URLS);
        if let Err(error) = RedisStore::connect_lazy(text.as_str()) {
            // If damage splits the password, its parts cannot be distinguished from other text.
            let whole = text.contains(":hush-hush@") || text.contains("password=hush-hush");
            assert!(
                !whole || !format!("{error} {error:?}").contains("hush-hush"),
                "{error} shows a password of {text:?}"
            );
        }
    })
    .await;
}

/// For any header, the key is the address of the client or of a proxy, and extraction does not
/// fail.
#[tokio::test]
async fn damaged_addresses_give_a_key() {
    let peer = SocketAddr::from(([10, 0, 0, 1], 80));
    let forwarded = ClientIp::forwarded().trust(["private"]).unwrap();
    let x_forwarded_for = ClientIp::x_forwarded_for().trust(["private"]).unwrap();
    each_seed(5_000, async |mut rng| {
        let mut request = Request::builder().extension(peer.ip());
        for _ in 0..rng.usize(1..4) {
            let text = rng.choice(FORWARDED).expect("some");
            let text = damage(&mut rng, text.as_bytes());
            let Ok(value) = http::HeaderValue::from_bytes(&text) else {
                continue;
            };
            request = request
                .header("forwarded", value.clone())
                .header("x-forwarded-for", value);
        }
        let parts = request.body(()).unwrap().into_parts().0;
        for extractor in [&forwarded, &x_forwarded_for] {
            extractor
                .extract(&parts)
                .unwrap_or_else(|error| panic!("{error:?} for {:?}", parts.headers));
        }
    })
    .await;
}

#[tokio::test]
async fn different_keys_stay_different() {
    each_seed(5_000, async |mut rng| {
        let mut part = || damage(&mut rng, b"ann:\xff%00{api}");
        let (a, b, c) = (part(), part(), part());
        assert_eq!(
            a == b,
            Key::new(a.clone()) == Key::new(b.clone()),
            "{a:?} and {b:?}"
        );
        let tuple = |parts: &[&[u8]]| Key::tuple(&parts.iter().map(Key::new).collect::<Vec<_>>());
        let same = (a == b) && (b == c);
        assert_eq!(
            same,
            tuple(&[&a, &b]) == tuple(&[&b, &c]),
            "{a:?}, {b:?} and {c:?}"
        );
        assert_ne!(
            tuple(&[&a, &b]),
            tuple(&[&[a.as_slice(), &b].concat()]),
            "{a:?} and {b:?}"
        );
    })
    .await;
}
