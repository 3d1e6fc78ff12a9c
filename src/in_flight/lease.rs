use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::{Origin, Phase};
use super::{EntryId, InFlightTracker, StoreAccess, Tracker};
use crate::error::StoreError;
use crate::limit::{Decision, Key, Policies};

/// What a request holds while it is in flight: it is released when this is dropped.
///
/// Dropped before the store has [answered](Self::answered), it is not known whether the store counts it: a sync finds
/// out.
///
/// Boxed: most requests hold none, and are moved often.
#[must_use]
pub(crate) struct Lease(Box<Inner>);

struct Inner {
    in_flight: InFlightTracker,
    key: Key,
    /// Those that count what is in flight.
    policies: Policies,
    /// Of each of these, in which phase it was asked about.
    phases: SmallVec<[Phase; 1]>,
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
    pub(super) fn new(in_flight: InFlightTracker, key: Key, policies: Policies, phases: SmallVec<[Phase; 1]>) -> Self {
        Self(Box::new(Inner { in_flight, key, policies, phases, state: State::Asked, is_known: false }))
    }

    /// The store has answered: what it has granted is held from here on. What it has failed to decide is
    /// held if the request [passes](Self::pass) all the same.
    pub(crate) fn answered(&mut self, answer: Result<&Decision, &StoreError>) {
        let answered = match answer {
            Ok(decision) => self.0.in_flight.access().answered(decision),
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

    /// Leaves it counted until its lease time ends, since it is not known when the request does.
    pub(crate) fn leave_counted(mut self) {
        if self.0.state == State::Held {
            self.0.state = State::Over;
            self.each(|tracker, id, _, access| tracker.left(id, access));
        }
    }

    fn hold(&mut self, answered: Origin) {
        if self.0.state == State::Asked {
            self.0.state = State::Held;
            self.each(|tracker, id, phase, _| tracker.granted(id, phase, answered));
        }
    }

    fn leave(&mut self) {
        if self.0.state == State::Asked {
            self.0.state = State::Over;
            self.each(|tracker, id, phase, access| tracker.denied(id, phase, access, Origin::there(self.0.is_known)));
        }
    }

    fn each(&self, act: impl Fn(&Arc<Tracker>, EntryId, Phase, &Arc<StoreAccess>)) {
        for (policy, phase) in self.0.policies.iter().zip(&self.0.phases) {
            act(
                self.0.in_flight.tracker(),
                EntryId { key: self.0.key, count: policy.id() },
                *phase,
                self.0.in_flight.access(),
            );
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leave();
        if self.0.state == State::Held {
            self.each(|tracker, id, _, access| tracker.ended(id, access));
        }
    }
}
