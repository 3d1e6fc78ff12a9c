//! What stands for a mode and a problem in the script's arguments and reply, and the text of the script.

use crate::limit::{Frees, Kind, Mode, Policy, strategies};

/// Gives a macro the numbers that both halves of the script know, beside those of the strategies: of modes, of what
/// went wrong in place of what was granted, and of what counts requests in flight.
macro_rules! numbers {
    ($with:ident) => {
        $with! {
            Take TAKE = 1, UpTo UP_TO = 2, Peek PEEK = 3, Charge CHARGE = 4, Refund REFUND = 5, Reset RESET = 6,
            TakeAhead TAKE_AHEAD = 7, Renew RENEW = 8, Release RELEASE = 9;
            REFUSED = -1, OUT_OF_MEMORY = -2, READ_ONLY = -3, NO_WRITES = -5, ELSEWHERE = -6, NO_PERMISSION = -10,
            IN_FLIGHT = 0
        }
    };
}

macro_rules! in_rust {
    ($($mode:ident $_name:ident = $mode_number:literal),*; $($name:ident = $number:literal),*) => {
        $(pub(crate) const $name: i64 = $number;)*

        /// The number that stands for it in an argument.
        pub(crate) const fn mode_number(mode: Mode) -> u8 {
            match mode { $(Mode::$mode => $mode_number,)* }
        }
    };
}

numbers!(in_rust);

/// The rights that the script needs; what a check lacks is [`NO_PERMISSION`] less the place of the right, from 1 on.
/// `lua/problem.lua` has the same list.
pub(crate) const RIGHTS: [&str; 16] = [
    "mget",
    "set",
    "setrange",
    "del",
    "lrange",
    "rpush",
    "lset",
    "ltrim",
    "lrem",
    "pexpireat",
    "zcard",
    "zrange",
    "zremrangebyscore",
    "zscore",
    "zadd",
    "zrem",
];

macro_rules! in_lua {
    ($($mode:ident $mode_name:ident = $mode_number:literal),*; $($name:ident = $number:literal),*) => {
        concat!(
            $("local ", stringify!($mode_name), " = ", $mode_number, "\n",)*
            $("local ", stringify!($name), " = ", $number, "\n",)*
        )
    };
}

macro_rules! lua {
    ($name:expr) => {
        include_str!(concat!("../../../../lua/", $name, ".lua"))
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
        /// The script of every check: the call, the functions that the strategies share, the strategies, the driver, and the
        /// reply.
        pub(crate) const CHECK: &str = concat!(
            lua!("call"),
            "\n",
            numbers!(in_lua),
            lua!("prelude"),
            "\n",
            lua!("meter"),
            $(strategy!($number, stringify!($module)),)*
            strategy!("IN_FLIGHT", "in_flight"),
            "\n",
            lua!("check"),
            "\n",
            lua!("problem"),
            "\n",
            lua!("reply"),
        );
    };
}

/// The script of the most frequent call. The numbers of modes and problems come after its usual end: each takes time.
pub(crate) const TAKES: &str = concat!(
    lua!("takes"),
    "\n",
    numbers!(in_lua),
    lua!("problem"),
    "\n",
    lua!("takes_failed"),
);

strategies!(script);

/// The number that stands for what a policy counts in an argument.
pub(crate) const fn kind_number(kind: Kind) -> u8 {
    match kind {
        Kind::Rate(strategy) => strategy.number(),
        Kind::InFlight => IN_FLIGHT as u8,
    }
}

/// A policy as the `policy` function of its strategy in Lua takes it; `lua/prelude.lua` has their contract.
///
/// First comes the capacity, in units of cost. Then, of what refills:
/// - how many ticks make a unit of cost,
/// - how many ticks come at a time: in every microsecond, or after every period,
/// - that period in microseconds, or 0.
///
/// For a window, and for requests in flight, whose period is the time to live of a slot:
/// - its period in microseconds,
/// - when windows of the clock begin, in microseconds within a period, or -1 where a first charge begins one,
/// - the width of a cell in microseconds.
pub(crate) fn arguments(policy: &Policy) -> [i64; 4] {
    let params = policy.params();
    match params.frees {
        Frees::Gradually => [params.capacity, params.interval, params.ticks, 0],
        Frees::InBatches => [
            params.capacity,
            params.interval,
            params.ticks,
            params.period,
        ],
        Frees::WithWindow | Frees::OneByOne | Frees::Fading | Frees::OnRelease => [
            params.capacity,
            params.period,
            params.offset.unwrap_or(-1),
            params.width,
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_halves_list_the_same_rights() {
        let quoted = RIGHTS
            .map(|right| format!("'{}'", right.to_uppercase()))
            .join(", ");
        for script in [CHECK, TAKES] {
            let in_one_line = script.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(
                in_one_line.contains(&format!("{{ {quoted}, }}")),
                "{quoted}"
            );
        }
    }
}
