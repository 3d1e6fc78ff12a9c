//! Decisions per second of one instance.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use benches::meter::{Amount, Measure, load};
use benches::support::RedisServer;
use fastrand::Rng;
use futures_util::future::join_all;
use tower_redis_ratelimit::Quota;

use crate::peer::{Answer, Instance, PATIENT, Peer, Setup};

/// Callers, where there are many.
const MANY: u32 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// One caller that never reaches the limit.
    Granted,
    /// One caller that has reached the limit.
    Denied,
    /// 100,000 callers, counted over an hour, each with earlier requests.
    Living,
    /// 100,000 callers, whose counts expire soon after a request.
    ShortLived,
    /// One caller under ten limits that it never reaches.
    TenLimits,
}

impl Load {
    pub fn name(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Denied => "denied",
            Self::Living => "100k living",
            Self::ShortLived => "100k short-lived",
            Self::TenLimits => "ten limits",
        }
    }

    fn quota(self) -> Quota {
        match self {
            // More than any of them decides in a run.
            Self::Granted | Self::TenLimits => Quota::per_day(4_000_000_000),
            Self::Denied => Quota::per_hour(1),
            Self::Living => Quota::per_hour(1_000),
            Self::ShortLived => Quota::per_second(100),
        }
    }

    fn callers(self) -> u32 {
        match self {
            Self::Granted | Self::Denied | Self::TenLimits => 1,
            Self::Living | Self::ShortLived => MANY,
        }
    }

    fn limits(self) -> u32 {
        if self == Self::TenLimits { 10 } else { 1 }
    }

    fn answer(self) -> Answer {
        if self == Self::Denied {
            Answer::Denied
        } else {
            Answer::Passed
        }
    }
}

pub async fn measure(
    peer: impl Peer,
    server: &RedisServer,
    what: Load,
    tasks: u64,
    amount: Amount,
) -> Measure {
    let _: String = server.command("FLUSHALL").await;
    let instance = peer
        .instance(Setup {
            server,
            quota: what.quota(),
            limits: what.limits(),
            instances: 1,
            deadline: PATIENT,
        })
        .await;
    if what != Load::ShortLived {
        ask_each(&instance, what.callers()).await;
    }
    let (right, wrong) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let measure = load(&[server], tasks, amount, |mut meter| {
        let mut instance = instance.clone();
        let (right, wrong) = (Arc::clone(&right), Arc::clone(&wrong));
        async move {
            let mut counts = [0, 0];
            while meter.should_continue() {
                let answer = instance.ask(caller(what, &mut meter.rng)).await;
                counts[usize::from(answer != what.answer())] += 1;
                meter.record();
                // Where nothing waits, tasks take turns as requests would.
                tokio::task::coop::consume_budget().await;
            }
            right.fetch_add(counts[0], Ordering::Relaxed);
            wrong.fetch_add(counts[1], Ordering::Relaxed);
            meter
        }
    })
    .await;
    let [right, wrong] = [right, wrong].map(|count| count.load(Ordering::Relaxed));
    // Do not count failures, or other decisions than the expected one, as fast decisions.
    assert!(
        wrong <= right / 1_000,
        "{}, {}: {wrong} of {right} answers were others",
        peer.name(),
        what.name()
    );
    measure
}

fn caller(what: Load, rng: &mut Rng) -> u32 {
    rng.u32(..what.callers())
}

async fn ask_each(instance: &impl Instance, callers: u32) {
    const TASKS: u32 = 256;
    let ask = |first| {
        let mut instance = instance.clone();
        tokio::spawn(async move {
            for caller in (first..callers).step_by(TASKS as usize) {
                instance.ask(caller).await;
            }
        })
    };
    join_all((0..TASKS).map(ask))
        .await
        .into_iter()
        .for_each(Result::unwrap);
}
