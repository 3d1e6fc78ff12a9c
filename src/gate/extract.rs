//! From a request to its key.

use std::sync::Arc;

use http::request::Parts;

use super::MissingKey;
use crate::limit::Key;

/// Finds the key of a request: who it is from.
///
/// [`PeerIp`](crate::extract::PeerIp), [`ClientIp`](crate::extract::ClientIp),
/// [`HeaderKey`](crate::extract::HeaderKey), [`by_extension`](crate::extract::by_extension), [`Global`] and closures
/// given to [`key_fn`] are extractors, with the feature `axum` also `MatchedRoute` and `MatchedEndpoint`. A tuple of
/// extractors counts each combination separately:
/// `(PeerIp, HeaderKey::new("x-api-key")?)` every pair of an address and an API key.
///
/// `R` is what it reads: for HTTP the [`Parts`], which are the request without its body. For other services it is the
/// type of the requests: see [`CallLimitLayer`](crate::CallLimitLayer).
///
/// A client must not be able to choose its key, or it could get a new count at any time. It chooses the path, its
/// spelling and the host; it does not choose the result of your authentication:
///
/// ```
/// use http::request::Parts;
/// use tower_redis_ratelimit::extract::{KeyExtractor, MissingKey};
/// use tower_redis_ratelimit::Key;
///
/// /// In the extensions of each request that is authenticated.
/// #[derive(Clone)]
/// struct Tenant(String);
///
/// struct ByTenant;
///
/// impl KeyExtractor for ByTenant {
///     fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
///         let tenant = request.extensions.get().map(|Tenant(name)| Key::new(name));
///         tenant.ok_or(MissingKey::new("the request names no tenant"))
///     }
/// }
///
/// /// A request that is not HTTP's.
/// struct Job {
///     tenant: Tenant,
/// }
///
/// impl KeyExtractor<Job> for ByTenant {
///     fn extract(&self, job: &Job) -> Result<Key, MissingKey> {
///         Ok(Key::new(&job.tenant.0))
///     }
/// }
/// # fn is_extractor(_: impl KeyExtractor) {}
/// # is_extractor(ByTenant);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` finds no key in a request",
    label = "not a `KeyExtractor` for `{R}`",
    note = "extractors are `PeerIp`, `ClientIp`, `HeaderKey`, `Global`, with the feature `axum` `MatchedRoute` and \
            `MatchedEndpoint`, and tuples of extractors",
    note = "a `Result`: add `?`, as in `HeaderKey::new(\"x-api-key\")?`",
    note = "of `ClientIp`, say who is trusted: `ClientIp::x_forwarded_for().trust([\"private\"])?`",
    note = "what your authentication has put into the request's extensions: `by_extension(|user: &User| user.id)`",
    note = "a closure: `key_fn(|request| ..)`, which is given `&http::request::Parts` and returns an `Option<Key>`",
    note = "requests that are not HTTP's: a closure with the type of its argument, as in `|job: &Job| ..`"
)]
pub trait KeyExtractor<R = Parts>: Send + Sync + 'static {
    /// The key that this request is counted by.
    ///
    /// # Errors
    ///
    /// [`MissingKey`] for a request without a key; the layer's [`OnMissingKey`](crate::reject::OnMissingKey) decides on
    /// it.
    fn extract(&self, request: &R) -> Result<Key, MissingKey>;

    /// Counts requests without a key of this extractor by `second`: users by their id, and the others by their address.
    ///
    /// It is asked where the key is [absent](MissingKey::is_absent), and where a request lacks the extension that
    /// [`by_extension`](crate::extract::by_extension) reads. A request with something
    /// [malformed](MissingKey::malformed) stays rejected, and a misconfigured server stays reported.
    ///
    /// Both make keys of the same space: a second one must not let a client write a key of the first, as a header that
    /// is [readable](crate::extract::HeaderKey::readable) would.
    fn or<K: KeyExtractor<R>>(self, second: K) -> Or<Self, K>
    where
        Self: Sized,
    {
        Or {
            first: self,
            second,
        }
    }
}

/// Counts by one extractor, or by another where that finds no key: see [`KeyExtractor::or`].
#[derive(Debug, Clone)]
pub struct Or<A, B> {
    first: A,
    second: B,
}

impl<R, A: KeyExtractor<R>, B: KeyExtractor<R>> KeyExtractor<R> for Or<A, B> {
    fn extract(&self, request: &R) -> Result<Key, MissingKey> {
        match self.first.extract(request) {
            Err(missing) if missing.may_have_another() => self.second.extract(request),
            found => found,
        }
    }
}

/// Counts by the key that a closure returns. `None` is a request [without a key](crate::reject::OnMissingKey).
///
/// It returns the closure; `key_fn` tells the compiler the type of its argument. A closure without it fails to compile:
/// "type annotations needed", or "implementation of `FnOnce` is not general enough". For an extension of the request
/// there is [`by_extension`](crate::extract::by_extension).
///
/// Do not count by the path as it is: it has many spellings. `/login/alice`, `/login/%61lice` and `/login/a%6cice` are
/// one user and three keys, each with separate guesses. Count where the path is decoded: the recipe "Login attempts" in
/// the [recipes](crate::guide::recipes) does so in the handler, with axum's `Path` and a [`Limiter`](crate::Limiter).
///
/// ```
/// use tower_redis_ratelimit::extract::key_fn;
/// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// /// In the extensions of each request that is authenticated.
/// #[derive(Clone)]
/// struct User {
///     team: Option<String>,
/// }
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let by_team = key_fn(|request| request.extensions.get::<User>()?.team.as_ref().map(Key::new));
/// let layer = RateLimitLayer::new(LocalStore::default(), by_team, policy);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
pub fn key_fn<F>(find: F) -> F
where
    F: Fn(&Parts) -> Option<Key>,
{
    find
}

#[diagnostic::do_not_recommend]
impl<R, F> KeyExtractor<R> for F
where
    F: Fn(&R) -> Option<Key> + Send + Sync + 'static,
{
    fn extract(&self, request: &R) -> Result<Key, MissingKey> {
        self(request).ok_or(MissingKey::new(
            "the request has nothing that it could be counted by",
        ))
    }
}

/// For an extractor that is not `Clone`.
impl<R, K: KeyExtractor<R> + ?Sized> KeyExtractor<R> for Arc<K> {
    fn extract(&self, request: &R) -> Result<Key, MissingKey> {
        (**self).extract(request)
    }
}

/// For one that is chosen when the program starts, and for a type with a name.
impl<R: 'static> KeyExtractor<R> for Box<dyn KeyExtractor<R>> {
    fn extract(&self, request: &R) -> Result<Key, MissingKey> {
        (**self).extract(request)
    }
}

/// Counts all requests together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Global;

impl<R> KeyExtractor<R> for Global {
    fn extract(&self, _: &R) -> Result<Key, MissingKey> {
        Ok(Key::GLOBAL)
    }
}

macro_rules! tuples {
    ($(($($extractor:ident $part:ident),+);)+) => {$(
        impl<R, $($extractor: KeyExtractor<R>),+> KeyExtractor<R> for ($($extractor,)+) {
            fn extract(&self, request: &R) -> Result<Key, MissingKey> {
                let ($($part,)+) = self;
                Ok(Key::tuple(&[$($part.extract(request)?),+]))
            }
        }
    )+};
}

tuples! {
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
}
