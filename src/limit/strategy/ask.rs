use super::Params;
use super::algorithm::{Algorithm, Registers};
use crate::limit::charged::Charged;
use crate::limit::in_flight::SlotId;
use crate::limit::mode::Mode;
use crate::limit::verdict::Verdict;

/// The parameters of a check for each policy.
#[derive(Clone, Copy)]
pub(in crate::limit) struct Ask {
    pub(in crate::limit) mode: Mode,
    pub(in crate::limit) cost: i64,
    /// The longest wait of a take ahead, in microseconds; or the longest time that the debt of a charge may take to
    /// refill, where 0 means no such bound.
    pub(in crate::limit) within: i64,
    /// The charge of which a part is refunded.
    pub(in crate::limit) of: Charged,
    /// The slot of a request in flight.
    pub(in crate::limit) slot: Option<SlotId>,
    pub(in crate::limit) now: i64,
}

/// The answer of a policy by itself.
pub(in crate::limit) struct Preview {
    /// The state as it is now.
    pub(in crate::limit) registers: Registers,
    /// Whether it must be saved even if nothing is charged.
    pub(in crate::limit) dirty: bool,
    /// The largest cost that would pass.
    pub(in crate::limit) room: i64,
    /// The room that lets the check pass.
    pub(in crate::limit) needs: i64,
    /// What the policy would grant, if all others let the check pass.
    pub(in crate::limit) grants: i64,
    /// The most that the others may grant: below 0, if the policy does not let the check pass.
    pub(in crate::limit) max: i64,
}

impl Ask {
    pub(in crate::limit) fn preview<T: Algorithm>(&self, state: &T, params: &Params) -> Preview {
        let &Self { mode, now, .. } = self;
        let (registers, dirty) = state.load(params, now);
        let room = T::room(params, now, registers);
        let needs = mode.needs(self.cost, params.capacity);
        if room < needs
            && !(mode == Mode::TakeAhead && self.is_due_in_time(state, params, registers))
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

    /// Whether a cost that there is no room for is due in time.
    fn is_due_in_time<T: Algorithm>(
        &self,
        state: &T,
        params: &Params,
        registers: Registers,
    ) -> bool {
        self.cost <= params.capacity
            && state.wait(params, self.now, self.cost, registers) <= self.within.min(params.longest)
    }

    /// Decides, and charges the state: the verdict, and how much was charged.
    ///
    /// A check charges all its policies the same, so each at most `max`, the least that any of them grants: of an
    /// `up_to(5)` under policies with room for 3 and for 9, both are charged 3. But each refunds, or forgets, what it
    /// has itself. A `max` below 0 is of a check that another policy denies.
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
            // Each what it has.
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
