use std::num::NonZeroUsize;
use std::time::Duration;

/// The settings of a [`RedisStore`](crate::RedisStore) with their defaults, without servers and TLS.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) prefix: String,
    /// Per runtime and master.
    pub(crate) connections: NonZeroUsize,
    /// Maximum time of a call, and of a check in the queue.
    pub(crate) timeout: Duration,
    /// Maximum number of unsent checks.
    pub(crate) queue: NonZeroUsize,
    /// Maximum number of checks in a call.
    pub(crate) batch: NonZeroUsize,
    pub(crate) partitions: NonZeroUsize,
    /// Maximum number of callers in the cache of denials.
    pub(crate) denials: usize,
}

impl Default for Settings {
    fn default() -> Self {
        const fn number(number: usize) -> NonZeroUsize {
            NonZeroUsize::MIN.saturating_add(number - 1)
        }
        Self {
            prefix: "rl".to_owned(),
            connections: number(2),
            timeout: Duration::from_millis(250),
            queue: number(10_000),
            batch: number(128),
            partitions: number(12),
            denials: 10_000,
        }
    }
}
