//! Shows the counts of `tower-redis-ratelimit` in Redis: the callers who are limited, one caller's counts, which it can reset, and
//! the policies. [`HELP`] describes the arguments.

mod args;
mod callers;
mod counts;
mod settings;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::args::{Args, Command};
use crate::counts::Counts;

const HELP: &str = "\
Shows the counts of tower-redis-ratelimit in Redis.

ratelimit-inspect limited          the callers whose next request is denied, the longest wait first
ratelimit-inspect top              the callers who have used most of a policy
ratelimit-inspect caller CALLER    the counts of one caller
ratelimit-inspect reset CALLER     drops them
ratelimit-inspect policies         the policies under the prefix, and how many callers each has

CALLER     user-42
           '#684888', as in the log
           'x-api-key: sk-1', as in a request that is counted by this header
           secret:sk-1, ip:192.0.2.7, '*' for a global count, tuples with commas, and hashes as in Redis

--settings FILE    the service's settings in TOML, YAML or JSON: reads `store`, and every policy in it
--policy POLICY    only this policy, such as 'api 100/s burst 200', 'login sliding-log 5/15m' or 'uploads in-flight 10/30s'
--url URL          the servers and the prefix, such as 'redis://10.0.0.1/?prefix=shop'. Defaults to the variable REDIS_URL, and
                   then to the settings
--number N         length of a list. Defaults to 20
--json             prints JSON

The keys of buckets contain their quota. Those of windows, logs and requests in flight do not, so they need `--settings` or
`--policy`. Every command reads the whole database, a thousand keys at a time.
";

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let printed = run().await;
    let mut output = io::stdout();
    // Ignore errors of writing: a reader such as `head` may close the pipe early.
    let _ = match &printed {
        Ok(text) => output.write_all(text.as_bytes()),
        Err(error) => report(&**error),
    };
    if printed.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Prints an error and its causes.
fn report(error: &dyn Error) -> io::Result<()> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        writeln!(io::stderr(), "{error}")?;
        cause = error.source();
    }
    Ok(())
}

async fn run() -> Result<String, Box<dyn Error>> {
    let Some(args) = Args::read()? else {
        return Ok(HELP.to_owned());
    };
    let counts = Counts::open(&args)?;
    match &args.command {
        Command::Limited => counts.limited().await,
        Command::Top => counts.top().await,
        Command::Caller(caller) => counts.caller(caller).await,
        Command::Reset(caller) => counts.reset(caller).await,
        Command::Policies => counts.policies().await,
    }
}
