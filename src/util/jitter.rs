use std::hash::BuildHasher;
use std::ops::Range;
use std::time::Duration;

use super::seed::RandomState;

/// Returns a random number from 0 to 1.
pub(crate) fn random() -> f64 {
    RandomState::new().hash_one(0) as f64 / u64::MAX as f64
}

/// Multiplies a duration by a random factor. Without this, a thousand instances that met the same
/// fault would all retry at the same moment.
pub(crate) fn jittered(duration: Duration, factors: Range<f64>) -> Duration {
    duration.mul_f64(factors.start + (factors.end - factors.start) * random())
}
