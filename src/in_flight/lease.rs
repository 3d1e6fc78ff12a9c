use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::{Origin, Side};
use super::{InFlightTracker, Place, Route, Tracker};
use crate::error::StoreError;
use crate::limit::{Decision, Key, Policies};

/// What a request holds while it is in flight: it is released when this is dropped.
///
/// Dropped before the store's answer is [told](Self::answered), it is not known whether the store counts it: it is then
/// told how many are in flight.
///
/// Boxed: most requests hold none, and are moved often.
#[must_use]
pub(crate) struct Lease(Box<Inner>);

struct Inner {
    in_flight: InFlightTracker,
    key: Key,
    /// Those that count what is in flight.
    policies: Policies,
    /// Of each of these, on which side of a look it was asked about.
    sides: SmallVec<[Side; 1]>,
    state: State,
    /// Whether it is known what the store that keeps the count has answered.
    is_known: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asked,
    Held,
    Over,
}

impl Lease {
    pub(super) fn new(in_flight: InFlightTracker, key: Key, policies: Policies, sides: SmallVec<[Side; 1]>) -> Self {
        Self(Box::new(Inner { in_flight, key, policies, sides, state: State::Asked, is_known: false }))
    }

    /// Tells what the store has answered: what it has granted is held from here on. What it has failed to decide is
    /// held if the request [passes](Self::pass) all the same.
    pub(crate) fn answered(&mut self, answer: Result<&Decision, &StoreError>) {
        let answered = match answer {
            Ok(decision) => self.0.in_flight.route().answered(decision),
            Err(error) => Origin::there(error.is_unsent()),
        };
        self.0.is_known = answered != Origin::Other;
        match answer {
            Ok(decision) if decision.is_allowed() => self.hold(answered),
            Ok(_) => self.leave(),
            Err(_) => {}
        }
    }

    /// The request goes on though the store has failed to decide: it is in flight all the same.
    pub(crate) fn passed(mut self) -> Self {
        self.hold(Origin::Other);
        self
    }

    /// Leaves it counted: nobody tells when it ends, and its lease time does.
    pub(crate) fn leave_counted(mut self) {
        if self.0.state == State::Held {
            self.0.state = State::Over;
            self.each(|tracker, place, _, route| tracker.left(place, route));
        }
    }

    fn hold(&mut self, answered: Origin) {
        if self.0.state == State::Asked {
            self.0.state = State::Held;
            self.each(|tracker, place, side, _| tracker.granted(place, side, answered));
        }
    }

    fn leave(&mut self) {
        if self.0.state == State::Asked {
            self.0.state = State::Over;
            self.each(|tracker, place, side, route| tracker.denied(place, side, route, Origin::there(self.0.is_known)));
        }
    }

    fn each(&self, tell: impl Fn(&Arc<Tracker>, Place, Side, &Arc<Route>)) {
        for (policy, side) in self.0.policies.iter().zip(&self.0.sides) {
            tell(
                self.0.in_flight.tracker(),
                Place { key: self.0.key, count: policy.id() },
                *side,
                self.0.in_flight.route(),
            );
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leave();
        if self.0.state == State::Held {
            self.each(|tracker, place, _, route| tracker.ended(place, route));
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("policies", &self.0.policies)
            .field("state", &self.0.state)
            .finish_non_exhaustive()
    }
}
