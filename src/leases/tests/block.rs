//! How one instance spends, refunds and loses its blocks.

use std::cell::Cell;
use std::future::{Pending, pending};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::sleep;

use crate::check::Verdict;
use crate::error::StoreError;
use crate::leases::block::Block;
use crate::limit::{
    Align, Check, Decision, Key, Mode, Policies, Policy, Quota, Refill, Source, Strategy,
};
use crate::observe::Observer;
use crate::simulation::BlockTotals;
use crate::store::op_queue;
use crate::store::{Answer, Fallback, LocalStore, MockStore, Store};
use crate::util::{Seed, instant};
use crate::{Leased, Limiter};

pub(super) const LEASE: Duration = Duration::from_millis(400);

fn policy(strategy: Strategy, quota: &str) -> Policy {
    Policy::new("p", strategy, quota)
        .unwrap()
        .leased(LEASE)
        .unwrap()
}

/// A log: a refund frees its quota immediately.
pub(super) fn log() -> Policies {
    policy(Strategy::SlidingLog, "10000/m").into()
}

pub(super) fn ann() -> Key {
    Key::new("ann")
}

pub(super) async fn take<S: Store>(store: &S, policies: &Policies) -> Decision {
    store.check(Check::take(ann(), policies, 1)).await.unwrap()
}

pub(super) async fn left(store: &LocalStore, policies: &Policies) -> u32 {
    store
        .check(Check::peek(ann(), policies, 1))
        .await
        .unwrap()
        .remaining()
}

/// Returns a store over `local` with a partly spent block, and the units left in the block.
async fn with_block(local: &LocalStore, policies: &Policies) -> (Leased<LocalStore>, u32) {
    let store = Leased::new(local.clone());
    for _ in 0..40 {
        let _ = take(&store, policies).await;
        sleep(Duration::from_millis(1)).await;
    }
    let decision = take(&store, policies).await;
    assert_eq!(decision.source(), Source::Leased);
    let left = store.left();
    assert!(left > 1);
    (store, left as u32)
}

#[tokio::test(start_paused = true)]
async fn nothing_is_spent_after_a_stop() {
    let (policies, local) = (log(), LocalStore::default());
    let decision = local
        .check(Check::up_to(ann(), &policies, 10))
        .await
        .unwrap();
    let sent_at = instant();
    let mut block = Block::new(ann(), decision, sent_at);
    let now = Cell::new(sent_at + LEASE / 8 * 7 - Duration::from_micros(1));
    let check = || Check::take(ann(), &policies, 1);
    let decision = block.take(check(), &|| now.get()).unwrap();
    assert_eq!((decision.remaining(), block.left), (9_999, 9));
    // Simulates a process that is stopped after it has chosen a block and before it reads the clock.
    let stopped = || {
        now.set(now.get() + Duration::from_micros(1));
        now.get()
    };
    assert!(block.take(check(), &stopped).is_err());
    assert_eq!(block.left, 9, "all of it is refunded");
}

#[tokio::test(start_paused = true)]
async fn a_block_expires_with_its_window() {
    let local = LocalStore::default();
    for align in [Align::default(), Align::FirstHit] {
        let policies = policy(Strategy::FixedWindow(align), "1000/s").into();
        sleep(Duration::from_millis(850)).await;
        let decision = local
            .check(Check::up_to(ann(), &policies, 10))
            .await
            .unwrap();
        let (reset, sent_at) = (decision.reset_after(), instant());
        let block = Block::new(ann(), decision, sent_at);
        let lifetime = block.expires_at - sent_at;
        assert!(
            lifetime <= reset && lifetime <= LEASE / 8 * 7 && lifetime >= reset.min(LEASE) / 8 * 6,
            "{lifetime:?} of {reset:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_of_idle_callers_are_refunded() {
    let (local, policies, blocks) = (
        LocalStore::default(),
        log(),
        Arc::new(BlockTotals::default()),
    );
    let (store, _) = with_block(&local, &policies).await;
    store
        .backend()
        .observe(&(Arc::new(Arc::clone(&blocks)) as Arc<dyn Observer>));
    assert!(left(&local, &policies).await < 10_000 - 41);
    sleep(LEASE).await;
    assert_eq!(left(&local, &policies).await, 10_000 - 41);
    assert_eq!(
        take(&store, &policies).await.source(),
        Source::Local,
        "it is idle"
    );
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_store_refunds_its_blocks() {
    for is_shut_down in [true, false] {
        let (local, policies) = (LocalStore::default(), log());
        let (store, _) = with_block(&local, &policies).await;
        if is_shut_down {
            store.shutdown().await;
            assert_eq!(left(&local, &policies).await, 10_000 - 41);
            assert_eq!(take(&store, &policies).await.source(), Source::Local);
        } else {
            drop(store);
            assert_eq!(left(&local, &policies).await, 10_000 - 41);
        }
    }
}

#[test]
fn another_runtime_spends_and_refunds_blocks() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let (local, policies, first) = (LocalStore::default(), log(), runtime());
    let (store, _) = first.block_on(with_block(&local, &policies));
    drop(first);
    runtime().block_on(async {
        assert_eq!(take(&store, &policies).await.source(), Source::Leased);
        let large = Check::take(ann(), &policies, 5_000);
        assert_eq!(store.check(large).await.unwrap().source(), Source::Local);
        sleep(LEASE * 2).await;
        assert_eq!(left(&local, &policies).await, 10_000 - 42 - 5_000);
    });
}

#[tokio::test(start_paused = true)]
async fn a_reset_drops_blocks() {
    let (local, policies) = (LocalStore::default(), log());
    let (store, _) = with_block(&local, &policies).await;
    let _ = store.check(Check::reset(ann(), &policies)).await.unwrap();
    let decision = take(&store, &policies).await;
    assert_eq!(
        (decision.source(), decision.remaining()),
        (Source::Local, 9_999)
    );
    sleep(LEASE * 2).await;
    assert_eq!(
        left(&local, &policies).await,
        9_999,
        "no charge before the reset is refunded"
    );
}

/// Two instances during a rolling deploy, or two routes, may use different quotas.
#[tokio::test(start_paused = true)]
async fn each_quota_of_a_name_has_its_blocks() {
    let (local, policies) = (LocalStore::default(), log());
    let (store, left) = with_block(&local, &policies).await;
    let other = policy(Strategy::SlidingLog, "9000/m").into();
    assert_eq!(take(&store, &other).await.source(), Source::Local);
    let same = policy(Strategy::SlidingLog, "10000/m").into();
    let decision = take(&store, &same).await;
    assert_eq!(
        (decision.source(), store.left() as u32),
        (Source::Leased, left - 1),
        "built for each request"
    );
}

#[tokio::test(start_paused = true)]
async fn other_checks_go_to_the_shared_store() {
    let (local, policies) = (LocalStore::default(), log());
    let (store, _) = with_block(&local, &policies).await;
    let take = |cost| Check::take(ann(), &policies, cost);
    for check in [
        take(0),
        take(5_000),
        take(1).with_id("one"),
        take(1).without_block(),
        Check::take_ahead(ann(), &policies, 1, LEASE),
        Check::up_to(ann(), &policies, 1),
        Check::peek(ann(), &policies, 1),
        Check::charge(ann(), &policies, 1),
        Check::refund(ann(), &policies, 1),
    ] {
        assert_eq!(
            store.check(check.clone()).await.unwrap().source(),
            Source::Local,
            "{check:?}"
        );
    }
    assert_eq!(store.check(take(2)).await.unwrap().source(), Source::Leased);
    let plain = Policy::new("plain", Strategy::Gcra, Quota::per_second(1_000)).unwrap();
    let one_is_not = Policies::new([policies[0].clone(), plain.clone()]).unwrap();
    let in_flight = Policies::new([
        policies[0].clone(),
        Policy::in_flight("calls", 1_000).unwrap(),
    ])
    .unwrap();
    for policies in [plain.into(), one_is_not, in_flight] {
        for _ in 0..40 {
            let check = Check::take(ann(), &policies, 1);
            assert_eq!(
                store.check(check).await.unwrap().source(),
                Source::Local,
                "{policies:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn several_policies_share_a_block() {
    let local = LocalStore::default();
    let hour = Policy::new(
        "hour",
        Strategy::FixedWindow(Align::FirstHit),
        Quota::per_hour(2_000),
    )
    .unwrap();
    let hour = hour.leased(Duration::from_secs(1)).unwrap();
    let policies = Policies::new([policy(Strategy::Gcra, "1000/s burst 5000"), hour]).unwrap();
    let (store, rest) = with_block(&local, &policies).await;
    let decision = take(&store, &policies).await;
    assert_eq!(u64::from(rest - 1), store.left());
    assert_eq!(
        (decision.policy().name(), decision.remaining()),
        ("hour", 2_000 - 42),
        "the one with the least left"
    );
    drop(store);
    assert_eq!(left(&local, &policies).await, 2_000 - 42);
}

/// Clients that obey the header fields would otherwise stop too early.
#[tokio::test(start_paused = true)]
async fn remaining_includes_the_rest_of_the_quota() {
    let (local, policies) = (LocalStore::default(), log());
    let (store, _) = with_block(&local, &policies).await;
    for taken in 42..400 {
        let decision = take(&store, &policies).await;
        assert_eq!(
            decision.remaining(),
            10_000 - taken,
            "{:?}",
            decision.source()
        );
        sleep(Duration::from_millis(1)).await;
    }
    let small = Policy::new("p", Strategy::Gcra, Quota::per_second(1_000))
        .unwrap()
        .leased(LEASE)
        .unwrap()
        .into();
    for _ in 0..1_000 {
        let decision = take(&store, &small).await;
        assert!(
            decision.remaining() <= 600,
            "no more than the capacity: {}",
            decision.remaining()
        );
        sleep(Duration::from_millis(2)).await;
    }
}

/// A local store that pretends to be shared, and replies late to requests for blocks.
#[derive(Clone)]
struct Slow(LocalStore, Duration);

impl Store for Slow {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let (Self(shared, late), is_request) = (self.clone(), check.mode() == Mode::UpTo);
        Answer::pending(Box::pin(async move {
            let decision = shared.check(check.clone()).await?;
            if is_request {
                sleep(late).await;
            }
            let (remaining, reset) = (decision.remaining(), decision.reset_after());
            let verdict = |_: &_| {
                Verdict::allowed()
                    .with_remaining(remaining)
                    .with_reset_after(reset)
            };
            Ok(check.decided(Source::Other("shared"), decision.granted(), verdict))
        }))
    }
}

/// A block that arrives after the deadline of a fallback, or even after its own expiry.
#[tokio::test(start_paused = true)]
async fn late_blocks_are_spent_or_refunded() {
    for late in [150, 300, 360, 600] {
        let (policies, shared) = (log(), LocalStore::default());
        let slow = Slow(shared.clone(), Duration::from_millis(late));
        let store = Leased::new(Fallback::new(slow, LocalStore::default()));
        let mut granted = 0;
        for _ in 0..1_000 {
            granted += take(&store, &policies).await.granted();
            sleep(Duration::from_millis(1)).await;
        }
        sleep(LEASE * 8).await;
        assert_eq!(
            left(&shared, &policies).await,
            10_000 - granted,
            "late by {late} ms"
        );
        assert_eq!(store.callers(), 0, "late by {late} ms");
    }
}

/// Redis may have charged them, or not.
#[tokio::test(start_paused = true)]
async fn unanswered_blocks_are_counted_as_lost() {
    let (store, blocks) = (MockStore::new(), Arc::new(BlockTotals::default()));
    store.fail(StoreError::new(crate::store::ErrorKind::Timeout));
    let leased = Leased::new(store);
    leased
        .backend()
        .observe(&(Arc::new(Arc::clone(&blocks)) as Arc<dyn Observer>));
    for _ in 0..40 {
        let _ = leased.check(Check::take(ann(), &log(), 1)).await;
    }
    assert_eq!(blocks.lost.load(Relaxed), 1);
}

/// A decision from a block can be refunded like any other.
#[tokio::test(start_paused = true)]
async fn leased_decisions_are_refunded() {
    let (local, policies) = (LocalStore::default(), log());
    let (store, _) = with_block(&local, &policies).await;
    let decision = store.check(Check::take(ann(), &policies, 2)).await.unwrap();
    assert_eq!((decision.source(), decision.granted()), (Source::Leased, 2));
    if let Some(back) = decision.refund(ann(), 2, Duration::ZERO) {
        assert_eq!(store.check(back).await.unwrap().granted(), 2);
    }
    drop(store);
    assert_eq!(left(&local, &policies).await, 10_000 - 41);
}

/// Grants of a fallback are charged to Redis later, so a block must not be leased from them.
#[tokio::test(start_paused = true)]
async fn outages_spend_blocks_and_charge_none() {
    let (local, policies) = (LocalStore::default(), log());
    let redis = MockStore::new();
    redis.answer({
        let shared = LocalStore::default();
        move |check| {
            let decision = match shared.check(check.clone()) {
                Answer::Ready { answer } => answer?,
                Answer::Pending { .. } => unreachable!(),
            };
            Ok(
                check.decided(Source::Other("shared"), decision.granted(), |_| {
                    Verdict::allowed().with_remaining(decision.remaining())
                }),
            )
        }
    });
    let store = Leased::builder(Fallback::new(redis.clone(), local.clone()))
        .share(1)
        .build();
    for _ in 0..60 {
        let _ = take(&store, &policies).await;
        sleep(Duration::from_millis(1)).await;
    }
    redis.fail(StoreError::new(crate::store::ErrorKind::Unreachable).not_sent());
    let mut leased = 0;
    for _ in 0..4_000 {
        let decision = take(&store, &policies).await;
        match decision.source() {
            Source::Leased => leased += 1,
            Source::Local => {}
            source => panic!("{source:?}"),
        }
        sleep(Duration::from_millis(1)).await;
    }
    assert!((1..400).contains(&leased), "{leased}");
    let granted = 4_000 - leased;
    let counted = 10_000 - left(&local, &policies).await;
    assert!(counted.abs_diff(granted) < 200, "{counted}, not {granted}");
}

#[tokio::test(start_paused = true)]
async fn a_limiter_spends_blocks() {
    let limiter = Limiter::new(Leased::new(LocalStore::default()), log());
    let mut leased = 0;
    for _ in 0..400 {
        leased += u32::from(limiter.take(ann(), 1).await.unwrap().source() == Source::Leased);
        sleep(Duration::from_millis(1)).await;
    }
    assert!(leased > 350, "{leased}");
}

#[tokio::test(start_paused = true)]
async fn blocks_leave_enough_for_other_instances() {
    let (local, policies) = (LocalStore::default(), log());
    let store = Leased::builder(local.clone()).share(4).build();
    for (count, cost) in [(10, 900), (400, 1), (1, 1)] {
        for _ in 0..count {
            let before = left(&local, &policies).await;
            let decision = store
                .check(Check::take(ann(), &policies, cost))
                .await
                .unwrap();
            assert!(decision.is_allowed());
            // Charged in addition to the check: an eighth of the rest, or one unit to learn the rest.
            let ahead = before - left(&local, &policies).await;
            assert!(ahead <= cost + (before / 8).max(1), "{ahead} of {before}");
            sleep(Duration::from_millis(1)).await;
        }
    }
    assert_eq!(take(&store, &policies).await.source(), Source::Leased);
}

/// Never replies. Counts refunds and requests for blocks.
#[derive(Clone, Default)]
pub(super) struct Stuck(Arc<AtomicU32>, Arc<AtomicU32>);

impl Store for Stuck {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        match check.mode() {
            Mode::Refund => self.0.fetch_add(1, Relaxed),
            Mode::UpTo => self.1.fetch_add(1, Relaxed),
            _ => 0,
        };
        Answer::pending(pending())
    }
}

/// The primary store may have charged them, or not.
#[tokio::test(start_paused = true)]
async fn late_requests_are_not_refunded() {
    for is_dropped in [true, false] {
        let stuck = Stuck::default();
        let mut store = Some(Leased::new(Fallback::new(
            stuck.clone(),
            LocalStore::default(),
        )));
        for _ in 0..40 {
            drop(store.as_ref().unwrap().check(Check::take(ann(), &log(), 1)));
        }
        if is_dropped {
            store = None;
        }
        sleep(LEASE).await;
        assert_eq!(
            (stuck.0.load(Relaxed), stuck.1.load(Relaxed)),
            (0, 1),
            "refunds, and requests"
        );
        drop(store);
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_a_second_at_most() {
    let store = Leased::new(Stuck::default());
    for _ in 0..40 {
        drop(store.check(Check::take(ann(), &log(), 1)));
    }
    let start = instant();
    store.shutdown().await;
    assert_eq!((instant() - start).as_secs(), 1);
}

/// The units that another instance can take from a bucket.
async fn rest(local: &LocalStore, policies: &Policies) -> u32 {
    local
        .check(Check::up_to(ann(), policies, u32::MAX))
        .await
        .unwrap()
        .granted()
}

/// Part of a block is refunded before the rest is due, between that and the sending of the rest, or long after. The
/// drained units must be refunded with one of them at most; otherwise the bucket grants more than its burst.
#[tokio::test(start_paused = true)]
async fn drained_units_are_refunded_once() {
    let greedy = Strategy::TokenBucket(Refill::Greedy);
    for strategy in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        greedy,
        Strategy::TokenBucket(Refill::Interval),
    ] {
        for (stopped, part) in [200, 9_000]
            .into_iter()
            .flat_map(|stopped| [0, 1, 2].map(|part| (stopped, part)))
        {
            let (policies, local) = (
                Policies::from(policy(strategy, "1000/s burst 100000")),
                LocalStore::default(),
            );
            let decision = local
                .check(Check::up_to(ann(), &policies, 40_000))
                .await
                .unwrap();
            let mut block = Block::new(ann(), decision, instant());
            let take = Check::take(ann(), &policies, 20_000);
            let spent = block.take(take, &instant).unwrap();
            let since = instant();
            let refund = async || {
                if let Some(refund) = spent.refund(ann(), 20_000, instant() - since) {
                    let _ = local.check(refund).await.unwrap();
                }
            };
            if part == 0 {
                refund().await;
                block.deduct_refund(20_000);
            }
            let ended = block.into_refund(instant());
            if part == 1 {
                refund().await;
            }
            sleep(Duration::from_millis(stopped)).await;
            let mut granted = rest(&local, &policies).await;
            op_queue(local.clone(), None).put(ended);
            if part == 2 {
                refund().await;
            }
            granted += rest(&local, &policies).await;
            assert!(
                granted <= 100_000,
                "{strategy:?} after {stopped} ms, {part}: {granted}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refunds_of_parts_lower_that_of_the_rest() {
    let (policies, local) = (
        Policies::from(policy(Strategy::Gcra, "1000/s burst 100000")),
        LocalStore::default(),
    );
    let (store, mut before) = with_block(&local, &policies).await;
    // Until a large block has just been started.
    let left = loop {
        let _ = store
            .check(Check::take(ann(), &policies, 20))
            .await
            .unwrap();
        let left = store.left() as u32;
        if left > before + 1_000 && left < 10_000 {
            break left;
        }
        before = left;
        sleep(Duration::from_millis(1)).await;
    };
    let part = store
        .check(Check::take(ann(), &policies, left / 4))
        .await
        .unwrap();
    assert_eq!(part.source(), Source::Leased);
    if let Some(refund) = part.refund(ann(), left / 4, Duration::ZERO) {
        let _ = store.check(refund).await.unwrap();
    }
    sleep(Duration::from_millis(50)).await;
    let _ = rest(&local, &policies).await;
    drop(store);
    let back = rest(&local, &policies).await;
    assert!(
        back > 0 && back <= left - left / 4 - 50 + 20,
        "{back} of {left}: 50 have drained, 20 of them spent"
    );
}

#[tokio::test(start_paused = true)]
async fn blocks_dropped_by_resets_are_observed() {
    let (policies, local, blocks) = (
        log(),
        LocalStore::default(),
        Arc::new(BlockTotals::default()),
    );
    let store = Leased::new(local.clone());
    let observer: Arc<dyn Observer> = Arc::new(blocks.clone());
    store.backend().observe(&observer);
    let mut in_memory = 0;
    for _ in 0..40 {
        in_memory += u32::from(take(&store, &policies).await.source() == Source::Leased);
        sleep(Duration::from_millis(1)).await;
    }
    let charged = 10_000 - left(&local, &policies).await;
    let _ = store.check(Check::reset(ann(), &policies)).await.unwrap();
    sleep(LEASE).await;
    let [reported, refunded, expired] =
        [&blocks.charged, &blocks.refunded, &blocks.expired].map(|count| count.load(Relaxed));
    assert_eq!(
        (reported, refunded + expired),
        (
            u64::from(charged - (40 - in_memory)),
            reported - u64::from(in_memory)
        )
    );
}

#[tokio::test(start_paused = true)]
async fn idle_callers_get_no_block() {
    let (policies, local) = (log(), LocalStore::default());
    let store = Leased::new(local.clone());
    for _ in 0..20 {
        for _ in 0..7 {
            assert_eq!(take(&store, &policies).await.source(), Source::Local);
        }
        sleep(2 * LEASE).await;
    }
    assert_eq!(left(&local, &policies).await, 10_000 - 20 * 7);
}

/// A store that charges blocks immediately and replies later.
#[derive(Clone)]
struct Late(LocalStore, Duration);

impl Store for Late {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let (Self(local, late), is_late) = (self.clone(), check.mode() == Mode::UpTo);
        Answer::pending(Box::pin(async move {
            let answer = local.check(check).await;
            if is_late {
                sleep(late).await;
            }
            answer
        }))
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_granted_after_shutdown_are_refunded() {
    let ends = (0..60)
        .map(|checks| (checks, true))
        .chain((30..60).map(|checks| (checks, false)));
    for (checks, is_shut_down) in ends {
        let (policies, local) = (log(), LocalStore::default());
        let store = Leased::new(Late(local.clone(), Duration::from_millis(5)));
        let mut granted = 0;
        for _ in 0..checks {
            granted += take(&store, &policies).await.granted();
            sleep(Duration::from_millis(1)).await;
        }
        let kept = is_shut_down.then(|| store.clone());
        if is_shut_down {
            store.shutdown().await;
            assert_eq!(
                left(&local, &policies).await,
                10_000 - granted,
                "after {checks} checks"
            );
        }
        drop(store);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(
            left(&local, &policies).await,
            10_000 - granted,
            "after {checks} checks"
        );
        drop(kept);
    }
}

/// The reply comes after the longest wait of a shutdown.
#[tokio::test(start_paused = true)]
async fn blocks_granted_long_after_shutdown_are_refunded() {
    let quota = Quota::per(10_000, Duration::from_secs(100));
    let policy = Policy::new("p", Strategy::SlidingLog, quota)
        .unwrap()
        .leased(Duration::from_secs(20))
        .unwrap();
    let (policies, local) = (policy.into(), LocalStore::default());
    let store = Leased::new(Late(local.clone(), Duration::from_secs(3)));
    let mut granted = 0;
    for _ in 0..3_500 {
        granted += take(&store, &policies).await.granted();
        sleep(Duration::from_millis(1)).await;
    }
    store.shutdown().await;
    assert!(left(&local, &policies).await < 10_000 - granted);
    sleep(Duration::from_secs(3)).await;
    assert_eq!(left(&local, &policies).await, 10_000 - granted);
}

#[tokio::test(start_paused = true)]
async fn setters_keep_the_observer() {
    let (policies, blocks) = (log(), Arc::new(BlockTotals::default()));
    let store = Leased::builder(LocalStore::default())
        .observer(Arc::clone(&blocks))
        .share(2)
        .max_callers(NonZeroUsize::MIN)
        .build();
    for _ in 0..40 {
        let _ = take(&store, &policies).await;
        sleep(Duration::from_millis(1)).await;
    }
    store.shutdown().await;
    assert!(blocks.ended.load(Relaxed) > 0);
}

/// A block that is left at midnight is not spent on the next day.
#[tokio::test(start_paused = true)]
async fn blocks_end_with_the_day_of_a_calendar() {
    let before = Duration::from_millis(300);
    let midnight = Duration::from_secs(20_000 * 86_400);
    let local = {
        let _seed = Seed::set(0, midnight - before);
        LocalStore::default()
    };
    let policies = policy("fixed-window(day)".parse().unwrap(), "1000/d").into();
    let store = Leased::new(local.clone());
    let start = instant();
    while start.elapsed() < before {
        let _ = take(&store, &policies).await;
        sleep(Duration::from_millis(1)).await;
    }
    assert!(store.left() > 10, "{} units left", store.left());
    let (mut granted, mut leased) = (0, 0);
    for _ in 0..1_500 {
        let decision = take(&store, &policies).await;
        granted += decision.granted();
        leased += u32::from(decision.source() == Source::Leased);
        sleep(Duration::from_millis(1)).await;
    }
    assert!((990..=1_000).contains(&granted), "{granted}");
    assert!(leased > 500, "{leased}");
}
