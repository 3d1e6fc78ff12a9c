//! The logins whose credentials change: that of the servers with counts, and that of the sentinels.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use redis::ConnectionInfo;

use super::NamedServers;
use crate::store::redis::credentials::CredentialSource;
use crate::store::redis::link::Login;

/// The sources of credentials that change.
#[derive(Debug, Clone, Default)]
pub(in crate::store::redis) struct CredentialSources {
    /// The source for all servers with counts.
    pub(in crate::store::redis) servers: Option<CredentialSource>,
    pub(in crate::store::redis) sentinels: Option<CredentialSource>,
}

pub(in crate::store::redis) struct Logins {
    pub(in crate::store::redis) servers: Option<Arc<Login>>,
    pub(super) sentinels: Option<Arc<Login>>,
}

impl CredentialSources {
    /// Verifies that the URL has no login that a source has too, and no user without a password.
    ///
    /// # Errors
    ///
    /// The problem of the URL.
    pub(in crate::store::redis) fn check(&self, named: &NamedServers) -> Result<(), &'static str> {
        if self.sentinels.is_some() && !matches!(named, NamedServers::Sentinel { .. }) {
            return Err(
                "it names no sentinels, and their credentials are set: use `redis+sentinel://`, or remove them",
            );
        }
        match named {
            NamedServers::Server(server) => {
                check_login(self.servers.as_ref(), slice::from_ref(server))
            }
            NamedServers::Sentinel {
                master, sentinels, ..
            } => {
                check_login(self.servers.as_ref(), slice::from_ref(master))?;
                check_login(self.sentinels.as_ref(), sentinels)
            }
            NamedServers::Cluster(nodes) => check_login(self.servers.as_ref(), nodes),
        }
    }
}

fn check_login(
    source: Option<&CredentialSource>,
    servers: &[ConnectionInfo],
) -> Result<(), &'static str> {
    for server in servers {
        let has_user = !user(server).is_empty();
        let has_password = server.redis_settings().password().is_some();
        match source {
            // Redis-rs would not log in.
            None if has_user && !has_password => {
                return Err(
                    "it has a user and no password: put a colon before a password alone, as in `redis://:password@host`, or \
                     add the user's password",
                );
            }
            Some(CredentialSource::Closure(_)) if has_user || has_password => {
                return Err(
                    "it has a user or a password, and so has the closure of `RedisStoreBuilder::credentials`: remove the \
                     login from the URL",
                );
            }
            Some(CredentialSource::File(_)) if has_password => {
                return Err(
                    "it has a password, and so has the password file: remove the password from the URL",
                );
            }
            _ => {}
        }
    }
    Ok(())
}

fn user(server: &ConnectionInfo) -> &str {
    server.redis_settings().username().unwrap_or_default()
}

impl Logins {
    pub(in crate::store::redis) fn new(
        sources: CredentialSources,
        named: &NamedServers,
        time_to_connect: Duration,
    ) -> Self {
        let login = |source: Option<CredentialSource>, server: &ConnectionInfo| {
            source.map(|source| Login::new(source, user(server), time_to_connect))
        };
        match named {
            NamedServers::Server(server) => Self {
                servers: login(sources.servers, server),
                sentinels: None,
            },
            NamedServers::Sentinel {
                master, sentinels, ..
            } => Self {
                servers: login(sources.servers, master),
                sentinels: login(sources.sentinels, &sentinels[0]),
            },
            NamedServers::Cluster(nodes) => Self {
                servers: login(sources.servers, &nodes[0]),
                sentinels: None,
            },
        }
    }
}
