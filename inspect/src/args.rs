//! The arguments.

use std::env;
use std::error::Error;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::value::{Error as Invalid, MapDeserializer};
use tower_redis_ratelimit::Policy;

use crate::callers::CallerArg;

pub(crate) struct Args {
    pub(crate) command: Command,
    pub(crate) settings: Option<PathBuf>,
    pub(crate) policies: Vec<Policy>,
    pub(crate) url: Option<String>,
    /// The length of a list.
    pub(crate) max_rows: usize,
    pub(crate) json: bool,
}

pub(crate) enum Command {
    Limited,
    Top,
    Caller(CallerArg),
    Reset(CallerArg),
    Policies,
}

impl Args {
    /// Reads the arguments of this process. `None` for `--help`.
    pub(crate) fn read() -> Result<Option<Self>, Box<dyn Error>> {
        let mut words = vec![];
        let (mut settings, mut policies, mut max_rows, mut json) = (None, vec![], 20, false);
        let mut url = env::var("REDIS_URL").ok();
        let mut args = env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} has no value"));
            match arg.as_str() {
                "--settings" => settings = Some(PathBuf::from(value()?)),
                "--policy" => policies.push(parse_policy(&value()?)?),
                "--url" => url = Some(value()?),
                "--number" => {
                    let text = value()?;
                    max_rows = text
                        .parse()
                        .map_err(|_| format!("--number is {text:?}: use an integer"))?;
                }
                "--json" => json = true,
                "--help" | "-h" => return Ok(None),
                option if option.starts_with("--") => {
                    return Err(format!("{option:?} is unknown: see --help").into());
                }
                _ => words.push(arg),
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let command = match words[..] {
            [] | ["help"] => return Ok(None),
            ["limited"] => Command::Limited,
            ["top"] => Command::Top,
            ["policies"] => Command::Policies,
            ["caller", caller] => Command::Caller(CallerArg::parse(caller)?),
            ["reset", caller] => Command::Reset(CallerArg::parse(caller)?),
            _ => {
                return Err(format!(
                    "{:?} is no command: use `limited`, `top`, `policies`, `caller CALLER` or `reset CALLER`",
                    words.join(" ")
                )
                .into());
            }
        };
        Ok(Some(Self {
            command,
            settings,
            policies,
            url,
            max_rows,
            json,
        }))
    }
}

/// Parses `name quota` or `name strategy quota`.
fn parse_policy(text: &str) -> Result<Policy, String> {
    let (name, rest) = text.trim().split_once(' ').unwrap_or((text, ""));
    // The quota is the first word that begins with a digit. A strategy has digits only within words.
    let mut digits = rest
        .match_indices(|c: char| c.is_ascii_digit())
        .map(|(at, _)| at);
    let start = digits.find(|at| rest[..*at].trim_end().len() < *at || *at == 0);
    let (strategy, quota) = rest.split_at(start.unwrap_or(0));
    let strategy = Some(("strategy", strategy.trim())).filter(|(_, strategy)| !strategy.is_empty());
    let fields = [("name", name), ("quota", quota)]
        .into_iter()
        .chain(strategy);
    let policy = Policy::deserialize(MapDeserializer::new(fields));
    policy.map_err(|error: Invalid| format!("--policy {text:?}: {error}"))
}
