use std::pin::Pin;
use std::sync::Arc;

use super::instances;
use super::scan::Scan;
use super::worker::{Inner, RedisFuture};
use crate::error::StoreError;
use crate::limit::{Check, Key};
use crate::observe::Observer;
use crate::store::{Answer, Instances, Store, Waiters};

/// A store in Redis: one count for all instances, decided by a script, on Redis's own clock.
///
/// Checks in flight at the same moment share a script call and a round trip. Every check is answered within about twice
/// the store's [`timeout`](crate::store::RedisStoreBuilder::timeout), if necessary with a [`StoreError`]. A charge is
/// never sent twice: only a script that Redis does not know, and so did not run, is sent again.
///
/// It needs Redis 6.2 or a compatible server; see [which servers](crate::guide::servers) are tested, and how they
/// affect the counts. The Redis user needs `~PREFIX:* +evalsha +eval +time +mget +set +setrange +del`, and for
/// [`SlidingLog`](crate::Strategy::SlidingLog) `+lrange +rpush +lset +ltrim +lrem +pexpireat`, for requests [in
/// flight](crate::Policy::in_flight) and a [`Fallback`](crate::Fallback) with a share `+zrange +zremrangebyscore
/// +zcard +zadd +zscore +zrem +pexpireat`.
///
/// # Redis Cluster
///
/// By `redis+cluster://` in place of `redis://`, or by [`cluster`](Self::cluster), it is a store in a Redis Cluster.
/// All of the above holds there too, whatever becomes of nodes and slots:
///
/// - Callers are put into [partitions](crate::store::RedisStoreBuilder::partitions) by a hash of the key, the same in all
///   stores. Each partition is in one slot. What
///   is in flight for a partition is one script call, and the calls for one master are one round trip. The keys of a
///   caller are as `rl:{17}:{user-42}:api:g:100/s`, where a single server has `rl:{user-42}:api:g:100/s`. The key
///   `rl:{rl}:partitions` has their number.
/// - Each master has its own connections and queue. A [`Fallback`](crate::Fallback) has a breaker for each partition: a
///   master that is down degrades its callers only, until its replica has taken over. Replicas are not used.
/// - The map of slots comes from any node, off the request path: at the start, when a connection is lost, and when a
///   slot has moved. A call that was refused for that is sent to the right node; no other call is sent twice.
/// - An address that belongs to another cluster meanwhile is not used: a node must list a known node, by its id. If
///   none of those has answered for 30 seconds, the nodes that the application has named are the cluster, as at the
///   start.
/// - While a slot is moved, its callers are asked one by one. Redis decides nothing that needs several keys, of which some
///   are on another node or not there yet: a check under several policies, or with an id that is new, may get an error of
///   [`ErrorKind::NotReady`](crate::store::ErrorKind::NotReady) until the whole slot has moved. A fallback decides then,
///   and settles it.
/// - The Redis user needs `+asking +cluster|slots` besides
///   (`+cluster` before Redis 7). With TLS, the certificates must be of what the nodes call themselves: see `tls-cluster`,
///   `cluster-announce-hostname` and `cluster-preferred-endpoint-type` of Redis.
///
/// # Redis Sentinel
///
/// By `redis+sentinel://`, or by [`sentinel`](Self::sentinel), it is a store on the master that the sentinels have
/// elected. All of the above holds there too:
///
/// - Name all sentinels. They are all queried whenever a connection is made, and the reported server must confirm that
///   it is a master. If they disagree, the majority decides, otherwise the latest failover; of equal ones, the last
///   known master stays while it answers. A sentinel that is dead or slow
///   delays a connection by a quarter of the [`timeout`](crate::store::RedisStoreBuilder::timeout) at most, and by
///   nothing if most of them agree. While none answers, the last known master is used.
/// - After a failover the former master may go on answering for many seconds, and then loses what it has counted. So
///   one sentinel is queried every quarter of a second, in turn, and connections to the former master are closed.
/// - Redis replicates asynchronously: what was charged just before a failover, and with `SENTINEL FAILOVER` what was
///   charged during it, may be lost.
/// - A user of the sentinels needs `+sentinel|master` (`+sentinel` before Redis 7); the one of the master needs `+role`
///   besides. Without it, a replica that is taken for the master is found out by the first script, and not before.
///
/// # Runtimes
///
/// Clones share the connections and the queue. Each tokio runtime that uses a store has connections and a queue of its
/// own there, until it ends: a store may be a `static`, used by several runtimes in turn or at once.
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
    /// Announces this instance in Redis, and counts those that do so under the same key prefix: for
    /// [`Share::Alive`](crate::store::Share::Alive). The Redis user needs `+zremrangebyscore +zadd +zcard +pexpire` for
    /// it.
    ///
    /// Each announces itself every 2 seconds, off the request path, and no longer counts 6 seconds after the last time.
    /// This one does so until the last clone of the result is dropped, or this tokio runtime ends. While Redis is
    /// unreachable, the number does not change.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) outside of a tokio runtime.
    pub fn announce(&self) -> Result<Instances, StoreError> {
        instances::announce(&self.inner)
    }

    /// Looks through what is counted under this store's prefix, on every master of a cluster: for
    /// tools, since it reads the whole database. `examples/inspect.rs` is one. The Redis user needs `+scan` for it.
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

    fn withdraw(&self, future: Pin<&mut RedisFuture>) -> bool {
        self.inner.withdraw(future.get_mut())
    }
}
