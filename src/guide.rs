//! The tutorial, recipes, reference and explanations, by question and by task.
//!
//! [answers]: crate::guide::answers
//! [bandwidth]: crate::guide::recipes#bytes-per-second
//! [block]: crate::guide::recipes#a-block-after-repeated-denials
//! [body]: crate::guide::recipes#by-a-field-of-the-body
//! [by-key]: crate::guide::recipes#by-api-key-with-a-costlier-route-and-an-exempt-health-check
//! [by-user]: crate::guide::recipes#by-user-or-by-address-without-a-login
//! [choosing]: crate::guide::choosing
//! [client]: crate::guide::recipes#a-client-that-keeps-to-a-servers-limit
//! [codes]: crate::guide::pitfalls#error-codes
//! [comparison]: crate::guide::comparison
//! [dry-run]: crate::guide::recipes#a-dry-run-next-to-an-enforced-limit
//! [failures]: crate::guide::recipes#only-failures-count
//! [faults]: crate::guide::faults
//! [file]: crate::guide::recipes#limits-from-a-file
//! [in-flight]: crate::guide::settling#requests-in-flight
//! [jobs]: crate::guide::recipes#jobs-of-a-queue
//! [keys]: crate::guide::keys
//! [leases]: crate::guide::leases
//! [limiter]: crate::guide::recipes#outside-of-tower
//! [logins]: crate::guide::recipes#login-attempts-by-address-and-by-user
//! [migrating]: crate::guide::migrating
//! [openapi]: crate::guide::recipes#openapi
//! [options]: crate::guide::options
//! [pauses]: crate::guide::waiting#pauses-after-a-429
//! [performance]: crate::guide::performance
//! [pitfalls]: crate::guide::pitfalls
//! [plans]: crate::guide::recipes#plans-and-one-customers-limit
//! [pool]: crate::guide::running#if-you-have-a-pool
//! [proxies]: crate::guide::keys#behind-proxies
//! [recipes]: crate::guide::recipes
//! [reload]: crate::guide::recipes#new-limits-without-a-restart
//! [routes]: crate::guide::recipes#by-route-with-one-layer
//! [runbook]: crate::guide::runbook
//! [running]: crate::guide::running
//! [servers]: crate::guide::servers
//! [services]: crate::guide::servers#managed-services-and-forks
//! [settling]: crate::guide::settling
//! [several]: crate::guide::recipes#several-limits-of-one-caller
//! [short]: crate::guide::running#short-processes
//! [sizing]: crate::guide::sizing
//! [sockets]: crate::guide::recipes#websockets-few-at-a-time-and-few-messages
//! [sold]: crate::guide::choosing#what-people-sell
//! [start]: crate::guide::start
//! [tokens]: crate::guide::recipes#tokens-of-a-language-model-and-few-answers-at-a-time
//! [upgrades]: crate::guide::upgrades
//! [usage]: crate::guide::recipes#a-page-of-a-callers-usage
//! [waiting]: crate::guide::waiting
//! [whole]: crate::guide::recipes#the-whole-service-and-each-caller
#![doc = include_str!("../docs/README.md")]

/// A first service: a key, a 429, Redis, an outage.
///
/// [answers]: crate::guide::answers
/// [choosing]: crate::guide::choosing
/// [faults]: crate::guide::faults
/// [keys]: crate::guide::keys
/// [pitfalls]: crate::guide::pitfalls
/// [recipes]: crate::guide::recipes
#[doc = include_str!("../docs/start.md")]
pub mod start {}

/// Common limits: the core of each, from a tested program.
///
/// [answers]: crate::guide::answers
/// [changing]: crate::guide::upgrades#upgrades-that-keep-the-counts
/// [joint]: crate::guide::keys#several-keys
/// [leases]: crate::guide::leases
/// [runbook]: crate::guide::runbook
/// [settling]: crate::guide::settling
/// [sold]: crate::guide::choosing#what-people-sell
/// [waiting]: crate::guide::waiting
#[doc = include_str!("../docs/recipes.md")]
#[allow(
    rustdoc::invalid_rust_codeblocks,
    reason = "they are parts of programs"
)]
pub mod recipes {}

/// Rate-limit keys: extractors, headers, proxies.
///
/// [handler]: crate::guide::recipes#login-attempts-by-address-and-by-user
/// [order]: crate::guide::pitfalls#the-order-of-layers
/// [two]: crate::guide::recipes#the-whole-service-and-each-caller
#[doc = include_str!("../docs/keys.md")]
pub mod keys {}

/// Costs that are known only after the response, and requests in flight.
///
/// [chat]: crate::guide::recipes#tokens-of-a-language-model-and-few-answers-at-a-time
/// [sockets]: crate::guide::recipes#websockets-few-at-a-time-and-few-messages
/// [report]: crate::guide::pitfalls#in-flight-without-end
/// [waiting]: crate::guide::waiting
#[doc = include_str!("../docs/settling.md")]
pub mod settling {}

/// Waiting instead of being denied.
#[doc = include_str!("../docs/waiting.md")]
pub mod waiting {}

/// Deployment: placement of Redis, failures.
///
/// [addresses]: crate::guide::servers#announced-addresses
/// [busy]: crate::guide::faults#a-busy-runtime
/// [connections]: crate::guide::sizing#connections
/// [credentials]: crate::guide::servers#credentials-that-change
/// [eviction]: crate::guide::servers#memory-and-eviction
/// [failover]: crate::guide::servers#charges-lost-in-a-failover
/// [faults]: crate::guide::faults
/// [networks]: crate::guide::servers#networks-and-proxies
/// [options]: crate::guide::options
/// [partitions]: crate::guide::sizing#partitions
/// [rights]: crate::guide::servers#rights
/// [runbook]: crate::guide::runbook
/// [services]: crate::guide::servers#managed-services-and-forks
/// [sizing]: crate::guide::sizing
/// [upgrades]: crate::guide::upgrades
#[doc = include_str!("../docs/running.md")]
pub mod running {}

/// Sizing: memory, processor, connections, partitions.
///
/// [performance]: crate::guide::performance
#[doc = include_str!("../docs/sizing.md")]
pub mod sizing {}

/// Upgrades that keep the counts, and several regions.
///
/// [distance]: crate::guide::sizing#throughput-over-a-distance
#[doc = include_str!("../docs/upgrades.md")]
pub mod upgrades {}

/// Common mistakes, a production checklist, and the meaning of messages.
///
/// [busy]: crate::guide::faults#a-busy-runtime
/// [by-hand]: crate::guide::runbook#one-caller-by-hand
/// [changing]: crate::guide::upgrades#upgrades-that-keep-the-counts
/// [dry-run]: crate::guide::recipes#a-dry-run-next-to-an-enforced-limit
/// [eviction]: crate::guide::servers#memory-and-eviction
/// [grpc]: crate::guide::answers#grpc
/// [keys]: crate::guide::keys
/// [kinds]: crate::guide::runbook#fixes-by-kind
/// [lease-limits]: crate::guide::leases#limits-and-failures
/// [leases]: crate::guide::leases
/// [outage]: crate::guide::faults#promises
/// [partitions]: crate::guide::sizing#partitions
/// [proxies]: crate::guide::keys#behind-proxies
/// [rights]: crate::guide::servers#rights
/// [runbook]: crate::guide::runbook
/// [running]: crate::guide::sizing#memory
/// [settling]: crate::guide::settling
/// [sockets]: crate::guide::recipes#websockets-few-at-a-time-and-few-messages
/// [stores]: crate::guide::options#stores
/// [tests]: crate::guide::recipes#tests-of-your-service
#[doc = include_str!("../docs/pitfalls.md")]
pub mod pitfalls {}

/// The meaning of each alert, what to check, and how to fix it; one caller's counts.
///
/// [busy]: crate::guide::faults#a-busy-runtime
/// [codes]: crate::guide::pitfalls#error-codes
/// [credentials]: crate::guide::servers#credentials-that-change
/// [eviction]: crate::guide::servers#memory-and-eviction
/// [faults]: crate::guide::faults
/// [managed]: crate::guide::running#a-managed-service-over-tls
/// [metrics]: crate::guide::recipes#prometheus
/// [options]: crate::guide::options#stores
/// [order]: crate::guide::pitfalls#the-order-of-layers
/// [proxies]: crate::guide::keys#behind-proxies
/// [rights]: crate::guide::servers#rights
/// [throughput]: crate::guide::sizing#throughput-over-a-distance
/// [usage]: crate::guide::recipes#a-page-of-a-callers-usage
#[doc = include_str!("../docs/runbook.md")]
pub mod runbook {}

/// Quota that is charged in advance and spent in memory.
///
/// [outside]: crate::guide::recipes#outside-of-tower
/// [pitfalls]: crate::guide::pitfalls#not-leased
/// [short]: crate::guide::pitfalls#short-lease
/// [upgrades]: crate::guide::upgrades#upgrades-that-keep-the-counts
/// [usage]: crate::guide::recipes#a-page-of-a-callers-usage
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/leases.md")]
pub mod leases {}

/// The equivalents of another limiter's settings, the differences, and how to switch.
///
/// [comparison]: crate::guide::comparison
/// [running]: crate::guide::running
#[doc = include_str!("../docs/migrating.md")]
pub mod migrating {}

/// How to choose a strategy.
///
/// [block]: crate::guide::recipes#a-block-after-repeated-denials
/// [changing]: crate::guide::upgrades#upgrades-that-keep-the-counts
/// [joint]: crate::guide::keys#several-keys
/// [memory]: crate::guide::sizing#memory
/// [retries]: crate::guide::recipes#retries-that-are-charged-once
/// [settling]: crate::guide::settling
/// [upgrades]: crate::guide::upgrades#upgrades-that-keep-the-counts
/// [usage]: crate::guide::recipes#a-page-of-a-callers-usage
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

/// All options of layers and stores, with their defaults.
///
/// [addresses]: crate::guide::servers#announced-addresses
/// [busy]: crate::guide::faults#a-busy-runtime
/// [credentials]: crate::guide::servers#credentials-that-change
/// [distance]: crate::guide::sizing#throughput-over-a-distance
/// [joint]: crate::guide::keys#several-keys
/// [managed]: crate::guide::running#a-managed-service-over-tls
/// [partitions]: crate::guide::sizing#partitions
#[doc = include_str!("../docs/options.md")]
pub mod options {}

/// Responses to clients: header fields, in current and legacy forms, and bodies.
///
/// [json]: crate::guide::recipes#a-json-body
/// [pitfalls]: crate::guide::pitfalls#error-codes
#[doc = include_str!("../docs/answers.md")]
pub mod answers {}

/// The tested servers, their requirements, and their effect on the counts.
///
/// [busy]: crate::guide::faults#a-busy-runtime
/// [options]: crate::guide::options#stores
/// [running]: crate::guide::running
#[doc = include_str!("../docs/servers.md")]
pub mod servers {}

/// When to use this crate, and when another one.
///
/// [choosing]: crate::guide::choosing
/// [faults]: crate::guide::faults
/// [keys]: crate::guide::keys
/// [leases]: crate::guide::leases
/// [migrating]: crate::guide::migrating
/// [performance]: crate::guide::performance
/// [settling]: crate::guide::settling
/// [waiting]: crate::guide::waiting
#[doc = include_str!("../docs/comparison.md")]
pub mod comparison {}

/// All known faults, with the guarantees for each.
///
/// [cluster]: crate::guide::running#a-cluster
/// [leases]: crate::guide::leases#limits-and-failures
/// [networks]: crate::guide::servers#networks-and-proxies
/// [running]: crate::guide::running#failures-in-short
/// [runtime-late]: crate::guide::pitfalls#runtime-late
/// [servers]: crate::guide::servers#charges-lost-in-a-failover
/// [settling]: crate::guide::settling#requests-in-flight
/// [waiting]: crate::guide::waiting#turns
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/faults.md")]
pub mod faults {}

/// Decisions per second, compared with other limiters, and where the time goes.
///
/// [leases]: crate::guide::leases
/// [partitions]: crate::guide::sizing#partitions
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}
