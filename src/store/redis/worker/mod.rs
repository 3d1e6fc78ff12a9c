//! Workers: tasks that send queued checks to Redis as script calls, and report each reply to the check's future.
//!
//! Each tokio runtime has separate [queues], workers and connections for each node, so that a check depends on its own
//! runtime only. A worker ends when its queue is empty. A check that finds fewer workers than allowed starts one, so an
//! idle store sends a check immediately. The task of an ended worker waits for the next one, without a reference to the
//! store, until the store is dropped or the runtime shuts down. A check whose node is unknown waits in a queue without
//! connections, while its worker queries the slots of the [cluster].
//!
//! - **Lost reply.** If a call fails or times out, its checks fail with an error that says whether they were certainly
//!   not sent. No check is sent again unless the node has rejected it without running it.
//! - **No connection.** If no connection can be made, all checks that wait for the node fail, since each batch would
//!   wait for the same timeout.
//! - **End of a runtime.** When a runtime shuts down, its queues, workers and connections are dropped, and the checks
//!   in them fail with [`ErrorKind::NoRuntime`](crate::error::ErrorKind::NoRuntime).

mod clock;
mod cluster;
mod denials;
mod queues;
mod store;
mod task;
#[cfg(test)]
mod tests;

pub use store::RedisStore;

pub(super) use store::SharedStore;
