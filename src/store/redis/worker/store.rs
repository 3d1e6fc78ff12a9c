//! [`RedisStore`], and the state that its clones share: queues, cached denials, settings and the topology. The methods
//! of that state that depend on the topology are in `cluster.rs`.

use std::convert::Infallible;
use std::fmt;
use std::future::pending;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU64;
use std::pin::{Pin, pin};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::future::{select, try_join_all};
use redis::{FromRedisValue, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};

use super::clock::RedisClock;
use super::denials::DenialCache;
use super::queues::{
    Full, Job, JobId, JobQueue, NextSend, NodeQueue, NodeQueues, NodeTarget, Placed, RedisFuture,
    WorkerStart, no_runtime,
};
use super::task::Worker;
use crate::background::TaskOwner;
use crate::blocks::{Blocks, TakenChanges};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, JointCheck, JointDecision, Key, Source, Verdict, Verdicts};
use crate::observe::mistakes::MISSING_RIGHT;
use crate::observe::{Event, Observer, or_log};
use crate::store::config::RedisSettings;
use crate::store::health::LastOutcome;
use crate::store::joint::{JointReply, remembered_denial, together};
use crate::store::redis::link::{Login, PING_INTERVAL, Times, error_of};
use crate::store::redis::script::Call;
use crate::store::redis::topology::{Node, NodePool, Topology};
use crate::store::{
    Answer, Backend, BlocksSent, Health, Hooks, JointFuture, Store, Waiters, Withdraw, probe,
};
use crate::util::{contain, instant, lock};

/// A store in Redis: one count for all instances. A script decides, on Redis's own clock.
///
/// Concurrent checks share a script call and a round trip. Every check resolves within about twice
/// the store's [`timeout`](crate::store::RedisStoreBuilder::timeout), possibly to a [`StoreError`].
/// A charge is never sent twice: a script is sent again only if Redis did not know it, and so did
/// not run it.
///
/// It needs Redis 6.2 or a compatible server; see [which servers](crate::guide::servers) are tested, and how they
/// affect the counts. The Redis user needs [these rights](crate::guide::servers#rights).
///
/// # Redis Cluster
///
/// With `redis+cluster://` instead of `redis://`, or with [`cluster`](Self::cluster), the store is
/// in a Redis Cluster. The guarantees above also hold while nodes fail and slots migrate:
///
/// - A hash of the key assigns each caller to a
///   [partition](crate::store::RedisStoreBuilder::partitions), the same one in all stores. Each
///   partition is in one slot. The checks in flight of one partition share a script call, and the
///   calls to one master share a round trip. A caller's keys look like
///   `rl:{17}:{user-42}:api:g`; on a single server, `rl:{user-42}:api:g`. The key
///   `rl:{rl}:partitions` stores the number of partitions.
/// - Each master has its own connections and queue. A [`Fallback`](crate::Fallback) has a breaker
///   per partition, so an unreachable master affects only its callers, until its replica has taken
///   over. Replicas are not used.
/// - Any node may provide the map of slots. It is queried off the request path: at startup, when a
///   connection is lost, and when a slot has moved. A call that was rejected for that reason is
///   sent to the right node; no other call is sent twice.
/// - A node whose address now belongs to another cluster is not used: it must list a known node, by
///   its id. If no known node has replied for 30 seconds, the nodes that the application named
///   define the cluster, as at startup.
/// - A check of [several keys](crate::guide::keys#several-keys) is exact if they are in one partition.
/// - While a slot migrates, its callers' checks are sent one at a time. A check that needs several
///   keys (under several policies, or with a new id) may fail with
///   [`ErrorKind::NotReady`](crate::store::ErrorKind::NotReady) until the migration ends, because
///   Redis rejects it. A fallback decides then, and reconciles afterwards.
/// - The Redis user needs [more rights](crate::guide::servers#rights). With TLS, the
///   certificates must match the names that the nodes announce: see `tls-cluster`,
///   `cluster-announce-hostname` and `cluster-preferred-endpoint-type` of Redis.
///
/// # Redis Sentinel
///
/// With `redis+sentinel://`, or with [`sentinel`](Self::sentinel), the store is on the master that
/// the sentinels have elected. The guarantees above also hold:
///
/// - Name all sentinels. All are queried for each new connection, and the reported server must
///   confirm that it is a master. If they disagree, the majority decides, otherwise the latest
///   failover; if those are equal, the last known master is kept while it replies. A dead or slow
///   sentinel delays a connection by at most a quarter of the
///   [`connect_timeout`](crate::store::RedisStoreBuilder::connect_timeout), and not at all if most of the others
///   agree. While none replies, the last known master is used.
/// - After a failover, the former master may keep replying for many seconds, and then loses the
///   charges of that time. So one sentinel is queried every quarter of a second, in turn, and
///   connections to the former master are closed.
/// - Redis replicates asynchronously. Charges made just before a failover may be lost; with
///   `SENTINEL FAILOVER`, also charges made during it.
/// - The users of the master and of the sentinels need [more rights](crate::guide::servers#rights).
///   Without `+role` on the master, a replica that is reported as the master is detected only by the
///   first script.
///
/// # Runtimes
///
/// A store has a separate queue and connections for each tokio runtime that uses it, until the runtime shuts down. No
/// check depends on another runtime, so a store may be a `static` that several runtimes use, for example in two
/// `#[tokio::test]`s. A check that is pending when its runtime shuts down fails immediately, with an error of
/// [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) that says whether it was
/// [not sent](crate::store::StoreError::is_not_sent).
///
/// Background work is one task for all runtimes: the watch of sentinels, and in layers and around the store the
/// recovery of a [`Fallback`](crate::Fallback), the renewal of slots, the queue of refunds, and the blocks of a
/// [`Leased`](crate::Leased). Each task runs on the
/// runtime that needed it first. After that runtime has shut down, the next check starts the task on its own runtime.
/// While that runtime is alive and runs nothing, as a current-thread runtime does outside of `block_on`, the work waits.
///
/// Threads with a runtime each can share one store or have a store each: the [guide](crate::guide::sizing#connections)
/// has figures.
///
/// ```no_run
/// use tower_redis_ratelimit::RedisStore;
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://127.0.0.1/").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RedisStore {
    pub(in crate::store::redis) inner: Arc<SharedStore>,
}

impl Store for RedisStore {
    type Future = RedisFuture;

    fn check(&self, check: Check) -> Answer<RedisFuture> {
        self.inner.check(check)
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        let topology = &self.inner.topology;
        let partition = topology.partition(joint.first().key());
        let mut parts = joint.parts().iter();
        if parts.any(|part| topology.partition(part.key()) != partition) {
            return together(self, joint);
        }
        if let Some(denied) = remembered_denial(self, &joint) {
            return JointFuture::ready(Ok(denied));
        }
        let check = joint.as_one();
        if let Err(error) = check.prepare(|| self.inner.clock.micros_at(instant())) {
            return JointFuture::ready(Err(error));
        }
        match self.inner.enqueue(check, partition) {
            Ok(future) => JointFuture::of(JointRedisFuture {
                store: Arc::clone(&self.inner),
                future,
                joint,
            }),
            Err(error) => JointFuture::ready(Err(error.not_sent())),
        }
    }

    fn backend(&self) -> Backend<'_, RedisFuture> {
        Backend::withdrawable(self)
    }
}

/// The decision of one script call on several keys.
struct JointRedisFuture {
    store: Arc<SharedStore>,
    future: RedisFuture,
    joint: JointCheck,
}

impl Future for JointRedisFuture {
    type Output = Result<JointDecision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let whole = ready!(Pin::new(&mut self.future).poll(cx))?;
        Poll::Ready(Ok(self.joint.split(whole)))
    }
}

impl JointReply for JointRedisFuture {
    fn withdraw(mut self: Pin<&mut Self>) -> bool {
        let Self { store, future, .. } = &mut *self;
        store.withdraw(future)
    }
}

impl Hooks for RedisStore {
    fn partitions(&self) -> usize {
        self.inner.topology.partitions()
    }

    fn partition(&self, key: &Key) -> usize {
        self.inner.topology.partition(key).into()
    }

    fn waiters(&self) -> Option<Waiters> {
        Some(self.inner.waiters.clone())
    }

    fn blocks(&self) -> Option<Blocks> {
        Some(self.inner.blocks.clone())
    }

    fn sync_blocks(&self) {
        self.inner.sync_blocks();
    }

    fn send_blocks(&self, changes: TakenChanges) -> BlocksSent {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move { inner.send_block_changes(changes).await })
    }

    fn server(&self, key: &Key) -> Option<String> {
        let topology = &self.inner.topology;
        Some(topology.address(topology.node(topology.partition(key))))
    }

    fn is_connecting(&self, key: &Key) -> bool {
        let partition = self.inner.topology.partition(key);
        self.inner.is_connecting(partition)
    }

    fn remembered(&self, check: &Check) -> Option<Decision> {
        let verdicts = self.inner.denials.verdicts(check)?;
        Some(check.clone().answer(verdicts, Source::Cached))
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.inner.settings.timeout)
    }

    fn health(&self) -> Health {
        self.inner.last.health()
    }

    fn failed(&self, error: &StoreError) {
        self.inner.failed(error);
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.inner.observer.get_or_init(|| Arc::clone(observer));
    }
}

impl Withdraw<RedisFuture> for RedisStore {
    fn withdraw(&self, future: Pin<&mut RedisFuture>) -> bool {
        self.inner.withdraw(future.get_mut())
    }
}

pub(crate) struct SharedStore {
    pub(crate) topology: Topology,
    /// The login of the servers, if its credentials change.
    login: Option<Arc<Login>>,
    pub(crate) settings: RedisSettings,
    pub(super) denials: DenialCache,
    pub(crate) observer: OnceLock<Arc<dyn Observer>>,
    /// The time that tests set; 0 for Redis's own time.
    pub(super) now: Arc<AtomicI64>,
    pub(in crate::store::redis) clock: RedisClock,
    /// The name under which the store announces its instance. One for all announcements, so that they count once.
    pub(in crate::store::redis) instance: String,
    /// When a missing right was last reported.
    reported: Mutex<Option<Instant>>,
    queues: Mutex<NodeQueues>,
    last: LastOutcome,
    pub(crate) waiters: Waiters,
    pub(in crate::store::redis) blocks: Blocks,
    /// Shares `blocks` with the other instances.
    pub(in crate::store::redis) block_syncer: TaskOwner,
}

/// Number of keys that a step of a scan examines. It blocks Redis for about half a millisecond.
const SCAN_STEP: usize = 1_000;

impl SharedStore {
    /// Minimum interval between two reports of a missing right.
    const REPORT: Duration = Duration::from_secs(60);

    pub(crate) fn new(
        topology: Topology,
        login: Option<Arc<Login>>,
        settings: RedisSettings,
        observer: OnceLock<Arc<dyn Observer>>,
        now: Arc<AtomicI64>,
    ) -> Self {
        Self {
            topology,
            login,
            denials: DenialCache::new(settings.denials),
            settings,
            observer,
            now,
            clock: RedisClock::new(),
            instance: format!("{:016x}", RandomState::new().hash_one(0)),
            reported: Mutex::default(),
            queues: Mutex::default(),
            last: LastOutcome::default(),
            waiters: Waiters::default(),
            blocks: Blocks::shared(),
            block_syncer: TaskOwner::new(),
        }
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, NodeQueues> {
        lock(&self.queues)
    }

    /// Calls `act` under the lock with the queue of a node on this runtime.
    pub(super) fn with_queue<T>(
        self: &Arc<Self>,
        runtime: &Handle,
        node: Option<Node>,
        act: impl FnOnce(&mut NodeQueue) -> T,
    ) -> T {
        let mut queues = self.queues();
        let mut known = queues.each.iter_mut();
        if let Some(queue) = known.find(|queue| queue.is_of(runtime.id(), node)) {
            return act(queue);
        }
        let number = NonZeroU64::MIN.saturating_add(queues.made);
        queues.made += 1;
        let (mut queue, watch) = self.make_queue(number, runtime, node);
        let result = act(&mut queue);
        queues.each.push(queue);
        drop(queues);
        // A runtime that has shut down drops the watch, whose `Drop` takes the lock and fails the queued checks.
        runtime.spawn(watch.run());
        result
    }

    fn make_queue(
        self: &Arc<Self>,
        number: NonZeroU64,
        runtime: &Handle,
        node: Option<Node>,
    ) -> (NodeQueue, Watch) {
        let (_store, store) = oneshot::channel();
        let RedisSettings {
            connections,
            queue: max_queued,
            batch,
            timeout,
            ..
        } = self.settings;
        let times = Times {
            connect: self.settings.time_to_connect(),
            // Leaves time for a new connection and the command.
            ping: timeout / 2,
        };
        // In a cluster, start a second worker only for a full batch: more calls for one partition cost more than they
        // save.
        let backlog = if self.topology.cluster().is_some() {
            batch.get()
        } else {
            0
        };
        let workers = connections.get();
        let target = node.map(|node| NodeTarget {
            node,
            pool: self.topology.pool(node, workers, times).into(),
        });
        // One worker finds the nodes of all checks without a node.
        let max_workers = if target.is_some() { workers } else { 1 };
        let jobs = JobQueue::new(max_queued.get(), max_workers, backlog);
        let upkeep = target.as_ref().map(|target| PoolUpkeep {
            inner: Arc::downgrade(self),
            login: self.login.clone(),
            pool: Arc::downgrade(&target.pool),
        });
        let watch = Watch {
            inner: Arc::downgrade(self),
            queue_number: number,
            upkeep,
            store,
        };
        let queue = NodeQueue::new(number, runtime.id(), target, jobs, _store);
        (queue, watch)
    }

    /// Answers a check from the cached denials, or queues it.
    pub(crate) fn check(self: &Arc<Self>, check: Check) -> Answer<RedisFuture> {
        if let Some(verdicts) = self.denials.verdicts(&check) {
            return Answer::ready(Ok(check.answer(verdicts, Source::Cached)));
        }
        if let Err(error) = check.prepare(|| self.clock.micros_at(instant())) {
            return Answer::ready(Err(error));
        }
        let partition = self.topology.partition(check.key());
        let giver = if check.gives_room() {
            Some(*check.key())
        } else {
            None
        };
        match self.enqueue(check, partition) {
            Ok(future) => {
                // After it is queued: a denial of a check that is queued before it must not be cached.
                if let Some(caller) = giver {
                    self.denials.forget(&caller);
                }
                Answer::pending(future)
            }
            Err(error) => Answer::ready(Err(error.not_sent())),
        }
    }

    /// Queues a check for its partition's node.
    fn enqueue(self: &Arc<Self>, check: Check, partition: u16) -> Result<RedisFuture, StoreError> {
        let runtime = runtime()?;
        if let Some(cluster) = self.topology.cluster()
            && let Some(error) = cluster.marker_error.get()
        {
            return Err(error.clone());
        }
        let (job, answer) = Job::new(check, partition);
        match self.enqueue_for(&runtime, self.topology.node(partition), job) {
            Ok(id) => Ok(RedisFuture::new(answer, id)),
            Err(Full) => Err(StoreError::new(ErrorKind::QueueFull)),
        }
    }

    /// Queues undecided checks for these nodes, on this runtime.
    pub(super) fn requeue(self: &Arc<Self>, jobs: Placed) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        for (node, job) in jobs {
            // Never full: another queue has accepted it before.
            let _ = self.enqueue_for(&runtime, node, job);
        }
    }

    /// Adds a check to the queue of a node, and starts a worker or a timer if it needs one.
    fn enqueue_for(
        self: &Arc<Self>,
        runtime: &Handle,
        node: Option<Node>,
        job: Job,
    ) -> Result<JobId, Full> {
        let (id, sending) = self.with_queue(runtime, node, |queue| queue.push(job))?;
        // Without the lock: a runtime that has shut down drops the worker, whose `Drop` takes the lock.
        match sending {
            NextSend::Begun => {}
            NextSend::By(start) => self.start_worker(runtime, start),
            NextSend::At { time, queue_number } => {
                self.start_worker_at(time, runtime, queue_number);
            }
        }
        Ok(id)
    }

    fn start_worker(self: &Arc<Self>, runtime: &Handle, start: WorkerStart) {
        let worker = Worker::new(self, start.queue_number);
        // The task may have been dropped with its runtime, and then returns the worker.
        let unsent = match start.task {
            Some(task) => task.send(worker).err(),
            None => Some(worker),
        };
        if let Some(worker) = unsent {
            // On a runtime that has shut down, `spawn` drops the worker, whose `Drop` fails the check.
            runtime.spawn(worker.run(start.target));
        }
    }

    /// Starts a worker for the checks that are queued at this time, unless one runs.
    pub(super) fn start_worker_at(
        self: &Arc<Self>,
        time: Instant,
        runtime: &Handle,
        queue_number: NonZeroU64,
    ) {
        drop(runtime.spawn(Self::start_later(Arc::downgrade(self), queue_number, time)));
    }

    async fn start_later(this: Weak<Self>, queue_number: NonZeroU64, time: Instant) {
        // Weak, so that a timer does not keep a store that is no longer used.
        sleep_until(time).await;
        let (Some(this), Ok(runtime)) = (this.upgrade(), Handle::try_current()) else {
            return;
        };
        let start = match this.queues().of(queue_number) {
            Some(queue) => queue.on_timer(),
            None => None,
        };
        if let Some(start) = start {
            this.start_worker(&runtime, start);
        }
    }

    /// Withdraws a check that is still queued, so that it is never sent. Returns `false` if a worker has taken it.
    pub(crate) fn withdraw(&self, future: &mut RedisFuture) -> bool {
        // Keep the lock until the check is abandoned, so that no worker takes it between the two.
        let queues = self.queues();
        let is_queued = queues.have(future.id)
            || self.topology.cluster().is_some() && queues.have_redirected(future.id);
        if is_queued {
            future.abandon();
        }
        is_queued
    }

    /// Sends two checks of one caller that need the same rights as real ones; in a cluster, two to each master. If both
    /// share a call, the second finds the first one's state and so also needs the rights to read and overwrite it.
    pub(crate) async fn ping(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut partitions = vec![0];
        if let Some(cluster) = self.topology.cluster() {
            let time = self.settings.time_to_connect();
            self.refreshed(cluster, time).await?;
            partitions = cluster.partition_of_each();
        }
        // A probe waits for a connection for the timeout only.
        let connecting = partitions.iter().map(|partition| self.open(*partition));
        try_join_all(connecting).await?;
        let mut probes = vec![];
        for partition in partitions {
            for cost in [1, 2] {
                probes.push(self.enqueue(probe::check(probe::KEY, cost), partition));
            }
        }
        for probe in probes {
            drop(probe?.await?);
        }
        Ok(())
    }

    /// Opens a connection to a partition's node, unless there is one.
    async fn open(self: &Arc<Self>, partition: u16) -> Result<(), StoreError> {
        let Some(node) = self.topology.node(partition) else {
            return Ok(());
        };
        let pool = self.pool(node)?;
        let time = self.settings.time_to_connect();
        // The connection limits its own time, with its graces, and reports why it was not opened.
        match pool.checkout(time.saturating_add(time / 2)).await {
            Ok(connection) => pool.give_back(connection),
            Err(error) => return Err(self.named(error, Some(node)).not_sent()),
        }
        Ok(())
    }

    /// Returns `true` if this runtime has no connection yet to a partition's node.
    fn is_connecting(&self, partition: u16) -> bool {
        let Some(node) = self.topology.node(partition) else {
            return true;
        };
        let Ok(runtime) = Handle::try_current() else {
            return false;
        };
        let queues = self.queues();
        for queue in &queues.each {
            if let Some(target) = &queue.target
                && queue.is_of(runtime.id(), Some(node))
            {
                let pool = Arc::clone(&target.pool);
                // bb8 has a lock too: never hold both.
                drop(queues);
                return pool.is_connecting();
            }
        }
        false
    }

    /// Returns the connections to a node on this runtime.
    fn pool(self: &Arc<Self>, node: Node) -> Result<Arc<NodePool>, StoreError> {
        match self.with_queue(&runtime()?, Some(node), |queue| queue.target.clone()) {
            Some(target) => Ok(target.pool),
            None => Err(StoreError::new(ErrorKind::NotReady)),
        }
    }

    /// Calls a script on the node with its key, which belongs to no caller. Follows no redirect: a call that the node
    /// rejects fails, but updates the slot map for the next one.
    pub(crate) async fn run_script<T: FromRedisValue>(
        self: &Arc<Self>,
        node: Node,
        call: &impl Call,
    ) -> Result<T, StoreError> {
        let pool = self.pool(node)?;
        let outcome = self.try_script(node, &pool, call).await;
        outcome.map_err(|error| self.named(error, Some(node)))
    }

    async fn try_script<T: FromRedisValue>(
        self: &Arc<Self>,
        node: Node,
        pool: &NodePool,
        call: &impl Call,
    ) -> Result<T, StoreError> {
        let time = self.settings.time_to_connect();
        let mut connection = pool.checkout(time).await?;
        let calls = std::slice::from_ref(call);
        let replies = connection.run(calls, self.settings.timeout).await;
        // Also after an error: the pool discards a broken connection.
        pool.give_back(connection);
        match replies?.pop() {
            Some(Ok(reply)) => read_value(reply),
            Some(Err(error)) => Err(self.script_error(&error, node)),
            None => Err(StoreError::new(ErrorKind::Protocol)),
        }
    }

    /// Adds the address of the server to an error, or of all servers.
    pub(super) fn named(&self, error: StoreError, node: Option<Node>) -> StoreError {
        error.with_server(self.topology.address(node))
    }

    /// Runs one step of a scan on a node. Returns the next cursor and the keys that match `pattern`.
    pub(crate) async fn scan(
        self: &Arc<Self>,
        node: Node,
        cursor: u64,
        pattern: &str,
    ) -> Result<(u64, Vec<Vec<u8>>), StoreError> {
        let pool = self.pool(node)?;
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(SCAN_STEP);
        let attempt = async {
            let time = self.settings.time_to_connect();
            let mut connection = pool.checkout(time).await?;
            let reply = connection.ask(scan, self.settings.timeout).await;
            pool.give_back(connection);
            read_value(reply?)
        };
        let outcome = attempt.await;
        outcome.map_err(|error| self.named(error, Some(node)))
    }

    /// Returns the strings under keys of a node. `None` for a key that does not exist or is no string, and for one
    /// whose slot has moved.
    pub(crate) async fn values(
        self: &Arc<Self>,
        node: Node,
        keys: &[Vec<u8>],
    ) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        if keys.is_empty() {
            return Ok(vec![]);
        }
        let pool = self.pool(node)?;
        // One command for each key: they are in several slots of a cluster.
        let commands = keys.iter().map(|key| {
            let mut command = redis::cmd("MGET");
            command.arg(key);
            command
        });
        let attempt = async {
            let time = self.settings.time_to_connect();
            let mut connection = pool.checkout(time).await?;
            let replies = connection.ask_all(commands, self.settings.timeout).await;
            pool.give_back(connection);
            let mut values = vec![];
            for reply in replies? {
                let value = reply.and_then(|reply| Ok(redis::from_redis_value(reply)?));
                let [value]: [Option<Vec<u8>>; 1] = match value {
                    Ok(value) => value,
                    Err(error) if error.is_cluster_error() => [None],
                    Err(error) => return Err(error_of(&error)),
                };
                values.push(value);
            }
            Ok(values)
        };
        attempt
            .await
            .map_err(|error: StoreError| error.with_server(self.topology.address(Some(node))))
    }

    /// Answers a check with the outcome of a call that was sent at `sent_at`, and updates the cached denials.
    pub(super) fn decide(
        &self,
        job: Job,
        verdicts: Result<Verdicts, StoreError>,
        sent_at: Instant,
    ) {
        if let Err(error) = &verdicts
            && error.kind() == ErrorKind::Permission
        {
            self.lacks_right(error);
        }
        self.last.record(&verdicts);
        let queued_at = job.since;
        job.answer(|check| {
            if check.gives_room() {
                // Also after an error: Redis may have run the check.
                self.denials.forget(check.key());
                self.waiters.freed(&check);
            } else if let Ok(verdicts) = &verdicts
                && !verdicts.each.iter().all(Verdict::is_allowed)
            {
                match check.joint() {
                    None => self.denials.learn(&check, verdicts, queued_at, sent_at),
                    Some(joint) => {
                        for (part, verdicts) in joint.each(&check, verdicts) {
                            if !verdicts.each.iter().all(Verdict::is_allowed) {
                                self.denials.learn(&part, &verdicts, queued_at, sent_at);
                            }
                        }
                    }
                }
            }
            verdicts.map(|verdicts| check.answer(verdicts, Source::Redis))
        });
    }

    /// Fails a check that was certainly not sent.
    pub(super) fn fail_unsent(&self, job: Job, error: StoreError) {
        let failed = Err(error.not_sent());
        // An abandoned check is no evidence about Redis: its caller may have had a shorter deadline.
        if !job.is_abandoned() {
            self.last.record(&failed);
        }
        job.answer(|_| failed);
    }

    /// Fails a check that a worker has taken. Redis may have decided the check, so this also updates the cached
    /// denials.
    pub(super) fn fail_taken(&self, job: Job, error: StoreError) {
        let sent_at = job.since;
        self.decide(job, Err(error), sent_at);
    }

    /// Reports a missing right, at most once a minute. The checks that need the right fail, but Redis decides all
    /// others, so the breaker of a fallback stays closed and reports no outage.
    fn lacks_right(&self, error: &StoreError) {
        let now = instant();
        let mut reported = lock(&self.reported);
        if let Some(at) = *reported
            && now.duration_since(at) < Self::REPORT
        {
            return;
        }
        *reported = Some(now);
        // The observer is the user's code.
        drop(reported);
        let mut problem = format!("{error}{MISSING_RIGHT}");
        if let Some(cause) = std::error::Error::source(error) {
            problem = format!("{cause}; {problem}");
        }
        contain(|| or_log(self.observer.get()).notify(&Event::Misconfigured { problem: &problem }));
    }

    /// Reports a failure that no check returned.
    pub(crate) fn failed(&self, error: &StoreError) {
        contain(|| {
            or_log(self.observer.get()).notify(&Event::Failed {
                key: None,
                error,
                unanswered: false,
            })
        });
    }
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// A task that ends with the store. If its runtime shuts down first, its drop removes the queue and fails the queued
/// checks.
struct Watch {
    inner: Weak<SharedStore>,
    queue_number: NonZeroU64,
    upkeep: Option<PoolUpkeep>,
    store: oneshot::Receiver<Infallible>,
}

impl Watch {
    async fn run(mut self) {
        match self.upkeep.take() {
            None => drop((&mut self.store).await),
            Some(upkeep) => {
                select(&mut self.store, pin!(upkeep.run())).await;
            }
        }
    }
}

/// Pings the idle connections of a pool, and sends newer credentials over them.
struct PoolUpkeep {
    inner: Weak<SharedStore>,
    login: Option<Arc<Login>>,
    pool: Weak<NodePool>,
}

impl PoolUpkeep {
    async fn run(self) {
        match &self.login {
            None => self.ping().await,
            Some(login) => {
                select(pin!(self.ping()), pin!(self.renew(login))).await;
            }
        }
    }

    async fn ping(&self) {
        loop {
            sleep(PING_INTERVAL).await;
            let Some(pool) = self.pool.upgrade() else {
                return;
            };
            pool.ping_idle();
        }
    }

    /// Renews the credentials of the store, and sends them.
    async fn renew(&self, login: &Arc<Login>) {
        let mut calls = login.calls();
        loop {
            login.renew(&mut calls).await;
            let (Some(inner), Some(pool)) = (self.inner.upgrade(), self.pool.upgrade()) else {
                return;
            };
            if let Some(error) = login.take_failure() {
                inner.failed(&error);
            }
            drop(inner);
            pool.log_in_idle().await;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else {
            return;
        };
        let Some(queue) = inner.queues().remove(self.queue_number) else {
            return;
        };
        for job in queue.into_jobs() {
            job.fail(no_runtime().not_sent());
        }
    }
}

/// Converts the reply to a script or a command.
fn read_value<T: FromRedisValue>(reply: Value) -> Result<T, StoreError> {
    redis::from_redis_value(reply).map_err(|error| error_of(&error.into()))
}

/// Returns the current runtime.
///
/// # Errors
///
/// [`ErrorKind::NoRuntime`] outside of a runtime.
pub(super) fn runtime() -> Result<Handle, StoreError> {
    Handle::try_current().map_err(|_| no_runtime())
}

/// Returns `true` if the current runtime is shutting down: such a runtime drops new tasks immediately, before it drops
/// its first running task.
pub(super) fn runtime_is_ending() -> bool {
    let task = tokio::spawn(pending::<()>());
    let is_dropped = task.is_finished();
    task.abort();
    is_dropped
}

#[cfg(test)]
mod tests {
    use crate::error::{ErrorKind, StoreError};
    use crate::observe::{Event, Observer};
    use crate::store::RedisStore;

    struct Panics;

    impl Observer for Panics {
        fn notify(&self, event: &Event<'_>) {
            if let Event::Failed { .. } = *event {
                panic!("the observer's own mistake");
            }
        }
    }

    /// A panic would otherwise end the task that announces this instance, or the query of the slots of a
    /// cluster.
    #[test]
    fn an_observer_that_panics_ends_no_task() {
        let store = RedisStore::builder("redis://127.0.0.1:1")
            .observer(Panics)
            .connect_lazy()
            .unwrap();
        store.inner.failed(&StoreError::new(ErrorKind::Unreachable));
    }
}
