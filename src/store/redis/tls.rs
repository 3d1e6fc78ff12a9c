//! TLS, with the feature `tls`.

#[cfg(feature = "tls")]
pub(super) use with::{prepare, refused};
#[cfg(not(feature = "tls"))]
pub(super) use without::{prepare, refused};

#[cfg(feature = "tls")]
mod with {
    use std::error::Error as _;
    use std::io;
    use std::sync::Arc;

    use redis::RedisError;
    use rustls::crypto::{CryptoProvider, ring};

    use crate::limit::ConfigError;

    /// What redis-rs keeps of a cause.
    type Shared = Arc<dyn std::error::Error + Send + Sync>;

    /// Makes sure that the process has a crypto provider: without one redis-rs would panic when it connects.
    ///
    /// # Errors
    ///
    /// None: it is without the feature that there are any.
    pub(in super::super) fn prepare() -> Result<(), ConfigError> {
        if CryptoProvider::get_default().is_none() {
            // Another thread may have been faster.
            let _ = ring::default_provider().install_default();
        }
        Ok(())
    }

    /// Whether the TLS of a connection is at fault.
    pub(in super::super) fn refused(error: &RedisError) -> bool {
        let cause = error.source().and_then(|cause| cause.downcast_ref::<Shared>());
        let io = cause.and_then(|cause| cause.downcast_ref::<io::Error>());
        io.and_then(io::Error::get_ref).is_some_and(|cause| cause.is::<rustls::Error>())
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use redis::RedisError;

    use crate::limit::ConfigError;

    /// # Errors
    ///
    /// [`ConfigError::NoTls`]: somebody else may have built redis-rs with TLS, but perhaps without cryptography.
    pub(in super::super) fn prepare() -> Result<(), ConfigError> {
        Err(ConfigError::NoTls)
    }

    pub(in super::super) fn refused(_: &RedisError) -> bool {
        false
    }
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use rustls::crypto::CryptoProvider;

    use crate::store::RedisStore;

    /// Rustls finds one by itself only where no other crate of the build brings another.
    #[test]
    fn a_store_brings_cryptography() {
        RedisStore::connect_lazy("rediss://127.0.0.1/").unwrap();
        assert!(CryptoProvider::get_default().is_some());
    }
}
