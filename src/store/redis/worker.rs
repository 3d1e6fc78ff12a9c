//! The task that sends what waits and answers it.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use redis::{RedisError, Value};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::calls::Calls;
use super::errors::error_of;
use super::future::Job;
use super::inner::Inner;
use super::pool::Pool;
use super::runtimes::{no_runtime, runtime_is_ending};
use super::script::{self, SCRIPT};
use super::transport::Node;
use crate::store::clock::instant;
use crate::store::{ErrorKind, StoreError, contain, event};

pub(super) struct Worker {
    pub(super) inner: Arc<Inner>,
    node: Node,
    pool: Arc<Pool>,
    failures: watch::Receiver<Option<StoreError>>,
    pub(super) work: Work,
    /// Whether the batch may have reached Redis.
    sent: bool,
    /// Whether the queue still counts it.
    counted: bool,
}

/// What a worker works with: the checks that it has taken, and the calls that ask them.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) jobs: Vec<Job>,
    calls: Calls,
}

/// For how many turns of the runtime a worker waits for more to send.
const GATHER: u32 = 4;

/// What Redis has said to each call.
type Replies = SmallVec<[Result<Value, RedisError>; 1]>;

impl Worker {
    /// A worker that the queue with this pool has counted already.
    pub(super) fn new(inner: &Arc<Inner>, node: Node, pool: Arc<Pool>, work: Work) -> Self {
        let failures = pool.failures();
        Self { inner: Arc::clone(inner), node, pool, failures, work, sent: false, counted: true }
    }

    pub(super) async fn run(mut self) {
        if self.node == Node::NOWHERE {
            return self.place().await;
        }
        while self.take() {
            if self.work.jobs.is_empty() {
                continue;
            }
            let sent_at = self.inner.denials.now();
            match self.call().await {
                Ok(replies) => self.answer(replies, sent_at),
                Err(error) => self.fail(&error),
            }
            if self.inner.transport.cluster().is_some() {
                self.gather().await;
            }
        }
    }

    /// Lets those who were answered ask again, so that more of each partition is there: as long as each turn of the runtime
    /// brings more, and a few turns at most. Where nobody asks, that is one turn.
    async fn gather(&self) {
        let pushed = || self.inner.queues().of(&self.pool).map(|queue| queue.next_number());
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

    /// Takes what waits, up to the bound of a batch, and makes the calls that ask it. `false` if nothing waits: the worker
    /// must end.
    fn take(&mut self) -> bool {
        self.work.calls.clear();
        let Some(waiting) = self.take_jobs(self.inner.limits.batch) else { return false };
        let Work { jobs, calls } = &mut self.work;
        calls.make(jobs, &self.inner);
        self.inner.keep_marker();
        if let Some(observer) = self.inner.observer.get()
            && !jobs.is_empty()
        {
            contain(|| observer.sends(&event::Sends::new(jobs.len(), waiting)));
        }
        true
    }

    /// Takes what waits, and drops what need not be sent. Returns how many still wait, or `None` if the worker must end.
    pub(super) fn take_jobs(&mut self, max: usize) -> Option<usize> {
        let jobs = &mut self.work.jobs;
        let waiting = {
            let mut queues = self.inner.queues();
            let queue = queues.of(&self.pool)?;
            let Some(waiting) = queue.take(max, jobs) else {
                // `fail` may have moved the whole queue into it.
                jobs.shrink_to(self.inner.limits.batch);
                self.counted = false;
                queues.spare.push(mem::take(&mut self.work));
                return None;
            };
            waiting
        };
        let now = instant();
        jobs.retain(|job| !job.is_abandoned());
        for job in jobs.extract_if(.., |job| now.duration_since(job.since) > self.inner.limits.timeout) {
            job.fail(StoreError::new(ErrorKind::Timeout).unsent());
        }
        Some(waiting)
    }

    /// What Redis has said to each call.
    ///
    /// # Errors
    ///
    /// What befalls all of them.
    async fn call(&mut self) -> Result<Replies, StoreError> {
        self.sent = false;
        let result = match timeout(self.inner.limits.timeout, self.attempt()).await {
            Ok(result) => result,
            Err(_) => Err(StoreError::new(ErrorKind::Timeout)),
        };
        result.map_err(|error| {
            // What drives the connection may have been dropped with the runtime before this worker: Redis has not failed.
            let error = if error.is_of_connection() && runtime_is_ending() { no_runtime() } else { error };
            if self.sent { error } else { error.unsent() }
        })
    }

    async fn attempt(&mut self) -> Result<Replies, StoreError> {
        let calls = self.work.calls.as_slice();
        let (now, instance) = (self.inner.now.load(Ordering::Relaxed), self.inner.instance);
        let mut connection = self.pool.checkout(&mut self.failures).await?;
        self.sent = true;
        let replies: Result<Replies, RedisError> = match self.inner.transport.cluster() {
            None => connection
                .run(&SCRIPT, |name, text| calls[0].batch.command(name, text, now, instance))
                .await
                .map(|reply| smallvec![Ok(reply)]),
            Some(_) => {
                let asks: Vec<bool> = calls.iter().map(|call| call.asks).collect();
                let command =
                    |call: usize, name: &str, text: &str| calls[call].batch.command(name, text, now, instance);
                connection.run_each(&SCRIPT, &asks, command).await.map(Replies::from_vec)
            }
        };
        let is_read_only = |reply: &Result<Value, _>| reply.as_ref().is_ok_and(script::is_read_only);
        if replies.as_ref().is_ok_and(|replies| replies.iter().any(is_read_only)) {
            connection.give_up_for(StoreError::new(ErrorKind::ReadOnly));
        }
        replies.map_err(|error| error_of(&error))
    }

    /// Answers the checks of each call by the reply to it, which was sent at this time.
    fn answer(&mut self, replies: Replies, sent_at: i64) {
        let Work { jobs, calls } = &mut self.work;
        let mut jobs = jobs.drain(..);
        for (call, reply) in calls.as_slice().iter().zip(replies) {
            let own = jobs.by_ref().take(call.jobs);
            match reply.map(|reply| call.batch.read(reply)) {
                Ok(Ok(verdicts)) => {
                    for (job, verdicts) in own.zip(verdicts) {
                        job.answer(|check| self.inner.decided(check, verdicts, sent_at));
                    }
                }
                Ok(Err(error)) => {
                    for job in own {
                        job.answer(|check| self.inner.decided(check, Err(error.clone()), 0));
                    }
                }
                Err(error) => self.inner.redirect(own.collect(), &error, self.node),
            }
        }
    }

    /// Answers the batch by an error; and if the connection is at fault, also all that waits, which would otherwise meet
    /// the same, one time-out after the other.
    fn fail(&mut self, error: &StoreError) {
        let jobs = &mut self.work.jobs;
        let of_connection = error.is_of_connection();
        if !(of_connection && error.is_unsent()) {
            for job in jobs.drain(..) {
                job.answer(|check| self.inner.decided(check, Err(error.clone()), 0));
            }
        }
        if of_connection {
            if let Some(queue) = self.inner.queues().of(&self.pool) {
                queue.take_all(jobs);
            }
            for job in self.inner.lost(jobs.drain(..), self.node) {
                job.answer(|check| self.inner.decided(check, Err(error.clone().unsent()), 0));
            }
        }
    }
}

/// When the task is dropped with its runtime, those who wait for an answer elsewhere get one.
impl Drop for Worker {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        let waiting = self.inner.queues().of(&self.pool).map(|queue| queue.leave());
        for job in self.work.jobs.drain(..) {
            let error = if self.sent { no_runtime() } else { no_runtime().unsent() };
            job.answer(|check| self.inner.decided(check, Err(error), 0));
        }
        for job in waiting.into_iter().flatten() {
            job.fail(no_runtime().unsent());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::num::NonZeroUsize;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::time::Duration;

    use futures_util::FutureExt;
    use futures_util::future::join_all;
    use tokio::runtime::{Builder, Handle, Runtime};

    use super::*;
    use crate::store::{RedisStore, Store};
    use crate::support::{RedisServer, check, free_port};

    fn store(url: String, timeout: Duration) -> RedisStore {
        let one = NonZeroUsize::MIN;
        RedisStore::builder(url).connections(one).batch(one).timeout(timeout).connect_lazy().unwrap()
    }

    /// Answers until it is sent the word, tells of that, and says no more.
    fn falls_silent_at(word: &'static str) -> (String, mpsc::Receiver<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let asked = &buffer[..length];
                if asked.windows(word.len()).any(|part| part == word.as_bytes()) {
                    let _ = tell.send(());
                } else {
                    let commands = asked.iter().filter(|byte| **byte == b'*').count();
                    stream.write_all(&b"+OK\r\n".repeat(commands)).unwrap();
                }
            }
        });
        (url, told)
    }

    /// Only what was written to a connection may have been charged.
    #[tokio::test]
    async fn a_check_that_got_no_connection_was_not_sent() {
        let (silent, _told) = falls_silent_at("CLIENT");
        let short = Duration::from_millis(50);
        for (url, kind) in
            [(format!("redis://127.0.0.1:{}/", free_port()), ErrorKind::Unreachable), (silent, ErrorKind::Timeout)]
        {
            let store = store(url, short);
            // The first ones are of a call, and the others wait for it.
            for answer in join_all((0..4).map(|_| store.check(check("ann", "10/s")))).await {
                let error = answer.unwrap_err();
                assert!(error.kind() == kind && error.is_unsent(), "{error:?}");
            }
        }
        let (hears, _told) = falls_silent_at("EVALSHA");
        let store = store(hears, Duration::from_millis(500));
        let answers = join_all((0..2).map(|_| store.check(check("ann", "10/s")))).await;
        let errors = answers.into_iter().map(Result::unwrap_err).map(|error| (error.kind(), error.is_unsent()));
        assert!(errors.eq([(ErrorKind::Timeout, false), (ErrorKind::Timeout, true)]));
    }

    /// Answers every command but the greeting with these bytes. Counts its connections.
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
                        let commands = if greets { asked.iter().filter(|byte| **byte == b'*').count() } else { 1 };
                        let reply = if greets { "+OK\r\n" } else { reply };
                        stream.write_all(&reply.as_bytes().repeat(commands)).unwrap();
                    }
                });
            }
        });
        (url, connections)
    }

    /// What Redis refuses before it runs the script is not charged, and may be asked again. What stopped the script may
    /// have come after a charge.
    #[tokio::test]
    async fn a_check_whose_call_was_not_run_is_known_not_to_be_charged() {
        for (reply, kind, unsent) in [
            ("-LOADING Redis is loading the dataset in memory\r\n", ErrorKind::NotReady, true),
            ("-MASTERDOWN Link with MASTER is down\r\n", ErrorKind::NotReady, true),
            ("-NOAUTH Authentication required.\r\n", ErrorKind::Authentication, true),
            ("-NOPERM User a has no permissions to run the 'evalsha' command\r\n", ErrorKind::Permission, true),
            ("-ERR ACL failure in script: User a has no permissions\r\n", ErrorKind::Permission, true),
            ("-CLUSTERDOWN Hash slot not served\r\n", ErrorKind::Cluster, true),
            ("-MOVED 3999 127.0.0.1:6381\r\n", ErrorKind::Cluster, true),
            ("-ASK 3999 127.0.0.1:6381\r\n", ErrorKind::Cluster, true),
            ("-TRYAGAIN Multiple keys request during rehashing of slot\r\n", ErrorKind::Cluster, true),
            ("-CROSSSLOT Keys in request don't hash to the same slot\r\n", ErrorKind::Cluster, true),
            ("-READONLY You can't write against a read only replica.\r\n", ErrorKind::ReadOnly, true),
            ("-OOM command not allowed when used memory > 'maxmemory'.\r\n", ErrorKind::OutOfMemory, true),
            ("-BUSY Redis is busy running a script.\r\n", ErrorKind::Refused, true),
            ("-MISCONF Redis is configured to save RDB snapshots\r\n", ErrorKind::Refused, true),
            ("-NOREPLICAS Not enough good replicas to write.\r\n", ErrorKind::Refused, true),
            ("-ERR user_script:7: attempt to index a nil value\r\n", ErrorKind::Refused, false),
            ("-ERR Error running script: Script killed by user with SCRIPT KILL\r\n", ErrorKind::Refused, false),
            ("-EXECABORT Transaction discarded\r\n", ErrorKind::Refused, false),
            ("-UNKNOWN to us\r\n", ErrorKind::Refused, false),
            ("+OK\r\n", ErrorKind::Protocol, false),
        ] {
            let (url, _) = answers(reply);
            let store = store(url, Duration::from_secs(20));
            let error = store.check(check("ann", "10/s")).await.unwrap_err();
            assert_eq!((error.kind(), error.is_unsent()), (kind, unsent), "{reply}");
        }
    }

    /// Any reply to a ping shows that the server is there.
    #[tokio::test]
    async fn a_connection_whose_ping_is_refused_is_alive() {
        let (url, connections) = answers("-LOADING Redis is loading the dataset in memory\r\n");
        let store = store(url, Duration::from_secs(20));
        let pool = Pool::new(store.inner.transport.clone(), store.inner.transport.node(0), 1, Duration::from_secs(20));
        for _ in 0..3 {
            drop(pool.checkout(&mut pool.failures()).await.unwrap());
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(1)).await;
            tokio::time::resume();
        }
        assert_eq!(connections.load(Ordering::SeqCst), 1);
    }

    /// A runtime that is ending may be asked once more, and so get a queue anew, while workers of the former still end.
    #[tokio::test]
    async fn a_lane_leaves_the_queue_of_another_alone() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let (inner, runtime) = (&store.inner, Handle::current());
        let pool = || inner.with_queue(&runtime, inner.transport.node(0), |queue, _| Arc::clone(&queue.pool));
        let former = pool();
        assert!(Arc::ptr_eq(&former, &pool()));
        let worker = Worker::new(inner, inner.transport.node(0), Arc::clone(&former), Work::default());
        drop(mem::take(&mut inner.queues().each));
        let newer = pool();
        drop(worker);
        let mut queues = inner.queues();
        assert!(queues.of(&former).is_none() && queues.of(&newer).is_some());
    }

    #[test]
    fn a_check_whose_runtime_ended_knows_whether_it_was_sent() {
        let runtime = || -> Runtime { Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap() };
        for (word, sent) in [("CLIENT", false), ("EVALSHA", true)] {
            let (url, told) = falls_silent_at(word);
            let store = store(url, Duration::from_secs(60));
            let ends = runtime();
            let guard = ends.enter();
            let checks = [store.check(check("ann", "10/s")), store.check(check("bob", "10/s"))];
            drop(guard);
            told.recv().unwrap();
            drop(ends);
            let errors = checks.map(|check| check.now_or_never().expect("an answer at once").unwrap_err());
            assert!(errors.iter().all(|error| error.kind() == ErrorKind::NoRuntime && error.is_of_check()));
            assert_eq!(errors.map(|error| error.is_unsent()), [!sent, true]);
            assert!(store.inner.queues().each.is_empty(), "the runtime's connections are gone");
        }
    }

    /// What is not asked on a runtime is an error of that check alone.
    #[test]
    fn a_check_outside_of_a_runtime_was_not_sent() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let error = store.check(check("ann", "10/s")).now_or_never().unwrap().unwrap_err();
        assert!(error.kind() == ErrorKind::NoRuntime && error.is_of_check() && error.is_unsent(), "{error:?}");
    }

    #[tokio::test]
    #[should_panic = "`RedisFuture` polled after completion"]
    async fn an_answer_is_told_once() {
        let server = RedisServer::start();
        let mut answer = store(server.url(), Duration::from_secs(20)).check(check("ann", "10/s"));
        let _ = (&mut answer).await.unwrap();
        let _ = (&mut answer).await;
    }

    #[test]
    fn an_answer_that_was_there_at_once_stays() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let mut answer = store.check(check("ann", "10/s"));
        for _ in 0..2 {
            assert_eq!((&mut answer).now_or_never().unwrap().unwrap_err().kind(), ErrorKind::NoRuntime);
        }
    }
}
