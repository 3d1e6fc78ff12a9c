//! The addresses of Redis.

use std::fmt;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError};

use super::link::no_tls;
use super::topology::Kind;
use crate::error::ConfigError;

/// The addresses of Redis: a single server, the master that sentinels report, or a cluster. Created
/// from a URL.
///
/// | text | servers |
/// |---|---|
/// | `redis://user:password@host:6379/0`, `redis+unix:///path` | a single server |
/// | `redis+cluster://user:password@host:6379,host:6380` | a cluster, by any of its nodes; one of them must respond at startup |
/// | `redis+sentinel://user:password@host:26379,host:26380/mymaster/0` | the master of this name, with its user, password and database, by all of its sentinels |
///
/// In a user or password, write `/` as `%2F`, `?` as `%3F`, `#` as `%23` and `@` as `%40`.
///
/// Each may end with `?prefix=shop`: the [prefix](crate::store::RedisStoreBuilder::prefix) of the
/// store, which overrides the program's setting. If sentinels require a user and a password too,
/// add `?sentinel_user=user&sentinel_password=password`. With the feature `tls`, `rediss://`,
/// `rediss+cluster://` and `rediss+sentinel://` use TLS.
///
/// ```
/// use tower_redis_ratelimit::store::Servers;
/// use tower_redis_ratelimit::RedisStore;
///
/// let store = RedisStore::connect_lazy("redis+cluster://10.0.0.1:6379,10.0.0.2:6379?prefix=shop")?;
/// // Equivalent:
/// let servers = Servers::cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"]);
/// let store = RedisStore::builder(servers).prefix("shop").connect_lazy()?;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// `Debug` shows addresses, but no password.
///
/// # The client
///
/// A URL lacks some settings, such as TCP timeouts. `Servers` is also created from a
/// [`ConnectionInfo`] of the client [`redis`](crate::redis). A new major version of that client may
/// come with a minor version of this crate: `ConnectionInfo` is exempt from its version promise.
#[derive(Clone)]
pub struct Servers {
    kind: Result<Kind, ConfigError>,
    /// The prefix in the URL.
    prefix: Option<String>,
}

impl Servers {
    /// A Redis Cluster, by the URLs of some of its nodes, which report the others. The user,
    /// password and TLS of the first URL apply to all nodes.
    pub fn cluster(nodes: impl IntoIterator<Item = impl Into<Server>>) -> Self {
        Self::new(cluster(nodes.into_iter().map(|node| node.into().0)))
    }

    /// The master with this name, by the URLs of all sentinels.
    ///
    /// Give the name as a URL if the master has a user, a password or a database, or if only the
    /// master or only the sentinels use TLS: `redis://user:password@mymaster/0`. Otherwise the
    /// master uses TLS if the first sentinel does.
    ///
    /// ```
    /// use tower_redis_ratelimit::store::Servers;
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// let servers = Servers::sentinel("mymaster", ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379"]);
    /// let store = RedisStore::builder(servers).prefix("shop").connect_lazy()?;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn sentinel(master: &str, sentinels: impl IntoIterator<Item = impl Into<Server>>) -> Self {
        let sentinels = sentinels.into_iter().map(|sentinel| sentinel.into().0);
        Self::new(self::sentinel(master, sentinels))
    }

    fn new(kind: Result<Kind, ConfigError>) -> Self {
        Self { kind, prefix: None }
    }

    /// Takes the prefix in the URL.
    pub(super) fn take_prefix(&mut self) -> Option<String> {
        self.prefix.take()
    }

    pub(super) fn into_kind(self) -> Result<Kind, ConfigError> {
        let mut kind = self.kind?;
        if kind.all().into_iter().any(|server| is_insecure(server)) {
            return Err(insecure());
        }
        let databases: Vec<i64> = kind
            .all()
            .iter()
            .map(|server| server.redis_settings().db())
            .collect();
        match databases.into_iter().find(|database| *database < 0) {
            Some(database) => wrong(format_args!(
                "its database is {database}, and the first one is 0: use 0 or a higher number"
            )),
            None => Ok(kind),
        }
    }

    fn of_text(text: &str) -> Self {
        let scheme = text
            .split_once("://")
            .and_then(|(scheme, rest)| Some((scheme.split_once('+')?, rest)));
        let (kind, parameters): (_, &[&str]) = match scheme {
            Some(((scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), "cluster"), rest)) => {
                let kind =
                    nodes(scheme, rest).and_then(|nodes| cluster(nodes.into_iter().map(read)));
                (kind, &["prefix", "protocol"])
            }
            Some(((scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), "sentinel"), rest)) => (
                sentinel_of_url(scheme, rest),
                &["prefix", "protocol", "sentinel_user", "sentinel_password"],
            ),
            _ => match check_scheme(text).and_then(|()| read(text)) {
                Ok(server) if matches!(server.addr(), ConnectionAddr::Unix(_)) => (
                    Ok(Kind::Server(Box::new(server))),
                    &["db", "user", "pass", "prefix", "protocol"],
                ),
                server => (
                    server.map(|server| Kind::Server(Box::new(server))),
                    &["prefix", "protocol"],
                ),
            },
        };
        let kind = kind.and_then(|kind| check_parameters(text, parameters).map(|()| kind));
        // Ignore the prefix of an invalid URL: it may be a part of a password.
        let prefix = kind
            .is_ok()
            .then(|| pairs(text).find_map(|pair| pair.strip_prefix("prefix=")))
            .flatten();
        Self {
            prefix: prefix.map(str::to_owned),
            kind,
        }
    }
}

/// Omits the URL, since it may contain a password.
fn wrong<T>(problem: impl fmt::Display) -> Result<T, ConfigError> {
    Err(ConfigError::new(format!(
        "the Redis URL cannot be used: {problem}"
    )))
}

/// Like [`wrong`], for a problem that does not include the fix.
pub(in crate::store) fn wrong_url(problem: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!(
        "the Redis URL cannot be used: {problem}; write it like `redis://:password@host:6379/0`"
    ))
}

/// Rejects a URL that cannot be that of a single server, and names the scheme to use: the errors of redis-rs name none.
fn check_scheme(url: &str) -> Result<(), ConfigError> {
    let sockets = ["unix:", "redis+unix:", "valkey+unix:"];
    if sockets.iter().any(|scheme| url.starts_with(scheme)) {
        return Ok(());
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        // Show nothing of the URL, which may be `user:password@host`.
        return wrong("it has no scheme: start it with `redis://`");
    };
    let scheme = scheme.to_ascii_lowercase();
    let redis = match &scheme {
        tls if tls.starts_with("rediss") || tls.starts_with("valkeys") => "rediss",
        _ => "redis",
    };
    match &*scheme {
        "redis" | "rediss" | "valkey" | "valkeys" => {}
        _ if scheme.contains("cluster") => {
            return wrong(format_args!(
                "its scheme is unknown: for a cluster, use `{redis}+cluster://`"
            ));
        }
        _ if scheme.contains("sentinel") => {
            return wrong(format_args!(
                "its scheme is unknown: for a master of Redis Sentinel, use `{redis}+sentinel://host:26379/mymaster`"
            ));
        }
        _ => {
            return wrong(
                "its scheme is unknown: use `redis://host:6379`, `rediss://` for TLS, `redis+cluster://` or `redis+sentinel://`",
            );
        }
    }
    let hosts = rest.rsplit_once('@').map_or(rest, |(_, hosts)| hosts);
    let hosts = hosts.split(['/', '?', '#']).next().unwrap_or_default();
    if hosts.contains(',') {
        return wrong(format_args!(
            "it names several hosts: use `{redis}+cluster://` for the nodes of a cluster, `{redis}+sentinel://` for sentinels"
        ));
    }
    Ok(())
}

/// The query parameters of a URL.
fn pairs(url: &str) -> impl Iterator<Item = &str> {
    let url = url.split_once('#').map_or(url, |(url, _)| url);
    let query = url.split_once('?').map_or("", |(_, query)| query);
    query.split('&').filter(|pair| !pair.is_empty())
}

/// Rejects unknown parameters.
fn check_parameters(url: &str, known: &[&str]) -> Result<(), ConfigError> {
    let is_login = |pair: &str| {
        pair.contains('@')
            || ["sentinel_password=", "pass="]
                .iter()
                .any(|name| pair.starts_with(name))
    };
    let has_login = pairs(url).any(is_login);
    let mut seen: Vec<&str> = vec![];
    for pair in pairs(url) {
        let name = pair.split_once('=').map_or(pair, |(name, _)| name);
        let known_as = known.join("`, `");
        if !known.contains(&name) || name == "prefix" && pair.contains('@') {
            // The name may be a part of a password with an unescaped `&`.
            let is_shown = !has_login
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            let name = if is_shown {
                format!(" `{name}`")
            } else {
                String::new()
            };
            return wrong(format_args!(
                "its parameter{name} is unknown: write `{known_as}`, and in a password a `?` as `%3F` and an `&` as `%26`; all else is set on the \
                 builder, or in `StoreConfig`"
            ));
        }
        if seen.contains(&name) {
            return wrong(format_args!(
                "its parameter `{name}` appears more than once: write it once"
            ));
        }
        seen.push(name);
    }
    Ok(())
}

/// Splits the user and password from the hosts.
fn split_login(authority: &str) -> Result<(&str, &str), ConfigError> {
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    match login.contains('@') {
        // The rest may contain another password, in parameters without their `?`.
        true => wrong(format_args!(
            "it has more than one `@`: write user and password once, before the first host, and an `@` in them as `%40`"
        )),
        false => Ok((login, hosts)),
    }
}

/// The URL of each node in `user:password@host:port,host:port/?query`.
fn nodes(scheme: &str, rest: &str) -> Result<Vec<String>, ConfigError> {
    // In a password, these characters must be escaped.
    let (authority, query) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, hosts) = split_login(authority)?;
    let at = if user.is_empty() { "" } else { "@" };
    if hosts.split(',').any(str::is_empty) {
        return wrong(
            "a host is missing, or there is a comma too many: write the hosts like `host:6379,host:6380`",
        );
    }
    Ok(hosts
        .split(',')
        .map(|host| format!("{scheme}://{user}{at}{host}{query}"))
        .collect())
}

fn read(url: impl AsRef<str>) -> Result<ConnectionInfo, ConfigError> {
    let url = url.as_ref();
    // redis-rs ignores the rest of the URL, which may be the end of a password with the host.
    if url
        .split_once('#')
        .is_some_and(|(_, fragment)| fragment != "insecure")
    {
        return wrong(
            "it has a `#`, which ends the URL: write a `#` in a user or password as `%23`",
        );
    }
    url.into_connection_info().map_err(url_error)
}

/// The master and its sentinels in `user:password@host:port,host:port/name/database?query`.
fn sentinel_of_url(scheme: &str, rest: &str) -> Result<Kind, ConfigError> {
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, hosts) = split_login(authority)?;
    let (name, database) = path.split_once('/').unwrap_or((path, ""));
    let (mut of_sentinels, mut of_all) = (["", ""], vec![]);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("sentinel_user", user)) => of_sentinels[0] = user,
            Some(("sentinel_password", password)) => of_sentinels[1] = password,
            _ => of_all.push(pair),
        }
    }
    let query = if of_all.is_empty() {
        String::new()
    } else {
        format!("/?{}", of_all.join("&"))
    };
    let at = |user: &str| {
        if user.is_empty() {
            String::new()
        } else {
            format!("{user}@")
        }
    };
    // These characters need no escape in a query, but they do before a host.
    let [sentinel_user, sentinel_password] = of_sentinels.map(|text| {
        text.replace(':', "%3A")
            .replace('/', "%2F")
            .replace('@', "%40")
            .replace('?', "%3F")
    });
    let login = if of_sentinels == ["", ""] {
        String::new()
    } else {
        format!("{sentinel_user}:{sentinel_password}")
    };
    let host = |host: &str| {
        // The brackets of an IPv6 address contain colons too.
        let has_port = host
            .rsplit_once(':')
            .is_some_and(|(_, port)| !port.ends_with(']'));
        if has_port || host.is_empty() {
            host.to_owned()
        } else {
            format!("{host}:26379")
        }
    };
    let hosts: Vec<String> = hosts.split(',').map(host).collect();
    let sentinels = nodes(scheme, &format!("{}{}{query}", at(&login), hosts.join(",")))?;
    let master = format!(
        "{scheme}://{}{name}/{database}{}",
        at(user),
        query.trim_start_matches('/')
    );
    sentinel(
        if name.is_empty() { "" } else { &master },
        sentinels.into_iter().map(read),
    )
}

fn sentinel(
    master: &str,
    sentinels: impl Iterator<Item = Result<ConnectionInfo, ConfigError>>,
) -> Result<Kind, ConfigError> {
    let sentinels: Vec<_> = sentinels.collect::<Result<_, _>>()?;
    if master.is_empty() {
        return wrong(
            "it names no master: write its name after the sentinels, as in `redis+sentinel://host:26379/mymaster`",
        );
    }
    let Some(first) = sentinels.first() else {
        return wrong("there is no sentinel: add the URL of at least one");
    };
    if sentinels
        .iter()
        .any(|sentinel| matches!(sentinel.addr(), ConnectionAddr::Unix(_)))
    {
        return wrong("sentinels have no unix sockets: use `redis://host:26379`");
    }
    if sentinels
        .iter()
        .any(|sentinel| sentinel.redis_settings().db() != 0)
    {
        return wrong(
            "a sentinel has no database but 0: write that of the master after the master's name",
        );
    }
    let is_url = master.contains("://");
    let master = if is_url {
        master.to_owned()
    } else {
        format!("redis://{master}")
    };
    let master = read(master)?;
    let name = match master.addr() {
        ConnectionAddr::Tcp(name, _) | ConnectionAddr::TcpTls { host: name, .. } => name.clone(),
        _ => String::new(),
    };
    // The characters that Redis Sentinel allows.
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_name) {
        return wrong(
            "the master's name is missing or invalid: use letters, digits, `.`, `-` and `_`",
        );
    }
    let master = if is_url {
        master
    } else {
        master.set_addr(first.addr().clone())
    };
    Ok(Kind::Sentinel {
        name,
        master: Box::new(master),
        sentinels,
    })
}

fn cluster(
    nodes: impl Iterator<Item = Result<ConnectionInfo, ConfigError>>,
) -> Result<Kind, ConfigError> {
    let nodes: Vec<_> = nodes.collect::<Result<_, _>>()?;
    if nodes.is_empty() {
        wrong("there is no node: add the URL of at least one node of the cluster")
    } else if nodes
        .iter()
        .any(|node| matches!(node.addr(), ConnectionAddr::Unix(_)))
    {
        wrong("the nodes of a cluster have no unix sockets: use `redis://host:6379`")
    } else if nodes.iter().any(|node| node.redis_settings().db() != 0) {
        wrong("a cluster has no database but 0: write none in the URL")
    } else {
        Ok(Kind::Cluster(nodes))
    }
}

/// One node of a cluster, or one sentinel: a URL as of a single server of [`Servers`], or a
/// [`ConnectionInfo`], which is [exempt](Servers#the-client) from the version promise.
///
/// `Debug` shows the address, but no password.
#[derive(Clone)]
pub struct Server(Result<ConnectionInfo, ConfigError>);

impl From<&str> for Server {
    fn from(url: &str) -> Self {
        Self(read(url))
    }
}

impl From<String> for Server {
    fn from(url: String) -> Self {
        Self::from(&*url)
    }
}

impl From<&String> for Server {
    fn from(url: &String) -> Self {
        Self::from(&**url)
    }
}

impl From<ConnectionInfo> for Server {
    fn from(server: ConnectionInfo) -> Self {
        Self(Ok(server))
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok(server) => f.write_str(&server.addr().to_string()),
            Err(_) => f.write_str("unreadable"),
        }
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
        Self::new(Ok(Kind::Server(Box::new(server))))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = match &self.kind {
            Ok(Kind::Server(server)) => std::slice::from_ref(&**server),
            Ok(
                Kind::Sentinel {
                    sentinels: nodes, ..
                }
                | Kind::Cluster(nodes),
            ) => nodes,
            Err(_) => return f.write_str("unreadable"),
        };
        let nodes: Vec<String> = nodes.iter().map(|node| node.addr().to_string()).collect();
        f.write_str(&nodes.join(","))
    }
}

/// Returns `true` if TLS would verify no certificate.
fn is_insecure(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { insecure: true, .. })
}

/// The error for TLS without verification: any crate of the build could enable the feature of redis-rs that allows it.
fn insecure() -> ConfigError {
    ConfigError::new(
        "TLS without verification (`#insecure`) is not supported: set `root_certificates` to the CA of the server's \
         certificate, or to a self-signed certificate itself, and `server_name` if the certificate has another name than \
         the URL",
    )
}

/// Converts redis-rs's error for a URL.
pub(super) fn url_error(error: RedisError) -> ConfigError {
    match error.to_string() {
        // The message of a redis-rs that was built without TLS.
        text if text.contains("TLS") && text.contains("feature is not enabled") => no_tls(),
        text => {
            let problem = text.strip_suffix(" - InvalidClientConfig").unwrap_or(&text);
            ConfigError::new(format!(
                "the Redis URL cannot be used: {problem}; write it like `redis://:password@host:6379/0`, and in a password `/` as `%2F`, \
                 `?` as `%3F` and `#` as `%23`"
            ))
        }
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
            (
                "redis+cluster://user:pa,ss@a:1,[::1]:2/?protocol=resp3",
                "a:1,::1:2",
            ),
            ("valkey+cluster://:p@a:1,b/0", "a:1,b:6379"),
        ] {
            let servers = Servers::from(url);
            assert_eq!(format!("{servers:?}"), addresses, "{url}");
            let Ok(Kind::Cluster(nodes)) = servers.into_kind() else {
                panic!("{url}")
            };
            let (user, password) = (
                nodes[0].redis_settings().username(),
                nodes[0].redis_settings().password(),
            );
            assert_eq!(user, url.contains("user").then_some("user"), "{url}");
            assert_eq!(password.is_some(), url.contains('@'), "{url}");
        }
        let one = Servers::cluster(["redis://a:1", "redis://b:2"]);
        assert_eq!(
            format!("{one:?}"),
            format!("{:?}", Servers::from("redis+cluster://a:1,b:2"))
        );
    }

    #[test]
    fn every_url_may_name_a_prefix() {
        for url in [
            "redis://a:1/0",
            "redis://a:1?protocol=resp3",
            "redis+unix:///tmp/redis?db=3",
            "redis+cluster://user:password@a:1,b:2",
            "redis+sentinel://a:1,b:2/mymaster/3?sentinel_password=x",
        ] {
            let between = if url.contains('?') { '&' } else { '?' };
            let mut servers = Servers::from(format!("{url}{between}prefix=shop:eu/1"));
            assert_eq!(servers.take_prefix().as_deref(), Some("shop:eu/1"), "{url}");
            assert!(servers.into_kind().is_ok(), "{url}");
            assert_eq!(Servers::from(url).take_prefix(), None, "{url}");
        }
    }

    /// An unescaped `?` in a password.
    #[test]
    fn a_part_of_a_password_is_no_prefix() {
        for url in [
            "redis://user:6379?prefix=hunter2@host/",
            "redis+cluster://user:1?prefix=hunter2@host",
            "redis://user:1?prefix=hunter2!&x@host",
            "redis+sentinel://a:1/m?sentinel_password=hun&hunter2",
            "redis+sentinel://a:1/m?hunter2&sentinel_password=hun",
            "redis+unix:///tmp/redis?user=a&pass=hun&hunter2",
        ] {
            let error = crate::RedisStore::connect_lazy(url)
                .unwrap_err()
                .to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_fragment_is_refused() {
        for url in [
            "redis://:hun#ter2@a",
            "redis://limiter:6379#ter2@a:1/",
            "redis://a/#prefix=ter2",
            "redis://a#?prefix=ter2",
            "redis://a/#",
            "redis://a/#insecure&ter2",
            "redis+unix:///tmp/redis#ter2",
            "redis+cluster://limiter:6379#ter2@a:1,b:2",
            "redis+cluster://a:1,b:2#ter2",
            "redis+sentinel://limiter:6379#ter2@a:1/mymaster",
            "redis+sentinel://a:1/mymaster#ter2",
            "redis+sentinel://a:1/mymaster?sentinel_password=hun#ter2",
        ] {
            let servers = Servers::from(url);
            assert_eq!(format!("{servers:?}"), "unreadable", "{url}");
            let error = servers.into_kind().map(drop).unwrap_err().to_string();
            assert!(
                error.starts_with("the Redis URL cannot be used: ")
                    && error.contains("write a `#` in a user or password as `%23`")
                    && !["ter2", "6379"].iter().any(|secret| error.contains(secret)),
                "{url}: {error}"
            );
        }
        let node = Servers::cluster(["redis://a:1", "redis://limiter:6379#ter2@b:2"]);
        assert!(node.into_kind().is_err());
        let master = Servers::sentinel("redis://limiter:6379#ter2@mymaster", ["redis://a:1"]);
        assert!(master.into_kind().is_err());
        let Ok(Kind::Server(server)) = Servers::from("redis://:hun%23ter2@a").into_kind() else {
            panic!("it is readable");
        };
        assert_eq!(server.redis_settings().password(), Some("hun#ter2"));
    }

    #[test]
    fn an_unparsable_url_may_have_a_special_password() {
        for url in ["redis://:hun/ter2@a", "redis://:hun?ter2@a"] {
            let error = Servers::from(url).into_kind().map(drop).unwrap_err();
            assert_eq!(
                error.to_string(),
                "the Redis URL cannot be used: Redis URL did not parse; write it like `redis://:password@host:6379/0`, and in a \
                 password `/` as `%2F`, `?` as `%3F` and `#` as `%23`"
            );
        }
    }

    #[test]
    fn a_non_cluster_is_refused() {
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
            let error = error.to_string();
            assert!(
                error.starts_with("the Redis URL cannot be used: ") && !error.contains("hunter2"),
                "{error}"
            );
        }
    }
}
