//! The measured cases: this crate, and other designs on the same Redis.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use fastrand::Rng;
use futures_util::future::join_all;
use http::{Request, Response};
use redis::aio::MultiplexedConnection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OnceCell;
use tower::util::MapRequestLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor, PeerIp};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::settle::Settlement;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, Leased, LocalStore, Policy, Quota, RateLimitLayer, RedisStore, Strategy, redis,
};

use crate::cluster::{ClusterCase, ClusterServers};
use crate::meter::{Amount, Measure, load};
use crate::redis_cell;
use crate::support::{self, RedisServer};

/// Number of callers of the [`Load`]s with many callers.
pub const MANY: u32 = 100_000;
pub const CONCURRENCY: [u64; 4] = [1, 64, 256, 1024];

/// Longer than 64 concurrent requests of [`Subject::Waiting`] wait.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Lease time of blocks.
const LEASE: Duration = Duration::from_millis(250);

/// Pause between the requests of a connection, for cases in which the machine must not be
/// saturated: 64 connections send about 7,000 requests per second.
const PAUSE: Duration = Duration::from_millis(8);

/// A case: its subject, and the number of concurrent requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case(pub Subject, pub u64);

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Subject {
    /// `redis-benchmark -t get`.
    Get,
    /// A script call for each request, over one multiplexed connection.
    Multiplexed(Load),
    /// A script call for each request, over a pool of 16 connections, without pings.
    Pool(Load),
    /// A GET and a SET with an expiry for each key, in a script that decides nothing: the minimum
    /// cost in Redis of a decision that reads and writes like this.
    Bare,
    /// `RedisStore` through the layer.
    Redis(Load),
    /// `RedisStore` through the layer, with leased quota for busy callers.
    Leased(Load),
    /// `RedisStore` in a `Fallback`, which it does not need.
    Fallback,
    /// `RedisStore` through a layer that lets requests wait. Most do.
    Waiting,
    /// `RedisStore`, with a header field as the key.
    RedisByHeader(Load),
    /// `tower-redis-cell`, with a header field as the key too.
    Cell(Load),
    /// `RedisStore` through a layer that keeps each request until its body has ended, with 100,000
    /// callers: a request is a take and a refund.
    InFlight,
    /// `LocalStore` through the layer.
    Local(Load, Fields),
    /// `LocalStore` through a layer that keeps the decision out of the request's extensions.
    LocalUnread(Load, Fields),
    /// `tower_governor`.
    Governor(Load, Fields),
    /// An axum service over HTTP, under some layer.
    Http(Layers),
    /// `RedisStore` on a cluster, or one of the cases that are compared with it.
    Cluster(ClusterCase),
}

/// The servers of a run. Servers for few cases are started on demand.
pub struct Servers {
    single: RedisServer,
    cell: OnceCell<RedisServer>,
    sites: ClusterServers,
}

impl Servers {
    pub fn start() -> Self {
        Self {
            single: RedisServer::start(),
            cell: OnceCell::new(),
            sites: ClusterServers::default(),
        }
    }
}

/// Whether responses have header fields about the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fields {
    With,
    Without,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layers {
    None,
    /// A layer that does nothing: the cost of any layer in axum.
    Idle,
    /// This crate's, with a `LocalStore`.
    Limited,
    /// This crate's, with a `RedisStore`.
    Shared,
    /// This crate's, with a `RedisStore`; it refunds half of each request's take.
    Settled,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// 100,000 callers that never reach their limit. A caller's charge has usually expired before its next request.
    Many,
    /// 100,000 callers that are counted over an hour: the store holds all of them all the time.
    Hourly(Strategy),
    /// This number of callers, all in Redis during the whole run: [`fill`] has charged each for a quarter of an hour.
    AllAlive(u32),
    /// 100,000 callers that never reach their limit; the n-th sends 1/n of the first one's requests (Zipf's law).
    Zipf,
    /// One caller that never reaches the limit.
    Granted,
    /// One caller that has reached it.
    Denied,
}

pub const HOURLY: Load = Load::Hourly(Strategy::Gcra);

/// All cases, in the order of a round.
fn all() -> Vec<Case> {
    let mut cases = vec![Case(Subject::Get, 64)];
    for what in [
        Subject::Multiplexed(Load::Many),
        Subject::Pool(Load::Many),
        Subject::Redis(Load::Many),
        Subject::Leased(Load::Many),
        Subject::Redis(Load::Granted),
        Subject::Leased(Load::Granted),
        Subject::Redis(Load::Denied),
        Subject::InFlight,
        Subject::Local(HOURLY, Fields::With),
        Subject::Governor(HOURLY, Fields::With),
        Subject::Local(Load::Granted, Fields::With),
        Subject::Governor(Load::Granted, Fields::With),
        Subject::Local(Load::Denied, Fields::With),
        Subject::Governor(Load::Denied, Fields::With),
    ] {
        cases.extend(CONCURRENCY.map(|tasks| Case(what, tasks)));
    }
    cases.extend(
        [
            Subject::Local(HOURLY, Fields::Without),
            Subject::Governor(HOURLY, Fields::Without),
            Subject::LocalUnread(HOURLY, Fields::With),
            Subject::LocalUnread(HOURLY, Fields::Without),
        ]
        .map(|what| Case(what, 64)),
    );
    cases.extend(
        [
            Subject::Local(Load::Granted, Fields::Without),
            Subject::Governor(Load::Granted, Fields::Without),
            Subject::LocalUnread(Load::Granted, Fields::With),
            Subject::LocalUnread(Load::Granted, Fields::Without),
        ]
        .map(|what| Case(what, 1)),
    );
    for what in [
        Subject::Redis(Load::Zipf),
        Subject::Leased(Load::Zipf),
        Subject::Redis(Load::AllAlive(MANY)),
    ] {
        cases.push(Case(what, 256));
    }
    for load in [Load::Many, HOURLY] {
        cases.extend(
            [Subject::RedisByHeader(load), Subject::Cell(load)].map(|what| Case(what, 256)),
        );
    }
    cases.extend([Subject::Bare, Subject::Multiplexed(HOURLY)].map(|what| Case(what, 256)));
    cases.extend(
        support::STRATEGIES.map(|strategy| Case(Subject::Redis(Load::Hourly(strategy)), 256)),
    );
    let layers = [
        Layers::Limited,
        Layers::Idle,
        Layers::None,
        Layers::Shared,
        Layers::Settled,
    ];
    cases.extend(layers.map(|layers| Case(Subject::Http(layers), 64)));
    cases.extend(ClusterCase::ALL.map(|side| Case(Subject::Cluster(side), 256)));
    cases
}

/// Returns the cases whose name contains one of the texts; all cases without texts.
pub fn named(texts: &[String]) -> Vec<Case> {
    with_names(all(), texts)
}

/// The ways of a request: locally, to Redis, through a healthy fallback, and through a queue.
pub fn ways(texts: &[String]) -> Vec<Case> {
    let ways = [
        Case(Subject::Local(Load::Granted, Fields::With), 1),
        Case(Subject::Redis(Load::Granted), 1),
        Case(Subject::Fallback, 1),
        Case(Subject::Waiting, 64),
    ];
    with_names(ways.to_vec(), texts)
}

fn with_names(mut cases: Vec<Case>, texts: &[String]) -> Vec<Case> {
    let is_wanted = |case: &Case| {
        let name = case.full_name();
        texts.is_empty() || texts.iter().any(|text| name.contains(text.as_str()))
    };
    cases.retain(is_wanted);
    cases
}

impl Subject {
    /// Returns `true` for a case without Redis or HTTP.
    pub fn is_local(self) -> bool {
        matches!(
            self,
            Self::Local(..) | Self::LocalUnread(..) | Self::Governor(..)
        )
    }
}

impl Case {
    pub fn full_name(&self) -> String {
        format!("{}, {} at a time", self.name(), self.1)
    }

    pub fn name(&self) -> String {
        let load = |load: &Load| match load {
            Load::Many => "100k callers".to_owned(),
            Load::Hourly(Strategy::Gcra) => "100k callers by the hour".to_owned(),
            Load::Hourly(strategy) => format!("100k callers by the hour, {strategy:?}"),
            Load::AllAlive(callers) => format!("{callers} callers that all live"),
            Load::Zipf => "100k callers by Zipf's law".to_owned(),
            Load::Granted => "one caller, granted".to_owned(),
            Load::Denied => "one caller, denied".to_owned(),
        };
        let fields = |fields: &Fields| {
            if *fields == Fields::With {
                ""
            } else {
                ", without header fields"
            }
        };
        match &self.0 {
            Subject::Get => "redis-benchmark GET".to_owned(),
            Subject::Multiplexed(what) => {
                format!("a script call each, multiplexed, {}", load(what))
            }
            Subject::Pool(what) => format!("a script call each, pool of 16, {}", load(what)),
            Subject::Bare => {
                "GET and SET with an expiry, in a script that decides nothing, 100k keys".to_owned()
            }
            Subject::Redis(what) => format!("RedisStore, {}", load(what)),
            Subject::Leased(what) => format!("Leased RedisStore, {}", load(what)),
            Subject::Fallback => "Fallback on a healthy RedisStore".to_owned(),
            Subject::Waiting => "RedisStore, waiting requests".to_owned(),
            Subject::RedisByHeader(what) => format!("RedisStore by a header field, {}", load(what)),
            Subject::Cell(what) => format!("tower-redis-cell by a header field, {}", load(what)),
            Subject::InFlight => "RedisStore, 100k callers, in flight".to_owned(),
            Subject::Local(what, with) => format!("LocalStore, {}{}", load(what), fields(with)),
            Subject::LocalUnread(what, with) => format!(
                "LocalStore without the decision in requests, {}{}",
                load(what),
                fields(with)
            ),
            Subject::Governor(what, with) => {
                format!("tower_governor, {}{}", load(what), fields(with))
            }
            Subject::Http(Layers::Limited) => "axum over HTTP with LocalStore".to_owned(),
            Subject::Http(Layers::Idle) => {
                "axum over HTTP with a layer that does nothing".to_owned()
            }
            Subject::Http(Layers::None) => "axum over HTTP without a layer".to_owned(),
            Subject::Http(Layers::Shared) => "axum over HTTP with RedisStore".to_owned(),
            Subject::Http(Layers::Settled) => {
                "axum over HTTP with RedisStore and a settlement".to_owned()
            }
            Subject::Cluster(side) => side.name(),
        }
    }

    pub async fn run(&self, servers: &Servers, amount: Amount) -> Measure {
        let server = &servers.single;
        let _: String = server.command("FLUSHALL").await;
        let Self(what, tasks) = *self;
        match what {
            Subject::Get => redis_benchmark(server, tasks).await,
            Subject::Multiplexed(what) => {
                let connection = server.connection().await;
                let count = |caller| {
                    let mut connection = connection.clone();
                    async move { one_by_one(&mut connection, what.quota(), caller).await }
                };
                what.hold(server, count).await;
                load(&[server], tasks, amount, |mut meter| {
                    let mut connection = connection.clone();
                    async move {
                        while meter.should_continue() {
                            let caller = what.caller(&mut meter.rng);
                            one_by_one(&mut connection, what.quota(), caller).await;
                            meter.record();
                        }
                        meter
                    }
                })
                .await
            }
            Subject::Pool(what) => {
                let pool = pool(server).await;
                load(&[server], tasks, amount, |mut meter| {
                    let pool = pool.clone();
                    async move {
                        while meter.should_continue() {
                            let caller = what.caller(&mut meter.rng);
                            one_by_one(&mut pool.get().await.unwrap(), what.quota(), caller).await;
                            meter.record();
                        }
                        meter
                    }
                })
                .await
            }
            Subject::Bare => bare(server, tasks, amount).await,
            Subject::Redis(load) => {
                let store = RedisStore::connect(server.url()).await.unwrap();
                if let Load::AllAlive(_) = load {
                    fill(store.clone(), load).await;
                }
                let service = limited(store, load);
                load.hold(server, |caller| ask(service.clone(), by_address(caller)))
                    .await;
                serve(&[server], &[service], by_address, load, tasks, amount).await
            }
            Subject::Fallback => {
                let redis = RedisStore::connect(server.url()).await.unwrap();
                let store = Fallback::new(redis, LocalStore::default());
                let load = Load::Granted;
                let service = limited(store, load);
                serve(&[server], &[service], by_address, load, tasks, amount).await
            }
            Subject::Waiting => {
                let store = RedisStore::connect(server.url()).await.unwrap();
                let quota = Quota::per_second(5_000).burst(1);
                let policy = Policy::new("api", Strategy::Gcra, quota).unwrap();
                let layer = RateLimitLayer::new(store, PeerIp, policy).wait(LONGEST_WAIT);
                let service = layer.layer(service_fn(inner));
                let load = Load::Granted;
                serve(&[server], &[service], by_address, load, tasks, amount).await
            }
            Subject::Leased(load) => {
                let store = Leased::new(RedisStore::connect(server.url()).await.unwrap());
                let policy = Policy::new("api", load.strategy(), load.quota())
                    .unwrap()
                    .leased(LEASE)
                    .unwrap();
                let service = RateLimitLayer::new(store, PeerIp, policy).layer(service_fn(inner));
                serve(&[server], &[service], by_address, load, tasks, amount).await
            }
            Subject::RedisByHeader(load) => {
                let store = RedisStore::connect(server.url()).await.unwrap();
                let service =
                    layer(store, HeaderKey::new(HEADER).unwrap(), load).layer(service_fn(inner));
                load.hold(server, |caller| ask(service.clone(), by_header(caller)))
                    .await;
                serve(&[server], &[service], by_header, load, tasks, amount).await
            }
            Subject::Cell(load) => {
                let server = servers
                    .cell
                    .get_or_init(|| async { redis_cell::start(&[]) })
                    .await;
                let _: String = server.command("FLUSHALL").await;
                let service = redis_cell::layer(server, load.quota())
                    .await
                    .layer(service_fn(inner));
                load.hold(server, |caller| ask(service.clone(), by_header(caller)))
                    .await;
                serve(&[server], &[service], by_header, load, tasks, amount).await
            }
            Subject::InFlight => {
                let store = RedisStore::connect(server.url()).await.unwrap();
                let layer =
                    RateLimitLayer::new(store, PeerIp, Policy::in_flight("api", 100).unwrap());
                let service = layer.until_body_end().layer(service_fn(inner));
                serve(&[server], &[service], by_address, Load::Many, tasks, amount).await
            }
            Subject::Local(load, fields) => {
                let layer = layer(LocalStore::default(), PeerIp, load).headers(fields.headers());
                let service = layer.layer(service_fn(inner));
                serve(&[server], &[service], by_address, load, tasks, amount).await
            }
            Subject::LocalUnread(load, fields) => {
                let layer = layer(LocalStore::default(), PeerIp, load).headers(fields.headers());
                let service = layer.decision_in_request(false).layer(service_fn(inner));
                serve(&[server], &[service], by_address, load, tasks, amount).await
            }
            Subject::Governor(load, fields) => governor(server, load, fields, tasks, amount).await,
            Subject::Http(layers) => http(server, layers, tasks, amount).await,
            Subject::Cluster(side) => side.run(&servers.sites, tasks, amount).await,
        }
    }
}

impl Fields {
    fn headers(self) -> Headers {
        match self {
            Self::With => Headers::default(),
            Self::Without => Headers::NONE,
        }
    }
}

impl Load {
    fn strategy(self) -> Strategy {
        match self {
            Self::Hourly(strategy) => strategy,
            _ => Strategy::Gcra,
        }
    }

    /// 100,000 callers send a few requests per second each.
    pub(crate) fn quota(self) -> Quota {
        match self {
            Self::Many => Quota::per_second(100),
            Self::Hourly(_) => Quota::per_hour(1_000),
            // A few callers send hundreds of requests per second each.
            Self::AllAlive(_) => Quota::per_hour(1_000).burst(24_000),
            Self::Zipf => Quota::per_hour(1_000_000),
            Self::Granted => Quota::per_second(4_000_000),
            Self::Denied => Quota::per_hour(1),
        }
    }

    pub fn callers(self) -> u32 {
        match self {
            Self::Many | Self::Hourly(_) | Self::Zipf => MANY,
            Self::AllAlive(callers) => callers,
            Self::Granted | Self::Denied => 1,
        }
    }

    /// Returns the next request's caller.
    pub fn caller(self, rng: &mut Rng) -> u32 {
        /// Cumulative shares of the requests, by caller.
        static SHARES: LazyLock<Vec<f64>> = LazyLock::new(|| {
            let sums = (1..=MANY).scan(0.0, |sum, rank| {
                *sum += 1.0 / f64::from(rank);
                Some(*sum)
            });
            let sums: Vec<f64> = sums.collect();
            sums.iter().map(|sum| sum / sums[sums.len() - 1]).collect()
        });
        match self {
            Self::Zipf => {
                let share = rng.f64();
                SHARES.partition_point(|sum| *sum < share) as u32
            }
            _ => rng.u32(..self.callers()),
        }
    }

    /// Counts every caller once, for loads in which Redis must hold all of them.
    async fn hold<F: Future<Output = ()>>(self, server: &RedisServer, count: impl Fn(u32) -> F) {
        if let Self::Hourly(_) = self {
            for first in (0..MANY).step_by(1_000) {
                join_all((first..first + 1_000).map(&count)).await;
            }
            // In addition to the key of the store's connection check.
            assert!(server.command::<u32>("DBSIZE").await >= MANY, "{self:?}");
        }
    }
}

fn layer<S: Store, K: KeyExtractor>(store: S, key: K, load: Load) -> RateLimitLayer<S, K> {
    RateLimitLayer::new(
        store,
        key,
        Policy::new("api", load.strategy(), load.quota()).unwrap(),
    )
}

/// An empty service under a limit.
pub fn limited<S: Store>(
    store: S,
    load: Load,
) -> impl Service<Request<()>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    layer(store, PeerIp, load).layer(service_fn(inner))
}

/// Charges each caller twice, so that Redis writes it like a returning caller.
pub async fn fill(store: RedisStore, load: Load) {
    const TASKS: u32 = 512;
    for cost in [250, 1] {
        let layer = layer(store.clone(), PeerIp, load).cost(move |_request| cost);
        let service = layer.layer(service_fn(inner));
        let fill = |first| {
            let service = service.clone();
            tokio::spawn(async move {
                for caller in (first..load.callers()).step_by(TASKS as usize) {
                    ask(service.clone(), by_address(caller)).await;
                }
            })
        };
        join_all((0..TASKS).map(fill))
            .await
            .into_iter()
            .for_each(Result::unwrap);
    }
}

async fn governor(
    server: &RedisServer,
    load: Load,
    fields: Fields,
    tasks: u64,
    amount: Amount,
) -> Measure {
    let quota = load.quota();
    let mut config = GovernorConfigBuilder::default();
    let config = config
        .period(quota.period() / quota.limit())
        .burst_size(quota.capacity());
    let mut config = config.key_extractor(PeerIpKeyExtractor);
    match fields {
        Fields::With => {
            let service =
                GovernorLayer::new(config.use_headers().finish().unwrap()).layer(service_fn(inner));
            serve(&[server], &[service], by_address, load, tasks, amount).await
        }
        Fields::Without => {
            let service = GovernorLayer::new(config.finish().unwrap()).layer(service_fn(inner));
            serve(&[server], &[service], by_address, load, tasks, amount).await
        }
    }
}

async fn inner(_: Request<()>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

/// Sends requests through a whole middleware, of one or several instances.
pub async fn serve<S, B>(
    servers: &[&RedisServer],
    instances: &[S],
    request: fn(u32) -> Request<()>,
    what: Load,
    tasks: u64,
    amount: Amount,
) -> Measure
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
{
    load(servers, tasks, amount, |mut meter| {
        let mut service = instances[meter.task % instances.len()].clone();
        async move {
            while meter.should_continue() {
                ask(&mut service, request(what.caller(&mut meter.rng))).await;
                meter.record();
                // Without any wait, tasks must still take turns.
                tokio::task::coop::consume_budget().await;
            }
            meter
        }
    })
    .await
}

async fn ask<S, B>(mut service: S, request: Request<()>)
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    service.ready().await.unwrap().call(request).await.unwrap();
}

/// A request of one caller, identified by its connection.
pub fn by_address(caller: u32) -> Request<()> {
    let mut request = Request::new(());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(
        IpAddr::from(address(caller)),
        1,
    )));
    request
}

/// The header field that identifies a caller.
pub const HEADER: &str = "x-api-key";

fn by_header(caller: u32) -> Request<()> {
    Request::builder()
        .header(HEADER, address(caller).to_string())
        .body(())
        .unwrap()
}

pub fn address(caller: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a00_0000 + caller)
}

/// A GCRA script for one key, as in limiters without batches.
const ONE_BY_ONE: &str = "
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local interval, burst, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local tat = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now)
local new = tat + cost * interval
local ahead = new - burst * interval - now
if ahead > 0 then
  return {0, 0, ahead, tat - now}
end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return {1, math.floor(-ahead / interval), 0, new - now}";

pub async fn one_by_one(connection: &mut MultiplexedConnection, quota: Quota, caller: u32) {
    static SCRIPT: LazyLock<redis::Script> = LazyLock::new(|| redis::Script::new(ONE_BY_ONE));
    let mut call = SCRIPT.prepare_invoke();
    let _: Vec<i64> = call
        .key(format!("one:{{{}}}", address(caller)))
        .arg((quota.period() / quota.limit()).as_micros() as u64)
        .arg(quota.capacity())
        .arg(1)
        .invoke_async(connection)
        .await
        .unwrap();
}

/// Uses calls of the size that `RedisStore`'s have, and enough concurrent calls for the requests.
async fn bare(server: &RedisServer, requests: u64, amount: Amount) -> Measure {
    const CALL: u32 = 85;
    static SCRIPT: LazyLock<redis::Script> = LazyLock::new(|| {
        redis::Script::new(
            "for i = 1, #KEYS do
               redis.call('GET', KEYS[i])
               redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[2])
             end",
        )
    });
    async fn call(connection: &mut MultiplexedConnection, callers: impl Iterator<Item = u32>) {
        let mut call = SCRIPT.prepare_invoke();
        // Keys and values are as long as the store's.
        for caller in callers {
            call.key(format!("bare:{{{}}}:gcra:api", address(caller)));
        }
        let _: () = call
            .arg("a value of 21 letters")
            .arg(3_600_000)
            .invoke_async(connection)
            .await
            .unwrap();
    }
    let calls = requests / u64::from(CALL);
    let connections = join_all((0..calls).map(|_| server.connection())).await;
    for first in (0..MANY).step_by(1_000) {
        call(&mut connections[0].clone(), first..first + 1_000).await;
    }
    let measure = load(&[server], calls, amount, |mut meter| {
        let mut connection = connections[meter.task].clone();
        async move {
            while meter.should_continue() {
                call(&mut connection, (0..CALL).map(|_| meter.rng.u32(..MANY))).await;
                meter.record();
            }
            meter
        }
    })
    .await;
    measure.for_each_of(f64::from(CALL))
}

/// A pool of 16 connections, each used by one call at a time, without a ping at checkout.
async fn pool(server: &RedisServer) -> bb8::Pool<bb8_redis::RedisConnectionManager> {
    let manager = bb8_redis::RedisConnectionManager::new(server.url()).unwrap();
    bb8::Pool::builder()
        .max_size(16)
        .min_idle(16)
        .test_on_check_out(false)
        .build(manager)
        .await
        .unwrap()
}

async fn redis_benchmark(server: &RedisServer, clients: u64) -> Measure {
    // The key that redis-benchmark reads.
    let _: String = server.command("SET key:__rand_int__ value").await;
    let (port, clients) = (server.port().to_string(), clients.to_string());
    let args = [
        "-p", &port, "-t", "get", "-c", &clients, "-n", "100000", "-q", "--csv",
    ];
    let output = Command::new("redis-benchmark")
        .args(args)
        .output()
        .expect("redis-benchmark, which comes with redis-server");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with("\"GET\""))
        .expect("a line for GET");
    let fields: Vec<f64> = line
        .split(',')
        .skip(1)
        .map(|field| field.trim_matches('"').parse().unwrap())
        .collect();
    // rps, avg, min, p50, p95, p99, max; in milliseconds.
    Measure {
        per_second: fields[0],
        p50: fields[3] * 1e3,
        p99: fields[5] * 1e3,
        ..Measure::default()
    }
}

/// Takes 2 per request, under a window: a quota that refills immediately would have nothing to refund.
async fn windowed(server: &RedisServer) -> RateLimitLayer<RedisStore, PeerIp> {
    let store = RedisStore::connect(server.url()).await.unwrap();
    let policy = Policy::new(
        "api",
        Strategy::SlidingWindow { cells: 10 },
        Quota::per_day(u32::MAX),
    )
    .unwrap();
    RateLimitLayer::new(store, PeerIp, policy).cost(|_request| 2)
}

/// The example's service, and clients with persistent connections.
async fn http(server: &RedisServer, layers: Layers, tasks: u64, amount: Amount) -> Measure {
    let app = Router::new().route("/", get(|| async { "Hello!\n" }));
    let app = match layers {
        Layers::None => app,
        Layers::Idle => app.layer(MapRequestLayer::new(|request: Request<Body>| request)),
        Layers::Limited => app.layer(layer(LocalStore::default(), PeerIp, Load::Granted)),
        Layers::Shared => app.layer(windowed(server).await),
        Layers::Settled => app.layer(
            windowed(server)
                .await
                .settle(|_response| Settlement::Cost(1)),
        ),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    let serving = tokio::spawn(async move { axum::serve(listener, service).await });
    // Measure the latency that a settlement adds, not the queueing of a saturated machine.
    let pause = matches!(layers, Layers::Shared | Layers::Settled).then_some(PAUSE);
    let measure = load(&[server], tasks, amount, |mut meter| async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let mut response = vec![0; 4096];
        loop {
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
            if !meter.should_continue() {
                break;
            }
            stream
                .write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .await
                .unwrap();
            let mut length = 0;
            while !response[..length].ends_with(b"\r\n\r\nHello!\n") {
                let read = stream.read(&mut response[length..]).await.unwrap();
                assert!(read > 0, "{}", String::from_utf8_lossy(&response[..length]));
                length += read;
            }
            meter.record();
        }
        meter
    })
    .await;
    serving.abort();
    measure
}
