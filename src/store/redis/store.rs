use std::pin::Pin;
use std::sync::Arc;

use super::instances;
use super::scan::Scan;
use super::worker::{Inner, RedisFuture};
use crate::error::StoreError;
use crate::limit::{Check, Key};
use crate::observe::Observer;
use crate::store::{Answer, Backend, Hooks, Instances, Store, Waiters, Withdraw};

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
///   `rl:{17}:{user-42}:api:g:100/s`; on a single server, `rl:{user-42}:api:g:100/s`. The key
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
///   [`timeout`](crate::store::RedisStoreBuilder::timeout), and not at all if most of the others
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
/// recovery of a [`Fallback`](crate::Fallback), the renewal of slots and the queue of refunds. Each task runs on the
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
    pub(super) inner: Arc<Inner>,
}

impl RedisStore {
    /// Announces this instance in Redis, and counts the instances that are announced under the same
    /// key prefix: for [`Share::Alive`](crate::store::Share::Alive). The Redis user needs
    /// `+zremrangebyscore +zadd +zcard +pexpire` for it.
    ///
    /// Each instance announces itself every 2 seconds, off the request path, and stops counting 6
    /// seconds after its last announcement. This one continues until the last clone of the result
    /// is dropped, or this Tokio runtime shuts down. While Redis is unreachable, the count does not
    /// change.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) outside a Tokio runtime.
    pub fn announce(&self) -> Result<Instances, StoreError> {
        instances::announce(&self.inner)
    }

    /// Iterates over the counts under this store's prefix, on every master of a cluster: for tools,
    /// since it reads the whole database. `ratelimit-inspect` is one. The Redis user needs
    /// `+scan` for it.
    ///
    /// ```no_run
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut scan = RedisStore::connect("redis://127.0.0.1/?prefix=shop").await?.scan();
    /// while let Some(counts) = scan.next().await? {
    ///     for count in counts {
    ///         println!("{} is counted under {} ({})", count.key.reveal(), count.policy, count.strategy);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn scan(&self) -> Scan {
        Scan::new(&self.inner)
    }
}

impl Store for RedisStore {
    type Future = RedisFuture;

    fn check(&self, check: Check) -> Answer<RedisFuture> {
        self.inner.check(check)
    }

    fn backend(&self) -> Backend<'_, RedisFuture> {
        Backend::withdrawable(self)
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

    fn server(&self, key: &Key) -> Option<String> {
        let topology = &self.inner.topology;
        Some(topology.address(topology.node(topology.partition(key))))
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
