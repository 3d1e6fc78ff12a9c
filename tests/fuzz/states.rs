//! Damaged counts in Redis, as by another program, another version or a person.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Refill;
use tower_redis_ratelimit::{Key, Strategy, redis};

use crate::damage::damage;
use crate::each_seed;
use crate::support::{RedisServer, STRATEGIES, policy};

/// Maximum wait under the quotas below, even in full debt.
const LONGEST: Duration = Duration::from_secs(8 * 60);

/// The same under a bucket that refills gradually: turns may be reserved a day ahead.
const LONGEST_OF_TURNS: Duration = Duration::from_secs(24 * 3_600 + 8 * 60);

/// Start of the quota in a bucket's value. Another quota there is the one that has charged, and
/// its level drains at its rate.
const QUOTA_START: usize = 19;

#[tokio::test]
async fn damaged_states_cause_no_lockout() {
    let server = RedisServer::start();
    let connection: MultiplexedConnection = server.connection().await;
    let store = server.store();
    each_seed(300, async |mut rng| {
        let _: () = redis::cmd("FLUSHALL")
            .query_async(&mut connection.clone())
            .await
            .unwrap();
        let strategy = STRATEGIES[rng.usize(..STRATEGIES.len())];
        let policies = policy(strategy, rng.choice(["10/m", "20/2m", "3/m"]).unwrap());
        // A new caller, since the store may have cached a denial.
        let caller = rng.u64(..).to_string();
        let key = || Key::new(&caller);
        for cost in [1, rng.u32(1..5)] {
            let _ = store
                .check(Check::take(key(), &policies, cost))
                .await
                .unwrap();
        }
        let keys: Vec<Vec<u8>> = redis::cmd("KEYS")
            .arg("*")
            .query_async(&mut connection.clone())
            .await
            .unwrap();
        let name = rng.choice(&keys).expect("a count");
        let state: Vec<u8> = redis::cmd("GET")
            .arg(name)
            .query_async(&mut connection.clone())
            .await
            .unwrap();
        let valid = state;
        let state = damage(&mut rng, &valid);
        let is_of_another_quota = state.get(QUOTA_START..) != valid.get(QUOTA_START..);
        let longest = match strategy {
            Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(_)
                if is_of_another_quota =>
            {
                Duration::MAX
            }
            Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy) => {
                LONGEST_OF_TURNS
            }
            _ => LONGEST,
        };
        let keeps = rng.bool();
        let mut set = redis::cmd("SET");
        set.arg(name)
            .arg(&state)
            .arg(if keeps { &["KEEPTTL"][..] } else { &[] });
        let _: () = set.query_async(&mut connection.clone()).await.unwrap();
        for turn in 0..6 {
            let cost = rng.u32(0..3);
            let check = match rng.u8(0..6) {
                0 => Check::peek(key(), &policies, cost),
                1 => Check::up_to(key(), &policies, cost),
                2 => Check::refund(key(), &policies, cost),
                3 => Check::charge(key(), &policies, cost),
                _ => Check::take(key(), &policies, cost),
            };
            let context = format!("{strategy:?}, turn {turn}, {check:?}, a state of {state:?}");
            let decision = store
                .check(check)
                .await
                .unwrap_or_else(|error| panic!("{context}: {error:?}"));
            assert!(
                decision.remaining() <= decision.capacity(),
                "{context}: {decision:?}"
            );
            assert!(decision.reset_after() <= longest, "{context}: {decision:?}");
            assert!(
                decision.retry_after().is_none_or(|wait| wait <= longest),
                "{context}: {decision:?}"
            );
        }
        // A charge must not remove a key's expiry.
        let decision = store
            .check(Check::charge(key(), &policies, 1))
            .await
            .unwrap();
        if keeps && decision.granted() > 0 {
            let expiry: i64 = redis::cmd("PTTL")
                .arg(name)
                .query_async(&mut connection.clone())
                .await
                .unwrap();
            assert_ne!(
                expiry, -1,
                "{strategy:?}: a key without an expiry, from {state:?}"
            );
        }
    })
    .await;
}
