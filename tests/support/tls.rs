//! Servers with certificates that the test creates.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use crate::support::{RedisServer, free_port};

/// A certificate authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
pub struct Certificate {
    pub pem: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Without a distinct name, OpenSSL would consider each issued certificate self-signed.
        params
            .distinguished_name
            .push(DnType::CommonName, "an authority");
        Self {
            issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
        }
    }

    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    pub fn sign(&self, host: &str) -> Certificate {
        self.sign_with(host, |_| {})
    }

    pub fn sign_with(&self, host: &str, change: impl Fn(&mut CertificateParams)) -> Certificate {
        let mut params = CertificateParams::new([host.to_owned()]).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        Certificate {
            pem: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }
}

/// A server that serves TLS on one port, and plain connections on another.
pub struct TlsServer {
    pub server: RedisServer,
    pub port: u16,
    _files: Files,
}

/// The TLS settings of a server, and the files that they name.
pub struct Files {
    pub settings: Vec<[String; 2]>,
    _dir: TempDir,
}

impl Files {
    pub fn new(authority: &Authority, certificate: &Certificate) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            fs::write(dir.path().join(name), text).unwrap();
            [
                format!("tls-{name}-file"),
                dir.path().join(name).to_str().unwrap().to_owned(),
            ]
        };
        let settings = vec![
            write("cert", &certificate.pem),
            write("key", &certificate.key),
            write("ca-cert", &authority.pem()),
        ];
        Self {
            settings,
            _dir: dir,
        }
    }
}

impl TlsServer {
    /// Starts a server that requires no client certificates.
    pub fn start(authority: &Authority, host: &str) -> Self {
        Self::start_with(
            authority,
            &authority.sign(host),
            &["--tls-auth-clients", "no"],
        )
    }

    pub fn start_with(authority: &Authority, certificate: &Certificate, more: &[&str]) -> Self {
        let (files, port) = (Files::new(authority, certificate), free_port());
        let mut args = vec!["--tls-port".to_owned(), port.to_string()];
        for [name, value] in &files.settings {
            args.extend([format!("--{name}"), value.clone()]);
        }
        args.extend(more.iter().map(|text| (*text).to_owned()));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Self {
            server: RedisServer::start_with(&args),
            port,
            _files: files,
        }
    }

    pub fn url(&self) -> String {
        format!("rediss://127.0.0.1:{}/", self.port)
    }
}
