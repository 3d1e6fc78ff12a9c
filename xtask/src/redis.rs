//! The server that the tests need.

use std::process::Command;

use crate::Result;
use crate::command::{run, succeeds};

/// Finds `redis-server`, or installs it with the system's package manager.
pub(crate) fn redis_server() -> Result {
    if succeeds("redis-server", &["--version"]) {
        return Ok(());
    }
    let installers: [&[&str]; 5] = [
        &["apt-get", "install", "--yes", "--no-install-recommends", "redis-server"],
        &["dnf", "install", "--assumeyes", "redis"],
        &["apk", "add", "redis"],
        &["pacman", "--sync", "--noconfirm", "redis"],
        &["brew", "install", "redis"],
    ];
    for installer in installers {
        if !succeeds(installer[0], &["--version"]) {
            continue;
        }
        // Without its lists, apt finds no package.
        if installer[0] == "apt-get" {
            run(&mut privileged(&["apt-get", "update"]))?;
        }
        run(&mut privileged(installer))?;
        return match succeeds("redis-server", &["--version"]) {
            true => Ok(()),
            false => Err(format!("{} has run, and `redis-server` is still not on the PATH", installer[0])),
        };
    }
    Err("the tests need `redis-server` on the PATH, and no package manager known here could install it: \
         see https://redis.io/docs/latest/operate/oss_and_stack/install/"
        .to_owned())
}

/// The command, with `sudo` where there is one and the package manager wants it.
fn privileged(command: &[&str]) -> Command {
    let words = match command[0] != "brew" && succeeds("sudo", &["-n", "true"]) {
        true => [&["sudo"], command].concat(),
        false => command.to_vec(),
    };
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("DEBIAN_FRONTEND", "noninteractive");
    command
}
