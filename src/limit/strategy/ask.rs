//! A check under one policy: its operation, its parameters, and the state that decides it.

use super::algorithm::{Algorithm, Registers};
use super::{Params, Refill, Snapshot, Strategy, strategies};
use crate::limit::in_flight::{self, SlotId};
use crate::limit::{Policy, PolicyCharge, PolicyKind, Verdict};

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

/// The parameters of a check that are the same for all policies, except `of`.
#[derive(Clone, Copy)]
pub(in crate::limit) struct Ask<'a> {
    pub(in crate::limit) mode: Mode,
    pub(in crate::limit) cost: i64,
    /// In microseconds: the maximum wait of a take ahead, or the time that the debt of a charge may
    /// take to refill. 0 means that the debt has no such bound.
    pub(in crate::limit) within: i64,
    /// The charge that is partly refunded; `None` if it was made just before.
    pub(in crate::limit) of: Option<&'a PolicyCharge>,
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

impl Mode {
    /// Returns `true` if the operation takes a request's cost. A policy of [requests in
    /// flight](crate::Policy::in_flight) then counts one request.
    pub(in crate::limit) fn takes(self) -> bool {
        matches!(self, Self::Take | Self::TakeAhead | Self::UpTo | Self::Peek)
    }

    /// Returns the free capacity that a policy needs to allow the check; for
    /// [`TakeAhead`](Self::TakeAhead), to allow it now.
    pub(in crate::limit) fn needs(self, cost: i64, capacity: i64) -> i64 {
        match self {
            Self::Take | Self::TakeAhead | Self::Peek => cost,
            Self::UpTo => cost.min(1),
            Self::Charge => cost.min(1) - capacity,
            // Always allowed, even with a debt beyond the bound after a quota was lowered.
            Self::Refund | Self::Reset | Self::Renew | Self::Release => i64::MIN,
        }
    }

    /// Returns the amount that a policy charges, refunds or resets if it allows the check. Policies
    /// of requests in flight compute it separately.
    pub(in crate::limit) fn grants(self, cost: i64, room: i64, capacity: i64) -> i64 {
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

    /// Returns the amount that a check grants, by the amounts of its policies: for a charge the
    /// smallest, so that its refund never exceeds what a policy has charged, otherwise the largest.
    pub(crate) fn granted(self, before: Option<i64>, grants: i64) -> i64 {
        match before {
            None => grants,
            Some(before) if self == Self::Charge => before.min(grants),
            Some(before) => before.max(grants),
        }
    }

    /// Applies the operation to the state of one policy, and returns the amount charged, refunded
    /// or reset.
    pub(crate) fn count(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        self.decide(policy, state, cost, now).1
    }

    /// Decides on the state of one policy. Returns the verdict, and the amount charged, refunded or
    /// reset.
    pub(crate) fn decide(
        self,
        policy: &Policy,
        state: &mut State,
        cost: i64,
        now: i64,
    ) -> (Verdict, i64) {
        let ask = Ask::new(self, cost, now);
        state.decide(policy.params(), &ask, i64::MAX)
    }
}

impl<'a> Ask<'a> {
    /// Returns the check at the time of the policy's clock: that of a calendar is `ahead`.
    #[inline]
    pub(in crate::limit) fn by_clock_of(self, policy: &Policy, ahead: i64) -> Ask<'a> {
        if ahead == 0 {
            return self;
        }
        Ask {
            now: policy.params().time(self.now, ahead),
            ..self
        }
    }

    /// Creates the parameters of an operation at `now`. A refund is of a charge made just before.
    pub(in crate::limit) fn new(mode: Mode, cost: i64, now: i64) -> Self {
        Self {
            mode,
            cost,
            within: 0,
            of: None,
            slot: None,
            now,
        }
    }

    #[inline(always)]
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

    /// Returns `true` if the cost of a take ahead, which does not fit now, will fit within the
    /// maximum wait and exceeds neither the policy's capacity nor its maximum debt.
    fn is_due_in_time<T: Algorithm>(
        &self,
        state: &T,
        params: &Params,
        room: i64,
        registers: Registers,
    ) -> bool {
        let within = if params.frees.is_gradual() {
            self.within.min(params.longest)
        } else if room - self.cost >= -params.capacity {
            self.within
        } else {
            return false;
        };
        let registers = T::written(params, self.now, registers);
        self.cost <= params.capacity && state.wait(params, self.now, self.cost, registers) <= within
    }

    /// Decides, and charges the state. Returns the verdict and the charged amount.
    ///
    /// A take charges all its policies the same amount, so each at most `max`, the smallest grant
    /// of any of them: an `up_to(5)` under policies with 3 and 9 remaining charges both 3. A charge,
    /// a refund or a reset affects each policy independently. A negative `max` means that another
    /// policy denies the check.
    pub(in crate::limit) fn decide<T: Algorithm>(
        &self,
        state: &mut T,
        params: &Params,
        max: i64,
    ) -> (Verdict, i64) {
        let &Self { mode, now, .. } = self;
        let Preview {
            mut registers,
            mut dirty,
            mut room,
            needs,
            grants,
            ..
        } = self.preview(state, params);
        // A check that another policy denies has a negative `max`.
        let mut granted = grants.min(max);
        let wait = if room >= needs {
            0
        } else if needs > params.capacity {
            Verdict::NEVER
        } else if granted > 0 {
            // A turn: its charge drains at the rate of this quota.
            state.wait(params, now, needs, T::written(params, now, registers))
        } else {
            state.wait(params, now, needs, registers)
        };
        match mode {
            Mode::Reset => {
                *state = T::default();
                let fresh = Verdict {
                    remaining: params.capacity,
                    wait,
                    reset: 0,
                };
                return (fresh, grants);
            }
            // Each policy refunds from its own count.
            Mode::Refund if grants > 0 => {
                let of = self
                    .of
                    .copied()
                    .unwrap_or(PolicyCharge::just_now(self.cost));
                (registers, granted) = state.refund(params, now, self.cost, &of, registers);
                room = T::room(params, now, registers);
            }
            _ if granted > 0 => {
                registers = state.charge(params, now, granted, registers);
                // A charge reduces the room by exactly its cost.
                room -= granted;
            }
            Mode::Take | Mode::TakeAhead | Mode::UpTo if room < needs => {
                granted = 0;
                if let Some(denied) = T::denied(params, now, registers) {
                    registers = denied;
                    dirty = true;
                }
            }
            _ => granted = 0,
        }
        let reset = state.reset_after(params, now, registers);
        let charged = if mode == Mode::Refund {
            -granted
        } else {
            granted
        };
        if granted > 0 || dirty && mode != Mode::Peek {
            state.save(params, now, charged, registers);
        }
        let verdict = Verdict {
            remaining: room.max(0),
            wait,
            reset,
        };
        (verdict, granted)
    }
}

macro_rules! states {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, $kinds:tt;)*) => {
        /// The state of one caller under one policy.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) enum State {
            $($variant(super::$variant),)*
            InFlight(in_flight::State),
        }

        impl State {
            /// Creates the state of a new caller.
            #[inline]
            pub(crate) fn fresh(kind: impl Into<PolicyKind>) -> Self {
                match kind.into() {
                    $(PolicyKind::Rate(Strategy::$variant { .. }) => Self::$variant(Default::default()),)*
                    PolicyKind::InFlight => Self::InFlight(Default::default()),
                }
            }

            /// Creates a state that continues the counts of another store. Requests in flight start
            /// at none: each instance counts only its own.
            pub(crate) fn resume(kind: PolicyKind, params: &Params, now: i64, followed: Snapshot) -> Self {
                match kind {
                    $(PolicyKind::Rate(Strategy::$variant { .. }) => {
                        Self::$variant(Algorithm::resume(params, now, followed))
                    })*
                    PolicyKind::InFlight => Self::fresh(kind),
                }
            }

            /// See [`Algorithm::is_of`].
            pub(crate) fn is_of(&self, params: &Params) -> bool {
                match self {
                    $(Self::$variant(state) => Algorithm::is_of(state, params),)*
                    Self::InFlight(_) => true,
                }
            }

            /// See [`Algorithm::kept_until`].
            #[inline]
            pub(crate) fn kept_until(&self, params: &Params, now: i64) -> i64 {
                match self {
                    $(Self::$variant(state) => state.kept_until(params, now),)*
                    Self::InFlight(_) => 0,
                }
            }

            /// Makes the policy the quota that wrote the state, as a grant would.
            pub(crate) fn rewrite(&mut self, params: &Params, now: i64) {
                match self {
                    $(Self::$variant(state) => {
                        let (registers, _) = state.load(params, now);
                        state.save(params, now, 0, <super::$variant as Algorithm>::written(params, now, registers));
                    })*
                    Self::InFlight(_) => {}
                }
            }

            /// Returns the state as numbers: see [`Algorithm::to_numbers`].
            pub(in crate::limit) fn to_numbers(&self) -> Vec<i64> {
                match self {
                    $(Self::$variant(state) => state.to_numbers(),)*
                    Self::InFlight(state) => state.to_numbers(),
                }
            }

            /// Restores a state of this kind: see [`Algorithm::of_numbers`].
            pub(in crate::limit) fn of_numbers(kind: PolicyKind, numbers: &[i64]) -> Option<Self> {
                match kind {
                    $(PolicyKind::Rate(Strategy::$variant { .. }) => {
                        Algorithm::of_numbers(numbers).map(Self::$variant)
                    })*
                    PolicyKind::InFlight => in_flight::State::of_numbers(numbers).map(Self::InFlight),
                }
            }

            /// Previews the verdict of the state's policy, without changing the state.
            pub(in crate::limit) fn preview(&self, params: &Params, ask: &Ask<'_>) -> Preview {
                match self {
                    $(Self::$variant(state) => ask.preview(state, params),)*
                    Self::InFlight(state) => state.preview(params, ask),
                }
            }

            /// Decides, and charges what is granted. Returns the verdict and the granted amount.
            pub(in crate::limit) fn decide(&mut self, params: &Params, ask: &Ask<'_>, max: i64) -> (Verdict, i64) {
                match self {
                    $(Self::$variant(state) => ask.decide(state, params, max),)*
                    Self::InFlight(state) => state.decide(params, ask, max),
                }
            }
        }
    };
}

strategies!(states);

impl State {
    /// Decides a take again that Redis has decided at `at`: the one after `earlier` equal ones, before which the meter had
    /// this level in ticks. Returns the verdict and the granted cost. `None` unless the policy refills gradually.
    pub(crate) fn replay_take(
        policy: &Policy,
        at: i64,
        level: i64,
        cost: u32,
        earlier: i64,
    ) -> Option<(Verdict, i64)> {
        let params = policy.params();
        let ticks = params.ticks_of_take(cost);
        // The earlier takes were granted as long as they fitted.
        let granted = if ticks > 0 {
            ((params.full - level) / ticks).min(earlier).max(0)
        } else {
            0
        };
        let mut state = Self::of_level(policy, at, level + ticks * granted)?;
        Some(Mode::Take.decide(policy, &mut state, cost.into(), at))
    }

    /// The state of a policy that refills gradually, by the level in ticks that Redis has reported. `None` for any other policy.
    fn of_level(policy: &Policy, at: i64, level: i64) -> Option<Self> {
        let params = policy.params();
        match policy.kind() {
            PolicyKind::Rate(Strategy::TokenBucket(Refill::Greedy)) => Some(Self::TokenBucket(
                super::TokenBucket::reported(at, level, params),
            )),
            PolicyKind::Rate(Strategy::LeakyBucket) => Some(Self::LeakyBucket(
                super::LeakyBucket::reported(at, level, params),
            )),
            PolicyKind::Rate(Strategy::Gcra) => {
                Some(Self::Gcra(super::Gcra::reported(at, level, params)))
            }
            _ => None,
        }
    }

    /// Returns the amount that the state counts.
    pub(crate) fn counted(&self, policy: &Policy, now: i64) -> i64 {
        let ask = Ask::new(Mode::Refund, u32::MAX.into(), now);
        self.preview(policy.params(), &ask).grants
    }
}
