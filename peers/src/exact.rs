//! The grants to one caller that sends many concurrent requests.

use benches::support::RedisServer;
use futures_util::future::join_all;
use tower_redis_ratelimit::Quota;

use crate::peer::{Answer, Instance, PATIENT, Peer, Setup};

/// Less than one unit refills in a second.
pub const LIMIT: u32 = 100;
pub const REQUESTS: u32 = 3_200;
pub const AT_A_TIME: u32 = 256;
pub const INSTANCES: [u32; 3] = [1, 2, 4];

pub async fn granted(peer: impl Peer, instances: u32) -> u64 {
    let server: RedisServer = peer.server(&[]);
    let setup = Setup {
        server: &server,
        quota: Quota::per_hour(LIMIT),
        limits: 1,
        instances,
        deadline: PATIENT,
    };
    let instances = join_all((0..instances).map(|_| peer.instance(setup))).await;
    let ask = |task| {
        let mut instance = instances[task as usize % instances.len()].clone();
        tokio::spawn(async move {
            let mut granted = 0;
            for _ in (task..REQUESTS).step_by(AT_A_TIME as usize) {
                granted += u64::from(instance.ask(0).await == Answer::Passed);
            }
            granted
        })
    };
    join_all((0..AT_A_TIME).map(ask))
        .await
        .into_iter()
        .map(Result::unwrap)
        .sum()
}
