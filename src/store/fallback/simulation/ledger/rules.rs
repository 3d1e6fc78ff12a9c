use crate::simulation;

/// What must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Rule {
    /// All that a caller is granted stays within the bound of `docs/faults.md`.
    Granted,
    /// In an outage an instance grants no more than its part of what it last heard to be left.
    Part,
    /// The primary store is charged nothing that it was charged before.
    Twice,
    /// The primary store is charged nothing that has lapsed.
    Lapsed,
    /// The primary store is told what was granted in an outage.
    Lost,
    /// The primary store is told soon what was granted for a request that failed alone.
    Late,
    /// The primary store is told what was refunded and reset in its place.
    Back,
    /// The primary store counts just what was granted and not refunded, if nothing was sent that was not answered.
    Exact,
    /// An id is charged once by the primary store, and once by each instance.
    Id,
    /// A primary store that has fallen silent is sent no more requests, one after another, than it takes to open the
    /// breaker.
    Silence,
    /// No request fails.
    Failed,
    /// No request waits for longer than the deadline.
    Wait,
    /// A decision makes sense.
    Sense,
    /// Two seconds after the last fault the primary store decides again.
    Recovery,
    /// Nothing goes on once the stores are gone.
    Left,
    /// Nothing panics.
    Panic,
}

impl simulation::Rule for Rule {
    const PANIC: Self = Self::Panic;
}
