//! Runtimes that shut down or stall.

use tokio::runtime::{Builder, Runtime};

use super::*;

/// Creates a runtime whose `block_on` polls its future after every poll of a task.
pub(super) fn runtime() -> Runtime {
    Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .event_interval(1)
        .build()
        .unwrap()
}

/// No other runtime starts a recovery while the first one is alive, even if it stalls.
#[test]
fn one_runtime_recovers_at_a_time() {
    for share in [1, 4] {
        let (first, second) = (runtime(), runtime());
        let (store, primary, _) = pair(share);
        let policies = policies(Strategy::Gcra, "100/100d");
        let take = || store.check(Check::take(ann(), &policies, 1));
        first.block_on(async {
            open(&store, &primary).await;
            let _ = take().await.unwrap();
        });
        primary.set(Manner::AtOnce);
        let tasks = |runtime: &Runtime| runtime.metrics().num_alive_tasks();
        second.block_on(async {
            for _ in 0..100 {
                let _ = take().await.unwrap();
                sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(store.is_degraded());
        assert_eq!([tasks(&first), tasks(&second)], [1, 0]);
        drop(first);
        second.block_on(async {
            for _ in 0..500 {
                let _ = take().await.unwrap();
                sleep(Duration::from_millis(10)).await;
            }
            assert!(!store.is_degraded(), "five seconds later");
        });
        assert_eq!(
            second.block_on(primary.used(&policies)),
            100,
            "all is reconciled"
        );
        assert_eq!(tasks(&second), 0);
    }
}

/// The runtime of the grants has shut down.
#[test]
fn a_success_has_grants_reconciled() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    primary.set(Manner::Each(queue_full));
    let _ = runtime()
        .block_on(async { store.check(Check::take(ann(), &policies, 7)).await })
        .unwrap();
    assert!(!store.is_degraded());
    primary.set(Manner::AtOnce);
    runtime().block_on(async {
        let _ = store
            .check(Check::peek(Key::new("bob"), &policies, 1))
            .await
            .unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(primary.used(&policies).await, 7);
    });
}

/// When the runtime shuts down, either no charge was sent, or all charges were and have no reply.
#[test]
fn the_next_runtime_reconciles_the_rest() {
    for sent in [0, 30] {
        let (store, primary, reconciled) = pair(1);
        let policies = policies(Strategy::Gcra, "100/100d");
        let caller = |i: usize| Key::new(i.to_string());
        runtime().block_on(async {
            open(&store, &primary).await;
            for i in 0..30 {
                let _ = store
                    .check(Check::take(caller(i), &policies, 1))
                    .await
                    .unwrap();
            }
            primary.set(Manner::After(Duration::from_millis(50)));
            let asked = primary.asked();
            while primary.asked() < asked + sent {
                advance(Duration::from_millis(1)).await;
            }
            assert_eq!(primary.asked(), asked + sent);
        });
        runtime().block_on(async {
            let _ = store.check(Check::peek(ann(), &policies, 1)).await.unwrap();
            close(&store, &primary).await;
            sleep(Duration::from_secs(1)).await;
            let mut used = 0;
            for i in 0..30 {
                used += 100
                    - primary
                        .counts
                        .check(Check::peek(caller(i), &policies, 0))
                        .await
                        .unwrap()
                        .remaining();
            }
            assert_eq!(used, 30, "{sent} were sent");
        });
        // The outcome of the sent charges is unknown.
        assert_eq!(reconciled.events(), [(30 - sent as u64, sent as u64)]);
    }
}

/// The queue of the primary store was full, so nothing was sent.
#[test]
fn the_end_of_a_runtime_keeps_unsent_charges() {
    let (store, primary, reconciled) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    runtime().block_on(async {
        primary.set(Manner::Crowded(usize::MAX));
        let take = Check::take(ann(), &policies, 7);
        assert!(store.check(take).await.unwrap().is_allowed());
        let asked = primary.asked();
        while primary.asked() == asked {
            advance(Duration::from_millis(1)).await;
        }
    });
    primary.set(Manner::AtOnce);
    runtime().block_on(async {
        let _ = store.check(Check::peek(ann(), &policies, 1)).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(primary.used(&policies).await, 7);
    });
    assert_eq!(reconciled.events(), [(7, 0)]);
}
