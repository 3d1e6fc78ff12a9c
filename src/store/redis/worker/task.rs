//! Workers: each sends the checks of one queue to its node, and reports the replies.

use std::mem;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{RedisError, ServerErrorKind};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::sleep;

use super::queues::{Job, Target, no_runtime};
use super::store::{Shared, runtime_is_ending};
use crate::error::{ErrorKind, StoreError};
use crate::observe::event;
use crate::store::redis::link::{Replies, error_of, within};
use crate::store::redis::script::ScriptCall;
use crate::store::redis::topology::cluster::Why;
use crate::store::redis::topology::{Node, Pool, Topology};
use crate::util::{contain, instant};

/// Maximum number of times that a worker yields to let more checks arrive.
const GATHER: u32 = 4;
/// Pause before another attempt to find the node of a check.
const PAUSE: Duration = Duration::from_millis(3);

/// Sends the checks of a queue until the queue is empty. A task runs one worker after another.
pub(super) struct Worker {
    inner: Arc<Shared>,
    queue_number: NonZeroU64,
    work: Work,
    /// Whether the current batch may have reached Redis.
    sent: bool,
    /// Whether the queue counts this worker.
    counted: bool,
}

/// Receives the next worker of a task. `None` if the task ends.
type Next = Option<oneshot::Receiver<Worker>>;

impl Worker {
    /// Creates a worker, which its queue must have counted.
    pub(super) fn new(inner: &Arc<Shared>, queue_number: NonZeroU64) -> Self {
        Self {
            inner: Arc::clone(inner),
            queue_number,
            work: Work::default(),
            sent: false,
            counted: true,
        }
    }

    /// Runs this worker, then each worker that the task receives. Between two workers, the task keeps their buffers,
    /// but no reference to the store.
    pub(super) async fn run(mut self, target: Option<Target>) {
        let Some(Target { node, pool }) = target else {
            // Rare, and boxed so that the future of the other workers is small.
            return Box::pin(self.find_nodes()).await;
        };
        while let Some(next) = self.send(node, &pool).await {
            let work = mem::take(&mut self.work);
            drop(self);
            let Ok(worker) = next.await else { return };
            self = worker;
            self.work = work;
        }
    }

    /// Sends the checks of this queue to `node` until the queue is empty.
    async fn send(&mut self, node: Node, pool: &Pool) -> Next {
        loop {
            match self.take(node) {
                ControlFlow::Break(next) => return next,
                ControlFlow::Continue(()) if self.work.jobs.is_empty() => continue,
                ControlFlow::Continue(()) => {}
            }
            let sent_at = self.inner.denials.now();
            match self.call(node, pool).await {
                Ok(replies) => self.answer(&replies, sent_at, node),
                Err(error) => self.fail(&error, node),
            }
            if self.inner.topology.cluster().is_some() {
                self.gather().await;
            }
        }
    }

    /// Finds the nodes of checks without a node: the slots are unknown, or a check's keys are on two nodes at the
    /// moment.
    async fn find_nodes(mut self) {
        loop {
            // Wait before taking the checks: until then, their callers can withdraw them.
            let found = match self.inner.topology.cluster() {
                Some(cluster) if !cluster.is_known() => self.inner.refreshed(cluster).await,
                _ => {
                    sleep(PAUSE).await;
                    Ok(())
                }
            };
            if self.take_jobs(None, usize::MAX).is_break() {
                return;
            }
            let unplaced = found
                .err()
                .unwrap_or_else(|| StoreError::new(ErrorKind::NotReady))
                .not_sent();
            let unplaced = unplaced.with_server(self.inner.topology.address(None));
            let (mut placed, mut left_over) = (vec![], false);
            for job in self.work.jobs.drain(..) {
                match self.inner.node_of(&job) {
                    None => {
                        left_over = true;
                        job.fail(unplaced.clone());
                    }
                    node => placed.push((node, job)),
                }
            }
            if left_over {
                self.inner.refresh(Why::Unknown);
            }
            self.inner.requeue(placed);
        }
    }

    /// Yields, so that callers that just got a reply can queue their next check: this fills the batch of each
    /// partition. Stops when a yield brings no new check, or after [`GATHER`] yields.
    async fn gather(&self) {
        let pushed = || {
            self.inner
                .queues()
                .of(self.queue_number)
                .map(|queue| queue.jobs.next_number())
        };
        let mut before = pushed();
        for _ in 0..GATHER {
            yield_now().await;
            let now = pushed();
            if now == before {
                break;
            }
            before = now;
        }
    }

    /// Takes checks up to the size of a batch and builds their calls, or ends the worker if the queue is empty.
    fn take(&mut self, node: Node) -> ControlFlow<Next> {
        self.work.clear_calls();
        let waiting = self.take_jobs(Some(node), self.inner.settings.batch.get())?;
        let Self { inner, work, .. } = self;
        work.make_calls(
            &inner.topology,
            &inner.settings.prefix,
            inner.now.load(Ordering::Relaxed),
        );
        inner.keep_topology_current();
        if let Some(observer) = inner.observer.get()
            && !work.jobs.is_empty()
        {
            contain(|| observer.sent(&event::Sent::new(work.jobs.len(), waiting)));
        }
        ControlFlow::Continue(())
    }

    /// Takes checks, drops abandoned ones, and fails those older than the timeout. Returns the number of checks left in
    /// the queue, or ends the worker if there were none.
    fn take_jobs(&mut self, node: Option<Node>, max: usize) -> ControlFlow<Next, usize> {
        let jobs = &mut self.work.jobs;
        let waiting = {
            let mut queues = self.inner.queues();
            let Some(queue) = queues.of(self.queue_number) else {
                return ControlFlow::Break(None);
            };
            let Some(waiting) = queue.jobs.take(max, |job| job.weight as usize, jobs) else {
                // `fail` may have moved a whole queue into this buffer.
                jobs.shrink_to(self.inner.settings.batch.get());
                self.counted = false;
                let (task, next) = oneshot::channel();
                queue.idle.push(task);
                return ControlFlow::Break(Some(next));
            };
            waiting
        };
        let now = instant();
        let is_late = |job: &Job| now.duration_since(job.since) > self.inner.settings.timeout;
        for job in jobs.extract_if(.., |job| job.is_abandoned() || is_late(job)) {
            job.fail(
                StoreError::new(ErrorKind::Timeout)
                    .with_server(self.inner.topology.address(node))
                    .not_sent(),
            );
        }
        ControlFlow::Continue(waiting)
    }

    /// Sends the calls. Returns the reply to each.
    ///
    /// # Errors
    ///
    /// Returns an error that applies to all of the calls.
    async fn call(&mut self, node: Node, pool: &Pool) -> Result<Replies, StoreError> {
        self.sent = false;
        let timeout = self.inner.settings.timeout;
        let outcome = within(timeout, pin!(self.attempt(pool))).await;
        outcome.map_err(|error| {
            // A runtime that shuts down may drop the connection's driver before this worker. That is not a failure
            // of Redis.
            let error = if error.is_of_connection() && runtime_is_ending() {
                no_runtime()
            } else {
                error
            };
            let error = error.with_server(self.inner.topology.address(Some(node)));
            if self.sent { error } else { error.not_sent() }
        })
    }

    async fn attempt(&mut self, pool: &Pool) -> Result<Replies, StoreError> {
        let Self {
            inner, work, sent, ..
        } = self;
        let mut connection = pool.checkout().await?;
        *sent = true;
        let replies = connection.run(work.calls()).await;
        let replies = replies.map_err(|error| error_of(&error))?;
        let mut of_calls = work.calls().iter().zip(&replies);
        if of_calls.any(|(call, reply)| reply.as_ref().is_ok_and(|reply| call.is_read_only(reply)))
        {
            connection.give_up(Some(StoreError::new(ErrorKind::ReadOnly)));
        }
        pool.give_back(connection);
        match (inner.topology.cluster(), replies.first()) {
            // Without a cluster there is one call, so its error applies to all checks.
            (None, Some(Err(error))) => Err(error_of(error)),
            _ => Ok(replies),
        }
    }

    /// Answers the checks of each call from its reply. `sent_at` is the time at which the calls were sent.
    fn answer(&mut self, replies: &Replies, sent_at: i64, node: Node) {
        let inner = &self.inner;
        let named = |error: StoreError| error.with_server(inner.topology.address(Some(node)));
        let (jobs, calls) = self.work.parts();
        let mut jobs = jobs.drain(..);
        for (call, reply) in calls.iter().zip(replies) {
            let own = jobs.by_ref().take(call.len());
            let cluster = inner.topology.cluster();
            match reply.as_ref().map(|reply| call.read(reply)) {
                Ok(Ok(verdicts)) => {
                    let mut again = vec![];
                    for (job, verdicts) in own.zip(verdicts) {
                        match verdicts {
                            Err(error)
                                if error.kind() == ErrorKind::NotReady && cluster.is_some() =>
                            {
                                again.push(job)
                            }
                            verdicts => inner.decide(job, verdicts.map_err(named), sent_at),
                        }
                    }
                    if let Some(cluster) = cluster.filter(|_| !again.is_empty()) {
                        inner.requeue(inner.redirect(cluster, again, &deleted_here(), node));
                    }
                }
                Ok(Err(error)) => {
                    let error = named(error);
                    for job in own {
                        inner.fail_taken(job, error.clone());
                    }
                }
                Err(error) => {
                    // Without a cluster, `attempt` has returned this as the error of the batch.
                    if let Some(cluster) = cluster {
                        inner.requeue(inner.redirect(cluster, own.collect(), error, node));
                    }
                }
            }
        }
    }

    /// Handles a batch that failed. If it was sent, the connection broke, and only the checks in the batch fail. If it
    /// was not sent, no connection could be made, and all checks that wait for this node fail too: each batch would
    /// otherwise wait for the same timeout. Unsent checks whose slot has moved are queued for the new node instead.
    fn fail(&mut self, error: &StoreError, node: Node) {
        let jobs = &mut self.work.jobs;
        if self.sent {
            for job in jobs.drain(..) {
                self.inner.fail_taken(job, error.clone());
            }
            if error.is_of_connection() {
                self.inner.refresh(Why::Lost(node));
            }
            return;
        }
        if let Some(queue) = self.inner.queues().of(self.queue_number) {
            queue.jobs.take_all(jobs);
        }
        self.inner.refresh(Why::Lost(node));
        let (elsewhere, left) = self.inner.split_moved(jobs.drain(..), node);
        self.inner.requeue(elsewhere);
        for job in left {
            self.inner.fail_taken(job, error.clone());
        }
    }
}

/// The error of a node with a migrating slot that has only some of the requested keys.
fn deleted_here() -> RedisError {
    (
        redis::ErrorKind::Server(ServerErrorKind::TryAgain),
        "a check of the same call has deleted a key",
    )
        .into()
}

/// Fails the worker's checks when its task is dropped with the runtime; if it was the last worker, also those in the
/// queue.
impl Drop for Worker {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        let waiting = self
            .inner
            .queues()
            .of(self.queue_number)
            .map(|queue| queue.jobs.leave());
        for job in self.work.jobs.drain(..) {
            let error = if self.sent {
                no_runtime()
            } else {
                no_runtime().not_sent()
            };
            self.inner.fail_taken(job, error);
        }
        for job in waiting.into_iter().flatten() {
            job.fail(no_runtime().not_sent());
        }
    }
}

/// The buffers of a worker: the checks that it has taken, and the script calls for them, which share one round trip.
/// For a single server there is one call, for a node of a cluster one per partition.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Grouped by call.
    jobs: Vec<Job>,
    /// The first `len` calls are in use. The others are empty, for reuse.
    calls: Vec<ScriptCall>,
    len: usize,
}

impl Work {
    /// Clears the calls for reuse.
    fn clear_calls(&mut self) {
        for call in &mut self.calls[..self.len] {
            call.clear();
        }
        self.len = 0;
    }

    /// Groups the checks and builds the calls. `now` is 0 for Redis's own time.
    fn make_calls(&mut self, topology: &Topology, prefix: &str, now: i64) {
        let Self { jobs, calls, len } = self;
        let cluster = topology.cluster();
        if let Some(cluster) = cluster {
            // While a slot migrates, each caller gets a separate call: the keys of different callers may be on
            // different nodes.
            for job in jobs.iter_mut() {
                job.call_per_caller = job.redirect.is_some() || cluster.moves(job.partition);
            }
            // A stable sort keeps the order of each caller's checks.
            jobs.sort_by(|a, b| a.group().cmp(&b.group()));
        }
        for group in jobs.chunk_by(|a, b| a.group() == b.group()) {
            let prefix = cluster.map_or(prefix, |cluster| cluster.prefix(group[0].partition));
            if *len == calls.len() {
                calls.push(ScriptCall::default());
            }
            let call = &mut calls[*len];
            *len += 1;
            (call.now, call.needs_asking) = (now, group[0].needs_asking());
            match group {
                [job] => call.push_only(prefix, &job.check),
                _ => group.iter().for_each(|job| call.push(prefix, &job.check)),
            }
        }
    }

    fn calls(&self) -> &[ScriptCall] {
        &self.calls[..self.len]
    }

    /// The checks and the calls.
    fn parts(&mut self) -> (&mut Vec<Job>, &[ScriptCall]) {
        (&mut self.jobs, &self.calls[..self.len])
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::num::NonZeroUsize;
    use std::pin::Pin;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::time::Duration;

    use futures_util::FutureExt;
    use futures_util::future::join_all;
    use tokio::runtime::{Builder, Handle, Runtime};

    use super::super::queues::{JobId, RedisFuture};
    use super::*;
    use crate::store::{RedisStore, Store};
    use crate::support::{RedisServer, check, free_port, until};

    fn store(url: String, timeout: Duration) -> RedisStore {
        let one = NonZeroUsize::MIN;
        RedisStore::builder(url)
            .connections(one)
            .batch(one)
            .timeout(timeout)
            .connect_lazy()
            .unwrap()
    }

    /// Starts a server that replies until it receives `word`, reports that to the channel, and then stays silent.
    fn falls_silent_at(word: &'static str) -> (String, mpsc::Receiver<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let asked = &buffer[..length];
                if asked
                    .windows(word.len())
                    .any(|part| part == word.as_bytes())
                {
                    let _ = tell.send(());
                } else {
                    let commands = asked.iter().filter(|byte| **byte == b'*').count();
                    stream.write_all(&b"+OK\r\n".repeat(commands)).unwrap();
                }
            }
        });
        (url, told)
    }

    /// Only checks that were written to a connection may have been charged.
    #[tokio::test]
    async fn a_check_without_connection_was_not_sent() {
        let (silent, _told) = falls_silent_at("CLIENT");
        let short = Duration::from_millis(50);
        for (url, kind) in [
            (
                format!("redis://127.0.0.1:{}/", free_port()),
                ErrorKind::Unreachable,
            ),
            (silent, ErrorKind::Timeout),
        ] {
            let store = store(url, short);
            // The first check is sent in a call, and the others are queued behind it.
            for answer in join_all((0..4).map(|_| store.check(check("ann", "10/s")))).await {
                let error = answer.unwrap_err();
                assert!(error.kind() == kind && error.is_not_sent(), "{error:?}");
            }
        }
        let (hears, _told) = falls_silent_at("EVALSHA");
        let store = store(hears, Duration::from_millis(500));
        let answers = join_all((0..2).map(|_| store.check(check("ann", "10/s")))).await;
        let errors = answers
            .into_iter()
            .map(Result::unwrap_err)
            .map(|error| (error.kind(), error.is_not_sent()));
        assert!(errors.eq([(ErrorKind::Timeout, false), (ErrorKind::Timeout, true)]));
    }

    /// Starts a server that sends `reply` to every command except the greeting. Counts its connections.
    fn answers(reply: &'static str) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                counted.fetch_add(1, Ordering::SeqCst);
                std::thread::spawn(move || {
                    let mut buffer = [0; 65_536];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        let asked = &buffer[..length];
                        let greets = asked.windows(6).any(|part| part == b"CLIENT");
                        let commands = if greets {
                            asked.iter().filter(|byte| **byte == b'*').count()
                        } else {
                            1
                        };
                        let reply = if greets { "+OK\r\n" } else { reply };
                        stream
                            .write_all(&reply.as_bytes().repeat(commands))
                            .unwrap();
                    }
                });
            }
        });
        (url, connections)
    }

    /// A call that Redis rejects before it runs the script charges nothing and can be sent again. An error of the
    /// running script may follow a charge.
    #[tokio::test]
    async fn refused_calls_are_known_to_be_uncharged() {
        for (reply, kind, unsent) in [
            (
                "-LOADING Redis is loading the dataset in memory\r\n",
                ErrorKind::NotReady,
                true,
            ),
            (
                "-MASTERDOWN Link with MASTER is down\r\n",
                ErrorKind::NotReady,
                true,
            ),
            (
                "-NOAUTH Authentication required.\r\n",
                ErrorKind::Authentication,
                true,
            ),
            (
                "-NOPERM User a has no permissions to run the 'evalsha' command\r\n",
                ErrorKind::Permission,
                true,
            ),
            (
                "-ERR ACL failure in script: User a has no permissions\r\n",
                ErrorKind::Permission,
                true,
            ),
            (
                "-CLUSTERDOWN Hash slot not served\r\n",
                ErrorKind::ClusterNode,
                true,
            ),
            (
                "-MOVED 3999 127.0.0.1:6381\r\n",
                ErrorKind::ClusterNode,
                true,
            ),
            ("-ASK 3999 127.0.0.1:6381\r\n", ErrorKind::ClusterNode, true),
            (
                "-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
                ErrorKind::ClusterNode,
                true,
            ),
            (
                "-CROSSSLOT Keys in request don't hash to the same slot\r\n",
                ErrorKind::ClusterNode,
                true,
            ),
            (
                "-READONLY You can't write against a read only replica.\r\n",
                ErrorKind::ReadOnly,
                true,
            ),
            (
                "-OOM command not allowed when used memory > 'maxmemory'.\r\n",
                ErrorKind::OutOfMemory,
                true,
            ),
            (
                "-BUSY Redis is busy running a script.\r\n",
                ErrorKind::Refused,
                true,
            ),
            (
                "-MISCONF Redis is configured to save RDB snapshots\r\n",
                ErrorKind::Refused,
                true,
            ),
            (
                "-NOREPLICAS Not enough good replicas to write.\r\n",
                ErrorKind::Refused,
                true,
            ),
            (
                "-ERR user_script:7: attempt to index a nil value\r\n",
                ErrorKind::Refused,
                false,
            ),
            (
                "-ERR Error running script: Script killed by user with SCRIPT KILL\r\n",
                ErrorKind::Refused,
                false,
            ),
            (
                "-EXECABORT Transaction discarded\r\n",
                ErrorKind::Refused,
                false,
            ),
            ("-UNKNOWN to us\r\n", ErrorKind::Refused, false),
            ("+OK\r\n", ErrorKind::Protocol, false),
        ] {
            let (url, _) = answers(reply);
            let store = store(url, Duration::from_secs(20));
            let error = store.check(check("ann", "10/s")).await.unwrap_err();
            assert_eq!(
                (error.kind(), error.is_not_sent()),
                (kind, unsent),
                "{reply}"
            );
        }
    }

    /// Any reply to a ping proves that the server responds.
    #[tokio::test]
    async fn a_refused_ping_proves_a_live_connection() {
        let (url, connections) = answers("-LOADING Redis is loading the dataset in memory\r\n");
        let store = store(url, Duration::from_secs(20));
        let topology = &store.inner.topology;
        let pool = topology.pool(topology.node(0).unwrap(), 1, Duration::from_secs(20));
        for _ in 0..3 {
            drop(pool.checkout().await.unwrap());
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(30)).await;
            tokio::time::resume();
        }
        assert_eq!(connections.load(Ordering::SeqCst), 1);
    }

    /// The last reply and the end of the connection arrive together: the connection is not used again.
    #[tokio::test]
    async fn a_connection_that_ends_with_a_reply_is_replaced() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let (closed, is_closed) = mpsc::channel();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut buffer = [0; 65_536];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    let asked = &buffer[..length];
                    if asked.windows(4).any(|part| part == b"PING") {
                        stream.write_all(b"+PONG\r\n").unwrap();
                        break;
                    }
                    let commands = asked.iter().filter(|byte| **byte == b'*').count();
                    stream.write_all(&b"+OK\r\n".repeat(commands)).unwrap();
                }
                drop(stream);
                let _ = closed.send(());
            }
        });
        let store = store(url, Duration::from_secs(20));
        let topology = &store.inner.topology;
        let pool = topology.pool(topology.node(0).unwrap(), 1, Duration::from_secs(20));
        for _ in 0..3 {
            let mut connection = pool.checkout().await.unwrap();
            let mut ping = Box::pin(connection.ask(redis::cmd("PING")));
            assert!((&mut ping).now_or_never().is_none());
            // The runtime sees neither until both have arrived.
            is_closed.recv().unwrap();
            ping.await.unwrap();
            pool.give_back(connection);
        }
    }

    /// A connection is kept outside of bb8 for the next checkout, but not while a checkout waits for bb8.
    #[tokio::test]
    async fn a_returned_connection_goes_to_the_checkout_that_waits() {
        let server = RedisServer::start();
        let store = store(server.url(), Duration::from_secs(20));
        let topology = &store.inner.topology;
        let pool = topology.pool(topology.node(0).unwrap(), 1, Duration::from_secs(20));
        for waits in [false, true, true, false, true] {
            let mut connection = pool.checkout().await.unwrap();
            let _ = connection.ask(redis::cmd("PING")).await.unwrap();
            let mut next = Box::pin(pool.checkout());
            if waits {
                assert!((&mut next).now_or_never().is_none());
            }
            pool.give_back(connection);
            let next = next.now_or_never().expect("a connection").unwrap();
            pool.give_back(next);
        }
        let connected: String = server.command("INFO clients").await;
        assert!(connected.contains("connected_clients:2"), "{connected}");
    }

    /// A runtime that is shutting down may still receive a check and create its queue again, while workers of the
    /// removed queue end.
    #[tokio::test]
    async fn a_worker_leaves_other_queues_alone() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let (inner, runtime) = (&store.inner, Handle::current());
        let queue = || inner.with_queue(&runtime, inner.topology.node(0), |queue| queue.number);
        let former = queue();
        assert_eq!(queue(), former);
        let worker = Worker::new(inner, former);
        drop(mem::take(&mut inner.queues().each));
        let newer = queue();
        drop(worker);
        let mut queues = inner.queues();
        assert!(queues.of(former).is_none() && queues.of(newer).is_some());
    }

    /// A job is moved several times. Rust moves a larger value by calling `memcpy`.
    #[test]
    fn a_queued_check_is_small() {
        assert!(mem::size_of::<Job>() <= 128, "{}", mem::size_of::<Job>());
    }

    /// Each call copies a part of the worker's future, so a small future is faster.
    #[tokio::test]
    async fn the_future_of_a_worker_is_small() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let (inner, runtime) = (&store.inner, Handle::current());
        let number = inner.with_queue(&runtime, inner.topology.node(0), |queue| queue.number);
        let run = Worker::new(inner, number).run(None);
        assert!(mem::size_of_val(&run) < 4_096, "{}", mem::size_of_val(&run));
        // Skip the drop: it would subtract a worker that the queue has never counted.
        mem::forget(run);
    }

    /// The task of an ended worker runs the next one, so that a call spawns nothing. It keeps neither the store nor
    /// itself alive.
    #[tokio::test]
    async fn a_task_runs_all_workers_and_ends_with_the_store() {
        let server = RedisServer::start();
        let tasks = || Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        let store = store(server.url(), Duration::from_secs(20));
        for _ in 0..3 {
            let _ = store.check(check("ann", "10/s")).await.unwrap();
            // The watch of the runtime, and the worker's task.
            until("the task waits", async || {
                tasks() == before + 2 && store.inner.queues().each[0].idle.len() == 1
            })
            .await;
        }
        let last = store.check(check("ann", "10/s"));
        drop(store);
        assert_eq!(last.await.unwrap().remaining(), 6);
        until("no task is left", async || tasks() == before).await;
    }

    /// When a runtime shuts down, it may drop the waiting task long before the queue.
    #[tokio::test]
    async fn a_dropped_task_gets_no_worker() {
        let server = RedisServer::start();
        let store = store(server.url(), Duration::from_secs(20));
        let runtime = Handle::current();
        let node = store.inner.topology.node(0);
        store.inner.with_queue(&runtime, node, |queue| {
            queue.idle.push(oneshot::channel().0)
        });
        let decision = store.check(check("ann", "10/s")).await.unwrap();
        assert!(decision.is_allowed());
    }

    #[test]
    fn an_ended_runtime_reports_unsent_checks() {
        let runtime = || -> Runtime {
            Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap()
        };
        for (word, sent) in [("CLIENT", false), ("EVALSHA", true)] {
            let (url, told) = falls_silent_at(word);
            let store = store(url, Duration::from_secs(60));
            let ends = runtime();
            let guard = ends.enter();
            let checks = [
                store.check(check("ann", "10/s")),
                store.check(check("bob", "10/s")),
            ];
            drop(guard);
            told.recv().unwrap();
            drop(ends);
            let errors = checks.map(|check| {
                check
                    .now_or_never()
                    .expect("an immediate answer")
                    .unwrap_err()
            });
            assert!(
                errors
                    .iter()
                    .all(|error| error.kind() == ErrorKind::NoRuntime && error.is_check_only())
            );
            assert_eq!(errors.map(|error| error.is_not_sent()), [!sent, true]);
            assert!(
                store.inner.queues().each.is_empty(),
                "the runtime's connections are dropped"
            );
        }
    }

    /// A check outside of a runtime is an error of that check alone.
    #[test]
    fn a_check_outside_runtimes_is_not_sent() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let error = store
            .check(check("ann", "10/s"))
            .now_or_never()
            .unwrap()
            .unwrap_err();
        assert!(
            error.kind() == ErrorKind::NoRuntime && error.is_check_only() && error.is_not_sent(),
            "{error:?}"
        );
    }

    #[tokio::test]
    #[should_panic = "`RedisFuture` polled after completion"]
    async fn an_answer_is_returned_once() {
        let server = RedisServer::start();
        let mut answer = store(server.url(), Duration::from_secs(20)).check(check("ann", "10/s"));
        let _ = (&mut answer).await.unwrap();
        let _ = (&mut answer).await;
    }

    #[test]
    fn an_immediate_answer_can_be_polled_again() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let mut answer = store.check(check("ann", "10/s"));
        for _ in 0..2 {
            assert_eq!(
                (&mut answer).now_or_never().unwrap().unwrap_err().kind(),
                ErrorKind::NoRuntime
            );
        }
    }

    /// Withdrawing works as for a check in its first queue, so that a fallback may decide the check instead.
    #[tokio::test]
    async fn a_redirected_check_can_be_withdrawn() {
        let store = RedisStore::cluster(["redis://127.0.0.1:1"]).unwrap();
        let id = JobId {
            queue: NonZeroU64::MAX,
            number: 7,
        };
        let (mut job, answer) = Job::new(check("ann", "10/s"), 0);
        job.id = Some(id);
        store.inner.requeue(vec![(None, job)]);
        let mut future = RedisFuture::new(answer, id);
        assert!(store.backend().withdraw(Pin::new(&mut future)));
        assert!(store.inner.queues().have_redirected(id));
        until("a worker has dropped it", async || {
            !store.inner.queues().have_redirected(id)
        })
        .await;
    }
}
