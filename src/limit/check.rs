use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::strategy::Ask;
use super::{Charged, Decision, EachCharged, Key, LONGEST, Mode, Policies, Policy, Source, State, Verdict, Verdicts};

/// One question to a [`Store`](crate::store::Store): may this caller have so much, under these policies?
///
/// With several policies it is all or nothing: either each of them is charged or none.
///
/// ```
/// use tower_redis_ratelimit::check::Check;
/// use tower_redis_ratelimit::{Key, Policy, Quota, Strategy};
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
    /// Whether what it takes is settled later.
    reserves: bool,
    /// Boxed, since few checks have one.
    extra: Option<Box<Extra>>,
}

/// What few checks have.
#[derive(Debug, Clone)]
enum Extra {
    Id(Key),
    /// Within how many microseconds a take ahead has to be due.
    Within(i64),
    Charged(EachCharged),
}

impl Check {
    /// Takes `cost`, all or nothing. A cost of 0 is decided and charges nothing. A policy of requests
    /// [in flight](crate::Policy::in_flight) counts one, whatever the cost.
    pub fn take(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Take, cost)
    }

    /// Takes
    /// `cost` all or nothing, ahead of time if it must: what does not pass now is charged as a debt that is due as soon as it would have passed. If that is at most `within`
    /// from now, the outcome is [`Later`](crate::check::Outcome::Later); whoever asked waits so long, and then goes on.
    /// Others are denied meanwhile as if it had been taken, so that each who asks like this has a turn of its own, over
    /// all instances.
    ///
    /// The debt is bounded as that of a [`charge`](Self::charge). Only the strategies that refill little by little can
    /// owe what is due later; under any other this is a [`take`](Self::take), also in a [`Store`](crate::store::Store)
    /// that knows no debt.
    pub fn take_ahead(key: Key, policies: &Policies, cost: u32, within: Duration) -> Self {
        let owes = policies.iter().all(|policy| policy.frees().has_burst());
        let within = if owes { within.as_micros().min(LONGEST as u128) as i64 } else { 0 };
        let extra = Some(Box::new(Extra::Within(within)));
        Self { extra, ..Self::new(key, policies, Mode::TakeAhead, cost) }
    }

    /// Takes as much of `cost` as there is room for; [`Decision::granted`] tells how much that was.
    pub fn up_to(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::UpTo, cost)
    }

    /// Tells whether `cost` would pass now, and charges nothing.
    pub fn peek(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Peek, cost)
    }

    /// Charges
    /// `cost` without asking, for a cost that is known only afterwards. The debt that this makes is bounded: each policy counts at most twice its capacity, and [`Decision::granted`]
    /// tells how much was charged. A policy of requests [in flight](crate::Policy::in_flight) counts as many requests.
    pub fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Charge, cost)
    }

    /// Gives
    /// `cost` back, of what was charged just now; to each policy at most what it has charged. [`Decision::granted`]
    /// tells how much that was: of several policies, the most that one of them refunded.
    ///
    /// Of a charge that is older, some may have flowed back already, and who gets it twice gets more than the policy
    /// allows: [`Decision::refund`] takes that into account. To a policy of requests
    /// [in flight](crate::Policy::in_flight) it refunds as many requests of this instance.
    pub fn refund(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Refund, cost)
    }

    /// Gives `cost` back of a charge that was made before; of just now, if nothing is known of it.
    pub(crate) fn refund_of(key: Key, policies: &Policies, cost: u32, charged: EachCharged) -> Self {
        let extra = Some(Box::new(Extra::Charged(charged)));
        Self { extra, ..Self::refund(key, policies, cost) }
    }

    /// Forgets all that the caller was charged.
    pub fn reset(key: Key, policies: &Policies) -> Self {
        Self::new(key, policies, Mode::Reset, 0)
    }

    /// Renews the leases of so many requests that this instance has [in flight](crate::Policy::in_flight): what it
    /// holds already is renewed, and if nothing is known of it any more, it holds
    /// `count` again. Says in [`Decision::granted`] how many it holds. Charges nothing under policies of other
    /// strategies.
    ///
    /// A [`RateLimitLayer`](crate::RateLimitLayer) does so for what it holds.
    pub fn renew(key: Key, policies: &Policies, count: u32) -> Self {
        Self::new(key, policies, Mode::Renew, count)
    }

    /// Tells that this instance has just so many requests [in flight](crate::Policy::in_flight), whatever it held
    /// before; 0 for none. Charges nothing under policies of other strategies.
    pub fn hold(key: Key, policies: &Policies, count: u32) -> Self {
        Self::new(key, policies, Mode::Hold, count)
    }

    /// A check to try whether a store decides. It reads and writes as any other, but its caller is one that no request
    /// can name: [`Key::PROBE`] or a [`Key::probe`]. It is always granted, so that it always writes.
    pub(crate) fn probe(key: Key) -> Self {
        Self::new(key, &Policies::probe(), Mode::Take, 1)
    }

    fn new(key: Key, policies: &Policies, mode: Mode, cost: u32) -> Self {
        Self { key, policies: policies.clone(), mode, cost, reserves: false, extra: None }
    }

    /// Gives the check an id, so that a request that is sent again is charged once. If a check of this caller with this
    /// id was granted under these policies, this one gets the same decision and is not charged. A denial is not
    /// remembered: the same request may try again, and passes if its time has come.
    ///
    /// An id is remembered for the longest period of the policies. Do not let callers choose their ids: one who sends
    /// the same id with every request is charged once. A [`LocalStore`](crate::LocalStore) holds as many ids as keys,
    /// and beyond that forgets the oldest of a few. A [take ahead](Self::take_ahead) and what a
    /// [decision refunds](Decision::refund) have no id, and this leaves them as they are.
    #[must_use]
    pub fn with_id(self, id: impl AsRef<[u8]>) -> Self {
        self.with_id_key(Some(Key::new(id)))
    }

    /// The same check with the id of another.
    pub(crate) fn with_id_key(self, id: Option<Key>) -> Self {
        match self.extra.as_deref() {
            Some(Extra::Within(_) | Extra::Charged(_)) => self,
            _ => Self { extra: id.map(|id| Box::new(Extra::Id(id))), ..self },
        }
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
        match self.extra.as_deref() {
            Some(Extra::Id(id)) => Some(id),
            _ => None,
        }
    }

    /// Within how many microseconds it has to be due: 0 for now.
    pub(crate) fn within(&self) -> i64 {
        match self.extra.as_deref() {
            Some(Extra::Within(within)) => *within,
            _ => 0,
        }
    }

    /// What another store has to count of the requests in flight, if this is what one has decided: what it does under
    /// the policies that count these.
    pub(crate) fn in_flight(&self, decision: &Decision) -> Option<Self> {
        let policies = self.policies.in_flight()?;
        let (mode, cost) = match self.mode {
            Mode::Take | Mode::TakeAhead | Mode::UpTo if decision.is_allowed() => (Mode::Charge, 1),
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Peek => return None,
            Mode::Charge => (Mode::Charge, decision.granted()),
            // Where the count was wrong, the other store has followed the correction.
            Mode::Renew => (Mode::Hold, self.cost),
            mode => (mode, self.cost),
        };
        Some(Self::new(self.key, policies, mode, cost))
    }

    /// What each policy knows of the charge of which it refunds a part; nothing of one of just now.
    pub(crate) fn charged(&self) -> &[Charged] {
        match self.extra.as_deref() {
            Some(Extra::Charged(charged)) => charged,
            _ => &[],
        }
    }

    /// The charge of which it refunds a part, as the policy at this index knows it.
    pub(crate) fn charged_under(&self, policy: usize) -> Charged {
        self.charged().get(policy).copied().unwrap_or(Charged::just_now(self.cost.into()))
    }

    /// The same check, of what is settled later if `reserves`: the others who ask so refund what they do not need.
    pub(crate) fn reserving(self, reserves: bool) -> Self {
        Self { reserves, ..self }
    }

    /// Whether what it takes is settled later.
    pub(crate) fn reserves(&self) -> bool {
        self.reserves
    }

    /// The same check as Redis reckons with it at this time.
    #[cfg(test)]
    pub(crate) fn at_redis(mut self, now: i64) -> Self {
        if let Some(Extra::Charged(each)) = self.extra.as_deref_mut() {
            for charged in each.iter_mut().filter(|charged| charged.at > 0) {
                charged.age = charged.age.max(now - charged.at);
            }
        }
        self
    }

    /// The same check under other policies.
    pub(crate) fn under(self, policies: Policies) -> Self {
        Self { policies, ..self }
    }

    /// Decides on `states`, one per policy, and charges them: the Rust half of `lua/check.lua`.
    ///
    /// A state changes only if something is charged, refunded or forgotten, or if the clock has gone back.
    pub(crate) fn decide(&self, states: &mut [State], now: i64) -> Verdicts {
        let ask =
            Ask { mode: self.mode, cost: i64::from(self.cost), within: self.within(), of: self.charged_under(0), now };
        if let ([state], [policy]) = (&mut *states, self.policies.as_slice()) {
            let (verdict, granted) = state.decide(policy.params(), &ask, i64::MAX);
            return Verdicts::new(granted, SmallVec::from_buf([verdict]));
        }
        self.decide_all(states, &ask)
    }

    /// The rarer case of several policies.
    fn decide_all(&self, states: &mut [State], ask: &Ask) -> Verdicts {
        let looks = states.iter().zip(self.policies.iter()).map(|(state, policy)| state.preview(policy.params(), ask));
        let max = looks.map(|look| look.max).min().unwrap_or(0);
        let (mut granted, mut each) = (0, smallvec![Verdict::NONE; states.len()]);
        for (i, ((verdict, state), policy)) in each.iter_mut().zip(states).zip(self.policies.iter()).enumerate() {
            let ask = Ask { of: self.charged_under(i), ..*ask };
            let (answer, grants) = state.decide(policy.params(), &ask, max);
            *verdict = answer;
            if self.policies.tells_granted(policy) {
                granted = granted.max(grants);
            }
        }
        Verdicts::new(granted, each)
    }

    /// The decision that answers this check.
    #[inline]
    pub(crate) fn answer(self, verdicts: Verdicts, source: Source) -> Decision {
        Decision::new(self.policies, verdicts, source)
    }
}

impl Mode {
    /// Counts on the state of one policy, and tells how much was charged, refunded or forgotten.
    pub(crate) fn count(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        let ask = Ask { mode: self, cost, within: 0, of: Charged::just_now(cost), now };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}
