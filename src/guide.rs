//! The pages of `docs/`: which strategy to choose, what happens when Redis goes away, how fast it is.

/// Which strategy fits which limit, and what it is called elsewhere.
///
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

/// Every fault that we know of: what is promised, and what was measured.
///
#[doc = include_str!("../docs/faults.md")]
pub mod faults {}

/// Decisions per second, beside what others do, and where the time goes.
///
#[doc = include_str!("../docs/pictures.md")]
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}
