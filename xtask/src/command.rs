//! Runs other programs, with or without their output.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::Result;

/// The folder of the repository.
pub(crate) fn root() -> &'static Path {
    // Set by Cargo to the folder of this package.
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

pub(crate) fn cargo(args: &[&str]) -> Result {
    run(Command::new("cargo").args(args))
}

pub(crate) fn run(command: &mut Command) -> Result {
    eprintln!("+ {command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} failed: {status}")),
        Err(error) => Err(format!("{command:?} could not be started: {error}")),
    }
}

pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
