//! Selectors of policies for HTTP requests, and policies that change.

mod live;
mod routes;
mod tiers;

pub use live::Live;
pub use routes::Routes;
pub use tiers::{Tier, Tiers};
