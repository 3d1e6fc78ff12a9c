//! What becomes of a charge afterwards: what was reserved is kept, given back, or replaced by the real cost.

mod mail;
mod outbox;
mod sender;

pub(crate) use mail::Mail;
pub(crate) use outbox::{Outbox, Post};
