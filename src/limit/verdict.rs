use smallvec::SmallVec;

use super::Policy;

/// The verdict of a single policy on a check. A [`Store`](crate::store::Store) outside of this
/// crate combines verdicts into a [`Decision`](super::Decision) with
/// [`Check::decided`](super::Check::decided).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Verdict {
    /// The largest cost that would be allowed now.
    pub(crate) remaining: i64,
    /// 0 if this policy allows the check, else [`NEVER`](Self::NEVER) or the microseconds until it
    /// would.
    pub(crate) wait: i64,
    /// Microseconds until every charge has expired.
    pub(crate) reset: i64,
}

impl Verdict {
    /// The wait of a check that can never be allowed.
    pub(crate) const NEVER: i64 = -1;
    /// The verdict of a policy that does not restrict the check.
    pub(super) const NONE: Self = Self {
        remaining: 0,
        wait: 0,
        reset: 0,
    };

    /// Updates the verdict after `back` was refunded (charged if negative), as far as that is known
    /// without a call to the store.
    pub(super) fn refund(&mut self, policy: &Policy, back: i64) {
        if policy.is_in_flight() {
            // The request is still in flight, and counts as one regardless of its cost.
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
            // Nothing was charged before: the new charge counts for a period.
            ..0 if self.reset == 0 => policy.params().period,
            _ => self.reset,
        };
    }

    /// Returns `true` if this policy allows the check.
    pub(crate) fn is_allowed(&self) -> bool {
        self.wait == 0
    }

    /// Returns the used part of the capacity in 255ths, rounded down: 255 means that nothing
    /// remains.
    #[inline]
    pub(crate) fn used(&self, policy: &Policy) -> u8 {
        let capacity = policy.params().capacity.max(1);
        let used = (capacity - self.remaining).clamp(0, capacity);
        (used as u64 * 255 / capacity as u64) as u8
    }
}

/// The verdicts of a check's policies, in order.
#[derive(Debug)]
pub(crate) struct Verdicts {
    /// The amount charged or refunded.
    pub(crate) granted: i64,
    /// When Redis decided, in microseconds of its clock, or a [`Fallback`](crate::Fallback) by
    /// itself, in microseconds of this process's clock; 0 if another store did.
    pub(crate) at: i64,
    /// Microseconds since the original decision, if this is a repetition under an
    /// [id](super::Check::with_id).
    pub(crate) age: i64,
    /// One per policy. Most checks have a single policy, whose verdict is stored inline.
    pub(crate) each: SmallVec<[Verdict; 1]>,
}

impl Verdicts {
    /// Creates the verdicts of another store than Redis.
    pub(crate) fn new(granted: i64, each: SmallVec<[Verdict; 1]>) -> Self {
        Self {
            granted,
            at: 0,
            age: 0,
            each,
        }
    }

    /// Returns the verdict of the first policy.
    pub(crate) fn first(&self) -> &Verdict {
        self.of(0)
    }

    /// Returns the verdict of the policy at this index.
    pub(super) fn of(&self, policy: usize) -> &Verdict {
        self.each.get(policy).unwrap_or(&Verdict::NONE)
    }

    /// Returns the index of the deciding policy: the first with the longest wait, then the
    /// least remaining.
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

    /// Returns the wait in microseconds, if the check is denied and waiting helps.
    pub(crate) fn wait(&self) -> Option<i64> {
        match self.of(self.decider()).wait {
            0 | Verdict::NEVER => None,
            wait => Some(wait),
        }
    }

    /// Returns the same verdicts `elapsed` microseconds later.
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

/// Compares the verdicts, but not when they were made.
impl PartialEq for Verdicts {
    fn eq(&self, other: &Self) -> bool {
        (self.granted, &self.each) == (other.granted, &other.each)
    }
}

impl Eq for Verdicts {}

/// Faster than the derived implementation, which copies lists of any length: most lists have one
/// element.
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
