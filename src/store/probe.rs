//! Checks with which a store finds out whether another store decides.

use std::sync::LazyLock;

use crate::limit::{Check, Key, Policies, Policy, Quota, Strategy};

/// The key of probes, which no request can have.
pub(crate) const KEY: Key = Key::reserved(b"~probe");

/// Returns another key of probes, for one partition of a store.
pub(super) fn key(number: usize) -> Key {
    Key::reserved(format!("~probe{number}").as_bytes())
}

/// Creates a probe. It reads and writes like any other check, and is always granted, so it always
/// writes.
pub(super) fn check(key: Key, cost: u32) -> Check {
    const QUOTA: Quota = Quota::per_second(1_000_000);
    static POLICIES: LazyLock<Policies> = LazyLock::new(|| {
        let each = ["one", "two"].map(|name| policy(name, QUOTA));
        Policies::new(each).unwrap_or_else(|_| unreachable!("the names differ"))
    });
    Check::take(key, &POLICIES, cost)
}

/// Creates a policy of the crate's own, whose quota is certainly valid.
pub(super) fn policy(name: &str, quota: Quota) -> Policy {
    let policy = Policy::new(name, Strategy::Gcra, quota);
    policy.unwrap_or_else(|_| unreachable!("the quota is valid"))
}
