//! The certificates that settings name, by their files.

#[cfg(feature = "tls")]
mod with {
    use std::fs;
    use std::path::Path;

    use crate::limit::ConfigError;
    use crate::store::redis::{CLIENT_KEY, ROOT_CERTIFICATE, RedisStoreBuilder};
    use crate::store::{RedisStore, StoreConfig};

    impl StoreConfig {
        /// The store of this URL.
        pub(in super::super) fn connect_lazy(&self, url: &str) -> Result<RedisStore, ConfigError> {
            self.with_certificates(self.redis(url))?.connect_lazy().map_err(|error| self.located(error))
        }

        fn with_certificates(&self, mut builder: RedisStoreBuilder) -> Result<RedisStoreBuilder, ConfigError> {
            if let Some(path) = &self.root_certificates {
                builder = builder.root_certificates(read("root_certificates", path)?);
            }
            builder = match (&self.client_certificate, &self.client_key) {
                (None, None) => builder,
                (Some(certificate), Some(key)) => {
                    builder.client_certificate(read("client_certificate", certificate)?, read("client_key", key)?)
                }
                (Some(_), None) => {
                    return Err(ConfigError::Unpaired { setting: "client_certificate", without: "client_key" });
                }
                (None, Some(_)) => {
                    return Err(ConfigError::Unpaired { setting: "client_key", without: "client_certificate" });
                }
            };
            Ok(match &self.server_name {
                Some(name) => builder.server_name(name),
                None => builder,
            })
        }

        /// The same error with the file that it is in.
        fn located(&self, error: ConfigError) -> ConfigError {
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

    fn read(setting: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
        fs::read(path).map_err(|error| ConfigError::File { setting, path: path.to_owned(), problem: error.to_string() })
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use crate::limit::ConfigError;
    use crate::store::{RedisStore, StoreConfig};

    impl StoreConfig {
        /// The store of this URL.
        pub(in super::super) fn connect_lazy(&self, url: &str) -> Result<RedisStore, ConfigError> {
            let Self { root_certificates, client_certificate, client_key, server_name, .. } = self;
            let files = [root_certificates, client_certificate, client_key];
            if server_name.is_some() || files.into_iter().any(Option::is_some) {
                return Err(ConfigError::NoTls);
            }
            self.redis(url).connect_lazy()
        }
    }
}
