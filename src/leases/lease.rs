use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::{Answered, Side};
use super::{Books, Leases, Place, Route};
use crate::limit::{Decision, Key, Policies};
use crate::store::StoreError;

/// What a request holds while it is in flight: it is released when this is dropped.
///
/// Dropped before the store's answer is [told](Self::answered), it is not known whether the store counts it: it is then told how
/// many are in flight.
#[must_use]
pub struct Lease {
    leases: Leases,
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
    pub(super) fn new(leases: Leases, key: Key, policies: Policies, sides: SmallVec<[Side; 1]>) -> Self {
        Self { leases, key, policies, sides, state: State::Asked, is_known: false }
    }

    /// Tells what the store has answered: what it has granted is held from here on. What it has failed to decide is held if the
    /// request [passes](Self::pass) all the same.
    pub(crate) fn answered(&mut self, answer: Result<&Decision, &StoreError>) {
        let answered = match answer {
            Ok(decision) => self.leases.route().answered(decision),
            Err(error) => Answered::there(error.is_unsent()),
        };
        self.is_known = answered != Answered::Elsewhere;
        match answer {
            Ok(decision) if decision.is_allowed() => self.hold(answered),
            Ok(_) => self.leave(),
            Err(_) => {}
        }
    }

    /// The request goes on though the store has failed to decide: it is in flight all the same.
    pub(crate) fn passed(mut self) -> Self {
        self.hold(Answered::Elsewhere);
        self
    }

    /// Leaves it counted: nobody tells when it ends, and its lease time does.
    pub(crate) fn leave_counted(mut self) {
        if self.state == State::Held {
            self.state = State::Over;
            self.each(|books, place, _, route| books.left(place, route));
        }
    }

    fn hold(&mut self, answered: Answered) {
        if self.state == State::Asked {
            self.state = State::Held;
            self.each(|books, place, side, _| books.granted(place, side, answered));
        }
    }

    fn leave(&mut self) {
        if self.state == State::Asked {
            self.state = State::Over;
            self.each(|books, place, side, route| books.denied(place, side, route, Answered::there(self.is_known)));
        }
    }

    fn each(&self, tell: impl Fn(&Arc<Books>, Place, Side, &Arc<Route>)) {
        for (policy, side) in self.policies.iter().zip(&self.sides) {
            tell(self.leases.books(), Place { key: self.key, count: policy.id() }, *side, self.leases.route());
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leave();
        if self.state == State::Held {
            self.each(|books, place, _, route| books.ended(place, route));
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("policies", &self.policies).field("state", &self.state).finish_non_exhaustive()
    }
}
