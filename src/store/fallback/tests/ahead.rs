//! Turns taken ahead: only the primary store reserves them.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use super::*;
use crate::limit::Outcome;
use crate::limiter::Limiter;
use crate::util::instant;

/// With the breaker open, and for a check that was sent to the primary store, which does not reply.
#[tokio::test(start_paused = true)]
async fn the_fallback_reserves_no_turns() {
    for strategy in Strategy::ALL.iter().filter(|each| each.frees().has_burst()) {
        for sent in [false, true] {
            let (store, primary, reconciled) = pair(1);
            let policies = policies(*strategy, "10/100d");
            if sent {
                primary.set(Manner::Silent);
            } else {
                open(&store, &primary).await;
            }
            let ahead = || store.check(Check::take_ahead(ann(), &policies, 5, Duration::MAX));
            for _ in 0..2 {
                assert!(ahead().await.unwrap().is_allowed(), "{strategy}");
            }
            let third = ahead().await.unwrap();
            assert!(
                matches!(third.outcome(), Outcome::Denied { retry_after } if !retry_after.is_zero()),
                "{strategy}, sent: {sent}: {:?}",
                third.outcome()
            );
            close(&store, &primary).await;
            if !sent {
                assert_eq!(primary.used(&policies).await, 10, "{strategy}");
                assert_eq!(reconciled.events(), [(10, 0)], "{strategy}");
            }
        }
    }
}

/// Counts the permits of this number of waiters.
fn wait(limiter: &Limiter<Tested>, waiters: usize, permits: &Arc<AtomicU32>) {
    for _ in 0..waiters {
        let (limiter, permits) = (limiter.clone(), Arc::clone(permits));
        tokio::spawn(async move {
            let decision = limiter.wait(ann(), 1, Duration::from_secs(20)).await;
            permits.fetch_add(decision.unwrap().is_allowed().into(), SeqCst);
        });
    }
}

/// Waiters get the whole rate of the share, but not more.
#[tokio::test(start_paused = true)]
async fn waiters_get_the_share_in_an_outage() {
    for share in [1, 2] {
        let (store, primary, _) = pair(share);
        let limiter = Limiter::new(store.clone(), policies(Strategy::Gcra, "20/s"));
        let (permits, since) = (Arc::default(), instant());
        open(&store, &primary).await;
        wait(&limiter, 200, &permits);
        for second in 1..=5 {
            sleep(Duration::from_secs(second) - since.elapsed()).await;
            let (got, rate) = (permits.load(SeqCst), 20 / share);
            let expected = rate + rate * second as u32;
            assert!(
                (expected - 2..=expected).contains(&got),
                "share {share}: {got} of {expected} after {second} s"
            );
        }
    }
}

/// The grants of the outage are charged to the primary store before it decides again, so that no
/// turn is granted twice.
#[tokio::test(start_paused = true)]
async fn waiters_get_the_rate_after_an_outage() {
    let (store, primary, _) = pair(1);
    let limiter = Limiter::new(store.clone(), policies(Strategy::Gcra, "20/s"));
    let (permits, since) = (Arc::default(), instant());
    open(&store, &primary).await;
    wait(&limiter, 150, &permits);
    sleep(Duration::from_secs(1) - since.elapsed()).await;
    close(&store, &primary).await;
    wait(&limiter, 150, &permits);
    for second in 2..=8 {
        sleep(Duration::from_secs(second) - since.elapsed()).await;
        let (got, expected) = (permits.load(SeqCst), 20 + 20 * second as u32);
        assert!(
            (expected - 4..=expected + 1).contains(&got),
            "{got} of {expected} after {second} s"
        );
    }
}
