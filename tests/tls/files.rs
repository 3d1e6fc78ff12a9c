//! Certificates from files, as named in a configuration.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tower_redis_ratelimit::store::{AnyStore, ErrorKind, Store, StoreConfig, StoreKind};

use crate::support::check;
use crate::with_tls::{Authority, TlsServer};

/// A temporary folder for files.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> Option<PathBuf> {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        Some(path)
    }
}

fn config(url: impl Into<String>) -> StoreConfig {
    let mut config = StoreConfig::default();
    config.kind = StoreKind::Redis;
    config.url = Some(url.into());
    config.timeout = Duration::from_secs(20);
    config
}

/// Returns the error for an invalid configuration.
fn refused(config: &StoreConfig) -> String {
    let error = AnyStore::from_config(config).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error:?}");
    error.to_string()
}

#[tokio::test]
async fn configured_stores_connect_with_their_files() {
    let (ca, folder) = (Authority::new(), Folder::new());
    let server = TlsServer::start_with(&ca, &ca.sign("redis.internal"), &[]);
    let own = ca.sign("service.example");
    let mut config = config(server.url());
    config.root_certificates = folder.write("ca.pem", &ca.pem());
    config.client_certificate = folder.write("client.pem", &own.pem);
    config.client_key = folder.write("client.key", &own.key);
    config.server_name = Some("redis.internal".to_owned());
    let decide = async |config: &StoreConfig| {
        AnyStore::from_config(config)
            .unwrap()
            .check(check("ann", "10/s"))
            .await
    };
    assert!(decide(&config).await.unwrap().is_allowed());

    // Each of the files is needed.
    let without = |change: fn(&mut StoreConfig)| {
        let mut config = config.clone();
        change(&mut config);
        config
    };
    for (config, kind) in [
        (
            without(|config| config.root_certificates = None),
            ErrorKind::CertificateUntrusted,
        ),
        (
            without(|config| (config.client_certificate, config.client_key) = (None, None)),
            ErrorKind::ClientCertificate,
        ),
        (
            without(|config| config.server_name = None),
            ErrorKind::CertificateMismatch,
        ),
    ] {
        let error = decide(&config).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
    }
}

#[test]
fn errors_name_the_file() {
    let (ca, folder) = (Authority::new(), Folder::new());
    let (own, strange) = (
        ca.sign("service.example"),
        Authority::new().sign("service.example"),
    );
    let (certificate, key) = (
        folder.write("client.pem", &own.pem),
        folder.write("client.key", &own.key),
    );
    let (other, none) = (
        folder.write("other.key", &strange.key),
        folder.write("none.pem", "no PEM"),
    );
    let missing = Some(folder.0.path().join("missing.pem"));
    for (roots, certificate, key, texts) in [
        (
            &missing,
            &None,
            &None,
            [
                "missing.pem\" of `root_certificates` (",
                "this process may read",
            ],
        ),
        (
            &None,
            &missing,
            &key,
            [
                "missing.pem\" of `client_certificate` (",
                "this process may read",
            ],
        ),
        (
            &None,
            &certificate,
            &missing,
            ["missing.pem\" of `client_key` (", "this process may read"],
        ),
        (
            &None,
            &certificate,
            &None,
            [
                "`client_certificate` is set without `client_key`",
                "set both or neither",
            ],
        ),
        (
            &None,
            &None,
            &key,
            [
                "`client_key` is set without `client_certificate`",
                "set both or neither",
            ],
        ),
        (
            &none,
            &None,
            &None,
            ["none.pem\": invalid root certificate", "expected PEM"],
        ),
        (
            &None,
            &none,
            &key,
            ["none.pem\" and \"", "invalid client certificate"],
        ),
        (
            &None,
            &certificate,
            &none,
            [
                "none.pem\": invalid key of a client certificate",
                "expected PEM",
            ],
        ),
        (
            &None,
            &certificate,
            &other,
            [
                "client.pem\" and \"",
                "other.key\": invalid client certificate with its key",
            ],
        ),
    ] {
        let mut config = config("rediss://127.0.0.1/");
        (config.root_certificates, config.client_certificate) =
            (roots.clone(), certificate.clone());
        config.client_key = key.clone();
        let error = refused(&config);
        assert!(
            texts.iter().all(|text| error.contains(text)),
            "{error} lacks one of {texts:?}"
        );
    }
}

/// A PEM in place of its file's path.
#[test]
fn errors_show_no_key() {
    let (own, folder) = (Authority::new().sign("service.example"), Folder::new());
    let certificate = folder.write("client.pem", &own.pem);
    let mut config = config("rediss://127.0.0.1/");
    (config.client_certificate, config.client_key) = (certificate, Some(own.key.clone().into()));
    let error = refused(&config);
    assert!(
        error.contains("cannot read the file \"-----BEGIN\u{2026}\" of `client_key` ("),
        "{error}"
    );
    let line = own.key.lines().nth(1).unwrap();
    for text in [error, format!("{config:?}")] {
        assert!(!text.contains(line) && !text.contains("PRIVATE"), "{text}");
    }
}

#[test]
fn tls_settings_need_a_tls_url() {
    let folder = Folder::new();
    let mut config = config("redis://127.0.0.1/");
    config.root_certificates = folder.write("ca.pem", &Authority::new().pem());
    assert!(refused(&config).contains("use `rediss://`"));
    // A local store does not read the files.
    config.kind = StoreKind::Local;
    config.root_certificates = Some("missing.pem".into());
    AnyStore::from_config(&config).unwrap();
}
