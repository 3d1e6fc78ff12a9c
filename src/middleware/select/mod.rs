//! Selectors of policies for HTTP requests: by route, by plan, or replaced while the service runs.

mod live;
mod routes;
mod tiers;

pub use crate::gate::{PolicySelector, policies_fn};
pub use ipnet::IpNet;
pub use live::Live;
pub use routes::Routes;
pub use tiers::{Tier, Tiers};
