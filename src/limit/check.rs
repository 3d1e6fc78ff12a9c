use std::time::Duration;

use smallvec::SmallVec;

use super::strategy::Ask;
use super::{
    Decision, EachCharge, Joint, Key, LONGEST, Mode, Policies, Policy, PolicyCharge, SlotId,
    Source, State, Verdict, Verdicts,
};
use crate::error::StoreError;

/// One request to a [`Store`](crate::store::Store): may this caller use this cost under these
/// policies?
///
/// With several policies, either each of them is charged or none.
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
#[derive(Debug)]
pub struct Check {
    key: Key,
    policies: Policies,
    mode: Mode,
    cost: u32,
    sending: Sending,
    /// The slot that the check takes, renews or releases.
    slot: Option<SlotId>,
    /// Rarely used fields, boxed.
    extra: Option<Box<Extra>>,
}

/// How a check is sent. It changes no decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sending {
    pub(crate) by: SentBy,
    /// Whether the sender limits the time of the check itself, as a [`Fallback`](crate::Fallback) and a
    /// [`Leased`](crate::Leased) store do.
    pub(crate) sender_limits_time: bool,
}

/// The sender of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SentBy {
    /// A request, which awaits the reply.
    Request,
    /// The queue of background operations.
    Background,
    /// The queue of background operations, not for the first time.
    Retry,
}

/// Rarely used fields.
#[derive(Debug, Clone)]
pub(crate) enum Extra {
    Id(Key),
    /// The id of a request that was charged without it, and its cost. The check stores the id and charges nothing: a
    /// repetition is granted that cost.
    Recorded(Key, u32),
    /// For a take ahead, the maximum wait; for a debt, the time that it takes to refill. In
    /// microseconds.
    Within(i64),
    /// The charge that a refund returns, under each policy.
    Charged(EachCharge),
    /// The check charges a block of a [`Leased`](crate::Leased) store. A [`Fallback`](crate::Fallback) sends it to its primary
    /// store only.
    Block,
    /// No block of a [`Leased`](crate::Leased) store may decide the check.
    Unleased,
    /// The check takes of several callers, and its key is that of all of them together.
    Joint(Box<Joint>),
}

/// Written by hand, so that the compiler inlines it: each request clones its check, which rarely has `extra`.
impl Clone for Check {
    #[inline(always)]
    fn clone(&self) -> Self {
        Self {
            key: self.key,
            policies: self.policies.clone(),
            mode: self.mode,
            cost: self.cost,
            sending: self.sending,
            slot: self.slot,
            extra: match &self.extra {
                None => None,
                extra => clone_extra(extra),
            },
        }
    }
}

#[cold]
#[inline(never)]
fn clone_extra(extra: &Option<Box<Extra>>) -> Option<Box<Extra>> {
    extra.clone()
}

impl Check {
    /// Takes `cost`, all or nothing. A cost of 0 is decided and charges nothing. A policy of
    /// requests [in flight](crate::Policy::in_flight) counts one, independent of the cost, in a new
    /// [slot](Self::slot). A clone of the check takes the same slot.
    #[inline]
    pub fn take(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies.clone(), Mode::Take, cost)
    }

    /// As [`take`](Self::take), without a clone of the list, and with these rarely used fields.
    #[inline(always)]
    pub(crate) fn take_with(key: Key, policies: Policies, cost: u32, extra: Option<Extra>) -> Self {
        Self {
            extra: extra.map(Box::new),
            ..Self::new(key, policies, Mode::Take, cost)
        }
    }

    /// Takes `cost` all or nothing, in advance if necessary. A cost that does not fit yet is
    /// charged as a debt, which is due when the cost would have fitted. If that is within `within`,
    /// the outcome is [`Later`](crate::check::Outcome::Later): wait that long, then proceed. Other
    /// callers see the debt immediately, so each such check is due at a different time, over all
    /// instances.
    ///
    /// The longest wait is a day, or the time in which the burst refills if that is longer; a token
    /// bucket that refills by the interval owes at most one capacity. Only strategies that refill
    /// support it; under others, in a [`Store`](crate::store::Store) without debts, and while the
    /// primary store of a [`Fallback`](crate::Fallback) cannot decide, this is a
    /// [`take`](Self::take). While there are
    /// debts, each [`take`](Self::take) of the caller is denied, in all instances, and a
    /// [`charge`](Self::charge) adds only what is missing to a debt of one capacity.
    ///
    /// Under a bucket that refills gradually, a [refund](Decision::refund) of a turn returns something only if it
    /// is the last one: later turns keep their times. Under one that refills by the interval, turns of several
    /// costs may be due in the same moment: up to a burst more than the bucket allows.
    ///
    /// Several policies are all charged immediately, although the turn is due only when the slowest
    /// one allows it. If that wait gets shorter, by checks under other lists, turns of a faster
    /// policy may be due together: at most its rate times the longest wait, beyond its burst.
    pub fn take_ahead(key: Key, policies: &Policies, cost: u32, within: Duration) -> Self {
        let owes = policies.iter().all(|policy| policy.frees().has_burst());
        let within = if owes {
            within.as_micros().min(LONGEST as u128) as i64
        } else {
            0
        };
        Self::new(key, policies.clone(), Mode::TakeAhead, cost).with_extra(Extra::Within(within))
    }

    /// Takes as much of `cost` as the policies allow; [`Decision::granted`] returns the amount.
    pub fn up_to(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies.clone(), Mode::UpTo, cost)
    }

    /// Decides whether `cost` would be allowed, without charging it.
    pub fn peek(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies.clone(), Mode::Peek, cost)
    }

    /// Charges `cost` even beyond the limit, for a cost that is known only afterwards. The debt is
    /// bounded: each policy counts at most twice its capacity, and cuts the charge to that
    /// independently of the others: a denial means that one of them has charged nothing.
    /// [`Decision::granted`] returns the smallest amount that a policy has charged, which is also the
    /// most that can be refunded. A policy of requests [in flight](crate::Policy::in_flight) counts nothing.
    pub fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies.clone(), Mode::Charge, cost)
    }

    /// Refunds `cost` of a charge made just before. Each policy refunds at most what it counts.
    /// [`Decision::granted`] returns the amount: the largest refund of a single policy.
    ///
    /// A part of an older charge may already have refilled or expired, and refunding that part
    /// again would exceed the policy: use [`Decision::refund`] for older charges. A policy of
    /// requests [in flight](crate::Policy::in_flight) refunds nothing: see
    /// [`release`](Self::release).
    pub fn refund(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::new(key, policies.clone(), Mode::Refund, cost)
    }

    /// Resets the caller's counts. A later refund of a charge made before the reset is deducted
    /// from newer charges.
    pub fn reset(key: Key, policies: &Policies) -> Self {
        Self::new(key, policies.clone(), Mode::Reset, 0)
    }

    /// Renews the slot of a request [in flight](crate::Policy::in_flight) for the policy's
    /// [`slot_ttl`](crate::Policy::slot_ttl). If the store has lost the slot, this takes it again,
    /// even beyond the limit. Charges nothing under policies of other kinds. May be sent again.
    ///
    /// A [`RateLimitLayer`](crate::RateLimitLayer) and [`Limiter::reserve`](crate::Limiter::reserve)
    /// renew their slots themselves. This is for other code, and for tests of a custom store.
    pub fn renew(key: Key, policies: &Policies, slot: SlotId) -> Self {
        Self {
            slot: Some(slot),
            ..Self::new(key, policies.clone(), Mode::Renew, 0)
        }
    }

    /// Releases the slot of a request [in flight](crate::Policy::in_flight). Refunds nothing under
    /// policies of other kinds. May be sent again.
    pub fn release(key: Key, policies: &Policies, slot: SlotId) -> Self {
        Self {
            slot: Some(slot),
            ..Self::new(key, policies.clone(), Mode::Release, 0)
        }
    }

    #[inline]
    fn new(key: Key, policies: Policies, mode: Mode, cost: u32) -> Self {
        let takes = matches!(mode, Mode::Take | Mode::TakeAhead | Mode::UpTo)
            && policies.in_flight().is_some();
        // Here rather than in the store: a slot is released by its id even if no reply to the take arrives.
        let slot = takes.then(SlotId::unique);
        Self {
            key,
            policies,
            mode,
            cost,
            sending: Sending {
                by: SentBy::Request,
                sender_limits_time: false,
            },
            slot,
            extra: None,
        }
    }

    /// Adds an id, so that a repeated request is charged once. If a check of this caller with this
    /// id was granted under these policies, the repeated one gets the same decision and is not
    /// charged. A denial is not stored: the request may be repeated, and is allowed as soon as it
    /// fits. A [charge](Self::charge) stores its id even if it charges 0.
    ///
    /// A store keeps an id for the longest period of the policies, and under a
    /// [`FixedWindow`](crate::Strategy::FixedWindow) until the window ends: a retry after that is charged in the
    /// next window. With several policies the latest of these times counts. A caller that sends the same id with
    /// every request is charged once. So a client may choose an id only if the service replays the
    /// response to it, as with an `Idempotency-Key`. A
    /// [`LocalStore`](crate::LocalStore) keeps as many ids as keys; beyond that it drops the oldest
    /// of a few. A [`Fallback`](crate::Fallback) does not carry ids across an outage: each instance
    /// that decides without its primary store may charge an id again.
    ///
    /// This method does nothing for a [take ahead](Self::take_ahead), for the refunds of a
    /// [decision](Decision::refund), and for a check with a [slot](Self::slot): a request
    /// with a repeated decision would have no slot. So under policies with requests [in
    /// flight](crate::Policy::in_flight), each take is charged.
    #[doc(alias = "idempotency")]
    #[must_use]
    pub fn with_id(self, id: impl AsRef<[u8]>) -> Self {
        match self.extra() {
            None | Some(Extra::Id(_) | Extra::Unleased) => {
                let id = Key::new(id);
                self.with_extra(Extra::Id(id))
            }
            Some(
                Extra::Recorded(..)
                | Extra::Within(_)
                | Extra::Charged(_)
                | Extra::Block
                | Extra::Joint(_),
            ) => self,
        }
    }

    /// Sets the rarely used fields.
    pub(crate) fn with_extra(self, extra: Extra) -> Self {
        Self {
            extra: Some(Box::new(extra)),
            ..self
        }
    }

    /// Replaces the mode. Only a [take ahead](Self::take_ahead) keeps its maximum wait, and only a take its slot.
    pub(crate) fn with_mode(self, mode: Mode) -> Self {
        let extra = match self.extra.as_deref() {
            Some(Extra::Within(_)) if mode != Mode::TakeAhead => None,
            _ => self.extra,
        };
        let slot = match mode {
            Mode::Take | Mode::TakeAhead | Mode::UpTo => self.slot,
            _ => None,
        };
        Self {
            mode,
            extra,
            slot,
            ..self
        }
    }

    /// Lets no block of a [`Leased`](crate::Leased) store decide the check, since its charge is settled later.
    #[inline]
    pub(crate) fn without_block(self) -> Self {
        if !self.policies.have_lease() {
            return self;
        }
        self.with_extra(Extra::Unleased)
    }

    /// Takes the slot that the other parts of a joint check take, or none.
    pub(super) fn share_slot(&mut self, slot: Option<SlotId>) {
        if self.slot.is_some() {
            self.slot = slot;
        }
    }

    /// Takes of several callers. `policies` combines the lists of all callers.
    pub(super) fn jointly(
        self,
        key: Key,
        policies: Policies,
        slot: Option<SlotId>,
        joint: Joint,
    ) -> Self {
        Self {
            key,
            policies,
            slot,
            extra: Some(Box::new(Extra::Joint(Box::new(joint)))),
            ..self
        }
    }

    /// Replaces the policies.
    pub(crate) fn under(self, policies: Policies) -> Self {
        Self { policies, ..self }
    }

    /// Returns the caller.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the policies.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Returns the operation of the check.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the cost.
    pub fn cost(&self) -> u32 {
        self.cost
    }

    /// Returns the [id](Self::with_id). `None` without an id, and for a check with a
    /// [slot](Self::slot).
    pub fn id(&self) -> Option<&Key> {
        match self.extra.as_deref() {
            Some(Extra::Id(id) | Extra::Recorded(id, _)) if self.slot.is_none() => Some(id),
            Some(Extra::Joint(joint)) if self.slot.is_none() => joint.id.as_ref(),
            _ => None,
        }
    }

    /// Returns the callers of a check that takes of several.
    #[inline]
    pub(crate) fn joint(&self) -> Option<&Joint> {
        match self.extra() {
            Some(Extra::Joint(joint)) => Some(joint),
            _ => None,
        }
    }

    /// Returns `true` if a caller of the check is in `callers`.
    pub(crate) fn is_of_any(&self, mut callers: impl FnMut(&Key) -> bool) -> bool {
        match self.joint() {
            Some(joint) => joint.keys().any(callers),
            None => callers(&self.key),
        }
    }

    /// Returns the slot that the check takes, renews or releases under a policy of requests [in
    /// flight](crate::Policy::in_flight).
    pub fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// Returns the rarely used fields.
    #[inline]
    pub(crate) fn extra(&self) -> Option<&Extra> {
        self.extra.as_deref()
    }

    /// Returns how the check is sent.
    #[inline]
    pub(crate) fn sending(&self) -> Sending {
        self.sending
    }

    /// Returns how the check is sent, to change it.
    #[inline]
    pub(crate) fn sending_mut(&mut self) -> &mut Sending {
        &mut self.sending
    }

    /// Returns `true` if less may be charged after the check than before.
    #[inline]
    pub(crate) fn gives_room(&self) -> bool {
        matches!(self.mode, Mode::Refund | Mode::Reset | Mode::Release)
    }

    /// Returns the maximum wait in microseconds: 0 for none.
    pub(crate) fn within(&self) -> i64 {
        match self.extra() {
            Some(Extra::Within(within)) => *within,
            _ => 0,
        }
    }

    /// Returns the refunded charge under the policy at this index, at the time `now` of the store. `None` for a charge made
    /// just before.
    pub(super) fn charged_under(&self, policy: usize, now: i64) -> Option<PolicyCharge> {
        let Some(Extra::Charged(each)) = self.extra() else {
            return None;
        };
        Some(each.get(policy)?.arriving(now))
    }

    /// Decides on `states`, one per policy, and charges them: the Rust half of `lua/check.lua`.
    ///
    /// A state changes only if the check charges, refunds or resets something, or if the clock has
    /// gone back.
    #[inline]
    pub(crate) fn decide(&self, states: &mut [State], now: i64) -> Verdicts {
        self.decide_by(states, now, 0)
    }

    /// As [`decide`](Self::decide). Calendars, and the states under them, have a clock that is `ahead` of that of the store.
    #[inline]
    pub(crate) fn decide_by(&self, states: &mut [State], now: i64, ahead: i64) -> Verdicts {
        if let ([state], [policy]) = (&mut *states, self.policies.as_slice()) {
            let (verdict, granted) = self.decide_one(state, policy, now, ahead);
            return Verdicts::of_one(granted, verdict);
        }
        let ask = self.ask(now);
        let max = match ask.mode {
            // Each policy cuts a charge independently of the others.
            Mode::Charge => i64::MAX,
            _ => self.smallest_grant(states, &ask, ahead),
        };
        let mut granted = None;
        let mut each = SmallVec::with_capacity(states.len());
        for (i, (state, policy)) in states.iter_mut().zip(&self.policies).enumerate() {
            let charged = self.charged_under(i, now);
            let ask = Ask {
                of: charged.as_ref(),
                ..ask.by_clock_of(policy, ahead)
            };
            let (verdict, grants) = state.decide(policy.params(), &ask, max);
            each.push(verdict);
            if self.policies.tells_granted(policy) {
                granted = Some(ask.mode.granted(granted, grants));
            }
        }
        Verdicts::new(granted.unwrap_or(0), each)
    }

    /// Decides under the only policy of the check. Returns its verdict, and the granted amount.
    #[inline]
    pub(crate) fn decide_one(
        &self,
        state: &mut State,
        policy: &Policy,
        now: i64,
        ahead: i64,
    ) -> (Verdict, i64) {
        let charged = self.charged_under(0, now);
        let ask = Ask {
            of: charged.as_ref(),
            ..self.ask(now).by_clock_of(policy, ahead)
        };
        state.decide(policy.params(), &ask, i64::MAX)
    }

    /// Returns the parameters of the check that are the same for all policies.
    #[inline]
    fn ask(&self, now: i64) -> Ask<'static> {
        Ask {
            within: self.within(),
            slot: self.slot,
            ..Ask::new(self.mode, self.cost.into(), now)
        }
    }

    /// Returns the largest amount that every policy allows; negative if one of them denies the check.
    fn smallest_grant(&self, states: &[State], ask: &Ask<'_>, ahead: i64) -> i64 {
        let mut smallest = i64::MAX;
        for (state, policy) in states.iter().zip(&self.policies) {
            let ask = ask.by_clock_of(policy, ahead);
            smallest = smallest.min(state.preview(policy.params(), &ask).max);
        }
        smallest
    }

    /// Creates the decision on this check, for your own [`Store`](crate::store::Store).
    ///
    /// `verdict` is called for each policy, in order. The check is allowed if all policies allow
    /// it. `granted` is the amount that was charged, refunded or reset. It matters only for modes
    /// that may grant a part of the cost: an allowed take is granted its whole cost, and a peek or
    /// a denied check nothing.
    ///
    /// Contradictions are corrected. The granted amount is at most the cost. The remaining amount
    /// is at most the capacity minus the charge, and less than the cost if the check is denied. A
    /// denial waits at least a microsecond, and the reset is not earlier than the end of the wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::check::{Check, Source, Verdict};
    /// use tower_redis_ratelimit::{Key, Policy, Quota, Strategy};
    ///
    /// let policies = Policy::new("api", Strategy::Gcra, Quota::per_minute(10))?.into();
    /// let check = Check::take(Key::new("user-42"), &policies, 4);
    ///
    /// let verdict = Verdict::denied(Duration::from_secs(30)).with_remaining(3);
    /// let decision = check.decided(Source::Other("postgres"), 0, |_policy| verdict);
    /// assert_eq!(decision.retry_after(), Some(Duration::from_secs(30)));
    /// assert_eq!((decision.granted(), decision.remaining()), (0, 3));
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn decided(
        &self,
        source: Source,
        granted: u32,
        verdict: impl FnMut(&Policy) -> Verdict,
    ) -> Decision {
        let given: Vec<Verdict> = self.policies().iter().map(verdict).collect();
        let is_allowed = given.iter().all(Verdict::is_allowed);
        let amount = match self.mode() {
            _ if !is_allowed => 0,
            Mode::Take | Mode::TakeAhead => self.cost(),
            Mode::UpTo | Mode::Charge | Mode::Refund => granted.min(self.cost()),
            Mode::Peek => 0,
            Mode::Reset => granted,
            Mode::Renew | Mode::Release => 1,
        };
        let amount = i64::from(amount);
        let mut each = SmallVec::new();
        for (verdict, policy) in given.into_iter().zip(&self.policies) {
            each.push(verdict.corrected(self, policy, amount));
        }
        self.clone().answer(Verdicts::new(amount, each), source)
    }

    /// Calls the functions of [custom calendars](super::Calendar::custom) for the windows around `now`. Call it before the
    /// check is decided, and under no lock.
    ///
    /// # Errors
    ///
    /// Returns an error for an invalid window.
    #[inline]
    pub(crate) fn prepare(&self, now: impl FnOnce() -> i64) -> Result<(), StoreError> {
        if self.policies.have_calendar() {
            self.policies.prepare_calendars(now())
        } else {
            Ok(())
        }
    }

    /// Creates the decision on this check.
    #[inline]
    pub(crate) fn answer(self, verdicts: Verdicts, source: Source) -> Decision {
        Decision::new(self.policies, verdicts, source)
    }
}
