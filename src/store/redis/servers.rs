//! Where Redis is.

use std::fmt;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError};

use crate::limit::ConfigError;

/// Where Redis is: a single server, or a cluster. It is made of a URL.
///
/// | text | is |
/// |---|---|
/// | `redis://user:password@host:6379/0`, `redis+unix:///path` | a single server |
/// | `redis+cluster://user:password@host:6379,host:6380` | a cluster: any of its nodes, of which one must answer at the start |
///
/// With the feature `tls`, `rediss://` and `rediss+cluster://` speak TLS.
///
/// ```
/// use tower_redis_ratelimit::{RedisStore, Servers};
///
/// let store = RedisStore::connect_lazy("redis+cluster://10.0.0.1:6379,10.0.0.2:6379")?;
/// // The same, and what `RedisStore::cluster` does.
/// let servers = Servers::cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"]);
/// let store = RedisStore::builder(servers).connect_lazy()?;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// `Debug` shows addresses and no password.
#[derive(Clone)]
pub struct Servers(Result<Kind, ConfigError>);

#[derive(Clone)]
pub(super) enum Kind {
    Server(Box<ConnectionInfo>),
    /// At least one.
    Cluster(Vec<ConnectionInfo>),
}

impl Servers {
    /// A Redis Cluster, by the URLs of some of its nodes: any that answers tells of the others. User, password and TLS are
    /// those of the first URL, for all nodes.
    pub fn cluster<U: IntoConnectionInfo>(nodes: impl IntoIterator<Item = U>) -> Self {
        Self(cluster(nodes.into_iter().map(|node| node.into_connection_info().map_err(url_error))))
    }

    pub(super) fn into_kind(self) -> Result<Kind, ConfigError> {
        self.0
    }

    fn of_text(text: &str) -> Self {
        let of_cluster = |scheme, rest| Self(nodes(scheme, rest).and_then(cluster_of_urls));
        match text.split_once("+cluster://") {
            Some((scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), rest)) => of_cluster(scheme, rest),
            _ => Self(text.into_connection_info().map(|server| Kind::Server(Box::new(server))).map_err(url_error)),
        }
    }
}

/// The URL of each node in `user:password@host:port,host:port/?query`.
fn nodes(scheme: &str, rest: &str) -> Result<Vec<String>, ConfigError> {
    // A password may have any of these characters only if they are escaped.
    let (authority, query) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, hosts) = authority.rsplit_once('@').map_or(("", authority), |(user, hosts)| (user, hosts));
    let at = if user.is_empty() { "" } else { "@" };
    if hosts.split(',').any(str::is_empty) {
        return Err(ConfigError::RedisUrl("it names no host, or has one comma too many".to_owned()));
    }
    Ok(hosts.split(',').map(|host| format!("{scheme}://{user}{at}{host}{query}")).collect())
}

fn cluster_of_urls(urls: Vec<String>) -> Result<Kind, ConfigError> {
    cluster(urls.into_iter().map(|url| url.into_connection_info().map_err(url_error)))
}

fn cluster(nodes: impl Iterator<Item = Result<ConnectionInfo, ConfigError>>) -> Result<Kind, ConfigError> {
    let nodes: Vec<_> = nodes.collect::<Result<_, _>>()?;
    let wrong = |what: &str| Err(ConfigError::RedisUrl(what.to_owned()));
    if nodes.is_empty() {
        wrong("a cluster needs the address of at least one of its nodes")
    } else if nodes.iter().any(|node| matches!(node.addr(), ConnectionAddr::Unix(_))) {
        wrong("the nodes of a cluster have no unix sockets")
    } else if nodes.iter().any(|node| node.redis_settings().db() != 0) {
        wrong("a cluster has no database but 0")
    } else {
        Ok(Kind::Cluster(nodes))
    }
}

impl From<&str> for Servers {
    fn from(url: &str) -> Self {
        Self::of_text(url)
    }
}

impl From<String> for Servers {
    fn from(url: String) -> Self {
        Self::of_text(&url)
    }
}

impl From<&String> for Servers {
    fn from(url: &String) -> Self {
        Self::of_text(url)
    }
}

impl From<ConnectionInfo> for Servers {
    fn from(server: ConnectionInfo) -> Self {
        Self(Ok(Kind::Server(Box::new(server))))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = match &self.0 {
            Ok(Kind::Server(server)) => std::slice::from_ref(&**server),
            Ok(Kind::Cluster(nodes)) => nodes,
            Err(_) => return f.write_str("unreadable"),
        };
        let mut between = "";
        for node in nodes {
            write!(f, "{between}{}", node.addr())?;
            between = ",";
        }
        Ok(())
    }
}

/// What redis-rs has against a URL.
pub(super) fn url_error(error: RedisError) -> ConfigError {
    match error.to_string() {
        // The words of a redis-rs without TLS.
        text if text.contains("TLS") && text.contains("feature is not enabled") => ConfigError::NoTls,
        text => ConfigError::RedisUrl(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_its_nodes() {
        for (url, addresses) in [
            ("redis+cluster://a", "a:6379"),
            ("redis+cluster://a:1,b:2", "a:1,b:2"),
            ("redis+cluster://user:pa,ss@a:1,[::1]:2/?protocol=resp3", "a:1,::1:2"),
            ("valkey+cluster://:p@a:1,b/0", "a:1,b:6379"),
        ] {
            let servers = Servers::from(url);
            assert_eq!(format!("{servers:?}"), addresses, "{url}");
            let Ok(Kind::Cluster(nodes)) = servers.into_kind() else { panic!("{url}") };
            let (user, password) = (nodes[0].redis_settings().username(), nodes[0].redis_settings().password());
            assert_eq!(user, url.contains("user").then_some("user"), "{url}");
            assert_eq!(password.is_some(), url.contains('@'), "{url}");
        }
        let one = Servers::cluster(["redis://a:1", "redis://b:2"]);
        assert_eq!(format!("{one:?}"), format!("{:?}", Servers::from("redis+cluster://a:1,b:2")));
    }

    #[test]
    fn what_is_no_cluster_is_refused() {
        let none: [&str; 0] = [];
        for servers in [
            Servers::from("redis+cluster://"),
            Servers::from("redis+cluster://a:1,,b:1"),
            Servers::from("redis+cluster://a:1,b:port"),
            Servers::from("redis+cluster://user:hunter2@a:1/7"),
            Servers::from("http+cluster://a:1"),
            Servers::cluster(none),
            Servers::cluster(["redis+unix:///tmp/redis"]),
            Servers::cluster(["redis://:hunter2@a/3"]),
        ] {
            let error = servers.into_kind().map(drop).unwrap_err();
            assert!(matches!(error, ConfigError::RedisUrl(_)) && !error.to_string().contains("hunter2"), "{error}");
        }
    }
}
