//! TLS, with the feature `tls`.

#[cfg(feature = "tls")]
pub(crate) use with::{Tls, check_client, check_roots, problem};
#[cfg(not(feature = "tls"))]
pub(crate) use without::{Tls, problem};

use crate::error::ConfigError;

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

    use redis::{
        Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, RedisError, TlsCertificates,
    };
    use rustls::crypto::{CryptoProvider, ring};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{self, CertificateDer, PrivateKeyDer};
    use rustls::sign::CertifiedKey;
    use rustls::{AlertDescription, CertificateError, RootCertStore};

    use crate::error::{ConfigError, ErrorKind};

    /// The type that redis-rs boxes a cause in.
    type Shared = Arc<dyn std::error::Error + Send + Sync>;

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
            let is_set = root_certificates.is_some()
                || client_certificate.is_some()
                || server_name.is_some();
            let is_tls =
                |server: &ConnectionInfo| matches!(server.addr(), ConnectionAddr::TcpTls { .. });
            if !servers.iter().any(|server| is_tls(server)) {
                return if is_set { Err(unused()) } else { Ok(()) };
            }
            prepare();
            if let Some(name) = server_name {
                let fix = "use a name such as `redis.example`, or an IP address";
                let wrong = |_| ConfigError::invalid("server name", name, fix);
                pki_types::ServerName::try_from(name.as_str()).map_err(wrong)?;
            }
            if root_certificates.is_none() && client_certificate.is_none() {
                return Ok(());
            }
            root_certificates.as_deref().map(check_roots).transpose()?;
            client_certificate
                .as_ref()
                .map(|(certificate, key)| check_client(certificate, key))
                .transpose()?;
            let certificates = TlsCertificates {
                client_tls: client_certificate.clone().map(|(client_cert, client_key)| {
                    ClientTlsConfig {
                        client_cert,
                        client_key,
                    }
                }),
                root_cert: root_certificates.clone(),
            };
            for server in servers.into_iter().filter(|server| is_tls(server)) {
                let client = Client::build_with_tls(server.clone(), certificates.clone());
                *server = client
                    .map_err(|error| wrong("TLS set-up", error))?
                    .get_connection_info()
                    .clone();
            }
            Ok(())
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
        let all: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<_, _>>()
            .map_err(|error| wrong(what, error))?;
        if all.is_empty() {
            Err(wrong(what, "it contains no certificate"))
        } else {
            Ok(all)
        }
    }

    pub(crate) fn check_roots(pem: &[u8]) -> Result<(), ConfigError> {
        let mut roots = RootCertStore::empty();
        let all = certificates("root certificate", pem)?;
        all.into_iter()
            .try_for_each(|root| roots.add(root))
            .map_err(|error| wrong("root certificate", error))
    }

    pub(crate) fn check_client(certificate: &[u8], key: &[u8]) -> Result<(), ConfigError> {
        let chain = certificates("client certificate", certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| wrong("key of a client certificate", error))?;
        let pair = CertifiedKey::from_der(chain, key, &ring::default_provider());
        pair.map(drop)
            .map_err(|error| wrong("client certificate with its key", error))
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
        let cause = error
            .source()
            .and_then(|cause| cause.downcast_ref::<Shared>());
        let io = cause.and_then(|cause| cause.downcast_ref::<io::Error>());
        let tls = io
            .and_then(io::Error::get_ref)
            .and_then(|cause| cause.downcast_ref::<rustls::Error>())?;
        Some(match tls {
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
    use redis::{ConnectionAddr, ConnectionInfo, RedisError};

    use crate::error::{ConfigError, ErrorKind};

    #[derive(Debug, Clone, Copy, Default)]
    pub(crate) struct Tls {}

    impl Tls {
        /// # Errors
        ///
        /// If a server uses TLS: another crate may have enabled it in redis-rs, but possibly
        /// without a crypto provider.
        pub(crate) fn apply(self, servers: Vec<&mut ConnectionInfo>) -> Result<(), ConfigError> {
            let is_tls =
                |server: &ConnectionInfo| matches!(server.addr(), ConnectionAddr::TcpTls { .. });
            if servers.into_iter().any(|server| is_tls(server)) {
                Err(super::no_tls())
            } else {
                Ok(())
            }
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
