//! What joins the rooms below: a [task](task) takes what waits, sends it as script calls over a connection, answers
//! every check, and goes on until its queue is empty; then it ends. A check that comes while fewer workers run than may
//! starts one, so that an idle store adds no delay.
//!
//! Each tokio runtime that uses a store has [queues], workers and connections of its own, one set for each node: no
//! check depends on a runtime but the one that it was made on. They are gone when that runtime shuts down, and the
//! checks that wait there fail. A check without a node waits in a queue without connections until its worker has queried
//! the slots of the [cluster].

mod cluster;
mod inner;
mod job;
mod queues;
mod task;

pub use job::RedisFuture;

pub(super) use inner::{Inner, Limits};
