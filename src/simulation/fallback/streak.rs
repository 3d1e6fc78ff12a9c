//! Counts from outside how many requests an instance sends to a primary store that has stopped replying.

/// Failures without a reply in between.
///
/// The first failure counts, and then that of each request that was sent after the failure before and is the last one
/// sent. The breaker counts these too, since it stays half-open between them and admits these requests as trials. It may
/// count more: probes that fail, and trials in spite of a reply to an earlier request.
#[derive(Debug, Default)]
pub(super) struct FailureStreak {
    failures: u32,
    /// The last request that was sent since the last failure that counts.
    last: Option<usize>,
    /// Time of the last reply. The instance may process a reply to a probe before or after other events of the same
    /// millisecond, so failures in that time do not count.
    replied_at: u64,
}

impl FailureStreak {
    pub(super) fn sends(&mut self, request: usize) {
        self.last = Some(request);
    }

    /// A request has failed, which is evidence about the primary store. Returns the number of failures that count.
    pub(super) fn fails(&mut self, now: u64, request: usize) -> u32 {
        if now > self.replied_at && (self.failures == 0 || self.last == Some(request)) {
            self.failures += 1;
            self.last = None;
        }
        self.failures
    }

    /// The primary store has replied to any request or probe.
    pub(super) fn replies(&mut self, now: u64) {
        *self = Self {
            replied_at: now,
            ..Self::default()
        };
    }
}
