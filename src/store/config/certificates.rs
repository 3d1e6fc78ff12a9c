//! The certificates that settings name, by their files.

use crate::limit::ConfigError;
use crate::store::{RedisStore, StoreConfig};

#[cfg(feature = "tls")]
impl StoreConfig {
    /// The store of this URL.
    pub(super) fn connect_lazy(&self, url: &str) -> Result<RedisStore, ConfigError> {
        let mut builder = self.redis(url);
        if let Some(path) = &self.root_certificates {
            builder = builder.root_certificates(read("root_certificates", path)?);
        }
        let unpaired = |setting, without| Err(ConfigError::Unpaired { setting, without });
        match (&self.client_certificate, &self.client_key) {
            (Some(certificate), Some(key)) => {
                let certificate = read("client_certificate", certificate)?;
                builder = builder.client_certificate(certificate, read("client_key", key)?);
            }
            (Some(_), None) => return unpaired("client_certificate", "client_key"),
            (None, Some(_)) => return unpaired("client_key", "client_certificate"),
            (None, None) => {}
        }
        if let Some(name) = &self.server_name {
            builder = builder.server_name(name);
        }
        builder.connect_lazy().map_err(|error| self.located(error))
    }

    /// The same error with the file that it is in.
    fn located(&self, error: ConfigError) -> ConfigError {
        use crate::store::redis::{CLIENT_KEY, ROOT_CERTIFICATE};
        let ConfigError::Certificate { what, problem } = error else { return error };
        let file = match what {
            ROOT_CERTIFICATE => &self.root_certificates,
            CLIENT_KEY => &self.client_key,
            _ => &self.client_certificate,
        };
        let problem = file.as_ref().map_or(problem.clone(), |file| format!("{problem} (in {file:?})"));
        ConfigError::Certificate { what, problem }
    }
}

#[cfg(feature = "tls")]
fn read(setting: &'static str, path: &std::path::Path) -> Result<Vec<u8>, ConfigError> {
    let wrong = |error: std::io::Error| ConfigError::File { setting, path: path.into(), problem: error.to_string() };
    std::fs::read(path).map_err(wrong)
}

#[cfg(not(feature = "tls"))]
impl StoreConfig {
    /// The store of this URL.
    pub(super) fn connect_lazy(&self, url: &str) -> Result<RedisStore, ConfigError> {
        let Self { root_certificates, client_certificate, client_key, server_name, .. } = self;
        let files = [root_certificates, client_certificate, client_key];
        if server_name.is_some() || files.into_iter().any(Option::is_some) {
            return Err(ConfigError::NoTls);
        }
        self.redis(url).connect_lazy()
    }
}
