//! What was granted while the primary store could not decide, and is still to be charged to it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard};

use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::store::lock;

/// The grants of an outage, by the caller: a bounded number of callers.
#[derive(Debug)]
pub(super) struct Grants {
    shards: [Mutex<Shard>; 16],
    hasher: RandomState,
    /// The most callers of a shard.
    most: usize,
}

#[derive(Debug, Default)]
struct Shard {
    grants: HashMap<(Key, u64), Grant>,
    /// What was granted to callers beyond the bound.
    dropped: u64,
}

/// What one caller was granted.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) key: Key,
    pub(super) policies: Policies,
    pub(super) granted: u32,
}

impl Grants {
    pub(super) fn new(callers: usize) -> Self {
        Self { shards: Default::default(), hasher: RandomState::new(), most: callers.div_ceil(16) }
    }

    /// Notes what the fallback decided on a check that the primary store was not asked.
    pub(super) fn note(&self, check: &Check, decision: &Decision) {
        let (key, policies, granted) = (*check.key(), check.policies(), decision.granted());
        match check.mode() {
            Mode::Reset => drop(self.shard(&key).grants.remove(&id(&key, policies))),
            Mode::GiveBack => {
                if let Some(grant) = self.shard(&key).grants.get_mut(&id(&key, policies)) {
                    grant.granted = grant.granted.saturating_sub(granted);
                }
            }
            _ if granted > 0 => self.put_back(Grant { key, policies: policies.clone(), granted }),
            _ => {}
        }
    }

    /// Adds a grant to those of its caller.
    pub(super) fn put_back(&self, grant: Grant) {
        let mut shard = self.shard(&grant.key);
        let full = shard.grants.len() >= self.most;
        match shard.grants.entry(id(&grant.key, &grant.policies)) {
            Entry::Occupied(mut noted) => {
                let noted = noted.get_mut();
                noted.granted = noted.granted.saturating_add(grant.granted);
            }
            Entry::Vacant(_) if full => shard.dropped += u64::from(grant.granted),
            Entry::Vacant(place) => {
                place.insert(grant);
            }
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.hasher.hash_one(key) as usize % self.shards.len()])
    }

    /// Takes all grants out, and the sum of those that were too many to note.
    pub(super) fn take(&self) -> (Vec<Grant>, u64) {
        let (mut grants, mut dropped) = (vec![], 0);
        for shard in &self.shards {
            let mut shard = lock(shard);
            grants.extend(std::mem::take(&mut shard.grants).into_values());
            dropped += std::mem::take(&mut shard.dropped);
        }
        (grants, dropped)
    }
}

/// The caller, and its list of policies.
fn id(key: &Key, policies: &Policies) -> (Key, u64) {
    (*key, policies.id())
}
