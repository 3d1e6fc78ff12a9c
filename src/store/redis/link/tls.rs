//! TLS, with the feature `tls`.

#[cfg(feature = "tls")]
pub(crate) use with::{Tls, check_client, check_roots, problem};
#[cfg(not(feature = "tls"))]
pub(crate) use without::{Tls, problem};

use redis::{ConnectionAddr, ConnectionInfo};

use crate::error::ConfigError;

fn is_tls(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { .. })
}

pub(in crate::store) fn no_tls() -> ConfigError {
    ConfigError::new(
        "TLS support is not compiled in: enable the feature `tls` of tower-redis-ratelimit",
    )
}

#[cfg(feature = "tls")]
mod with {
    use std::error::Error as _;
    use std::sync::Arc;
    use std::{fmt, io};

    use redis::{Client, ClientTlsConfig, ConnectionInfo, RedisError, TlsCertificates};
    use rustls::crypto::{CryptoProvider, ring};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{self, CertificateDer, PrivateKeyDer};
    use rustls::sign::CertifiedKey;
    use rustls::{AlertDescription, CertificateError, RootCertStore};

    use super::is_tls;
    use crate::error::{ConfigError, ErrorKind};

    /// The type that redis-rs boxes a cause in.
    type SharedError = Arc<dyn std::error::Error + Send + Sync>;

    /// The application's settings. Certificates and keys are in PEM.
    #[derive(Clone, Default)]
    pub(crate) struct Tls {
        pub(crate) root_certificates: Option<Vec<u8>>,
        /// The certificate, and its key.
        pub(crate) client_certificate: Option<(Vec<u8>, Vec<u8>)>,
        pub(crate) server_name: Option<String>,
    }

    impl Tls {
        /// Applies the settings to the servers that use TLS.
        ///
        /// # Errors
        ///
        /// For an invalid certificate or server name, and if there are TLS settings but no server
        /// uses TLS.
        pub(crate) fn apply(&self, servers: Vec<&mut ConnectionInfo>) -> Result<(), ConfigError> {
            let Self {
                root_certificates,
                client_certificate,
                server_name,
            } = self;
            let has_certificates = root_certificates.is_some() || client_certificate.is_some();
            if !servers.iter().any(|server| is_tls(server)) {
                if has_certificates || server_name.is_some() {
                    return Err(unused());
                }
                return Ok(());
            }
            prepare();
            if let Some(name) = server_name
                && pki_types::ServerName::try_from(name.as_str()).is_err()
            {
                let fix = "use a name such as `redis.example`, or an IP address";
                return Err(ConfigError::invalid("server name", name, fix));
            }
            if !has_certificates {
                return Ok(());
            }
            if let Some(roots) = root_certificates {
                check_roots(roots)?;
            }
            let certificates = TlsCertificates {
                root_cert: root_certificates.clone(),
                client_tls: self.client_tls()?,
            };
            for server in servers {
                if is_tls(server) {
                    let client = Client::build_with_tls(server.clone(), certificates.clone())
                        .map_err(|error| wrong("TLS set-up", error))?;
                    *server = client.get_connection_info().clone();
                }
            }
            Ok(())
        }

        fn client_tls(&self) -> Result<Option<ClientTlsConfig>, ConfigError> {
            let Some((certificate, key)) = &self.client_certificate else {
                return Ok(None);
            };
            check_client(certificate, key)?;
            Ok(Some(ClientTlsConfig {
                client_cert: certificate.clone(),
                client_key: key.clone(),
            }))
        }

        pub(crate) fn server_name(&self) -> Option<String> {
            self.server_name.clone()
        }
    }

    fn wrong(what: &str, problem: impl fmt::Display) -> ConfigError {
        ConfigError::new(format!(
            "invalid {what}: {problem}; expected PEM, which begins with `-----BEGIN`"
        ))
    }

    fn unused() -> ConfigError {
        ConfigError::new(
            "certificates or a server name are set, but the Redis URL does not use TLS: use `rediss://` instead of \
             `redis://`, or remove them",
        )
    }

    fn certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
        let mut all = vec![];
        for certificate in CertificateDer::pem_slice_iter(pem) {
            all.push(certificate.map_err(|error| wrong(what, error))?);
        }
        if all.is_empty() {
            return Err(wrong(what, "it contains no certificate"));
        }
        Ok(all)
    }

    pub(crate) fn check_roots(pem: &[u8]) -> Result<(), ConfigError> {
        let what = "root certificate";
        let mut roots = RootCertStore::empty();
        for root in certificates(what, pem)? {
            roots.add(root).map_err(|error| wrong(what, error))?;
        }
        Ok(())
    }

    pub(crate) fn check_client(certificate: &[u8], key: &[u8]) -> Result<(), ConfigError> {
        let chain = certificates("client certificate", certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| wrong("key of a client certificate", error))?;
        match CertifiedKey::from_der(chain, key, &ring::default_provider()) {
            Ok(_) => Ok(()),
            Err(error) => Err(wrong("client certificate with its key", error)),
        }
    }

    impl fmt::Debug for Tls {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let Self {
                root_certificates,
                client_certificate,
                server_name,
            } = self;
            f.debug_struct("Tls")
                .field("root_certificates", &root_certificates.is_some())
                .field("client_certificate", &client_certificate.is_some())
                .field("server_name", server_name)
                .finish()
        }
    }

    /// Installs a crypto provider if the process has none; otherwise redis-rs would panic on
    /// connect.
    fn prepare() {
        if CryptoProvider::get_default().is_none() {
            // Fails if another thread has installed one since.
            let _ = ring::default_provider().install_default();
        }
    }

    /// Returns the kind of a TLS error, or `None` if the error has another cause.
    pub(crate) fn problem(error: &RedisError) -> Option<ErrorKind> {
        let cause = error.source()?.downcast_ref::<SharedError>()?;
        let cause = cause.downcast_ref::<io::Error>()?.get_ref()?;
        Some(match cause.downcast_ref::<rustls::Error>()? {
            rustls::Error::InvalidCertificate(problem) => match problem {
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. } => ErrorKind::CertificateExpired,
                CertificateError::NotValidForName
                | CertificateError::NotValidForNameContext { .. } => ErrorKind::CertificateMismatch,
                _ => ErrorKind::CertificateUntrusted,
            },
            rustls::Error::AlertReceived(
                AlertDescription::CertificateRequired
                | AlertDescription::NoCertificate
                | AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
                | AlertDescription::DecryptError
                | AlertDescription::AccessDenied,
            ) => ErrorKind::ClientCertificate,
            _ => ErrorKind::Tls,
        })
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use redis::{ConnectionInfo, RedisError};

    use super::is_tls;
    use crate::error::{ConfigError, ErrorKind};

    #[derive(Debug, Clone, Copy, Default)]
    pub(crate) struct Tls {}

    impl Tls {
        /// # Errors
        ///
        /// If a server uses TLS: another crate may have enabled it in redis-rs, but possibly
        /// without a crypto provider.
        pub(crate) fn apply(self, servers: Vec<&mut ConnectionInfo>) -> Result<(), ConfigError> {
            if servers.into_iter().any(|server| is_tls(server)) {
                return Err(super::no_tls());
            }
            Ok(())
        }

        pub(crate) fn server_name(self) -> Option<String> {
            None
        }
    }

    pub(crate) fn problem(_: &RedisError) -> Option<ErrorKind> {
        None
    }
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use rustls::crypto::CryptoProvider;

    use crate::store::RedisStore;

    /// Rustls chooses a provider on its own only if the build has exactly one.
    #[test]
    fn a_store_brings_cryptography() {
        RedisStore::connect_lazy("rediss://127.0.0.1/").unwrap();
        assert!(CryptoProvider::get_default().is_some());
    }
}
