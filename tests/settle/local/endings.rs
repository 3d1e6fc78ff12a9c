//! However a request ends, it is charged exactly its real cost or its reservation, and settled
//! once.

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use proptest::prelude::{Just, Strategy as _, any, prop_oneof, proptest};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;
use tower_redis_ratelimit::check::{Decision, Mode};
use tower_redis_ratelimit::store::{Answer, StoreError};
use tower_redis_ratelimit::{Limiter, Policies};

use super::*;

/// A store that delays its decisions, and its replies.
#[derive(Clone)]
struct Slow {
    local: LocalStore,
    /// The caller and the mode of each check.
    log: Arc<Mutex<Vec<(Key, Mode)>>>,
    polls: (u8, u8),
}

impl Store for Slow {
    type Future = BoxFuture<'static, Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Self { local, log, polls } = self.clone();
        Answer::pending(Box::pin(async move {
            for _ in 0..polls.0 {
                yield_now().await;
            }
            log.lock().unwrap().push((*check.key(), check.mode()));
            let answer = local.check(check).await;
            for _ in 0..polls.1 {
                yield_now().await;
            }
            answer
        }))
    }
}

#[derive(Debug, Clone)]
struct Case {
    reserve: u32,
    /// The units that the handler reserves in addition, and the number of polls for which it waits
    /// for them.
    more: Option<(u32, u8)>,
    settlement: Settlement,
    /// The units that the `RequestCost` counts, in the handler and while the body is sent.
    counts: (Option<u32>, Option<u32>),
    frames: u8,
    end: End,
    hold: Hold,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    OfBody,
    BodyDropped {
        read: u8,
    },
    BodyError {
        read: u8,
    },
    InnerError,
    PanicInCall,
    PanicInFuture,
    PanicInBody,
    TimeOut,
    /// The response is dropped after this number of polls.
    Dropped {
        polls: u8,
    },
    /// It ends only with its runtime.
    Never,
}

/// The owner of the `RequestCost`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Hold {
    Nobody,
    Body,
    /// A task that outlives the body.
    Longer,
}

/// The observed outcome of a request.
#[derive(Default)]
struct Seen {
    units: Mutex<Option<u64>>,
    bytes: AtomicU64,
    head: AtomicBool,
    held: Mutex<Option<RequestCost>>,
    /// Whether the handler got the reply to its additional reservation.
    more_replied: AtomicBool,
    /// Whether the request ended with its runtime.
    runtime_ended: AtomicBool,
}

impl Seen {
    fn count(&self, charge: &RequestCost, units: Option<u32>) {
        if let Some(units) = units {
            charge.add(units);
            *self.units.lock().unwrap().get_or_insert(0) += u64::from(units);
        }
    }

    /// Returns the expected charge, for a reservation of `reserved`.
    fn cost(&self, case: &Case, reserved: u32) -> u32 {
        let counted = self
            .units
            .lock()
            .unwrap()
            .map_or(reserved, |units| units as u32);
        match case.settlement {
            _ if !self.head.load(Relaxed) => counted,
            Settlement::Keep => reserved,
            Settlement::Refund => 0,
            Settlement::Cost(cost) => cost,
            Settlement::Bytes { per } => self.bytes.load(Relaxed).div_ceil(per.get().into()) as u32,
            _ => counted,
        }
    }
}

type Given = (Case, Arc<Seen>);

fn given(request: &Request<String>) -> Given {
    request.extensions().get::<Given>().unwrap().clone()
}

fn handle(
    request: Request<String>,
) -> BoxFuture<'static, Result<Response<Frames>, Box<dyn std::error::Error + Send + Sync>>> {
    let (case, seen) = given(&request);
    if case.end == End::PanicInCall {
        panic_silently("in the call");
    }
    Box::pin(async move {
        let charge = request.extensions().get::<RequestCost>().unwrap().clone();
        drop(request);
        seen.count(&charge, case.counts.0);
        if let Some((units, polls)) = case.more {
            let (charge, seen) = (charge.clone(), Arc::clone(&seen));
            poll_times(
                &mut Box::pin(async move {
                    let granted = charge.reserve(units).await;
                    seen.more_replied.store(true, Relaxed);
                    granted
                }),
                polls,
            )
            .await;
        }
        yield_now().await;
        match case.end {
            End::InnerError => return Err("no response".into()),
            End::PanicInFuture => panic_silently("in the future"),
            End::TimeOut => sleep(Duration::from_secs(3_600)).await,
            End::Never => std::future::pending().await,
            _ => yield_now().await,
        }
        if case.hold == Hold::Longer {
            *seen.held.lock().unwrap() = Some(charge.clone());
        }
        seen.count(&charge, case.counts.1);
        let charge = (case.hold == Hold::Body).then_some(charge);
        let mut left = case.frames;
        let frames = stream::poll_fn(move |_| {
            let _ = &charge;
            let (now, read) = (left, case.frames - left);
            left = left.saturating_sub(1);
            Poll::Ready(match case.end {
                End::BodyError { read: good } if read >= good => Some(Err("broken")),
                End::PanicInBody if now == 0 => panic_silently("in the body"),
                _ => (now > 0).then(|| data("0123456789")),
            })
        });
        let mut response = Response::new(Any(StreamBody::new(Box::pin(frames) as Pin<Box<_>>)));
        response.extensions_mut().insert(case.settlement);
        Ok(response)
    })
}

/// Panics without a message and its backtrace, which takes as long as many requests.
fn panic_silently(payload: &'static str) -> ! {
    resume_unwind(Box::new(payload))
}

/// Polls at most this number of times.
async fn poll_times<F, T, E>(future: &mut Pin<Box<F>>, polls: u8) -> Option<T>
where
    F: Future<Output = Result<T, E>>,
{
    for _ in 0..polls {
        match std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
            Poll::Ready(output) => return output.ok(),
            Poll::Pending => yield_now().await,
        }
    }
    None
}

/// Runs a request to the end that its case describes.
async fn run<S>(mut service: S, request: Request<String>)
where
    S: Service<Request<String>, Response = Response<TrackedBody<Frames>>, Error = tower::BoxError>,
{
    let (case, seen) = given(&request);
    let everything = async {
        let mut response = Box::pin(service.call(request));
        let response = match case.end {
            End::Dropped { polls } => poll_times(&mut response, polls).await,
            _ => response.await.ok(),
        };
        let Some(response) = response else { return };
        seen.head.store(true, Relaxed);
        let mut body = response.into_body();
        let mut read = 0;
        while case.end != (End::BodyDropped { read }) {
            let Some(Ok(frame)) = body.frame().await else {
                break;
            };
            seen.bytes
                .fetch_add(frame.data_ref().unwrap().len() as u64, Relaxed);
            read += 1;
        }
    };
    let _ = timeout(
        Duration::from_secs(60),
        AssertUnwindSafe(everything).catch_unwind(),
    )
    .await;
}

fn case() -> impl proptest::strategy::Strategy<Value = Case> {
    let settlement = prop_oneof![
        1 => Just(Settlement::Keep),
        1 => Just(Settlement::Refund),
        1 => (0..40_u32).prop_map(Settlement::Cost),
        4 => Just(Settlement::AtEnd),
        1 => (1..15_u32).prop_map(|per| Settlement::Bytes { per: NonZeroU32::new(per).unwrap() }),
    ];
    let end = prop_oneof![
        1 => Just(End::OfBody),
        1 => (0..4_u8).prop_map(|read| End::BodyDropped { read }),
        1 => (0..4_u8).prop_map(|read| End::BodyError { read }),
        1 => Just(End::InnerError),
        1 => Just(End::PanicInCall),
        1 => Just(End::PanicInFuture),
        1 => Just(End::PanicInBody),
        1 => Just(End::TimeOut),
        3 => (0..12_u8).prop_map(|polls| End::Dropped { polls }),
    ];
    let hold = prop_oneof![Just(Hold::Nobody), Just(Hold::Body), Just(Hold::Longer)];
    let counts = (
        proptest::option::of(0..30_u32),
        proptest::option::of(0..30_u32),
    );
    let more = proptest::option::of((0..20_u32, 0..12_u8));
    (0..20_u32, more, settlement, counts, 0..4_u8, end, hold).prop_map(
        |(reserve, more, settlement, counts, frames, end, hold)| Case {
            reserve,
            more,
            settlement,
            counts,
            frames,
            end,
            hold,
        },
    )
}

type Everything = SettledLayer<Slow, ByNumber>;
type ByNumber = fn(&http::request::Parts) -> Option<Key>;

fn by_number(request: &http::request::Parts) -> Option<Key> {
    Some(Key::new(request.uri.path()))
}

struct World {
    store: Slow,
    policy: Policy,
    layer: Everything,
}

impl World {
    fn new(polls: (u8, u8)) -> Self {
        let store = Slow {
            local: LocalStore::default(),
            log: Arc::default(),
            polls,
        };
        let policy = quota("test", "1000/d");
        let layer = RateLimitLayer::new(store.clone(), by_number as ByNumber, policy.clone())
            .cost(|request| request.extensions.get::<Given>().unwrap().0.reserve)
            .settle(|response| *response.extensions.get::<Settlement>().unwrap());
        Self {
            store,
            policy,
            layer,
        }
    }

    fn requests(&self, cases: &[Case]) -> Vec<(Request<String>, Arc<Seen>)> {
        let request = |(number, case): (usize, &Case)| {
            let seen = Arc::new(Seen::default());
            let mut request = Request::builder()
                .uri(format!("/{number}"))
                .body(String::new())
                .unwrap();
            request
                .extensions_mut()
                .insert::<Given>((case.clone(), Arc::clone(&seen)));
            (request, seen)
        };
        cases.iter().enumerate().map(request).collect()
    }

    /// Returns a description of a wrong charge, if any.
    fn wrong(&self, number: usize, case: &Case, seen: &Seen) -> Option<String> {
        let key = Key::new(format!("/{number}"));
        let log = self.store.log.lock().unwrap();
        let done = |settles: bool| {
            log.iter()
                .filter(|(of, mode)| *of == key && (*mode != Mode::Take) == settles)
                .count()
        };
        let (takes, settlements) = (done(false), done(true));
        let more = case.more.map_or(0, |(units, _)| units);
        let cost = match takes {
            0 => 0,
            1 => seen.cost(case, case.reserve),
            _ => seen.cost(case, case.reserve + more),
        };
        let charged = charged(&self.store.local, key, &self.policy);
        let settled_once = match takes {
            0 | 1 => settlements == usize::from(takes == 1 && cost != case.reserve),
            // Each part is settled separately.
            _ => settlements <= 2,
        };
        // A reply that is pending at the end of its runtime is lost, so the units stay charged.
        let is_lost = takes > 1
            && seen.runtime_ended.load(Relaxed)
            && !seen.more_replied.load(Relaxed)
            && charged == seen.cost(case, case.reserve) + more;
        (!is_lost && charged != cost || !settled_once).then(|| {
            format!("{case:?}: {charged} charged instead of {cost}, {takes} takes, {settlements} settlements")
        })
    }

    fn all_wrong(&self, cases: &[Case], seen: &[Arc<Seen>]) -> Vec<String> {
        let all = cases.iter().zip(seen).enumerate();
        all.filter_map(|(number, (case, seen))| self.wrong(number, case, seen))
            .collect()
    }

    /// Waits until everything is settled, and a while longer.
    async fn settled(&self, cases: &[Case], seen: &[Arc<Seen>]) {
        for _ in 0..1_000 {
            if self.all_wrong(cases, seen).is_empty() {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
        sleep(Duration::from_millis(20)).await;
        let wrong = self.all_wrong(cases, seen);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn requests_settle_once_however_they_end(
        cases in proptest::collection::vec(case(), 1..12),
        polls in (0..4_u8, 0..4_u8),
    ) {
        runtime().block_on(async {
            let world = World::new(polls);
            let service = world.layer.layer(service_fn(handle));
            let (requests, seen): (Vec<_>, Vec<_>) = world.requests(&cases).into_iter().unzip();
            let all = requests.into_iter().map(|request| run(service.clone(), request));
            futures_util::future::join_all(all).await;
            // Charges that outlive the body are dropped after this.
            sleep(Duration::from_secs(1)).await;
            for seen in &seen {
                seen.held.lock().unwrap().take();
            }
            world.settled(&cases, &seen).await;
        });
    }

    /// The process and another runtime continue.
    #[test]
    fn an_ending_runtime_settles_its_requests(
        cases in proptest::collection::vec((case(), any::<bool>()), 1..12),
        polls in (0..4_u8, 0..4_u8),
        steps in 0..30_u8,
    ) {
        let cases: Vec<Case> = cases
            .into_iter()
            .map(|(case, never)| Case { end: if never { End::Never } else { case.end }, ..case })
            .collect();
        let world = World::new(polls);
        let service = world.layer.layer(service_fn(handle));
        let (requests, seen): (Vec<_>, Vec<_>) = world.requests(&cases).into_iter().unzip();
        let first = runtime();
        first.block_on(async {
            for request in requests {
                tokio::spawn(run(service.clone(), request));
            }
            for _ in 0..steps {
                yield_now().await;
            }
        });
        drop(first);
        for seen in &seen {
            seen.held.lock().unwrap().take();
            seen.runtime_ended.store(true, Relaxed);
        }
        runtime().block_on(async {
            // Another request arrives, and is not denied.
            let other = Case {
                reserve: 1,
                more: None,
                settlement: Settlement::Keep,
                counts: (None, None),
                frames: 0,
                end: End::OfBody,
                hold: Hold::Nobody,
            };
            let cases: Vec<Case> = cases.into_iter().chain([other]).collect();
            let (request, last) = world.requests(&cases).pop().unwrap();
            run(service.clone(), request).await;
            let seen: Vec<_> = seen.into_iter().chain([last]).collect();
            world.settled(&cases, &seen).await;
        });
    }
}

/// No body is read to its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn dropping_10_000_bodies_loses_no_charge() {
    const REQUESTS: u32 = 10_000;
    let store = Slow {
        local: LocalStore::default(),
        log: Arc::default(),
        polls: (1, 1),
    };
    let policy = quota("test", "1000000/d");
    let layer = RateLimitLayer::new(store.clone(), Global, policy.clone())
        .cost(|_| 50)
        .settle(|_| Settlement::AtEnd);
    let service = layer.layer(service_fn(|request: Request<String>| {
        let charge = request.extensions().get::<RequestCost>().unwrap().clone();
        let frames = stream::iter((0..10).map(move |_| {
            charge.add(1);
            data("token")
        }));
        let body: Frames = Any(StreamBody::new(Box::pin(frames) as Pin<Box<_>>));
        async { Ok::<_, Infallible>(Response::new(body)) }
    }));
    let requests: Vec<_> = (0..REQUESTS)
        .map(|_| {
            let service = service.clone();
            tokio::spawn(async move {
                let mut body = service.oneshot(request("alice")).await.unwrap().into_body();
                for _ in 0..5 {
                    body.frame().await.unwrap().unwrap();
                    yield_now().await;
                }
            })
        })
        .collect();
    for request in requests {
        request.await.unwrap();
    }
    let charged = || charged(&store.local, Key::GLOBAL, &policy);
    let settled = async {
        while charged() != REQUESTS * 5 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(
        timeout(Duration::from_secs(60), settled).await.is_ok(),
        "{} charged",
        charged()
    );
    let log = store.log.lock().unwrap();
    assert_eq!(
        log.len(),
        2 * REQUESTS as usize,
        "each is taken and settled once"
    );
}

/// It is unknown whether the reservation was granted. It stays charged, since otherwise clients
/// could avoid the charge by disconnecting.
#[tokio::test(start_paused = true)]
async fn abandoned_reservations_charge_without_staying_in_flight() {
    let (count, streams) = (Count::new(), Policy::in_flight("streams", 4).unwrap());
    let store = Slow {
        local: count.store.clone(),
        log: Arc::default(),
        polls: (1, 5),
    };
    let both = Policies::new([count.policy.clone(), streams.clone()]).unwrap();
    let limiter = Limiter::new(store, both);
    let mut reserving = Box::pin(limiter.reserve(Key::GLOBAL, 500));
    for _ in 0..3 {
        assert!((&mut reserving).now_or_never().is_none());
    }
    drop(reserving);
    let in_flight = || charged(&count.store, Key::GLOBAL, &streams);
    assert_eq!((count.charged(), in_flight()), (500, 1));
    // Much less than a TTL.
    sleep(Duration::from_secs(1)).await;
    assert_eq!((count.charged(), in_flight()), (500, 0));
}
