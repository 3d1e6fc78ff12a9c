//! Everything that differs between runs: random hashes, the wall clock, and the clock of each
//! runtime. A simulation fixes them, so that it can be replayed.

#[cfg(not(test))]
pub(crate) use std::hash::RandomState;

#[cfg(test)]
pub(crate) use seeded::{RandomState, Seed};

#[cfg(test)]
mod seeded {
    use std::cell::{Cell, RefCell};
    use std::hash::BuildHasher;
    use std::time::Duration;

    use siphasher::sip::SipHasher13;
    use tokio::time::Instant;

    thread_local! {
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
        static SEED: RefCell<Option<(fastrand::Rng, Duration)>> = const { RefCell::new(None) };
    }

    /// While this value exists, all randomness and clocks of this thread come from one seed.
    #[derive(Debug)]
    pub(crate) struct Seed(());

    impl Seed {
        /// Seeds each new [`RandomState`]. Each new `Clock` starts at `wall`, a time since the Unix
        /// epoch.
        pub(crate) fn set(seed: u64, wall: Duration) -> Self {
            SEED.set(Some((fastrand::Rng::with_seed(seed), wall)));
            Self(())
        }

        /// Sets the time of all runtimes of this thread.
        pub(crate) fn set_now(&self, now: Instant) {
            NOW.set(Some(now));
        }

        pub(crate) fn now() -> Option<Instant> {
            NOW.get()
        }

        pub(crate) fn wall() -> Option<Duration> {
            SEED.with_borrow(|seed| seed.as_ref().map(|(_, wall)| *wall))
        }
    }

    impl Drop for Seed {
        fn drop(&mut self) {
            SEED.set(None);
            NOW.set(None);
        }
    }

    /// Like std's, but made from the seed if there is one.
    #[derive(Debug, Clone)]
    pub(crate) struct RandomState(u64, u64);

    impl RandomState {
        pub(crate) fn new() -> Self {
            let seeded = SEED.with_borrow_mut(|seed| {
                seed.as_mut().map(|(rng, _)| Self(rng.u64(..), rng.u64(..)))
            });
            seeded.unwrap_or_else(|| {
                let random = std::hash::RandomState::new();
                Self(random.hash_one(0), random.hash_one(1))
            })
        }
    }

    impl Default for RandomState {
        fn default() -> Self {
            Self::new()
        }
    }

    impl BuildHasher for RandomState {
        type Hasher = SipHasher13;

        fn build_hasher(&self) -> SipHasher13 {
            SipHasher13::new_with_keys(self.0, self.1)
        }
    }
}
