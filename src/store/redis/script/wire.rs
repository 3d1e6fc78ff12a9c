//! What stands for a strategy and a mode in keys and in the script's arguments, and the text of the script.

use crate::limit::{Mode, Policy, Strategy};
use crate::strategies::strategies;

macro_rules! wire {
    ($($variant:ident: $module:ident, $letter:literal, $number:literal, $kinds:tt;)*) => {
        /// The letter that stands for it in a key.
        pub(crate) const fn letter(strategy: Strategy) -> &'static str {
            match strategy { $(Strategy::$variant { .. } => $letter,)* }
        }

        /// The number that stands for it in an argument.
        pub(crate) const fn strategy_number(strategy: Strategy) -> u8 {
            match strategy { $(Strategy::$variant { .. } => $number,)* }
        }

        /// The script that decides: what the call asks, what the Lua halves share, each of them, the driver.
        pub(crate) const SCRIPT: &str = concat!(
            include_str!("../../../../lua/call.lua"),
            "\n",
            include_str!("../../../../lua/prelude.lua"),
            "\n",
            include_str!("../../../../lua/meter.lua"),
            $(
                "\nif strategies[", $number, "] then\nstrategies[", $number, "] = (function()\n",
                include_str!(concat!("../../../../lua/", stringify!($module), ".lua")),
                "end)()\nend\n",
            )*
            "\n",
            include_str!("../../../../lua/check.lua"),
        );
    };
}

strategies!(wire);

/// The number that stands for it in an argument.
pub(crate) const fn mode_number(mode: Mode) -> u8 {
    match mode {
        Mode::Take => 1,
        Mode::UpTo => 2,
        Mode::Peek => 3,
        Mode::Charge => 4,
        Mode::Refund => 5,
        Mode::Reset => 6,
        Mode::TakeAhead => 7,
        Mode::Renew => 8,
        Mode::Hold => 9,
    }
}

/// A policy as the `policy` function of its strategy in Lua takes it; `lua/prelude.lua` has their contract.
///
/// First comes the capacity, in units of cost. Then, of what refills:
/// - how many ticks make a unit of cost,
/// - how many ticks come at a time: in every microsecond, or after every period,
/// - that period in microseconds, or 0.
///
/// Of a window, and of requests in flight, which have a lease time as a period:
/// - its period in microseconds,
/// - when windows of the clock begin, in microseconds within a period, or -1 where a first charge begins one,
/// - the width of a cell in microseconds.
pub(crate) fn arguments(policy: &Policy) -> [i64; 4] {
    let params = policy.params();
    match policy.strategy().has_burst() {
        true => [params.capacity, params.interval, params.ticks, if params.batches { params.period } else { 0 }],
        false => [params.capacity, params.period, params.offset.unwrap_or(-1), params.width],
    }
}
