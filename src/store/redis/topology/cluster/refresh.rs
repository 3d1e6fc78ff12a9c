//! Schedules queries of the map of slots: off the request path, in one task at a time.
//!
//! A thousand instances notice a failover at the same moment. So each waits for a random delay,
//! which grows while consecutive queries return the same map.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use tokio::runtime::Id;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::error::StoreError;
use crate::store::redis::topology::node::Node;
use crate::util::{Span, Task, TaskOwner, instant, jittered, lock};

#[derive(Debug)]
pub(crate) struct Refresher {
    tasks: TaskOwner,
    state: Mutex<State>,
    /// The result of the last query.
    pub(crate) outcome: watch::Sender<Option<StoreError>>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of consecutive queries without a change.
    unchanged: u32,
    /// Time at which the last query ended.
    last: Option<Instant>,
    /// Time of the next check of the marker.
    marked_until: Option<Instant>,
    /// Whether another instance has ever confirmed this number of partitions: the marker had it
    /// before this one set it.
    agreed: bool,
    /// Wakes the planned task from its sleep when dropped: with the store, or when another task
    /// replaces the planned one.
    planned: Option<oneshot::Sender<Infallible>>,
}

/// A planned refresh.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) begins: Instant,
    /// Closed if the task does not have to sleep until then.
    pub(crate) woken: oneshot::Receiver<Infallible>,
    pub(crate) task: Task,
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
    fn delay(self) -> Duration {
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
    /// Short enough that a probe of a fallback soon finds the new master.
    const LONGEST_GAP: Duration = Duration::from_millis(400);
    /// How long a runtime relies on a task on another runtime, which may have stalled.
    pub(crate) const ELSEWHERE: Duration = Duration::from_millis(50);
    /// Interval between two checks of the marker.
    const MARKER: Duration = Duration::from_secs(3_600);

    pub(super) fn new() -> Self {
        Self {
            tasks: TaskOwner::new(instant()),
            state: Mutex::default(),
            outcome: watch::Sender::new(None),
        }
    }

    /// Plans a task on this runtime. `None` if another task starts no later.
    pub(crate) fn begin(&self, why: Why, runtime: Id) -> Option<Planned> {
        let now = instant();
        let begins = {
            let state = lock(&self.state);
            let gap = Self::GAP
                .saturating_mul(1 << state.unchanged.min(10))
                .min(Self::LONGEST_GAP);
            let earliest = state
                .last
                .map_or(now, |last| last + jittered(gap, 0.5..1.0));
            earliest.max(now + jittered(why.delay(), 0.5..1.0))
        };
        let task = self.tasks.begin(
            runtime,
            now,
            Span {
                begins,
                until: begins + Self::ELSEWHERE,
            },
        )?;
        let (planned, woken) = oneshot::channel();
        let former = lock(&self.state).planned.replace(planned);
        drop(former);
        Some(Planned {
            begins,
            woken,
            task,
        })
    }

    /// Returns `true` if no other task has replaced this one during its sleep.
    pub(crate) fn is_current(&self, task: &Task) -> bool {
        let now = instant();
        task.renew(now, now + Self::ELSEWHERE)
    }

    /// Records the result of a task's query: whether the map has changed, and the error.
    pub(crate) fn end(&self, task: Task, news: bool, error: Option<StoreError>) {
        {
            let mut state = lock(&self.state);
            state.unchanged = if news {
                0
            } else {
                state.unchanged.saturating_add(1)
            };
            state.last = Some(instant());
        }
        drop(task);
        self.outcome.send_replace(error);
    }

    /// Returns the error of the last query, if it ended recently.
    pub(crate) fn has_just_failed(&self) -> Option<StoreError> {
        let is_recent = lock(&self.state)
            .last
            .is_some_and(|last| last.elapsed() < Self::LONGEST_GAP);
        self.outcome.borrow().clone().filter(|_| is_recent)
    }

    /// Returns `true` if the marker should be checked.
    pub(crate) fn marker_is_due(&self) -> bool {
        lock(&self.state)
            .marked_until
            .is_none_or(|until| until <= instant())
    }

    /// Returns `true` if another instance has ever confirmed this number of partitions.
    pub(crate) fn has_agreed(&self) -> bool {
        lock(&self.state).agreed
    }

    /// Records that the marker has this number; `agrees` if it had it before.
    pub(crate) fn marked(&self, agrees: bool) {
        let mut state = lock(&self.state);
        state.marked_until = Some(instant() + Self::MARKER);
        state.agreed |= agrees;
    }

    /// Forgets the marker: the slots belong to another cluster.
    pub(super) fn forget_marker(&self) {
        let mut state = lock(&self.state);
        (state.marked_until, state.agreed) = (None, false);
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Handle};
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_a_more_urgent_task_is_added() {
        let refresher = Refresher::new();
        let begin = |why| refresher.begin(why, Handle::current().id());
        let now = instant();
        let Planned {
            begins: later,
            task: first,
            ..
        } = begin(Why::Marker).unwrap();
        assert!(later > now + Duration::from_secs(29));
        assert!(begin(Why::Marker).is_none_or(|planned| planned.begins < later));
        let Planned {
            begins: soon,
            task: second,
            ..
        } = begin(Why::Lost(Node::new(0))).unwrap();
        assert!(soon <= now + Duration::from_millis(50));
        assert!(!refresher.is_current(&first) && refresher.is_current(&second));
        let Planned {
            begins: at_once,
            task: third,
            ..
        } = begin(Why::Unknown).unwrap();
        assert_eq!(at_once, now);
        for why in [Why::Unknown, Why::Lost(Node::new(0)), Why::Moved] {
            assert!(begin(why).is_none(), "{why:?}");
        }
        drop(second);
        assert!(refresher.is_current(&third), "it was not that one");
        refresher.end(third, true, None);
        assert!(begin(Why::Unknown).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn refresh_backs_off_while_nothing_changes() {
        let refresher = Refresher::new();
        let mut waits = vec![];
        for news in [true, false, false, false, false, true, true] {
            let Planned { begins, task, .. } = refresher
                .begin(Why::Unknown, Handle::current().id())
                .unwrap();
            waits.push((begins - instant()).as_millis());
            advance(begins - instant()).await;
            refresher.end(task, news, None);
        }
        assert_eq!(waits[0], 0);
        for (wait, longest) in waits[1..].iter().zip([100, 200, 400, 400, 400, 100]) {
            assert!((longest / 2..=longest).contains(wait), "{waits:?}");
        }
    }

    /// The runtime of that task may have stalled.
    #[tokio::test(start_paused = true)]
    async fn a_silent_task_is_not_waited_for() {
        let (refresher, other) = (
            Refresher::new(),
            Builder::new_current_thread().build().unwrap(),
        );
        let begin = |runtime: &Handle| refresher.begin(Why::Unknown, runtime.id());
        let task = begin(other.handle()).unwrap().task;
        advance(Refresher::ELSEWHERE / 2).await;
        assert!(begin(&Handle::current()).is_none());
        advance(Refresher::ELSEWHERE / 2).await;
        let newer = begin(&Handle::current()).unwrap().task;
        assert!(
            begin(other.handle()).is_none()
                && !refresher.is_current(&task)
                && refresher.is_current(&newer)
        );
        other.shutdown_background();
    }
}
