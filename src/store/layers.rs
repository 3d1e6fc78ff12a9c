//! The quotas of the layers over one store, to report a count with two limits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use super::Waiters;
use crate::limit::{Policies, Policy, Quota};
use crate::util::lock;

/// The number of layers with each quota, by the identity of the policy. Policies of one identity share their counts.
#[derive(Default)]
pub(super) struct LayerQuotas(Mutex<HashMap<u64, HashMap<Quota, usize>>>);

/// A layer with fixed policies over a store, until it is dropped.
pub(crate) struct ListedLayer {
    store: Waiters,
    policies: Policies,
}

impl Waiters {
    /// Lists a layer over the store of these waiters. Also returns a policy of this layer with which another layer sets
    /// another limit for one count, and that limit.
    pub(crate) fn list_layer(&self, policies: Policies) -> (ListedLayer, Option<(Policy, Quota)>) {
        let mut other = None;
        {
            let mut layers = lock(&self.layers().0);
            for policy in &policies {
                let quotas = layers.entry(policy.id()).or_default();
                if other.is_none() {
                    let different = quotas.keys().find(|quota| **quota != policy.quota());
                    other = different.map(|quota| (policy.clone(), *quota));
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
        let mut layers = lock(&self.store.layers().0);
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
        let (quota, strategy) = (quota.parse().unwrap(), Strategy::SlidingLog);
        Policy::new(name, strategy, quota).unwrap()
    }

    #[test]
    fn an_entry_goes_with_its_layer() {
        let store = Waiters::default();
        let list = |policies: Policies| store.list_layer(policies);
        let (one, other) = list(window("a", "5/m").into());
        assert!(other.is_none());
        let (same, other) = list(window("a", "5/m").into());
        assert!(other.is_none());
        let both = Policies::new([window("b", "5/m"), window("a", "6/m")]).unwrap();
        let (two, other) = list(both);
        assert_eq!(other, Some((window("a", "6/m"), "5/m".parse().unwrap())));
        drop((one, two));
        assert!(list(window("a", "7/m").into()).1.is_some(), "one is left");
        drop(same);
        assert!(list(window("a", "7/m").into()).1.is_none());
        assert!(lock(&store.layers().0).is_empty());
    }
}
