//! Shows the counts of `tower-redis-ratelimit` in Redis: the callers who are limited, one caller's counts, which it can reset, and
//! the policies. [`Args`] describes the arguments.

mod args;
mod callers;
mod counts;
mod settings;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use clap_complete::Shell;

use crate::args::{Args, Command};
use crate::counts::Counts;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // Wrong usage ends the process here, with code 2.
    let args = Args::parse();
    let printed = run(&args).await;
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

async fn run(args: &Args) -> Result<String, Box<dyn Error>> {
    match &args.command {
        Command::Limited => Counts::open(args)?.limited().await,
        Command::Top => Counts::open(args)?.top().await,
        Command::Caller { caller } => Counts::open(args)?.caller(caller).await,
        Command::Reset { caller } => Counts::open(args)?.reset(caller).await,
        Command::Block { caller, time } => Counts::open(args)?.block(caller, Some(*time)).await,
        Command::Unblock { caller } => Counts::open(args)?.block(caller, None).await,
        Command::Policies => Counts::open(args)?.policies().await,
        Command::Completions { shell } => Ok(completions(*shell)),
    }
}

fn completions(shell: Shell) -> String {
    let mut script = vec![];
    let mut command = Args::command();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
