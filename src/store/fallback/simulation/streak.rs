//! What an instance may know of a primary store that fails: how many requests it may yet send there.

/// What a breaker should count. It does not know which probes have failed, and so may be behind.
#[derive(Debug, Default)]
pub(super) struct StreakModel {
    /// The failure that began it, and those of trials since.
    failures: u32,
    /// The request that was sent last, since it began. What is sent before and fails later does not count.
    trial: Option<usize>,
    /// Until when a streak may begin that is not seen here.
    unsure_until: u64,
    /// Whether a probe was under way when the last streak ended. If it fails, it begins another, which is not seen here. A
    /// request that fails then may be of that streak, or begin one. Only what is sent after both tells that it is over.
    unsure: bool,
    /// When a probe was answered. The instance hears of it in the same millisecond, before or after all else.
    probed: Option<u64>,
}

impl StreakModel {
    /// A request is sent.
    pub(super) fn sends(&mut self, now: u64, request: usize) {
        self.passes(now);
        self.trial = (self.failures > 0).then_some(request);
    }

    pub(super) fn probes(&mut self, now: u64, deadline: u64) {
        self.passes(now);
        self.unsure_until = now + deadline;
    }

    /// A request has failed, in a way that `counts` or not. How many failures that makes, as far as is known.
    pub(super) fn fails(&mut self, now: u64, request: usize, counts: bool) -> u32 {
        self.passes(now);
        if self.unsure && counts {
            self.unsure_until = self.unsure_until.max(now);
        }
        self.failures += u32::from(counts && (self.trial == Some(request) || self.failures == 0));
        if self.unsure || self.probed.is_some() {
            0
        } else {
            self.failures
        }
    }

    /// A probe was answered.
    pub(super) fn is_probed(&mut self, now: u64) {
        self.probed = Some(now);
    }

    fn passes(&mut self, now: u64) {
        if self.probed.is_some_and(|probed| probed < now) {
            *self = Self::default();
        }
    }

    /// A request was answered that was sent at a time.
    pub(super) fn answers(&mut self, sent: u64, request: usize) {
        if self.trial == Some(request) || self.unsure {
            *self = Self {
                unsure: sent <= self.unsure_until,
                unsure_until: self.unsure_until,
                ..Self::default()
            };
        }
    }
}

/// A failure while a streak may have begun unseen may begin one itself, of which the next request to be sent is the trial.
/// An answer to a request sent before it tells nothing of that.
#[test]
fn an_uncertain_trial_forgets_no_failure() {
    let mut streak = StreakModel::default();
    streak.sends(1, 0);
    streak.fails(2, 0, true);
    streak.sends(3, 1);
    streak.probes(4, 10);
    // The trial ends the streak, and the probe fails later.
    streak.answers(3, 1);
    [(20, 2), (21, 3), (22, 4)]
        .into_iter()
        .for_each(|(now, request)| streak.sends(now, request));
    streak.fails(25, 2, true);
    streak.answers(21, 3);
    // The trial of the streak that the failure has begun. What was sent before it does not count.
    streak.sends(30, 5);
    streak.fails(31, 4, true);
    streak.answers(30, 5);
    streak.sends(40, 6);
    assert!(streak.fails(41, 6, true) <= 1, "{streak:?}");
}
