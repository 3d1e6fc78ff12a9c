//! Derives from the outcomes an instance has seen how many more requests it may send to a failing primary store.

/// The failures that a breaker should count. Failed probes are not visible here, so it may count fewer.
#[derive(Debug, Default)]
pub(super) struct StreakModel {
    /// The first failure of the streak, and the failures of trials since.
    failures: u32,
    /// The last request that was sent since the streak began. Failures of earlier requests do not count.
    trial: Option<usize>,
    /// Time until which a streak may begin unseen.
    unsure_until: u64,
    /// Whether a probe was in flight when the last streak ended. If it fails, it starts an unseen streak; a request
    /// that fails then may be part of that streak or start another one. Only a reply to a request sent after both shows
    /// that the streak has ended.
    unsure: bool,
    /// Time at which a probe was answered. The instance may process that before or after all other events of the same
    /// millisecond.
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

    /// A request has failed with an error that `counts` or not. Returns the known number of counted failures.
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

    /// A request that was sent at `sent` was answered.
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

/// A failure while a streak may have begun unseen may start a streak itself, whose trial is the next request sent. A
/// reply to an earlier request is no evidence about that streak.
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
    // The trial of the streak that the failure has started. Requests sent before it do not count.
    streak.sends(30, 5);
    streak.fails(31, 4, true);
    streak.answers(30, 5);
    streak.sends(40, 6);
    assert!(streak.fails(41, 6, true) <= 1, "{streak:?}");
}
