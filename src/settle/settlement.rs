use std::num::NonZeroU32;

/// How a reservation is settled: a rule of [`RateLimitLayer::settle`](crate::RateLimitLayer::settle) returns this when
/// it sees the head of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settlement {
    /// Keeps it: the request costs what was reserved.
    Keep,
    /// Refunds it: the request costs nothing.
    Refund,
    /// The request costs this much: the rest of the reservation is refunded, or what is missing
    /// [charged](crate::check::Check::charge) in any case.
    Cost(u32),
    /// The request costs what its [`Charge`](crate::settle::Charge) has counted when the body of the response has ended
    /// or was dropped, and no clone of the `Charge` is left. If none has counted anything, what was reserved is kept.
    AtEnd,
    /// The request costs one for each
    /// `per` bytes of the body that were sent, rounded up, when the body has ended or was dropped, and no clone of the [`Charge`](crate::settle::Charge)
    /// is left. The response to a `HEAD` has no body, and costs nothing.
    Bytes {
        /// How many bytes cost one.
        per: NonZeroU32,
    },
}

/// What is known in the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// What the handle has counted, if it was used.
    pub(super) units: Option<u64>,
    pub(super) bytes: u64,
}

impl Settlement {
    /// What a request costs for which so much was reserved, if that is known already.
    pub(super) fn cost_at_head(self, reserved: u32) -> Option<u32> {
        match self {
            Self::Keep => Some(reserved),
            Self::Refund => Some(0),
            Self::Cost(cost) => Some(cost),
            Self::AtEnd | Self::Bytes { .. } => None,
        }
    }

    /// What it costs by all that was counted.
    pub(super) fn cost(self, reserved: u32, counted: Counted) -> u32 {
        let units = match self {
            Self::AtEnd => counted.units.unwrap_or(reserved.into()),
            Self::Bytes { per } => counted.bytes.div_ceil(per.get().into()),
            Self::Keep | Self::Refund | Self::Cost(_) => {
                self.cost_at_head(reserved).unwrap_or(reserved).into()
            }
        };
        u32::try_from(units).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_costs() {
        let per = NonZeroU32::new(1_000).unwrap();
        let counted = |units, bytes| Counted { units, bytes };
        for (settlement, counted, at_head, cost) in [
            (Settlement::Keep, counted(Some(3), 9), Some(7), 7),
            (Settlement::Refund, counted(Some(3), 9), Some(0), 0),
            (Settlement::Cost(9), counted(Some(3), 9), Some(9), 9),
            (Settlement::AtEnd, counted(None, 9), None, 7),
            (Settlement::AtEnd, counted(Some(0), 9), None, 0),
            (
                Settlement::AtEnd,
                counted(Some(u64::MAX), 9),
                None,
                u32::MAX,
            ),
            (Settlement::Bytes { per }, counted(Some(3), 0), None, 0),
            (Settlement::Bytes { per }, counted(None, 1), None, 1),
            (Settlement::Bytes { per }, counted(None, 2_000), None, 2),
            (
                Settlement::Bytes { per },
                counted(None, u64::MAX),
                None,
                u32::MAX,
            ),
        ] {
            assert_eq!(settlement.cost_at_head(7), at_head, "{settlement:?}");
            assert_eq!(
                settlement.cost(7, counted),
                cost,
                "{settlement:?} {counted:?}"
            );
        }
    }
}
