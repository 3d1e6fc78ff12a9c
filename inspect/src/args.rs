//! The arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use clap_complete::Shell;
use serde::Deserialize;
use serde::de::value::{Error as Invalid, MapDeserializer};
use tower_redis_ratelimit::Policy;
use tower_redis_ratelimit::reject::BlockAfter;

use crate::callers::CallerArg;

/// Shows and resets the counts, and blocks callers, of tower-redis-ratelimit in Redis.
#[derive(Parser)]
#[command(version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// The service's settings in TOML, YAML or JSON: reads `store`, and every policy in it.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) settings: Option<PathBuf>,
    /// Only this policy, such as 'api 100/s burst 200', 'login sliding-log 5/15m' or 'uploads in-flight 10/30s'.
    #[arg(long = "policy", global = true, value_name = "POLICY", value_parser = parse_policy)]
    pub(crate) policies: Vec<Policy>,
    /// The servers and the prefix, such as 'redis://10.0.0.1/?prefix=shop'. Defaults to those of the settings.
    #[arg(long, global = true, env = "REDIS_URL", hide_env_values = true)]
    pub(crate) url: Option<String>,
    /// The length of a list.
    #[arg(long = "number", global = true, value_name = "N", default_value_t = 20)]
    pub(crate) max_rows: usize,
    /// Prints JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

const AFTER_HELP: &str = "\
Every command but block reads the whole database, a thousand keys at a time. The keys of buckets contain their quota. Those of \
windows, logs and requests in flight do not, so they need --settings or --policy.";

const CALLER_HELP: &str = "\
user-42; '#684888', as in the log; 'x-api-key: sk-1', as in a request that is counted by this header; secret:sk-1; \
ip:192.0.2.7; '*' for a global count; tuples with commas; or a hash as in Redis";

#[derive(Subcommand)]
pub(crate) enum Command {
    /// The callers whose next request is denied, the longest wait first.
    Limited,
    /// The callers who have used most of a policy.
    Top,
    /// The counts of one caller.
    Caller {
        #[arg(help = CALLER_HELP, value_parser = CallerArg::parse)]
        caller: CallerArg,
    },
    /// Drops the counts of one caller.
    Reset {
        #[arg(help = CALLER_HELP, value_parser = CallerArg::parse)]
        caller: CallerArg,
    },
    /// Blocks one caller under the policies of --policy or --settings, in every layer that enforces blocks.
    Block {
        #[arg(help = CALLER_HELP, value_parser = CallerArg::parse)]
        caller: CallerArg,
        /// How long, such as 24h: 1 second to 366 days. A block that ends later is kept.
        #[arg(value_parser = parse_time)]
        time: Duration,
    },
    /// Ends the block of one caller under the policies of --policy or --settings.
    Unblock {
        #[arg(help = CALLER_HELP, value_parser = CallerArg::parse)]
        caller: CallerArg,
    },
    /// The policies under the prefix, and how many callers each has.
    Policies,
    /// Prints a script for a shell, which completes commands and options.
    Completions { shell: Shell },
}

/// Parses the time of a block.
fn parse_time(text: &str) -> Result<Duration, String> {
    let rule: Result<BlockAfter, _> = format!("1/s for {text}").parse();
    match rule {
        Ok(rule) => Ok(rule.time()),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses `name quota` or `name strategy quota`.
fn parse_policy(text: &str) -> Result<Policy, String> {
    let (name, rest) = text.trim().split_once(' ').unwrap_or((text, ""));
    // The quota is the first word that begins with a digit. A strategy has digits only within words, or in parentheses.
    let after = rest.rfind(')').unwrap_or(0);
    let mut digits = rest
        .match_indices(|c: char| c.is_ascii_digit())
        .map(|(at, _)| at);
    let start = digits.find(|at| *at >= after && (rest[..*at].trim_end().len() < *at || *at == 0));
    let (strategy, quota) = rest.split_at(start.unwrap_or(0));
    let strategy = Some(("strategy", strategy.trim())).filter(|(_, strategy)| !strategy.is_empty());
    let fields = [("name", name), ("quota", quota)]
        .into_iter()
        .chain(strategy);
    let policy = Policy::deserialize(MapDeserializer::new(fields));
    policy.map_err(|error: Invalid| error.to_string())
}
