//! Work off the request path: the queue of store operations, and the tasks that run it.
//!
//! Each kind of background work of a layer or a store is one task at a time, on the runtime that first needed it. If that
//! runtime shuts down, the work waits in memory until a request with such work starts the task on its own runtime; see
//! [`TaskOwner`]. If no runtime follows, the work is dropped with the process.

mod op_queue;
mod sync;
mod task;
#[cfg(test)]
mod tests;

pub(crate) use op_queue::{
    OpQueue, PendingJointReply, PendingOp, SentCheck, WeakOpQueue, panicked,
};
pub(crate) use task::{Task, TaskOwner};
