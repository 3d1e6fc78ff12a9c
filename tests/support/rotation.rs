//! Users of servers that change under load, as those of Vault: each has a name of its own, and is deleted after an overlap,
//! which closes its connections.

#![allow(unreachable_pub, reason = "shared with tests outside of the crate")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt, join_all};
use tokio::runtime::Builder;
use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::{Credentials, RedisStoreBuilder, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::support::{RedisServer, check};

type Answer = Result<Credentials, Box<dyn std::error::Error + Send + Sync>>;

const INTERVAL: Duration = Duration::from_secs(2);
/// The former user stays for this long.
const OVERLAP: Duration = Duration::from_secs(1);
const ROTATIONS: usize = 3;
/// Longer than a call takes on a busy machine: only a failure lets an instance decide.
const PATIENT: Duration = Duration::from_secs(20);

pub struct Rotation {
    /// The number of the current user, and since when it is the current one.
    current: Mutex<(usize, Instant)>,
    calls: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
}

fn user(number: usize) -> String {
    format!("limiter-{number}")
}

fn password(number: usize) -> String {
    format!("hunter2-{number}")
}

async fn add_user(servers: &[&RedisServer], number: usize) {
    let (user, password) = (user(number), password(number));
    for server in servers {
        let rule = format!("ACL SETUSER {user} on >{password} ~* +@all");
        let _: String = server.command(&rule).await;
    }
}

impl Rotation {
    pub async fn start(servers: &[&RedisServer]) -> Arc<Self> {
        add_user(servers, 0).await;
        Arc::new(Self {
            current: Mutex::new((0, Instant::now())),
            calls: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
        })
    }

    /// Returns the closure for a store.
    pub fn closure(self: &Arc<Self>) -> impl Fn() -> BoxFuture<'static, Answer> + 'static {
        let this = Arc::clone(self);
        move || Arc::clone(&this).issue().boxed()
    }

    async fn issue(self: Arc<Self>) -> Answer {
        self.calls.fetch_add(1, SeqCst);
        let running = self.running.fetch_add(1, SeqCst) + 1;
        self.most_running.fetch_max(running, SeqCst);
        sleep(Duration::from_millis(20)).await;
        self.running.fetch_sub(1, SeqCst);
        let (number, since) = *self.current.lock().unwrap();
        let left = (INTERVAL + OVERLAP).saturating_sub(since.elapsed());
        Ok(Credentials::new(user(number), password(number)).valid_for(left))
    }

    /// Replaces the user several times.
    async fn rotate(&self, servers: &[&RedisServer]) {
        for number in 1..=ROTATIONS {
            let since = self.current.lock().unwrap().1;
            sleep(INTERVAL.saturating_sub(since.elapsed())).await;
            add_user(servers, number).await;
            *self.current.lock().unwrap() = (number, Instant::now());
            sleep(OVERLAP).await;
            for server in servers {
                let former = user(number - 1);
                let _: u32 = server.command(&format!("ACL DELUSER {former}")).await;
            }
        }
    }

    /// Rotates under the load of two runtimes, and asserts that Redis decides all checks.
    pub async fn is_not_noticed(self: &Arc<Self>, servers: &[&RedisServer], of: RedisStoreBuilder) {
        let redis = of
            .credentials(self.closure())
            .timeout(2 * PATIENT)
            .connect()
            .await
            .unwrap();
        let store = Fallback::builder(redis, LocalStore::default())
            .deadline(PATIENT)
            .unwrap()
            .build();
        let ends = Arc::new(AtomicBool::new(false));
        let other = {
            let (store, ends) = (store.clone(), Arc::clone(&ends));
            thread::spawn(move || {
                let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(load(&store, &ends))
            })
        };
        let here = {
            let (store, ends) = (store.clone(), Arc::clone(&ends));
            tokio::spawn(async move { load(&store, &ends).await })
        };
        let since = Instant::now();
        self.rotate(servers).await;
        ends.store(true, SeqCst);
        let (here, other) = (here.await.unwrap(), other.join().unwrap());
        println!(
            "{here:?} and {other:?} checks by Redis and locally, {} calls in {:?}",
            self.calls.load(SeqCst),
            since.elapsed()
        );
        assert_eq!((here.1, other.1), (0, 0), "checks decided locally");
        assert!(here.0 > 0 && other.0 > 0);
        assert_eq!(self.most_running.load(SeqCst), 1, "calls at a time");
        let most = since.elapsed().as_secs() as usize + 2;
        assert!(self.calls.load(SeqCst) <= most, "at most one a second");
    }
}

/// Sends checks until it ends. Returns how many Redis has decided, and how many this process.
async fn load(store: &Fallback<RedisStore, LocalStore>, ends: &AtomicBool) -> (usize, usize) {
    let one = async |task: usize| {
        let (mut by_redis, mut local) = (0, 0);
        while !ends.load(SeqCst) {
            let check = check(&format!("caller-{task}"), "1000000/s");
            match store.check(check).await.unwrap().source() {
                Source::Redis => by_redis += 1,
                _ => local += 1,
            }
            sleep(Duration::from_millis(1)).await;
        }
        (by_redis, local)
    };
    let counts = join_all((0..8).map(one)).await;
    let sum = |of: fn(&(usize, usize)) -> usize| counts.iter().map(of).sum();
    (sum(|count| count.0), sum(|count| count.1))
}
