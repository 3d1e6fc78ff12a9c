//! Work off the request path, and where it runs.
//!
//! Each kind of background work of a store is one task at a time, on the runtime that needed it first. After that runtime
//! has shut down, the next check starts the task on the runtime of the check: see [`TaskOwner`].

mod op_queue;
mod sync;
mod task;
#[cfg(test)]
mod tests;

pub(crate) use op_queue::{Asked, OpQueue, PendingOp};
pub(crate) use task::{Task, TaskOwner};
