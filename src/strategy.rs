//! How requests are counted: the [`Strategy`] of a policy, and its parameters.
//!
//! [Strategies](crate::guide::choosing) compares them.

#[doc(no_inline)]
pub use crate::limit::Strategy;
pub use crate::limit::{Align, Calendar, Refill, Weekday};
