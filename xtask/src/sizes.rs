//! `cargo xtask sizes`: the binaries of `examples/sizes`, optimized and without symbols.

use std::fs;

use crate::Result;
use crate::command::{cargo, root};

const PROGRAMS: [&str; 5] = ["alone", "by_hand", "local", "redis", "any"];

pub(crate) fn sizes() -> Result {
    let strip = "profile.release.strip=true";
    cargo(&[
        "build",
        "--release",
        "--package",
        "sizes",
        "--config",
        strip,
        "--target-dir",
        "target/sizes",
    ])?;
    println!("| program | bytes | more than axum alone |\n|---|--:|--:|");
    let mut alone = 0;
    for program in PROGRAMS {
        let path = root().join("target/sizes/release").join(program);
        let size = fs::metadata(&path)
            .map_err(|error| format!("{}: {error}", path.display()))?
            .len();
        if program == PROGRAMS[0] {
            alone = size;
        }
        println!("| {program} | {size} | {} |", size.saturating_sub(alone));
    }
    Ok(())
}
