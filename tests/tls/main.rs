//! TLS: it works with what an organization has of its own, wherever Redis is, and each thing that is wrong has its own advice.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "real servers take real time")]
#![allow(unreachable_pub, reason = "helpers of this binary")]

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "tls")]
mod files;
#[cfg(feature = "tls")]
mod settings;
#[cfg(feature = "tls")]
mod topologies;
#[cfg(feature = "tls")]
mod trust;
#[cfg(feature = "tls")]
mod with_tls;

#[cfg(not(feature = "tls"))]
#[tokio::test]
async fn without_the_feature_the_url_is_refused() {
    use tower_redis_ratelimit::{AnyStore, ConfigError, ErrorKind, RedisStore, StoreConfig};

    for url in ["rediss://127.0.0.1/", "rediss+cluster://127.0.0.1", "rediss+sentinel://127.0.0.1/mymaster"] {
        let error = RedisStore::connect_lazy(url).unwrap_err();
        assert_eq!(error, ConfigError::NoTls, "{url}");
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{url}");
        assert!(error.to_string().contains("turn on the feature `tls`"), "{error}");
    }
    let config = || {
        let mut config = StoreConfig::default();
        config.url = Some("redis://127.0.0.1/".to_owned());
        config
    };
    AnyStore::from_config(&config()).unwrap();
    let changes: [fn(&mut StoreConfig); 4] = [
        |config| config.root_certificates = Some("ca.pem".into()),
        |config| config.client_certificate = Some("client.pem".into()),
        |config| config.client_key = Some("client.key".into()),
        |config| config.server_name = Some("redis.internal".to_owned()),
    ];
    for change in changes {
        let mut config = config();
        change(&mut config);
        let error = AnyStore::from_config(&config).unwrap_err();
        assert!(error.to_string().contains("turn on the feature `tls`"), "{error}");
    }
}
