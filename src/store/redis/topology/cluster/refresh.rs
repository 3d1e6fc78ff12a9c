//! When the map of slots is asked for: off the request path, by one task at a time.
//!
//! A thousand instances notice a failover at the same moment. So each waits for a moment of its own, and the longer the
//! more often the map has turned out to be the same.

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
    /// How the last one went.
    pub(crate) outcome: watch::Sender<Option<StoreError>>,
}

#[derive(Debug, Default)]
struct State {
    /// How often in a row nothing new was heard.
    idle: u32,
    /// When the last one ended.
    last: Option<Instant>,
    /// When the marker is to be looked at again.
    marked_until: Option<Instant>,
    /// Whether another instance has ever confirmed our number of partitions: the marker had it before we set it.
    agreed: bool,
    /// Dropped with the store, and when another task takes the place of the planned one: ends its sleep.
    planned: Option<oneshot::Sender<Infallible>>,
}

/// A planned refresh.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) begins: Instant,
    /// Closed if the task need not sleep until then.
    pub(crate) woken: oneshot::Receiver<Infallible>,
    pub(crate) task: Task,
}

/// Why the slots are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// They are not known, and checks wait for them.
    Unknown,
    /// A node did not answer, or does not decide.
    Lost(Node),
    /// One slot is elsewhere, so others may be.
    Moved,
    /// The marker of the number of partitions expires some day.
    Marker,
}

impl Why {
    /// How long to wait at most, and at least half as long.
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
    /// The shortest time from one to the next; doubled while nothing new is heard.
    const GAP: Duration = Duration::from_millis(100);
    /// Short enough that a probe of a fallback finds the new master soon.
    const LONGEST_GAP: Duration = Duration::from_millis(400);
    /// For how long a runtime relies on the task of another, which may stand still.
    pub(crate) const ELSEWHERE: Duration = Duration::from_millis(50);
    /// How often the marker is looked at.
    const MARKER: Duration = Duration::from_secs(3_600);

    pub(super) fn new() -> Self {
        Self {
            tasks: TaskOwner::new(instant()),
            state: Mutex::default(),
            outcome: watch::Sender::new(None),
        }
    }

    /// Plans a task on this runtime. `None` if another task begins as soon.
    pub(crate) fn begin(&self, why: Why, runtime: Id) -> Option<Planned> {
        let now = instant();
        let begins = {
            let state = lock(&self.state);
            let gap = Self::GAP
                .saturating_mul(1 << state.idle.min(10))
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

    /// Whether no other task has taken the place of this one while it waited.
    pub(crate) fn is_current(&self, task: &Task) -> bool {
        let now = instant();
        task.renew(now, now + Self::ELSEWHERE)
    }

    /// A task has asked. Was there news, and what went wrong?
    pub(crate) fn end(&self, task: Task, news: bool, error: Option<StoreError>) {
        {
            let mut state = lock(&self.state);
            state.idle = if news {
                0
            } else {
                state.idle.saturating_add(1)
            };
            state.last = Some(instant());
        }
        drop(task);
        self.outcome.send_replace(error);
    }

    /// Whether it has failed only just now.
    pub(crate) fn has_just_failed(&self) -> Option<StoreError> {
        let is_recent = lock(&self.state)
            .last
            .is_some_and(|last| last.elapsed() < Self::LONGEST_GAP);
        self.outcome.borrow().clone().filter(|_| is_recent)
    }

    /// Whether the marker is to be looked at.
    pub(crate) fn marker_is_due(&self) -> bool {
        lock(&self.state)
            .marked_until
            .is_none_or(|until| until <= instant())
    }

    /// Whether another instance has ever confirmed our number of partitions.
    pub(crate) fn has_agreed(&self) -> bool {
        lock(&self.state).agreed
    }

    /// The marker has our number; `agrees` if it had it before.
    pub(crate) fn marked(&self, agrees: bool) {
        let mut state = lock(&self.state);
        state.marked_until = Some(instant() + Self::MARKER);
        state.agreed |= agrees;
    }

    /// The slots are those of another cluster.
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

    /// Its runtime may run nothing any more.
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
