//! `tower_governor`.

use benches::cases::by_address;
use tower::{Layer, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;

use super::inner;
use crate::peer::{Instance, Layered, Peer, Setup};

#[derive(Clone, Copy)]
pub struct Governor;

impl Peer for Governor {
    fn name(&self) -> &'static str {
        "tower_governor"
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        let mut config = GovernorConfigBuilder::default();
        let config = config
            .period(setup.quota.period() / setup.quota.limit())
            .burst_size(setup.quota.capacity());
        // Ours sends header fields too.
        let config = config
            .key_extractor(PeerIpKeyExtractor)
            .use_headers()
            .finish()
            .unwrap();
        Layered(
            GovernorLayer::new(config).layer(service_fn(inner)),
            by_address,
        )
    }
}
