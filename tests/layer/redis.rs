//! End to end: axum instances on real sockets, one Redis.

use std::net::SocketAddr;
use std::time::Duration;

use axum::{Router, body::Body, routing::get};
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tower_redis_ratelimit::check::{Decision, Source};
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, LocalStore, Policy, RateLimitLayer, RedisStore, Strategy, redis,
};

use crate::support::{RedisServer, until};

/// A service with its own stores and connections, as in another process.
struct Instance {
    address: SocketAddr,
    client: Client<HttpConnector, Body>,
    task: tokio::task::JoinHandle<()>,
}

impl Instance {
    async fn start(store: impl Store, quota: &str) -> Self {
        let policy = Policy::new("api", Strategy::Gcra, quota).unwrap();
        let app = Router::new()
            .route(
                "/",
                get(async |decision: axum::Extension<Decision>| format!("{:?}", decision.source())),
            )
            .layer(RateLimitLayer::new(store, PeerIp, policy));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = app.into_make_service_with_connect_info::<SocketAddr>();
        let task = tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
        Self {
            address,
            client: Client::builder(TokioExecutor::new()).build_http(),
            task,
        }
    }

    async fn get(&self) -> Response<String> {
        let request = Request::get(format!("http://{}/", self.address))
            .body(Body::empty())
            .unwrap();
        let (parts, body) = self.client.request(request).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Response::from_parts(parts, String::from_utf8(body.to_vec()).unwrap())
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn fallback(server: &RedisServer) -> Fallback<RedisStore, LocalStore> {
    const PATIENT: Duration = Duration::from_secs(5);
    let redis = RedisStore::builder(server.url())
        .timeout(PATIENT)
        .connect_lazy()
        .unwrap();
    Fallback::builder(redis, LocalStore::default())
        .deadline(PATIENT)
        .unwrap()
        .build()
}

#[tokio::test]
async fn two_instances_share_one_limit() {
    let server = RedisServer::start();
    let instances = [
        Instance::start(fallback(&server), "10/h").await,
        Instance::start(fallback(&server), "10/h").await,
    ];
    let mut allowed = 0;
    for i in 0..30 {
        let response = instances[i % 2].get().await;
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .map(|value| value.to_str().unwrap())
        };
        assert_eq!(header("ratelimit-policy"), Some("\"api\";q=10;w=3600"));
        if response.status() == StatusCode::OK {
            allowed += 1;
            let left = 10 - allowed;
            assert!(
                header("ratelimit")
                    .unwrap()
                    .starts_with(&format!("\"api\";r={left};t=")),
                "{response:?}"
            );
        } else {
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            let wait: u64 = header("retry-after").unwrap().parse().unwrap();
            assert!((1..=360).contains(&wait), "{wait}");
            assert_eq!(header("content-type"), Some("application/problem+json"));
            assert!(
                response.body().contains("\"violated-policies\":[\"api\"]"),
                "{}",
                response.body()
            );
        }
    }
    assert_eq!(allowed, 10);
}

/// Killed with -9 under load and restarted: all responses are 200 or 429, and the count is shared
/// again.
#[tokio::test]
async fn no_request_fails_when_redis_dies() {
    let mut server = RedisServer::start();
    let instances = [
        Instance::start(fallback(&server), "1000000/h").await,
        Instance::start(fallback(&server), "1000000/h").await,
    ];
    let load = async |requests: usize| {
        let responses = join_all((0..requests).map(|i| instances[i % 2].get())).await;
        assert!(
            responses
                .iter()
                .all(|response| response.status() == StatusCode::OK),
            "{responses:?}"
        );
        responses
    };
    load(200).await;
    tokio::join!(load(400), async { server.kill() });
    assert!(
        load(20)
            .await
            .iter()
            .all(|response| *response.body() == format!("{:?}", Source::Local))
    );

    server.restart();
    until("both count in Redis again", async || {
        load(20)
            .await
            .iter()
            .all(|response| *response.body() == format!("{:?}", Source::Redis))
    })
    .await;
    let mut connection = server.connection().await;
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("rl:{ip:*")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert_eq!(keys, ["rl:{ip:127.0.0.1}:api:g"]);
}
