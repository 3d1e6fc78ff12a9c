//! Reports of repeated problems: each immediately, then its count once a minute.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::util::{instant, lock};

const MINUTE: Duration = Duration::from_secs(60);
/// Maximum number of counts that one call returns, so that no request logs many lines.
const MAX_COUNTS_PER_CALL: usize = 2;

/// Reports a new subject immediately, and afterwards its count at the end of each minute in which it occurred. A subject
/// that does not occur for a minute is new again.
///
/// No task runs: call [`take_due`](Self::take_due) before each [`record`](Self::record). At most `max`
/// subjects are listed in a minute; the others share one count.
pub(super) struct Repeats<K, S> {
    minute: Mutex<Minute<K, S>>,
    start: Instant,
    /// When the next count is due, in microseconds after `start`. [`u64::MAX`] if nothing is counted.
    due_at: AtomicU64,
}

struct Minute<K, S> {
    ends_at: Instant,
    /// The subjects of this minute, each with its unreported count. The key of the unlisted subjects is `None`.
    counts: HashMap<Option<K>, SubjectCount<S>>,
    /// Counts of the previous minute that are not reported yet.
    due: Vec<SubjectCount<S>>,
    max: usize,
}

/// A subject, or `None` for the unlisted subjects, and how often it occurred since its last report.
pub(super) type SubjectCount<S> = (Option<S>, u64);

impl<K: Copy + Eq + Hash, S: Clone> Repeats<K, S> {
    pub(super) fn new(max: usize) -> Self {
        let start = instant();
        let minute = Minute {
            ends_at: start,
            counts: HashMap::new(),
            due: Vec::new(),
            max,
        };
        Self {
            minute: Mutex::new(minute),
            start,
            due_at: AtomicU64::new(u64::MAX),
        }
    }

    /// Counts one occurrence. Returns a new subject, to be reported immediately.
    pub(super) fn record(&self, key: K, subject: impl FnOnce() -> S) -> Option<SubjectCount<S>> {
        let minute = &mut *lock(&self.minute);
        if minute.counts.is_empty() {
            minute.ends_at = instant() + MINUTE;
        }
        // Without the count that the unlisted subjects share.
        let listed = minute.counts.len() - usize::from(minute.counts.contains_key(&None));
        let is_listed = listed < minute.max || minute.counts.contains_key(&Some(key));
        let listed_key = if is_listed { Some(key) } else { None };
        let entry = match minute.counts.entry(listed_key) {
            Entry::Occupied(mut count) => {
                count.get_mut().1 += 1;
                return None;
            }
            Entry::Vacant(entry) => entry,
        };
        let new = if is_listed { Some(subject()) } else { None };
        // This occurrence is reported by the caller, so the count starts at 0.
        entry.insert((new.clone(), 0));
        self.update_due_at(minute);
        Some((new, 1))
    }

    /// Returns a few of the counts of minutes that have ended.
    pub(super) fn take_due(&self) -> SmallVec<[SubjectCount<S>; MAX_COUNTS_PER_CALL]> {
        // Without the lock, since every event gets here.
        let due_at = self.due_at.load(Relaxed);
        if due_at == u64::MAX || instant() < self.start + Duration::from_micros(due_at) {
            return SmallVec::new();
        }
        let mut guard = lock(&self.minute);
        let minute = &mut *guard;
        let quiet = minute.roll_over(instant());
        // A few per event, so that no request writes the lines of all callers.
        let from = minute.due.len().saturating_sub(MAX_COUNTS_PER_CALL);
        let due = minute.due.drain(from..).collect();
        self.update_due_at(minute);
        drop(guard);
        // Dropped without the lock: a subject may be a user's error.
        drop(quiet);
        due
    }

    /// Returns all counts that were not reported.
    pub(super) fn take_all(&self) -> Vec<SubjectCount<S>> {
        let minute = &mut *lock(&self.minute);
        let mut all = mem::take(&mut minute.due);
        for (subject, count) in mem::take(&mut minute.counts).into_values() {
            // The first occurrence of each is reported already.
            if count > 0 {
                all.push((subject, count));
            }
        }
        all
    }

    fn update_due_at(&self, minute: &Minute<K, S>) {
        let due_at = match (minute.due.is_empty(), minute.counts.is_empty()) {
            (false, _) => 0,
            (true, false) => (minute.ends_at - self.start).as_micros() as u64,
            (true, true) => u64::MAX,
        };
        self.due_at.store(due_at, Relaxed);
    }
}

impl<K: Eq + Hash, S: Clone> Minute<K, S> {
    /// If this minute has ended, makes its counts due and begins the next one. Removes and returns
    /// the subjects that did not occur again since their last report.
    fn roll_over(&mut self, now: Instant) -> Vec<SubjectCount<S>> {
        if now < self.ends_at {
            return Vec::new();
        }
        self.ends_at = now + MINUTE;
        let mut ended = vec![];
        // Otherwise a subject of an earlier minute would take a place for ever.
        for (_, quiet) in self.counts.extract_if(|_, (_, count)| *count == 0) {
            ended.push(quiet);
        }
        for (subject, count) in self.counts.values_mut() {
            self.due.push((subject.clone(), mem::take(count)));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Weak};

    use tokio::time::advance;

    use super::*;

    /// Records an occurrence, and returns all reports.
    fn record(repeats: &Repeats<u32, u32>, key: u32) -> Vec<SubjectCount<u32>> {
        repeats
            .take_due()
            .into_iter()
            .chain(repeats.record(key, || key))
            .collect()
    }

    fn listed(repeats: &Repeats<u32, u32>) -> usize {
        lock(&repeats.minute).counts.len()
    }

    #[tokio::test(start_paused = true)]
    async fn subjects_are_reported_once_a_minute() {
        let repeats = Repeats::new(10);
        let mut lines = vec![];
        for second in 0..=300 {
            lines.extend(record(&repeats, 1).into_iter().map(|line| (second, line)));
            assert_eq!(record(&repeats, 1), []);
            advance(Duration::from_secs(1)).await;
        }
        // Two a second: the first immediately, and after each minute the count of that minute.
        let minutes = [(60, 119), (120, 120), (180, 120), (240, 120), (300, 120)];
        let expected: Vec<_> = [(0, 1)]
            .into_iter()
            .chain(minutes)
            .map(|(at, count)| (at, (Some(1), count)))
            .collect();
        assert_eq!(lines, expected);
        assert_eq!(repeats.take_all(), [(Some(1), 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn counts_are_reported_with_or_without_traffic() {
        let repeats = Repeats::new(10);
        for (key, count) in [(1, 3), (2, 1), (3, 5), (4, 2)] {
            (0..count).for_each(|_| drop(record(&repeats, key)));
        }
        assert!(repeats.take_due().is_empty());
        advance(MINUTE).await;
        let mut counts: Vec<_> = [(); 3]
            .into_iter()
            .flat_map(|()| repeats.take_due())
            .collect();
        counts.sort();
        assert_eq!(counts, [(Some(1), 2), (Some(3), 4), (Some(4), 1)]);
        // A subject that did not occur for a minute is new again.
        assert_eq!(record(&repeats, 2), [(Some(2), 1)]);
        advance(2 * MINUTE).await;
        while listed(&repeats) > 0 {
            assert!(repeats.take_due().is_empty());
            advance(MINUTE).await;
        }
        assert_eq!(
            (repeats.due_at.load(Relaxed), repeats.take_all()),
            (u64::MAX, vec![])
        );
    }

    #[tokio::test(start_paused = true)]
    async fn one_call_reports_few_counts() {
        let repeats = Repeats::new(1_000);
        for _ in 0..2 {
            (0..1_000).for_each(|key| drop(record(&repeats, key)));
        }
        advance(MINUTE).await;
        let calls: Vec<usize> = (0..501).map(|_| repeats.take_due().len()).collect();
        assert!(
            calls[..500]
                .iter()
                .all(|count| *count == MAX_COUNTS_PER_CALL)
                && calls[500] == 0
        );
    }

    #[tokio::test(start_paused = true)]
    async fn subjects_are_dropped_without_the_lock() {
        /// Records, when it is dropped, whether the lock is free.
        #[derive(Clone)]
        struct Error(Weak<Repeats<u32, Arc<Error>>>, Arc<AtomicBool>);

        impl Drop for Error {
            fn drop(&mut self) {
                let repeats = self.0.upgrade().unwrap();
                self.1.store(repeats.minute.try_lock().is_ok(), Relaxed);
            }
        }

        let (repeats, was_free) = (Arc::new(Repeats::new(10)), Arc::default());
        let subject = || Arc::new(Error(Arc::downgrade(&repeats), Arc::clone(&was_free)));
        drop(repeats.record(1, subject));
        advance(MINUTE).await;
        assert!(repeats.take_due().is_empty() && was_free.load(Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn unlisted_subjects_share_a_count() {
        let repeats = Repeats::new(3);
        let mut lines = vec![];
        for round in 0..10 {
            for key in 0..1_000 {
                lines.extend(record(&repeats, key));
            }
            if round == 0 {
                assert_eq!(lines, [(Some(0), 1), (Some(1), 1), (Some(2), 1), (None, 1)]);
            }
            assert_eq!(listed(&repeats), 4);
            advance(Duration::from_secs(6)).await;
        }
        assert_eq!(lines.len(), 4, "once a minute");
        let mut counts: Vec<_> = (0..4).flat_map(|_| repeats.take_due()).collect();
        counts.sort();
        assert_eq!(
            counts,
            [
                (None, 997 * 10 - 1),
                (Some(0), 9),
                (Some(1), 9),
                (Some(2), 9)
            ]
        );
        // Subjects that do not occur again make room.
        advance(MINUTE).await;
        assert_eq!(record(&repeats, 500), [(Some(500), 1)]);
    }
}
