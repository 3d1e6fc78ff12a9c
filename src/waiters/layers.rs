//! The quotas of the layers and limiters over one store, to report a count with two limits.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use super::Waiters;
use crate::limit::{Policies, Policy, Quota};
use crate::util::lock;

/// By the identity of a policy: policies of one identity share their counts.
#[derive(Default)]
pub(super) struct LayerQuotas {
    /// The number of layers and limiters with each quota.
    quotas: Mutex<HashMap<u64, HashMap<Quota, usize>>>,
    /// The policies with two quotas that were reported. A service may make many limiters, as one for each request.
    reported: Mutex<HashSet<u64>>,
}

/// A layer or limiter with fixed policies over a store, until it is dropped.
pub(crate) struct ListedLayer {
    store: Waiters,
    policies: Policies,
}

impl Waiters {
    /// Lists a layer or limiter over the store of these waiters. Also returns, once, a policy with which another one sets
    /// another limit for the same count, and that limit.
    pub(crate) fn list_layer(&self, policies: Policies) -> (ListedLayer, Option<(Policy, Quota)>) {
        let mut other = None;
        {
            let mut layers = lock(&self.layers().quotas);
            for policy in &policies {
                let quotas = layers.entry(policy.id()).or_default();
                let different = quotas.keys().find(|quota| **quota != policy.quota());
                if let Some(different) = different
                    && lock(&self.layers().reported).insert(policy.id())
                {
                    other = Some((policy.clone(), *different));
                }
                *quotas.entry(policy.quota()).or_default() += 1;
            }
        }
        let layer = ListedLayer {
            store: self.clone(),
            policies,
        };
        (layer, other)
    }
}

impl Drop for ListedLayer {
    fn drop(&mut self) {
        let mut layers = lock(&self.store.layers().quotas);
        for policy in &self.policies {
            let Entry::Occupied(mut of_policy) = layers.entry(policy.id()) else {
                continue;
            };
            let quotas = of_policy.get_mut();
            if let Entry::Occupied(mut count) = quotas.entry(policy.quota()) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
            if quotas.is_empty() {
                of_policy.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Strategy;

    fn window(name: &str, quota: &str) -> Policy {
        Policy::new(name, Strategy::SlidingLog, quota).unwrap()
    }

    #[test]
    fn an_entry_goes_with_its_layer() {
        let store = Waiters::default();
        let list = |policies: Policies| store.list_layer(policies);
        let (one, other) = list(window("a", "5/m").into());
        assert!(other.is_none());
        let (same, other) = list(window("a", "5/m").into());
        assert!(other.is_none());
        drop(one);
        let both = Policies::new([window("b", "5/m"), window("a", "6/m")]).unwrap();
        let (two, other) = list(both);
        assert_eq!(
            other,
            Some((window("a", "6/m"), "5/m".parse().unwrap())),
            "one is left"
        );
        let (three, other) = list(window("a", "7/m").into());
        assert!(other.is_none(), "it is reported once");
        let (four, other) = list(window("b", "4/m").into());
        assert!(other.is_some(), "another policy");
        drop((same, two, three, four));
        assert!(lock(&store.layers().quotas).is_empty());
    }

    #[test]
    fn a_layer_that_is_gone_is_no_other() {
        let store = Waiters::default();
        drop(store.list_layer(window("a", "5/m").into()));
        assert!(store.list_layer(window("a", "6/m").into()).1.is_none());
    }

    /// Another quota of a bucket continues its count, so two layers limit each other.
    #[test]
    fn two_quotas_of_a_bucket_are_reported() {
        let store = Waiters::default();
        let bucket = |strategy, quota: &str| Policy::new("a", strategy, quota).unwrap();
        let (one, other) = store.list_layer(bucket(Strategy::Gcra, "100/s").into());
        assert!(other.is_none());
        let (two, other) = store.list_layer(bucket(Strategy::Gcra, "2/s").into());
        assert!(other.is_some());
        let (three, other) = store.list_layer(bucket(Strategy::LeakyBucket, "2/s").into());
        assert!(other.is_none(), "another strategy is another count");
        drop((one, two, three));
    }
}
