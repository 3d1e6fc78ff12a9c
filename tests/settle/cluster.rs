//! Reservations are settled on the node that has the caller's slot at that time.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::{Key, Limiter, Strategy};

use crate::nodes::Cluster;
use crate::support::{policy, until};
use crate::topology::cluster::moves::neighbors;

const PATIENT: Duration = Duration::from_secs(20);
const LIMIT: u32 = 10_000_000;
const RESERVED: u32 = 10;
/// More and less than the reserved cost.
const COSTS: [u32; 3] = [17, 3, 0];
const MOVES: usize = 6;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settlements_during_slot_moves_charge_once() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect_lazy().unwrap();
    let policies = policy(Strategy::SlidingWindow { cells: 10 }, &format!("{LIMIT}/d"));
    let (slot, callers) = neighbors(&cluster, &store, &policies).await;
    let limiter = Limiter::new(store, policies);

    let owner = cluster.owner(slot).await;
    let nodes = [owner, (owner + 1) % 3];
    for turn in 0..MOVES {
        let [from, to] = [nodes[turn % 2], nodes[(turn + 1) % 2]];
        let reserve = async |caller: &Key| {
            limiter
                .reserve(*caller, RESERVED)
                .await
                .expect("a reservation")
        };
        let held = join_all(callers.iter().map(reserve)).await;
        let settle = async {
            for (i, reservation) in held.into_iter().enumerate() {
                reservation.settle(COSTS[(i + turn) % COSTS.len()]);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::join!(settle, cluster.move_slot(slot, from, to));
    }
    let all = async || {
        let remaining = join_all(
            callers
                .iter()
                .map(async |caller| limiter.peek(*caller, 0).await.unwrap().remaining()),
        );
        remaining
            .await
            .into_iter()
            .map(|remaining| LIMIT - remaining)
            .collect::<Vec<_>>()
    };
    let costs = |i: usize| {
        (0..MOVES)
            .map(|turn| COSTS[(i + turn) % COSTS.len()])
            .sum::<u32>()
    };
    let expected: Vec<_> = (0..callers.len()).map(costs).collect();
    until("all is settled", async || all().await == expected).await;
    // Nothing is settled twice.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(all().await, expected);
}
