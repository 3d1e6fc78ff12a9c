//! The breaker: when to stop asking the primary store.
//!
//! A state machine without a clock: `now` is passed in, in microseconds.
//!
//! | state | until | who is let through |
//! |---|---|---|
//! | sound | a check fails | every check |
//! | doubtful | a trial is answered, or `threshold` failures count | one check at a time, as a trial |
//! | open | [`close`](Breaker::close) | nobody |
//!
//! A failure counts if its check was asked when the one before was known: the one that begins a doubt, and then those of
//! trials. So all checks of one call count once, and so do all that were under way when the primary store fell silent. Only
//! these wait for the deadline then, and the trials after them, one after the other. A trial that is heard of only after
//! the next one was let through tells as much as what was under way before it.

use std::time::Duration;

use super::sync::{AtomicU8, Mutex, Ordering, lock};

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    /// What `row` comes to. A check reads it without the lock.
    state: AtomicU8,
    row: Mutex<Row>,
}

const SOUND: u8 = 0;
const DOUBTFUL: u8 = 1;
const OPEN: u8 = 2;

/// Failures with no answer in between.
#[derive(Debug, Default)]
struct Row {
    /// Those that count.
    failures: u32,
    /// The check that was let through, if there is one, and until when to wait for it.
    trial: Option<(u64, i64)>,
    /// How many trials there have ever been: each has a number.
    trials: u64,
    opened_at: Option<i64>,
}

/// Lets a check go to the primary store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// As any other.
    Free,
    /// No other is let through until this one has an answer. By its number.
    Trial(u64),
    /// Of the task that looks after the primary store, which asks without being let through. It tells as much as a trial.
    Probe,
}

impl Breaker {
    const FIRST_DELAY: Duration = Duration::from_millis(50);
    /// Short enough that all instances are back within a second, though each waits for the others' probes.
    pub(super) const LONGEST_DELAY: Duration = Duration::from_millis(250);

    pub(super) fn new(threshold: u32) -> Self {
        Self { threshold, state: AtomicU8::new(SOUND), row: Mutex::default() }
    }

    pub(super) fn is_sound(&self) -> bool {
        self.state.load(Ordering::Acquire) == SOUND
    }

    pub(super) fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == OPEN
    }

    /// Whether a check may go to the primary store. In doubt, the next one may after `patience` at the latest, as
    /// nobody tells of a check whose caller has gone away.
    pub(super) fn admit(&self, now: impl FnOnce() -> i64, patience: Duration) -> Option<Pass> {
        match self.state.load(Ordering::Acquire) {
            SOUND => return Some(Pass::Free),
            OPEN => return None,
            _ => {}
        }
        let mut row = lock(&self.row);
        if row.opened_at.is_some() {
            return None;
        } else if row.failures == 0 {
            return Some(Pass::Free);
        }
        let now = now();
        if row.trial.is_some_and(|(_, until)| now < until) {
            return None;
        }
        let patience = i64::try_from(patience.as_micros()).unwrap_or(i64::MAX);
        row.trials += 1;
        row.trial = Some((row.trials, now.saturating_add(patience)));
        Some(Pass::Trial(row.trials))
    }

    /// The primary store has answered. In doubt only a trial tells how it is: what was under way before may have been
    /// answered before the failure.
    pub(super) fn succeeded(&self, pass: Pass) {
        if pass != Pass::Free && self.state.load(Ordering::Acquire) == DOUBTFUL {
            let mut row = lock(&self.row);
            if row.opened_at.is_none() && row.heeds(pass) {
                self.end(&mut row);
            }
        }
    }

    /// A check or a probe failed. `true` for the one failure that opens the breaker, as one that is
    /// `lasting` does at once.
    pub(super) fn failed(&self, pass: Pass, lasting: bool, now: i64) -> bool {
        let mut row = lock(&self.row);
        if row.opened_at.is_some() {
            return false;
        }
        if row.heeds(pass) || row.failures == 0 {
            row.failures = row.failures.saturating_add(1);
        }
        row.frees(pass);
        let opens = lasting || row.failures >= self.threshold;
        row.opened_at = opens.then_some(now);
        self.state.store(if opens { OPEN } else { DOUBTFUL }, Ordering::Release);
        opens
    }

    /// A check was answered or failed in a way that says nothing of the primary store.
    pub(super) fn learned_nothing(&self, pass: Pass) {
        if pass != Pass::Free {
            lock(&self.row).frees(pass);
        }
    }

    /// The primary store decides again. For how long the breaker was open, if it was.
    pub(super) fn close(&self, now: i64) -> Option<Duration> {
        let mut row = lock(&self.row);
        let opened_at = row.opened_at;
        self.end(&mut row);
        opened_at.map(|opened_at| Duration::from_micros(u64::try_from(now - opened_at).unwrap_or(0)))
    }

    fn end(&self, row: &mut Row) {
        *row = Row { trials: row.trials, ..Row::default() };
        self.state.store(SOUND, Ordering::Release);
    }

    /// How long to wait before the next probe, after so many in this outage: doubling up to a quarter of a second, and
    /// then shorter by up to a half, by `jitter` from 0 to 1, so that instances do not come back all at once.
    pub(super) fn delay(probes: u32, jitter: f64) -> Duration {
        let delay = Self::FIRST_DELAY.saturating_mul(1 << probes.min(10)).min(Self::LONGEST_DELAY);
        delay.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 2.0)
    }
}

impl Row {
    /// Whether a check tells how the primary store is in this doubt.
    fn heeds(&self, pass: Pass) -> bool {
        match pass {
            Pass::Free => false,
            Pass::Trial(number) => self.trial.is_some_and(|(trial, _)| trial == number),
            Pass::Probe => true,
        }
    }

    /// Lets another trial through after this one.
    fn frees(&mut self, pass: Pass) {
        if pass != Pass::Probe && self.heeds(pass) {
            self.trial = None;
        }
    }
}
