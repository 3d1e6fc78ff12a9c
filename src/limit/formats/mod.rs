//! Feature `serde`: what a file or the environment says.

mod policies;
mod setting;

pub(crate) use setting::{Field, Setting, setting};
