//! The accounts of all callers whose charges the primary store lacks.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::account::Account;
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::store::shards::Shards;
use crate::util::RandomState;

const SHARDS: usize = 32;

/// A bounded number of accounts. They also determine which replies of the primary store the fallback
/// may follow: only replies that include all of its grants.
pub(super) struct Accounts {
    shards: Shards<Shard>,
    /// Number of accounts.
    held: AtomicUsize,
    /// Number of accounts that may be opened, in all partitions of a primary store together.
    free: Arc<AtomicUsize>,
    /// Number of times that the breaker has opened.
    openings: AtomicU64,
    /// Since the last report: the cost that was charged to the primary store, and the cost that was
    /// sent and has not been granted there, or was granted without an account.
    pub(super) charged: AtomicU64,
    pub(super) dropped: AtomicU64,
}

#[derive(Default)]
pub(super) struct Shard {
    accounts: Mutex<ByCaller>,
    /// Number of times that accounts were removed whose charges were sent.
    removals: AtomicU64,
}

/// The accounts of each caller, one for each list of policies.
type ByCaller = HashMap<Key, SmallVec<[Account; 1]>, RandomState>;

/// A caller, locked: one thread at a time decides its checks.
pub(super) struct Caller<'a> {
    key: &'a Key,
    all: &'a Accounts,
    shard: &'a Shard,
    accounts: MutexGuard<'a, ByCaller>,
}

impl Accounts {
    pub(super) fn new(free: Arc<AtomicUsize>) -> Self {
        Self {
            shards: Shards::new(SHARDS, |_| Shard::default()),
            held: AtomicUsize::new(0),
            free,
            openings: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.load(Ordering::Acquire) == 0
    }

    /// Returns `true` if no account can be opened.
    pub(super) fn is_full(&self) -> bool {
        self.free.load(Ordering::Acquire) == 0
    }

    /// Returns the number of a caller's present epoch. Read it before a check is sent to the primary store.
    ///
    /// An epoch ends when the breaker opens, and when an account of the caller is removed whose charges were sent: a reply
    /// to a check of an earlier epoch may lack these. The callers of a shard share their epoch.
    pub(super) fn epoch(&self, key: &Key) -> u64 {
        self.epoch_of(self.shards.of(key).0)
    }

    fn epoch_of(&self, shard: &Shard) -> u64 {
        self.openings.load(Ordering::Acquire) + shard.removals.load(Ordering::Acquire)
    }

    /// Ends the epochs of all callers.
    pub(super) fn end_epochs(&self) {
        self.openings.fetch_add(1, Ordering::AcqRel);
    }

    /// Locks a caller. Until this is dropped, no other thread decides a check of the caller or warms the fallback with
    /// a reply.
    pub(super) fn caller<'a>(&'a self, key: &'a Key) -> Caller<'a> {
        let (shard, _) = self.shards.of(key);
        Caller {
            key,
            all: self,
            shard,
            accounts: lock(&shard.accounts),
        }
    }

    pub(super) fn shards(&self) -> impl Iterator<Item = &Shard> {
        self.shards.iter()
    }

    /// Removes the accounts of a shard that do not `stay`.
    pub(super) fn sweep(&self, shard: &Shard, mut stays: impl FnMut(&Key, &Account) -> bool) {
        let (mut accounts, mut removed, mut is_sent) = (lock(&shard.accounts), 0, false);
        accounts.retain(|key, each| {
            each.retain(|account| {
                let stays = stays(key, account);
                removed += usize::from(!stays);
                is_sent |= !stays && account.is_sent;
                stays
            });
            !each.is_empty()
        });
        if is_sent {
            shard.removals.fetch_add(1, Ordering::AcqRel);
        }
        if removed > 0 {
            self.held.fetch_sub(removed, Ordering::AcqRel);
            self.free.fetch_add(removed, Ordering::AcqRel);
        }
        if accounts.is_empty() {
            accounts.shrink_to_fit();
        }
    }
}

impl Caller<'_> {
    /// Returns `true` if a reply to a check that was sent in the epoch `sent` includes all grants of the fallback, also
    /// those under another list that shares a policy.
    ///
    /// The fallback decides and records under the same lock, so each earlier grant is in an account, or was charged
    /// before its account was removed. That has ended the epoch, so a check of the present epoch was sent later.
    pub(super) fn has_all_grants(&self, sent: u64) -> bool {
        self.all.epoch_of(self.shard) == sent && !self.accounts.contains_key(self.key)
    }

    /// Returns the account with the counts of `policies`. Requests in flight have none.
    pub(super) fn account(&mut self, policies: &Policies) -> Option<&mut Account> {
        let id = policies.without_in_flight()?.id();
        let mut accounts = self.accounts.get_mut(self.key)?.iter_mut();
        accounts.find(|account| account.policies.id() == id)
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
        let (charged, unsent) = match answer {
            Ok(decision) => (decision.granted().min(cost), 0),
            Err(error) if error.is_not_sent() => (0, cost),
            Err(_) => (0, 0),
        };
        self.all
            .charged
            .fetch_add(charged.into(), Ordering::Relaxed);
        self.all
            .dropped
            .fetch_sub((charged + unsent).into(), Ordering::Relaxed);
        if let Some(account) = self.account(policies) {
            account.replied(check, answer);
        }
    }

    /// Records the effect of a decision of the fallback. Returns `false` if no account has its
    /// grant: there is no room for an account, or the decision repeats an earlier one.
    pub(super) fn record(&mut self, check: &Check, decision: &Decision, now: i64) -> bool {
        // Requests in flight need no account: their owner renews the slots in the primary store.
        let Some(policies) = check.policies().without_in_flight() else {
            return true;
        };
        let granted = decision.granted();
        match check.mode() {
            Mode::Reset => {
                let new = || Account::new(policies, decision, 0, now);
                if let Some(account) = self.open(policies, new) {
                    account.reset(now);
                }
            }
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge if granted > 0 => {
                if decision.is_repeated() {
                    return false;
                }
                let new = || Account::new(policies, decision, granted, now);
                let Some(account) = self.open(policies, new) else {
                    let dropped = &self.all.dropped;
                    dropped.fetch_add(granted.into(), Ordering::Relaxed);
                    return false;
                };
                account.charge(policies, granted, now);
            }
            _ => {}
        }
        true
    }

    /// Returns the account with the counts of `policies`, or a new one. `None` if there is no room for it.
    fn open(&mut self, policies: &Policies, new: impl FnOnce() -> Account) -> Option<&mut Account> {
        if self.account(policies).is_none() {
            let one_less = |free: usize| free.checked_sub(1);
            let free = &self.all.free;
            free.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less)
                .ok()?;
            self.all.held.fetch_add(1, Ordering::AcqRel);
            self.accounts.entry(*self.key).or_default().push(new());
        }
        self.account(policies)
    }
}

/// Returns the cost of a check in reports. A pause is a time, which costs nothing.
fn reported(check: &Check) -> u32 {
    match check.within() {
        0 => check.cost(),
        _ => 0,
    }
}
