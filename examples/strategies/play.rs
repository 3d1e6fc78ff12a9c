//! Requests in a pattern, decided by each strategy on a simulated clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::runtime;
use tokio::time::advance;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, Strategy};

/// Bounds of a play.
const MAX_REQUESTS: usize = 10_000;
const MAX_TIME: Duration = Duration::from_secs(366 * 24 * 3_600);
/// Duration of a play, in periods of the quota.
const PERIODS: u32 = 3;

/// When requests come. At 0, a window of the clock begins.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pattern {
    /// A fifth more than the limit, evenly spread.
    Steady,
    /// Twice the largest burst in one moment, two times.
    Burst,
    /// The limit shortly before a window of the clock ends, and again shortly after.
    Border,
    /// Five times the limit, evenly spread, whatever the responses say.
    Greedy,
    /// As many as pass: after a denial the client waits for its `Retry-After`.
    Polite,
}

/// What somebody wants to see.
#[derive(Deserialize)]
pub(crate) struct Input {
    pub(crate) quota: String,
    pub(crate) pattern: Pattern,
}

/// The decisions of all strategies.
#[derive(Serialize)]
pub(crate) struct Plays {
    /// In seconds.
    pub(crate) period: f64,
    pub(crate) duration: f64,
    pub(crate) plays: Vec<Play>,
}

/// The decisions of one strategy.
#[derive(Serialize)]
pub(crate) struct Play {
    pub(crate) strategy: String,
    /// Why the strategy does not take the quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    pub(crate) requests: Vec<Answer>,
    pub(crate) granted: usize,
    /// The largest number of grants in a period, wherever it begins.
    pub(crate) most: usize,
}

/// The response to a request.
#[derive(Serialize)]
pub(crate) struct Answer {
    /// In seconds from the beginning, and exactly.
    pub(crate) at: f64,
    #[serde(skip)]
    time: Duration,
    pub(crate) is_allowed: bool,
    /// The `Retry-After` of a denied request, in whole seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retry_after: Option<u64>,
}

/// Plays the pattern under every strategy.
///
/// # Errors
///
/// If the quota is wrong, or the play would be too long.
pub(crate) fn play_all(input: &Input) -> Result<Plays, String> {
    let quota: Quota = input.quota.parse().map_err(|error| format!("{error}"))?;
    let duration = quota.period().saturating_mul(PERIODS);
    if duration > MAX_TIME {
        return Err(format!(
            "three periods of {quota} are more than a year: use a shorter period"
        ));
    }
    let arrivals = arrivals(quota, input.pattern)?;
    let mut strategies = Strategy::ALL.to_vec();
    // The default first.
    strategies.sort_by_key(|strategy| *strategy != Strategy::default());
    let mut plays = vec![];
    for strategy in strategies {
        plays.push(play(strategy, quota, arrivals.as_deref()));
    }
    Ok(Plays {
        period: quota.period().as_secs_f64(),
        duration: duration.as_secs_f64(),
        plays,
    })
}

/// Returns the times of the requests, or `None` if they depend on the responses.
fn arrivals(quota: Quota, pattern: Pattern) -> Result<Option<Vec<Duration>>, String> {
    let (limit, period) = (quota.limit() as usize, quota.period());
    let evenly = |count: usize| -> Vec<Duration> {
        let step = (period * PERIODS).as_secs_f64() / count.max(1) as f64;
        (0..count)
            .map(|i| Duration::from_secs_f64(step * i as f64))
            .collect()
    };
    let count = match pattern {
        Pattern::Steady => limit * 18 / 5,
        Pattern::Burst => 4 * limit.max(quota.capacity() as usize),
        Pattern::Border => 2 * limit,
        Pattern::Greedy => 15 * limit,
        Pattern::Polite => limit * PERIODS as usize,
    };
    if count > MAX_REQUESTS {
        return Err(format!(
            "this pattern has {count} requests under {quota}, more than {MAX_REQUESTS}: use a smaller quota"
        ));
    }
    Ok(match pattern {
        Pattern::Steady | Pattern::Greedy => Some(evenly(count)),
        Pattern::Burst => Some(two_bursts(count, period / 2, period * 2)),
        Pattern::Border => Some(two_bursts(count, period * 49 / 50, period * 51 / 50)),
        Pattern::Polite => None,
    })
}

/// Half of the requests at each time.
fn two_bursts(count: usize, first: Duration, second: Duration) -> Vec<Duration> {
    let mut times = vec![first; count / 2];
    times.resize(count, second);
    times
}

fn play(strategy: Strategy, quota: Quota, arrivals: Option<&[Duration]>) -> Play {
    let requests = requests(strategy, quota, arrivals);
    let (requests, error) = match requests {
        Ok(requests) => (requests, None),
        Err(error) => (vec![], Some(error)),
    };
    Play {
        strategy: strategy.to_string(),
        error,
        granted: requests.iter().filter(|answer| answer.is_allowed).count(),
        most: most(&requests, quota.period()),
        requests,
    }
}

fn requests(
    strategy: Strategy,
    quota: Quota,
    arrivals: Option<&[Duration]>,
) -> Result<Vec<Answer>, String> {
    let policy = Policy::new("play", strategy, quota).map_err(|error| error.to_string())?;
    // Time passes only by `advance`, so a year takes milliseconds.
    let runtime = runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let mut client = Client {
            store: LocalStore::default(),
            policies: policy.into(),
            now: Duration::ZERO,
            answers: vec![],
        };
        client.wait_for_border(quota).await?;
        match arrivals {
            Some(times) => {
                for time in times {
                    client.sleep_until(*time).await;
                    client.send().await?;
                }
            }
            None => client.obey(quota).await?,
        }
        Ok(client.answers)
    })
}

struct Client {
    store: LocalStore,
    policies: Policies,
    /// Since the beginning.
    now: Duration,
    answers: Vec<Answer>,
}

impl Client {
    /// The store took the time of day from the wall. Waits until a window of the clock begins.
    async fn wait_for_border(&mut self, quota: Quota) -> Result<(), String> {
        let window = Strategy::FixedWindow(Align::default());
        let quota = Quota::per(1, quota.period());
        let policies = Policy::new("border", window, quota).map_err(|error| error.to_string())?;
        let take = Check::take(Key::GLOBAL, &policies.into(), 1);
        let decision = self
            .store
            .check(take)
            .await
            .map_err(|error| error.to_string())?;
        advance(decision.reset_after()).await;
        Ok(())
    }

    async fn sleep_until(&mut self, time: Duration) {
        if let Some(wait) = time.checked_sub(self.now).filter(|wait| !wait.is_zero()) {
            advance(wait).await;
            self.now = time;
        }
    }

    /// Sends a request. Returns how long a denied client is to wait.
    async fn send(&mut self) -> Result<Option<Duration>, String> {
        let take = Check::take(Key::GLOBAL, &self.policies, 1);
        let decision = self
            .store
            .check(take)
            .await
            .map_err(|error| error.to_string())?;
        let wait = decision.retry_after();
        let told = wait.map(|wait| wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
        self.answers.push(Answer {
            at: self.now.as_secs_f64(),
            time: self.now,
            is_allowed: decision.is_allowed(),
            retry_after: told,
        });
        Ok(told.map(Duration::from_secs))
    }

    /// Sends requests as fast as a tenth of the limit's interval, and waits after denials.
    async fn obey(&mut self, quota: Quota) -> Result<(), String> {
        let end = quota.period() * PERIODS;
        let interval = quota.period() / quota.limit() / 10;
        while self.now < end && self.answers.len() < MAX_REQUESTS {
            let wait = self.send().await?;
            self.sleep_until(self.now + wait.unwrap_or(interval).max(Duration::from_micros(1)))
                .await;
        }
        Ok(())
    }
}

/// Returns the largest number of grants in a period.
fn most(requests: &[Answer], period: Duration) -> usize {
    let granted: Vec<Duration> = requests
        .iter()
        .filter(|answer| answer.is_allowed)
        .map(|answer| answer.time)
        .collect();
    let mut first = 0;
    let mut most = 0;
    for (i, at) in granted.iter().enumerate() {
        while granted[first] + period <= *at {
            first += 1;
        }
        most = most.max(i + 1 - first);
    }
    most
}
