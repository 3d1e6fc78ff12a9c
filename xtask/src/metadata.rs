//! The metadata of the library and its dependencies, from `cargo metadata`.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::Result;
use crate::command::root;

pub(crate) struct Metadata(Value);

impl Metadata {
    pub(crate) fn read() -> Result<Self> {
        let output = Command::new("cargo")
            .args(["metadata", "--format-version", "1", "--all-features"])
            .current_dir(root())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| format!("cargo metadata: {error}"))?;
        serde_json::from_slice(&output.stdout)
            .map(Self)
            .map_err(|error| format!("cargo metadata: {error}"))
    }

    /// The features of the library.
    pub(crate) fn features(&self) -> Vec<&str> {
        let features = self.library()["features"].as_object();
        features
            .into_iter()
            .flatten()
            .map(|(name, _)| name.as_str())
            .filter(|name| *name != "default")
            .collect()
    }

    pub(crate) fn version(&self) -> &str {
        self.library()["version"].as_str().unwrap_or_default()
    }

    /// The names of the packages that are published and have no `repository`.
    pub(crate) fn without_repository(&self) -> Vec<&str> {
        self.members()
            .filter(|package| package["publish"].is_null() && package["repository"].is_null())
            .filter_map(|package| package["name"].as_str())
            .collect()
    }

    /// The `rust-version` of the library.
    pub(crate) fn rust_version(&self) -> &str {
        self.library()["rust_version"].as_str().unwrap_or_default()
    }

    /// Checks the dependencies, with all features on all platforms: every license is allowed, none
    /// needs a newer Rust than the library, and none is present in two versions. Exceptions are in
    /// `deny.toml`.
    pub(crate) fn check_dependencies(&self) -> Result {
        let ours = version(self.library());
        let rules = rules()?;
        let (licenses, twice) = (&rules["licenses"]["allow"], &rules["bans"]["skip"]);
        let dependencies = self.dependencies()?;
        for package in &dependencies {
            let name = &package["name"];
            if version(package) > ours {
                let needed = &package["rust_version"];
                return Err(format!(
                    "{name} needs Rust {needed}, more than the rust-version in Cargo.toml"
                ));
            }
            let license = package["license"].as_str().unwrap_or_default();
            if !is_allowed(license, licenses) {
                return Err(format!(
                    "{name} is licensed as {license:?}, which deny.toml does not allow"
                ));
            }
            let is_twice = dependencies
                .iter()
                .any(|other| other["name"] == *name && other["id"] != package["id"]);
            if is_twice
                && !twice
                    .as_array()
                    .into_iter()
                    .flatten()
                    .any(|known| known["crate"] == *name)
            {
                return Err(format!(
                    "the library needs {name} in two versions, which costs each user time and space"
                ));
            }
        }
        Ok(())
    }

    /// The packages of the workspace.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Value> {
        let ids = self.0["workspace_members"].as_array();
        ids.into_iter().flatten().map(|id| self.package(id))
    }

    fn library(&self) -> &Value {
        self.package(&self.0["resolve"]["root"])
    }

    fn package(&self, id: &Value) -> &Value {
        let packages = self.0["packages"].as_array();
        packages
            .into_iter()
            .flatten()
            .find(|package| package["id"] == *id)
            .unwrap_or(&Value::Null)
    }

    /// Returns the library and its build dependencies. Uses `cargo tree`, since the metadata
    /// include the features that any package of the workspace enables.
    fn dependencies(&self) -> Result<Vec<&Value>> {
        let library = self.library()["name"].as_str().unwrap_or_default();
        let mut tree = Command::new("cargo");
        tree.args([
            "tree",
            "--package",
            library,
            "--all-features",
            "--edges",
            "normal",
            "--target",
            "all",
        ]);
        tree.args(["--prefix", "none", "--no-dedupe"])
            .current_dir(root());
        let output = tree
            .output()
            .map_err(|error| format!("{tree:?}: {error}"))?;
        if !output.status.success() {
            return Err(format!(
                "{tree:?} failed: {}",
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        // A line such as `serde_derive v1.0.229 (proc-macro)`.
        let text = String::from_utf8_lossy(&output.stdout);
        let of_line = |line: &'_ str| {
            let mut words = line.split(' ').map(str::to_owned);
            Some((
                words.next()?,
                words.next()?.trim_start_matches('v').to_owned(),
            ))
        };
        let names: BTreeSet<(String, String)> = text.lines().filter_map(of_line).collect();
        let packages = || self.0["packages"].as_array().into_iter().flatten();
        let found = names.iter().map(|(name, version)| {
            let found = packages()
                .find(|package| package["name"] == *name && package["version"] == *version);
            found.ok_or_else(|| {
                format!("cargo's metadata have no {name} {version}, which is in its tree")
            })
        });
        found.collect()
    }
}

/// Reads `deny.toml`, the configuration of cargo-deny.
fn rules() -> Result<Value> {
    let text = fs::read_to_string(root().join("deny.toml"))
        .map_err(|error| format!("deny.toml: {error}"))?;
    toml::from_str(&text).map_err(|error| format!("deny.toml: {error}"))
}

/// Parses `rust-version` into numbers. Empty without one, which is below all others.
fn version(package: &Value) -> Vec<u32> {
    let text = package["rust_version"].as_str().unwrap_or_default();
    text.split('.')
        .map_while(|part| part.parse().ok())
        .chain([0, 0])
        .take(3)
        .collect()
}

/// Returns `true` if an expression such as `(MIT OR Apache-2.0) AND Unicode-3.0` permits an allowed
/// choice.
fn is_allowed(license: &str, allowed: &Value) -> bool {
    let alternatives = |part: &str| part.replace(['(', ')'], "").replace('/', " OR ");
    let is_allowed = |name: &str| {
        allowed
            .as_array()
            .into_iter()
            .flatten()
            .any(|known| *known == *name.trim())
    };
    license
        .split(" AND ")
        .all(|part| alternatives(part).split(" OR ").any(is_allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn license_expressions_need_an_allowed_choice() {
        let allowed = rules().unwrap()["licenses"]["allow"].take();
        for license in [
            "MIT",
            "MIT/Apache-2.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "GPL-3.0-only OR MIT",
        ] {
            assert!(is_allowed(license, &allowed), "{license}");
        }
        for license in [
            "",
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR Apache-2.0) AND OpenSSL",
        ] {
            assert!(!is_allowed(license, &allowed), "{license}");
        }
    }
    #[test]
    fn pages_state_dependencies_and_rust_version() {
        let read = |page: &str| fs::read_to_string(root().join(page)).unwrap();
        let metadata = Metadata::read().unwrap();
        let by_default =
            |dependency: &&Value| dependency["kind"].is_null() && dependency["optional"] == false;
        let dependencies = metadata.library()["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .filter(by_default);
        let dependencies: BTreeSet<&str> = dependencies
            .map(|dependency| dependency["name"].as_str().unwrap())
            .collect();

        let security = read("SECURITY.md");
        let rows = security
            .lines()
            .skip_while(|line| *line != "| crate | for |")
            .skip(2);
        let names = rows.map_while(|row| row.strip_prefix("| ")?.split(" |").next());
        assert_eq!(
            dependencies,
            names
                .flat_map(|names| names.split(", "))
                .map(|name| name.trim_matches('`'))
                .collect()
        );

        assert!(read("README.md").contains(&format!("Rust {} or later", metadata.rust_version())));
    }
}
