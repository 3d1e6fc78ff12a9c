/// The operation of a check. All are public, since a [`Store`](crate::store::Store) that decides
/// itself must distinguish them; [`Counts`](crate::store::Counts) does so for other stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Takes the whole cost or nothing.
    Take,
    /// Takes the whole cost or nothing, either now or as a debt that is due later.
    TakeAhead,
    /// Takes as much of the cost as fits, but at least one.
    UpTo,
    /// Decides whether a take would be allowed, without charging it.
    Peek,
    /// Charges even beyond the limit, up to a debt of one capacity.
    Charge,
    /// Refunds a charge, until nothing is charged.
    Refund,
    /// Resets the caller's counts.
    Reset,
    /// Renews the slot of a [request in flight](crate::Policy::in_flight). If the store has lost
    /// the slot, takes it again, even beyond the limit.
    Renew,
    /// Releases the slot of a [request in flight](crate::Policy::in_flight).
    Release,
}

impl Mode {
    /// Returns `true` if the operation takes a request's cost. A policy of [requests in
    /// flight](crate::Policy::in_flight) then counts one request.
    pub(super) fn takes(self) -> bool {
        matches!(self, Self::Take | Self::TakeAhead | Self::UpTo | Self::Peek)
    }

    /// Returns the free capacity that a policy needs to allow the check; for
    /// [`TakeAhead`](Self::TakeAhead), to allow it now.
    pub(super) fn needs(self, cost: i64, capacity: i64) -> i64 {
        match self {
            Self::Take | Self::TakeAhead | Self::Peek => cost,
            Self::UpTo => cost.min(1),
            Self::Charge => cost.min(1) - capacity,
            // Always allowed, even with a debt beyond the bound after a quota was lowered.
            Self::Refund | Self::Reset | Self::Renew | Self::Release => i64::MIN,
        }
    }

    /// Returns the amount that a policy which allows the check would charge, refund or reset. Not
    /// for requests in flight.
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
