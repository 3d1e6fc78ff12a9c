use super::Params;
use super::twin::{Loaded, Twin};
use crate::limit::check::LONGEST;
use crate::limit::mode::Mode;
use crate::limit::verdict::Verdict;

/// What each policy is asked.
#[derive(Clone, Copy)]
pub(in crate::limit) struct Ask {
    pub(in crate::limit) mode: Mode,
    pub(in crate::limit) cost: i64,
    /// Within how many microseconds a take ahead has to be due.
    pub(in crate::limit) within: i64,
    /// The charge of which a part is given back.
    pub(in crate::limit) of: Of,
    pub(in crate::limit) now: i64,
}

/// A charge of which a part is given back, as one policy knows it.
#[derive(Debug, Clone, Copy)]
pub(in crate::limit) struct Of {
    /// How many microseconds ago it was made.
    pub(in crate::limit) age: i64,
    /// How much it was.
    pub(in crate::limit) cost: i64,
    /// In how many microseconds nothing was to be charged any more, as told then.
    pub(in crate::limit) reset: i64,
}

impl Of {
    /// A charge of just now, of which all is given back.
    pub(in crate::limit) fn just_now(cost: i64) -> Self {
        Self { age: 0, cost, reset: LONGEST }
    }

    /// In how many microseconds from now nothing was to be charged any more, as told then.
    pub(super) fn left(&self) -> i64 {
        self.reset - self.age
    }
}

/// What a policy answers, if it is alone.
pub(in crate::limit) struct Look {
    /// The state as it is now.
    pub(super) loaded: Loaded,
    /// Whether it must be saved even if nothing is charged.
    dirty: bool,
    /// The largest cost that would pass.
    pub(super) room: i64,
    /// The room that lets the check pass.
    needs: i64,
    /// What the policy would grant, if all others let the check pass.
    pub(in crate::limit) grants: i64,
}

impl Ask {
    pub(super) fn look<T: Twin>(&self, state: &T, params: &Params) -> Look {
        let &Self { mode, cost, now, .. } = self;
        let (loaded, dirty) = state.load(params, now);
        let room = T::room(params, now, loaded);
        let needs = mode.needs(cost, params.capacity);
        let passes = room >= needs || mode == Mode::TakeAhead && self.is_due_in_time(state, params, room, loaded);
        let grants = if passes { mode.grants(cost, room, params.capacity) } else { 0 };
        Look { loaded, dirty, room, needs, grants }
    }

    /// Whether a cost that there is no room for is due in time, within the debt that the policy bears.
    fn is_due_in_time<T: Twin>(&self, state: &T, params: &Params, room: i64, loaded: Loaded) -> bool {
        self.cost <= params.capacity
            && room - self.cost >= -params.capacity
            && state.wait(params, self.now, self.cost, loaded) <= self.within
    }

    /// Decides, and charges the state: the verdict, and how much was charged.
    ///
    /// A check charges all its policies alike, so each at most `max`, the least that any of them grants: of an `up_to(5)`
    /// under policies with room for 3 and for 9, both are charged 3. But each gives back, or forgets, what it has itself.
    pub(super) fn decide<T: Twin>(&self, state: &mut T, params: &Params, max: i64) -> (Verdict, i64) {
        let &Self { mode, now, .. } = self;
        let Look { mut loaded, dirty, mut room, needs, grants } = self.look(state, params);
        let wait = if room >= needs {
            0
        } else if needs > params.capacity {
            Verdict::NEVER
        } else {
            state.wait(params, now, needs, loaded)
        };
        let mut granted = grants.min(max);
        match mode {
            Mode::Reset => {
                *state = T::default();
                return (Verdict { remaining: params.capacity, wait, reset: 0 }, grants);
            }
            // Each what it has.
            Mode::GiveBack if grants > 0 => {
                (loaded, granted) = state.give_back(params, now, self.cost, &self.of, loaded);
                granted = granted.min(grants);
            }
            _ if granted > 0 => loaded = state.charge(params, now, granted, loaded),
            _ => {}
        }
        if granted > 0 {
            room = T::room(params, now, loaded);
        }
        let reset = T::reset_after(params, now, loaded);
        if granted > 0 || dirty && mode != Mode::Peek {
            state.save(params, now, if mode == Mode::GiveBack { -granted } else { granted }, loaded);
        }
        (Verdict { remaining: room.max(0), wait, reset }, granted)
    }
}
