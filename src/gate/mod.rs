//! The gate of a layer: from a request of any type to whether it passes.
//!
//! A [`Gate`] has the settings of a layer. It finds the key ([`KeyExtractor`]) and the policies ([`PolicySelector`]) of
//! a request, and sends the check ([`Gate::admit`]). A request that passes gets a [`Grant`], whose drop settles what
//! the request has taken. Another gets a [`Refusal`], which becomes an HTTP response or a call's error. Until the store
//! has answered, and while the request waits for its turn, it is [`Pending`].
//!
//! The checks of dry runs and shadows, which reject nothing, start when a request passes, and belong to its grant
//! ([`Shadows`]).

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
use crate::in_flight::InFlightTracker;
use crate::limit::Policies;
use crate::observe::Observer;
use crate::observe::mistakes::IN_FLIGHT_WITHOUT_END;
use crate::refunds::RefundQueue;
use crate::store::Store;

/// The settings of a layer for requests of the type `R`.
pub(crate) struct Gate<S, R> {
    store: S,
    /// The identity of the store.
    identity: Option<usize>,
    policies: Selector<R>,
    /// Policies that reject nothing, beside those that do.
    pub(crate) shadows: Vec<Selector<R>>,
    /// Whether `policies` reject nothing either.
    pub(crate) dry_run: bool,
    /// Which requests are let through at once.
    pub(crate) skip: Option<Skip<R>>,
    pub(crate) cost: Option<Cost<R>>,
    /// How long requests that would be denied wait, if they do.
    wait: Option<Waiting>,
    pub(crate) on_error: OnError,
    pub(crate) on_missing_key: OnMissingKey,
    pub(crate) notifier: Notifier,
    holds: Holds,
    /// The requests in flight, with those that wait.
    in_flight: InFlightTracker,
    refunds: Arc<dyn RefundQueue>,
}

/// Whether a request is let through at once.
type Skip<R> = Arc<dyn Fn(&R) -> bool + Send + Sync>;

/// What a request costs under its policies.
type Cost<R> = Arc<dyn Fn(&R, &Policies) -> u32 + Send + Sync>;

/// What a request holds until it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Nothing: its end is not known.
    Nothing,
    /// Its slot in flight.
    InFlight,
    /// That, and its reservation, which is settled at the end.
    Charge,
}

impl<S: Store, R: 'static> Gate<S, R> {
    pub(crate) fn new(store: S, policies: impl PolicySelector<R>, holds: Holds) -> Self {
        let in_flight = InFlightTracker::new(&store, None);
        Self {
            identity: store.identity(),
            store,
            policies: Selector::new(policies),
            shadows: Vec::new(),
            dry_run: false,
            skip: None,
            cost: None,
            wait: None,
            on_error: OnError::default(),
            on_missing_key: OnMissingKey::default(),
            notifier: Notifier::default(),
            holds,
            refunds: Arc::clone(in_flight.refunds()),
            in_flight,
        }
    }

    /// Lets requests wait that would be denied.
    pub(crate) fn wait(&mut self, wait: Wait) {
        self.wait = Some(Waiting::new(
            self.store.clone(),
            self.in_flight.clone(),
            wait,
        ));
    }

    pub(crate) fn observe(&mut self, observer: impl Observer) {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.store.observe(&observer);
        self.policies.observe(&observer);
        self.in_flight = InFlightTracker::new(&self.store, Some(Arc::clone(&observer)));
        self.refunds = Arc::clone(self.in_flight.refunds());
        self.wait = self
            .wait
            .take()
            .map(|waiting| waiting.with_tracker(self.in_flight.clone()));
        self.notifier = Notifier::new(observer);
    }
}

impl<S, R> Gate<S, R> {
    /// Settles, from here on, what requests have reserved.
    pub(crate) fn settle(&mut self) {
        self.holds = Holds::Charge;
    }

    #[inline]
    fn settles(&self) -> bool {
        self.holds == Holds::Charge
    }

    /// Checks that it can count by the policies that are known from the start.
    ///
    /// # Panics
    ///
    /// If it cannot. A server that does not start is better than one that runs without a limit until its log is read.
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

    /// Reports a policy that is known from the start if another layer has another limit for its count.
    pub(crate) fn report_shared_count(&self) {
        if let Selector::Fixed(policies) = &self.policies {
            self.notifier.shared_count(self.identity, policies);
        }
    }
}

/// With fresh `Arc`s where a request clones one, to avoid contention.
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
            wait: self.wait.clone(),
            on_error: self.on_error,
            on_missing_key: self.on_missing_key,
            notifier: self.notifier.clone(),
            holds: self.holds,
            in_flight: self.in_flight.clone(),
            refunds: self.refunds.copy(),
        }
    }
}

impl<S: fmt::Debug, R> Gate<S, R> {
    /// Shows the layer or service of this name that has these settings.
    pub(crate) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("store", &self.store)
            .field("policies", &self.policies)
            .finish_non_exhaustive()
    }
}
