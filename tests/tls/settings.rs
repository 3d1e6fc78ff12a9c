//! Invalid TLS settings are rejected when the store is built, and the error names the setting.

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::Servers;

use crate::with_tls::Authority;

fn builder() -> tower_redis_ratelimit::store::RedisStoreBuilder {
    RedisStore::builder("rediss://127.0.0.1/")
}

#[test]
fn invalid_certificates() {
    let (ca, other) = (Authority::new(), Authority::new());
    let (own, strange) = (ca.sign("service.example"), other.sign("service.example"));
    let broken = ca.pem().replacen("MII", "MIX", 1);
    for (builder, what) in [
        (builder().root_certificates(""), "root certificate"),
        (builder().root_certificates("no PEM"), "root certificate"),
        (
            builder().root_certificates(own.key.as_str()),
            "root certificate",
        ),
        (builder().root_certificates(broken), "root certificate"),
        (
            builder().client_certificate("", own.key.as_str()),
            "client certificate",
        ),
        (
            builder().client_certificate(own.pem.as_str(), ""),
            "key of a client certificate",
        ),
        (
            builder().client_certificate(own.pem.as_str(), own.pem.as_str()),
            "key of a client certificate",
        ),
        (
            builder().client_certificate(own.pem.as_str(), strange.key),
            "client certificate with its key",
        ),
    ] {
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("invalid {what}: ")),
            "{what}: {error}"
        );
        assert!(
            error.contains("expected PEM") && !error.contains("BEGIN PRIVATE"),
            "{error}"
        );
    }
    builder()
        .root_certificates(ca.pem())
        .client_certificate(own.pem, own.key)
        .connect_lazy()
        .unwrap();
}

#[test]
fn an_invalid_name() {
    let error = builder()
        .server_name("not a name")
        .connect_lazy()
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("\"not a name\" is not a valid server name: "),
        "{error}"
    );
    builder().server_name("10.0.0.1").connect_lazy().unwrap();
}

/// Setting a certificate implies that encryption is expected.
#[test]
fn certificates_without_tls() {
    let ca = Authority::new().pem();
    for servers in [
        Servers::from("redis://127.0.0.1/"),
        Servers::from("redis+unix:///tmp/redis"),
        Servers::from("redis+cluster://a,b"),
        Servers::from("redis+sentinel://a,b/mymaster"),
    ] {
        let error = RedisStore::builder(servers)
            .root_certificates(ca.as_str())
            .connect_lazy()
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("does not use TLS: use `rediss://`"),
            "{error}"
        );
    }
    for servers in [
        Servers::from("rediss+cluster://a,b"),
        Servers::from("rediss+sentinel://a,b/mymaster"),
        Servers::sentinel("rediss://mymaster", ["redis://a:26379"]),
        Servers::sentinel("redis://mymaster", ["rediss://a:26379"]),
    ] {
        RedisStore::builder(servers)
            .root_certificates(ca.as_str())
            .connect_lazy()
            .unwrap();
    }
}

#[test]
fn a_key_is_not_shown() {
    let own = Authority::new().sign("service.example");
    let shown = format!(
        "{:?}",
        builder().client_certificate(own.pem, own.key.as_str())
    );
    assert!(
        shown.contains("client_certificate: true") && !shown.contains("PRIVATE"),
        "{shown}"
    );
}
