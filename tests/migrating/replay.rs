//! Random requests by seed, which another limiter and ours decide each for itself.

use std::time::Duration;

use fastrand::Rng;
use tokio::runtime;
use tokio::time::advance;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, Strategy};

/// When all traces begin, in microseconds: at a full hour, so that windows of the clock begin too.
const START: i64 = 1_699_999_200_000_000;
const HOUR: i64 = 3_600_000_000;

pub(crate) const MILLISECOND: i64 = 1_000;
pub(crate) const SECOND: i64 = 1_000_000;

#[derive(Clone, Copy)]
pub(crate) struct Request {
    /// Microseconds since the Unix epoch.
    pub(crate) at: i64,
    pub(crate) cost: u32,
}

/// The requests at these times, in microseconds from the start, of a cost of one.
pub(crate) fn at(times: impl IntoIterator<Item = i64>) -> Vec<Request> {
    times
        .into_iter()
        .map(|time| Request {
            at: START + time,
            cost: 1,
        })
        .collect()
}

/// Returns `count` requests, a fifth more than the quota allows. Half of them arrive together with the previous one, and once in
/// three limits there is silence for up to two periods. Their times are multiples of `grain`.
pub(crate) fn trace(
    seed: u64,
    count: usize,
    quota: Quota,
    grain: i64,
    max_cost: u32,
) -> Vec<Request> {
    let mut rng = Rng::with_seed(seed);
    let period = quota.period().as_micros() as i64;
    let max_cost = max_cost.min(quota.capacity());
    let mut time = START;
    let mut request = || {
        let gap = match rng.u32(0..6 * quota.limit()) {
            0 | 1 => rng.i64(0..2 * period),
            even if even % 2 == 0 => 0,
            _ => rng.i64(0..period / i64::from(quota.limit()) * i64::from(max_cost + 3) / 2),
        };
        time += (gap + grain / 2) / grain * grain;
        Request {
            at: time,
            cost: if rng.bool() { 1 } else { rng.u32(1..=max_cost) },
        }
    };
    (0..count).map(|_| request()).collect()
}

/// Builds the check of a request.
pub(crate) type Ask = fn(Key, &Policies, u32) -> Check;

/// Which of the requests ours lets pass: a `LocalStore`, which decides as Redis does, bit for bit, at the times of the trace.
pub(crate) fn ours(policies: &Policies, requests: &[Request]) -> Vec<bool> {
    asked(Check::take, policies, requests)
}

/// Returns the grants by other checks than takes.
pub(crate) fn asked(ask: Ask, policies: &Policies, requests: &[Request]) -> Vec<bool> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = LocalStore::default();
        // It has taken the time of day from the wall. A charged window of the clock shows when an hour is full.
        let hour = Quota::per_hour(1);
        let hour = Policy::new("hour", Strategy::FixedWindow(Align::default()), hour)
            .unwrap()
            .into();
        let full = store
            .check(Check::take(Key::GLOBAL, &hour, 1))
            .await
            .unwrap()
            .reset_after();
        advance(full + Duration::from_micros((START % HOUR) as u64)).await;
        let mut now = START;
        let mut decided = vec![];
        for request in requests {
            if request.at > now {
                advance(Duration::from_micros((request.at - now) as u64)).await;
                now = request.at;
            }
            let check = ask(Key::GLOBAL, policies, request.cost);
            decided.push(store.check(check).await.unwrap().granted() == request.cost);
        }
        decided
    })
}

/// The largest sum of grants within any period, (now - P, now].
pub(crate) fn most(period: Duration, requests: &[Request], granted: &[bool]) -> u32 {
    let period = period.as_micros() as i64;
    let granted: Vec<Request> = requests
        .iter()
        .zip(granted)
        .filter(|(_, granted)| **granted)
        .map(|(request, _)| *request)
        .collect();
    let (mut first, mut sum, mut most) = (0, 0, 0);
    for request in &granted {
        sum += request.cost;
        while granted[first].at <= request.at - period {
            sum -= granted[first].cost;
            first += 1;
        }
        most = most.max(sum);
    }
    most
}
