use super::decision::{Source, Verdict, Verdicts};
use super::strategy::{Loaded, Params, State, Twin};
use super::{Decision, Key, Policies, Policy};

/// One question to a [`Store`](crate::Store): may this caller have so much, under these policies?
///
/// With several policies it is all or nothing: either each of them is charged or none.
///
/// ```
/// use tower_redis_ratelimit::{Check, Key, Policy, Quota, Strategy};
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?.into();
/// let check = Check::take(Key::new("user-42"), &policy, 3);
/// assert_eq!(check.cost(), 3);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Check {
    key: Key,
    policies: Policies,
    mode: Mode,
    cost: u32,
    /// Boxed, since few checks have one.
    id: Option<Box<Key>>,
}

/// What a check does with its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// All of it or nothing.
    Take,
    /// As much of it as there is room for, down to one.
    UpTo,
    /// Says whether a take would pass, and charges nothing.
    Peek,
    /// Charges without asking, up to a debt of one capacity.
    Charge,
    /// Gives back what was charged, down to nothing charged.
    GiveBack,
    /// Forgets the caller: everything it was charged is gone.
    Reset,
}

impl Check {
    /// Takes `cost`, all or nothing. A cost of 0 is decided and charges nothing.
    pub fn take(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Take, cost)
    }

    /// Takes as much of `cost` as there is room for; [`Decision::granted`] tells how much that was.
    pub fn up_to(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::UpTo, cost)
    }

    /// Tells whether `cost` would pass now, and charges nothing.
    pub fn peek(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Peek, cost)
    }

    /// Charges `cost` without asking, for a cost that is known only afterwards. The debt that this makes is bounded:
    /// each policy counts at most twice its capacity, and [`Decision::granted`] tells how much was charged.
    pub fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Charge, cost)
    }

    /// Gives `cost` back, to each policy at most what is charged there; [`Decision::granted`] tells the most that was.
    pub fn give_back(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::GiveBack, cost)
    }

    /// Forgets all that the caller was charged.
    pub fn reset(key: Key, policies: &Policies) -> Self {
        Self::new(key, policies, Mode::Reset, 0)
    }

    /// A check that reads and writes as any other, of a caller that no request can name, to try whether a store
    /// decides. It is always granted, so that it always writes.
    pub(crate) fn probe() -> Self {
        Self::new(Key::PROBE, &Policies::probe(), Mode::Take, 1)
    }

    fn new(key: Key, policies: &Policies, mode: Mode, cost: u32) -> Self {
        Self { key, policies: policies.clone(), mode, cost, id: None }
    }

    /// Gives the check an id: if the same caller was charged for a check of this id under the same policies before, and
    /// less than the longest of their periods ago, this one gets that decision again, just as it was, and is not
    /// charged. A denial does not bind the id: the same request may try again, and passes if its time has come.
    ///
    /// Ids must not be of the caller's choice, or it would have one charge for all its requests. A
    /// [`LocalStore`](crate::LocalStore) holds as many ids as keys, and forgets the oldest of a few beyond that.
    #[must_use]
    pub fn with_id(mut self, id: impl AsRef<[u8]>) -> Self {
        self.id = Some(Box::new(Key::new(id)));
        self
    }

    /// The same check with the id of another.
    pub(crate) fn with_id_key(self, id: Option<Key>) -> Self {
        Self { id: id.map(Box::new), ..self }
    }

    /// Who is asking.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Under which policies.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// What is done with the cost.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// How much is asked for.
    pub fn cost(&self) -> u32 {
        self.cost
    }

    /// By what it is charged once, if it has an [id](Self::with_id).
    pub fn id(&self) -> Option<&Key> {
        self.id.as_deref()
    }

    /// The same check under other policies.
    pub(crate) fn under(self, policies: Policies) -> Self {
        Self { policies, ..self }
    }

    /// Decides on `states`, one per policy, and charges them: the Rust half of `lua/check.lua`.
    ///
    /// States change only if something is charged, given back or forgotten, or if they are of a time to come.
    pub(crate) fn decide(&self, states: &mut [State], now: i64) -> Verdicts {
        let ask = Ask { mode: self.mode, cost: i64::from(self.cost), now };
        if let ([state], [policy]) = (&mut *states, self.policies.as_slice()) {
            let (first, granted) = state.decide(policy.params(), &ask, i64::MAX);
            return Verdicts { granted, first, others: Box::default() };
        }
        let looks = states.iter().zip(self.policies.iter()).map(|(state, policy)| state.look(policy.params(), &ask));
        let max = looks.map(|look| look.grants).min().unwrap_or(0);
        let mut granted = 0;
        let mut verdicts = states.iter_mut().zip(self.policies.iter()).map(|(state, policy)| {
            let (verdict, grants) = state.decide(policy.params(), &ask, max);
            granted = granted.max(grants);
            verdict
        });
        let (first, others) = (verdicts.next().unwrap_or(Verdict::NONE), verdicts.collect());
        Verdicts { granted, first, others }
    }

    /// The decision that answers this check.
    pub(crate) fn answer(self, verdicts: Verdicts, source: Source) -> Decision {
        Decision::new(self.policies, verdicts, source)
    }
}

/// What each policy is asked.
pub(crate) struct Ask {
    pub(super) mode: Mode,
    pub(super) cost: i64,
    pub(super) now: i64,
}

/// What a policy sees when it is asked.
pub(crate) struct Look {
    /// The state as it is now.
    pub(super) loaded: Loaded,
    /// Whether it must be saved even if nothing is charged.
    dirty: bool,
    /// The largest cost that would pass.
    pub(super) room: i64,
    /// The room that lets the check pass.
    needs: i64,
    /// What the policy would grant, if all others let the check pass.
    grants: i64,
}

impl Ask {
    pub(super) fn look<T: Twin>(&self, state: &T, params: &Params) -> Look {
        let &Self { mode, cost, now } = self;
        let (loaded, dirty) = state.load(params, now);
        let room = T::room(params, now, loaded);
        let needs = mode.needs(cost, params.capacity);
        let grants = if room >= needs { mode.grants(cost, room, params.capacity) } else { 0 };
        Look { loaded, dirty, room, needs, grants }
    }

    /// Charges a state with what its policy grants, and tells how much that is. It is no more than `max`, what every
    /// other policy grants too, unless each gives back or forgets what it has.
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
        let (granted, charged) = match mode {
            Mode::Reset => {
                *state = T::default();
                return (Verdict { remaining: params.capacity, wait, reset: 0 }, grants);
            }
            // Each what it has.
            Mode::GiveBack => (grants, -grants),
            Mode::Take | Mode::UpTo | Mode::Peek | Mode::Charge => (grants.min(max), grants.min(max)),
        };
        if granted > 0 {
            loaded = state.charge(params, now, charged, loaded);
            room = T::room(params, now, loaded);
        }
        let reset = T::reset_after(params, now, loaded);
        if granted > 0 || dirty && mode != Mode::Peek {
            state.save(params, now, charged, loaded);
        }
        (Verdict { remaining: room.max(0), wait, reset }, granted)
    }
}

impl Mode {
    /// Counts on the state of one policy, and tells how much.
    pub(crate) fn count(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        state.decide(policy.params(), &Ask { mode: self, cost, now }, i64::MAX).1
    }

    /// The room that a policy must have to let the check pass.
    fn needs(self, cost: i64, capacity: i64) -> i64 {
        match self {
            Self::Take | Self::Peek => cost,
            Self::UpTo => cost.min(1),
            Self::Charge => cost.min(1) - capacity,
            // However deep in debt: a quota may have been lowered.
            Self::GiveBack | Self::Reset => i64::MIN,
        }
    }

    /// What a policy would grant, if all let the check pass; what it has to give back, or to forget.
    fn grants(self, cost: i64, room: i64, capacity: i64) -> i64 {
        match self {
            Self::Take => cost,
            Self::UpTo => cost.min(room).max(0),
            Self::Peek => 0,
            Self::Charge => cost.min(room + capacity).max(0),
            Self::GiveBack => cost.min(capacity - room),
            Self::Reset => capacity - room,
        }
    }

    /// The number that stands for it in a script's arguments.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Take => 1,
            Self::UpTo => 2,
            Self::Peek => 3,
            Self::Charge => 4,
            Self::GiveBack => 5,
            Self::Reset => 6,
        }
    }
}
