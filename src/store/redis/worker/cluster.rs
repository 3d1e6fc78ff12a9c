//! What a cluster asks of the workers: to look for its slots again, and to send on what a node has refused because of
//! how they are spread. The node did not run it.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::RedisError;
use tokio::runtime::Handle;
use tokio::time::timeout_at;

use super::inner::Inner;
use super::job::Job;
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::store::redis::link::{error_of, not_run, within};
use crate::store::redis::script::MARKER;
use crate::store::redis::topology::cluster::{Cluster, Planned, Refusal, SlotMap, Why};
use crate::store::redis::topology::{Node, Topology};
use crate::util::instant;

/// How long the marker stays after the last instance has looked at it, which each does every hour.
const MARKER_KEPT: Duration = Duration::from_secs(3 * 86_400);
/// After so many nodes that all send us elsewhere.
const MAX_HOPS: u8 = 8;
/// How long a check waits for its own keys to be on one node: less than the deadline of a fallback, which should not
/// take it for an outage.
const PATIENCE: Duration = Duration::from_millis(30);

/// Checks, and the nodes that decide them now. None where that has to be waited for.
pub(super) type Placed = Vec<(Option<Node>, Job)>;

impl Inner {
    /// Has the slots queried soon, on this runtime unless a task on another one is about to do so.
    pub(super) fn refresh(self: &Arc<Self>, why: Why) {
        let (Some(cluster), Ok(runtime)) = (self.topology.cluster(), Handle::try_current()) else {
            return;
        };
        if let Some(planned) = cluster.refresher.plan(why) {
            drop(runtime.spawn(Self::run_refresh(Arc::downgrade(self), why, planned)));
        }
    }

    async fn run_refresh(this: Weak<Self>, why: Why, mut planned: Planned) {
        let _ = timeout_at(planned.begins, &mut planned.woken).await;
        let Some(this) = this.upgrade() else { return };
        let Some(cluster) = this.topology.cluster() else {
            return;
        };
        if cluster.refresher.begin(&mut planned, this.limits.timeout) {
            let _ = this.query_slots(cluster, why).await;
            cluster.refresher.end(planned);
        }
    }

    /// Queries the slots, and adopts the map.
    ///
    /// # Errors
    ///
    /// The error of the query, or of the marker.
    async fn query_slots(self: &Arc<Self>, cluster: &Cluster, why: Why) -> Result<(), StoreError> {
        let queried = async {
            let (map, changed) = cluster.ask_any(why, self.limits.timeout).await?;
            self.adopt(cluster, map).await?;
            Ok(changed)
        };
        let outcome = queried.await;
        cluster.refresher.queried(&outcome);
        outcome.map(drop)
    }

    /// Takes up a map of slots, once the marker allows it.
    async fn adopt(
        self: &Arc<Self>,
        cluster: &Cluster,
        map: Arc<SlotMap>,
    ) -> Result<(), StoreError> {
        if cluster.refresher.marker_is_due() {
            match self.mark(cluster, &map).await {
                Ok(agrees) => cluster.refresher.marked(agrees),
                Err(error) if error.kind() == ErrorKind::Configuration => {
                    let _ = cluster.refused.set(error.clone());
                    return Err(error);
                }
                // That master is away: it must not keep the others from deciding.
                Err(error) => self.failed(&error),
            }
        }
        cluster.adopt(Arc::clone(&map));
        self.queues().retain(|node| map.names(node));
        Ok(())
    }

    /// Sets the marker to our number. Returns whether it had that number before.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`] if it has another number, and ours was never confirmed; the error of a call that failed.
    async fn mark(self: &Arc<Self>, cluster: &Cluster, map: &SlotMap) -> Result<bool, StoreError> {
        let (ours, node) = (
            cluster.partitions(),
            map.shared_owner().ok_or_else(no_node)?,
        );
        let args = (ours, usize::from(cluster.refresher.has_agreed()));
        let (theirs, agrees): (usize, bool) = self
            .run_shared(node, &MARKER, "partitions", args, MARKER_KEPT)
            .await?;
        if theirs == ours {
            return Ok(agrees);
        }
        let text = format!(
            "this store has {ours} partitions, and others have {theirs} under the prefix {:?} in the same cluster, so that \
             neither would see the other's counts: give all the same number, or this one its own prefix",
            self.prefix
        );
        Err(ConfigError::new(text).into())
    }

    /// Keeps the watch of sentinels running, and checks the marker of a cluster once in a while.
    pub(super) fn attend(self: &Arc<Self>) {
        match &self.topology {
            Topology::Sentinel(sentinels) => sentinels.watch(),
            Topology::Cluster(cluster) if cluster.refresher.marker_is_due() => {
                self.refresh(Why::Marker);
            }
            Topology::Server(_) | Topology::Cluster(_) => {}
        }
    }

    /// Queries the slots now, for checks that wait for them. If that has just failed, returns that error immediately.
    ///
    /// # Errors
    ///
    /// Why they are not known.
    pub(super) async fn refreshed(self: &Arc<Self>, cluster: &Cluster) -> Result<(), StoreError> {
        if let Some(error) = cluster.refresher.has_just_failed() {
            self.refresh(Why::Unknown);
            return Err(error);
        }
        within(self.limits.timeout, self.query_slots(cluster, Why::Unknown))
            .await
            .map_err(|error| error.at(cluster.address(None)))
    }

    /// The node that has the keys of no caller.
    ///
    /// # Errors
    ///
    /// Why it is not known.
    pub(crate) async fn shared_node(self: &Arc<Self>) -> Result<Node, StoreError> {
        if let Some(cluster) = self.topology.cluster()
            && cluster.shared_node().is_none()
        {
            self.refreshed(cluster).await?;
        }
        self.topology.shared_node().ok_or_else(no_node)
    }

    /// Where a check is decided now.
    pub(super) fn node_of(&self, job: &Job) -> Option<Node> {
        let asks = job.redirect.as_ref().and_then(|redirect| redirect.ask);
        asks.or_else(|| self.topology.node(job.partition))
    }

    /// A node has refused the call of these checks. Returns those that can be decided elsewhere or later, and answers
    /// the others.
    pub(super) fn redirect(
        self: &Arc<Self>,
        cluster: &Cluster,
        jobs: Vec<Job>,
        error: &RedisError,
        from: Node,
    ) -> Placed {
        let refusal = cluster.refusal(error, from);
        match refusal {
            Refusal::Moved { slot, node } => {
                cluster.learn(slot, node);
                self.refresh(Why::Moved);
            }
            Refusal::Ask(_) | Refusal::TryAgain => jobs
                .iter()
                .for_each(|job| cluster.notice_move(job.partition)),
            Refusal::NotReady => self.refresh(Why::Lost(from)),
            Refusal::Other => {}
        }
        let address = cluster.address(Some(from));
        let refused = error_of(error).at(&address);
        let not_ready = not_run(ErrorKind::NotReady, error).at(&address);
        // Whether it was of one caller alone.
        let alone = jobs.len() == 1 || jobs.iter().all(|job| job.alone);
        let mut again = vec![];
        for mut job in jobs {
            let redirect = job.redirect.get_or_insert_default();
            redirect.ask = None;
            redirect.hops += 1;
            let to = match refusal {
                Refusal::Other => {
                    self.refuse(job, refused.clone());
                    continue;
                }
                Refusal::NotReady => None,
                _ if redirect.hops > MAX_HOPS && refusal != Refusal::TryAgain => None,
                Refusal::Moved { node, .. } => Some(Some(node)),
                // Each caller by itself is mostly on one node. Redis 6.2 says ASK too where only some of the keys are gone:
                // there, a caller who is still here would be counted anew.
                Refusal::Ask(_) | Refusal::TryAgain if !alone => Some(Some(from)),
                Refusal::Ask(node) => {
                    redirect.ask = Some(node);
                    Some(Some(node))
                }
                Refusal::TryAgain => {
                    redirect.hops = 0;
                    let since = *redirect.waits.get_or_insert_with(instant);
                    (since.elapsed() < PATIENCE).then_some(None)
                }
            };
            match to {
                Some(node) => again.push((node, job)),
                None => {
                    let error = not_ready.clone();
                    job.fail(if refusal == Refusal::TryAgain {
                        error.of_check()
                    } else {
                        error
                    });
                }
            }
        }
        again
    }

    /// Splits the checks of a node: first the checks that another node serves now, then the others.
    pub(super) fn moved(&self, jobs: impl Iterator<Item = Job>, node: Node) -> (Placed, Vec<Job>) {
        let placed = jobs.map(|job| (self.node_of(&job), job));
        let (elsewhere, left): (Vec<_>, Vec<_>) =
            placed.partition(|(to, _)| to.is_some_and(|to| to != node));
        (elsewhere, left.into_iter().map(|(_, job)| job).collect())
    }
}

fn no_node() -> StoreError {
    let cause = io::Error::new(
        io::ErrorKind::NotFound,
        "no node of the cluster serves the slot",
    );
    StoreError::with_source(ErrorKind::Unreachable, cause)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::Mutex;

    use redis::parse_redis_value;
    use tokio::time::advance;

    use super::*;
    use crate::store::{RedisStore, Servers};
    use crate::support::until;
    use crate::util::lock;

    #[test]
    fn store_errors_are_not_lost() {
        let error = parse_redis_value(b"-CLUSTERDOWN Hash slot not served\r\n")
            .unwrap()
            .extract_error()
            .unwrap_err();
        let told = not_run(ErrorKind::NotReady, &error);
        assert!(told.kind() == ErrorKind::NotReady && told.is_unsent());
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
                            format!(
                                "*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$1\r\n{id}\r\n"
                            )
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

    /// Neither when another takes its place, nor when its store is dropped.
    #[tokio::test]
    async fn no_planned_refresh_outlives_its_reason() {
        let tasks = || Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        for last in [Why::Marker, Why::Moved] {
            let store = RedisStore::cluster(["redis://127.0.0.1:1"]).unwrap();
            store.inner.refresh(Why::Marker);
            store.inner.refresh(last);
            until("one task is left", async || tasks() <= before + 1).await;
            drop(store);
            until("no task is left", async || tasks() <= before).await;
        }
    }

    /// Nobody can tell whether it was set up anew, or its addresses are another's. The application has named them.
    #[tokio::test]
    async fn a_replaced_cluster_is_eventually_adopted() {
        let (port, id) = node("a");
        let store = RedisStore::builder(Servers::cluster([format!("redis://127.0.0.1:{port}")]));
        let store = store
            .timeout(Duration::from_secs(20))
            .connect_lazy()
            .unwrap();
        let cluster = store.inner.topology.cluster().unwrap();
        let ask = async || {
            cluster
                .ask_any(Why::Moved, Duration::from_secs(20))
                .await
                .map(|(map, _)| cluster.adopt(map))
        };
        let rest = async |seconds| {
            tokio::time::pause();
            advance(Duration::from_secs(seconds)).await;
            tokio::time::resume();
        };
        ask().await.unwrap();
        for _ in 0..2 {
            assert!(
                cluster
                    .connect(cluster.shared_node().unwrap())
                    .await
                    .is_ok()
            );
            *lock(&id) = "b";
            for error in [
                ask().await.unwrap_err(),
                cluster
                    .connect(cluster.shared_node().unwrap())
                    .await
                    .err()
                    .unwrap(),
            ] {
                assert_eq!(error.kind(), ErrorKind::NotReady);
                let cause = std::error::Error::source(&error).unwrap().to_string();
                assert!(
                    cause.contains(&format!(
                        "127.0.0.1:{port} no longer belongs to this cluster"
                    )),
                    "{cause}"
                );
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
        assert!(
            cluster
                .connect(cluster.shared_node().unwrap())
                .await
                .is_ok()
        );
        *lock(&id) = "a";
        assert!(ask().await.is_err(), "it is not taken back at once");
    }
}
