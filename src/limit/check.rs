use smallvec::SmallVec;

use super::strategy::{Ask, State};
use super::{Decision, Key, Mode, Policies, Policy, Source, Verdicts};

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
            let (verdict, granted) = state.decide(policy.params(), &ask, i64::MAX);
            return Verdicts { granted, each: SmallVec::from_buf([verdict]) };
        }
        let looks = states.iter().zip(self.policies.iter()).map(|(state, policy)| state.look(policy.params(), &ask));
        let max = looks.map(|look| look.grants).min().unwrap_or(0);
        let mut granted = 0;
        let verdicts = states.iter_mut().zip(self.policies.iter()).map(|(state, policy)| {
            let (verdict, grants) = state.decide(policy.params(), &ask, max);
            granted = granted.max(grants);
            verdict
        });
        let each = verdicts.collect();
        Verdicts { granted, each }
    }

    /// The decision that answers this check.
    pub(crate) fn answer(self, verdicts: Verdicts, source: Source) -> Decision {
        Decision::new(self.policies, verdicts, source)
    }
}

impl Mode {
    /// Counts on the state of one policy, and tells how much.
    pub(crate) fn count(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        state.decide(policy.params(), &Ask { mode: self, cost, now }, i64::MAX).1
    }
}
