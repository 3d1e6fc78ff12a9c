//! How the map of slots is kept: asked of any node, by one task at a time, off the request path.
//!
//! A thousand instances notice a failover at the same moment. So each waits for a moment of its own, and the longer the
//! more often the map has turned out to be the same.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::slots::{self, Range, SlotMap};
use super::{Address, Cluster};
use crate::limit::ConfigError;
use crate::store::clock::instant;
use crate::store::redis::errors::error_of;
use crate::store::redis::lanes::Lanes;
use crate::store::redis::transport::Node;
use crate::store::seed::RandomState;
use crate::store::{Error, ErrorKind, lock};

#[derive(Debug)]
pub(super) struct Refresher {
    state: Mutex<State>,
    /// How the last one went.
    outcome: watch::Sender<Option<Error>>,
}

#[derive(Debug, Default)]
struct State {
    /// The task that does so.
    task: Option<Planned>,
    tasks: u64,
    /// How often in a row nothing new was heard.
    idle: u32,
    /// When the last one ended.
    last: Option<Instant>,
    /// When the marker is to be looked at again.
    marked_until: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Planned {
    number: u64,
    at: Instant,
    /// Until when to wait for it: its runtime may run nothing.
    until: Instant,
}

/// Why the slots are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Why {
    /// They are not known, and checks wait for them.
    Unknown,
    /// A node did not answer, or does not decide.
    Lost(Node),
    /// One slot is elsewhere, so others may be.
    Moved,
    /// The marker of the number of buckets expires some day.
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
    /// How many nodes are asked, one after the other.
    const ASKED: usize = 6;
    /// How often the marker is looked at.
    const MARKER: Duration = Duration::from_secs(3_600);

    /// Plans a task, unless there is one that is as soon. When it should ask, and its number.
    fn start(&self, why: Why, timeout: Duration) -> Option<(Instant, u64)> {
        let mut state = lock(&self.state);
        let now = instant();
        let gap = Self::GAP.saturating_mul(1 << state.idle.min(10)).min(Self::LONGEST_GAP);
        let jitter = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let delay = why.delay().mul_f64((1.0 + jitter) / 2.0);
        let at = (now + delay).max(state.last.map_or(now, |last| last + gap.mul_f64((1.0 + jitter) / 2.0)));
        if state.task.is_some_and(|task| now < task.until && task.at <= at) {
            return None;
        }
        state.tasks += 1;
        let until = at + timeout.saturating_mul(2 * Self::ASKED as u32 + 2);
        state.task = Some(Planned { number: state.tasks, at, until });
        Some((at, state.tasks))
    }

    /// Whether no other task has been planned in the place of this one.
    fn is_current(&self, number: u64) -> bool {
        lock(&self.state).task.is_some_and(|task| task.number == number)
    }

    /// Whether it has failed only just now.
    fn has_just_failed(&self) -> Option<Error> {
        let recent = lock(&self.state).last.is_some_and(|last| last.elapsed() < Self::LONGEST_GAP);
        self.outcome.borrow().clone().filter(|_| recent)
    }

    fn end(&self, task: u64, news: Option<bool>) {
        let mut state = lock(&self.state);
        if state.task.is_some_and(|other| other.number == task) {
            state.task = None;
        }
        if let Some(news) = news {
            state.idle = if news { 0 } else { state.idle.saturating_add(1) };
            state.last = Some(instant());
        }
    }

    /// Whether the marker is to be looked at; not again for a while if it has just been.
    fn marker_is_due(&self) -> bool {
        lock(&self.state).marked_until.is_none_or(|until| until <= instant())
    }

    fn marked(&self) {
        lock(&self.state).marked_until = Some(instant() + Self::MARKER);
    }
}

impl Default for Refresher {
    fn default() -> Self {
        Self { state: Mutex::default(), outcome: watch::Sender::new(None) }
    }
}

impl Lanes {
    /// Has the slots asked for soon, on this runtime.
    pub(in super::super) fn refresh(self: &Arc<Self>, why: Why) {
        let (Some(cluster), Ok(runtime)) = (self.transport.cluster(), Handle::try_current()) else { return };
        if let Some((at, task)) = cluster.refresher.start(why, self.limits.timeout) {
            let task = Task { cluster: Arc::clone(cluster), number: task, news: None };
            drop(runtime.spawn(task.run(Arc::downgrade(self), at, why)));
        }
    }

    /// Waits until the slots have been asked for. Where that has just failed, and it is not yet time to try again, it is that
    /// error at once.
    ///
    /// # Errors
    ///
    /// Why they are not known.
    pub(in super::super) async fn refreshed(self: &Arc<Self>) -> Result<(), Error> {
        let Some(cluster) = self.transport.cluster() else { return Ok(()) };
        let mut outcome = cluster.refresher.outcome.subscribe();
        outcome.mark_unchanged();
        let failed = cluster.refresher.has_just_failed();
        self.refresh(Why::Unknown);
        if let Some(error) = failed {
            return Err(error);
        }
        match timeout(self.limits.timeout, outcome.changed()).await {
            Ok(_) => outcome.borrow().clone().map_or(Ok(()), Err),
            Err(_) => Err(Error::new(ErrorKind::Timeout)),
        }
    }

    /// Looks after the marker once in a while.
    pub(in super::super) fn keep_marker(self: &Arc<Self>) {
        if self.transport.cluster().is_some_and(|cluster| cluster.refresher.marker_is_due()) {
            self.refresh(Why::Marker);
        }
    }
}

/// A task that asks for the slots.
struct Task {
    cluster: Arc<Cluster>,
    number: u64,
    /// Whether the map has changed. None if it has not come to that.
    news: Option<bool>,
}

impl Task {
    async fn run(mut self, lanes: Weak<Lanes>, at: Instant, why: Why) {
        sleep_until(at).await;
        let Some(lanes) = lanes.upgrade().filter(|_| self.cluster.refresher.is_current(self.number)) else { return };
        let outcome = self.ask(&lanes, why).await;
        self.news.get_or_insert(false);
        let cluster = Arc::clone(&self.cluster);
        drop(self);
        cluster.refresher.outcome.send_replace(outcome.err());
    }

    async fn ask(&mut self, lanes: &Arc<Lanes>, why: Why) -> Result<(), Error> {
        let (map, changed) = self.cluster.ask_any(lanes.limits.timeout, why).await?;
        self.news = Some(changed);
        let refresher = &self.cluster.refresher;
        if refresher.marker_is_due() {
            match lanes.mark(&self.cluster, map.owner(slots::slot(super::SHARED.as_bytes()))).await {
                Ok(()) => refresher.marked(),
                Err(error) if error.kind() == ErrorKind::Configuration => {
                    let _ = self.cluster.refused.set(error.clone());
                    return Err(error);
                }
                // That master is away: it must not keep the others from deciding.
                Err(error) => lanes.failed(&error),
            }
        }
        let nodes = map.nodes.clone();
        self.cluster.map.store(map);
        lanes.queues().leave(|node| nodes.contains(&node) || node == Node::NOWHERE);
        Ok(())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.cluster.refresher.end(self.number, self.news);
    }
}

impl Cluster {
    /// Asks one node after the other. Returns the map, and whether it is another than before.
    async fn ask_any(&self, patience: Duration, why: Why) -> Result<(Arc<SlotMap>, bool), Error> {
        let mut failure = Error::new(ErrorKind::Unreachable);
        for address in self.to_ask(why) {
            let ranges =
                timeout(patience, self.ask(&address)).await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout)));
            match ranges {
                Ok(ranges) => {
                    let map = SlotMap::new(&ranges, |address| self.number(address));
                    let changed = !map.is_like(&self.map.load());
                    return Ok((map.into(), changed));
                }
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Some nodes that are known, in any order, and then those that the application named. Last, the one that failed.
    fn to_ask(&self, why: Why) -> Vec<Address> {
        let random = RandomState::new();
        let mut nodes = self.map.load().nodes.clone();
        nodes.sort_by_key(|node| (why == Why::Lost(*node), random.hash_one(node.index())));
        nodes.truncate(Refresher::ASKED);
        let mut addresses: Vec<Address> = nodes.into_iter().filter_map(|node| self.address(node)).collect();
        for seed in self.seeds.iter().filter_map(Address::of) {
            if !addresses.contains(&seed) {
                addresses.push(seed);
            }
        }
        addresses
    }

    async fn ask(&self, address: &Address) -> Result<Vec<Range>, Error> {
        let mut connection = self.connect_to(address).await?;
        let mut cmd = redis::cmd("CLUSTER");
        cmd.arg("SLOTS");
        match connection.send_packed_command(&cmd).await {
            Ok(Value::ServerError(error))
                if error.details().is_some_and(|text| text.contains("cluster support disabled")) =>
            {
                Err(ConfigError::NoCluster(format!("{}:{}", address.host, address.port)).into())
            }
            Ok(Value::ServerError(error)) => Err(error_of(&error.into())),
            Ok(reply) => match slots::read(&reply, address) {
                Some(ranges) if !ranges.is_empty() => Ok(ranges),
                // It has not met the others yet, or was told to forget them.
                Some(_) => Err(Error::new(ErrorKind::NotReady)),
                None => Err(Error::new(ErrorKind::Protocol)),
            },
            Err(error) => Err(error_of(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(250);

    #[tokio::test(start_paused = true)]
    async fn one_task_is_enough_unless_another_is_more_urgent() {
        let refresher = Refresher::default();
        let now = instant();
        let (later, first) = refresher.start(Why::Marker, TIMEOUT).unwrap();
        assert!(later > now + Duration::from_secs(29));
        assert!(refresher.start(Why::Marker, TIMEOUT).is_none_or(|(at, _)| at < later));
        let (soon, second) = refresher.start(Why::Lost(Node::NOWHERE), TIMEOUT).unwrap();
        assert!(soon <= now + Duration::from_millis(50));
        assert!(!refresher.is_current(first) && refresher.is_current(second));
        let (at_once, third) = refresher.start(Why::Unknown, TIMEOUT).unwrap();
        assert_eq!(at_once, now);
        for why in [Why::Unknown, Why::Lost(Node::NOWHERE), Why::Moved] {
            assert!(refresher.start(why, TIMEOUT).is_none(), "{why:?}");
        }
        refresher.end(second, None);
        assert!(refresher.is_current(third), "it was not that one");
        refresher.end(third, Some(true));
        assert!(refresher.start(Why::Unknown, TIMEOUT).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_less_there_is_to_hear_the_longer_it_waits() {
        let refresher = Refresher::default();
        let mut waits = vec![];
        for news in [true, false, false, false, false, true, true] {
            let (at, task) = refresher.start(Why::Unknown, TIMEOUT).unwrap();
            waits.push((at - instant()).as_millis());
            advance(at - instant()).await;
            refresher.end(task, Some(news));
        }
        assert_eq!(waits[0], 0);
        for (wait, longest) in waits[1..].iter().zip([100, 200, 400, 400, 400, 100]) {
            assert!((longest / 2..=longest).contains(wait), "{waits:?}");
        }
    }

    /// Its runtime may run nothing any more.
    #[tokio::test(start_paused = true)]
    async fn a_task_that_is_not_heard_of_is_not_waited_for() {
        let refresher = Refresher::default();
        assert!(refresher.start(Why::Unknown, TIMEOUT).is_some());
        advance(TIMEOUT).await;
        assert!(refresher.start(Why::Unknown, TIMEOUT).is_none());
        advance(20 * TIMEOUT).await;
        assert!(refresher.start(Why::Unknown, TIMEOUT).is_some());
    }
}
