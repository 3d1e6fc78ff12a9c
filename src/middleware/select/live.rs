use std::fmt;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;

use crate::gate::PolicySelector;
use crate::limit::{Key, KeyForms, Policies};
use crate::observe::Observer;

/// Policies that are replaced while the service runs.
///
/// Clones share the value: keep one, and give the other to the layer. The next request on every thread uses the value
/// that was [set](Self::replace) last; requests in progress keep theirs. Counts continue under another
/// limit, and buckets under any other quota. So a quota may change at any pace: it grants at most what
/// the largest burst and the fastest rate give. Another period of a window begins a new count.
///
/// ```
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::select::Live;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// let policy = |limit| Policy::new("api", Strategy::Gcra, Quota::per_second(limit));
/// let live = Live::new(policy(50)?);
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, live.clone());
///
/// // A quota that cannot work is refused, and the old one stays.
/// assert!(policy(0).map(|policy| live.replace(policy)).is_err());
/// live.replace(policy(100)?);
/// # let _ = layer;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
pub struct Live<P>(Arc<SharedLive<P>>);

struct SharedLive<P> {
    held: ArcSwap<CurrentSelector<P>>,
    /// Kept for the selectors that `replace` stores later.
    observer: OnceLock<Arc<dyn Observer>>,
}

struct CurrentSelector<P> {
    selector: P,
    /// Converted once, since a list caches derived values, such as the text of a header field.
    fixed: OnceLock<Option<Policies>>,
}

impl<P> Live<P> {
    /// Creates a value with `selector`, a [`PolicySelector`].
    pub fn new(selector: P) -> Self {
        Self(Arc::new(SharedLive {
            held: ArcSwap::from_pointee(CurrentSelector::new(selector)),
            observer: OnceLock::new(),
        }))
    }

    /// Calls `read` with the selector in force, such as for an admin page that shows the limits.
    ///
    /// ```
    /// use tower_redis_ratelimit::select::Live;
    /// use tower_redis_ratelimit::{Policy, Strategy};
    ///
    /// let live = Live::new(Policy::new("api", Strategy::Gcra, "50/s")?);
    /// assert_eq!(live.with_current(|policy| policy.quota().to_string()), "50/s");
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn with_current<T>(&self, read: impl FnOnce(&P) -> T) -> T {
        // An `Arc`, since the closure may take long.
        let current = self.0.held.load_full();
        read(&current.selector)
    }

    /// Replaces the selector; the next requests use this one.
    pub fn replace(&self, selector: P) {
        self.0.held.store(Arc::new(CurrentSelector::new(selector)));
    }
}

impl<P> CurrentSelector<P> {
    const fn new(selector: P) -> Self {
        Self {
            selector,
            fixed: OnceLock::new(),
        }
    }
}

impl<R, P: PolicySelector<R>> PolicySelector<R> for Live<P> {
    fn policies(&self, request: &R, key: Option<&Key>) -> Option<Policies> {
        let CurrentSelector { selector, fixed } = &**self.0.held.load();
        // Here, not in `replace`, which does not know the type of requests.
        let fixed = fixed.get_or_init(|| {
            if let Some(observer) = self.0.observer.get() {
                selector.observe(observer);
            }
            selector.fixed()
        });
        match fixed {
            Some(policies) => Some(policies.clone()),
            None => selector.policies(request, key),
        }
    }

    fn caller_without(&self, forms: KeyForms) -> Option<String> {
        self.0.held.load().selector.caller_without(forms)
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        let observer = self.0.observer.get_or_init(|| Arc::clone(observer));
        self.0.held.load().selector.observe(observer);
    }
}

impl<P> Clone for Live<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<P: fmt::Debug> fmt::Debug for Live<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Live")
            .field(&self.0.held.load().selector)
            .finish()
    }
}
