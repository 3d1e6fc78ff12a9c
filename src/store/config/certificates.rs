//! Reads the certificate files that settings name.

#[cfg(feature = "tls")]
use std::path::PathBuf;

use crate::error::ConfigError;
#[cfg(not(feature = "tls"))]
use crate::store::redis::no_tls;
#[cfg(feature = "tls")]
use crate::store::redis::{check_client, check_roots};
use crate::store::{RedisStore, StoreConfig};

#[cfg(feature = "tls")]
impl StoreConfig {
    /// Creates the store of this URL.
    pub(super) fn connect_lazy(&self, url: &str) -> Result<RedisStore, ConfigError> {
        let mut builder = self.redis(url);
        if let Some(path) = &self.root_certificates {
            let pem = read("root_certificates", path)?;
            check_roots(&pem).map_err(|error| in_files(&[path], &error))?;
            builder = builder.root_certificates(pem);
        }
        let unpaired = |setting, without| {
            Err(ConfigError::new(format!(
                "`{setting}` is set without `{without}`: set both or neither"
            )))
        };
        match (&self.client_certificate, &self.client_key) {
            (Some(certificate), Some(key)) => {
                let pem = (
                    read("client_certificate", certificate)?,
                    read("client_key", key)?,
                );
                check_client(&pem.0, &pem.1)
                    .map_err(|error| in_files(&[certificate, key], &error))?;
                builder = builder.client_certificate(pem.0, pem.1);
            }
            (Some(_), None) => return unpaired("client_certificate", "client_key"),
            (None, Some(_)) => return unpaired("client_key", "client_certificate"),
            (None, None) => {}
        }
        if let Some(name) = &self.server_name {
            builder = builder.server_name(name);
        }
        builder.connect_lazy()
    }
}

/// Prefixes an error with the paths of the files that caused it.
#[cfg(feature = "tls")]
fn in_files(paths: &[&PathBuf], error: &ConfigError) -> ConfigError {
    let paths: Vec<_> = paths.iter().map(|path| format!("{path:?}")).collect();
    ConfigError::new(format!("{}: {error}", paths.join(" and ")))
}

#[cfg(feature = "tls")]
fn read(setting: &'static str, path: &std::path::Path) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path).map_err(|error| {
        ConfigError::new(format!(
            "cannot read the file {path:?} of `{setting}` ({error}): use the path of a file that this process may read"
        ))
    })
}

#[cfg(not(feature = "tls"))]
impl StoreConfig {
    /// Creates the store of this URL.
    pub(super) fn connect_lazy(&self, url: &str) -> Result<RedisStore, ConfigError> {
        let Self {
            root_certificates,
            client_certificate,
            client_key,
            server_name,
            ..
        } = self;
        let files = [root_certificates, client_certificate, client_key];
        if server_name.is_some() || files.into_iter().any(Option::is_some) {
            return Err(no_tls());
        }
        self.redis(url).connect_lazy()
    }
}
