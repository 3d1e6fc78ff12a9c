use std::num::NonZeroU32;

/// How a reservation is settled. A rule of
/// [`RateLimitLayer::settle`](crate::RateLimitLayer::settle) returns this when it receives the head
/// of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settlement {
    /// Keeps the reservation: the request costs the reserved amount.
    Keep,
    /// Refunds the reservation: the request costs nothing.
    Refund,
    /// The request costs this amount: the rest of the reservation is refunded, or the missing part
    /// is [charged](crate::check::Check::charge) even beyond the limit.
    Cost(u32),
    /// The request costs the amount that its [`RequestCost`](crate::settle::RequestCost) has counted when the
    /// response body has ended or was dropped and every clone of the `RequestCost` is dropped. If
    /// nothing was counted, the reservation is kept.
    AtEnd,
    /// The request costs one per `per` bytes of the body that were sent, rounded up, when the body
    /// has ended or was dropped and every clone of the [`RequestCost`](crate::settle::RequestCost) is
    /// dropped. The response to a `HEAD` has no body, and costs nothing.
    Bytes {
        /// The number of bytes that cost one.
        per: NonZeroU32,
    },
}

/// The amounts counted by the end of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// The cost that the handles have counted, if any.
    pub(super) units: Option<u64>,
    pub(super) bytes: u64,
}

impl Settlement {
    /// Returns the cost of a request, if the rule determines it without the counted amounts.
    pub(super) fn cost_at_head(self, reserved: u32) -> Option<u32> {
        match self {
            Self::Keep => Some(reserved),
            Self::Refund => Some(0),
            Self::Cost(cost) => Some(cost),
            Self::AtEnd | Self::Bytes { .. } => None,
        }
    }

    /// Returns the cost of a request, given the counted amounts.
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
    fn each_rule_determines_the_cost() {
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
