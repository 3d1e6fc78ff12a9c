//! The list of strategies.

/// Calls a macro with the list: one entry for each strategy, in the order of its variants. An entry has
/// - the variant of `Strategy`,
/// - the name of both halves: the module in `src/limit/strategy`, and the file in `lua`,
/// - the letter in Redis keys, and the number in a script's arguments,
/// - one of each of its kinds, for `Strategy::ALL`: those that count over time.
macro_rules! strategies {
    ($with:ident) => {
        $with! {
            FixedWindow: fixed_window, "f", 1, [
                Self::FixedWindow(Align::Clock { offset: Duration::ZERO }),
                Self::FixedWindow(Align::FirstHit),
            ];
            SlidingLog: sliding_log, "o", 2, [Self::SlidingLog];
            SlidingWindow: sliding_window, "w", 3, [Self::SlidingWindow { cells: 10 }];
            SlidingCounter: sliding_counter, "c", 4, [Self::SlidingCounter];
            TokenBucket: token_bucket, "t", 5, [Self::TokenBucket(Refill::Greedy), Self::TokenBucket(Refill::Interval)];
            LeakyBucket: leaky_bucket, "b", 6, [Self::LeakyBucket];
            Gcra: gcra, "g", 7, [Self::Gcra];
            InFlight: in_flight, "i", 8, [];
        }
    };
}

pub(crate) use strategies;
