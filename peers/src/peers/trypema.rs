//! `trypema`.

use std::sync::Arc;

use trypema::hybrid::HybridRateLimiterProvider;
use trypema::local::LocalRateLimiterProvider;
use trypema::redis::{RedisKey, RedisRateLimiterProvider};
use trypema::{BucketSize, RateLimit, RateLimitDecision, RateLimiterBuilder, WindowSize};

use super::connection;
use crate::peer::{Answer, Instance, Peer, Setup, name_of};

#[derive(Clone, Copy, PartialEq)]
pub enum Trypema {
    Local,
    Redis,
    Hybrid,
}

impl Peer for Trypema {
    fn name(&self) -> &'static str {
        match self {
            Self::Local => "trypema, local",
            Self::Redis => "trypema, Redis",
            Self::Hybrid => "trypema, hybrid",
        }
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        let limiter = match self {
            Self::Local => Limiter::Local(build(LocalRateLimiterProvider::builder(), setup)),
            Self::Redis => Limiter::Redis(build(
                RedisRateLimiterProvider::builder(connection(setup)),
                setup,
            )),
            Self::Hybrid => Limiter::Hybrid(build(
                HybridRateLimiterProvider::builder(connection(setup)),
                setup,
            )),
        };
        let per_second = f64::from(setup.quota.limit()) / setup.quota.period().as_secs_f64();
        TrypemaInstance {
            limiter,
            rate: RateLimit::per_second_or_panic(per_second),
        }
    }
}

fn build<B: RateLimiterBuilder>(builder: B, setup: Setup<'_>) -> Arc<B::Provider> {
    let window = WindowSize::seconds_or_panic(setup.quota.period().as_secs());
    // A hundredth of the window, which it then drops at a time, and at most its largest bench's.
    let bucket =
        BucketSize::milliseconds_or_panic(100.min(setup.quota.period().as_millis() as u64 / 100));
    builder
        .window_size(window)
        .bucket_size(bucket)
        .build()
        .unwrap()
}

#[derive(Clone)]
struct TrypemaInstance {
    limiter: Limiter,
    rate: RateLimit,
}

#[derive(Clone)]
enum Limiter {
    Local(Arc<LocalRateLimiterProvider>),
    Redis(Arc<RedisRateLimiterProvider>),
    Hybrid(Arc<HybridRateLimiterProvider>),
}

impl Instance for TrypemaInstance {
    async fn ask(&mut self, caller: u32) -> Answer {
        let name = name_of(caller);
        let key = |name| RedisKey::new_or_panic(name);
        let decision = match &self.limiter {
            Limiter::Local(limiter) => Ok(limiter.absolute().inc(&name, &self.rate, 1)),
            Limiter::Redis(limiter) => limiter.absolute().inc(&key(name), &self.rate, 1).await,
            Limiter::Hybrid(limiter) => limiter.absolute().inc(&key(name), &self.rate, 1).await,
        };
        Answer::of(decision.map(|decision| matches!(decision, RateLimitDecision::Allowed)))
    }
}
