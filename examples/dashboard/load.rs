//! The clients. As in real traffic, a few callers send most of the requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{MissedTickBehavior, interval};
use tower::{Service, ServiceExt};
use tower_redis_ratelimit::select::Tier;

use crate::recorder::Recorder;

/// Number of callers. Every second one has the plan `pro`.
const CALLERS: f64 = 40.0;
const TICKS_PER_SECOND: u32 = 50;

/// Sends `rate` requests per second to the instances in turn, without waiting for the responses.
pub(crate) async fn run<S>(instances: Vec<S>, rate: Arc<AtomicU32>, recorder: Arc<Recorder>)
where
    S: Service<Request<()>, Response = Response<String>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let mut ticks = interval(Duration::from_secs(1) / TICKS_PER_SECOND);
    // A machine that is too slow sends fewer requests, which the page shows.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut due, mut sent) = (0, 0);
    loop {
        ticks.tick().await;
        due += rate.load(Relaxed);
        while due >= TICKS_PER_SECOND {
            due -= TICKS_PER_SECOND;
            sent += 1;
            let instance = instances[sent % instances.len()].clone();
            let recorder = Arc::clone(&recorder);
            tokio::spawn(async move {
                let Ok(response) = instance.oneshot(request(sent)).await;
                if response.status().is_server_error() {
                    recorder.unanswered();
                }
            });
        }
    }
}

/// Builds the nth request. Multiples of the golden ratio are evenly spread, and a power of them is distributed like the
/// ranks of callers: the first caller sends a fifth of all requests, the last one a hundred and fiftieth.
fn request(number: usize) -> Request<()> {
    let even = (number as f64 * 0.618_033_988_749_895).fract();
    let caller = (CALLERS + 1.0).powf(even) as usize;
    let mut request = Request::new(());
    if let Ok(name) = format!("user-{caller:02}").parse() {
        request.headers_mut().insert("x-user", name);
    }
    request
        .extensions_mut()
        .insert(Tier::new(["pro", "free"][caller % 2]));
    request
}
