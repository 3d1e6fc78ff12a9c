//! Key extraction: identifies the caller of a request.

use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use super::{MissingKey, Notifier};
use crate::limit::{Key, KeyForms};
use crate::observe::misses::Misses;
use crate::observe::mistakes::ALWAYS_SECOND_KEY;
use crate::observe::{Event, Observer};

/// Finds the rate-limit key of a request, which identifies its caller.
///
/// [`PeerIp`](crate::extract::PeerIp), [`ClientIp`](crate::extract::ClientIp),
/// [`HeaderKey`](crate::extract::HeaderKey), [`by_extension`](crate::extract::by_extension),
/// [`Global`] and closures given to [`key_fn`] are extractors, with the feature `axum` also
/// `MatchedRoute` and `MatchedEndpoint`. A tuple of extractors counts each combination separately,
/// as `(PeerIp, HeaderKey::new("x-api-key")?)` counts each pair of an address and an API key.
///
/// `R` is the type that the extractor reads. For HTTP it is [`Parts`], the request without its
/// body. For other services it is their request type: see
/// [`CallLimitLayer`](crate::CallLimitLayer).
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
    note = "an extractor in a box names its type: `Box::new(extractor) as Box<dyn KeyExtractor>`",
    note = "extractors are `PeerIp`, `ClientIp`, `HeaderKey`, `Global`, with the feature `axum` `MatchedRoute` and \
            `MatchedEndpoint`, and tuples of extractors",
    note = "a `Result`: add `?`, as in `HeaderKey::new(\"x-api-key\")?`",
    note = "of `ClientIp`, say who is trusted: `ClientIp::x_forwarded_for().trust([\"private\"])?`",
    note = "what your authentication has put into the request's extensions: `by_extension(|user: &User| user.id)`",
    note = "a closure: `key_fn(|request| ..)`, which is given `&http::request::Parts` and returns an `Option<Key>`",
    note = "requests that are not HTTP's: a closure with the type of its argument, as in `|job: &Job| ..`"
)]
pub trait KeyExtractor<R = Parts>: Send + Sync + 'static {
    /// Returns the key that this request is counted under. A handler with a [`Limiter`](crate::Limiter) can call it too,
    /// with the request's [`Parts`].
    ///
    /// # Errors
    ///
    /// [`MissingKey`] if the request has no key. The layer's
    /// [`OnMissingKey`](crate::reject::OnMissingKey) decides whether the request passes.
    fn extract(&self, request: &R) -> Result<Key, MissingKey>;

    /// Notifies a layer of the mistakes that one of its first requests shows.
    #[doc(hidden)]
    fn examine(&self, request: &R, layer: &Notifier) {
        let _ = (request, layer);
    }

    /// Returns the forms of the keys that this extractor makes.
    #[doc(hidden)]
    fn forms(&self) -> KeyForms {
        KeyForms::ANY
    }

    /// Receives the observer of a layer, to notify it of a [second key](Event::SecondKey). An extractor that has an
    /// observer keeps that; an extractor around others passes it on.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = observer;
    }

    /// Falls back to `second` if this extractor finds no key: for example, the user's id, else the
    /// peer's address.
    ///
    /// `second` is used if the key is [absent](MissingKey::is_absent), or if the request lacks the
    /// extension that [`by_extension`](crate::extract::by_extension) reads.
    /// [Malformed](MissingKey::malformed) keys are still rejected, and a misconfigured server is
    /// still reported. If none of the first 1,000 requests has the extension, that is reported too,
    /// because the layers may be in the wrong order. The observer is notified of each [second
    /// key](Event::SecondKey).
    ///
    /// Both extractors share one key space. `second` must not let a client produce a key of the
    /// first extractor, as a [readable](crate::extract::HeaderKey::readable) header would.
    fn or<K: KeyExtractor<R>>(self, second: K) -> Or<Self, K>
    where
        Self: Sized,
    {
        Or {
            first: self,
            second,
            misses: Arc::default(),
        }
    }
}

/// Uses one extractor, and another if the first finds no key: see [`KeyExtractor::or`].
#[derive(Clone)]
pub struct Or<A, B> {
    first: A,
    second: B,
    misses: Arc<Misses>,
}

impl<R, A: KeyExtractor<R>, B: KeyExtractor<R>> KeyExtractor<R> for Or<A, B> {
    fn extract(&self, request: &R) -> Result<Key, MissingKey> {
        let missing = match self.first.extract(request) {
            Err(missing) if missing.may_have_another() => missing,
            // Also a malformed key: otherwise a client could choose the extractor by such a value.
            found => {
                self.misses.found();
                return found;
            }
        };
        // Any client may omit a header, but a missing extension may show a wrong order of layers.
        match missing.no_extension() {
            Some(of_type) => self.misses.missed(|| always_second(of_type)),
            None => self.misses.found(),
        }
        let second = self.second.extract(request);
        if let (Ok(key), Some(observer)) = (&second, self.misses.observer()) {
            observer.notify(&Event::SecondKey { key });
        }
        second
    }

    fn examine(&self, request: &R, layer: &Notifier) {
        // Also the second one, without a look for the first key: requests without that key may come later.
        self.first.examine(request, layer);
        self.second.examine(request, layer);
    }

    fn forms(&self) -> KeyForms {
        self.first.forms().and(self.second.forms())
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.misses.observe(observer);
        self.first.observe(observer);
        self.second.observe(observer);
    }
}

/// The problem that no request had the extension of this type.
fn always_second(of_type: &str) -> String {
    format!(
        "none of the first {} requests had a `{of_type}` in its extensions, and the second extractor of `.or(..)` counted them: put the \
         layer inside the authentication that inserts it (of axum's layers, the last one is the outermost), name the type that it inserts \
         (an `Arc<T>` in the extensions is another type than `T`), or ignore this if all of them were anonymous{ALWAYS_SECOND_KEY}",
        Misses::REPORT_AT
    )
}

impl<A: fmt::Debug, B: fmt::Debug> fmt::Debug for Or<A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Or")
            .field("first", &self.first)
            .field("second", &self.second)
            .finish()
    }
}

/// Uses the key that a closure returns. `None` means [no key](crate::reject::OnMissingKey).
///
/// Returns the closure unchanged; the call tells the compiler the type of the closure's argument.
/// Without it, compilation fails with "type annotations needed" or "implementation of `FnOnce` is
/// not general enough". For an extension of the request, use
/// [`by_extension`](crate::extract::by_extension).
///
/// Do not use the raw path as a key: it has many spellings. `/login/alice`, `/login/%61lice` and
/// `/login/a%6cice` are one user but three keys, each with separate guesses. Count after the path
/// is decoded: the recipe "Login attempts" in the [recipes](crate::guide::recipes) does so in the
/// handler, with axum's `Path` and a [`Limiter`](crate::Limiter).
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
        self(request).ok_or(MissingKey::new("no rate-limit key found in the request"))
    }
}

/// For an extractor that is not `Clone`.
// A method that is not forwarded would have its default, and still compile. So the list is in one place.
macro_rules! forward {
    () => {
        fn extract(&self, request: &R) -> Result<Key, MissingKey> {
            (**self).extract(request)
        }

        fn examine(&self, request: &R, layer: &Notifier) {
            (**self).examine(request, layer);
        }

        fn forms(&self) -> KeyForms {
            (**self).forms()
        }

        fn observe(&self, observer: &Arc<dyn Observer>) {
            (**self).observe(observer);
        }
    };
}

impl<R, K: KeyExtractor<R> + ?Sized> KeyExtractor<R> for Arc<K> {
    forward!();
}

/// For an extractor that is chosen at startup, or whose type must be named.
impl<R: 'static> KeyExtractor<R> for Box<dyn KeyExtractor<R>> {
    forward!();
}

/// Counts all requests under one key.
#[derive(Debug, Clone, Copy, Default)]
pub struct Global;

impl<R> KeyExtractor<R> for Global {
    fn extract(&self, _: &R) -> Result<Key, MissingKey> {
        Ok(Key::GLOBAL)
    }

    fn forms(&self) -> KeyForms {
        KeyForms::GLOBAL
    }
}

macro_rules! tuples {
    ($(($($extractor:ident $part:ident),+);)+) => {$(
        impl<R, $($extractor: KeyExtractor<R>),+> KeyExtractor<R> for ($($extractor,)+) {
            fn extract(&self, request: &R) -> Result<Key, MissingKey> {
                let ($($part,)+) = self;
                Ok(Key::tuple(&[$($part.extract(request)?),+]))
            }

            fn examine(&self, request: &R, layer: &Notifier) {
                let ($($part,)+) = self;
                $($part.examine(request, layer);)+
            }

            /// A long tuple, or one of tuples, is hashed.
            fn forms(&self) -> KeyForms {
                KeyForms::TUPLE.and(KeyForms::HASH)
            }

            fn observe(&self, observer: &Arc<dyn Observer>) {
                let ($($part,)+) = self;
                $($part.observe(observer);)+
            }
        }
    )+};
}

tuples! {
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
}
