//! Admission: decides whether a request of any type may proceed.
//!
//! 1. [`Gate::admit`] extracts the key ([`KeyExtractor`]), selects the policies
//!    ([`PolicySelector`]) and sends the check.
//! 2. Until the store has replied, and while the request waits in a queue, the request is
//!    [`Pending`].
//! 3. An admitted request owns a [`Grant`]. Dropping it settles the charge and releases the
//!    in-flight slot.
//! 4. A rejected request yields a [`Refusal`], which becomes an HTTP response or the error of a
//!    call.
//!
//! Dry runs and shadows never reject. Their checks ([`Shadows`](shadows::Shadows)) start on
//! admission, run concurrently with the inner call, and belong to the grant.

mod admit;
mod choices;
mod extract;
mod grant;
mod missing;
mod notifier;
mod pending;
mod question;
mod select;
mod shadows;
pub mod wait;

use std::fmt;
use std::sync::Arc;

pub use choices::{OnError, OnMissingKey};
pub use extract::{Global, KeyExtractor, Or, key_fn};
pub use missing::MissingKey;
pub use select::{PolicySelector, policies_fn};
pub(crate) use wait::Wait;

pub(crate) use admit::{Admission, Admitted, Refusal};
pub(crate) use grant::Grant;
pub(crate) use notifier::Notifier;
pub(crate) use pending::Pending;
pub(crate) use question::Question;
pub(crate) use select::Selector;

use self::admit::NEVER_ENDS;
use self::wait::Waiting;
use crate::background::OpQueue;
use crate::in_flight::InFlightTracker;
use crate::limit::{Key, Policies};
use crate::observe::Observer;
use crate::observe::mistakes::IN_FLIGHT_WITHOUT_END;
use crate::store::Store;

/// The settings of a layer for requests of the type `R`.
pub(crate) struct Gate<S, R> {
    store: S,
    /// The identity of the store.
    identity: Option<usize>,
    policies: Selector<R>,
    /// Policies that are checked but not enforced, in addition to `policies`.
    pub(crate) shadows: Vec<Selector<R>>,
    /// Whether `policies` are not enforced either.
    pub(crate) dry_run: bool,
    /// Selects exempt requests.
    pub(crate) skip: Option<Skip<R>>,
    pub(crate) cost: Option<Cost<R>>,
    /// The id under which a request is charged once.
    pub(crate) id: Option<IdOf<R>>,
    /// The queues in which requests wait instead of being denied. `None` if requests do not wait.
    wait: Option<Waiting>,
    pub(crate) on_error: OnError,
    pub(crate) on_missing_key: OnMissingKey,
    pub(crate) notifier: Notifier,
    holds: Holds,
    /// Tracks requests in flight, including queued ones.
    in_flight: InFlightTracker,
    ops: OpQueue,
}

/// Returns `true` if a request is exempt: it passes without a key or a check.
type Skip<R> = Arc<dyn Fn(&R) -> bool + Send + Sync>;

/// The cost of a request under its policies.
type Cost<R> = Arc<dyn Fn(&R, &Policies) -> u32 + Send + Sync>;

/// The id of a request. `None` if each repetition of the request is charged.
type IdOf<R> = Arc<dyn Fn(&R) -> Option<Key> + Send + Sync>;

/// The resources that a request owns until it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// None: this layer does not see requests end.
    Nothing,
    /// Its in-flight slot.
    InFlight,
    /// Its in-flight slot, and its reservation, which is settled at the end.
    Charge,
}

impl<S: Store, R: 'static> Gate<S, R> {
    pub(crate) fn new(store: S, policies: impl PolicySelector<R>, holds: Holds) -> Self {
        let in_flight = InFlightTracker::new(&store, None);
        Self {
            identity: store.backend().waiters().map(|waiters| waiters.identity()),
            store,
            policies: Selector::new(policies),
            shadows: Vec::new(),
            dry_run: false,
            skip: None,
            cost: None,
            id: None,
            wait: None,
            on_error: OnError::default(),
            on_missing_key: OnMissingKey::default(),
            notifier: Notifier::default(),
            holds,
            ops: in_flight.ops().clone(),
            in_flight,
        }
    }

    /// Makes requests wait that would be denied.
    pub(crate) fn wait(&mut self, wait: Wait) {
        self.wait = Some(Waiting::new(
            self.store.clone(),
            self.in_flight.clone(),
            wait,
        ));
    }

    pub(crate) fn observe(&mut self, observer: Arc<dyn Observer>) {
        self.store.backend().observe(&observer);
        self.policies.observe(&observer);
        self.in_flight = InFlightTracker::new(&self.store, Some(Arc::clone(&observer)));
        self.ops = self.in_flight.ops().clone();
        self.wait = self
            .wait
            .take()
            .map(|waiting| waiting.with_tracker(self.in_flight.clone()));
        self.notifier = Notifier::new(observer);
    }
}

impl<S, R> Gate<S, R> {
    /// Enables settlement of the requests' reservations.
    pub(crate) fn settle(&mut self) {
        self.holds = Holds::Charge;
    }

    #[inline]
    fn settles(&self) -> bool {
        self.holds == Holds::Charge
    }

    /// Checks that this layer can enforce the policies that are set at startup.
    ///
    /// # Panics
    ///
    /// If the layer does not see requests end, and a policy limits requests in flight. Failing at
    /// startup is better than running without that limit until someone reads the log.
    pub(crate) fn assert_countable(&self) {
        for selector in self.shadows.iter().chain([&self.policies]) {
            let in_flight =
                matches!(selector, Selector::Fixed(policies) if policies.in_flight().is_some());
            assert!(
                self.holds != Holds::Nothing || !in_flight,
                "{NEVER_ENDS}{IN_FLIGHT_WITHOUT_END}"
            );
        }
    }

    /// Reports a fixed policy if another layer sets another limit for its count.
    pub(crate) fn report_shared_count(&self) {
        if let Selector::Fixed(policies) = &self.policies {
            self.notifier.shared_count(self.identity, policies);
        }
    }
}

/// Creates fresh `Arc`s where requests clone them, to avoid contention.
impl<S: Clone, R: 'static> Clone for Gate<S, R> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            identity: self.identity,
            policies: self.policies.clone(),
            shadows: self.shadows.clone(),
            dry_run: self.dry_run,
            skip: self.skip.clone(),
            cost: self.cost.clone(),
            id: self.id.clone(),
            wait: self.wait.clone(),
            on_error: self.on_error,
            on_missing_key: self.on_missing_key,
            notifier: self.notifier.clone(),
            holds: self.holds,
            in_flight: self.in_flight.clone(),
            ops: self.ops.copy(),
        }
    }
}

impl<S: fmt::Debug, R> Gate<S, R> {
    /// Formats the layer or service `name` that has these settings.
    pub(crate) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("store", &self.store)
            .field("policies", &self.policies)
            .finish_non_exhaustive()
    }
}
