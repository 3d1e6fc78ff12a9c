//! When blocks are requested, and their size.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{advance, sleep};

use super::block::{LEASE, Stuck, ann, log, take};
use crate::Leased;
use crate::check::Verdict;
use crate::error::{ErrorKind, StoreError};
use crate::leases::block::Block;
use crate::leases::caller::{BlockRequest, BusyCaller};
use crate::limit::{Check, Decision, Key, Mode, Policies, Policy, Quota, Source, Strategy};
use crate::store::{Answer, LocalStore, MockStore, Store};
use crate::util::instant;

fn next_request(caller: &mut BusyCaller) -> Option<BlockRequest> {
    caller.next_request(&instant, 1)
}

fn spend(caller: &mut BusyCaller, policies: &Policies, cost: u32) -> Result<Decision, Check> {
    caller.add_demand(cost);
    caller.spend(Check::take(ann(), policies, cost), &instant, &mut vec![])
}

#[tokio::test(start_paused = true)]
async fn a_quarter_left_requests_the_next() {
    let (policies, mut caller) = (log(), BusyCaller::new(LEASE, instant()));
    caller.add_demand(1);
    let first = next_request(&mut caller).unwrap();
    let decision = LocalStore::default()
        .check(Check::up_to(ann(), &policies, 100))
        .await
        .unwrap();
    let block = Block::new(ann(), decision, first.sent_at);
    caller.on_reply(&first, Some(block), instant());
    for left in (0..100).rev() {
        assert!(spend(&mut caller, &policies, 1).is_ok());
        assert_eq!(
            next_request(&mut caller).is_some(),
            left == 25,
            "{left} are left"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_is_for_half_a_lease() {
    let (policies, mut caller) = (log(), BusyCaller::new(LEASE, instant()));
    // Each reply grants nothing and reports a large remaining quota.
    let request_size = |caller: &mut BusyCaller| {
        let request = next_request(caller)?;
        let check = Check::up_to(ann(), &policies, request.size);
        let decision = check.decided(Source::Other("shared"), 0, |_| Verdict::allowed());
        let block = Block::new(ann(), decision, request.sent_at);
        caller.on_reply(&request, Some(block), instant());
        Some(request.size)
    };
    caller.add_demand(1);
    assert_eq!(request_size(&mut caller), Some(1), "the rest is unknown");
    for _ in 0..40 {
        advance(Duration::from_millis(1)).await;
        let _ = spend(&mut caller, &policies, 3);
    }
    assert_eq!(
        request_size(&mut caller),
        Some(600),
        "3 a millisecond, for 200 ms"
    );
    let _ = spend(&mut caller, &policies, 40);
    assert_eq!(
        request_size(&mut caller),
        Some(320),
        "all of it came in one moment"
    );
}

fn block_requests(store: &MockStore) -> usize {
    store
        .asked()
        .iter()
        .filter(|check| check.mode() == Mode::UpTo)
        .count()
}

#[tokio::test(start_paused = true)]
async fn callers_at_their_limit_rarely_request() {
    let (store, local) = (MockStore::new(), LocalStore::default());
    store.answer(move |check| match local.check(check.clone()) {
        Answer::Ready { answer } => answer,
        Answer::Pending { .. } => unreachable!(),
    });
    let leased = Leased::new(store.clone());
    let few = Policy::new("p", Strategy::SlidingLog, Quota::per_minute(20))
        .unwrap()
        .leased(LEASE)
        .unwrap()
        .into();
    let requests_in = async |millis| {
        let before = block_requests(&store);
        for _ in 0..millis {
            let _ = take(&leased, &few).await;
            sleep(Duration::from_millis(1)).await;
        }
        block_requests(&store) - before
    };
    let _ = requests_in(200).await;
    let requests = requests_in(1_000).await;
    assert!(
        (2..=10).contains(&requests),
        "{requests} requests in 1 s, a quarter of a lease time apart"
    );
}

/// The first request may have been charged. An unsent one may no longer be needed when it can be sent.
#[tokio::test(start_paused = true)]
async fn unanswered_requests_are_not_repeated() {
    let error = || StoreError::new(ErrorKind::Timeout).check_only();
    for error in [error(), error().not_sent()] {
        let store = MockStore::new();
        store.fail(error);
        let leased = Leased::new(store.clone());
        for _ in 0..40 {
            let _ = leased.check(Check::take(ann(), &log(), 1)).await;
            sleep(Duration::from_millis(1)).await;
        }
        sleep(LEASE * 4).await;
        assert_eq!(block_requests(&store), 1);
    }
}

/// A store that charges blocks only when the test allows it.
#[derive(Clone)]
struct OnPermit(LocalStore, Arc<Semaphore>);

impl Store for OnPermit {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Self(local, permits) = self.clone();
        Answer::pending(Box::pin(async move {
            let is_request = check.mode() == Mode::UpTo;
            let _permit = if is_request {
                permits.acquire().await.ok()
            } else {
                None
            };
            local.check(check).await
        }))
    }
}

#[test]
fn other_runtimes_await_requests() {
    let runtime = || -> Runtime {
        Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let (policies, permits, first) = (log(), Arc::new(Semaphore::new(0)), runtime());
    let store = Leased::new(OnPermit(LocalStore::default(), Arc::clone(&permits)));
    let some = async || {
        let mut leased = 0;
        for _ in 0..40 {
            leased += u32::from(take(&store, &policies).await.source() == Source::Leased);
            sleep(Duration::from_millis(1)).await;
        }
        leased
    };
    assert_eq!(first.block_on(some()), 0);
    drop(first);
    permits.add_permits(1);
    assert!(runtime().block_on(some()) > 0, "it got a block");
}

/// Memory does not grow with the number of callers.
#[tokio::test(start_paused = true)]
async fn callers_with_blocks_are_bounded() {
    const MAX: usize = 64 * 1_024;
    let (leased, policies) = (Leased::new(Stuck::default()), log());
    for caller in 0..MAX as u64 + 6_000 {
        for _ in 0..16 {
            drop(leased.check(Check::take(Key::from(caller), &policies, 1)));
        }
    }
    assert!(
        (MAX - 1_000..=MAX).contains(&leased.callers()),
        "{}",
        leased.callers()
    );
}
