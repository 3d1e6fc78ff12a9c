//! Feature `serde`: what a file or the environment says.

mod key;
mod list;
mod policies;
mod setting;

pub(crate) use list::List;
pub(crate) use setting::{Field, Setting, Written, setting};
