//! What joins the rooms below: a [task](task) takes what waits, sends it as script calls over a connection, answers
//! every check, and goes on until its queue is empty; then it ends. A check that comes while fewer workers run than may
//! starts one, so that an idle store adds no delay.
//!
//! A store has separate [queues], workers and connections for each tokio runtime and node, so that a check depends on its
//! own runtime only. They end when that runtime shuts down, and the checks that wait there fail. A check without a node
//! waits in a queue without connections until its worker has queried the slots of the [cluster].

mod cluster;
mod inner;
mod job;
mod queues;
mod task;

pub use job::RedisFuture;

pub(super) use inner::{Inner, Limits};
