//! Grants, refunds and resets of the fallback are replayed on the primary store, once.

use super::super::accounts::Accounts;
use super::*;
use crate::limit::Align;
use crate::throttle::Pause;
use crate::util::instant;

fn take(policies: &Policies, cost: u32) -> Check {
    Check::take(ann(), policies, cost)
}

async fn ask(store: &Tested, check: Check) -> Decision {
    store.check(check).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_id_is_charged_once_in_an_outage() {
    let (store, primary, reconciled) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    let _ = ask(&store, take(&policies, 50)).await;
    open(&store, &primary).await;
    for _ in 0..30 {
        assert_eq!(
            ask(&store, take(&policies, 1).with_id("payment-7"))
                .await
                .granted(),
            1
        );
    }
    close(&store, &primary).await;
    assert_eq!(primary.used(&policies).await, 51);
    assert_eq!(reconciled.events(), [(1, 0)]);
    // The primary store has not seen the id.
    let again = take(&policies, 1).with_id("payment-7");
    assert!(ask(&store, again).await.is_allowed());
    assert_eq!(primary.used(&policies).await, 52);
}

/// A few checks that a full queue rejected are charged soon, not after an outage an hour later.
#[tokio::test(start_paused = true)]
async fn grants_under_a_closed_breaker_reconcile_soon() {
    let (store, primary, reconciled) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100s");
    for _ in 0..20 {
        primary.set(Manner::Each(queue_full));
        let _ = ask(&store, take(&policies, 1)).await;
        primary.set(Manner::AtOnce);
        let _ = ask(&store, Check::peek(Key::new("somebody"), &policies, 1)).await;
    }
    sleep(Duration::from_secs(1)).await;
    assert!(!store.is_degraded());
    let soon = primary.used(&policies).await;
    sleep(Duration::from_secs(3_600)).await;
    let _ = ask(&store, take(&policies, 60)).await;
    open(&store, &primary).await;
    close(&store, &primary).await;
    assert_eq!(
        (soon, primary.used(&policies).await),
        (20, 60),
        "a second and an hour later"
    );
    assert_eq!(reconciled.events(), [(20, 0)]);
}

/// After a long outage, the grants of its beginning have expired and are not charged.
#[tokio::test(start_paused = true)]
async fn expired_grants_are_not_charged() {
    let (store, primary, reconciled) = pair(1);
    let policies = policies(Strategy::FixedWindow(Align::FirstHit), "100/60s");
    open(&store, &primary).await;
    let _ = ask(&store, take(&policies, 40)).await;
    sleep(Duration::from_secs(61)).await;
    let _ = ask(&store, take(&policies, 10)).await;
    close(&store, &primary).await;
    assert_eq!(primary.used(&policies).await, 10);
    assert_eq!(reconciled.events(), [(10, 0)]);
}

/// A share drains more slowly than the whole policy.
#[tokio::test(start_paused = true)]
async fn grants_expire_as_under_the_whole_policy() {
    let (store, primary, _) = pair(4);
    let policies = policies(Strategy::Gcra, "100/100s");
    open(&store, &primary).await;
    for _ in 0..25 {
        assert!(ask(&store, take(&policies, 1)).await.is_allowed());
    }
    sleep(Duration::from_secs(50)).await;
    close(&store, &primary).await;
    assert_eq!(primary.used(&policies).await, 0);
}

/// A refund that names no charge applies to the grants of the instance.
#[tokio::test(start_paused = true)]
async fn local_grants_are_refunded_locally() {
    for share in [1, 4] {
        let (store, primary, reconciled) = pair(share);
        let policies = policies(Strategy::Gcra, "100/100d");
        let _ = ask(&store, take(&policies, 60)).await;
        open(&store, &primary).await;
        for cost in [5, 3] {
            assert!(ask(&store, take(&policies, cost)).await.is_allowed());
        }
        let refund = ask(&store, Check::refund(ann(), &policies, 6)).await;
        assert_eq!(refund.granted(), 6);
        close(&store, &primary).await;
        assert_eq!(primary.used(&policies).await, 62);
        assert_eq!(reconciled.events(), [(2, 0)]);
    }
}

/// The instance has granted less or nothing: it must not refund charges of the primary store.
#[tokio::test(start_paused = true)]
async fn no_more_is_refunded_than_was_granted() {
    let (store, primary, reconciled) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    let _ = ask(&store, take(&policies, 60)).await;
    open(&store, &primary).await;
    let refund = || store.check(Check::refund(ann(), &policies, 15));
    assert!(refund().await.unwrap_err().is_not_sent());
    assert!(ask(&store, take(&policies, 5)).await.is_allowed());
    assert_eq!(refund().await.unwrap().granted(), 5);
    assert!(refund().await.unwrap_err().is_not_sent());
    close(&store, &primary).await;
    assert_eq!(primary.used(&policies).await, 60);
    assert_eq!(reconciled.events(), []);
    assert_eq!(refund().await.unwrap().granted(), 15);
}

#[tokio::test(start_paused = true)]
async fn resets_during_an_outage_are_applied() {
    for share in [1, 4] {
        let (store, primary, _) = pair(share);
        let policies = policies(Strategy::SlidingLog, "100/d");
        let _ = ask(&store, take(&policies, 60)).await;
        open(&store, &primary).await;
        let _ = ask(&store, take(&policies, 1)).await;
        let _ = ask(&store, Check::reset(ann(), &policies)).await;
        let _ = ask(&store, take(&policies, 5)).await;
        close(&store, &primary).await;
        assert_eq!(primary.used(&policies).await, 5);
    }
}

/// The primary store fails again after a third of the callers: unsent charges wait for the next reconciliation, and
/// sent charges are not repeated.
#[tokio::test(start_paused = true)]
async fn an_interrupted_reconciliation_resumes_where_it_stopped() {
    let policies = policies(Strategy::Gcra, "100/100d");
    let caller = |i: usize| Key::new(i.to_string());
    let queue_full: fn() -> StoreError = queue_full;
    for (error, lost) in [(queue_full, 0), (unreachable, 20)] {
        let (store, primary, reconciled) = pair(1);
        open(&store, &primary).await;
        for i in 0..30 {
            assert!(
                ask(&store, Check::take(caller(i), &policies, 1))
                    .await
                    .is_allowed()
            );
        }
        // One of the replies is for the probe.
        primary.set(Manner::Answers(11, error));
        while reconciled.events().is_empty() && lock(&primary.script).asked.len() < 40 {
            sleep(Duration::from_millis(5)).await;
        }
        sleep(Duration::from_millis(5)).await;
        close(&store, &primary).await;
        sleep(Duration::from_secs(2)).await;
        let mut used = 0;
        for i in 0..30 {
            let peek = primary
                .counts
                .check(Check::peek(caller(i), &policies, 0))
                .await
                .unwrap();
            used += 100 - u64::from(peek.remaining());
        }
        let (charged, dropped) = reconciled
            .events()
            .iter()
            .fold((0, 0), |sum, event| (sum.0 + event.0, sum.1 + event.1));
        assert_eq!(
            (used, charged, dropped),
            (30 - lost, 30 - lost, lost),
            "{:?}",
            error()
        );
    }
}

/// Only the charges in flight may have been executed, and are not repeated.
#[tokio::test(start_paused = true)]
async fn a_failed_reconciliation_risks_few_charges() {
    let (store, primary, reconciled) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    open(&store, &primary).await;
    for i in 0..500 {
        let _ = ask(&store, Check::take(Key::new(i.to_string()), &policies, 1)).await;
    }
    // The only reply is for the probe.
    primary.set(Manner::Answers(1, unreachable));
    while reconciled.events().is_empty() {
        sleep(Duration::from_millis(5)).await;
    }
    let (charged, dropped) = reconciled.events()[0];
    assert!(
        charged == 0 && (1..=64).contains(&dropped),
        "{dropped} of 500 are lost"
    );
}

/// Two layers have different policies for a caller.
#[tokio::test(start_paused = true)]
async fn each_list_of_policies_is_reconciled() {
    let (store, primary, _) = pair(1);
    let [api, login] = ["api", "login"]
        .map(|name| Policies::from(Policy::new(name, Strategy::Gcra, "100/100d").unwrap()));
    open(&store, &primary).await;
    for policies in [&api, &login, &api] {
        assert!(ask(&store, take(policies, 7)).await.is_allowed());
    }
    close(&store, &primary).await;
    assert_eq!(
        (primary.used(&api).await, primary.used(&login).await),
        (14, 7)
    );
}

/// Charges that have expired under the tighter policy still count under the other.
#[tokio::test(start_paused = true)]
async fn the_slowest_policy_decides_when_grants_expire() {
    let (store, primary, _) = pair(1);
    let policy =
        |name, quota: &str| crate::limit::Policy::new(name, Strategy::Gcra, quota).unwrap();
    let policies = Policies::new([policy("burst", "5/s"), policy("daily", "1000/100d")]).unwrap();
    open(&store, &primary).await;
    for _ in 0..10 {
        assert!(ask(&store, take(&policies, 4)).await.is_allowed());
        sleep(Duration::from_secs(1)).await;
    }
    close(&store, &primary).await;
    assert_eq!(primary.used(&policy("daily", "1000/100d").into()).await, 40);
}

#[tokio::test(start_paused = true)]
async fn debts_above_a_share_are_charged() {
    let (store, primary, _) = pair(4);
    let policies = policies(Strategy::Gcra, "100/100d");
    open(&store, &primary).await;
    assert_eq!(
        ask(&store, Check::charge(ann(), &policies, 40))
            .await
            .granted(),
        40
    );
    close(&store, &primary).await;
    assert_eq!(primary.used(&policies).await, 40);
}

/// The debt hides the count before it.
#[tokio::test(start_paused = true)]
async fn a_debt_drains_after_the_count_before_it() {
    for share in [1, 4] {
        for strategy in [Strategy::Gcra, Strategy::LeakyBucket] {
            let (store, primary, _) = pair(share);
            let policies = policies(strategy, "10/s burst 500");
            let _ = ask(&store, take(&policies, 400)).await;
            open(&store, &primary).await;
            let charge = ask(&store, Check::charge(ann(), &policies, 900)).await;
            sleep(Duration::from_secs(30)).await;
            close(&store, &primary).await;
            let peek = Check::peek(ann(), &policies, 0);
            let peek = primary.counts.check(peek).await.unwrap();
            let counted = peek.reset_after().as_secs_f64() * 10.0;
            let expected = f64::from(400 + charge.granted()) - 300.0;
            assert!(
                (counted - expected).abs() < 10.0,
                "{strategy}, share {share}: {counted} of {expected}"
            );
        }
    }
}

/// Charges that fail unsent and new grants share one bound.
#[test]
fn repeatedly_failing_reconciliations_stay_within_the_bound() {
    let (accounts, local) = (Accounts::new(Arc::new(160.into())), LocalStore::default());
    let policies = policies(Strategy::Gcra, "100/100d");
    let mut keys = (0..).map(|i: u32| Key::new(i.to_string()));
    let mut granted = 0;
    let send_all = || {
        let mut owed = vec![];
        for shard in accounts.shards() {
            accounts.sweep(shard, 0, &mut owed);
        }
        let sent = |(_, key, policies): (u8, Key, Policies)| {
            let sent = accounts.caller(&key).send(&policies, 0);
            (key, sent.unwrap())
        };
        owed.into_iter().map(sent).collect::<Vec<_>>()
    };
    for _ in 0..10 {
        let sent = send_all();
        for key in keys.by_ref().take(400) {
            let check = Check::take(key, &policies, 1);
            let Answer::Ready { answer } = local.check(check.clone()) else {
                unreachable!()
            };
            let _ = accounts.caller(&key).record(&check, &answer.unwrap(), 0);
            granted += 1;
        }
        for (key, sent) in sent {
            let mut caller = accounts.caller(&key);
            caller.replied(&policies, &sent, &Err(unsent()));
        }
    }
    let dropped = accounts.dropped.load(std::sync::atomic::Ordering::Relaxed);
    let held = send_all().len();
    assert!(held <= 160, "{held} callers are held of at most 160");
    assert_eq!(held as u64 + dropped, granted, "what is lost is reported");
}

#[tokio::test(start_paused = true)]
async fn grants_beyond_the_bound_are_reported() {
    let (mut store, primary, reconciled) = pair(1);
    let partition = Arc::get_mut(&mut store.partitions)
        .and_then(|all| Arc::get_mut(&mut all[0]))
        .unwrap();
    partition.accounts = Accounts::new(Arc::new(10.into()));
    let policies = policies(Strategy::SlidingLog, "100/d");
    open(&store, &primary).await;
    for i in 0..30 {
        assert!(
            ask(&store, Check::take(Key::new(i.to_string()), &policies, 3))
                .await
                .is_allowed()
        );
    }
    close(&store, &primary).await;
    assert_eq!(reconciled.events(), [(30, 60)]);
}

/// In a long outage, the accounts of expired grants make room for others.
#[tokio::test(start_paused = true)]
async fn expired_accounts_make_room() {
    let (mut store, primary, reconciled) = pair(1);
    let partition = Arc::get_mut(&mut store.partitions)
        .and_then(|all| Arc::get_mut(&mut all[0]))
        .unwrap();
    partition.accounts = Accounts::new(Arc::new(1_000.into()));
    let policies = policies(Strategy::SlidingLog, "10/10s");
    open(&store, &primary).await;
    for i in 0..1_000 {
        let caller = Key::new(i.to_string());
        let _ = ask(&store, Check::take(caller, &policies, 1)).await;
    }
    sleep(Duration::from_secs(11)).await;
    assert!(store.partitions[0].accounts.is_empty());
    let _ = ask(&store, take(&policies, 5)).await;
    close(&store, &primary).await;
    assert_eq!(primary.used(&policies).await, 5);
    assert_eq!(reconciled.events().last(), Some(&(5, 0)));
}

/// The debt of a policy has less room than the cost. Another policy is charged the whole cost.
#[tokio::test(start_paused = true)]
async fn cost_beyond_a_debt_is_reported_as_dropped() {
    let policy =
        |name, quota: &str| crate::limit::Policy::new(name, Strategy::SlidingLog, quota).unwrap();
    let low = || policy("low", "10/d");
    for other in [None, Some(policy("high", "1000/d"))] {
        let (store, primary, reconciled) = pair(1);
        let policies = Policies::new([low()].into_iter().chain(other.clone())).unwrap();
        open(&store, &primary).await;
        assert!(ask(&store, take(&policies, 8)).await.is_allowed());
        // Other instances have exhausted the limit and the debt, except for 3.
        let others = Check::charge(ann(), &low().into(), 17);
        let _ = primary.counts.check(others).await.unwrap();
        close(&store, &primary).await;
        assert_eq!(reconciled.events(), [(3, 5)]);
        if let Some(high) = other {
            assert_eq!(primary.used(&high.into()).await, 8);
        }
    }
}

/// An account counts under the quota of the last check, as in the stores.
#[tokio::test(start_paused = true)]
async fn grants_under_a_raised_quota_are_charged() {
    for &strategy in Strategy::ALL {
        for id in [None, Some("payment-7")] {
            let (store, primary, _) = pair(1);
            let (low, high) = (
                policies(strategy, "10/100d"),
                policies(strategy, "1000/100d"),
            );
            open(&store, &primary).await;
            assert!(ask(&store, take(&low, 10)).await.is_allowed());
            for _ in 0..5 {
                assert!(ask(&store, take(&high, 100)).await.is_allowed());
            }
            if let Some(id) = id {
                assert!(ask(&store, take(&high, 1).with_id(id)).await.is_allowed());
            }
            close(&store, &primary).await;
            let used = primary.used(&high).await;
            let granted = 510 + u32::from(id.is_some());
            assert!(
                (granted..=granted + 1).contains(&used),
                "{strategy:?}: {used} charged of {granted}"
            );
        }
    }
}

/// Otherwise other callers would be granted what these have used.
#[tokio::test(start_paused = true)]
async fn full_queues_do_not_stop_reconciliation() {
    for every in [1, 2, 10] {
        let (store, primary, reconciled) = pair(1);
        let policies = policies(Strategy::SlidingLog, "1000/h");
        primary.set(Manner::Each(queue_full));
        for i in 0..500 {
            let take = Check::take(Key::new(format!("caller-{i}")), &policies, 1);
            assert!(store.check(take).await.unwrap().is_allowed());
        }
        let since = instant();
        primary.set(Manner::Crowded(every));
        let charged = || {
            reconciled
                .events()
                .iter()
                .map(|(charged, _)| charged)
                .sum::<u64>()
        };
        while charged() < 500 {
            // Only a check starts the task again.
            let _ = store.check(Check::peek(ann(), &policies, 1)).await.unwrap();
            sleep(Duration::from_millis(1)).await;
        }
        let took = since.elapsed();
        // A few charges found the queue full until the deadline, and wait for the next rounds.
        assert!(
            took < Duration::from_millis(1_500),
            "every {every}th finds room, and it takes {took:?}"
        );
    }
}

/// The primary store rejects the charge only, for example while its slot moves.
#[tokio::test(start_paused = true)]
async fn rejected_charges_are_repeated_after_growing_pauses() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::SlidingLog, "1000/h");
    primary.set(Manner::Each(queue_full));
    let _ = ask(&store, take(&policies, 1)).await;
    primary.set(Manner::Each(|| {
        StoreError::new(ErrorKind::NotReady).check_only().not_sent()
    }));
    let asked = primary.asked();
    sleep(Duration::from_secs(10)).await;
    let repeated = primary.asked() - asked;
    assert!((40..=90).contains(&repeated), "{repeated} charges");
    primary.set(Manner::AtOnce);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(primary.used(&policies).await, 1);
}

/// A pause is a time: the longest one counts, for any number of instances and shares.
#[tokio::test(start_paused = true)]
async fn pauses_of_an_outage_do_not_add_up() {
    for (share, pausing) in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 4)] {
        let (primary, reconciled) = (Primary::default(), Reconciled::default());
        let instances: Vec<Tested> = (0..share.max(2))
            .map(|_| {
                let store = Fallback::builder(primary.clone(), LocalStore::default());
                let store = store.share(share as u32);
                store.observer(reconciled.clone()).build()
            })
            .collect();
        for store in &instances {
            open(store, &primary).await;
        }
        let pause =
            |store: &Tested| Pause::new(store.clone(), "pause", Duration::from_secs(300)).unwrap();
        for store in &instances[..pausing] {
            pause(store)
                .begin(ann(), Duration::from_secs(30))
                .await
                .unwrap();
        }
        sleep(Duration::from_secs(5)).await;
        primary.set(Manner::AtOnce);
        sleep(Duration::from_secs(5)).await;
        assert!(instances.iter().all(|store| !store.is_degraded()));
        let peek = Check::peek(ann(), &pause(&instances[0]).policy().into(), 1);
        let left = primary.counts.check(peek).await.unwrap().retry_after();
        assert!(
            left.is_some_and(|left| left.abs_diff(Duration::from_secs(20)).as_millis() < 100),
            "share {share}, {pausing} pausing: {left:?}"
        );
        let somebody: u64 = reconciled.events().iter().map(|(charged, _)| charged).sum();
        assert!(somebody < 100, "{:?}", reconciled.events());
        assert!(reconciled.events().iter().all(|(_, dropped)| *dropped == 0));
    }
}
