//! A permit in `poll_ready`, for services whose requests are all counted together.

mod layer;
mod service;

pub use layer::ThrottleLayer;
pub use service::Throttle;
