//! Tests on a Redis Cluster of real servers: the guarantees of a single server also hold while
//! nodes fail and slots migrate.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers fail in real time")]
#![allow(unreachable_pub, reason = "helpers of this binary")]

#[path = "faults/fault.rs"]
mod fault;
#[path = "support/in_flight.rs"]
mod in_flight_load;
#[path = "support/load.rs"]
#[allow(dead_code, reason = "the faults of a single server use more of it")]
mod load;
#[path = "support/cluster.rs"]
mod nodes;
#[path = "support/proxy.rs"]
#[allow(dead_code, reason = "the faults of a single server use more of it")]
mod proxy;
#[path = "support/rotation.rs"]
mod rotation;
mod support;
#[macro_use]
#[path = "support/table.rs"]
mod table;

mod blocks {
    mod cluster;
}
mod connections {
    mod cluster;
}
mod faults {
    mod cluster;
}
mod in_flight {
    mod cluster;
}
mod keys {
    mod cluster;
}
mod settle {
    mod cluster;
}
mod topology {
    pub(crate) mod cluster {
        mod addresses;
        mod busy;
        mod healthy;
        pub(crate) mod moves;
        mod strangers;
    }
}
