use crate::simulation;

/// The rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Rule {
    /// The total grants to a caller are within the bound of `docs/faults.md`.
    Granted,
    /// During an outage an instance grants at most its share of the capacity last reported.
    Part,
    /// No charge is charged to the primary store twice.
    Twice,
    /// No expired charge is charged to the primary store.
    Lapsed,
    /// Grants of an outage are charged to the primary store.
    Lost,
    /// Grants for single failed requests are charged to the primary store soon.
    Late,
    /// Refunds and resets of an outage are repeated in the primary store.
    Back,
    /// The primary store counts exactly the grants minus the refunds, if every sent request was answered.
    Exact,
    /// The primary store charges an id once, and so does each instance.
    Id,
    /// A primary store that stalls gets no more consecutive requests than it takes to open the breaker.
    Silence,
    /// No request fails.
    Failed,
    /// No request takes longer than the deadline, or one deadline more after it is polled late.
    Wait,
    /// A decision is consistent.
    Sense,
    /// One second after the last fault the primary store decides again.
    Recovery,
    /// No task survives its store.
    Left,
    /// Nothing panics.
    Panic,
}

impl simulation::Rule for Rule {
    const ALL: &[Self] = &[
        Self::Granted,
        Self::Part,
        Self::Twice,
        Self::Lapsed,
        Self::Lost,
        Self::Late,
        Self::Back,
        Self::Exact,
        Self::Id,
        Self::Silence,
        Self::Failed,
        Self::Wait,
        Self::Sense,
        Self::Recovery,
        Self::Left,
    ];
    const PANIC: Self = Self::Panic;
}
