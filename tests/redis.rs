//! Tests on a real `redis-server`, and the contract of every store.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

#[path = "support/devices.rs"]
mod devices;
#[path = "support/in_flight.rs"]
mod in_flight_load;
#[path = "support/remote.rs"]
mod remote;
#[path = "support/rotation.rs"]
mod rotation;
mod support;

mod batches {
    mod redis {
        mod shared_calls;
        mod work;
    }
}
mod blocks {
    mod redis;
}
mod config {
    mod redis;
}
mod connections {
    mod redis {
        mod backoff;
        mod budget;
        mod credentials;
        mod names;
        #[cfg(unix)]
        mod password_files;
        mod paths;
        mod runtimes;
        mod urls;
    }
}
mod contract {
    mod in_flight;
    mod outside;
    mod stores;
}
mod counts {
    mod redis {
        mod eviction;
        mod exact;
        mod keys;
        mod memory;
        mod scan;
    }
}
mod denials {
    mod redis;
}
mod errors {
    mod redis {
        mod connect;
        mod forbidden;
        mod partial;
        mod reasons;
        #[cfg(feature = "tracing")]
        mod texts;
    }
}
mod fallback {
    mod redis;
}
#[cfg(feature = "axum")]
mod flush {
    mod redis;
}
mod ids {
    mod redis;
}
mod in_flight {
    mod redis;
}
#[cfg(feature = "axum")]
mod keys {
    mod redis;
}
mod layer {
    mod redis;
}
mod leases {
    pub(crate) mod redis;
}
#[cfg(feature = "axum")]
mod polite {
    mod redis;
}
mod settle {
    mod redis;
}
mod topology {
    mod redis;
}
/// Each file has the name of the one in `waiting/local` with tests of the same kind.
mod waiting {
    mod redis {
        mod limiter;
        mod pause;
        mod throttle;
    }
}
