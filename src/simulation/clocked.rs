//! Runtimes whose clocks the simulation moves.

use std::iter;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{Instant, advance};

use crate::util::instant;

/// A runtime whose clock is moved manually. `None` after its shutdown.
pub(crate) struct Clocked {
    pub(crate) runtime: Option<Runtime>,
    elapsed: Duration,
}

/// Creates a runtime in paused time.
pub(super) fn paused() -> Runtime {
    Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
}

impl Clocked {
    pub(super) fn new() -> Self {
        Self {
            runtime: Some(paused()),
            elapsed: Duration::ZERO,
        }
    }

    /// Creates runtimes, and returns the time after that. A timer fires at a millisecond since its runtime's creation, so
    /// runs are equal only if these times differ by little. On a busy machine that may take several attempts.
    pub(super) fn all(count: usize) -> (Vec<Self>, Instant) {
        let attempt = |_| {
            let before = instant();
            let runtimes: Vec<_> = iter::repeat_with(Self::new).take(count).collect();
            let start = instant();
            (start - before, runtimes, start)
        };
        let attempts = (0..8).map(attempt);
        let (_, runtimes, start) = attempts.min_by_key(|(took, ..)| *took).unwrap();
        (runtimes, start)
    }

    /// Sets its clock. Otherwise the time at which a timer fires would depend on the time that it took to create all
    /// runtimes.
    pub(super) fn starts_at(&self, start: Instant) {
        if let Some(runtime) = &self.runtime {
            runtime.block_on(async { advance(start - instant()).await });
        }
    }

    /// Runs until nothing is left to do at `elapsed` since the start. The first of the `turns` wakes timers, the others
    /// run what those wake.
    pub(super) fn passes_to(&mut self, elapsed: Duration, turns: usize) {
        let Some(runtime) = &self.runtime else { return };
        let time = elapsed.saturating_sub(self.elapsed);
        self.elapsed = elapsed;
        runtime.block_on(async {
            advance(time).await;
            // Paused time does not advance while this future is ready.
            for _ in 0..turns {
                yield_now().await;
            }
        });
    }
}
