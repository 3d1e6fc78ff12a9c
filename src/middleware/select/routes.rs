use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use http::Method;
use http::request::Parts;
use http::uri::PathAndQuery;
use matchit::Router;

use crate::error::{ConfigError, redacted};
use crate::gate::{PolicySelector, Selector};
use crate::limit::{Key, KeyForms, Policies};
use crate::observe::mistakes::NESTED_PATTERN;
use crate::observe::{Event, Observer, or_log};
use crate::util::OnceFlag;

/// Policies by method and path, for one layer around a whole service.
///
/// Patterns use axum's syntax: `/users/{id}`, and `/files/{*path}` for all paths below `/files`.
/// The most specific matching pattern counts; a pattern for the request's method takes precedence
/// over one for all methods. As in axum, a pattern for `GET` also applies to `HEAD`, and to an
/// extended `CONNECT`, which starts a WebSocket over HTTP/2, unless these have their own. A request
/// that matches no pattern is under the policies passed to [`new`](Self::new).
///
/// ```
/// use http::Method;
/// use tower_redis_ratelimit::extract::PeerIp;
/// use tower_redis_ratelimit::select::Routes;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
/// let routes = Routes::new(policy("api", 600)?)
///     .exempt("/health")?
///     .route("/export/{*what}", policy("export", 6)?)?
///     .method(Method::POST, "/login", policy("login", 5)?)?;
/// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, routes);
/// # let _ = layer;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// # Which pattern counts
///
/// A request is under the most specific pattern that its raw path matches, as in axum. If the path
/// was rewritten after axum had matched it (with the feature `axum`), the route's template counts
/// instead.
///
/// If no pattern limits the raw path, the path is matched again as a more lenient server would read
/// it: decoded repeatedly, with `\` as `/`, without parameters (`;v=1`), `.` and empty segments,
/// without dots and blanks at the end of a segment, with or without a trailing slash. If no pattern
/// limits that either, its lower case is matched against the lower case of the limited patterns. So
/// `/%6Cogin`, `/login/`, `/login.` and `/LOGIN` are under the policy of `/login`.
///
/// A limit that matches the raw path stays: if `/{page}` or `/{*path}` is limited too, `/LOGIN` and
/// `/%6Cogin` are under that pattern, as axum matches them. For a server that ignores letter case,
/// call [`ignore_case`](Self::ignore_case). For a server that decodes paths, pass the limit of all
/// other paths to [`new`](Self::new) instead of a pattern. Then no spelling avoids the limit of
/// `/login` behind a proxy, a file server or a handler of a catch-all route.
///
/// A request is exempt only in the exact letter case of the pattern, only if the lenient path is
/// exempt too, and only if no other pattern limits that path, with or without a trailing slash and
/// in any letter case. A pattern such as `/{*path}` limits no path that a more specific pattern
/// exempts. A path with a `..`, in any spelling, is never exempt by a pattern with parameters, since
/// servers resolve it differently. So `/static/../login` is not exempt under an exempt
/// `/static/{*path}`.
///
/// If `/static/{*path}` has a limit instead, that limit applies to `/static/../login`, not the one
/// of `/login`. Middleware that rewrites paths, such as tower-http's `NormalizePath`, must therefore
/// wrap the layer.
///
/// Two patterns may differ only in letter case. Each limits its own spelling, and the first
/// of them also limits the other spellings. The same applies to a parameter and a catch-all that meet only
/// in lower case, such as `/Users/{id}` and `/users/{*rest}`.
///
/// Add the layer to the outermost router or around it, or to a router nested in it. A pattern has the whole path there too: in
/// a router nested at `/api`, the route `/users/{id}` has the pattern `/api/users/{id}`. For a router in
/// a `route_service`, or in the fallback of a nested router, axum does not report whole templates,
/// so patterns for whole paths do not match.
///
/// A gRPC method is a route too: `.method(Method::POST, "/package.Service/Method", policies)`.
///
/// To count each route separately under one policy, put the route into the key: see `MatchedRoute`.
pub struct Routes {
    all: Patterns,
    methods: HashMap<Method, Patterns>,
    routes: Vec<Route>,
    default: Selector,
    ignores_case: bool,
    /// Whether a limited pattern differs from its folded form. Otherwise, a path in lower case
    /// matches the same limits in both cases.
    has_folded: bool,
    nested: Nested,
}

/// Reports, once, patterns without the prefix of the nested router that the layer is in.
#[derive(Default)]
struct Nested {
    observer: OnceLock<Arc<dyn Observer>>,
    /// Claimed by the first request that a pattern matches, by its whole path or without the prefix.
    examined: OnceFlag,
}

/// Indexes of routes by pattern.
#[derive(Default)]
struct Patterns {
    /// All patterns, as written.
    exact: Router<usize>,
    /// The limited patterns, in lower case and without escapes.
    folded: Router<usize>,
}

#[derive(Clone, Copy)]
enum Case {
    Exact,
    Folded,
}

impl Routes {
    /// Creates routes; `default` applies if no pattern matches: a [`Policy`](crate::Policy), or any
    /// [`PolicySelector`].
    pub fn new(default: impl PolicySelector) -> Self {
        Self {
            all: Patterns::default(),
            methods: HashMap::new(),
            routes: vec![],
            default: Selector::new(default),
            ignores_case: false,
            has_folded: false,
            nested: Nested::default(),
        }
    }

    /// Sets the policies of paths that match `pattern`, for all methods. [`Policies::blocked`] blocks them.
    ///
    /// # Errors
    ///
    /// If the pattern is invalid, such as `/users/:id`, or is equivalent to another one:
    /// `/users/{id}` and `/users/{name}`.
    pub fn route(self, pattern: &str, policies: impl PolicySelector) -> Result<Self, ConfigError> {
        self.add(None, pattern, Some(Selector::new(policies)))
    }

    /// Sets the policies of paths that match `pattern`, for one method.
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route).
    pub fn method(
        self,
        method: Method,
        pattern: &str,
        policies: impl PolicySelector,
    ) -> Result<Self, ConfigError> {
        self.add(Some(method), pattern, Some(Selector::new(policies)))
    }

    /// Lets requests whose paths match `pattern` pass uncounted, without header fields. The letter
    /// case must match too.
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route), and for a pattern with parameters that a lenient server would
    /// read differently, such as `/caf%C3%A9/{id}`: it would exempt nothing.
    #[doc(alias = "allowlist")]
    pub fn exempt(self, pattern: &str) -> Result<Self, ConfigError> {
        if pattern.contains('{')
            && let Some(read) = lenient(pattern)
            && read.path != pattern
        {
            let problem = "a pattern with parameters and escapes, a `;`, an empty segment or a segment \
                           that ends with a dot exempts nothing";
            return Err(wrong(pattern, problem));
        }
        self.add(None, pattern, None)
    }

    /// Ignores letter case, for servers that do, such as Express, IIS and file servers of Windows
    /// or macOS. Limits are then matched in lower case first: of limited `/users/{id}` and
    /// `/users/export`, the latter applies to `/users/Export`. Exemptions stay exact.
    ///
    /// Do not call it for a server that minds case: there, `Export` may be a user's name.
    #[must_use]
    pub fn ignore_case(self) -> Self {
        Self {
            ignores_case: true,
            ..self
        }
    }

    /// Adds a pattern, which is exempt without a selector.
    fn add(
        mut self,
        method: Option<Method>,
        pattern: &str,
        selector: Option<Selector>,
    ) -> Result<Self, ConfigError> {
        let is_for_all = method.is_none();
        let patterns = match method {
            Some(method) => self.methods.entry(method).or_default(),
            None => &mut self.all,
        };
        insert(&mut patterns.exact, pattern, self.routes.len())?;
        let folded = folded(pattern);
        // An exemption applies to the exact letter case only.
        if selector.is_some() {
            self.has_folded |= folded != pattern;
            // An earlier pattern may be equal in lower case: then this one has its own spelling only.
            let _ = patterns.folded.insert(&*folded, self.routes.len());
        }
        let selector = match selector {
            Some(selector) => selector,
            None => Selector::new(None::<Policies>),
        };
        self.routes.push(Route {
            selector,
            is_path: parameters(pattern) == 0,
            is_catch_all: pattern.contains("/{*"),
            rank: (is_for_all, rank(&folded)),
        });
        Ok(self)
    }

    /// All selectors, including the default one.
    fn selectors(&self) -> impl Iterator<Item = &Selector> {
        let selectors = self.routes.iter().map(|route| &route.selector);
        selectors.chain([&self.default])
    }

    fn at(&self, patterns: &Patterns, case: Case, path: &str) -> Option<&Route> {
        let router = match case {
            Case::Exact => &patterns.exact,
            Case::Folded => &patterns.folded,
        };
        self.routes.get(*router.at(path).ok()?.value)
    }

    fn of_method(&self, method: &Method, case: Case, path: &str) -> Option<&Route> {
        // Most routers have no patterns for single methods.
        if self.methods.is_empty() {
            return None;
        }
        if let Some(patterns) = self.methods.get(method)
            && let Some(route) = self.at(patterns, case, path)
        {
            return Some(route);
        }
        match *method {
            // A `CONNECT` with a path is an extended one (RFC 8441).
            Method::HEAD | Method::CONNECT => self.at(self.methods.get(&Method::GET)?, case, path),
            _ => None,
        }
    }

    fn find(&self, method: &Method, case: Case, path: &str) -> Option<&Route> {
        match self.of_method(method, case, path) {
            Some(route) => Some(route),
            None => self.at(&self.all, case, path),
        }
    }
}

/// A pattern and its policies.
struct Route {
    selector: Selector,
    /// Whether the pattern has no parameter, so that a matching path equals the pattern.
    is_path: bool,
    /// Whether the pattern ends with `/{*path}`. Then it matches a path with and without a slash at
    /// the end.
    is_catch_all: bool,
    /// The precedence among patterns that match a path in lower case; the lowest rank wins. A
    /// pattern for one method comes first, then the more specific one.
    rank: (bool, String),
}

/// Maximum number of parameters: with more, `matchit` panics.
const MAX_PARAMETERS: usize = 25;

/// Counts the parameters of a pattern, in which `{{` is a literal brace.
fn parameters(pattern: &str) -> usize {
    pattern.replace("{{", "").matches('{').count()
}

fn insert(router: &mut Router<usize>, pattern: &str, route: usize) -> Result<(), ConfigError> {
    if !pattern.starts_with('/') {
        let shown = redacted(pattern);
        if let Some((method, path)) = shown.split_once(" /") {
            let method = method.to_ascii_uppercase();
            return Err(ConfigError::new(format!(
                "invalid route {shown:?} (it begins with a method): for one method, use \
                 `.method(Method::{method}, \"/{path}\", ..)`"
            )));
        }
        return Err(wrong(pattern, "it does not begin with `/`"));
    }
    if !matches!(pattern.parse::<PathAndQuery>(), Ok(path) if path.path() == pattern) {
        return Err(wrong(pattern, "it contains a character that no path has"));
    }
    if pattern
        .split('/')
        .any(|segment| segment.starts_with([':', '*']))
    {
        return Err(wrong(
            pattern,
            "a segment begins with `:` or `*`, which is not a parameter",
        ));
    }
    if parameters(pattern) > MAX_PARAMETERS {
        return Err(wrong(
            pattern,
            format_args!("it has more than {MAX_PARAMETERS} parameters"),
        ));
    }
    router
        .insert(pattern, route)
        .map_err(|error| wrong(pattern, error))
}

/// Returns the pattern in lower case, and without escapes, which have several spellings.
fn folded(pattern: &str) -> String {
    match lenient(pattern) {
        // A decoded brace would begin a parameter.
        Some(read) if pattern.contains('%') && parameters(&read.path) == parameters(pattern) => {
            lower_case(&read.path).into_owned()
        }
        _ => lower_case(pattern).into_owned(),
    }
}

/// Returns the pattern with a character for each parameter that follows all others, since a router
/// prefers literal text to a parameter, and both to a catch-all.
fn rank(pattern: &str) -> String {
    const PARAMETER: char = '\u{10FFFE}';
    const CATCH_ALL: char = '\u{10FFFF}';
    let mut rank = String::with_capacity(pattern.len());
    let mut characters = pattern.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '{' || characters.next_if_eq(&'{').is_some() {
            rank.push(character);
            continue;
        }
        rank.push(match characters.peek() {
            Some('*') => CATCH_ALL,
            _ => PARAMETER,
        });
        for skipped in characters.by_ref() {
            if skipped == '}' {
                break;
            }
        }
    }
    rank
}

fn wrong(pattern: &str, problem: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!(
        "invalid route {:?} ({problem}): use `/users/{{id}}` or `/files/{{*path}}`, and add each pattern once",
        redacted(pattern)
    ))
}

impl PolicySelector for Routes {
    fn policies(&self, request: &Parts, key: Option<&Key>) -> Option<Policies> {
        let search = Search {
            routes: self,
            request,
            key,
        };
        match target(request) {
            Target::Path(path) => {
                if !self.nested.examined.is_claimed() {
                    search.examine(path);
                }
                search.of_path(path)
            }
            // Several paths fit the template, and the pattern may match only some of them: so it exempts none.
            Target::Template(template) => {
                let limit = search.limit_at(Case::Exact, &template);
                if limit.is_some() {
                    return limit;
                }
                search.of_default()
            }
        }
    }

    fn caller_without(&self, forms: KeyForms) -> Option<String> {
        self.selectors()
            .find_map(|selector| selector.caller_without(forms))
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = self.nested.observer.set(Arc::clone(observer));
        for selector in self.selectors() {
            selector.observe(observer);
        }
    }
}

/// Finds the policies of one request.
#[derive(Clone, Copy)]
struct Search<'a> {
    routes: &'a Routes,
    request: &'a Parts,
    key: Option<&'a Key>,
}

/// A path without a limit, as a lenient server reads it.
struct Reading<'a> {
    path: Cow<'a, str>,
    limit: Option<Policies>,
    /// The exemption of this path, if the raw path is exempt too.
    exempt: Option<&'a Route>,
}

impl<'a> Search<'a> {
    fn of_path(self, path: &str) -> Option<Policies> {
        let found = self.find(Case::Exact, path);
        let policies = match found {
            Some(route) => self.under(route),
            None => None,
        };
        if self.routes.ignores_case {
            let exempt = if policies.is_none() { found } else { None };
            let limit = self.folded_limit(&lower_case(path), exempt);
            if limit.is_some() {
                return limit;
            }
        }
        if policies.is_some() {
            return policies;
        }
        // Without policies, a route exempts the path. Here it is meant for exactly this path.
        if let Some(exempt) = found
            && exempt.is_path
        {
            return None;
        }
        let reading = self.read(path, found);
        let limit = self.lenient_limit(&reading);
        if limit.is_none() && reading.exempt.is_none() {
            return self.of_default();
        }
        limit
    }

    /// The limit of a path without a limit as sent: no other spelling of a limited path avoids its limit.
    fn lenient_limit(self, reading: &Reading<'_>) -> Option<Policies> {
        if self.routes.ignores_case {
            let limit = self.in_lower_case(reading);
            limit.or_else(|| self.as_written(reading))
        } else {
            let limit = self.as_written(reading);
            limit.or_else(|| self.in_lower_case(reading))
        }
    }

    /// Reads a path as a lenient server does. `found` is the exemption of the raw path.
    fn read<'p>(self, path: &'p str, found: Option<&'a Route>) -> Reading<'p>
    where
        'a: 'p,
    {
        let Some(read) = lenient(path) else {
            return Reading {
                path: path.into(),
                limit: None,
                exempt: found,
            };
        };
        let route = self.find(Case::Exact, &read.path);
        let limit = match route {
            Some(route) => self.under(route),
            None => None,
        };
        // Both readings must be exempt, since it is unknown which one the server uses. Servers resolve a `..`
        // differently, so a path with one is never exempt.
        let is_exempt = found.is_some() && limit.is_none() && !read.climbs;
        Reading {
            path: read.path.into(),
            limit,
            exempt: if is_exempt { route } else { None },
        }
    }

    fn as_written(self, reading: &Reading<'_>) -> Option<Policies> {
        if reading.limit.is_some() {
            return reading.limit.clone();
        }
        self.at_other_end(Case::Exact, &reading.path, reading.exempt)
    }

    fn in_lower_case(self, reading: &Reading<'_>) -> Option<Policies> {
        if !self.routes.has_folded && is_lower_case(&reading.path) {
            return None;
        }
        let path = lower_case(&reading.path);
        let limit = self.folded_limit(&path, reading.exempt);
        if limit.is_some() {
            return limit;
        }
        self.at_other_end(Case::Folded, &path, reading.exempt)
    }

    /// The limit of a path in lower case, unless the exemption is more specific.
    fn folded_limit(self, path: &str, exempt: Option<&Route>) -> Option<Policies> {
        let folded = self.find(Case::Folded, path)?;
        match exempt {
            Some(exempt) if exempt.rank <= folded.rank => None,
            _ => self.under(folded),
        }
    }

    /// The limit of the path with or without a slash at its end.
    fn at_other_end(self, case: Case, path: &str, exempt: Option<&Route>) -> Option<Policies> {
        let other = self.find(case, &other_end(path))?;
        // A catch-all matches at both ends, and a more specific pattern exempts this one.
        if exempt.is_some() && other.is_catch_all {
            return None;
        }
        self.under(other)
    }

    /// Suspects patterns without the prefix of a nested router. They may also be meant for another router.
    #[cold]
    fn examine(self, whole: &str) {
        let nested = &self.routes.nested;
        let Some(prefix) = prefix(self.request) else {
            // No request of this layer is nested.
            nested.examined.claim();
            return;
        };
        let is_whole = self.find(Case::Exact, whole).is_some();
        let inside = self.request.uri.path();
        if !is_whole && (inside == whole || self.find(Case::Exact, inside).is_none()) {
            return;
        }
        if nested.examined.claim() && !is_whole {
            let problem = format!(
                "a pattern of the `Routes` matches a path inside of the router that is nested at {prefix:?}, but patterns are matched \
                 against the whole path: begin it with {prefix:?}{NESTED_PATTERN}"
            );
            let observer = nested.observer.get();
            or_log(observer).notify(&Event::Suspected { problem: &problem });
        }
    }

    fn limit_at(self, case: Case, path: &str) -> Option<Policies> {
        self.under(self.find(case, path)?)
    }

    fn find(self, case: Case, path: &str) -> Option<&'a Route> {
        self.routes.find(&self.request.method, case, path)
    }

    fn under(self, route: &Route) -> Option<Policies> {
        self.of(&route.selector)
    }

    fn of_default(self) -> Option<Policies> {
        self.of(&self.routes.default)
    }

    fn of(self, selector: &Selector) -> Option<Policies> {
        selector.find(self.request, self.key)
    }
}

/// The path or template that patterns are matched against.
enum Target<'a> {
    Path(&'a str),
    /// axum's template of the matched route, if the path was rewritten after the match and the
    /// original path is unknown.
    #[cfg_attr(
        not(feature = "axum"),
        allow(dead_code, reason = "only axum reports templates")
    )]
    Template(Cow<'a, str>),
}

#[cfg(feature = "axum")]
fn target(request: &Parts) -> Target<'_> {
    use axum::extract::{MatchedPath, NestedPath, OriginalUri};

    let extensions = &request.extensions;
    let here = request.uri.path();
    let sent = match extensions.get::<OriginalUri>() {
        Some(OriginalUri(uri)) => uri.path(),
        None => here,
    };
    // A nested router strips its prefix from the path.
    let whole = if extensions.get::<NestedPath>().is_some() {
        sent
    } else {
        here
    };
    let Some(matched) = extensions.get::<MatchedPath>() else {
        return Target::Path(whole);
    };
    let template = matched.as_str();
    if fits(template, whole) {
        Target::Path(whole)
    } else if fits(template, sent) {
        Target::Path(sent)
    } else {
        // In a template, `{{` and `}}` are literal braces.
        Target::Template(template.replace("{{", "{").replace("}}", "}").into())
    }
}

#[cfg(not(feature = "axum"))]
fn target(request: &Parts) -> Target<'_> {
    Target::Path(request.uri.path())
}

/// Returns the path at which the router is nested that the request is in.
#[cfg(feature = "axum")]
fn prefix(request: &Parts) -> Option<&str> {
    let nested = request.extensions.get::<axum::extract::NestedPath>()?;
    Some(nested.as_str())
}

#[cfg(not(feature = "axum"))]
fn prefix(_: &Parts) -> Option<&str> {
    None
}

/// Returns `true` if axum would match this path with this template.
#[cfg(feature = "axum")]
fn fits(template: &str, path: &str) -> bool {
    let mut template = template.as_bytes();
    let mut path = path.as_bytes();
    loop {
        (template, path) = match (template, path) {
            ([], []) => return true,
            ([b'{', b'{', template @ ..], [b'{', path @ ..]) => (template, path),
            ([b'}', b'}', template @ ..], [b'}', path @ ..]) => (template, path),
            ([b'{', b'{', ..], _) => return false,
            ([b'{', parameter @ ..], _) => {
                let rest = after(parameter, b'}');
                if parameter.starts_with(b"*") {
                    // A wildcard in the middle belongs to an outer router, whose path is unknown.
                    return rest.is_empty() && !path.is_empty();
                }
                let segment = path.iter().position(|byte| *byte == b'/');
                (rest, &path[segment.unwrap_or(path.len())..])
            }
            ([one, template @ ..], [other, path @ ..]) if one == other => (template, path),
            _ => return false,
        };
    }
}

/// The text after the first such byte.
#[cfg(feature = "axum")]
fn after(text: &[u8], mark: u8) -> &[u8] {
    match text.iter().position(|byte| *byte == mark) {
        Some(place) => &text[place + 1..],
        None => &[],
    }
}

/// A path as a server more lenient than axum would read it.
struct Lenient {
    path: String,
    /// Whether it has a `..`.
    climbs: bool,
}

/// Returns the path as a lenient server would read it. `None` only if it would read the path
/// unchanged.
fn lenient(path: &str) -> Option<Lenient> {
    // Fast path: most paths are unchanged.
    if is_plain(path) {
        return None;
    }
    let mut decoded = decoded(path);
    if let Some(end) = decoded.iter().position(|byte| b"?#\0".contains(byte)) {
        decoded.truncate(end);
    }
    let mut segments = vec![];
    let mut climbs = false;
    for segment in decoded.split(|byte| b"/\\".contains(byte)) {
        let name = segment.split(|byte| *byte == b';').next();
        match without_end(name.unwrap_or_default()) {
            b"" | b"." => {}
            b".." => {
                climbs = true;
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    let mut read = [b"/", &*segments.join(&b'/')].concat();
    if !segments.is_empty() && decoded.ends_with(b"/") {
        read.push(b'/');
    }
    Some(Lenient {
        path: String::from_utf8_lossy(&read).into_owned(),
        climbs,
    })
}

/// Returns `true` if a lenient server reads the path unchanged.
fn is_plain(path: &str) -> bool {
    let mut before = b'a';
    for byte in path.bytes() {
        match (before, byte) {
            (_, b'%' | b';' | b'\\') | (b'/', b'/' | b'.') | (b'.', b'/') => return false,
            _ => before = byte,
        }
    }
    before != b'.'
}

/// Removes the dots and blanks at the end of a segment, as Windows does. A segment of dots has
/// another meaning.
fn without_end(segment: &[u8]) -> &[u8] {
    match without(b" .", segment) {
        b"" => without(b" ", segment),
        name => name,
    }
}

/// Removes these bytes at the end of a text.
fn without<'a>(ending: &[u8], text: &'a [u8]) -> &'a [u8] {
    match text.iter().rposition(|byte| !ending.contains(byte)) {
        Some(last) => &text[..=last],
        None => b"",
    }
}

fn is_lower_case(path: &str) -> bool {
    !path
        .bytes()
        .any(|byte| byte.is_ascii_uppercase() || !byte.is_ascii())
}

/// Folds each character separately: `str::to_lowercase` writes a sigma by the letters around it, and these may differ in a
/// pattern and a path.
fn lower_case(path: &str) -> Cow<'_, str> {
    const FINAL_SIGMA: char = '\u{3c2}';
    if is_lower_case(path) {
        return path.into();
    }
    let mut folded = String::with_capacity(path.len());
    for character in path.chars().flat_map(char::to_lowercase) {
        folded.push(match character {
            FINAL_SIGMA => '\u{3c3}',
            other => other,
        });
    }
    folded.into()
}

/// Removes the trailing slash, or adds one.
fn other_end(path: &str) -> Cow<'_, str> {
    match path.strip_suffix('/') {
        Some(without) => without.into(),
        None => format!("{path}/").into(),
    }
}

/// Decodes escapes, including nested ones: `%2e`, `%252e`.
fn decoded(path: &str) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(path.len());
    for byte in path.bytes() {
        decoded.push(byte);
        while let [.., b'%', high, low] = *decoded
            && let Some(high) = char::from(high).to_digit(16)
            && let Some(low) = char::from(low).to_digit(16)
        {
            decoded.truncate(decoded.len() - 3);
            decoded.push((high << 4 | low) as u8);
        }
    }
    decoded
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes")
            .field("default", &self.default)
            .finish_non_exhaustive()
    }
}
