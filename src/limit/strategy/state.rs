use super::algorithm::Algorithm;
use super::ask::{Ask, Preview};
use super::{Params, Snapshot, Strategy};
use crate::limit::verdict::Verdict;
use crate::strategies::strategies;

/// One state for all strategies, by the Rust half of each.
macro_rules! bind {
    ($($variant:ident: $module:ident, $letter:literal, $number:literal, $kinds:tt;)*) => {
        /// What a strategy remembers of one caller.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) enum State {
            $($variant(super::$module::State),)*
        }

        impl State {
            /// The state of a caller that has not been seen.
            pub(crate) fn fresh(strategy: Strategy) -> Self {
                match strategy { $(Strategy::$variant { .. } => Self::$variant(Default::default()),)* }
            }

            /// The state of a caller whom another store has counted so far.
            pub(crate) fn resume(strategy: Strategy, params: &Params, now: i64, followed: Snapshot) -> Self {
                match strategy {
                    $(Strategy::$variant { .. } => Self::$variant(Algorithm::resume(params, now, followed)),)*
                }
            }

            /// What its policy sees.
            pub(in crate::limit) fn preview(&self, params: &Params, ask: &Ask) -> Preview {
                match self { $(Self::$variant(state) => ask.preview(state, params),)* }
            }

            /// Decides, and charges what is granted: the verdict, and how much that is.
            pub(in crate::limit) fn decide(&mut self, params: &Params, ask: &Ask, max: i64) -> (Verdict, i64) {
                match self { $(Self::$variant(state) => ask.decide(state, params, max),)* }
            }
        }
    };
}

strategies!(bind);
