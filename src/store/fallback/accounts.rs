//! The accounts of all callers whose charges the primary store lacks.

use std::collections::{BTreeMap, HashMap, HashSet};

use smallvec::SmallVec;

use super::account::Account;
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::store::shards::Shards;
use crate::util::RandomState;

const SHARDS: usize = 16;

/// A bounded number of accounts. They also determine which replies of the primary store the fallback
/// may follow: only replies that include all of its grants.
pub(super) struct Accounts {
    shards: Shards<Mutex<Shard>>,
    budget: Budget,
    /// Number of callers that have an account.
    callers: AtomicUsize,
    /// Number of the epoch. An epoch ends when the breaker opens, and with each reconciliation that has sent a charge.
    /// A reply to a check of an earlier epoch may lack charges that were reconciled since.
    epoch: AtomicU64,
}

/// Maximum number of accounts in all partitions of a primary store. Threads that open accounts concurrently may exceed
/// it by one each.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    held: Arc<AtomicUsize>,
    max: usize,
}

#[derive(Debug, Default)]
struct Shard {
    accounts: HashMap<Key, CallerAccounts, RandomState>,
    /// Callers that are being reconciled.
    reconciling: HashSet<Key, RandomState>,
    /// Callers whose checks a fallback is deciding outside of the lock.
    deciding: SmallVec<[Key; 1]>,
    /// Cost granted beyond the maximum number of accounts, and so never reconciled.
    dropped: u64,
}

/// The accounts of a caller, one for each list of policies.
pub(super) type CallerAccounts = SmallVec<[Account; 1]>;

/// A caller, locked: one thread at a time decides its checks.
pub(super) struct Caller<'a> {
    key: &'a Key,
    all: &'a Accounts,
    shard: MutexGuard<'a, Shard>,
}

/// A caller whose check a fallback is deciding outside of the lock.
pub(super) struct Deciding<'a> {
    key: &'a Key,
    all: &'a Accounts,
}

impl Budget {
    pub(super) fn new(max: usize) -> Self {
        Self {
            held: Arc::new(AtomicUsize::new(0)),
            max,
        }
    }
}

impl Accounts {
    pub(super) fn new(budget: Budget) -> Self {
        Self {
            shards: Shards::new(SHARDS, |_| Mutex::new(Shard::default())),
            budget,
            callers: AtomicUsize::new(0),
            epoch: AtomicU64::new(0),
        }
    }

    /// Returns `true` if there is no account, except for accounts in a running reconciliation.
    pub(super) fn is_empty(&self) -> bool {
        self.callers.load(Ordering::Acquire) == 0
    }

    /// The present epoch. Read it before a check is sent to the primary store.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(super) fn end_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Locks a caller. Until this is dropped, no other thread decides a check of the caller or warms the fallback with
    /// a reply.
    pub(super) fn caller<'a>(&'a self, key: &'a Key) -> Caller<'a> {
        Caller {
            key,
            all: self,
            shard: self.shard(key),
        }
    }

    /// Marks a caller. Until this is dropped, no thread begins to warm the fallback with a reply for the caller.
    pub(super) fn deciding<'a>(&'a self, key: &'a Key) -> Deciding<'a> {
        self.shard(key).deciding.push(*key);
        Deciding { key, all: self }
    }

    /// Warms the fallback with the reply to a check that was sent in the epoch `sent`, if the reply includes all grants
    /// of the fallback.
    ///
    /// The fallback decides and records under the same lock. So each earlier grant is in an account or being
    /// reconciled, which [`Caller::is_held`] reports, or is reconciled. In the last case the epoch ended before
    /// `reconciled` returned, and a reply to a check of the present epoch includes the grant.
    /// before `reconciled` returned, and a reply to a check of the present epoch includes the grant.
    pub(super) fn warm(&self, key: &Key, sent: u64, update: impl FnOnce()) {
        let caller = self.caller(key);
        if caller.is_known(sent) {
            update();
        }
    }

    /// Returns `true` if a reply to a check that was sent in the epoch `sent` includes all grants of the fallback to a
    /// caller.
    pub(super) fn is_known(&self, key: &Key, sent: u64) -> bool {
        self.caller(key).is_known(sent)
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.iter().count()
    }

    /// Adds the callers of a shard to `callers`, by the part of a limit that they have used. Returns the cost that was
    /// granted there beyond the maximum number of accounts.
    pub(super) fn list(&self, shard: usize, callers: &mut BTreeMap<u8, Vec<Key>>) -> u64 {
        let Some(shard) = self.shards.iter().nth(shard) else {
            return 0;
        };
        let mut shard = lock(shard);
        for (key, accounts) in &shard.accounts {
            let used = accounts.iter().map(Account::used).max().unwrap_or(0);
            callers.entry(used).or_default().push(*key);
        }
        std::mem::take(&mut shard.dropped)
    }

    /// Removes the accounts of a caller, which is being reconciled until
    /// [`reconciled`](Self::reconciled) is called.
    pub(super) fn take(&self, key: &Key) -> CallerAccounts {
        let mut shard = self.shard(key);
        let Some(accounts) = shard.accounts.remove(key) else {
            return CallerAccounts::new();
        };
        if shard.accounts.is_empty() {
            shard.accounts.shrink_to_fit();
        }
        shard.reconciling.insert(*key);
        self.callers.fetch_sub(1, Ordering::AcqRel);
        self.budget
            .held
            .fetch_sub(accounts.len(), Ordering::Relaxed);
        accounts
    }

    /// Puts back the rest of an account. Returns its cost if there is no room for it.
    pub(super) fn put_back(&self, key: &Key, older: Account, now: i64) -> u64 {
        let mut caller = self.caller(key);
        let has_room = caller.has_room();
        match caller.find(older.policies()) {
            Some(newer) => newer.put_after(older, now),
            None if has_room => caller.open(older),
            None => return older.left(now),
        }
        0
    }

    /// Ends the reconciliation: each account is reconciled or put back.
    pub(super) fn reconciled(&self, sent: bool) {
        // End the epoch first, so that no reply to an earlier check warms the fallback for these callers.
        if sent {
            self.end_epoch();
        }
        for shard in self.shards.iter() {
            lock(shard).reconciling = HashSet::default();
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(self.shards.of(key).0)
    }
}

impl Caller<'_> {
    /// Returns `true` if the caller has an account, is being reconciled, or a fallback is deciding its check.
    pub(super) fn is_held(&self) -> bool {
        self.shard.accounts.contains_key(self.key)
            || self.shard.reconciling.contains(self.key)
            || self.shard.deciding.contains(self.key)
    }

    /// Returns `true` if a reply to a check that was sent in the epoch `sent` includes all grants.
    fn is_known(&self, sent: u64) -> bool {
        self.all.epoch() == sent && !self.is_held()
    }

    /// Returns the account with the counts of `policies`.
    pub(super) fn account(&self, policies: &Policies) -> Option<&Account> {
        let accounts = self.shard.accounts.get(self.key)?;
        accounts.iter().find(|account| account.is_under(policies))
    }

    /// Records a decision of the fallback. Returns `true` if there is something to reconcile.
    pub(super) fn record(&mut self, check: &Check, decision: &Decision, now: i64) -> bool {
        // Requests in flight need no account: their owner renews the slots in the primary store.
        let Some(policies) = check.policies().without_in_flight() else {
            return false;
        };
        match check.mode() {
            Mode::Peek | Mode::Renew | Mode::Release => return false,
            Mode::Refund => {
                if let Some(account) = self.find(policies) {
                    account.refund(check, now);
                }
                return true;
            }
            Mode::Reset => {}
            _ if decision.granted() == 0 || decision.is_repeated() => return false,
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge => {}
        }
        let granted = if check.mode() == Mode::Reset {
            0
        } else {
            decision.granted()
        };
        if self.find(policies).is_none() {
            if !self.has_room() {
                self.shard.dropped += u64::from(granted);
                return true;
            }
            self.open(Account::new(policies, decision, granted, now));
        }
        if let Some(account) = self.find(policies) {
            match check.mode() {
                Mode::Reset => account.reset(now),
                _ => account.charge(policies, decision, granted, now),
            }
        }
        true
    }

    fn find(&mut self, policies: &Policies) -> Option<&mut Account> {
        let accounts = self.shard.accounts.get_mut(self.key)?;
        accounts
            .iter_mut()
            .find(|account| account.is_under(policies))
    }

    fn has_room(&self) -> bool {
        self.all.budget.held.load(Ordering::Relaxed) < self.all.budget.max
    }

    fn open(&mut self, account: Account) {
        self.all.budget.held.fetch_add(1, Ordering::Relaxed);
        let accounts = self.shard.accounts.entry(*self.key).or_insert_with(|| {
            self.all.callers.fetch_add(1, Ordering::AcqRel);
            CallerAccounts::new()
        });
        accounts.push(account);
    }
}

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        let deciding = &mut self.all.shard(self.key).deciding;
        if let Some(place) = deciding.iter().position(|key| key == self.key) {
            deciding.swap_remove(place);
        }
    }
}
