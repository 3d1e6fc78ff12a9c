//! What stands for a mode and a problem in the script's arguments and reply, and the text of the script.

use crate::limit::{Frees, Kind, Mode, Policy, strategies};

/// Gives a macro the numbers that both halves of the script know: of modes, of what went wrong in place of what was granted,
/// and of what counts requests in flight, beside those of the strategies.
macro_rules! numbers {
    ($with:ident) => {
        $with! {
            TAKE = 1, UP_TO = 2, PEEK = 3, CHARGE = 4, REFUND = 5, RESET = 6, TAKE_AHEAD = 7, RENEW = 8, HOLD = 9,
            REFUSED = -1, OUT_OF_MEMORY = -2, READ_ONLY = -3, NO_PERMISSION = -4, NO_WRITES = -5,
            IN_FLIGHT = 0
        }
    };
}

macro_rules! constants {
    ($($name:ident = $number:literal),*) => {
        $(pub(super) const $name: i64 = $number;)*
    };
}

numbers!(constants);

/// The same as Lua.
macro_rules! locals {
    ($($name:ident = $number:literal),*) => {
        concat!($("local ", stringify!($name), " = ", $number, "\n"),*)
    };
}

macro_rules! lua {
    ($name:expr) => {
        include_str!(concat!("../../../lua/", $name, ".lua"))
    };
}

/// What is made only if it is asked for.
macro_rules! strategy {
    ($number:expr, $name:expr) => {
        concat!(
            "\nif strategies[",
            $number,
            "] then\nstrategies[",
            $number,
            "] = (function()\n",
            lua!($name),
            "end)()\nend\n"
        )
    };
}

macro_rules! script {
    ($($variant:ident: $module:ident, $name:literal, $letter:literal, $number:literal, $kinds:tt;)*) => {
        /// The script that decides: what the call asks, what the strategies share, each of them, the driver.
        pub(super) const SCRIPT: &str = concat!(
            lua!("call"),
            "\n",
            numbers!(locals),
            "\n",
            lua!("prelude"),
            "\n",
            lua!("meter"),
            $(strategy!($number, stringify!($module)),)*
            strategy!("IN_FLIGHT", "in_flight"),
            "\n",
            lua!("check"),
        );
    };
}

strategies!(script);

/// The number that stands for what a policy counts in an argument.
pub(super) const fn kind_number(kind: Kind) -> u8 {
    match kind {
        Kind::Rate(strategy) => strategy.number(),
        Kind::InFlight => IN_FLIGHT as u8,
    }
}

/// The number that stands for it in an argument.
pub(super) const fn mode_number(mode: Mode) -> u8 {
    let number = match mode {
        Mode::Take => TAKE,
        Mode::UpTo => UP_TO,
        Mode::Peek => PEEK,
        Mode::Charge => CHARGE,
        Mode::Refund => REFUND,
        Mode::Reset => RESET,
        Mode::TakeAhead => TAKE_AHEAD,
        Mode::Renew => RENEW,
        Mode::Hold => HOLD,
    };
    number as u8
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
pub(super) fn arguments(policy: &Policy) -> [i64; 4] {
    let params = policy.params();
    match params.frees {
        Frees::Gradually => [params.capacity, params.interval, params.ticks, 0],
        Frees::InBatches => [params.capacity, params.interval, params.ticks, params.period],
        _ => [params.capacity, params.period, params.offset.unwrap_or(-1), params.width],
    }
}
