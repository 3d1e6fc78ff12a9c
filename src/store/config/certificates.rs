//! Reads the certificate files that settings name.
//!
//! [`RedisStoreBuilder`] takes certificates as bytes, since a program may get them from a secret
//! manager. [`set_tls`] checks the bytes of each file first, so that its errors name the file.

#[cfg(feature = "tls")]
use std::path::{Path, PathBuf};

use super::StoreConfig;
use crate::error::ConfigError;
#[cfg(feature = "tls")]
use crate::error::redacted;
use crate::store::RedisStoreBuilder;
#[cfg(not(feature = "tls"))]
use crate::store::redis::no_tls;
#[cfg(feature = "tls")]
use crate::store::redis::{check_client, check_roots};

/// Sets the TLS settings of a store.
#[cfg(feature = "tls")]
pub(in crate::store) fn set_tls(
    mut builder: RedisStoreBuilder,
    config: &StoreConfig,
) -> Result<RedisStoreBuilder, ConfigError> {
    if let Some(path) = &config.root_certificates {
        let pem = read("root_certificates", path)?;
        // Here, since the builder does not know the path for its error.
        if let Err(error) = check_roots(&pem) {
            return Err(in_files(&[path], &error));
        }
        builder = builder.root_certificates(pem);
    }
    match (&config.client_certificate, &config.client_key) {
        (Some(certificate), Some(key)) => {
            let certificate_pem = read("client_certificate", certificate)?;
            let key_pem = read("client_key", key)?;
            if let Err(error) = check_client(&certificate_pem, &key_pem) {
                return Err(in_files(&[certificate, key], &error));
            }
            builder = builder.client_certificate(certificate_pem, key_pem);
        }
        // A certificate is no proof without its key.
        (Some(_), None) => return Err(unpaired("client_certificate", "client_key")),
        (None, Some(_)) => return Err(unpaired("client_key", "client_certificate")),
        (None, None) => {}
    }
    if let Some(name) = &config.server_name {
        builder = builder.server_name(name);
    }
    Ok(builder)
}

/// Rejects TLS settings, which require the feature `tls`.
#[cfg(not(feature = "tls"))]
pub(in crate::store) fn set_tls(
    builder: RedisStoreBuilder,
    config: &StoreConfig,
) -> Result<RedisStoreBuilder, ConfigError> {
    let StoreConfig {
        root_certificates,
        client_certificate,
        client_key,
        server_name,
        ..
    } = config;
    // Ignored, they would leave a connection without TLS.
    let files = [root_certificates, client_certificate, client_key];
    if server_name.is_some() || files.into_iter().any(Option::is_some) {
        return Err(no_tls());
    }
    Ok(builder)
}

#[cfg(feature = "tls")]
fn unpaired(setting: &str, without: &str) -> ConfigError {
    ConfigError::new(format!(
        "`{setting}` is set without `{without}`: set both or neither"
    ))
}

/// Prefixes an error with the paths of the files that caused it.
#[cfg(feature = "tls")]
fn in_files(paths: &[&PathBuf], error: &ConfigError) -> ConfigError {
    let paths: Vec<_> = paths.iter().map(|path| shown(path)).collect();
    ConfigError::new(format!("{}: {error}", paths.join(" and ")))
}

#[cfg(feature = "tls")]
fn read(setting: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path).map_err(|error| {
        let path = shown(path);
        ConfigError::new(format!(
            "cannot read the file {path} of `{setting}` ({error}): use the path of a file that this process may read"
        ))
    })
}

/// Formats a path, which may be a private key by mistake.
#[cfg(feature = "tls")]
fn shown(path: &Path) -> String {
    format!("{:?}", redacted(&path.to_string_lossy()))
}
