use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::strategy::Ask;
use super::{
    Charged, Decision, EachCharged, Key, LONGEST, Mode, Policies, Policy, SlotId, Source, State,
    Verdict, Verdicts,
};

/// One request to a [`Store`](crate::store::Store): may this caller use this much under these policies?
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
    /// The slot that is taken, renewed or released.
    slot: Option<SlotId>,
    leasing: Leasing,
    /// Rarely used fields, boxed.
    extra: Option<Box<Extra>>,
}

/// The part of a check in [leased](crate::Leased) quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leasing {
    /// A block may decide it.
    Possible,
    /// No block may decide it.
    Never,
    /// It charges or refunds a block.
    Block,
}

/// Rarely used fields.
#[derive(Debug, Clone)]
enum Extra {
    Id(Key),
    /// The longest wait of a take ahead, or the longest time to refill the debt of a charge, in microseconds.
    Within(i64),
    Charged(EachCharged),
}

impl Check {
    /// Takes `cost`, all or nothing. A cost of 0 is decided and charges nothing. A policy of requests
    /// [in flight](crate::Policy::in_flight) counts one, independent of the cost, in a new [slot](Self::slot). A clone of the
    /// check takes the same slot.
    pub fn take(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Take, cost)
    }

    /// Takes `cost` all or nothing, if necessary ahead of time: what does not pass now is charged as a debt that is due
    /// when it would have passed. If that is at most `within` from now, the outcome is
    /// [`Later`](crate::check::Outcome::Later): wait that long, then proceed. Meanwhile others see it as taken, so that
    /// each such check is due at a different time, over all instances.
    ///
    /// The debt is bounded like that of a [`charge`](Self::charge). Only strategies that refill gradually support it;
    /// under others, and in a [`Store`](crate::store::Store) without debts, this is a [`take`](Self::take).
    pub fn take_ahead(key: Key, policies: &Policies, cost: u32, within: Duration) -> Self {
        let owes = policies.iter().all(|policy| policy.frees().has_burst());
        let within = if owes {
            within.as_micros().min(LONGEST as u128) as i64
        } else {
            0
        };
        let extra = Some(Box::new(Extra::Within(within)));
        Self {
            extra,
            ..Self::new(key, policies, Mode::TakeAhead, cost)
        }
    }

    /// Takes as much of `cost` as there is room for; [`Decision::granted`] returns how much.
    pub fn up_to(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::UpTo, cost)
    }

    /// Decides whether `cost` would pass now, and charges nothing.
    pub fn peek(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Peek, cost)
    }

    /// Charges `cost` in any case, for a cost that is known only afterwards. The debt is bounded: each policy counts at
    /// most twice its capacity, and [`Decision::granted`] returns how much was charged. A policy of requests [in
    /// flight](crate::Policy::in_flight) counts nothing.
    pub fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Charge, cost)
    }

    /// Charges a debt that takes `time` to refill, or nothing if the debt is larger already. So repeated and concurrent
    /// charges do not add up. For the policies of a meter; the debt is at most the capacity.
    pub(crate) fn charge_debt_of(key: Key, policies: &Policies, time: Duration) -> Self {
        let extra = Some(Box::new(Extra::Within(
            time.as_micros().min(LONGEST as u128) as i64,
        )));
        Self {
            extra,
            ..Self::charge(key, policies, u32::MAX)
        }
    }

    /// Refunds `cost` of what was charged just now; each policy refunds at most what it counts. [`Decision::granted`]
    /// returns how much: of several policies, the most that one of them refunded.
    ///
    /// Some of an older charge may have flowed back already, and to refund it again would exceed the policy: use
    /// [`Decision::refund`] for these. A policy of requests [in flight](crate::Policy::in_flight) refunds nothing:
    /// see [`release`](Self::release).
    pub fn refund(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies, Mode::Refund, cost)
    }

    /// Refunds `cost` of an earlier charge, or of one made just now if none is given.
    pub(crate) fn refund_of(
        key: Key,
        policies: &Policies,
        cost: u32,
        charged: EachCharged,
    ) -> Self {
        let extra = Some(Box::new(Extra::Charged(charged)));
        Self {
            extra,
            ..Self::refund(key, policies, cost)
        }
    }

    /// Forgets all charges of the caller. What is refunded afterwards of a charge made before is taken out of later ones.
    pub fn reset(key: Key, policies: &Policies) -> Self {
        Self::new(key, policies, Mode::Reset, 0)
    }

    /// Renews the slot of a request [in flight](crate::Policy::in_flight) for the policy's
    /// [`slot_ttl`](crate::Policy::slot_ttl). If the store has lost the slot, it is taken again, also beyond the limit.
    /// Charges nothing under policies of other kinds. May be sent again.
    ///
    /// A [`RateLimitLayer`](crate::RateLimitLayer) renews its slots itself.
    pub fn renew(key: Key, policies: &Policies, slot: SlotId) -> Self {
        Self {
            slot: Some(slot),
            ..Self::new(key, policies, Mode::Renew, 0)
        }
    }

    /// Releases the slot of a request [in flight](crate::Policy::in_flight). Refunds nothing under policies of other
    /// kinds. May be sent again.
    pub fn release(key: Key, policies: &Policies, slot: SlotId) -> Self {
        Self {
            slot: Some(slot),
            ..Self::new(key, policies, Mode::Release, 0)
        }
    }

    /// A check that probes whether a store decides. It reads and writes like any other, but no request can have its
    /// key: [`Key::PROBE`] or a [`Key::probe`]. It is always granted, so that it always writes.
    pub(crate) fn probe(key: Key) -> Self {
        Self::new(key, &Policies::probe(), Mode::Take, 1)
    }

    fn new(key: Key, policies: &Policies, mode: Mode, cost: u32) -> Self {
        let takes = matches!(mode, Mode::Take | Mode::TakeAhead | Mode::UpTo)
            && policies.in_flight().is_some();
        let slot = takes.then(SlotId::unique);
        Self {
            key,
            policies: policies.clone(),
            mode,
            cost,
            reserves: false,
            slot,
            leasing: Leasing::Possible,
            extra: None,
        }
    }

    /// Gives the check an id, so that a repeated request is charged once. If a check of this caller with this id was
    /// granted under these policies, this one gets the same decision and is not charged. A denial is not remembered:
    /// the request may be repeated, and passes when there is room.
    ///
    /// An id is remembered for the longest period of the policies. Do not let callers choose their ids: one that sends
    /// the same id with every request is charged once. A [`LocalStore`](crate::LocalStore) holds as many ids as keys,
    /// and beyond that forgets the oldest of a few. A [take ahead](Self::take_ahead) and what a [decision
    /// refunds](Decision::refund) have no id, and this leaves them as they are.
    #[must_use]
    pub fn with_id(self, id: impl AsRef<[u8]>) -> Self {
        self.with_id_key(Some(Key::new(id)))
    }

    /// The same check with the id of another.
    pub(crate) fn with_id_key(self, id: Option<Key>) -> Self {
        match self.extra.as_deref() {
            Some(Extra::Within(_) | Extra::Charged(_)) => self,
            _ => Self {
                extra: id.map(|id| Box::new(Extra::Id(id))),
                ..self
            },
        }
    }

    /// The caller.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The policies.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// What is done with the cost.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The cost.
    pub fn cost(&self) -> u32 {
        self.cost
    }

    /// The [id](Self::with_id) by which it is charged once, if it has one.
    pub fn id(&self) -> Option<&Key> {
        match self.extra.as_deref() {
            Some(Extra::Id(id)) => Some(id),
            _ => None,
        }
    }

    /// The longest wait, in microseconds: 0 for none.
    pub(crate) fn within(&self) -> i64 {
        match self.extra.as_deref() {
            Some(Extra::Within(within)) => *within,
            _ => 0,
        }
    }

    /// The slot that it takes, renews or releases under a policy of requests [in flight](crate::Policy::in_flight).
    pub fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// The check that repeats in another store what this one has done to slots, after this decision.
    pub(crate) fn mirrored(&self, decision: &Decision) -> Option<Self> {
        let policies = self.policies.in_flight()?;
        match (self.mode, self.slot) {
            (Mode::Reset, _) => Some(Self::reset(self.key, policies)),
            (Mode::Release, Some(slot)) => Some(Self::release(self.key, policies, slot)),
            (_, Some(slot)) if decision.is_allowed() => Some(Self::renew(self.key, policies, slot)),
            _ => None,
        }
    }

    /// The charge of which it refunds a part, for each policy; empty for one made just now.
    pub(crate) fn charged(&self) -> &[Charged] {
        match self.extra.as_deref() {
            Some(Extra::Charged(charged)) => charged,
            _ => &[],
        }
    }

    /// The charge of which it refunds a part, as the policy at this index knows it.
    pub(crate) fn charged_under(&self, policy: usize) -> Charged {
        self.charged()
            .get(policy)
            .copied()
            .unwrap_or(Charged::just_now(self.cost.into()))
    }

    /// The same check; if `reserves`, what it takes is settled later, so that other callers may refund a part.
    pub(crate) fn reserving(self, reserves: bool) -> Self {
        Self { reserves, ..self }
    }

    /// The same check, which charges or refunds a block of a [`Leased`](crate::Leased) store: a
    /// [`Fallback`](crate::Fallback) leaves it to its primary store alone.
    pub(crate) fn for_block(self) -> Self {
        Self {
            leasing: Leasing::Block,
            ..self
        }
    }

    /// Returns `true` if it charges or refunds a block.
    pub(crate) fn is_for_block(&self) -> bool {
        self.leasing == Leasing::Block
    }

    /// The same check for the primary store of a [`Fallback`](crate::Fallback), in which no [`Leased`](crate::Leased)
    /// store may decide it from a block.
    pub(crate) fn in_fallback(self) -> Self {
        let leasing = if self.is_for_block() {
            Leasing::Block
        } else {
            Leasing::Never
        };
        Self { leasing, ..self }
    }

    /// Returns `true` if a block may decide it.
    #[inline]
    pub(crate) fn is_leasable(&self) -> bool {
        let is_plain =
            self.mode == Mode::Take && self.cost > 0 && self.id().is_none() && !self.reserves;
        is_plain && self.leasing == Leasing::Possible
    }

    /// The same check as Redis computes it at this time.
    #[cfg(test)]
    pub(crate) fn at_redis(mut self, now: i64) -> Self {
        if let Some(Extra::Charged(each)) = self.extra.as_deref_mut() {
            for charged in each.iter_mut().filter(|charged| charged.at.micros() > 0) {
                charged.age = charged.age.max(now - charged.at.micros());
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
        let (mode, cost, slot) = (self.mode, i64::from(self.cost), self.slot);
        let ask = Ask {
            mode,
            cost,
            within: self.within(),
            of: self.charged_under(0),
            slot,
            now,
        };
        if let ([state], [policy]) = (&mut *states, self.policies.as_slice()) {
            let (verdict, granted) = state.decide(policy.params(), &ask, i64::MAX);
            return Verdicts::new(granted, SmallVec::from_buf([verdict]));
        }
        self.decide_all(states, &ask)
    }

    /// Several policies, the rarer case.
    fn decide_all(&self, states: &mut [State], ask: &Ask) -> Verdicts {
        let looks = states
            .iter()
            .zip(self.policies.iter())
            .map(|(state, policy)| state.preview(policy.params(), ask));
        let max = looks.map(|look| look.max).min().unwrap_or(0);
        let (mut granted, mut each) = (0, smallvec![Verdict::NONE; states.len()]);
        for (i, ((verdict, state), policy)) in each
            .iter_mut()
            .zip(states)
            .zip(self.policies.iter())
            .enumerate()
        {
            let ask = Ask {
                of: self.charged_under(i),
                ..*ask
            };
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
    /// Counts on the state of one policy, and returns how much was charged, refunded or forgotten.
    pub(crate) fn count(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        let ask = Ask {
            mode: self,
            cost,
            within: 0,
            of: Charged::just_now(cost),
            slot: None,
            now,
        };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}
