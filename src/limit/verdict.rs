use smallvec::SmallVec;

use super::Policy;

/// The verdict of one policy on a check. A [`Store`](crate::store::Store) outside of this crate combines them into a
/// [`Decision`](super::Decision) with [`Check::decided`](super::Check::decided).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Verdict {
    /// The largest cost that would pass now.
    pub(crate) remaining: i64,
    /// 0 if this policy lets the check pass, [`NEVER`](Self::NEVER), or the microseconds until it would.
    pub(crate) wait: i64,
    /// How many microseconds until nothing is charged any more.
    pub(crate) reset: i64,
}

impl Verdict {
    /// The wait for what will never pass.
    pub(crate) const NEVER: i64 = -1;
    /// Of a policy that does not restrict the check.
    pub(super) const NONE: Self = Self {
        remaining: 0,
        wait: 0,
        reset: 0,
    };

    /// The verdict after so much was refunded, or charged if below zero, as far as is known without a call to the
    /// store.
    pub(super) fn refund(&mut self, policy: &Policy, back: i64) {
        if policy.is_in_flight() {
            // It is in flight still, and counts as one whatever it costs.
            return;
        }
        let (quota, capacity) = (policy.quota(), i64::from(policy.quota().capacity()));
        self.remaining = (self.remaining + back).clamp(0, capacity);
        let time =
            i64::try_from(quota.time_for(back.unsigned_abs()).as_micros()).unwrap_or(i64::MAX);
        self.reset = match back {
            _ if self.remaining == capacity => 0,
            _ if policy.frees().is_gradual() => self
                .reset
                .saturating_sub(time.saturating_mul(back.signum()))
                .max(0),
            // What begins to count is counted for a period.
            ..0 if self.reset == 0 => policy.params().period,
            _ => self.reset,
        };
    }

    /// Whether this policy let the check pass.
    pub(crate) fn is_allowed(&self) -> bool {
        self.wait == 0
    }

    /// How much of the capacity is used, in 255ths, rounded down: 255 means that nothing is left.
    #[inline]
    pub(crate) fn used(&self, policy: &Policy) -> u8 {
        let capacity = policy.params().capacity.max(1);
        let used = (capacity - self.remaining).clamp(0, capacity);
        (used as u64 * 255 / capacity as u64) as u8
    }
}

/// The verdicts of the policies of a check, in their order.
#[derive(Debug)]
pub(crate) struct Verdicts {
    /// What was charged, or refunded.
    pub(crate) granted: i64,
    /// When Redis decided, by its own clock in microseconds, or the fallback of a [`Fallback`](crate::Fallback), by that of
    /// this process; 0 if another did.
    pub(crate) at: i64,
    /// How many microseconds ago that was, if the decision is repeated under an [id](super::Check::with_id).
    pub(crate) age: i64,
    /// One for each policy. Most checks have one policy: then it takes no memory elsewhere.
    pub(crate) each: SmallVec<[Verdict; 1]>,
}

impl Verdicts {
    /// A decision of another store than Redis.
    pub(crate) fn new(granted: i64, each: SmallVec<[Verdict; 1]>) -> Self {
        Self {
            granted,
            at: 0,
            age: 0,
            each,
        }
    }

    /// The verdict of the first policy.
    pub(crate) fn first(&self) -> &Verdict {
        self.of(0)
    }

    /// The verdict of the policy at this index.
    pub(super) fn of(&self, policy: usize) -> &Verdict {
        self.each.get(policy).unwrap_or(&Verdict::NONE)
    }

    /// The index of the policy that decides: the one that asks for the longest wait, else the one with the least left,
    /// else the first.
    pub(super) fn decider(&self) -> usize {
        let rank = |v: &Verdict| (v.wait == Verdict::NEVER, v.wait, -v.remaining);
        let mut decider = 0;
        for (i, verdict) in self.each.iter().enumerate().skip(1) {
            if rank(verdict) > rank(self.of(decider)) {
                decider = i;
            }
        }
        decider
    }

    /// How many microseconds to wait, if they deny and a wait helps.
    pub(crate) fn wait(&self) -> Option<i64> {
        match self.of(self.decider()).wait {
            0 | Verdict::NEVER => None,
            wait => Some(wait),
        }
    }

    /// The same denial so many microseconds later.
    pub(crate) fn later(&self, elapsed: i64) -> Self {
        let mut verdicts = self.clone();
        for verdict in &mut verdicts.each {
            if verdict.wait > 0 {
                verdict.wait = (verdict.wait - elapsed).max(1);
            }
            verdict.reset = (verdict.reset - elapsed).max(0);
        }
        verdicts
    }
}

/// Equal verdicts, whenever they were decided.
impl PartialEq for Verdicts {
    fn eq(&self, other: &Self) -> bool {
        (self.granted, &self.each) == (other.granted, &other.each)
    }
}

impl Eq for Verdicts {}

/// In less time than the derived one, which goes through a list of any length: mostly there is one.
impl Clone for Verdicts {
    #[inline]
    fn clone(&self) -> Self {
        let each = match self.each[..] {
            [one] => SmallVec::from_buf([one]),
            _ => SmallVec::from_slice(&self.each),
        };
        Self { each, ..*self }
    }
}
