//! Processes of a service with requests in flight, the killing of some, and a log of these
//! requests.

#![allow(unreachable_pub, reason = "shared by test binaries")]
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(
    clippy::disallowed_methods,
    reason = "real processes are timed in real time"
)]

use std::env;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::settle::ReserveError;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Fallback, Key, Limiter, LocalStore, Policy, RedisStore, redis};

use crate::support::{RedisServer, until};

pub const LIMIT: u32 = 10;
pub const TTL: Duration = Duration::from_secs(2);
pub const PROCESSES: usize = 4;
const TASKS: usize = 64;
const DEADLINE: Duration = Duration::from_millis(100);
/// Timeout that is longer than any stall of a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

const STORE: &str = "IN_FLIGHT_STORE";
const LOG: &str = "IN_FLIGHT_LOG";
const NAME: &str = "IN_FLIGHT_NAME";
const FALLS_BACK: &str = "IN_FLIGHT_FALLS_BACK";

pub fn ann() -> Key {
    Key::new("ann")
}

pub fn limiter<S: Store>(store: S) -> Limiter<S> {
    Limiter::new(
        store,
        Policy::in_flight("streams", LIMIT)
            .unwrap()
            .slot_ttl(TTL)
            .unwrap(),
    )
}

/// A store with a long timeout, for busy machines.
pub fn patient(url: &str) -> RedisStore {
    RedisStore::builder(url)
        .timeout(PATIENCE)
        .connect_lazy()
        .unwrap()
}

/// The number of requests in flight per process, recorded after the grant and before the release:
/// so it never exceeds the real number. Stored in a separate Redis.
pub struct Log {
    server: RedisServer,
    connection: redis::aio::MultiplexedConnection,
}

/// Adds to a process's number of requests in flight, and records the maximum sum.
const NOTE: &str = "
    redis.call('HINCRBY', 'in flight', ARGV[1], ARGV[2])
    local sum = 0
    for _, count in ipairs(redis.call('HVALS', 'in flight')) do sum = sum + count end
    if sum > tonumber(redis.call('GET', 'most') or 0) then redis.call('SET', 'most', sum) end
    if tonumber(ARGV[2]) > 0 then redis.call('INCR', 'granted') end
";

const NOTE_LONGEST: &str = "
    if tonumber(ARGV[2]) > tonumber(redis.call('GET', ARGV[1]) or 0) then redis.call('SET', ARGV[1], ARGV[2]) end
";

impl Log {
    pub async fn start() -> Self {
        let server = RedisServer::start();
        let connection = server.connection().await;
        Self { server, connection }
    }

    async fn number(&self, command: &[&str]) -> u64 {
        let mut cmd = redis::cmd(command[0]);
        cmd.arg(&command[1..]);
        cmd.query_async::<Option<u64>>(&mut self.connection.clone())
            .await
            .unwrap()
            .unwrap_or(0)
    }

    /// Returns the maximum number of requests in flight since the last call.
    pub async fn most(&self) -> u64 {
        self.number(&["GETDEL", "most"]).await
    }

    /// Returns the maximum number of requests in flight within a second, and the number of local
    /// grants during that second and just before it: a process with a fallback grants locally if a
    /// busy machine makes Redis's replies late.
    async fn most_in_a_second(&self) -> (u64, u64) {
        let before = self.granted_locally().await;
        // Requests that were granted locally before this call end within a second.
        sleep(Duration::from_secs(1)).await;
        self.most().await;
        sleep(Duration::from_secs(1)).await;
        let most = self.most().await;
        (most, self.granted_locally().await - before)
    }

    pub async fn granted(&self) -> u64 {
        self.number(&["GET", "granted"]).await
    }

    /// Returns the number of local grants.
    pub async fn granted_locally(&self) -> u64 {
        self.number(&["GET", "locally"]).await
    }

    /// Returns the number of requests that could not be decided.
    pub async fn failed(&self) -> u64 {
        self.number(&["GET", "failed"]).await
    }

    /// Returns the longest wait for a reply, in milliseconds.
    pub async fn longest(&self) -> u64 {
        self.number(&["GET", "longest"]).await
    }

    /// Returns the longest time by which the machine woke a task late, in milliseconds.
    async fn stalled(&self) -> u64 {
        self.number(&["GET", "stalled"]).await
    }
}

/// A process that runs the test of this name, which calls [`work`].
pub struct Worker {
    child: Child,
    name: String,
}

impl Worker {
    pub fn start(test: &str, store: &str, log: &Log, falls_back: bool) -> Self {
        let name = format!("{:x}", fastrand::u64(..));
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", test, "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
            .env(STORE, store)
            .env(LOG, log.server.url())
            .env(NAME, &name);
        if falls_back {
            command.env(FALLS_BACK, "yes");
        }
        Self {
            child: command.spawn().unwrap(),
            name,
        }
    }

    /// Kills the process as `kill -9` does, which ends its requests in flight.
    pub async fn kill(mut self, log: &Log) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        log.number(&["HDEL", "in flight", &self.name]).await;
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "kill {signal} failed"
        );
    }

    /// Returns the process's number of requests in flight.
    pub async fn in_flight(&self, log: &Log) -> u64 {
        log.number(&["HGET", "in flight", &self.name]).await
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns `true` in a process that a [`Worker`] has started.
pub fn is_worker() -> bool {
    env::var(STORE).is_ok()
}

/// Keeps requests in flight until it is killed: in 64 tasks, each with one request after another.
pub async fn work() {
    let store = env::var(STORE).unwrap();
    if env::var(FALLS_BACK).is_ok() {
        let redis = RedisStore::connect_lazy(store.as_str()).unwrap();
        run(limiter(
            Fallback::builder(redis, LocalStore::default())
                .deadline(DEADLINE)
                .unwrap()
                .share(PROCESSES as u32)
                .build(),
        ))
        .await;
    } else {
        run(limiter(patient(&store))).await;
    }
}

async fn run<S: Store>(limiter: Limiter<S>) {
    let client = redis::Client::open(env::var(LOG).unwrap()).unwrap();
    let mut log = client.get_multiplexed_async_connection().await.unwrap();
    log.set_response_timeout(PATIENCE);
    let name = env::var(NAME).unwrap();
    for _ in 0..TASKS {
        let (limiter, mut log, name) = (limiter.clone(), log.clone(), name.clone());
        tokio::spawn(async move {
            let mut rng = Rng::new();
            let (mut longest, mut stalled) = (Duration::ZERO, Duration::ZERO);
            loop {
                let start = Instant::now();
                let answer = limiter.reserve(ann(), 1).await;
                note_longest("longest", start.elapsed(), &mut longest, &mut log).await;
                match answer {
                    Ok(reservation) => {
                        if reservation.decision().source() == Source::Local {
                            let _: () = redis::cmd("INCR")
                                .arg("locally")
                                .query_async(&mut log)
                                .await
                                .unwrap();
                        }
                        let mut note = async |count: i64| {
                            let mut cmd = redis::cmd("EVAL");
                            let () = cmd
                                .arg(NOTE)
                                .arg(0)
                                .arg(&name)
                                .arg(count)
                                .query_async(&mut log)
                                .await
                                .unwrap();
                        };
                        note(1).await;
                        sleep(Duration::from_millis(rng.u64(1..40))).await;
                        note(-1).await;
                        drop(reservation);
                    }
                    Err(ReserveError::Denied(_)) => {}
                    Err(_) => {
                        let _: () = redis::cmd("INCR")
                            .arg("failed")
                            .query_async(&mut log)
                            .await
                            .unwrap();
                    }
                }
                let (pause, start) = (Duration::from_millis(rng.u64(1..20)), Instant::now());
                sleep(pause).await;
                note_longest("stalled", start.elapsed() - pause, &mut stalled, &mut log).await;
            }
        });
    }
    std::future::pending::<()>().await;
}

/// Records a time under this name, if it is longer than the recorded one.
async fn note_longest(
    name: &str,
    took: Duration,
    longest: &mut Duration,
    log: &mut redis::aio::MultiplexedConnection,
) {
    if took > *longest {
        *longest = took;
        let mut cmd = redis::cmd("EVAL");
        let () = cmd
            .arg(NOTE_LONGEST)
            .arg(0)
            .arg(name)
            .arg(took.as_millis() as u64)
            .query_async(log)
            .await
            .unwrap();
    }
}

/// Runs processes, and kills and restarts them in turn for a while. The limit is never exceeded,
/// and the slots of killed processes are free once they have expired.
pub async fn processes_are_killed(test: &str, url: &str) {
    let seconds = env::var("SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or(5);
    let log = Log::start().await;
    let start = || Worker::start(test, url, &log, false);
    let mut workers: Vec<Worker> = (0..PROCESSES).map(|_| start()).collect();
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut rng, mut killed) = (Rng::new(), 0);
    let mut most = 0;
    // On a busy machine the processes take longer to reach the limit.
    while Instant::now() < end || most < LIMIT.into() {
        sleep(Duration::from_millis(rng.u64(200..1_000))).await;
        let worker = workers.swap_remove(rng.usize(..workers.len()));
        killed += u32::from(worker.in_flight(&log).await > 0);
        worker.kill(&log).await;
        workers.push(start());
        most = most.max(log.most().await);
    }
    assert!(killed > 0, "none was killed with a request in flight");
    for worker in workers {
        worker.kill(&log).await;
    }
    let died_at = Instant::now();
    let limiter = limiter(patient(url));
    until("all is free", async || {
        limiter.peek(ann(), 1).await.unwrap().remaining() == LIMIT
    })
    .await;
    let freed = died_at.elapsed();
    most = most.max(log.most().await);
    let (granted, failed) = (log.granted().await, log.failed().await);
    println!(
        "most {most}, granted {granted}, failed {failed}, killed {killed}, free after {freed:?}"
    );
    assert_eq!((most, failed), (LIMIT.into(), 0));
    assert!(granted > 100, "only {granted} were granted");
    assert!(
        freed < TTL + Duration::from_millis(500),
        "free after {freed:?}"
    );
}

/// Runs processes through an outage, which `change` starts and ends. No request fails or waits:
/// each process continues with its part, and its requests in flight are counted again after the
/// recovery.
pub async fn an_outage(test: &str, url: &str, mut change: impl AsyncFnMut(bool)) {
    let log = Log::start().await;
    let _workers: Vec<Worker> = (0..PROCESSES)
        .map(|_| Worker::start(test, url, &log, true))
        .collect();
    let more = async || {
        let than = log.granted().await + 100;
        until("more is granted", async || log.granted().await > than).await;
    };
    // A process may have started with a local grant.
    more().await;
    let (before, local_before) = log.most_in_a_second().await;
    change(false).await;
    more().await;
    sleep(Duration::from_secs(1)).await;
    let during = log.most().await;
    change(true).await;
    sleep(Duration::from_secs(3)).await;
    let after = log.most().await;
    more().await;
    let (later, local_later) = log.most_in_a_second().await;
    let (failed, longest, stalled) = (log.failed().await, log.longest().await, log.stalled().await);
    println!("most {before} before, {during} in the outage, {after} after it, {later} later");
    println!("one waited for {longest} ms, and the machine for {stalled} ms");
    assert_eq!(failed, 0);
    let limit = u64::from(LIMIT);
    assert!(
        before <= limit + local_before,
        "{before} before, up to {local_before} of them local"
    );
    assert!(
        later <= limit + local_later,
        "{later} later, up to {local_later} of them local"
    );
    assert!(
        during <= 2 * limit && after <= 3 * limit,
        "{during} in it, {after} after it"
    );
    assert!(
        longest < 1_000 + stalled,
        "one waited for {longest} ms, and the machine for {stalled} ms"
    );
}
