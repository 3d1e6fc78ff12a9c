//! Refunds and resets undo earlier charges in either store, and nothing else.

use std::future::Pending;
use std::time::SystemTime;

use super::super::accounts::Accounts;
use super::*;
use crate::background::PendingOp;
use crate::limit::{Align, Charge, Counts, Mode, Source};
use crate::store::op_queue;
use crate::util::{Seed, instant};

async fn take(store: &Tested, policies: &Policies, cost: u32) -> (Decision, tokio::time::Instant) {
    let asked_at = instant();
    let decision = store
        .check(Check::take(ann(), policies, cost))
        .await
        .unwrap();
    assert!(decision.is_allowed());
    (decision, asked_at)
}

/// Puts a refund of a part of the charge into the background queue.
async fn refund(
    store: &Tested,
    (decision, asked_at): &(Decision, tokio::time::Instant),
    cost: u32,
) {
    let charge = Charge::new(
        ann(),
        decision.clone(),
        decision.granted(),
        *asked_at,
        instant(),
    );
    op_queue(store.clone(), None).put(PendingOp::refund(charge, cost));
}

/// Waits without checks until everything is reconciled.
async fn rest() {
    sleep(Duration::from_secs(2)).await;
}

#[tokio::test(start_paused = true)]
async fn an_outage_refund_spares_newer_charges() {
    for strategy in [Strategy::SlidingLog, Strategy::SlidingWindow { cells: 10 }] {
        for earlier in [false, true] {
            let (store, primary, _) = pair(1);
            let policies = policies(strategy, "200/100s");
            if earlier {
                // The charge is of an outage that is reconciled before the refund.
                open(&store, &primary).await;
            }
            let first = take(&store, &policies, 100).await;
            if earlier {
                close(&store, &primary).await;
            }
            sleep(Duration::from_secs(80)).await;
            open(&store, &primary).await;
            let _ = take(&store, &policies, 90).await;
            refund(&store, &first, 90).await;
            close(&store, &primary).await;
            rest().await;
            let before = primary.used(&policies).await;
            sleep(Duration::from_secs(40)).await;
            let after = primary.used(&policies).await;
            assert_eq!(
                (before, after),
                (100, 90),
                "{strategy}, of a local charge: {earlier}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn charges_before_an_outage_are_refundable() {
    for &strategy in Strategy::ALL {
        for taken in [0, 1, 50, 200] {
            let (store, primary, _) = pair(1);
            let policies = policies(strategy, "10000/100d");
            let first = take(&store, &policies, 100).await;
            open(&store, &primary).await;
            if taken > 0 {
                let _ = take(&store, &policies, taken).await;
            }
            refund(&store, &first, 90).await;
            close(&store, &primary).await;
            rest().await;
            assert_eq!(
                primary.used(&policies).await,
                10 + taken,
                "{strategy}, {taken} taken locally"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refunds_survive_a_full_queue() {
    for &strategy in Strategy::ALL {
        let (store, primary, _) = pair(1);
        let policies = policies(strategy, "1000/100d");
        let first = take(&store, &policies, 500).await;
        primary.set(Manner::Each(queue_full));
        let _ = take(&store, &policies, 1).await;
        refund(&store, &first, 499).await;
        primary.set(Manner::AtOnce);
        let _ = store
            .check(Check::peek(Key::new("somebody"), &policies, 1))
            .await
            .unwrap();
        rest().await;
        assert_eq!(primary.used(&policies).await, 2, "{strategy}");
    }
}

/// The only grant that the primary store lacks is on its way there.
#[tokio::test(start_paused = true)]
async fn an_unnamed_refund_is_not_lost_in_a_reconciliation() {
    for &strategy in Strategy::ALL {
        let (store, primary, _) = pair(1);
        let policies = policies(strategy, "100/100d");
        let _ = take(&store, &policies, 50).await;
        primary.set(Manner::Each(queue_full));
        let _ = take(&store, &policies, 1).await;
        let asked = primary.asked();
        primary.set(Manner::After(Duration::from_millis(80)));
        while primary.asked() == asked {
            sleep(Duration::from_millis(1)).await;
        }
        let refund = || store.check(Check::refund(ann(), &policies, 30));
        let error = refund().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotReady);
        assert!(error.is_not_sent(), "it can be retried");
        let text = "the primary store cannot decide now: send it again";
        assert_eq!(error.to_string(), text);
        rest().await;
        let refunded = refund().await.unwrap();
        assert_eq!(refunded.source(), Source::Redis);
        assert_eq!(primary.used(&policies).await, 21, "{strategy}");
    }
}

/// The reconciling charge is in flight. It succeeds, or fails unsent and is sent again.
#[tokio::test(start_paused = true)]
async fn a_refund_waits_for_its_reconciliation() {
    for &strategy in Strategy::ALL {
        for fails in [false, true] {
            let (store, primary, _) = pair(1);
            let policies = policies(strategy, "1000/100d");
            primary.set(Manner::Each(queue_full));
            let held = take(&store, &policies, 500).await;
            let asked = primary.asked();
            primary.set(if fails {
                Manner::Late(unsent)
            } else {
                Manner::After(Duration::from_millis(80))
            });
            while primary.asked() == asked {
                sleep(Duration::from_millis(1)).await;
            }
            refund(&store, &held, 499).await;
            let _ = take(&store, &policies, 20).await;
            primary.set(Manner::AtOnce);
            rest().await;
            assert_eq!(
                primary.used(&policies).await,
                21,
                "{strategy}, fails: {fails}"
            );
        }
    }
}

/// In a new window, and in the later half of a window that began earlier in the primary store than
/// in the fallback.
#[tokio::test(start_paused = true)]
async fn a_refund_never_overtakes_its_charge() {
    for &strategy in Strategy::ALL {
        for (others, later) in [(0, 0), (5, 0), (5, 6_000)] {
            for after in [0, 5, 500] {
                // The clock begins at the start of a window.
                let _seed = Seed::set(1, Duration::from_secs(1_700_000_000));
                let (store, primary, _) = pair(1);
                let policies = policies(strategy, "1000/10000s");
                if others > 0 {
                    let _ = take(&store, &policies, others).await;
                }
                sleep(Duration::from_secs(later)).await;
                let before = primary.used(&policies).await;
                primary.set(Manner::Each(queue_full));
                let held = take(&store, &policies, 500).await;
                primary.set(Manner::AtOnce);
                sleep(Duration::from_millis(after)).await;
                refund(&store, &held, 499).await;
                rest().await;
                let used = primary.used(&policies).await;
                assert!(
                    used.abs_diff(before + 1) <= u32::from(strategy.frees().is_gradual()),
                    "{strategy}: {used} are counted, of {before} and 1, after {later} s and {after} ms"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_reset_never_overtakes_earlier_charges() {
    for after in [0, 5] {
        let (store, primary, _) = pair(1);
        let policies = policies(Strategy::SlidingLog, "1000/h");
        let _ = take(&store, &policies, 10).await;
        primary.set(Manner::Each(queue_full));
        let held = take(&store, &policies, 500).await;
        primary.set(Manner::AtOnce);
        sleep(Duration::from_millis(after)).await;
        let _ = store.check(Check::reset(ann(), &policies)).await.unwrap();
        // The reset drops the charge, so nothing is refunded.
        primary.set(Manner::Each(queue_full));
        let _ = take(&store, &policies, 7).await;
        refund(&store, &held, 499).await;
        primary.set(Manner::AtOnce);
        rest().await;
        assert_eq!(primary.used(&policies).await, 7, "reset after {after} ms");
    }
}

/// A reconciliation sends the reset, and the primary store does not reply.
#[tokio::test(start_paused = true)]
async fn reconciling_resets_without_replies_are_repeated() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::SlidingLog, "1000/h");
    let _ = take(&store, &policies, 10).await;
    primary.set(Manner::Each(queue_full));
    let _ = take(&store, &policies, 1).await;
    let _ = store.check(Check::reset(ann(), &policies)).await.unwrap();
    let asked = primary.asked();
    primary.set(Manner::Silent);
    while primary.asked() == asked {
        sleep(Duration::from_millis(1)).await;
    }
    primary.set(Manner::AtOnce);
    rest().await;
    assert_eq!(primary.used(&policies).await, 0);
    // It is repeated until there is a reply.
    let _ = take(&store, &policies, 3).await;
    rest().await;
    assert_eq!(primary.used(&policies).await, 3);
}

/// A client sends the reset. The fallback has reset its counts after the deadline, so the reset
/// returns a decision and no error.
#[tokio::test(start_paused = true)]
async fn client_resets_without_replies_are_repeated() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::SlidingLog, "1000/h");
    let _ = take(&store, &policies, 10).await;
    primary.set(Manner::Silent);
    let _ = store.check(Check::reset(ann(), &policies)).await.unwrap();
    primary.set(Manner::AtOnce);
    rest().await;
    assert_eq!(primary.used(&policies).await, 0);
}

/// The account of the other instance lacks the charge.
#[tokio::test(start_paused = true)]
async fn another_instance_refunds_only_what_it_granted() {
    for &strategy in Strategy::ALL {
        let (other, primary, _) = pair(1);
        let store = Fallback::new(primary.clone(), LocalStore::default());
        let policies = policies(strategy, "10000/100d");
        let _ = take(&store, &policies, 600).await;
        primary.set(Manner::Each(queue_full));
        let _ = take(&other, &policies, 1).await;
        let held = take(&store, &policies, 500).await;
        refund(&other, &held, 499).await;
        primary.set(Manner::AtOnce);
        rest().await;
        assert_eq!(primary.used(&policies).await, 1_100, "{strategy}");
    }
}

/// The refunded window began in the fallback, and another one has begun since.
#[tokio::test(start_paused = true)]
async fn a_refund_spares_a_later_window() {
    for align in [Align::default(), Align::FirstHit] {
        let (store, primary, _) = pair(1);
        let of =
            |name, quota: &str| Policy::new(name, Strategy::FixedWindow(align), quota).unwrap();
        let policies = Policies::new([of("short", "10/10s"), of("long", "1000/h")]).unwrap();
        open(&store, &primary).await;
        let first = take(&store, &policies, 5).await;
        let reset = first.0.each().next().unwrap().reset_after();
        sleep(reset + Duration::from_millis(100)).await;
        let _ = take(&store, &policies, 5).await;
        refund(&store, &first, 5).await;
        close(&store, &primary).await;
        rest().await;
        let peek = Check::peek(ann(), &policies, 0);
        let peek = primary.counts.check(peek).await.unwrap();
        let used = peek.each().map(|each| each.capacity() - each.remaining());
        assert_eq!(used.collect::<Vec<_>>(), [5, 5], "{align:?}");
    }
}

/// Compared with a local store that gets the same checks.
#[tokio::test(start_paused = true)]
async fn no_refund_frees_more_than_its_charge() {
    let mut wrong = vec![];
    for &strategy in Strategy::ALL {
        for (gap, then) in [(2, 1), (5, 3), (9, 2), (9, 7), (12, 3)] {
            // All clocks are equal, and begin in the first second of a window.
            let _seed = Seed::set(1, Duration::from_millis(1_700_000_000_500));
            let (store, primary, _) = pair(1);
            let plain = LocalStore::default();
            let policies = policies(strategy, "100/10s");
            open(&store, &primary).await;
            let at = instant();
            let check = || Check::take(ann(), &policies, 50);
            let first = take(&store, &policies, 50).await;
            let alone = plain.check(check()).await.unwrap();
            sleep(Duration::from_secs(gap)).await;
            let _ = store.check(check()).await.unwrap();
            let _ = plain.check(check()).await.unwrap();
            sleep(Duration::from_secs(then)).await;
            if let Some(back) = alone.refund(ann(), 50, at.elapsed()) {
                let _ = plain.check(back).await.unwrap();
            }
            refund(&store, &first, 50).await;
            close(&store, &primary).await;
            sleep(Duration::from_millis(300)).await;
            let peek = plain.check(Check::peek(ann(), &policies, 0)).await.unwrap();
            let (counted, least) = (
                primary.used(&policies).await,
                peek.capacity() - peek.remaining(),
            );
            if counted + 1 < least {
                wrong.push((strategy, gap, then, counted, least));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// The fallback granted a check that was sent to the primary store, which never got it.
#[tokio::test(start_paused = true)]
async fn a_grant_that_nobody_charged_is_not_refunded() {
    for degraded in [false, true] {
        let (store, primary, _) = pair(1);
        let policies = policies(Strategy::SlidingLog, "10/100s");
        let other = Check::take(ann(), &policies, 3);
        let _ = primary.counts.check(other).await.unwrap();
        primary.set(Manner::Silent);
        let first = take(&store, &policies, 5).await;
        if degraded {
            open(&store, &primary).await;
            let _ = take(&store, &policies, 2).await;
        }
        refund(&store, &first, 5).await;
        close(&store, &primary).await;
        rest().await;
        let used = primary.used(&policies).await;
        assert_eq!(used, if degraded { 5 } else { 3 });
    }
}

/// There is no room for an account.
#[tokio::test(start_paused = true)]
async fn a_grant_without_an_account_is_not_refunded() {
    let (mut store, primary, reconciled) = pair(1);
    let partition = Arc::get_mut(&mut store.partitions).and_then(|all| Arc::get_mut(&mut all[0]));
    partition.unwrap().accounts = Accounts::new(Arc::new(0.into()));
    let policies = policies(Strategy::SlidingLog, "10/100s");
    let others = Check::take(ann(), &policies, 3);
    let _ = primary.counts.check(others).await.unwrap();
    open(&store, &primary).await;
    let first = take(&store, &policies, 5).await;
    refund(&store, &first, 5).await;
    close(&store, &primary).await;
    rest().await;
    assert_eq!(primary.used(&policies).await, 3);
    let dropped: u64 = reconciled.events().iter().map(|event| event.1).sum();
    assert!(dropped >= 5, "{dropped} are reported as dropped");
}

/// The check was sent to the primary store, which never got it, and was repeated in the outage.
#[tokio::test(start_paused = true)]
async fn a_repeated_grant_that_nobody_charged_is_not_refunded() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::SlidingLog, "10/100s");
    let others = Check::take(ann(), &policies, 3);
    let _ = primary.counts.check(others).await.unwrap();
    let check = || store.check(Check::take(ann(), &policies, 5).with_id("payment-7"));
    primary.set(Manner::Silent);
    assert!(check().await.unwrap().is_allowed());
    open(&store, &primary).await;
    sleep(Duration::from_millis(10)).await;
    let (again, asked_at) = (check().await.unwrap(), instant());
    assert!(again.is_repeated());
    refund(&store, &(again, asked_at), 5).await;
    close(&store, &primary).await;
    rest().await;
    assert_eq!(primary.used(&policies).await, 3);
}

/// Counts like the example in the docs of [`Counts`].
#[derive(Clone, Default)]
struct InMemory(Arc<Mutex<Counts>>);

impl Store for InMemory {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let decision = lock(&self.0).decide(&check, now, Source::Other("memory"));
        Answer::ready(Ok(decision))
    }
}

#[tokio::test(start_paused = true)]
async fn a_custom_fallback_refunds_its_grants() {
    let primary = Primary::default();
    let store = Fallback::new(primary.clone(), InMemory::default());
    let policies = policies(Strategy::SlidingLog, "10/100s");
    primary.set(Manner::Each(unreachable));
    while !store.is_degraded() {
        let somebody = Check::take(Key::new("somebody"), &policies, 1);
        let _ = store.check(somebody).await;
        advance(Duration::from_millis(2)).await;
    }
    let at = instant();
    let take = Check::take(ann(), &policies, 5);
    let decision = store.check(take).await.unwrap();
    let refund = decision.refund(ann(), 3, at.elapsed()).unwrap();
    assert_eq!(store.check(refund).await.unwrap().granted(), 3);
    primary.set(Manner::AtOnce);
    rest().await;
    assert_eq!(primary.used(&policies).await, 2);
}

/// Decides refunds after a second.
#[derive(Clone, Default)]
struct SlowRefunds(InMemory);

impl Store for SlowRefunds {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let is_slow = check.mode() == Mode::Refund;
        let Answer::Ready { answer } = self.0.check(check) else {
            unreachable!()
        };
        if !is_slow {
            return Answer::ready(answer);
        }
        Answer::pending(Box::pin(async {
            sleep(Duration::from_secs(1)).await;
            answer
        }))
    }
}

/// The fallback decides the refund after its charge was reconciled.
#[tokio::test(start_paused = true)]
async fn a_slow_fallback_refunds_before_it_reconciles() {
    let primary = Primary::default();
    let store = Fallback::new(primary.clone(), SlowRefunds::default());
    let policies = policies(Strategy::SlidingLog, "10/100s");
    primary.set(Manner::Each(queue_full));
    let take = Check::take(ann(), &policies, 5);
    let (at, decision) = (instant(), store.check(take).await.unwrap());
    let refund = decision.refund(ann(), 3, at.elapsed()).unwrap();
    let refund = tokio::spawn(store.check(refund));
    tokio::task::yield_now().await;
    primary.set(Manner::AtOnce);
    rest().await;
    assert_eq!(refund.await.unwrap().unwrap().granted(), 3);
    assert_eq!(primary.used(&policies).await, 2);
}

/// The account still owes a newer grant, for long if the queue stays full. The refund does not wait
/// for that.
#[tokio::test(start_paused = true)]
async fn a_reconciled_grant_is_refunded_in_the_primary_store() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::SlidingLog, "1000/h");
    primary.set(Manner::Each(queue_full));
    let held = take(&store, &policies, 500).await;
    let asked = primary.asked();
    primary.set(Manner::After(Duration::from_millis(80)));
    while primary.asked() == asked {
        sleep(Duration::from_millis(1)).await;
    }
    primary.set(Manner::Each(queue_full));
    let _ = take(&store, &policies, 20).await;
    sleep(Duration::from_millis(100)).await;
    refund(&store, &held, 499).await;
    let is_refund = |check: &Check| check.mode() == Mode::Refund;
    assert!(lock(&primary.script).asked.iter().any(is_refund));
    primary.set(Manner::AtOnce);
    rest().await;
    assert_eq!(primary.used(&policies).await, 21);
}

/// The primary store may have executed the refund, so it is not deducted from the account that was
/// opened before its deadline.
#[tokio::test(start_paused = true)]
async fn a_refund_without_a_reply_is_not_repeated_here() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::SlidingLog, "10/100s");
    let _ = take(&store, &policies, 4).await;
    primary.set(Manner::Swallows);
    let refund = store.check(Check::refund(ann(), &policies, 3));
    primary.set(Manner::Each(queue_full));
    let _ = take(&store, &policies, 5).await;
    let error = refund.await.unwrap_err();
    assert!(!error.is_not_sent(), "{error}");
    let text = "the primary store may have run the check: do not repeat a refund";
    assert_eq!(error.to_string(), text);
    primary.set(Manner::AtOnce);
    rest().await;
    assert_eq!(primary.used(&policies).await, 4 - 3 + 5);
}
