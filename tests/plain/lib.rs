//! Tests of the crate without any of its features.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod unobserved;

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{AnyStore, ErrorKind, StoreConfig};

#[tokio::test]
async fn tls_without_its_feature_is_refused() {
    for url in [
        "rediss://127.0.0.1/",
        "rediss+cluster://127.0.0.1",
        "rediss+sentinel://127.0.0.1/mymaster",
    ] {
        let error = RedisStore::connect_lazy(url).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("TLS support is not compiled in: "),
            "{url}: {error}"
        );
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{url}");
        assert!(
            error.to_string().contains("enable the feature `tls`"),
            "{error}"
        );
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
        assert!(
            error.to_string().contains("enable the feature `tls`"),
            "{error}"
        );
    }
}
