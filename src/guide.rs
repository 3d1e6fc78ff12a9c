//! [answers]: crate::guide::answers
//! [choosing]: crate::guide::choosing
//! [comparison]: crate::guide::comparison
//! [envoy]: crate::guide::envoy
//! [faults]: crate::guide::faults
//! [keys]: crate::guide::keys
//! [leases]: crate::guide::leases
//! [migrating]: crate::guide::migrating
//! [options]: crate::guide::options
//! [peers]: crate::guide::peers
//! [performance]: crate::guide::performance
//! [pitfalls]: crate::guide::pitfalls
//! [recipes]: crate::guide::recipes
//! [runbook]: crate::guide::runbook
//! [running]: crate::guide::running
//! [servers]: crate::guide::servers
//! [settling]: crate::guide::settling
//! [waiting]: crate::guide::waiting
#![doc = include_str!("../docs/README.md")]

/// When to use this crate, and when another one.
///
/// [choosing]: crate::guide::choosing
/// [faults]: crate::guide::faults
/// [keys]: crate::guide::keys
/// [mesh]: crate::guide::envoy
/// [migrating]: crate::guide::migrating
/// [peers]: crate::guide::peers
/// [performance]: crate::guide::performance
/// [settling]: crate::guide::settling
/// [waiting]: crate::guide::waiting
#[doc = include_str!("../docs/comparison.md")]
pub mod comparison {}

/// Measurements of other limiters and of this crate.
///
/// [comparison]: crate::guide::comparison
/// [faults]: crate::guide::faults
/// [leases]: crate::guide::leases
/// [mesh]: crate::guide::envoy
/// [performance]: crate::guide::performance
#[doc = include_str!("../docs/peers.md")]
pub mod peers {}

/// Common mistakes, a production checklist, and the meaning of messages.
///
/// [by-hand]: crate::guide::running#one-caller-by-hand
/// [changing]: crate::guide::choosing#changing-a-policy
/// [dry-run]: crate::guide::recipes#a-dry-run-next-to-an-enforced-limit
/// [eviction]: crate::guide::servers#memory-and-eviction
/// [failures]: crate::guide::running#failures-in-short
/// [keys]: crate::guide::keys
/// [leases]: crate::guide::leases
/// [partitions]: crate::guide::running#partitions
/// [proxies]: crate::guide::keys#behind-proxies
/// [rights]: crate::guide::servers#rights
/// [runbook]: crate::guide::runbook
/// [running]: crate::guide::running#memory
/// [settling]: crate::guide::settling
#[doc = include_str!("../docs/pitfalls.md")]
pub mod pitfalls {}

/// Common limits, each as a complete program.
///
/// [answers]: crate::guide::answers
/// [runbook]: crate::guide::runbook
/// [settling]: crate::guide::settling
/// [waiting]: crate::guide::waiting
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

/// How to choose a strategy.
///
/// [migrating]: crate::guide::migrating
/// [settling]: crate::guide::settling
/// [waiting]: crate::guide::waiting
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

/// Limits for services behind Envoy or Istio, with the files of Envoy's own rate limit service.
///
/// [answers]: crate::guide::answers
/// [choosing]: crate::guide::choosing
/// [migrating]: crate::guide::migrating
/// [options]: crate::guide::options
/// [runbook]: crate::guide::runbook
#[doc = include_str!("../docs/envoy.md")]
pub mod envoy {}

/// The equivalents of another limiter's settings, the differences, and how to switch.
///
/// [comparison]: crate::guide::comparison
/// [envoy]: crate::guide::envoy
/// [running]: crate::guide::running
#[doc = include_str!("../docs/migrating.md")]
pub mod migrating {}

/// Rate-limit keys: extractors, headers, proxies.
///
/// [order]: crate::guide::pitfalls#the-order-of-layers
/// [recipes]: crate::guide::recipes
/// [two]: crate::guide::recipes#a-limit-for-the-whole-service-and-for-each-caller
#[doc = include_str!("../docs/keys.md")]
pub mod keys {}

/// Waiting instead of being denied.
#[doc = include_str!("../docs/waiting.md")]
pub mod waiting {}

/// Costs that are known only after the response, and requests in flight.
///
/// [recipes]: crate::guide::recipes
#[doc = include_str!("../docs/settling.md")]
pub mod settling {}

/// Responses to clients: header fields, in current and legacy forms, and bodies.
///
/// [pitfalls]: crate::guide::pitfalls#error-codes
#[doc = include_str!("../docs/answers.md")]
pub mod answers {}

/// Quota that is charged in advance and spent in memory.
///
/// [pitfalls]: crate::guide::pitfalls#not-leased
/// [short]: crate::guide::pitfalls#short-lease
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/leases.md")]
pub mod leases {}

/// All options of layers and stores, with their defaults.
///
/// [distance]: crate::guide::running#throughput-over-a-distance
/// [leases]: crate::guide::leases
/// [managed]: crate::guide::running#a-managed-service-over-tls
/// [partitions]: crate::guide::running#partitions
/// [pitfalls]: crate::guide::pitfalls#before-you-go-live
#[doc = include_str!("../docs/options.md")]
pub mod options {}

/// Deployment: placement of Redis, rights, sizing, upgrades, several regions.
///
/// [eviction]: crate::guide::servers#memory-and-eviction
/// [failover]: crate::guide::servers#charges-lost-in-a-failover
/// [faults]: crate::guide::faults
/// [networks]: crate::guide::servers#networks-and-proxies
/// [options]: crate::guide::options
/// [performance]: crate::guide::performance
/// [rights]: crate::guide::servers#rights
/// [runbook]: crate::guide::runbook
#[doc = include_str!("../docs/running.md")]
pub mod running {}

/// The meaning of each alert, what to check, and how to fix it.
///
/// [by-hand]: crate::guide::running#one-caller-by-hand
/// [codes]: crate::guide::pitfalls#error-codes
/// [eviction]: crate::guide::servers#memory-and-eviction
/// [faults]: crate::guide::faults
/// [managed]: crate::guide::running#a-managed-service-over-tls
/// [metrics]: crate::guide::recipes#metrics-for-prometheus
/// [options]: crate::guide::options
/// [otel]: crate::guide::recipes#metrics-and-spans-for-opentelemetry
/// [proxies]: crate::guide::keys#behind-proxies
/// [rights]: crate::guide::servers#rights
/// [throughput]: crate::guide::running#throughput-over-a-distance
#[doc = include_str!("../docs/runbook.md")]
pub mod runbook {}

/// All known faults, with the guarantees and the measurements for each.
///
/// [cluster]: crate::guide::running#a-cluster
/// [running]: crate::guide::running#failures-in-short
/// [servers]: crate::guide::servers#charges-lost-in-a-failover
/// [settling]: crate::guide::settling#requests-in-flight
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/faults.md")]
pub mod faults {}

/// The tested servers, their requirements, and their effect on the counts.
///
/// [running]: crate::guide::running
#[doc = include_str!("../docs/servers.md")]
pub mod servers {}

/// Decisions per second, compared with other limiters, and where the time goes.
///
/// [partitions]: crate::guide::running#partitions
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}
