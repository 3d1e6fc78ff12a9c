//! `cargo xtask release`, and the lowest versions of dependencies that a package accepts.

use std::fs;
use std::process::Command;

use crate::Result;
use crate::command::{cargo, root, run};
use crate::metadata::Metadata;

const LIBRARY: &str = "tower-redis-ratelimit";
const PROGRAM: &str = "ratelimit-inspect";

/// Maximum size of the package, which each build of a user downloads. The code takes 250 KiB, its documentation and comments
/// 180, the guide, which docs.rs builds from the package, 85, unit tests inside of files 55, scripts 30, and the lock file, which
/// cargo adds, 17.
const MAX_KIB: u64 = 700;

/// Checks that this commit can be published, and builds what would be.
pub(crate) fn release() -> Result {
    let metadata = Metadata::read()?;
    let changelog = fs::read_to_string(root().join("CHANGELOG.md"))
        .map_err(|error| format!("CHANGELOG.md: {error}"))?;
    let state = State {
        version: metadata.version(),
        without_repository: &metadata.without_repository(),
        changes: &git(&["status", "--porcelain"])?,
        tags: &git(&["tag", "--points-at", "HEAD"])?,
        changelog: &changelog,
    };
    let problems = state.problems();
    if !problems.is_empty() {
        return Err(format!(
            "not ready to publish:\n- {}",
            problems.join("\n- ")
        ));
    }
    package(&metadata, &["--package", PROGRAM])?;
    eprintln!("ready: `cargo publish -p {LIBRARY}`, and then `cargo publish -p {PROGRAM}`");
    Ok(())
}

/// What decides whether a commit can be published.
struct State<'a> {
    version: &'a str,
    /// The packages without a `repository`.
    without_repository: &'a [&'a str],
    /// The output of `git status --porcelain`.
    changes: &'a str,
    /// The tags of the commit, one a line.
    tags: &'a str,
    changelog: &'a str,
}

impl State<'_> {
    fn problems(&self) -> Vec<String> {
        let version = self.version;
        let (tag, heading) = (format!("v{version}"), format!("## {version} - 2"));
        let mut problems = vec![];
        for package in self.without_repository {
            problems.push(format!(
                "{package} has no `repository`: set it in its Cargo.toml, for crates.io's links and README's picture"
            ));
        }
        if !self.changes.is_empty() {
            problems.push(format!(
                "there are uncommitted changes: commit them\n{}",
                self.changes
            ));
        }
        if !self.tags.lines().any(|other| other == tag) {
            problems.push(format!("this commit has no tag {tag}: `git tag {tag}`"));
        }
        if !self
            .changelog
            .lines()
            .any(|line| line.starts_with(&heading))
        {
            problems.push(format!(
                "CHANGELOG.md has no date for {version}: write `## {version} - YYYY-MM-DD`"
            ));
        }
        problems
    }
}

fn git(args: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .args(args)
        .current_dir(root())
        .output()
        .map_err(|error| format!("git: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout)
            .trim_end()
            .to_owned()),
        false => Err(format!(
            "git {args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

/// Packages the library as for the registry, and builds the package, which shows that no file is
/// missing. Fails if the package is too large.
pub(crate) fn package(metadata: &Metadata, more: &[&str]) -> Result {
    // Use the same target folder, so that dependencies are not built again.
    let args = [
        "package",
        "--quiet",
        "--package",
        LIBRARY,
        "--target-dir",
        "target",
    ];
    cargo(&[&args, more].concat())?;
    let name = format!("target/package/{LIBRARY}-{}.crate", metadata.version());
    let size = fs::metadata(root().join(&name)).map_err(|error| format!("{name}: {error}"))?;
    match size.len() / 1024 {
        kib if kib < MAX_KIB => Ok(()),
        kib => Err(format!(
            "{name} has {kib} KiB, more than {MAX_KIB}: leave files out by `include` in Cargo.toml"
        )),
    }
}

/// Compiles the package with the lowest versions that its manifest accepts of each dependency, since a user's lock file may have
/// them.
pub(crate) fn floors() -> Result {
    let metadata = Metadata::read()?;
    package(&metadata, &["--allow-dirty", "--no-verify"])?;
    let name = format!("{LIBRARY}-{}", metadata.version());
    let packages = root().join("target/package");
    run(Command::new("tar")
        .args(["xzf", &format!("{name}.crate")])
        .current_dir(&packages))?;
    let folder = packages.join(name);
    let manifest = folder.join("Cargo.toml");
    let text = fs::read_to_string(&manifest)
        .map_err(|error| format!("{}: {error}", manifest.display()))?;
    // Otherwise it would be a part of this workspace.
    let text = without_tests(&text) + "\n[workspace]\n";
    fs::write(&manifest, text).map_err(|error| format!("{}: {error}", manifest.display()))?;
    // The option is unstable, but its result is a usual lock file.
    run(Command::new("cargo")
        .args(["generate-lockfile", "-Zdirect-minimal-versions"])
        .env("RUSTC_BOOTSTRAP", "1")
        .current_dir(&folder))?;
    run(Command::new("cargo")
        .args([
            "check",
            "--locked",
            "--lib",
            "--all-features",
            "--target-dir",
        ])
        .arg(root().join("target/floors"))
        .current_dir(&folder))
}

/// Returns a manifest without tests and their dependencies, which have floors of their own.
fn without_tests(manifest: &str) -> String {
    let mut kept = String::new();
    let mut is_kept = true;
    for line in manifest.lines() {
        if line.starts_with('[') {
            is_kept = !line.starts_with("[dev-dependencies") && line != "[[test]]";
        }
        if is_kept {
            kept += line;
            kept.push('\n');
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_needs_repository_tag_and_date() {
        let ready = || State {
            version: "0.1.0",
            without_repository: &[],
            changes: "",
            tags: "other\nv0.1.0",
            changelog: "# Changelog\n\n## 0.1.0 - 2027-01-31\n",
        };
        assert!(ready().problems().is_empty());
        for state in [
            State {
                without_repository: &[PROGRAM],
                ..ready()
            },
            State {
                changes: " M README.md",
                ..ready()
            },
            State {
                tags: "v0.1.0-rc",
                ..ready()
            },
            State {
                changelog: "## 0.1.0 - unreleased\n",
                ..ready()
            },
        ] {
            assert_eq!(state.problems().len(), 1, "{:?}", state.problems());
        }
    }

    #[test]
    fn floors_omit_dependencies_of_tests() {
        let manifest =
            "[package]\na = 1\n[dev-dependencies.b]\nc = 2\n[[test]]\nd = 3\n[features]\ne = 4\n";
        assert_eq!(
            without_tests(manifest),
            "[package]\na = 1\n[features]\ne = 4\n"
        );
    }
}
