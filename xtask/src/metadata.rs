//! What `cargo metadata` tells of the library and of what it depends on.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::Result;
use crate::command::root;

/// What a license expression may come down to.
const LICENSES: [&str; 7] =
    ["Apache-2.0", "BSD-3-Clause", "BSL-1.0", "CDLA-Permissive-2.0", "ISC", "MIT", "Unicode-3.0"];

/// What may be there in two versions: no dependency of ours has a choice. `syn` is for macros, and not linked.
const TWICE: [&str; 2] = ["syn", "windows-sys"];

pub(crate) struct Metadata(Value);

impl Metadata {
    pub(crate) fn read() -> Result<Self> {
        let output = Command::new("cargo")
            .args(["metadata", "--format-version", "1", "--all-features"])
            .current_dir(root())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| format!("cargo metadata: {error}"))?;
        serde_json::from_slice(&output.stdout).map(Self).map_err(|error| format!("cargo metadata: {error}"))
    }

    /// The features of the library.
    pub(crate) fn features(&self) -> Vec<&str> {
        let features = self.library()["features"].as_object();
        features.into_iter().flatten().map(|(name, _)| name.as_str()).filter(|name| *name != "default").collect()
    }

    /// The Rust version that the library states.
    pub(crate) fn rust_version(&self) -> &str {
        self.library()["rust_version"].as_str().unwrap_or_default()
    }

    /// What the library needs, with all features on all platforms: every license is fit for any use, the Rust version
    /// that we state is enough for all of it, and nothing is there in two versions.
    pub(crate) fn check_dependencies(&self) -> Result {
        let ours = version(self.library());
        let dependencies = self.dependencies();
        for package in &dependencies {
            let name = &package["name"];
            if version(package) > ours {
                let needed = &package["rust_version"];
                return Err(format!("{name} needs Rust {needed}, more than the rust-version in Cargo.toml"));
            }
            let license = package["license"].as_str().unwrap_or_default();
            if !is_allowed(license) {
                return Err(format!("{name} is licensed as {license:?}, which xtask/src/metadata.rs does not allow"));
            }
            let twice = dependencies.iter().any(|other| other["name"] == *name && other["id"] != package["id"]);
            if twice && !TWICE.contains(&name.as_str().unwrap_or_default()) {
                return Err(format!("the library needs {name} in two versions, which costs each user time and space"));
            }
        }
        Ok(())
    }

    fn library(&self) -> &Value {
        self.package(&self.0["resolve"]["root"])
    }

    fn package(&self, id: &Value) -> &Value {
        let packages = self.0["packages"].as_array();
        packages.into_iter().flatten().find(|package| package["id"] == *id).unwrap_or(&Value::Null)
    }

    /// The library, and what it needs to be built.
    fn dependencies(&self) -> Vec<&Value> {
        let nodes = self.0["resolve"]["nodes"].as_array();
        let (mut seen, mut next) = (vec![], vec![&self.0["resolve"]["root"]]);
        while let Some(id) = next.pop() {
            if seen.contains(&id) {
                continue;
            }
            seen.push(id);
            let node = nodes.into_iter().flatten().find(|node| node["id"] == *id);
            for dependency in node.and_then(|node| node["deps"].as_array()).into_iter().flatten() {
                let kinds = dependency["dep_kinds"].as_array();
                if kinds.into_iter().flatten().any(|kind| kind["kind"].is_null()) {
                    next.push(&dependency["pkg"]);
                }
            }
        }
        seen.into_iter().map(|id| self.package(id)).collect()
    }
}

/// `rust-version` as numbers; empty, and so below all others, where there is none.
fn version(package: &Value) -> Vec<u32> {
    let text = package["rust_version"].as_str().unwrap_or_default();
    text.split('.').map_while(|part| part.parse().ok()).chain([0, 0]).take(3).collect()
}

/// Whether an expression such as `(MIT OR Apache-2.0) AND Unicode-3.0` leaves us a choice that is allowed.
fn is_allowed(license: &str) -> bool {
    let alternatives = |part: &str| part.replace(['(', ')'], "").replace('/', " OR ");
    license.split(" AND ").all(|part| alternatives(part).split(" OR ").any(|name| LICENSES.contains(&name.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_license_is_allowed_if_each_of_its_parts_leaves_a_choice_that_is() {
        for license in ["MIT", "MIT/Apache-2.0", "(MIT OR Apache-2.0) AND Unicode-3.0", "GPL-3.0-only OR MIT"] {
            assert!(is_allowed(license), "{license}");
        }
        for license in ["", "GPL-3.0-only", "MIT AND GPL-3.0-only", "(MIT OR Apache-2.0) AND OpenSSL"] {
            assert!(!is_allowed(license), "{license}");
        }
    }
}
