//! `cargo xtask ops`: checks the files for Prometheus and Grafana in `examples/ops` with
//! Prometheus's own tool.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::command::{cargo, root, run};
use crate::{Result, install};

pub(crate) fn ops() -> Result {
    install::promtool()?;
    promtool(&["check", "config", "prometheus.yml"])?;
    promtool(&["check", "rules", "--lint=all", "--lint-fatal", "alerts.yml"])?;
    promtool(&["test", "rules", "alerts.test.yml"])?;
    install::redis_server()?;
    cargo(&["test", "--package", "examples", "--test", "alerts"])?;
    let file = root().join("target/tmp/services.test.json");
    promtool(&["test", "rules", &file.to_string_lossy()])?;

    // `promtool` checks queries only within rules, so write the dashboard's queries as rules.
    let dashboard =
        fs::read(root().join("examples/ops/dashboard.json")).map_err(|error| error.to_string())?;
    let dashboard: Value =
        serde_json::from_slice(&dashboard).map_err(|error| format!("dashboard.json: {error}"))?;
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let queries = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let as_rule = |(number, query): (usize, &Value)| {
        let query = query["expr"]
            .as_str()
            .unwrap_or_default()
            .replace("$__rate_interval", "5m");
        json!({ "record": format!("query{number}"), "expr": query })
    };
    let rules: Vec<Value> = queries.enumerate().map(as_rule).collect();
    let rules = json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    let file = root().join("target/dashboard.rules.json");
    fs::write(&file, rules.to_string()).map_err(|error| format!("{}: {error}", file.display()))?;
    promtool(&["check", "rules", &file.to_string_lossy()])
}

fn promtool(args: &[&str]) -> Result {
    run(Command::new("promtool")
        .args(args)
        .current_dir(root().join("examples/ops")))
}
