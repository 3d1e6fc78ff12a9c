//! The accounts of all callers whose charges the primary store lacks.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::account::Account;
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Mode, Policies, Policy};
use crate::util::{RandomState, Shards};

const SHARDS: usize = 32;

/// A bounded number of accounts. They also determine which replies of the primary store the fallback
/// may follow: only replies that include all of its grants.
pub(super) struct Accounts {
    shards: Shards<Mutex<AccountShard>>,
    /// Number of accounts.
    held: AtomicUsize,
    /// Number of accounts that may be opened, in all partitions of a primary store together.
    free: Arc<AtomicUsize>,
    /// The present epoch. Another one begins when accounts are removed.
    epoch: AtomicU64,
    /// The cost that was charged to the primary store since the last report.
    pub(super) charged: AtomicU64,
    /// Since the last report: the cost in flight, the cost that the primary store may not have charged or has cut, and
    /// grants without an account.
    pub(super) dropped: AtomicU64,
}

#[derive(Default)]
pub(super) struct AccountShard {
    /// The accounts of each caller, one for each list of policies.
    accounts: HashMap<Key, SmallVec<[Account; 1]>, RandomState>,
    /// The epoch that began when accounts of the shard were removed last.
    complete_since: u64,
}

/// A caller, whose shard is locked.
pub(super) struct LockedCaller<'a> {
    key: &'a Key,
    all: &'a Accounts,
    shard: MutexGuard<'a, AccountShard>,
}

impl Accounts {
    pub(super) fn new(free: Arc<AtomicUsize>) -> Self {
        Self {
            shards: Shards::new(SHARDS, |_| Mutex::default()),
            held: AtomicUsize::new(0),
            free,
            epoch: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns `true` if no account can be opened.
    pub(super) fn is_full(&self) -> bool {
        self.free.load(Ordering::Acquire) == 0
    }

    /// Counts one more account. Returns `false` if there is no room.
    fn reserve(&self) -> bool {
        let taken = self
            .free
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| {
                free.checked_sub(1)
            });
        if taken.is_ok() {
            self.held.fetch_add(1, Ordering::AcqRel);
        }
        taken.is_ok()
    }

    /// Returns the present epoch. Read it before a check is sent to the primary store: see
    /// [`has_all_grants`](LockedCaller::has_all_grants).
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Locks the shard of a caller. Until this is dropped, no other thread lets a [`LocalStore`](crate::LocalStore) decide
    /// a check of the caller, or warms it with a reply.
    pub(super) fn caller<'a>(&'a self, key: &'a Key) -> LockedCaller<'a> {
        let shard = lock(self.shards.of(key).0);
        LockedCaller {
            key,
            all: self,
            shard,
        }
    }

    pub(super) fn shards(&self) -> impl Iterator<Item = &Mutex<AccountShard>> {
        self.shards.iter()
    }

    /// Removes the accounts of a shard that owe nothing at `now`, and adds the others to `owed`. Returns the number of
    /// callers that it has examined.
    pub(super) fn sweep(
        &self,
        shard: &Mutex<AccountShard>,
        now: i64,
        owed: &mut Vec<(u8, Key, Policies)>,
    ) -> usize {
        let mut shard = lock(shard);
        let accounts = &mut shard.accounts;
        let examined = accounts.len();
        let mut removed = 0;
        // One pass, since the shard is locked.
        accounts.retain(|key, each| {
            let held = each.len();
            each.retain(|account| account.is_owed(now));
            removed += held - each.len();
            for account in &*each {
                owed.push((account.used(now), *key, account.policies.clone()));
            }
            !each.is_empty()
        });
        self.held.fetch_sub(removed, Ordering::AcqRel);
        self.free.fetch_add(removed, Ordering::AcqRel);
        if accounts.is_empty() {
            accounts.shrink_to_fit();
        }
        if removed > 0 {
            shard.complete_since = 1 + self.epoch.fetch_add(1, Ordering::AcqRel);
        }
        examined
    }
}

impl LockedCaller<'_> {
    /// Returns `true` if a reply to a check that was sent in this epoch includes all grants in accounts, also those under
    /// another list that shares a policy.
    ///
    /// A [`LocalStore`](crate::LocalStore) decides under the lock under which its grant is recorded. So each earlier grant
    /// is in an account, or its charge has ended. A check that was sent after the account was removed includes it.
    pub(super) fn has_all_grants(&self, epoch: u64) -> bool {
        epoch >= self.shard.complete_since && !self.shard.accounts.contains_key(self.key)
    }

    /// Returns the account with the counts of `policies`. Requests in flight have none.
    pub(super) fn account(&mut self, policies: &Policies) -> Option<&mut Account> {
        let policies = policies.without_in_flight()?;
        let mut accounts = self.shard.accounts.get_mut(self.key)?.iter_mut();
        accounts.find(|account| same_counts(&account.policies, policies))
    }

    /// Returns the next check of an account for the primary store. Its cost counts as dropped until the reply.
    pub(super) fn send(&mut self, policies: &Policies, now: i64) -> Option<Check> {
        let key = *self.key;
        let check = self.account(policies)?.send(key, now)?;
        let cost = reported(&check).into();
        self.all.dropped.fetch_add(cost, Ordering::Relaxed);
        Some(check)
    }

    /// Records the outcome of a check that the account under `policies` has sent.
    pub(super) fn replied(
        &mut self,
        policies: &Policies,
        check: &Check,
        answer: &Result<Decision, StoreError>,
    ) {
        let cost = reported(check);
        match answer {
            Ok(decision) => {
                let charged = decision.granted().min(cost).into();
                self.all.charged.fetch_add(charged, Ordering::Relaxed);
                self.all.dropped.fetch_sub(charged, Ordering::Relaxed);
            }
            // It stays in the account, and is sent again.
            Err(error) if error.is_not_sent() => {
                self.all.dropped.fetch_sub(cost.into(), Ordering::Relaxed);
            }
            Err(_) => {}
        }
        if let Some(account) = self.account(policies) {
            account.replied(check, answer);
        }
    }

    /// Records a grant or reset of the fallback. Returns `false` if it is in no account, since there is no room or the
    /// decision repeats an earlier one.
    pub(super) fn record(&mut self, check: &Check, decision: &Decision, now: i64) -> bool {
        // Requests in flight need no account: their owner renews the slots in the primary store.
        let Some(policies) = check.policies().without_in_flight() else {
            return true;
        };
        let is_reset = check.mode() == Mode::Reset;
        let granted = match check.mode() {
            Mode::Take | Mode::UpTo | Mode::Charge => decision.granted(),
            _ => 0,
        };
        if granted == 0 && !is_reset {
            return true;
        }
        if decision.is_repeated() {
            return false;
        }
        if self.account(policies).is_none() {
            if !self.all.reserve() {
                let dropped = &self.all.dropped;
                dropped.fetch_add(granted.into(), Ordering::Relaxed);
                return false;
            }
            let account = Account::new(policies, decision, granted, now);
            let accounts = &mut self.shard.accounts;
            accounts.entry(*self.key).or_default().push(account);
        }
        if let Some(account) = self.account(policies) {
            if is_reset {
                account.reset(now);
            } else {
                account.charge(policies, granted, now, decision.verdicts().ahead);
            }
        }
        true
    }
}

/// Returns the cost of a check in reports. A pause is a time, which costs nothing.
fn reported(check: &Check) -> u32 {
    if is_of_time(check) { 0 } else { check.cost() }
}

/// Returns `true` if a check charges a time instead of a cost: that of a pause.
pub(super) fn is_of_time(check: &Check) -> bool {
    check.within() > 0
}

/// Returns `true` if two lists have the same counts. Their quotas may differ.
fn same_counts(one: &Policies, other: &Policies) -> bool {
    one.iter().map(Policy::id).eq(other.iter().map(Policy::id))
}
