//! Workers and clusters: queries which node owns which slot, and routes checks that a node rejected because of its
//! slots. A node that rejects a call has not run it.
//!
//! The methods of [`SharedStore`] that depend on the topology are here, so that queueing and sending a check
//! can be read without them.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::RedisError;
use tokio::runtime::Handle;
use tokio::time::timeout_at;

use super::queues::{Job, Placed, Redirect};
use super::store::{SharedStore, runtime};
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::store::redis::link::{STEPS, error_of, not_run};
use crate::store::redis::script::{KeyCall, MARKER};
use crate::store::redis::topology::Node;
use crate::store::redis::topology::cluster::{
    Cluster, NodeError, Planned, SlotMap, Why, no_address,
};
use crate::util::{instant, patient};

/// Time to live of the marker. Each instance renews it every hour.
const MARKER_KEPT: Duration = Duration::from_secs(3 * 86_400);
/// Maximum number of nodes that redirect a check before it fails.
const MAX_HOPS: u8 = 8;
/// Maximum time that a check waits until all its keys are on one node. Shorter than the deadline of a fallback, which
/// would otherwise count a migrating slot as an outage.
const SPLIT_WAIT: Duration = Duration::from_millis(30);
/// The timeout divided by this number is the time after which the next node is queried too, in parallel.
const QUERIES_PER_TIMEOUT: u32 = 8;

impl SharedStore {
    /// Schedules a query of the slots, on this runtime unless another runtime's task has scheduled one.
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
        let patience = this.settings.time_to_connect();
        if cluster.refresher.begin(&mut planned, patience) {
            // The refresher keeps its error for the checks.
            let _ = this.query_slots(cluster, why).await;
            cluster.refresher.end(planned);
        }
    }

    /// Queries the slots, and adopts the map.
    ///
    /// # Errors
    ///
    /// Returns the error of the query, or of the marker.
    async fn query_slots(self: &Arc<Self>, cluster: &Cluster, why: Why) -> Result<(), StoreError> {
        let queried = async {
            // A node that does not reply must not use up the time of all others.
            let pause = self.settings.timeout / QUERIES_PER_TIMEOUT;
            let patience = self.settings.time_to_connect();
            let (map, changed) = cluster.query_any(why, patience, pause).await?;
            self.adopt(cluster, map).await?;
            Ok(changed)
        };
        let outcome = queried.await;
        cluster.refresher.queried(&outcome);
        outcome?;
        Ok(())
    }

    /// Adopts a map of slots, unless the marker rejects this store.
    async fn adopt(
        self: &Arc<Self>,
        cluster: &Cluster,
        map: Arc<SlotMap>,
    ) -> Result<(), StoreError> {
        // Before the map is used: a store with a wrong number of partitions must not count.
        if cluster.refresher.marker_is_due() {
            match self.mark(cluster, &map).await {
                Ok(agrees) => cluster.refresher.marked(agrees),
                Err(error) if error.kind() == ErrorKind::Configuration => {
                    let _ = cluster.marker_error.set(error.clone());
                    return Err(error);
                }
                // The marker's master is unreachable: the other masters must still be used.
                Err(error) => self.failed(&error),
            }
        }
        cluster.adopt(Arc::clone(&map));
        // After the map is used: otherwise a check could create such a queue again.
        self.queues().retain(|node| map.names(node));
        Ok(())
    }

    /// Sets the marker to this store's number of partitions. Returns whether it had that number before.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`] if the marker has another number and this store's number was never confirmed; the error of a
    /// failed call.
    async fn mark(self: &Arc<Self>, cluster: &Cluster, map: &SlotMap) -> Result<bool, StoreError> {
        let ours = cluster.partitions();
        let Some(node) = map.shared_owner() else {
            return Err(no_node());
        };
        let call = KeyCall {
            script: &MARKER,
            keys: vec![
                self.topology
                    .shared_key(&self.settings.prefix, "partitions"),
            ],
            args: (ours, usize::from(cluster.refresher.was_confirmed())),
            ttl: MARKER_KEPT,
        };
        let (theirs, agrees): (usize, bool) = self.run_script(node, &call).await?;
        if theirs == ours {
            return Ok(agrees);
        }
        let text = format!(
            "this store has {ours} partitions, and others have {theirs} under the prefix {:?} in the same cluster, so that \
             neither would see the other's counts: give all the same number, or this one its own prefix",
            self.settings.prefix
        );
        Err(ConfigError::new(text).into())
    }

    /// Queries the slots immediately, for waiting checks, and waits for at most `time`. A query that takes longer continues,
    /// for later checks. If the last query has just failed, returns its error without another query.
    ///
    /// # Errors
    ///
    /// Returns the error of the query.
    pub(super) async fn refreshed(
        self: &Arc<Self>,
        cluster: &Cluster,
        time: Duration,
    ) -> Result<(), StoreError> {
        // While no node can be reached, checks fail immediately. The queries continue without checks.
        if let Some(error) = cluster.refresher.recent_error() {
            self.refresh(Why::Unknown);
            return Err(error);
        }
        // Before the query starts: its end must not be missed.
        let ended = cluster.refresher.ended();
        // On this runtime: a query on another one may stall with it.
        drop(runtime()?.spawn(Self::query_now(Arc::downgrade(self))));
        let error = match patient(time, STEPS, ended).await {
            Ok(()) => cluster.refresher.recent_error(),
            Err(_) => Some(StoreError::still_connecting()),
        };
        match error {
            Some(error) => Err(error.with_server(cluster.address(None))),
            None => Ok(()),
        }
    }

    async fn query_now(this: Weak<Self>) {
        if let Some(this) = this.upgrade()
            && let Some(cluster) = this.topology.cluster()
        {
            let _ = this.query_slots(cluster, Why::Unknown).await;
        }
    }

    /// Returns the node with the keys that belong to no caller.
    ///
    /// # Errors
    ///
    /// Returns the reason why no such node was found.
    pub(crate) async fn shared_node(self: &Arc<Self>) -> Result<Node, StoreError> {
        if let Some(cluster) = self.topology.cluster()
            && cluster.shared_node().is_none()
        {
            let time = self.settings.time_to_connect();
            self.refreshed(cluster, time).await?;
        }
        match self.topology.shared_node() {
            Some(node) => Ok(node),
            None => Err(no_node()),
        }
    }

    /// Returns the node that decides a check at present.
    pub(super) fn node_of(&self, job: &Job) -> Option<Node> {
        if let Some(redirect) = &job.redirect
            && let Some(node) = redirect.importing_node
        {
            return Some(node);
        }
        self.topology.node(job.partition)
    }

    /// Interprets the error of the node `from`, and updates the slot map accordingly.
    fn node_error(
        self: &Arc<Self>,
        cluster: &Cluster,
        error: &RedisError,
        from: Node,
    ) -> NodeError {
        let node_error = cluster.node_error(error, from);
        match node_error {
            NodeError::Moved { slot, node } => {
                // This slot immediately: the query finds the other slots that have moved with it.
                cluster.learn(slot, node);
                self.refresh(Why::Moved);
            }
            NodeError::NotReady | NodeError::NoAddress => self.refresh(Why::Lost(from)),
            NodeError::Ask(_) | NodeError::TryAgain | NodeError::Other => {}
        }
        node_error
    }

    /// Interprets the error of a call of a script with a key that belongs to no caller.
    pub(super) fn script_error(self: &Arc<Self>, error: &RedisError, from: Node) -> StoreError {
        let Some(cluster) = self.topology.cluster() else {
            return error_of(error);
        };
        match self.node_error(cluster, error, from) {
            NodeError::Other => error_of(error),
            NodeError::NoAddress => no_address().not_sent(),
            NodeError::Moved { .. }
            | NodeError::Ask(_)
            | NodeError::TryAgain
            | NodeError::NotReady => not_run(ErrorKind::NotReady, error),
        }
    }

    /// Handles a call that the node `from` rejected. Returns its checks that another node can decide, or this one
    /// later, and fails the others.
    pub(super) fn redirect(
        self: &Arc<Self>,
        cluster: &Cluster,
        jobs: Vec<Job>,
        error: &RedisError,
        from: Node,
    ) -> Placed {
        let node_error = self.node_error(cluster, error, from);
        let address = cluster.address(Some(from));
        if node_error == NodeError::Other {
            let error = error_of(error).with_server(&address);
            for job in jobs {
                self.fail_taken(job, error.clone());
            }
            return vec![];
        }
        if matches!(node_error, NodeError::Ask(_) | NodeError::TryAgain) {
            for job in &jobs {
                cluster.notice_move(job.partition);
            }
        }
        let mut not_ready = not_run(ErrorKind::NotReady, error).with_server(&address);
        match node_error {
            // Only checks with several keys fail while a slot migrates, so that is no outage.
            NodeError::TryAgain => not_ready = not_ready.check_only(),
            NodeError::NoAddress => not_ready = no_address().not_sent().with_server(&address),
            _ => {}
        }
        let is_of_one_caller = jobs.len() == 1 || jobs.iter().all(|job| job.call_per_caller);
        let mut again = vec![];
        for mut job in jobs {
            let redirect = job.redirect.get_or_insert_default();
            match after_node_error(redirect, node_error, from, is_of_one_caller) {
                NextTry::Node(node) => again.push((Some(node), job)),
                NextTry::Wait => again.push((None, job)),
                NextTry::Fail => job.fail(not_ready.clone()),
            }
        }
        again
    }

    /// Splits the checks of a node: first the checks that another node serves, then the others.
    pub(super) fn split_moved(
        &self,
        jobs: impl Iterator<Item = Job>,
        node: Node,
    ) -> (Placed, Vec<Job>) {
        let mut elsewhere = vec![];
        let mut left = vec![];
        for job in jobs {
            match self.node_of(&job) {
                Some(to) if to != node => elsewhere.push((Some(to), job)),
                _ => left.push(job),
            }
        }
        (elsewhere, left)
    }
}

/// The next step of a rejected check.
enum NextTry {
    /// It is sent to this node.
    Node(Node),
    /// It waits until all its keys are on one node.
    Wait,
    Fail,
}

/// Records that the node `from` has rejected a check's call, which had checks of one caller only if
/// `is_of_one_caller`.
fn after_node_error(
    redirect: &mut Redirect,
    node_error: NodeError,
    from: Node,
    is_of_one_caller: bool,
) -> NextTry {
    // It held for one attempt only.
    redirect.importing_node = None;
    redirect.hops += 1;
    match node_error {
        NodeError::NotReady | NodeError::NoAddress | NodeError::Other => NextTry::Fail,
        NodeError::Moved { .. } | NodeError::Ask(_) if redirect.hops > MAX_HOPS => NextTry::Fail,
        NodeError::Moved { node, .. } => NextTry::Node(node),
        // Send each caller's checks in a separate call: all keys of one caller are usually on one node. Redis 6.2 also
        // sends a redirect if only some keys of the call have migrated, and the importing node would start an empty
        // count for a caller that has not.
        NodeError::Ask(_) | NodeError::TryAgain if !is_of_one_caller => NextTry::Node(from),
        NodeError::Ask(node) => {
            redirect.importing_node = Some(node);
            NextTry::Node(node)
        }
        NodeError::TryAgain => {
            // Time bounds these attempts, not their number.
            redirect.hops = 0;
            let since = *redirect.split_since.get_or_insert_with(instant);
            if since.elapsed() < SPLIT_WAIT {
                NextTry::Wait
            } else {
                NextTry::Fail
            }
        }
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
        assert!(told.kind() == ErrorKind::NotReady && told.is_not_sent());
    }

    /// Starts a node that reports this cluster id. Changing the id simulates a node of another cluster at the same
    /// address.
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

    /// A planned query of the slots ends when another query replaces it, and when its store is dropped.
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

    /// A cluster that was set up again looks like another cluster with its addresses. It adopts the new
    /// cluster after 30 s, because the application configured the addresses.
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
                .query_any(Why::Moved, Duration::from_secs(20), Duration::ZERO)
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
            // The first cluster is back within 30 s.
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
        assert!(
            ask().await.is_err(),
            "the former cluster is not adopted again immediately"
        );
    }
}
