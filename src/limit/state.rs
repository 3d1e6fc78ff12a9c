use super::strategy::{self, Algorithm, Ask, Params, Preview, Snapshot, strategies};
use super::{Kind, Refill, Strategy, Verdict, in_flight};

macro_rules! states {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, $kinds:tt;)*) => {
        /// The state of one caller under one policy.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) enum State {
            $($variant(strategy::$variant),)*
            InFlight(in_flight::State),
        }

        impl State {
            /// Creates the state of a new caller.
            pub(crate) fn fresh(kind: impl Into<Kind>) -> Self {
                match kind.into() {
                    $(Kind::Rate(Strategy::$variant { .. }) => Self::$variant(Default::default()),)*
                    Kind::InFlight => Self::InFlight(Default::default()),
                }
            }

            /// Creates a state that continues the counts of another store. Requests in flight start
            /// at none: each instance counts only its own.
            pub(crate) fn resume(kind: Kind, params: &Params, now: i64, followed: Snapshot) -> Self {
                match kind {
                    $(Kind::Rate(Strategy::$variant { .. }) => {
                        Self::$variant(Algorithm::resume(params, now, followed))
                    })*
                    Kind::InFlight => Self::fresh(kind),
                }
            }

            /// Returns the state as numbers: see [`Algorithm::to_numbers`].
            pub(super) fn to_numbers(&self) -> Vec<i64> {
                match self {
                    $(Self::$variant(state) => state.to_numbers(),)*
                    Self::InFlight(state) => state.to_numbers(),
                }
            }

            /// Restores a state of this kind: see [`Algorithm::of_numbers`].
            pub(super) fn of_numbers(kind: Kind, numbers: &[i64]) -> Option<Self> {
                match kind {
                    $(Kind::Rate(Strategy::$variant { .. }) => {
                        Algorithm::of_numbers(numbers).map(Self::$variant)
                    })*
                    Kind::InFlight => in_flight::State::of_numbers(numbers).map(Self::InFlight),
                }
            }

            /// Previews the verdict of the state's policy, without changing the state.
            pub(super) fn preview(&self, params: &Params, ask: &Ask) -> Preview {
                match self {
                    $(Self::$variant(state) => ask.preview(state, params),)*
                    Self::InFlight(state) => state.preview(params, ask),
                }
            }

            /// Decides, and charges what is granted. Returns the verdict and the granted amount.
            pub(super) fn decide(&mut self, params: &Params, ask: &Ask, max: i64) -> (Verdict, i64) {
                match self {
                    $(Self::$variant(state) => ask.decide(state, params, max),)*
                    Self::InFlight(state) => state.decide(params, ask, max),
                }
            }
        }
    };
}

strategies!(states);

impl State {
    /// The state of a policy that refills gradually, by its level in ticks at a time. `None` for any other policy.
    pub(crate) fn of_level(kind: Kind, at: i64, level: i64) -> Option<Self> {
        match kind {
            Kind::Rate(Strategy::TokenBucket(Refill::Greedy)) => {
                Some(Self::TokenBucket(strategy::TokenBucket::new(at, level)))
            }
            Kind::Rate(Strategy::LeakyBucket) => {
                Some(Self::LeakyBucket(strategy::LeakyBucket::new(at, level)))
            }
            Kind::Rate(Strategy::Gcra) => Some(Self::Gcra(strategy::Gcra::new(at, level))),
            _ => None,
        }
    }
}
