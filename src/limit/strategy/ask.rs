use super::Params;
use super::algorithm::{Algorithm, Registers};
use crate::limit::charged::Charged;
use crate::limit::in_flight::SlotId;
use crate::limit::mode::Mode;
use crate::limit::verdict::Verdict;

/// The parameters of a check that are the same for all policies, except `of`.
#[derive(Clone, Copy)]
pub(in crate::limit) struct Ask {
    pub(in crate::limit) mode: Mode,
    pub(in crate::limit) cost: i64,
    /// In microseconds: the maximum wait of a take ahead, or the time that the debt of a charge may
    /// take to refill. 0 means that the debt has no such bound.
    pub(in crate::limit) within: i64,
    /// The charge that is partly refunded.
    pub(in crate::limit) of: Charged,
    /// The slot of a request in flight.
    pub(in crate::limit) slot: Option<SlotId>,
    pub(in crate::limit) now: i64,
}

/// The result of a policy considered separately.
pub(in crate::limit) struct Preview {
    /// The state at `now`.
    pub(in crate::limit) registers: Registers,
    /// Whether the state must be saved even if nothing is charged.
    pub(in crate::limit) dirty: bool,
    /// The largest cost that would be allowed.
    pub(in crate::limit) room: i64,
    /// The free capacity that the check needs.
    pub(in crate::limit) needs: i64,
    /// The amount that the policy would grant if all others allowed the check.
    pub(in crate::limit) grants: i64,
    /// The bound on the grants of the other policies; negative if this policy denies the check.
    pub(in crate::limit) max: i64,
}

impl Ask {
    pub(in crate::limit) fn preview<T: Algorithm>(&self, state: &T, params: &Params) -> Preview {
        let &Self { mode, now, .. } = self;
        let (registers, dirty) = state.load(params, now);
        let room = T::room(params, now, registers);
        let needs = mode.needs(self.cost, params.capacity);
        if room < needs
            && !(mode == Mode::TakeAhead && self.is_due_in_time(state, params, room, registers))
        {
            return Preview {
                registers,
                dirty,
                room,
                needs,
                grants: 0,
                max: -1,
            };
        }
        let mut grants = mode.grants(self.cost, room, params.capacity);
        if mode == Mode::Charge && self.within > 0 {
            grants = grants.min(room + params.units_in(self.within)).max(0);
        }
        Preview {
            registers,
            dirty,
            room,
            needs,
            grants,
            max: grants,
        }
    }

    /// Returns `true` if a cost that does not fit now is due within the maximum wait and within the
    /// policy's maximum debt.
    fn is_due_in_time<T: Algorithm>(
        &self,
        state: &T,
        params: &Params,
        room: i64,
        registers: Registers,
    ) -> bool {
        let (within, owes) = if params.frees.is_gradual() {
            (self.within.min(params.longest), true)
        } else {
            (self.within, room - self.cost >= -params.capacity)
        };
        self.cost <= params.capacity
            && owes
            && state.wait(params, self.now, self.cost, registers) <= within
    }

    /// Decides, and charges the state. Returns the verdict and the charged amount.
    ///
    /// A check charges all its policies the same amount, so each at most `max`, the smallest grant
    /// of any of them: an `up_to(5)` under policies with 3 and 9 remaining charges both 3. A refund
    /// or a reset affects each policy independently. A negative `max` means that another policy
    /// denies the check.
    pub(in crate::limit) fn decide<T: Algorithm>(
        &self,
        state: &mut T,
        params: &Params,
        max: i64,
    ) -> (Verdict, i64) {
        let &Self { mode, now, .. } = self;
        let Preview {
            mut registers,
            dirty,
            mut room,
            needs,
            grants,
            ..
        } = self.preview(state, params);
        let wait = if room >= needs {
            0
        } else if needs > params.capacity {
            Verdict::NEVER
        } else {
            state.wait(params, now, needs, registers)
        };
        let mut granted = grants.min(max);
        match mode {
            Mode::Reset => {
                *state = T::default();
                return (
                    Verdict {
                        remaining: params.capacity,
                        wait,
                        reset: 0,
                    },
                    grants,
                );
            }
            // Each policy refunds from its own count.
            Mode::Refund if grants > 0 => {
                (registers, granted) = state.refund(params, now, self.cost, &self.of, registers);
                granted = granted.min(grants);
            }
            _ if granted > 0 => registers = state.charge(params, now, granted, registers),
            _ => granted = 0,
        }
        if granted > 0 {
            room = T::room(params, now, registers);
        }
        let reset = T::reset_after(params, now, registers);
        if granted > 0 || dirty && mode != Mode::Peek {
            state.save(
                params,
                now,
                if mode == Mode::Refund {
                    -granted
                } else {
                    granted
                },
                registers,
            );
        }
        (
            Verdict {
                remaining: room.max(0),
                wait,
                reset,
            },
            granted,
        )
    }
}
