//! Schedules queries of the map of slots: off the request path, in one task at a time.
//!
//! A thousand instances notice a failover at the same moment. So each waits for a random delay,
//! which grows while consecutive queries return the same map.
//!
//! Checks without a node do not wait for that task: their worker queries the map, on its own runtime. If connecting takes
//! longer than a check waits, the query continues for the next check.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::Instant;

use crate::error::StoreError;
use crate::store::redis::topology::node::Node;
use crate::util::{instant, jittered, lock};

#[derive(Debug, Default)]
pub(crate) struct Refresher {
    state: Mutex<RefresherState>,
    /// Notified at the end of each query.
    ended: Notify,
}

#[derive(Debug, Default)]
struct RefresherState {
    /// Number of consecutive queries without a change.
    unchanged: u32,
    /// When the last query ended, and its error.
    last: Option<(Instant, Option<StoreError>)>,
    /// The next query, or the running one. Another query is planned only if it begins earlier, or if this one is
    /// overdue.
    planned: Option<PlannedRefresh>,
    /// Time of the next check of the marker.
    marker_due: Option<Instant>,
    /// Whether another instance has ever confirmed this number of partitions: the marker had it
    /// before this one set it.
    was_confirmed: bool,
}

#[derive(Debug)]
struct PlannedRefresh {
    begins: Instant,
    /// Time from which another task may replace this one, because its runtime has shut down or stalls.
    overdue: Instant,
    /// Wakes the planned task from its sleep when dropped: with the store, or when another task
    /// replaces the planned one.
    _wakes: oneshot::Sender<Infallible>,
}

/// A planned refresh.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) begins: Instant,
    /// Closed when another task replaces this one, or with the store.
    pub(crate) woken: oneshot::Receiver<Infallible>,
}

/// The reason for a query of the slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The slots are unknown, and checks wait for them.
    Unknown,
    /// A node did not respond, or cannot decide.
    Lost(Node),
    /// One slot has moved, so others may have moved too.
    Moved,
    /// The marker of the number of partitions has to be renewed before it expires.
    Marker,
}

impl Why {
    /// Maximum delay; the minimum is half of it.
    fn max_delay(self) -> Duration {
        match self {
            Self::Unknown => Duration::ZERO,
            Self::Lost(_) => Duration::from_millis(50),
            Self::Moved => Duration::from_millis(500),
            Self::Marker => Duration::from_secs(60),
        }
    }
}

impl Refresher {
    /// Minimum interval between two queries; doubled while nothing changes.
    const GAP: Duration = Duration::from_millis(100);
    /// Maximum of the doubled interval: after a failover, a probe of a fallback must soon find the new master.
    const LONGEST_GAP: Duration = Duration::from_millis(400);
    /// Time after `begins` at which a task that has not begun is overdue.
    const LATE: Duration = Duration::from_millis(50);
    /// Interval between two checks of the marker.
    const MARKER: Duration = Duration::from_secs(3_600);

    /// Plans a query. Returns `None` if a planned one begins no later and is not overdue.
    pub(crate) fn plan(&self, why: Why) -> Option<Planned> {
        let now = instant();
        let (wakes, woken) = oneshot::channel();
        let mut state = lock(&self.state);
        // At most 10 doublings, so that the shift cannot overflow.
        let gap = Self::GAP
            .saturating_mul(1 << state.unchanged.min(10))
            .min(Self::LONGEST_GAP);
        let earliest = match &state.last {
            Some((ended_at, _)) => *ended_at + jittered(gap, 0.5..1.0),
            None => now,
        };
        let begins = earliest.max(now + jittered(why.max_delay(), 0.5..1.0));
        if let Some(plan) = &state.planned
            && plan.begins <= begins
            && now < plan.overdue
        {
            return None;
        }
        let former = state.planned.replace(PlannedRefresh {
            begins,
            overdue: begins + Self::LATE,
            _wakes: wakes,
        });
        drop(state);
        // Without the lock, since this wakes the task of that plan.
        drop(former);
        Some(Planned { begins, woken })
    }

    /// Begins a planned query, which takes `patience` at most. Returns `false` if another task has replaced it.
    pub(crate) fn begin(&self, planned: &mut Planned, patience: Duration) -> bool {
        let state = &mut *lock(&self.state);
        match &mut state.planned {
            // A query may take that long, so until then no other task must replace this one.
            Some(plan) if planned.is_current() => {
                plan.overdue = instant() + patience;
                true
            }
            _ => false,
        }
    }

    /// Ends a planned query, so that another one can be planned.
    pub(crate) fn end(&self, mut planned: Planned) {
        let state = &mut *lock(&self.state);
        // Otherwise it is the plan of the task that has replaced this one.
        if planned.is_current() {
            state.planned = None;
        }
    }

    /// Records the outcome of a query: whether the map has changed, or the error.
    pub(crate) fn queried(&self, outcome: &Result<bool, StoreError>) {
        let mut state = lock(&self.state);
        state.unchanged = match outcome {
            Ok(true) => 0,
            Ok(false) | Err(_) => state.unchanged.saturating_add(1),
        };
        let error = match outcome {
            Ok(_) => None,
            Err(error) => Some(error.clone()),
        };
        let former = state.last.replace((instant(), error));
        // Without the lock: the error of a closure may own anything.
        drop(state);
        drop(former);
        // After the outcome is stored: the woken checks read its error.
        self.ended.notify_waiters();
    }

    /// Resolves at the end of a query. Counts from this call, not from the first poll.
    pub(crate) fn ended(&self) -> Notified<'_> {
        self.ended.notified()
    }

    /// The error of the last query, if that failed less than [`LONGEST_GAP`](Self::LONGEST_GAP) ago.
    pub(crate) fn recent_error(&self) -> Option<StoreError> {
        match &lock(&self.state).last {
            Some((ended_at, Some(error))) if ended_at.elapsed() < Self::LONGEST_GAP => {
                Some(error.clone())
            }
            _ => None,
        }
    }

    /// Returns `true` if the marker should be checked.
    pub(crate) fn marker_is_due(&self) -> bool {
        match lock(&self.state).marker_due {
            Some(due) => due <= instant(),
            None => true,
        }
    }

    /// Returns `true` if another instance has ever confirmed this number of partitions.
    pub(crate) fn was_confirmed(&self) -> bool {
        lock(&self.state).was_confirmed
    }

    /// Records that the marker has this store's number. `agrees` if the marker had that number before this store set
    /// it.
    pub(crate) fn marked(&self, agrees: bool) {
        let mut state = lock(&self.state);
        state.marker_due = Some(instant() + Self::MARKER);
        // Kept once it is set: after a `FLUSHALL`, only instances that were confirmed earlier restore the marker.
        state.was_confirmed |= agrees;
    }

    /// Forgets the marker: the slots belong to another cluster.
    pub(super) fn forget_marker(&self) {
        let mut state = lock(&self.state);
        state.marker_due = None;
        state.was_confirmed = false;
    }
}

impl Planned {
    /// Whether no other task has taken the place of this one.
    fn is_current(&mut self) -> bool {
        self.woken.try_recv() == Err(TryRecvError::Empty)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn only_a_more_urgent_task_is_added() {
        let refresher = Refresher::default();
        let plan = |why| refresher.plan(why);
        let now = instant();
        let mut first = plan(Why::Marker).unwrap();
        assert!(first.begins > now + Duration::from_secs(29));
        assert!(plan(Why::Marker).is_none_or(|planned| planned.begins < first.begins));
        let mut second = plan(Why::Lost(Node::new(0))).unwrap();
        assert!(second.begins <= now + Duration::from_millis(50));
        assert!(!refresher.begin(&mut first, PATIENCE));
        assert!(refresher.begin(&mut second, PATIENCE));
        let mut third = plan(Why::Unknown).unwrap();
        assert_eq!(third.begins, now);
        for why in [Why::Unknown, Why::Lost(Node::new(0)), Why::Moved] {
            assert!(plan(why).is_none(), "{why:?}");
        }
        refresher.end(second);
        assert!(refresher.begin(&mut third, PATIENCE), "it was not that one");
        refresher.end(third);
        assert!(plan(Why::Unknown).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn refresh_backs_off_while_nothing_changes() {
        let refresher = Refresher::default();
        let mut waits = vec![];
        for news in [true, false, false, false, false, true, true] {
            let planned = refresher.plan(Why::Unknown).unwrap();
            waits.push((planned.begins - instant()).as_millis());
            advance(planned.begins - instant()).await;
            refresher.queried(&Ok(news));
            refresher.end(planned);
        }
        assert_eq!(waits[0], 0);
        for (wait, longest) in waits[1..].iter().zip([100, 200, 400, 400, 400, 100]) {
            assert!((longest / 2..=longest).contains(wait), "{waits:?}");
        }
    }

    /// The runtime of an overdue task may have shut down, or stall.
    #[tokio::test(start_paused = true)]
    async fn an_overdue_task_is_not_waited_for() {
        let refresher = Refresher::default();
        let plan = || refresher.plan(Why::Unknown);
        let mut silent = plan().unwrap();
        advance(Refresher::LATE / 2).await;
        assert!(plan().is_none());
        advance(Refresher::LATE / 2).await;
        let mut newer = plan().unwrap();
        assert!(!refresher.begin(&mut silent, PATIENCE));
        assert!(refresher.begin(&mut newer, PATIENCE));
        advance(PATIENCE / 2).await;
        assert!(plan().is_none(), "it is querying");
        advance(PATIENCE / 2).await;
        assert!(plan().is_some());
    }
}
