//! A layer of several keys whose policies are read from a settings file, from a separate table for each key.

use serde::Deserialize;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::select::{Live, Tiers};
use tower_redis_ratelimit::{LocalStore, Policies, RateLimitLayer};

use super::joint::{by_header, of};
use crate::mocks::*;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    users: Tiers,
    organizations: Tiers,
    service: Policies,
}

const FILE: &str = r#"
    [users]
    default = { name = "user", quota = "3/h" }

    [organizations]
    default = { name = "org", quota = "4/h" }

    [organizations.callers]
    large = { name = "org", quota = "40/h" }
    friend = "exempt"
    foe = "blocked"

    [service]
    name = "all"
    quota = "9/h"
"#;

fn read(file: &str) -> Limits {
    toml::from_str(file).unwrap()
}

#[tokio::test]
async fn each_key_has_policies_of_a_file() {
    let limits = read(FILE);
    let users = Live::new(limits.users);
    let layer = RateLimitLayer::new(LocalStore::default(), by_header("x-user"), users.clone())
        .and(by_header("x-org"), limits.organizations)
        .and(Global, limits.service);
    let service = limited(layer.decision_in_response());
    for (user, org, status, policies) in [
        ("ann", "acme", 200, "user org all"),
        ("ann", "acme", 200, "user org all"),
        ("ann", "acme", 200, "user org all"),
        ("ann", "large", 429, "user org all"),
        ("bob", "acme", 200, "user org all"),
        ("bob", "acme", 429, "user org all"),
        ("bob", "friend", 200, "user all"),
        ("bob", "foe", 429, "blocked"),
    ] {
        let response = send(&service, of(user, org)).await;
        assert_eq!(response.status(), status, "{user} of {org}");
        let decision = decision(&response).unwrap();
        let names: Vec<&str> = decision.policies().iter().map(|each| each.name()).collect();
        assert_eq!(names.join(" "), policies);
    }
    // The file changes while the service runs.
    users.replace(read(&FILE.replace("3/h", "9/h")).users);
    let response = send(&service, of("ann", "large")).await;
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn the_documented_file_is_read() {
    let page = include_str!("../../../docs/keys.md");
    let (_, file) = page.split_once("```toml\n").unwrap();
    let (file, _) = file.split_once("```").unwrap();
    let limits: Limits = toml::from_str(file).unwrap();
    let layer = RateLimitLayer::new(LocalStore::default(), by_header("x-user"), limits.users)
        .and(by_header("x-org"), limits.organizations)
        .and(Global, limits.service);
    let service = limited(layer.decision_in_response());
    for (org, policies) in [("acme", 2), ("other", 3)] {
        let response = send(&service, of("ann", org)).await;
        assert_eq!(decision(&response).unwrap().policies().len(), policies);
    }
}

/// With one table for both, the same policies would count for two keys.
#[tokio::test]
async fn tables_with_equal_names_are_an_error() {
    let policies: Policies = toml::from_str(
        r#"name = "api"
        quota = "3/h""#,
    )
    .unwrap();
    let tiers = read(&FILE.replace(r#""org""#, r#""user""#)).organizations;
    let layer = RateLimitLayer::new(LocalStore::default(), by_header("x-user"), policies.clone())
        .and(by_header("x-org"), tiers.clone())
        .and(Global, tiers);
    assert_eq!(send(&limited(layer), of("ann", "acme")).await.status(), 503);
}
