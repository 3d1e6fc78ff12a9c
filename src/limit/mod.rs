//! Limits, checks and decisions: pure and deterministic, without a clock, a network or tasks.
//!
//! `now` is always an argument. Stores call this module; it calls no store.

mod answered;
mod block_after;
mod calendar;
mod charge;
mod check;
mod counts;
mod decision;
mod duration;
#[cfg(feature = "serde")]
pub(crate) mod formats;
#[cfg(test)]
mod golden;
mod in_flight;
mod joint;
mod key;
mod key_forms;
mod policies;
mod policy;
mod quota;
mod rate_limited;
mod span;
mod strategy;
mod words;

pub use block_after::BlockAfter;
pub use calendar::{Calendar, Weekday};
pub use check::Check;
pub(crate) use check::{Extra, SentBy};
pub use counts::Counts;
pub use decision::{Decision, Outcome, Source, Verdict};
pub use in_flight::SlotId;
pub use joint::{JointCheck, JointDecision};
pub use key::Key;
pub use policies::Policies;
pub use policy::Policy;
pub use quota::Quota;
pub use rate_limited::RateLimited;
pub use strategy::{Align, Mode, Refill, Strategy};

pub(crate) use answered::{Answered, longest_period};
pub(crate) use calendar::Window;
pub(crate) use charge::{Charge, ChargedAt, EachCharge, LONGEST, PolicyCharge};
pub(crate) use decision::{MadeBy, Verdicts};
pub(crate) use duration::micros;
pub(crate) use joint::Joint;
pub(crate) use key::IsKey;
pub(crate) use key_forms::KeyForms;
pub(crate) use policy::{PolicyKind, is_name};
#[cfg(test)]
pub(crate) use span::examples as span_examples;
pub(crate) use strategy::{Frees, Snapshot, State, Writer, strategies};
#[cfg(test)]
pub(crate) use strategy::{Model, any_quota, most_spent, room, vary};
pub(crate) use words::words;
