use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use http::Method;
use http::request::Parts;
use matchit::Router;

use super::{PolicySelector, Selector};
use crate::limit::{ConfigError, Key, Policies};

/// Policies by method and path, for one layer around a whole service.
///
/// Patterns are axum's: `/users/{id}`, and `/files/{*path}` for all below. Of several that fit, the most exact one
/// counts; one for the request's method goes before one for all methods. A pattern for `GET` stands for `HEAD` too, as in
/// axum, unless there is one for `HEAD`. What fits none is under what `new` was given.
///
/// ```
/// use http::Method;
/// use tower_redis_ratelimit::{LocalStore, PeerIp, Policy, Quota, RateLimitLayer, Routes, Strategy};
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
/// With the feature `axum`, a request that axum has matched (its `MatchedPath`) is looked up by its route's
/// template, that of a nested router in full: `/users/{id}`, not `/users/7`. So it is with `Router::layer`, where no
/// rewriting of paths leads around a limit. Any other request is looked up by its path as it was sent, not decoded: in a
/// layer around the whole router, and on its fallback.
///
/// Put the layer on the outermost router, or on one that is nested in it. Of a router that stands in a `route_service`, or in
/// the fallback of a nested router, axum does not tell whole templates, and patterns for whole paths do not fit them.
///
/// To count each route by itself under one policy, put the route into the key: see `MatchedRoute`.
pub struct Routes {
    all: Router<Selector>,
    methods: HashMap<Method, Router<Selector>>,
    default: Selector,
}

impl Routes {
    /// `default` is for what no pattern fits: a [`Policy`](crate::Policy), or any [`PolicySelector`].
    pub fn new(default: impl PolicySelector) -> Self {
        Self { all: Router::new(), methods: HashMap::new(), default: Selector::new(default) }
    }

    /// Sets the policies of paths that fit `pattern`, for all methods.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Route`] for a pattern that is none, or one like another: `/users/{id}` and `/users/{name}`.
    pub fn route(mut self, pattern: &str, policies: impl PolicySelector) -> Result<Self, ConfigError> {
        insert(&mut self.all, pattern, policies)?;
        Ok(self)
    }

    /// Sets the policies of paths that fit `pattern`, for one method.
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route).
    pub fn method(mut self, method: Method, pattern: &str, policies: impl PolicySelector) -> Result<Self, ConfigError> {
        insert(self.methods.entry(method).or_default(), pattern, policies)?;
        Ok(self)
    }

    /// Lets requests whose paths fit `pattern` pass uncounted, without header fields.
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route).
    pub fn exempt(self, pattern: &str) -> Result<Self, ConfigError> {
        self.route(pattern, None::<Policies>)
    }

    fn of_method(&self, method: &Method, path: &str) -> Option<&Selector> {
        // Most have none.
        if self.methods.is_empty() {
            return None;
        }
        let find = |method| Some(self.methods.get(method)?.at(path).ok()?.value);
        find(method).or_else(|| if method == Method::HEAD { find(&Method::GET) } else { None })
    }
}

fn insert(router: &mut Router<Selector>, pattern: &str, policies: impl PolicySelector) -> Result<(), ConfigError> {
    let wrong = |problem: String| ConfigError::Route { pattern: pattern.to_owned(), problem };
    if !pattern.starts_with('/') {
        return Err(wrong("it does not begin with `/`".to_owned()));
    }
    router.insert(pattern, Selector::new(policies)).map_err(|error| wrong(error.to_string()))
}

impl PolicySelector for Routes {
    fn policies(&self, request: &Parts, key: Option<&Key>) -> Option<Policies> {
        let path = &*path(request);
        let found = self.of_method(&request.method, path).or_else(|| Some(self.all.at(path).ok()?.value));
        found.unwrap_or(&self.default).policies(request, key)
    }
}

/// What patterns are compared with.
#[cfg(feature = "axum")]
fn path(request: &Parts) -> Cow<'_, str> {
    use axum::extract::{MatchedPath, OriginalUri};

    if let Some(matched) = request.extensions.get::<MatchedPath>() {
        let template = matched.as_str();
        // A brace that is none of a parameter is written twice in a template, but not in the path that fits it.
        return match template.as_bytes().windows(2).any(|two| two == b"{{" || two == b"}}") {
            true => template.replace("{{", "{").replace("}}", "}").into(),
            false => template.into(),
        };
    }
    // A nested router cuts what it stands under from the path.
    request.extensions.get::<OriginalUri>().map_or(&request.uri, |OriginalUri(uri)| uri).path().into()
}

#[cfg(not(feature = "axum"))]
fn path(request: &Parts) -> Cow<'_, str> {
    request.uri.path().into()
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes").field("default", &self.default).finish_non_exhaustive()
    }
}
