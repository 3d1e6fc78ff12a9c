//! [`RedisStore`]: one count in Redis for all instances.
//!
//! Its modules; each uses only the ones before it: the [script], which encodes a batch of checks as
//! one call; the [credentials]; the [link] to one server; the [topology], which chooses the server; and the [worker],
//! which combines them.

mod blocks;
mod builder;
mod credentials;
mod instances;
mod link;
mod scan;
mod script;
mod servers;
#[cfg(test)]
mod tests;
mod topology;
mod worker;

pub use builder::RedisStoreBuilder;
pub use credentials::Credentials;
#[cfg(not(feature = "tls"))]
pub(super) use link::no_tls;
#[cfg(feature = "tls")]
pub(super) use link::{check_client, check_roots};
pub use scan::{Scan, StoredCount};
pub use servers::Servers;
pub(super) use servers::wrong_url;
pub(super) use topology::{host_and_port, two_to_one};
pub use worker::RedisStore;
