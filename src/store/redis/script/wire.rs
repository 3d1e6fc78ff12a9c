//! The constants that Rust and Lua share, and the text of the scripts.

use crate::limit::{Frees, Mode, Policy, PolicyKind, strategies};

/// Calls a macro with the constants that both halves share, except the numbers of strategies: modes, problems, the
/// number of requests in flight as a kind of count, and the mode of a check that only records an id.
macro_rules! numbers {
    ($with:ident) => {
        $with! {
            Take TAKE = 1, UpTo UP_TO = 2, Peek PEEK = 3, Charge CHARGE = 4, Refund REFUND = 5, Reset RESET = 6,
            TakeAhead TAKE_AHEAD = 7, Renew RENEW = 8, Release RELEASE = 9;
            REFUSED = -1, OUT_OF_MEMORY = -2, READ_ONLY = -3, NO_WRITES = -5, ELSEWHERE = -6, NO_PERMISSION = -10,
            NO_COMMAND = -30, IN_FLIGHT = 0, RECORD = 10
        }
    };
}

macro_rules! in_rust {
    ($($mode:ident $_name:ident = $mode_number:literal),*; $($name:ident = $number:literal),*) => {
        $(pub(crate) const $name: i64 = $number;)*

        /// The number of a mode in an argument.
        pub(crate) const fn mode_number(mode: Mode) -> u8 {
            match mode { $(Mode::$mode => $mode_number,)* }
        }
    };
}

numbers!(in_rust);

/// The rights that the script needs. A check whose user lacks the n-th right (n >= 1) fails with [`NO_PERMISSION`] - n, and
/// one whose server lacks that command with [`NO_COMMAND`] - n. `lua/problem.lua` has the same list.
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

/// Wraps a strategy in a Lua function, so that a call only creates the strategies that it uses.
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
        /// The script for checks of any kind: the call, shared helpers, the strategies, the driver and the reply.
        pub(crate) const CHECK: &str = concat!(
            // Each file uses the locals of the files before it.
            lua!("common"),
            "\n",
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

/// A script for frequent calls. The code for rare ones comes after the fast path, which returns before: setting
/// constants and creating functions takes time.
macro_rules! fast {
    ($path:expr) => {
        concat!(
            $path,
            "\n",
            numbers!(in_lua),
            "local policy_count = 0\n",
            lua!("common"),
            "\n",
            lua!("prelude"),
            "\n",
            lua!("meter"),
            "\n",
            lua!("changed"),
            "\n",
            lua!("problem"),
            "\n",
            lua!("takes_failed"),
        )
    };
}

/// Decides a call of a single take under one meter.
pub(crate) const TAKE: &str = fast!(concat!(lua!("take"), "\n", lua!("takes")));

/// Decides a call of takes, each under one meter.
pub(crate) const TAKES: &str = fast!(lua!("takes"));

strategies!(script);

/// The number of a policy's kind of count in an argument.
pub(crate) const fn kind_number(kind: PolicyKind) -> u8 {
    match kind {
        PolicyKind::Rate(strategy) => strategy.number(),
        PolicyKind::InFlight => IN_FLIGHT as u8,
    }
}

/// Encodes a policy for the `policy` function of its strategy in Lua; `lua/prelude.lua` has the contract.
///
/// The first number is the capacity in units of cost. For a refilling quota follow:
/// - the ticks in a unit of cost,
/// - the ticks that drain per microsecond, or per period,
/// - that period in microseconds, or 0 for every microsecond.
///
/// For a window, and for requests in flight, whose period is the time to live of a slot, follow:
/// - the period in microseconds,
/// - the offset of clock-aligned windows in microseconds within a period, or -1 if the first charge begins a window,
/// - the width of a cell in microseconds.
///
/// For a calendar follow the borders of two windows around `clock`, an estimate of Redis's time: the script decides only
/// if its time is within them.
pub(crate) fn arguments(policy: &Policy, clock: i64) -> [i64; 4] {
    let params = policy.params();
    if let Some(calendar) = params.calendar {
        // Without borders, no time is within them.
        let [start, between, end] = calendar.borders(clock).unwrap_or([0; 3]);
        return [params.capacity, start, between, end];
    }
    match params.frees {
        Frees::Gradually => [params.capacity, params.interval, params.ticks, 0],
        Frees::InBatches => [
            params.capacity,
            params.interval,
            params.ticks,
            params.period,
        ],
        Frees::WithWindow
        | Frees::WithCell
        | Frees::OneByOne
        | Frees::Fading
        | Frees::OnRelease => [
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
        for script in [CHECK, TAKES, TAKE] {
            let in_one_line = script.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(
                in_one_line.contains(&format!("{{ {quoted}, }}")),
                "{quoted}"
            );
        }
    }
}
