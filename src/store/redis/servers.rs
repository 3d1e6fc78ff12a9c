//! The addresses of Redis.

use std::fmt;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError};

use super::credentials::CredentialSource;
use super::link::no_tls;
use super::topology::{CredentialSources, NamedServers};
use crate::error::ConfigError;
use crate::store::config::ShareConfig;

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
/// store, which overrides the program's setting. The URL of an [`AnyStore`](crate::store::AnyStore) may end with
/// `?share=alive` or `?share=4`, which overrides its [share](crate::store::StoreConfig::share). If sentinels require a user
/// and a password too, add `?sentinel_user=user&sentinel_password=password`. With the feature `tls`, `rediss://`,
/// `rediss+cluster://` and `rediss+sentinel://` use TLS.
///
/// A file may have the password, with the user before the host: `?password_file=/run/secrets/redis`, and for sentinels
/// `sentinel_password_file`. It is [read again when it changes](crate::store::RedisStoreBuilder::password_file).
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
    kind: Result<NamedServers, ConfigError>,
    /// The prefix in the URL.
    prefix: Option<String>,
    /// The share in the URL.
    share: Option<ShareConfig>,
    /// The sources of credentials that change.
    pub(super) credentials: CredentialSources,
}

impl Servers {
    /// A Redis Cluster, by the URLs of some of its nodes, which report the others. The user,
    /// password and TLS of the first URL apply to all nodes. Each URL is that of a single server.
    pub fn cluster(nodes: impl IntoIterator<Item = impl Into<Servers>>) -> Self {
        let nodes = all(nodes);
        Self::new(nodes.and_then(cluster))
    }

    /// The master with this name, by the URLs of all sentinels, each as of a single server.
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
    pub fn sentinel(master: &str, sentinels: impl IntoIterator<Item = impl Into<Servers>>) -> Self {
        let sentinels = all(sentinels);
        Self::new(sentinels.and_then(|sentinels| self::sentinel(master, sentinels)))
    }

    fn new(kind: Result<NamedServers, ConfigError>) -> Self {
        Self {
            kind,
            prefix: None,
            share: None,
            credentials: CredentialSources::default(),
        }
    }

    /// Sets a source of credentials. A second one is an error.
    pub(super) fn set_credentials(
        &mut self,
        of: impl FnOnce(&mut CredentialSources) -> &mut Option<CredentialSource>,
        source: CredentialSource,
    ) {
        if of(&mut self.credentials).replace(source).is_some() && self.kind.is_ok() {
            self.kind = Err(ConfigError::new(
                "the credentials have two sources: use one closure, or one password file in the URL, the builder or the \
                 settings",
            ));
        }
    }

    /// Takes the prefix in the URL.
    pub(super) fn take_prefix(&mut self) -> Option<String> {
        self.prefix.take()
    }

    /// Takes the share in the URL, which only a store with a fallback has.
    pub(in crate::store) fn take_share(&mut self) -> Option<ShareConfig> {
        self.share.take()
    }

    pub(super) fn into_kind(self) -> Result<NamedServers, ConfigError> {
        let mut kind = self.kind?;
        if self.share.is_some() {
            return wrong(
                "its parameter `share` is for a store with a fallback: create an `AnyStore`, or set `FallbackBuilder::share`",
            );
        }
        if kind.all().into_iter().any(|server| is_insecure(server)) {
            return Err(insecure());
        }
        if let Err(problem) = self.credentials.check(&kind) {
            return wrong(problem);
        }
        for server in kind.all() {
            let database = server.redis_settings().db();
            if database < 0 {
                return wrong(format_args!(
                    "its database is {database}, and the first one is 0: use 0 or a higher number"
                ));
            }
        }
        Ok(kind)
    }

    /// Returns the settings of a node of a cluster, or of a sentinel.
    fn into_node(self) -> Result<ConnectionInfo, ConfigError> {
        let NamedServers::Server(node) = self.kind? else {
            return wrong("a node or a sentinel is one server: use `redis://host:port` for each");
        };
        if self.prefix.is_some() || self.share.is_some() || self.credentials.servers.is_some() {
            return wrong(
                "a node or a sentinel has no `prefix`, `share` or `password_file`: set these on the builders",
            );
        }
        Ok(*node)
    }

    fn of_text(text: &str) -> Self {
        let kind = match kind_of_url(text) {
            Ok(kind) => kind,
            // Ignore the prefix of an invalid URL: it may be a part of a password.
            Err(error) => return Self::new(Err(error)),
        };
        let mut servers = Self::new(Ok(kind));
        for pair in pairs(text) {
            let (name, value) = cut(pair, "=");
            match name {
                "prefix" => servers.prefix = Some(value.to_owned()),
                "share" => match value.parse() {
                    Ok(share) => servers.share = Some(share),
                    Err(_) => servers.kind = wrong(WRONG_SHARE),
                },
                "password_file" => {
                    servers.credentials.servers = Some(CredentialSource::file(value));
                }
                "sentinel_password_file" => {
                    servers.credentials.sentinels = Some(CredentialSource::file(value));
                }
                _ => {}
            }
        }
        servers
    }
}

/// Omits the value, which may be a part of a password.
const WRONG_SHARE: &str =
    "its parameter `share` is wrong: use a number of instances such as `4`, or `alive`";

/// Returns the settings of these servers, or the first error.
fn all(
    servers: impl IntoIterator<Item = impl Into<Servers>>,
) -> Result<Vec<ConnectionInfo>, ConfigError> {
    let mut all = vec![];
    for server in servers {
        all.push(server.into().into_node()?);
    }
    Ok(all)
}

fn kind_of_url(url: &str) -> Result<NamedServers, ConfigError> {
    check_ends(url)?;
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    match cut(scheme, "+") {
        (scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), "cluster") => {
            let nodes = nodes(scheme, rest)?;
            let kind = cluster(read_all(&nodes)?)?;
            check_parameters(url, &["prefix", "share", "protocol", "password_file"])?;
            Ok(kind)
        }
        (scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), "sentinel") => {
            let kind = sentinel_of_url(scheme, rest)?;
            let known = [
                "prefix",
                "share",
                "protocol",
                "password_file",
                "sentinel_user",
                "sentinel_password",
                "sentinel_password_file",
            ];
            check_parameters(url, &known)?;
            Ok(kind)
        }
        _ => {
            check_scheme(url)?;
            let server = read(url)?;
            if is_unix(&server) {
                let known = [
                    "db",
                    "user",
                    "pass",
                    "prefix",
                    "share",
                    "protocol",
                    "password_file",
                ];
                check_parameters(url, &known)?;
            } else {
                check_parameters(url, &["prefix", "share", "protocol", "password_file"])?;
            }
            Ok(NamedServers::Server(Box::new(server)))
        }
    }
}

/// Splits a text at the first `mark`. Without one, the second part is empty.
fn cut<'a>(text: &'a str, mark: &str) -> (&'a str, &'a str) {
    text.split_once(mark).unwrap_or((text, ""))
}

fn before<'a>(text: &'a str, mark: &str) -> &'a str {
    cut(text, mark).0
}

fn after<'a>(text: &'a str, mark: &str) -> &'a str {
    cut(text, mark).1
}

fn is_unix(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::Unix(_))
}

fn has_database(server: &ConnectionInfo) -> bool {
    server.redis_settings().db() != 0
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

/// Rejects a URL in quotes, or behind a blank. The URL's parser ignores blanks at its end.
fn check_ends(url: &str) -> Result<(), ConfigError> {
    if let Some(first) = url.chars().next()
        && (is_quote(first) || first.is_whitespace() || first == '\u{feff}')
    {
        let found = described(first);
        return wrong(format_args!("it starts with {found}: remove it"));
    }
    if let Some(last) = url.chars().next_back()
        && is_quote(last)
    {
        let found = described(last);
        return wrong(format_args!("it ends with {found}: remove it"));
    }
    check_placeholders(url)
}

/// Rejects a URL with a placeholder: as a password or a host, it would only fail at the server.
fn check_placeholders(url: &str) -> Result<(), ConfigError> {
    for mark in ["${", "$(", "{{"] {
        if url.contains(mark) {
            return wrong(format_args!(
                "it has a `{mark}`, and no placeholder is replaced: put the value there, read the URL by `require_env`, or \
                 write a `$` in a password as `%24` and a `{{` as `%7B`"
            ));
        }
    }
    Ok(())
}

fn is_quote(c: char) -> bool {
    matches!(c, '"' | '\'' | '`' | '\u{2018}'..='\u{201f}')
}

fn described(c: char) -> String {
    match c {
        ' ' => "a blank".to_owned(),
        '\t' => "a tab".to_owned(),
        '\n' | '\r' => "a line break".to_owned(),
        c if is_quote(c) => format!("the character `{c}`"),
        c => format!("the character `{}`", c.escape_unicode()),
    }
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
    let after_login = match rest.rsplit_once('@') {
        Some((_, after)) => after,
        None => rest,
    };
    if split_authority(after_login).0.contains(',') {
        return wrong(format_args!(
            "it names several hosts: use `{redis}+cluster://` for the nodes of a cluster, `{redis}+sentinel://` for sentinels"
        ));
    }
    Ok(())
}

/// The query parameters of a URL.
fn pairs(url: &str) -> Vec<&str> {
    // Without the fragment.
    let query = after(before(url, "#"), "?");
    let mut pairs: Vec<&str> = query.split('&').collect();
    pairs.retain(|pair| !pair.is_empty());
    pairs
}

/// Rejects unknown parameters.
fn check_parameters(url: &str, known: &[&str]) -> Result<(), ConfigError> {
    let mut seen: Vec<&str> = vec![];
    for pair in pairs(url) {
        let name = before(pair, "=");
        let is_free_text = name == "prefix" || name.ends_with("password_file");
        if !known.contains(&name) || is_free_text && pair.contains('@') {
            // It may be a part of a password with an unescaped `&`.
            let is_name = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            let mut shown = String::new();
            if is_name && !pairs(url).into_iter().any(is_login) {
                shown = format!(" `{name}`");
            }
            let known = known.join("`, `");
            return wrong(format_args!(
                "its parameter{shown} is unknown: write `{known}`, and in a password a `?` as `%3F` and an `&` as `%26`; all else is set on the \
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

/// Returns `true` for a parameter with a password, or for a part of one.
fn is_login(pair: &str) -> bool {
    pair.contains('@') || pair.starts_with("sentinel_password=") || pair.starts_with("pass=")
}

/// Splits the user, password and hosts from the rest of a URL. In a password, these characters must be escaped.
fn split_authority(text: &str) -> (&str, &str) {
    match text.find(['/', '?', '#']) {
        Some(end) => text.split_at(end),
        None => (text, ""),
    }
}

/// Splits the user and password from the hosts.
fn split_login(authority: &str) -> Result<(&str, &str), ConfigError> {
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    if login.contains('@') {
        // The rest may contain another password, in parameters without their `?`.
        return wrong(
            "it has more than one `@`: write user and password once, before the first host, and an `@` in them as `%40`",
        );
    }
    Ok((login, hosts))
}

/// The URL of each node in `user:password@host:port,host:port/?query`.
fn nodes(scheme: &str, rest: &str) -> Result<Vec<String>, ConfigError> {
    let (authority, query) = split_authority(rest);
    let (user, hosts) = split_login(authority)?;
    let at = if user.is_empty() { "" } else { "@" };
    let mut nodes = vec![];
    for host in hosts.split(',') {
        if host.is_empty() {
            return wrong(
                "a host is missing, or there is a comma too many: write the hosts like `host:6379,host:6380`",
            );
        }
        nodes.push(format!("{scheme}://{user}{at}{host}{query}"));
    }
    Ok(nodes)
}

fn read_all(urls: &[String]) -> Result<Vec<ConnectionInfo>, ConfigError> {
    let mut servers = vec![];
    for url in urls {
        servers.push(read(url)?);
    }
    Ok(servers)
}

fn read(url: &str) -> Result<ConnectionInfo, ConfigError> {
    let fragment = after(url, "#");
    // redis-rs ignores the rest of the URL, which may be the end of a password with the host.
    if url.contains('#') && fragment != "insecure" {
        return wrong(
            "it has a `#`, which ends the URL: write a `#` in a user or password as `%23`",
        );
    }
    url.into_connection_info().map_err(url_error)
}

/// The master and its sentinels in `user:password@host:port,host:port/name/database?query`.
fn sentinel_of_url(scheme: &str, rest: &str) -> Result<NamedServers, ConfigError> {
    let (address, query) = cut(rest, "?");
    let (authority, path) = cut(address, "/");
    let (login, hosts) = split_login(authority)?;
    let (name, database) = cut(path, "/");
    let mut sentinel_user = String::new();
    let mut sentinel_password = String::new();
    let mut of_all = vec![];
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("sentinel_user", user)) => sentinel_user = escaped(user),
            Some(("sentinel_password", password)) => sentinel_password = escaped(password),
            _ if pair.is_empty() => {}
            _ => of_all.push(pair),
        }
    }
    let mut query = String::new();
    if !of_all.is_empty() {
        query = format!("?{}", of_all.join("&"));
    }
    let mut sentinel_login = String::new();
    if !(sentinel_user.is_empty() && sentinel_password.is_empty()) {
        sentinel_login = format!("{sentinel_user}:{sentinel_password}@");
    }
    let mut with_ports = vec![];
    for host in hosts.split(',') {
        with_ports.push(with_port(host));
    }
    let hosts = with_ports.join(",");
    let sentinels = nodes(scheme, &format!("{sentinel_login}{hosts}/{query}"))?;
    let mut master = String::new();
    if !name.is_empty() {
        let at = if login.is_empty() { "" } else { "@" };
        master = format!("{scheme}://{login}{at}{name}/{database}{query}");
    }
    sentinel(&master, read_all(&sentinels)?)
}

/// Escapes characters that need no escape in a query, but do before a host.
fn escaped(text: &str) -> String {
    text.replace(':', "%3A")
        .replace('/', "%2F")
        .replace('@', "%40")
        .replace('?', "%3F")
}

/// The address of a sentinel, with its default port if it names none.
fn with_port(host: &str) -> String {
    match host.rsplit_once(':') {
        // The brackets of an IPv6 address contain colons too.
        Some((_, port)) if !port.ends_with(']') => host.to_owned(),
        _ if host.is_empty() => String::new(),
        _ => format!("{host}:26379"),
    }
}

fn sentinel(master: &str, sentinels: Vec<ConnectionInfo>) -> Result<NamedServers, ConfigError> {
    if master.is_empty() {
        return wrong(
            "it names no master: write its name after the sentinels, as in `redis+sentinel://host:26379/mymaster`",
        );
    }
    let Some(first) = sentinels.first() else {
        return wrong("there is no sentinel: add the URL of at least one");
    };
    if sentinels.iter().any(is_unix) {
        return wrong("sentinels have no unix sockets: use `redis://host:26379`");
    }
    if sentinels.iter().any(has_database) {
        return wrong(
            "a sentinel has no database but 0: write that of the master after the master's name",
        );
    }
    let is_url = master.contains("://");
    let mut master = if is_url {
        read(master)?
    } else {
        read(&format!("redis://{master}"))?
    };
    let name = match master.addr() {
        ConnectionAddr::Tcp(name, _) | ConnectionAddr::TcpTls { host: name, .. } => name.clone(),
        _ => String::new(),
    };
    if name.is_empty() || !name.bytes().all(is_of_name) {
        return wrong(
            "the master's name is missing or invalid: use letters, digits, `.`, `-` and `_`",
        );
    }
    if !is_url {
        master = master.set_addr(first.addr().clone());
    }
    Ok(NamedServers::Sentinel {
        name,
        master: Box::new(master),
        sentinels,
    })
}

/// Returns `true` for the characters that Redis Sentinel allows in a name.
fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b".-_".contains(&byte)
}

fn cluster(nodes: Vec<ConnectionInfo>) -> Result<NamedServers, ConfigError> {
    if nodes.is_empty() {
        return wrong("there is no node: add the URL of at least one node of the cluster");
    }
    if nodes.iter().any(is_unix) {
        return wrong("the nodes of a cluster have no unix sockets: use `redis://host:6379`");
    }
    if nodes.iter().any(has_database) {
        return wrong("a cluster has no database but 0: write none in the URL");
    }
    Ok(NamedServers::Cluster(nodes))
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
        Self::new(Ok(NamedServers::Server(Box::new(server))))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = match &self.kind {
            Ok(NamedServers::Server(server)) => std::slice::from_ref(&**server),
            Ok(
                NamedServers::Sentinel {
                    sentinels: nodes, ..
                }
                | NamedServers::Cluster(nodes),
            ) => nodes,
            Err(_) => return f.write_str("unreadable"),
        };
        for (place, node) in nodes.iter().enumerate() {
            if place > 0 {
                f.write_str(",")?;
            }
            write!(f, "{}", node.addr())?;
        }
        Ok(())
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
            let Ok(NamedServers::Cluster(nodes)) = servers.into_kind() else {
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

    #[test]
    fn every_url_may_name_a_share() {
        for url in [
            "redis://a:1/0?protocol=resp3",
            "redis+unix:///tmp/redis?db=3",
            "redis+cluster://user:password@a:1,b:2?prefix=shop",
            "redis+sentinel://a:1,b:2/mymaster/3?sentinel_password=x",
        ] {
            let mut servers = Servers::from(format!("{url}&share=alive"));
            assert_eq!(servers.take_share(), Some(ShareConfig::Alive), "{url}");
            assert!(servers.into_kind().is_ok(), "{url}");
        }
        for (share, problem) in [
            (
                "4",
                "its parameter `share` is for a store with a fallback: create an `AnyStore`",
            ),
            ("0", WRONG_SHARE),
            ("all", WRONG_SHARE),
        ] {
            let error = Servers::from(format!("redis://a?share={share}")).into_kind();
            let error = error.map(drop).unwrap_err().to_string();
            assert!(error.contains(problem), "{share}: {error}");
        }
    }

    /// An unescaped `?` in a password.
    #[test]
    fn a_part_of_a_password_is_no_prefix() {
        for url in [
            "redis://user:6379?share=hunter2@host/",
            "redis://user:1?share=hunter2!&x@host",
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
        let Ok(NamedServers::Server(server)) = Servers::from("redis://:hun%23ter2@a").into_kind()
        else {
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
    fn a_quote_or_blank_around_a_url_is_named() {
        let remove = |place: &str, what: &str| {
            format!("the Redis URL cannot be used: it {place} with {what}: remove it")
        };
        for (url, error) in [
            (
                "\"redis://:hunter2@a\"",
                remove("starts", "the character `\"`"),
            ),
            (
                "'redis://:hunter2@a'",
                remove("starts", "the character `'`"),
            ),
            (
                "`redis+cluster://a,b`",
                remove("starts", "the character ```"),
            ),
            (
                "redis://:hunter2@a/0\"",
                remove("ends", "the character `\"`"),
            ),
            (
                "redis+cluster://a:1,b:2'",
                remove("ends", "the character `'`"),
            ),
            (" redis://:hunter2@a", remove("starts", "a blank")),
            ("\tredis+sentinel://a/m", remove("starts", "a tab")),
            ("\nredis://a", remove("starts", "a line break")),
            (
                "\u{feff}redis://a",
                remove("starts", "the character `\\u{feff}`"),
            ),
            (
                "\u{201c}redis://a",
                remove("starts", "the character `\u{201c}`"),
            ),
        ] {
            let refused = |servers: Servers| servers.into_kind().map(drop).unwrap_err().to_string();
            assert_eq!(refused(Servers::from(url)), error, "{url:?}");
            assert_eq!(refused(Servers::cluster([url])), error, "{url:?}");
        }
        assert!(Servers::from("redis://a/0\n").into_kind().is_ok());
    }

    #[test]
    fn a_placeholder_is_refused() {
        for (url, mark) in [
            ("redis://:${REDIS_PASSWORD}@a", "${"),
            ("redis://${REDIS_HOST:-a}:6379/0", "${"),
            ("redis+cluster://a:1,$(hostname):2", "$("),
            ("redis+sentinel://:{{ password }}@a/m", "{{"),
        ] {
            let error = format!(
                "the Redis URL cannot be used: it has a `{mark}`, and no placeholder is replaced: put the value there, read the URL \
                 by `require_env`, or write a `$` in a password as `%24` and a `{{` as `%7B`"
            );
            let refused = |servers: Servers| servers.into_kind().map(drop).unwrap_err().to_string();
            assert_eq!(refused(Servers::from(url)), error, "{url}");
            assert_eq!(refused(Servers::cluster([url])), error, "{url}");
        }
        for url in ["redis://:%24%7Bp}$@a", "redis://:p$1@a", "redis://:{p}@a"] {
            assert!(Servers::from(url).into_kind().is_ok(), "{url}");
        }
    }

    #[test]
    fn a_user_without_a_password_is_refused() {
        let fix = "the Redis URL cannot be used: it has a user and no password: put a colon before a password alone, \
                   as in `redis://:password@host`, or add the user's password";
        for url in [
            "redis://hunter2@a",
            "redis://hunter2:@a",
            "valkey://hunter2@a:1/3",
            "redis+unix:///tmp/redis?user=hunter2",
            "redis+cluster://hunter2@a:1,b:2",
            "redis+sentinel://hunter2@a:1/m",
            "redis+sentinel://a:1/m?sentinel_user=hunter2",
        ] {
            let error = Servers::from(url).into_kind().map(drop).unwrap_err();
            assert_eq!(error.to_string(), fix, "{url}");
        }
        for url in ["redis://a", "redis://@a", "redis://:p@a", "redis://u:p@a"] {
            assert!(Servers::from(url).into_kind().is_ok(), "{url}");
        }
    }

    #[test]
    fn a_node_is_one_server() {
        for url in [
            "redis+cluster://a:1,b:2",
            "redis+sentinel://a:1/m",
            "redis://a:1/?prefix=shop",
            "redis://a:1/?share=4",
            "redis://a:1/?password_file=/run/password",
        ] {
            for servers in [
                Servers::cluster(["redis://b:1", url]),
                Servers::sentinel("m", [url]),
            ] {
                let error = servers.into_kind().map(drop).unwrap_err().to_string();
                assert!(error.contains(": a node or a sentinel "), "{url}: {error}");
            }
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
