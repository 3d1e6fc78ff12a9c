//! What is measured: this crate, and what others do with the same Redis.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use fastrand::Rng;
use http::{Request, Response};
use redis::aio::MultiplexedConnection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::util::MapRequestLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_redis_ratelimit::{LocalStore, PeerIp, Policy, Quota, RateLimitLayer, RedisStore, Store, Strategy, redis};

use crate::meter::{Amount, Measure, load};
use crate::support::{self, RedisServer};

/// Callers, where there are many.
const MANY: u32 = 100_000;
pub const CONCURRENCY: [u64; 4] = [1, 64, 256, 1024];

/// A case: what, and with how many requests at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case(pub What, pub u64);

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// `redis-benchmark -t get`.
    Get,
    /// A script call for each request, over one multiplexed connection.
    Multiplexed(Load),
    /// A script call for each request, over a pool of 16 connections, without pings.
    Pool(Load),
    /// `RedisStore` through the layer.
    Redis(Load),
    /// `LocalStore` through the layer.
    Local(Load),
    /// `tower_governor`.
    Governor(Load),
    /// An axum service over HTTP, under some layer.
    Http(Layers),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layers {
    None,
    /// One that does nothing: what axum takes for any layer.
    Idle,
    /// Ours, with a `LocalStore`.
    Limited,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// 100,000 callers, none of whom reaches the limit. What one request charged has flowed back when its caller's next
    /// one comes.
    Many(Strategy),
    /// As many, who are counted over an hour: Redis holds a key for each of them all the time.
    Hourly,
    /// One caller, who never reaches the limit.
    Granted,
    /// One caller, who has reached it.
    Denied,
}

pub const MANY_GCRA: Load = Load::Many(Strategy::Gcra);

/// In the order in which they take turns.
fn all() -> Vec<Case> {
    let mut cases = vec![Case(What::Get, 64)];
    for what in [
        What::Multiplexed(MANY_GCRA),
        What::Pool(MANY_GCRA),
        What::Redis(MANY_GCRA),
        What::Redis(Load::Granted),
        What::Redis(Load::Denied),
        What::Local(MANY_GCRA),
        What::Governor(MANY_GCRA),
        What::Local(Load::Granted),
        What::Governor(Load::Granted),
        What::Local(Load::Denied),
        What::Governor(Load::Denied),
    ] {
        cases.extend(CONCURRENCY.map(|tasks| Case(what, tasks)));
    }
    cases.extend([What::Multiplexed(Load::Hourly), What::Redis(Load::Hourly)].map(|what| Case(what, 256)));
    cases.extend(support::STRATEGIES.into_iter().skip(1).map(|strategy| Case(What::Redis(Load::Many(strategy)), 256)));
    cases.extend([Layers::Limited, Layers::Idle, Layers::None].map(|layers| Case(What::Http(layers), 64)));
    cases
}

/// Those whose name has one of the texts; all, if there is none.
pub fn named(texts: &[String]) -> Vec<Case> {
    let wanted = |case: &Case| texts.is_empty() || texts.iter().any(|text| case.full_name().contains(text.as_str()));
    all().into_iter().filter(wanted).collect()
}

impl Case {
    pub fn full_name(&self) -> String {
        format!("{}, {} at a time", self.name(), self.1)
    }

    pub fn name(&self) -> String {
        let load = |load: &Load| match load {
            Load::Many(Strategy::Gcra) => "100k callers".to_owned(),
            Load::Many(strategy) => format!("100k callers, {strategy:?}"),
            Load::Hourly => "100k callers by the hour".to_owned(),
            Load::Granted => "one caller, granted".to_owned(),
            Load::Denied => "one caller, denied".to_owned(),
        };
        match &self.0 {
            What::Get => "redis-benchmark GET".to_owned(),
            What::Multiplexed(what) => format!("a script call each, multiplexed, {}", load(what)),
            What::Pool(what) => format!("a script call each, pool of 16, {}", load(what)),
            What::Redis(what) => format!("RedisStore, {}", load(what)),
            What::Local(what) => format!("LocalStore, {}", load(what)),
            What::Governor(what) => format!("tower_governor, {}", load(what)),
            What::Http(Layers::Limited) => "axum over HTTP with LocalStore".to_owned(),
            What::Http(Layers::Idle) => "axum over HTTP with a layer that does nothing".to_owned(),
            What::Http(Layers::None) => "axum over HTTP without a layer".to_owned(),
        }
    }

    pub async fn run(&self, server: &RedisServer, amount: Amount) -> Measure {
        let _: String = server.command("FLUSHALL").await;
        let Self(what, tasks) = *self;
        match what {
            What::Get => redis_benchmark(server, tasks),
            What::Multiplexed(what) => {
                let connection = server.connection().await;
                load(server, tasks, amount, |mut meter| {
                    let mut connection = connection.clone();
                    async move {
                        while meter.next() {
                            one_by_one(&mut connection, what, &mut meter.rng).await;
                            meter.done();
                        }
                        meter
                    }
                })
                .await
            }
            What::Pool(what) => {
                let pool = pool(server).await;
                load(server, tasks, amount, |mut meter| {
                    let pool = pool.clone();
                    async move {
                        while meter.next() {
                            one_by_one(&mut pool.get().await.unwrap(), what, &mut meter.rng).await;
                            meter.done();
                        }
                        meter
                    }
                })
                .await
            }
            What::Redis(load) => {
                let store = RedisStore::connect(server.url()).await.unwrap();
                serve(server, layer(store, load).layer(service_fn(inner)), load, tasks, amount).await
            }
            What::Local(load) => {
                serve(server, layer(LocalStore::default(), load).layer(service_fn(inner)), load, tasks, amount).await
            }
            What::Governor(load) => governor(server, load, tasks, amount).await,
            What::Http(layers) => http(server, layers, tasks, amount).await,
        }
    }
}

impl Load {
    fn strategy(self) -> Strategy {
        match self {
            Self::Many(strategy) => strategy,
            Self::Hourly | Self::Granted | Self::Denied => Strategy::Gcra,
        }
    }

    /// 100,000 callers come a few times a second each.
    fn quota(self) -> Quota {
        match self {
            Self::Many(_) => Quota::per_second(100),
            Self::Hourly => Quota::per_hour(1_000),
            Self::Granted => Quota::per_second(4_000_000),
            Self::Denied => Quota::per_hour(1),
        }
    }

    fn callers(self) -> u32 {
        match self {
            Self::Many(_) | Self::Hourly => MANY,
            Self::Granted | Self::Denied => 1,
        }
    }
}

fn layer<S: Store>(store: S, load: Load) -> RateLimitLayer<S, PeerIp> {
    RateLimitLayer::new(store, PeerIp, Policy::new("api", load.strategy(), load.quota()).unwrap())
}

/// With header fields, as ours has.
async fn governor(server: &RedisServer, load: Load, tasks: u64, amount: Amount) -> Measure {
    let quota = load.quota();
    let mut config = GovernorConfigBuilder::default();
    let config = config.period(quota.period() / quota.limit()).burst_size(quota.capacity());
    let config = config.key_extractor(PeerIpKeyExtractor).use_headers().finish();
    let layer = GovernorLayer::new(config.unwrap());
    serve(server, layer.layer(service_fn(inner)), load, tasks, amount).await
}

async fn inner(_: Request<()>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

/// Through a whole middleware.
async fn serve<S>(server: &RedisServer, service: S, what: Load, tasks: u64, amount: Amount) -> Measure
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static,
{
    load(server, tasks, amount, |mut meter| {
        let mut service = service.clone();
        async move {
            while meter.next() {
                let address = IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + meter.rng.u32(..what.callers())));
                let mut request = Request::new(());
                request.extensions_mut().insert(ConnectInfo(SocketAddr::new(address, 1)));
                service.ready().await.unwrap().call(request).await.unwrap();
                meter.done();
                // Where nothing waits, tasks take turns as requests would.
                tokio::task::coop::consume_budget().await;
            }
            meter
        }
    })
    .await
}

/// A GCRA script for one key, as limiters without batches call it.
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

async fn one_by_one(connection: &mut MultiplexedConnection, load: Load, rng: &mut Rng) {
    static SCRIPT: LazyLock<redis::Script> = LazyLock::new(|| redis::Script::new(ONE_BY_ONE));
    let mut call = SCRIPT.prepare_invoke();
    let _: Vec<i64> = call
        .key(format!("one:{{{}}}", Ipv4Addr::from_bits(0x0a00_0000 + rng.u32(..load.callers()))))
        .arg((load.quota().period() / load.quota().limit()).as_micros() as u64)
        .arg(load.quota().capacity())
        .arg(1)
        .invoke_async(connection)
        .await
        .unwrap();
}

/// 16 connections, each held for a call, without a ping at checkout.
async fn pool(server: &RedisServer) -> bb8::Pool<bb8_redis::RedisConnectionManager> {
    let manager = bb8_redis::RedisConnectionManager::new(server.url()).unwrap();
    bb8::Pool::builder().max_size(16).min_idle(16).test_on_check_out(false).build(manager).await.unwrap()
}

fn redis_benchmark(server: &RedisServer, clients: u64) -> Measure {
    let (port, clients) = (server.port().to_string(), clients.to_string());
    let args = ["-p", &port, "-t", "get", "-c", &clients, "-n", "100000", "-q", "--csv"];
    let output =
        Command::new("redis-benchmark").args(args).output().expect("redis-benchmark, which comes with redis-server");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("\"GET\"")).expect("a line for GET");
    let fields: Vec<f64> = line.split(',').skip(1).map(|field| field.trim_matches('"').parse().unwrap()).collect();
    // rps, avg, min, p50, p95, p99, max; in milliseconds.
    Measure { per_second: fields[0], p50: fields[3] * 1e3, p99: fields[5] * 1e3, ..Measure::default() }
}

/// The example's service, and clients that keep their connections.
async fn http(server: &RedisServer, layers: Layers, tasks: u64, amount: Amount) -> Measure {
    let app = Router::new().route("/", get(|| async { "Hello!\n" }));
    let app = match layers {
        Layers::None => app,
        Layers::Idle => app.layer(MapRequestLayer::new(|request: Request<Body>| request)),
        Layers::Limited => app.layer(layer(LocalStore::default(), Load::Granted)),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    let serving = tokio::spawn(async move { axum::serve(listener, service).await });
    let measure = load(server, tasks, amount, |mut meter| async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let mut response = vec![0; 4096];
        while meter.next() {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
            let mut length = 0;
            while !response[..length].ends_with(b"\r\n\r\nHello!\n") {
                let read = stream.read(&mut response[length..]).await.unwrap();
                assert!(read > 0, "{}", String::from_utf8_lossy(&response[..length]));
                length += read;
            }
            meter.done();
        }
        meter
    })
    .await;
    serving.abort();
    measure
}
