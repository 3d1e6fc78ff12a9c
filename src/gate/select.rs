//! Policy selection: what finds the policies of a request.

use std::sync::Arc;

use http::request::Parts;

use crate::limit::{Key, KeyForms, Policies, Policy};
use crate::observe::Observer;

/// Finds the policies of a request.
///
/// A [`Policy`] and [`Policies`] apply to every request. [`Tiers`](crate::select::Tiers) choose by the caller's plan,
/// [`Routes`](crate::select::Routes) by method and path, [`policies_fn`] by a closure. [`Live`](crate::select::Live)
/// holds one of these, which can be replaced while the service runs. `None` limits nothing.
///
/// `R` is what it reads: for HTTP the [`Parts`], which are the request without its body. For other services it is the
/// type of the requests: see [`CallLimitLayer`](crate::CallLimitLayer). For a [`Limiter`](crate::Limiter) it is the [`Key`]
/// of the caller. `Tiers` are for HTTP and for a `Limiter`, and `Routes` are for HTTP.
///
/// ```
/// use http::request::Parts;
/// use tower_redis_ratelimit::select::PolicySelector;
/// use tower_redis_ratelimit::{Key, Policies};
///
/// /// Reads have a quota of their own.
/// struct ByMethod {
///     reads: Policies,
///     writes: Policies,
/// }
///
/// impl PolicySelector for ByMethod {
///     fn policies(&self, request: &Parts, _: Option<&Key>) -> Option<Policies> {
///         Some(if request.method.is_safe() { self.reads.clone() } else { self.writes.clone() })
///     }
/// }
/// # fn is_selector(_: impl PolicySelector) {}
/// # let policy = tower_redis_ratelimit::Policy::new("p", Default::default(), "1/s")?;
/// # is_selector(ByMethod { reads: policy.clone().into(), writes: policy.into() });
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` gives no policies for a request",
    label = "not a `PolicySelector` for `{R}`",
    note = "give a `Policy`, `Policies`, `Tiers`, `Routes` or `Live`",
    note = "a `Result`: add `?`, as in `Policy::new(name, strategy, quota)?`",
    note = "several policies for each request, as in a `Vec` or an array: `Policies::new([..])?`",
    note = "a closure: `policies_fn(|request| ..)`, which is given `&http::request::Parts` and returns `Policies`, or an `Option` of them",
    note = "requests that are not HTTP's: a closure with the type of its argument, as in `|job: &Job| ..`",
    note = "a `Limiter`, which has no request: `Tiers`, or a closure of the key, as in `|key: &Key| ..`"
)]
pub trait PolicySelector<R = Parts>: Send + Sync + 'static {
    /// The policies of this request, which is counted by `key`. `None` exempts it: it passes uncounted, without header
    /// fields, whether it has a key or not.
    ///
    /// `key` is `None` for a request without a key. Whether that passes depends on the layer's
    /// [`OnMissingKey`](crate::reject::OnMissingKey), not on the policies.
    ///
    /// It is called for every request, and must not block.
    fn policies(&self, request: &R, key: Option<&Key>) -> Option<Policies>;

    /// The policies of all requests, if they are always the same, for every type of requests: then `policies` is not
    /// called. Defaults to `None`.
    fn fixed(&self) -> Option<Policies> {
        None
    }

    /// Describes a caller with its own policies whose key the extractor never makes. `forms` are the forms of its keys.
    #[doc(hidden)]
    fn caller_without(&self, forms: KeyForms) -> Option<String> {
        let _ = forms;
        None
    }

    /// Receives the observer of a layer, to notify it of a [misconfigured](crate::observe::Event::Misconfigured)
    /// server, such as of a plan that is not listed. A selector that has an observer keeps that; a
    /// selector around others passes it on. Defaults to doing nothing.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = observer;
    }
}

/// Uses the policies that a closure returns: [`Policies`], or an `Option` of them, which is `None` for an exempt
/// request.
///
/// Returns the closure unchanged; the call tells the compiler the type of its argument.
///
/// ```
/// use http::Method;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::select::policies_fn;
/// use tower_redis_ratelimit::{LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let reads: Policies = Policy::new("reads", Strategy::Gcra, Quota::per_second(50))?.into();
/// let writes: Policies = Policy::new("writes", Strategy::Gcra, Quota::per_second(5))?.into();
/// let policies = policies_fn(move |request| match request.method {
///     Method::OPTIONS => None,
///     Method::GET | Method::HEAD => Some(reads.clone()),
///     _ => Some(writes.clone()),
/// });
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policies);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
///
/// Create the policies beforehand, as here: derived values, such as the text of a header field, are cached with them.
pub fn policies_fn<F, T>(find: F) -> F
where
    F: Fn(&Parts) -> T,
    T: Into<Option<Policies>>,
{
    find
}

#[diagnostic::do_not_recommend]
impl<R, F, T> PolicySelector<R> for F
where
    F: Fn(&R) -> T + Send + Sync + 'static,
    T: Into<Option<Policies>>,
{
    fn policies(&self, request: &R, _: Option<&Key>) -> Option<Policies> {
        self(request).into()
    }
}

impl<R> PolicySelector<R> for Policies {
    fn policies(&self, _: &R, _: Option<&Key>) -> Option<Policies> {
        Some(self.clone())
    }

    fn fixed(&self) -> Option<Policies> {
        Some(self.clone())
    }
}

impl<R> PolicySelector<R> for Policy {
    fn policies(&self, _: &R, _: Option<&Key>) -> Option<Policies> {
        Some(self.clone().into())
    }

    fn fixed(&self) -> Option<Policies> {
        Some(self.clone().into())
    }
}

impl<R, P: PolicySelector<R>> PolicySelector<R> for Option<P> {
    fn policies(&self, request: &R, key: Option<&Key>) -> Option<Policies> {
        self.as_ref()?.policies(request, key)
    }

    fn fixed(&self) -> Option<Policies> {
        self.as_ref()?.fixed()
    }

    fn caller_without(&self, forms: KeyForms) -> Option<String> {
        self.as_ref()?.caller_without(forms)
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        if let Some(selector) = self {
            selector.observe(observer);
        }
    }
}

// A method that is not forwarded would have its default, and still compile. So the list is in one place.
macro_rules! forward {
    () => {
        fn policies(&self, request: &R, key: Option<&Key>) -> Option<Policies> {
            (**self).policies(request, key)
        }

        fn fixed(&self) -> Option<Policies> {
            (**self).fixed()
        }

        fn caller_without(&self, forms: KeyForms) -> Option<String> {
            (**self).caller_without(forms)
        }

        fn observe(&self, observer: &Arc<dyn Observer>) {
            (**self).observe(observer);
        }
    };
}

impl<R, P: PolicySelector<R> + ?Sized> PolicySelector<R> for Arc<P> {
    forward!();
}

/// For a selector that is chosen at startup, or whose type must be named.
impl<R: 'static> PolicySelector<R> for Box<dyn PolicySelector<R>> {
    forward!();
}
