//! Extractors for axum's route templates.

use axum::extract::MatchedPath;
use http::Method;
use http::request::Parts;

use crate::gate::{KeyExtractor, MissingKey, Notifier};
use crate::limit::{Key, KeyForms};

/// Counts by the template of the matched axum route, such as `/users/{id}`: all ids together.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_redis_ratelimit::extract::{MatchedRoute, PeerIp};
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// // Each address has 100 requests a minute to each route.
/// let policy = Policy::new("route", Strategy::Gcra, Quota::per_minute(100))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), (PeerIp, MatchedRoute), policy);
/// let app: Router = Router::new()
///     .route("/users/{id}", get(|| async { "user" }))
///     .route("/orders/{id}", get(|| async { "order" }))
///     .layer(layer);
/// # let _ = app;
/// # Ok(())
/// # }
/// ```
///
/// Requests that match no route share one key for all paths, so clients cannot create keys. These
/// are
/// - requests that a `fallback` handles, including that of a nested router,
/// - requests to a service added with `nest_service` or `fallback_service`, since axum reports no
///   route for them: give each of these services its own layer,
/// - all requests, if the layer wraps the `Router` instead of being added to it, to a nested router
///   or to a route: axum then matches routes only after the layer has decided.
///
/// The template of a nested router's route is the full one, such as `/api/users/{id}`. A request
/// with a method that the route does not have (405) counts for that route. Templates with
/// parameters are hashed in Redis.
#[derive(Debug, Clone, Copy, Default)]
pub struct MatchedRoute;

impl KeyExtractor for MatchedRoute {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        match template(request) {
            Some(template) => Ok(Key::new(template)),
            None => Ok(Key::NO_ROUTE),
        }
    }

    fn forms(&self) -> KeyForms {
        KeyForms::CLEAR.and(KeyForms::HASH).and(KeyForms::NO_ROUTE)
    }

    fn examine(&self, request: &Parts, layer: &Notifier) {
        layer.has_route(template(request).is_some());
    }
}

/// Counts by method and [`MatchedRoute`], such as `POST /users/{id}`.
///
/// `HEAD` counts as `GET`, whose handler serves it. So does an extended `CONNECT`, which starts a
/// WebSocket over HTTP/2. All methods other than those of HTTP and `PATCH` (RFC 5789) count as one,
/// and requests that match no route share one key for all methods, so clients cannot create keys
/// with either.
#[derive(Debug, Clone, Copy, Default)]
pub struct MatchedEndpoint;

impl KeyExtractor for MatchedEndpoint {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        let Some(template) = template(request) else {
            return Ok(Key::NO_ROUTE);
        };
        let method = Key::new(method(&request.method));
        Ok(Key::tuple(&[method, Key::new(template)]))
    }

    fn forms(&self) -> KeyForms {
        KeyForms::TUPLE.and(KeyForms::HASH).and(KeyForms::NO_ROUTE)
    }

    fn examine(&self, request: &Parts, layer: &Notifier) {
        layer.has_route(template(request).is_some());
    }
}

fn template(request: &Parts) -> Option<&str> {
    request.extensions.get().map(MatchedPath::as_str)
}

fn method(method: &Method) -> &'static str {
    match *method {
        // A `CONNECT` that matches a route is an extended one (RFC 8441), which starts a WebSocket
        // over HTTP/2.
        Method::GET | Method::HEAD | Method::CONNECT => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        Method::TRACE => "TRACE",
        // Otherwise a client could create keys by inventing methods.
        _ => "OTHER",
    }
}
