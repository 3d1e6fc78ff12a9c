//! A limit on bytes per second.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::{Request, State, connect_info::MockConnectInfo};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Router, body::Body, http::StatusCode, routing::get};
use futures_util::{TryStreamExt, stream};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{KeyExtractor, PeerIp};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{ConfigError, Key, Limiter, LocalStore, Policy, Quota, Strategy};

/// Maximum length of a chunk. Larger chunks are denied for good.
const BURST: u32 = 64 << 10;

/// Lets each chunk of a body wait for its bytes.
fn paced<S: Store>(bytes: Limiter<S>, key: Key, body: Body) -> Body {
    Body::from_stream(body.into_data_stream().and_then(move |chunk| {
        let bytes = bytes.clone();
        async move {
            let length = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
            let decision = bytes.wait(key, length, Duration::from_secs(30)).await;
            match decision.map_err(axum::Error::new)? {
                decision if decision.is_allowed() => Ok(chunk),
                _ => Err(axum::Error::new("the bandwidth is used up")),
            }
        }
    }))
}

async fn pace<S: Store>(State(bytes): State<Limiter<S>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(key) = PeerIp.extract(&parts) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let response = next.run(Request::from_parts(parts, body)).await;
    response.map(|body| paced(bytes, key, body))
}

fn app<S: Store>(store: S) -> Result<Router, ConfigError> {
    let bytes = Quota::per_second(1_000_000).burst(BURST);
    let bytes = Limiter::new(store, Policy::new("bytes", Strategy::Gcra, bytes)?);
    Ok(Router::new()
        .route("/", get(|| async { Body::from_stream(download()) }))
        .layer(from_fn_with_state(bytes, pace)))
}

/// Two megabytes in chunks of 50,000 bytes.
fn download() -> impl stream::Stream<Item = Result<Vec<u8>, std::io::Error>> {
    stream::iter((0..40).map(|_| Ok(vec![0; 50_000])))
}

#[tokio::test(start_paused = true)]
async fn two_downloads_of_a_caller_share_its_bandwidth() -> Result<(), Box<dyn std::error::Error>> {
    let peer = MockConnectInfo(SocketAddr::from(([192, 0, 2, 7], 4711)));
    let app = app(LocalStore::default())?.layer(peer);
    let start = Instant::now();
    let read = async || {
        let response = app.clone().oneshot(Request::new(Body::empty())).await?;
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await?;
        Ok::<_, Box<dyn std::error::Error>>(body.len())
    };
    let (first, second) = tokio::join!(read(), read());
    assert_eq!((first?, second?), (2_000_000, 2_000_000));
    // 4 MB at 1 MB/s, less the burst.
    assert_eq!(start.elapsed().as_millis() / 10, 393);
    Ok(())
}
