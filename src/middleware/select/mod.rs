//! Selectors of policies for HTTP requests, and policies that change.

mod live;
mod routes;
mod tiers;

pub use crate::gate::{PolicySelector, policies_fn};
pub use live::Live;
pub use routes::Routes;
pub use tiers::{Tier, Tiers};
