//! How the map of slots is kept: asked of any node, by one task at a time, off the request path.
//!
//! A thousand instances notice a failover at the same moment. So each waits for a moment of its own, and the longer the
//! more often the map has turned out to be the same.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::slots::{self, SlotMap};
use super::{Address, Cluster};
use crate::store::clock::instant;
use crate::store::redis::errors::other_cluster;
use crate::store::redis::inner::Inner;
use crate::store::redis::transport::Node;
use crate::store::seed::RandomState;
use crate::store::{ErrorKind, StoreError, lock};

#[derive(Debug)]
pub(super) struct Refresher {
    state: Mutex<State>,
    /// How the last one went.
    outcome: watch::Sender<Option<StoreError>>,
}

#[derive(Debug, Default)]
struct State {
    /// The tasks that do so: mostly one.
    tasks: Vec<Planned>,
    /// How many were ever planned.
    planned: u64,
    /// How often in a row nothing new was heard.
    idle: u32,
    /// When the last one ended.
    last: Option<Instant>,
    /// Since when none of the nodes that were asked was of the cluster.
    gone_since: Option<Instant>,
    /// When the marker is to be looked at again.
    marked_until: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Planned {
    number: u64,
    runtime: Id,
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
    /// How many nodes are asked, and into how many parts the time for one of them is cut: after each, the next is asked too.
    const ASKED: usize = 6;
    const SIDE_BY_SIDE: u32 = 8;
    /// For how long a runtime relies on the task of another.
    const ELSEWHERE: Duration = Duration::from_millis(50);
    /// After so long without any node of the cluster it may have been set up anew. It is longer than a failover takes with
    /// Redis's defaults.
    const GONE: Duration = Duration::from_secs(30);
    /// How often the marker is looked at.
    const MARKER: Duration = Duration::from_secs(3_600);

    /// Plans a task on this runtime, unless there is one that is as soon. When it should ask, and its number.
    fn start(&self, why: Why, timeout: Duration, runtime: Id) -> Option<(Instant, u64)> {
        let mut state = lock(&self.state);
        let now = instant();
        let gap = Self::GAP.saturating_mul(1 << state.idle.min(10)).min(Self::LONGEST_GAP);
        let jitter = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let delay = why.delay().mul_f64((1.0 + jitter) / 2.0);
        let at = (now + delay).max(state.last.map_or(now, |last| last + gap.mul_f64((1.0 + jitter) / 2.0)));
        let is_due = |task: &Planned| match task.runtime == runtime {
            true => now < task.until,
            // It may stand still.
            false => now < task.at + Self::ELSEWHERE,
        };
        if state.tasks.iter().any(|task| task.at <= at && is_due(task)) {
            return None;
        }
        state.planned += 1;
        let number = state.planned;
        // One for each runtime, at most; of those that have not begun, the soonest.
        state.tasks.retain(|task| task.runtime != runtime && task.at <= now);
        state.tasks.push(Planned { number, runtime, at, until: at + timeout.saturating_mul(4) });
        Some((at, number))
    }

    /// Whether no other task has been planned in the place of this one.
    fn is_current(&self, number: u64) -> bool {
        lock(&self.state).tasks.iter().any(|task| task.number == number)
    }

    /// Whether it has failed only just now.
    fn has_just_failed(&self) -> Option<StoreError> {
        let recent = lock(&self.state).last.is_some_and(|last| last.elapsed() < Self::LONGEST_GAP);
        self.outcome.borrow().clone().filter(|_| recent)
    }

    fn end(&self, task: u64, news: Option<bool>) {
        let mut state = lock(&self.state);
        state.tasks.retain(|other| other.number != task);
        if let Some(news) = news {
            state.idle = if news { 0 } else { state.idle.saturating_add(1) };
            state.last = Some(instant());
        }
    }

    /// Whether the marker is to be looked at; not again for a while if it has just been.
    fn marker_is_due(&self) -> bool {
        lock(&self.state).marked_until.is_none_or(|until| until <= instant())
    }

    /// Whether none was of the cluster for so long that it is asked for as at the start. None is now.
    fn are_gone(&self) -> bool {
        lock(&self.state).gone_since.get_or_insert_with(instant).elapsed() >= Self::GONE
    }

    /// The slots were told, of a cluster that is perhaps another.
    fn found(&self, is_other: bool) {
        let mut state = lock(&self.state);
        state.gone_since = None;
        if is_other {
            state.marked_until = None;
        }
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

impl Inner {
    /// Has the slots asked for soon, on this runtime.
    pub(in super::super) fn refresh(self: &Arc<Self>, why: Why) {
        let (Some(cluster), Ok(runtime)) = (self.transport.cluster(), Handle::try_current()) else { return };
        if let Some((at, task)) = cluster.refresher.start(why, self.limits.timeout, runtime.id()) {
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
    pub(in super::super) async fn refreshed(self: &Arc<Self>) -> Result<(), StoreError> {
        let Some(cluster) = self.transport.cluster() else { return Ok(()) };
        let mut outcome = cluster.refresher.outcome.subscribe();
        outcome.mark_unchanged();
        let failed = cluster.refresher.has_just_failed();
        self.refresh(Why::Unknown);
        if let Some(error) = failed {
            return Err(error);
        }
        let told = async {
            // The task may be of a runtime that stands still.
            while timeout(Refresher::ELSEWHERE, outcome.changed()).await.is_err() {
                self.refresh(Why::Unknown);
            }
        };
        match timeout(self.limits.timeout, told).await {
            Ok(()) => outcome.borrow().clone().map_or(Ok(()), Err),
            Err(_) => Err(StoreError::new(ErrorKind::Timeout)),
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
    async fn run(mut self, inner: Weak<Inner>, at: Instant, why: Why) {
        sleep_until(at).await;
        let Some(inner) = inner.upgrade().filter(|_| self.cluster.refresher.is_current(self.number)) else { return };
        let outcome = self.ask(&inner, why).await;
        self.news.get_or_insert(false);
        let cluster = Arc::clone(&self.cluster);
        drop(self);
        cluster.refresher.outcome.send_replace(outcome.err());
    }

    async fn ask(&mut self, inner: &Arc<Inner>, why: Why) -> Result<(), StoreError> {
        let (map, changed) = self.cluster.ask_any(inner.limits.timeout, why).await?;
        self.news = Some(changed);
        let refresher = &self.cluster.refresher;
        if refresher.marker_is_due() {
            match inner.mark(&self.cluster, map.owner(slots::slot(super::SHARED.as_bytes()))).await {
                Ok(()) => refresher.marked(),
                Err(error) if error.kind() == ErrorKind::Configuration => {
                    let _ = self.cluster.refused.set(error.clone());
                    return Err(error);
                }
                // That master is away: it must not keep the others from deciding.
                Err(error) => inner.failed(&error),
            }
        }
        let nodes = map.nodes.clone();
        self.cluster.map.store(map);
        inner.queues().leave(|node| nodes.binary_search(&node).is_ok() || node == Node::NOWHERE);
        Ok(())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.cluster.refresher.end(self.number, self.news);
    }
}

impl Cluster {
    /// Asks nodes side by side, each a moment after the one before or as soon as that has failed: one that does not answer keeps
    /// nobody waiting. Returns the map, and whether it is another than before.
    ///
    /// The address of a node may have become that of another cluster, which is not believed: a map must have a node in common
    /// with the present one. Only if none of those has answered for long is it as at the start, when what the application has
    /// named is the cluster.
    async fn ask_any(self: &Arc<Self>, patience: Duration, why: Why) -> Result<(Arc<SlotMap>, bool), StoreError> {
        let present = self.map.load_full();
        // At the start nothing is known of any of them.
        let pause = if present.is_empty() { Duration::ZERO } else { patience / Refresher::SIDE_BY_SIDE };
        let mut left = self.to_ask(why).into_iter();
        let mut asking = JoinSet::new();
        let (mut failure, mut other) = (StoreError::new(ErrorKind::Unreachable), None);
        let slots = loop {
            if let Some(address) = left.next() {
                let this = Arc::clone(self);
                asking.spawn(async move {
                    let slots = timeout(patience, this.ask(&address)).await;
                    (slots.unwrap_or_else(|_| Err(StoreError::new(ErrorKind::Timeout))), address)
                });
            }
            let answer = match left.len() {
                0 => asking.join_next().await,
                _ => match timeout(pause, asking.join_next()).await {
                    Ok(answer) => answer,
                    Err(_) => continue,
                },
            };
            match answer {
                None => break self.refresher.are_gone().then_some(other).flatten().ok_or(failure)?,
                Some(Ok((Ok((_, slots)), _))) if present.is_of_cluster(&slots) => break slots,
                Some(Ok((Ok((_, slots)), address))) => {
                    failure = failure.or_telling(other_cluster(&address));
                    other = other.or(self.is_seed(&address).then_some(slots));
                }
                Some(Ok((Err(error), _))) => failure = failure.or_telling(error),
                Some(Err(_)) => failure = failure.or_telling(StoreError::new(ErrorKind::NoRuntime)),
            }
        };
        self.refresher.found(!present.is_of_cluster(&slots));
        let map = SlotMap::new(slots, |address| self.number(address));
        let changed = !map.is_like(&present);
        Ok((map.into(), changed))
    }

    fn is_seed(&self, address: &Address) -> bool {
        self.seeds.iter().filter_map(Address::of).any(|seed| seed == *address)
    }

    /// Some nodes that are known, in any order, and then those that the application named. Last, the one that failed.
    fn to_ask(&self, why: Why) -> Vec<Address> {
        let random = RandomState::new();
        let mut nodes = self.map.load().nodes.clone();
        nodes.sort_by_cached_key(|node| (why == Why::Lost(*node), random.hash_one(node.index())));
        nodes.truncate(Refresher::ASKED);
        let mut addresses: Vec<Address> = nodes.into_iter().filter_map(|node| self.address(node)).collect();
        for seed in self.seeds.iter().filter_map(Address::of) {
            if !addresses.contains(&seed) {
                addresses.push(seed);
            }
        }
        addresses
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use tokio::time::advance;

    use super::*;
    use crate::store::{RedisStore, Servers};

    const TIMEOUT: Duration = Duration::from_millis(250);

    #[tokio::test(start_paused = true)]
    async fn one_task_is_enough_unless_another_is_more_urgent() {
        let refresher = Refresher::default();
        let start = |why| refresher.start(why, TIMEOUT, Handle::current().id());
        let now = instant();
        let (later, first) = start(Why::Marker).unwrap();
        assert!(later > now + Duration::from_secs(29));
        assert!(start(Why::Marker).is_none_or(|(at, _)| at < later));
        let (soon, second) = start(Why::Lost(Node::NOWHERE)).unwrap();
        assert!(soon <= now + Duration::from_millis(50));
        assert!(!refresher.is_current(first) && refresher.is_current(second));
        let (at_once, third) = start(Why::Unknown).unwrap();
        assert_eq!(at_once, now);
        for why in [Why::Unknown, Why::Lost(Node::NOWHERE), Why::Moved] {
            assert!(start(why).is_none(), "{why:?}");
        }
        refresher.end(second, None);
        assert!(refresher.is_current(third), "it was not that one");
        refresher.end(third, Some(true));
        assert!(start(Why::Unknown).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_less_there_is_to_hear_the_longer_it_waits() {
        let refresher = Refresher::default();
        let start = |why| refresher.start(why, TIMEOUT, Handle::current().id());
        let mut waits = vec![];
        for news in [true, false, false, false, false, true, true] {
            let (at, task) = start(Why::Unknown).unwrap();
            waits.push((at - instant()).as_millis());
            advance(at - instant()).await;
            refresher.end(task, Some(news));
        }
        assert_eq!(waits[0], 0);
        for (wait, longest) in waits[1..].iter().zip([100, 200, 400, 400, 400, 100]) {
            assert!((longest / 2..=longest).contains(wait), "{waits:?}");
        }
    }

    /// A node that is of the cluster of this id. Another one may take its address.
    fn node(id: &'static str) -> (u16, Arc<Mutex<&'static str>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let id = Arc::new(Mutex::new(id));
        let told = Arc::clone(&id);
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let told = Arc::clone(&told);
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        let asked = &buffer[..length];
                        let reply = if asked.windows(5).any(|part| part == b"SLOTS") {
                            let id = *lock(&told);
                            format!("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$1\r\n{id}\r\n")
                        } else {
                            "+OK\r\n".repeat(asked.iter().filter(|byte| **byte == b'*').count())
                        };
                        stream.write_all(reply.as_bytes()).unwrap();
                    }
                });
            }
        });
        (port, id)
    }

    /// Nobody can tell whether it was set up anew, or its addresses are another's. The application has named them.
    #[tokio::test]
    async fn another_cluster_is_taken_when_ours_is_gone_for_long() {
        let (port, id) = node("a");
        let store = RedisStore::builder(Servers::cluster([format!("redis://127.0.0.1:{port}")]));
        let store = store.timeout(Duration::from_secs(20)).connect_lazy().unwrap();
        let cluster = store.inner.transport.cluster().unwrap();
        let ask =
            async || cluster.ask_any(Duration::from_secs(20), Why::Moved).await.map(|(map, _)| cluster.map.store(map));
        let rest = async |seconds| {
            tokio::time::pause();
            advance(Duration::from_secs(seconds)).await;
            tokio::time::resume();
        };
        ask().await.unwrap();
        for _ in 0..2 {
            assert!(cluster.connect(cluster.shared_node()).await.is_ok());
            *lock(&id) = "b";
            for error in [ask().await.unwrap_err(), cluster.connect(cluster.shared_node()).await.unwrap_err()] {
                assert_eq!(error.kind(), ErrorKind::NotReady);
                let cause = std::error::Error::source(&error).unwrap().to_string();
                assert!(cause.contains(&format!("127.0.0.1:{port} is not of this cluster")), "{cause}");
            }
            rest(25).await;
            assert!(ask().await.is_err());
            // It was not gone for long.
            *lock(&id) = "a";
            ask().await.unwrap();
        }
        *lock(&id) = "b";
        assert!(ask().await.is_err());
        rest(30).await;
        ask().await.unwrap();
        assert!(cluster.connect(cluster.shared_node()).await.is_ok());
        *lock(&id) = "a";
        assert!(ask().await.is_err(), "it is not taken back at once");
    }

    /// Its runtime may run nothing any more.
    #[tokio::test(start_paused = true)]
    async fn a_task_that_is_not_heard_of_is_not_waited_for() {
        let refresher = Refresher::default();
        let start = |why| refresher.start(why, TIMEOUT, Handle::current().id());
        assert!(start(Why::Unknown).is_some());
        advance(TIMEOUT).await;
        assert!(start(Why::Unknown).is_none());
        advance(20 * TIMEOUT).await;
        assert!(start(Why::Unknown).is_some());
    }
}
