use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use tower_layer::Layer;

use super::Throttle;
use super::service::Settings;
use crate::gate::{Notifier, PolicySelector, Selector};
use crate::in_flight::InFlightTracker;
use crate::limit::Key;
use crate::observe::Observer;
use crate::store::Store;
use crate::wait_queues::{Bounds, WaitQueues};

/// Makes the services that it wraps wait for their turn: `poll_ready` takes a permit from the shared count, and is
/// ready when it has one.
///
/// For outbound clients and any other service, whatever its requests are, as long as one key counts them all: what may
/// go out to one API from all instances together. Where the request decides the key, take a
/// [`RateLimitLayer`](crate::RateLimitLayer) that [waits](crate::RateLimitLayer::wait).
///
/// ```
/// use std::convert::Infallible;
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy, ThrottleLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("geocoder", Strategy::Gcra, Quota::per_second(50).burst(10))?;
/// let mut client = ServiceBuilder::new()
///     .layer(ThrottleLayer::new(LocalStore::default(), Key::new("geocoder"), policy))
///     .service_fn(async |city: &str| Ok::<_, Infallible>(city.len()));
///
/// assert_eq!(client.ready().await?.call("Oslo").await?, 4);
/// # use tower::Service;
/// # Ok(())
/// # }
/// ```
///
/// # Permits
///
/// - A permit is charged when it is taken, and used by `call`. A service that is dropped, or never called, leaves its
///   permit to the next one that waits in this process, and otherwise to the store.
/// - A clone has a permit of its own. Clones, and all services of one layer, wait in one line, first come, first
///   served.
/// - Over several instances each takes at most one permit ahead of time, so they take turns. One call of the store
///   makes a grant, or several; a sliding log or counter, which cannot owe, takes up to about three calls. Let the
///   burst be at least the number of instances, and at least what comes in 10 ms: with less they ask more often, and a
///   part of the rate is not used.
/// - The inner service is polled ready first, so that no permit is held for one that is not. It stays ready meanwhile:
///   to limit how many calls run at once, wrap the throttle in the limit.
/// - A permit that is held for more than a second, and for so long that the count has forgotten it, is charged again by
///   the call that uses it. So a service that is ready and idle saves up one call, which others pay for later: of a
///   hundred idle ones a hundred calls may come at once, beside the burst.
/// - What there is room for a store that answers at once gives in the first poll. One that has to be asked over a
///   network answers later: a [`LoadShed`](https://docs.rs/tower/latest/tower/load_shed/struct.LoadShed.html) around
///   the throttle, which polls once, then sheds the call. Put a
///   [`Buffer`](https://docs.rs/tower/latest/tower/buffer/struct.Buffer.html) between them.
/// - A service that is polled on another runtime than before begins to wait anew.
/// - A runtime that ends takes its permits with it: what they were charged is not refunded.
/// - A call without a permit, of a service that was not polled ready, is charged and goes on.
///
/// Requests without a throttle on the same count are denied while permits are taken ahead: see
/// [`Check::take_ahead`](crate::check::Check::take_ahead).
///
/// # Errors
///
/// It adds none: the error is the inner service's. What the store cannot decide waits, and is asked again after a
/// while; see [`allow_on_error`](Self::allow_on_error). One call that fails is one service's; if three in a row fail,
/// it is that of all that wait, and the store is left alone for 250 ms. Put a [`Fallback`](crate::Fallback) into it,
/// and it goes on at this instance's share.
///
/// `poll_ready` has to be called within a tokio runtime.
#[derive(Clone)]
pub struct ThrottleLayer {
    settings: Settings,
}

impl ThrottleLayer {
    /// Takes permits from `store`, on the count of `key`, under the policies that
    /// `policies` gives: a [`Policy`](crate::Policy), several [`Policies`](crate::Policies), or
    /// [`Live`](crate::select::Live) ones, which count for whoever begins to wait after they were replaced. Without
    /// any, every call goes on. Policies of requests [in flight](crate::Policy::in_flight) are left out, and the
    /// observer is told that it is [misconfigured](Observer::misconfigured): a throttle does not know when a call has
    /// ended.
    pub fn new(store: impl Store, key: Key, policies: impl PolicySelector<()>) -> Self {
        let wait_queues = WaitQueues::new(store.clone(), InFlightTracker::new(&store, None), Bounds::DEFAULT);
        let policies = Selector::new(policies);
        Self { settings: Settings { wait_queues, key, policies, allow_on_error: false, notifier: Notifier::default() } }
    }

    /// Sets how many of its services may wait in line; one more is not in the line, and comes again after 250 ms.
    /// Defaults to 10,000.
    #[must_use]
    pub fn max_waiting(mut self, max: NonZeroUsize) -> Self {
        self.settings.wait_queues = self.settings.wait_queues.with_bounds(Bounds::of(max));
        self
    }

    /// Lets a call go on without a permit if the store cannot decide. Defaults to waiting on, and asking again.
    #[must_use]
    pub fn allow_on_error(mut self) -> Self {
        self.settings.allow_on_error = true;
        self
    }

    /// Sets who is told of every permit, with how long it was waited for, and of what no store could decide; and of
    /// what happens in the store, if that has no observer yet. See [`Observer`]. Defaults to nobody.
    #[must_use]
    pub fn observer(mut self, observer: impl Observer) -> Self {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.settings.wait_queues = self.settings.wait_queues.observed(&observer);
        self.settings.notifier = Notifier::new(observer);
        self
    }
}

impl<T> Layer<T> for ThrottleLayer {
    type Service = Throttle<T>;

    fn layer(&self, inner: T) -> Throttle<T> {
        Throttle::new(inner, Arc::new(self.settings.clone()))
    }
}

impl fmt::Debug for ThrottleLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleLayer")
            .field("policies", &self.settings.policies)
            .field("wait_queues", &self.settings.wait_queues)
            .finish_non_exhaustive()
    }
}
