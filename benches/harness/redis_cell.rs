//! `tower-redis-cell`, with its module in a separate Redis.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use axum::body::Body;
use http::{Request, Response};
use redis::aio::MultiplexedConnection;
use tower_redis_cell::redis_cell::Policy;
use tower_redis_cell::{ProvideRule, ProvideRuleResult, RateLimitConfig, RateLimitLayer, Rule};
use tower_redis_ratelimit::{Quota, redis};

use crate::cases::HEADER;
use crate::support::RedisServer;

/// Starts a Redis with the module, and with more arguments.
pub fn start(args: &[&str]) -> RedisServer {
    RedisServer::start_with(&[&["--loadmodule", module().to_str().unwrap()], args].concat())
}

pub(crate) async fn layer(
    server: &RedisServer,
    quota: Quota,
) -> RateLimitLayer<ByHeader, Request<()>, Response<Body>, Response<Body>, MultiplexedConnection> {
    // It allows one request more than its burst.
    let policy = Policy::new(
        quota.capacity() as usize - 1,
        quota.limit() as usize,
        quota.period(),
        1,
    );
    let config = RateLimitConfig::new(ByHeader(policy), |error, _request: &_| {
        panic!("tower-redis-cell: {error}")
    });
    RateLimitLayer::new(config, server.connection().await)
}

#[derive(Clone)]
pub(crate) struct ByHeader(Policy);

impl ProvideRule<Request<()>> for ByHeader {
    fn provide<'a>(&self, request: &'a Request<()>) -> ProvideRuleResult<'a> {
        let value = request
            .headers()
            .get(HEADER)
            .and_then(|value| value.to_str().ok());
        Ok(value.map(|value| Rule::new(value, self.0)))
    }
}

/// A package whose only dependency is the module, so that Cargo downloads and builds it.
const MANIFEST: &str = r#"
[package]
name = "module"
version = "0.0.0"
edition = "2024"

[lib]
path = "lib.rs"

[dependencies]
redis-cell = "=0.2.2"

[workspace]
"#;

/// Builds the module, which the registry has as source only, into `target/redis-cell`, unless it exists.
fn module() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/redis-cell");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("Cargo.toml"), MANIFEST).unwrap();
    fs::write(folder.join("lib.rs"), "").unwrap();
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args([
        "rustc",
        "--quiet",
        "--release",
        "--package",
        "redis-cell",
        "--crate-type",
        "cdylib",
    ]);
    cargo.args(["--target-dir", "target"]).current_dir(&folder);
    assert!(
        cargo.status().is_ok_and(|status| status.success()),
        "the cases of tower-redis-cell need its module, and {cargo:?} did not build it in {folder:?}: it needs the registry, \
         once, and a C compiler. `-- TEXT...` runs other cases"
    );
    let file = format!(
        "{}redis_cell{}",
        env::consts::DLL_PREFIX,
        env::consts::DLL_SUFFIX
    );
    folder
        .join("target/release")
        .join(file)
        .canonicalize()
        .unwrap()
}
