//! Finds programs that tests and checks need, or installs them with the system's package manager.

use std::process::Command;

use crate::Result;
use crate::command::{run, succeeds};

/// The server that tests use.
pub(crate) fn redis_server() -> Result {
    find(
        "redis-server",
        "redis-server",
        "redis",
        "https://redis.io/docs/latest/operate/oss_and_stack/install/",
    )
}

/// The tool that checks alert rules.
pub(crate) fn promtool() -> Result {
    find(
        "promtool",
        "prometheus",
        "prometheus",
        "https://prometheus.io/docs/prometheus/latest/installation/",
    )
}

/// Finds a program, or installs its package, whose name may differ for apt.
fn find(program: &str, of_apt: &str, package: &str, help: &str) -> Result {
    if succeeds(program, &["--version"]) {
        return Ok(());
    }
    let installers: [&[&str]; 5] = [
        &[
            "apt-get",
            "install",
            "--yes",
            "--no-install-recommends",
            of_apt,
        ],
        &["dnf", "install", "--assumeyes", package],
        &["apk", "add", package],
        &["pacman", "--sync", "--noconfirm", package],
        &["brew", "install", package],
    ];
    for installer in installers {
        if !succeeds(installer[0], &["--version"]) {
            continue;
        }
        eprintln!(
            "`{program}` is not on the PATH: installing it with {}",
            installer[0]
        );
        // Without package lists, apt finds no packages.
        if installer[0] == "apt-get" {
            run(&mut privileged(&["apt-get", "update"]))?;
        }
        run(&mut privileged(installer))?;
        return match succeeds(program, &["--version"]) {
            true => Ok(()),
            false => Err(format!(
                "{} has run, and `{program}` is still not on the PATH",
                installer[0]
            )),
        };
    }
    Err(format!(
        "`{program}` is not on the PATH, and no package manager known here could install it: see {help}"
    ))
}

/// Returns the command, with `sudo` if that is available and the package manager needs it.
fn privileged(command: &[&str]) -> Command {
    let words = match command[0] != "brew" && succeeds("sudo", &["-n", "true"]) {
        true => [&["sudo"], command].concat(),
        false => command.to_vec(),
    };
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}
