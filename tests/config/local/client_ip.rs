//! The extractor of client addresses, read from a file.

use serde_json::{Value, json};
use tower_redis_ratelimit::ConfigError;
use tower_redis_ratelimit::extract::ClientIp;

fn read(value: &Value) -> Result<ClientIp, String> {
    serde_json::from_value(value.clone()).map_err(|error| error.to_string())
}

#[test]
fn configured_kinds_equal_those_in_code() -> Result<(), ConfigError> {
    let xff = || ClientIp::x_forwarded_for();
    for (value, expected) in [
        (json!("peer"), ClientIp::peer()),
        (json!({}), ClientIp::peer()),
        (
            json!({ "ipv6_prefix": 56 }),
            ClientIp::peer().ipv6_prefix(56)?,
        ),
        (
            json!({ "header": "X-Forwarded-For", "trust": ["private"] }),
            xff().trust(["private"])?,
        ),
        (
            json!({ "header": "x-forwarded-for", "trust": "private" }),
            xff().trust(["private"])?,
        ),
        (
            json!({ "header": "x-forwarded-for", "trust": "loopback, 203.0.113.0/24" }),
            xff().trust(["loopback", "203.0.113.0/24"])?,
        ),
        (
            json!({ "header": "forwarded", "hops": 2, "ipv6_prefix": 56 }),
            ClientIp::forwarded().hops(2)?.ipv6_prefix(56)?,
        ),
        (
            json!({ "header": "forwarded", "hops": "2", "ipv6_prefix": "56" }),
            { ClientIp::forwarded().hops(2)?.ipv6_prefix(56)? },
        ),
        (
            json!({ "header": "cf-connecting-ip", "trust": ["2400:cb00::/32", "192.0.2.7", "unix"] }),
            ClientIp::header("cf-connecting-ip").trust(["2400:cb00::/32", "192.0.2.7", "unix"])?,
        ),
    ] {
        assert_eq!(read(&value).as_ref(), Ok(&expected), "{value}");
        let text = toml::to_string(&json!({ "client": value })).unwrap();
        assert_eq!(
            toml::from_str::<toml::Table>(&text).unwrap()["client"]
                .clone()
                .try_into(),
            Ok(expected),
            "{text}"
        );
    }
    Ok(())
}

#[test]
fn errors() {
    let choices = "`peer`, or a header and who writes it, such as `{ header = \"x-forwarded-for\", trust = [\"private\"] }`";
    let trusted = "write the proxies' network like `203.0.113.0/24`, an address, `private`, `loopback`, `link-local`, `shared` or `unix`, \
                   or trust a number of hops";
    let no_header =
        "the header that the trusted proxies write is missing: set it, such as `header = \"x-forwarded-for\"`"
            .to_owned();
    for (value, text) in [
        (json!("x-real-ip"), format!("\"x-real-ip\" is not a valid client address: use {choices}")),
        (json!(["peer"]), format!("invalid type: sequence, expected {choices}")),
        (
            json!({ "header": "forwarded", "hop": 2 }),
            "unknown field `hop`, expected one of `header`, `trust`, `hops`, `ipv6_prefix`".to_owned(),
        ),
        (
            json!({ "header": "x-real-ip" }),
            "no proxy is trusted to write \"x-real-ip\": set `trust = [\"private\"]` or `hops = 1`"
                .to_owned(),
        ),
        (json!({ "trust": ["private"] }), no_header.clone()),
        (json!({ "hops": 1, "ipv6_prefix": 56 }), no_header),
        (
            json!({ "header": "forwarded", "hops": 2, "trust": ["private"] }),
            "`trust` and `hops` are both set: remove one".to_owned(),
        ),
        (
            json!({ "header": "x real ip", "hops": 1 }),
            "\"x real ip\" is not a valid header name: use letters, digits and `-`, such as `x-api-key`".to_owned(),
        ),
        (
            json!({ "header": "forwarded", "trust": ["privat"] }),
            format!(
                "\"privat\" cannot be trusted: it is not one of the words, a network or an address; {trusted}"
            ),
        ),
        (
            json!({ "header": "forwarded", "trust": ["private", "0.0.0.0/0"] }),
            format!(
                "\"0.0.0.0/0\" cannot be trusted: it covers every address, so any client could forge the header; {trusted}"
            ),
        ),
        (
            json!({ "header": "forwarded", "trust": [] }),
            "no proxy is trusted: name at least one network".to_owned(),
        ),
        (
            json!({ "header": "forwarded", "trust": [1] }),
            "invalid type: integer `1`, expected a network such as `203.0.113.0/24`, an address, `private`, `loopback`, `link-local`, `shared` \
             or `unix`"
                .to_owned(),
        ),
        (
            json!({ "header": "forwarded", "hops": 0 }),
            "hops: \"0\" is not a valid number: use an integer from 1 to 255".to_owned(),
        ),
        (
            json!({ "header": "forwarded", "hops": 1, "ipv6_prefix": 129 }),
            "ipv6_prefix: \"129\" is not a valid IPv6 prefix: use a whole number from 1 to 128, such as `64`".to_owned(),
        ),
    ] {
        assert_eq!(read(&value).unwrap_err(), text, "{value}");
    }
}

#[test]
fn errors_name_their_line() {
    let file = "[client]\nheader = \"x-forwarded-for\"\ntrust = [\n    \"private\",\n    \"10.0.0.0/33\",\n]\n";
    let error = toml::from_str::<std::collections::HashMap<String, ClientIp>>(file)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("TOML parse error at line 5, column 5\n"),
        "{error}"
    );
}
