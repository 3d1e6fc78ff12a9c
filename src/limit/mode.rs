/// What a check does with its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// All of it or nothing.
    Take,
    /// All of it or nothing: now, or as a debt that is due later.
    TakeAhead,
    /// As much of it as there is room for, down to one.
    UpTo,
    /// Says whether a take would pass, and charges nothing.
    Peek,
    /// Charges in any case, up to a debt of one capacity.
    Charge,
    /// Refunds what was charged, down to nothing charged.
    Refund,
    /// Forgets all charges of the caller.
    Reset,
    /// Renews the slot of a [request in flight](crate::Policy::in_flight), also beyond the limit if the store has lost
    /// it.
    Renew,
    /// Releases the slot of a [request in flight](crate::Policy::in_flight).
    Release,
}

impl Mode {
    /// Whether it takes what a request costs: a policy that counts [requests in flight](crate::Policy::in_flight) then
    /// counts one.
    pub(super) fn takes(self) -> bool {
        matches!(self, Self::Take | Self::TakeAhead | Self::UpTo | Self::Peek)
    }

    /// The room that a policy must have to let the check pass, or for [`TakeAhead`](Self::TakeAhead) to let it pass
    /// now.
    pub(super) fn needs(self, cost: i64, capacity: i64) -> i64 {
        match self {
            Self::Take | Self::TakeAhead | Self::Peek => cost,
            Self::UpTo => cost.min(1),
            Self::Charge => cost.min(1) - capacity,
            // However deep in debt: a quota may have been lowered.
            Self::Refund | Self::Reset | Self::Renew | Self::Release => i64::MIN,
        }
    }

    /// What a policy that lets the check pass would charge; what it would refund, or forget. It holds no requests.
    pub(super) fn grants(self, cost: i64, room: i64, capacity: i64) -> i64 {
        match self {
            Self::Take | Self::TakeAhead => cost,
            Self::UpTo => cost.min(room).max(0),
            Self::Peek => 0,
            Self::Charge => cost.min(room + capacity).max(0),
            Self::Refund => cost.min(capacity - room),
            Self::Reset => capacity - room,
            Self::Renew | Self::Release => 0,
        }
    }
}
