//! Reports once a minute, with how often it happened.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::util::{instant, lock};

/// How long a subject is not reported again.
const WINDOW: Duration = Duration::from_secs(60);

/// Reports each subject at once and then once a minute, with how often it came.
///
/// There is no task: call [`ended`](Self::ended) before each [`note`](Self::note) and now and then. It reports a few
/// subjects at most, so that no call takes long. A subject that did not come for a minute is forgotten. At most `max`
/// are remembered; while there are so many, all others together are one subject.
pub(super) struct Throttle<K, S> {
    windows: Mutex<Windows<K, S>>,
    start: Instant,
    /// When the first window ends, in microseconds after `start`. [`u64::MAX`] if there is none.
    first_end: AtomicU64,
}

struct Windows<K, S> {
    /// By the key of the subject; `None` for all others.
    open: HashMap<Option<K>, Window<S>>,
    /// In the order in which they end.
    ends: VecDeque<(Instant, Option<K>)>,
    max: usize,
}

struct Window<S> {
    /// None for all others.
    subject: Option<S>,
    /// How often it came since it was reported.
    count: u64,
}

/// A subject, `None` for all others, and how often it came since it was last reported.
pub(super) type Told<S> = (Option<S>, u64);

impl<K: Copy + Eq + Hash, S: Clone> Throttle<K, S> {
    pub(super) fn new(max: usize) -> Self {
        let windows = Windows { open: HashMap::new(), ends: VecDeque::new(), max };
        Self { windows: Mutex::new(windows), start: instant(), first_end: AtomicU64::new(u64::MAX) }
    }

    /// Counts one. Reports a new subject.
    pub(super) fn note(&self, key: K, subject: impl FnOnce() -> S) -> Option<Told<S>> {
        let mut windows = lock(&self.windows);
        let told = windows.note(key, subject);
        if told.is_some() {
            self.set_first_end(&windows);
        }
        told
    }

    /// What has been counted for a minute.
    pub(super) fn ended(&self) -> SmallVec<[Told<S>; 2]> {
        let first_end = self.first_end.load(Relaxed);
        if first_end == u64::MAX {
            return SmallVec::new();
        }
        let now = instant();
        if now < self.start + Duration::from_micros(first_end) {
            return SmallVec::new();
        }
        // Dropped after the lock: a subject may be a user's error.
        let mut forgotten = Vec::new();
        let mut windows = lock(&self.windows);
        let due = windows.ended(now, &mut forgotten);
        self.set_first_end(&windows);
        due
    }

    /// What has been counted until now.
    pub(super) fn rest(&self) -> Vec<Told<S>> {
        let open = mem::take(&mut lock(&self.windows).open);
        open.into_values().filter(|window| window.count > 0).map(|window| (window.subject, window.count)).collect()
    }

    fn set_first_end(&self, windows: &Windows<K, S>) {
        let end = windows.ends.front().map_or(u64::MAX, |(end, _)| (*end - self.start).as_micros() as u64);
        self.first_end.store(end, Relaxed);
    }
}

impl<K: Copy + Eq + Hash, S: Clone> Windows<K, S> {
    fn note(&mut self, key: K, subject: impl FnOnce() -> S) -> Option<Told<S>> {
        let named = self.open.len() - usize::from(self.open.contains_key(&None));
        let key = Some(key).filter(|key| named < self.max || self.open.contains_key(&Some(*key)));
        match self.open.entry(key) {
            Entry::Occupied(mut window) => {
                window.get_mut().count += 1;
                None
            }
            Entry::Vacant(place) => {
                let subject = key.map(|_| subject());
                place.insert(Window { subject: subject.clone(), count: 0 });
                self.ends.push_back((instant() + WINDOW, key));
                Some((subject, 1))
            }
        }
    }

    /// Reports what was counted in windows that have ended, two at most. A reported subject begins a new window, and a
    /// quiet one is forgotten.
    fn ended(&mut self, now: Instant, forgotten: &mut Vec<Window<S>>) -> SmallVec<[Told<S>; 2]> {
        let mut due = SmallVec::new();
        for _ in 0..2 {
            let Some(&(end, key)) = self.ends.front() else { break };
            if end > now {
                break;
            }
            self.ends.pop_front();
            match self.open.entry(key) {
                Entry::Occupied(mut window) if window.get().count > 0 => {
                    let Window { subject, count } = window.get_mut();
                    due.push((subject.clone(), mem::take(count)));
                    self.ends.push_back((now + WINDOW, key));
                }
                Entry::Occupied(window) => forgotten.push(window.remove()),
                Entry::Vacant(_) => {}
            }
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Weak};

    use tokio::time::advance;

    use super::*;

    impl<K, S> Throttle<K, S> {
        fn remembered(&self) -> [usize; 2] {
            let windows = lock(&self.windows);
            [windows.open.len(), windows.ends.len()]
        }
    }

    /// What a new one reports.
    fn note(throttle: &Throttle<u32, u32>, key: u32) -> Vec<Told<u32>> {
        throttle.ended().into_iter().chain(throttle.note(key, || key)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn subjects_are_reported_once_a_minute() {
        let throttle = Throttle::new(10);
        let mut lines = vec![];
        for second in 0..=300 {
            lines.extend(note(&throttle, 1).into_iter().map(|line| (second, line)));
            assert_eq!(note(&throttle, 1), []);
            advance(Duration::from_secs(1)).await;
        }
        // Two a second: the first at once, and each minute what came in it.
        let minutes = [(60, 119), (120, 120), (180, 120), (240, 120), (300, 120)];
        let expected: Vec<_> = [(0, 1)].into_iter().chain(minutes).map(|(at, count)| (at, (Some(1), count))).collect();
        assert_eq!(lines, expected);
        assert_eq!(throttle.rest(), [(Some(1), 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn counts_are_reported_with_or_without_traffic() {
        let throttle = Throttle::new(10);
        for (key, count) in [(1, 3), (2, 1), (3, 5)] {
            (0..count).for_each(|_| drop(note(&throttle, key)));
        }
        assert_eq!(throttle.ended().into_vec(), []);
        advance(WINDOW).await;
        assert_eq!(note(&throttle, 4), [(Some(1), 2), (Some(4), 1)]);
        assert_eq!(throttle.ended().into_vec(), [(Some(3), 4)]);
        // One that was quiet is forgotten, and told at once when it comes back.
        assert_eq!(note(&throttle, 2), [(Some(2), 1)]);
        advance(WINDOW).await;
        while throttle.remembered() != [0, 0] {
            assert_eq!(throttle.ended().into_vec(), []);
        }
        assert_eq!((throttle.first_end.load(Relaxed), throttle.rest()), (u64::MAX, vec![]));
    }

    #[tokio::test(start_paused = true)]
    async fn subjects_are_dropped_without_the_lock() {
        /// Looks, when it is dropped, whether it could be noted again.
        #[derive(Clone)]
        struct Error(Weak<Throttle<u32, Arc<Error>>>, Arc<AtomicBool>);

        impl Drop for Error {
            fn drop(&mut self) {
                let throttle = self.0.upgrade().unwrap();
                self.1.store(throttle.windows.try_lock().is_ok(), Relaxed);
            }
        }

        let (throttle, was_free) = (Arc::new(Throttle::new(10)), Arc::default());
        let subject = || Arc::new(Error(Arc::downgrade(&throttle), Arc::clone(&was_free)));
        drop(throttle.note(1, subject));
        advance(WINDOW).await;
        assert!(throttle.ended().is_empty() && was_free.load(Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn excess_subjects_are_merged_within_bounded_memory() {
        let throttle = Throttle::new(3);
        let mut lines = vec![];
        for round in 0..10 {
            for key in 0..1_000 {
                lines.extend(note(&throttle, key));
            }
            if round == 0 {
                assert_eq!(lines, [(Some(0), 1), (Some(1), 1), (Some(2), 1), (None, 1)]);
            }
            assert_eq!(throttle.remembered(), [4, 4]);
            advance(Duration::from_secs(6)).await;
        }
        assert_eq!(lines.len(), 4, "once a minute");
        let counted: Vec<_> = (0..4).flat_map(|_| throttle.ended()).collect();
        assert_eq!(counted, [(Some(0), 9), (Some(1), 9), (Some(2), 9), (None, 997 * 10 - 1)]);
        // Quiet ones make room.
        advance(WINDOW).await;
        assert_eq!(note(&throttle, 500), [(Some(500), 1)]);
    }
}
