//! Tests without a server: the layers over mocks, and the counts in this process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "tokio's clock is paused here")]

#[path = "support/late.rs"]
mod late;
#[cfg(feature = "tracing")]
#[path = "support/lines.rs"]
mod lines;
#[path = "support/mocks.rs"]
mod mocks;
mod support;

mod blocks {
    mod local;
}
mod calls {
    mod local;
}
#[cfg(feature = "serde")]
mod config {
    mod local {
        mod client_ip;
        mod errors;
        mod read;
        mod round_trips;
        mod sold;
        mod tiers;
    }
}
mod counts {
    mod local {
        mod exact;
        mod quotas;
    }
}
mod in_flight {
    mod local;
}
mod keys {
    mod local {
        mod client_ip;
        mod joint;
        mod joint_parts;
        #[cfg(feature = "serde")]
        mod joint_settings;
        #[cfg(feature = "axum")]
        mod routes;
    }
}
mod layer {
    mod local {
        mod api;
        mod compose;
        #[cfg(feature = "axum")]
        mod handlers;
        mod messages;
        mod service;
    }
}
mod observe {
    mod local;
}
mod policies {
    mod local {
        mod cost;
        mod limiter;
        #[cfg(feature = "axum")]
        mod paths;
        mod select;
        mod several;
        mod shadow;
    }
}
mod responses {
    mod local {
        mod fields;
        mod reject;
    }
}
mod settle {
    pub(crate) mod local;
}
/// The waiting requests of a `layer` with `.wait`, a `limiter`, a `throttle`, and a throttle with a `pause`. For all of
/// them: order and costs in `queues`, the use of a quota over distances in `turns`, late replies, failures, refunds and
/// runtimes in `slow_stores`.
mod waiting {
    mod local {
        mod layer;
        mod limiter;
        mod pause;
        mod queues;
        mod slow_stores;
        mod throttle;
        mod turns;
    }
}
