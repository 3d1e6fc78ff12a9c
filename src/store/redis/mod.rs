//! [`RedisStore`]: one count in Redis for all instances.
//!
//! It is made of rooms, each of which knows only those before it: the [script] and its letters; the [batch] of checks
//! that ask it together; the [link] to one server; the [topology], which says where that is; the [worker], which joins
//! them.

mod batch;
mod builder;
mod instances;
mod link;
mod scan;
mod script;
mod servers;
mod store;
#[cfg(test)]
mod tests;
mod topology;
mod worker;

pub use builder::RedisStoreBuilder;
#[cfg(not(feature = "tls"))]
pub(super) use link::no_tls;
#[cfg(feature = "tls")]
pub(super) use link::{check_client, check_roots};
pub use scan::{Counted, Scan};
pub use servers::Servers;
pub(super) use servers::wrong_url;
pub use store::RedisStore;
pub use worker::RedisFuture;
