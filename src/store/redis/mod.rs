//! [`RedisStore`]: one count in Redis for all instances.
//!
//! It is made of rooms, each of which knows only those before it: the [script] and its letters; the [batch] of checks
//! that ask it together; the [link] to one server; the [topology], which says where that is; the [worker], which joins
//! them.

mod batch;
mod builder;
mod instances;
mod link;
mod script;
mod servers;
mod store;
#[cfg(test)]
mod tests;
mod topology;
mod worker;

pub use builder::RedisStoreBuilder;
#[cfg(feature = "tls")]
pub(super) use link::{CLIENT_KEY, ROOT_CERTIFICATE};
pub use servers::Servers;
pub use store::RedisStore;
pub use worker::RedisFuture;
