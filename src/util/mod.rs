//! Small things that no room owns. They know nothing of ours.

mod jitter;
mod seed;
mod task;

pub(crate) use jitter::{jittered, random};
pub(crate) use seed::RandomState;
#[cfg(test)]
pub(crate) use seed::Seed;
pub(crate) use task::{Span, Task, TaskOwner};
