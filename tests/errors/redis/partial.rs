//! A check that fails for a missing right changes no count.

use std::time::Duration;

use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, Policies, Policy, RedisStore, Strategy};

use super::forbidden::{NEEDED, OF_LOGS, OF_SLOTS, store};
use crate::support::RedisServer;

/// Policies with each kind of state, alone and together. No charge expires during a test.
fn lists() -> Vec<Policies> {
    let rate = |name, strategy, quota: &str| Policy::new(name, strategy, quota).unwrap();
    let meter = rate("meter", Strategy::Gcra, "100/100d");
    let log = rate("log", Strategy::SlidingLog, "100/100d");
    let shorter = rate("shorter", Strategy::SlidingLog, "90/70d");
    let window = rate("window", Strategy::FixedWindow(Align::FirstHit), "100/100d");
    let counter = rate("counter", Strategy::SlidingCounter, "100/100d");
    let cells = rate("cells", Strategy::SlidingWindow { cells: 10 }, "100/100d");
    let slots = Policy::in_flight("slots", 100).unwrap();
    let lists = [
        vec![log.clone()],
        vec![meter.clone(), log.clone()],
        vec![log.clone(), meter.clone()],
        vec![log.clone(), shorter],
        vec![meter, counter, cells.clone()],
        vec![cells, window.clone()],
        vec![slots.clone()],
        vec![window, slots, log],
    ];
    lists.map(|list| Policies::new(list).unwrap()).into()
}

/// A store whose user has all rights, and one whose user lacks one.
struct Stores {
    all: RedisStore,
    limited: RedisStore,
    context: String,
}

impl Stores {
    async fn remaining(&self, key: Key, policies: &Policies) -> Vec<u32> {
        let peek = self.all.check(Check::peek(key, policies, 1)).await.unwrap();
        peek.each().map(|each| each.remaining()).collect()
    }

    /// Sends a check as the limited user. If it fails, it must have changed nothing, and is sent with all rights.
    async fn check(&self, check: &Check) -> Decision {
        let before = self.remaining(*check.key(), check.policies()).await;
        let answer = self.limited.check(check.clone()).await;
        let context = format!("{}: {check:?}", self.context);
        match answer {
            Ok(decision) => decision,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Permission, "{context}: {error:?}");
                let after = self.remaining(*check.key(), check.policies()).await;
                assert_eq!(after, before, "{context} has failed");
                self.all.check(check.clone()).await.unwrap()
            }
        }
    }
}

#[tokio::test]
async fn a_failed_check_changes_nothing() {
    let server = RedisServer::start();
    let all = store(server.url());
    let rights = || NEEDED.into_iter().chain(OF_LOGS).chain(OF_SLOTS);
    // Without the first four, nothing is written.
    for missing in rights().skip(4) {
        let granted: Vec<String> = rights()
            .filter(|right| *right != missing)
            .map(|right| format!("+{right}"))
            .collect();
        let rule = format!(
            "ACL SETUSER no-{missing} on >word ~rl:* -@all {}",
            granted.join(" ")
        );
        let _: String = server.command(&rule).await;
        let url = format!("redis://no-{missing}:word@127.0.0.1:{}/", server.port());
        for (number, policies) in lists().iter().enumerate() {
            let stores = Stores {
                all: all.clone(),
                limited: store(url.clone()),
                context: format!("without {missing}, list {number}"),
            };
            modes(&stores, Key::new(format!("{missing} {number}")), policies).await;
        }
        let keys: Vec<String> = server.command("KEYS rl:*").await;
        for key in keys {
            let expires: i64 = server.command(&format!("PTTL {key}")).await;
            assert!(expires > 0, "without {missing}, {key} stays for ever");
        }
        let _: String = server.command("FLUSHALL").await;
    }
}

/// Sends takes, refunds, a renewal and a reset. A take with an id is charged once.
async fn modes(stores: &Stores, key: Key, policies: &Policies) {
    let (mut taken, has_slots) = (
        vec![],
        policies.iter().any(|policy| policy.strategy().is_none()),
    );
    let takes = if policies
        .iter()
        .any(|policy| policy.strategy() == Some(Strategy::SlidingLog))
    {
        50
    } else {
        5
    };
    for number in 0..takes {
        let take = Check::take(key, policies, 1).with_id(format!("{number}"));
        let before = stores.remaining(key, policies).await;
        taken.push(stores.check(&take).await);
        let once = stores.remaining(key, policies).await;
        let expected: Vec<u32> = before.iter().map(|left| left - 1).collect();
        assert_eq!(once, expected, "{}: take {number}", stores.context);
        if !has_slots {
            let _ = stores.all.check(take).await.unwrap();
            let twice = stores.remaining(key, policies).await;
            assert_eq!(twice, once, "{}: the id of take {number}", stores.context);
        }
    }
    if !has_slots {
        // Not under a meter: it drains while the charge to refund does, so a part of a unit would leave during the test.
        let meters = policies.iter().any(|policy| policy.name() == "meter");
        for decision in taken.iter().skip(2).take(takes / 2).filter(|_| !meters) {
            if let Some(refund) = decision.refund(key, 1, Duration::ZERO) {
                let _ = stores.check(&refund).await;
            }
        }
        let _ = stores.check(&Check::charge(key, policies, 2)).await;
        let _ = stores.check(&Check::up_to(key, policies, 2)).await;
        let _ = stores.check(&Check::refund(key, policies, 3)).await;
        let _ = stores.check(&Check::refund(key, policies, 1_000)).await;
    }
    let take = Check::take(key, policies, 1);
    let _ = stores.check(&take).await;
    if let Some(slot) = take.slot() {
        // The slot is held, also if its renewal fails.
        let _ = stores.check(&Check::renew(key, policies, slot)).await;
    }
    let _ = stores.check(&Check::reset(key, policies)).await;
}
