//! The shared state of `accounts` and `breaker` under a scheduler that explores the interleavings of threads.
//!
//! The library's files are compiled again with another `sync`. The scheduler makes each step visible to all threads
//! immediately. So it finds wrong orders of steps, but not effects of a processor's memory ordering.

#![allow(clippy::duplicate_mod, reason = "that is the point")]

use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread::{self, yield_now};
use shuttle::{Config, Runner};

use self::accounts::Accounts;
use self::breaker::{Breaker, Ticket};
use self::sync::{Arc, AtomicUsize, Ordering::SeqCst};
use super::account;
use crate::limit::{Check, Key, Policies, Policy, Quota, Strategy};
use crate::store::{Answer, LocalStore, Store};
use crate::util::Seed;

#[allow(dead_code, reason = "not all of it is tried")]
#[path = "accounts.rs"]
mod accounts;
#[allow(dead_code, reason = "not all of it is tried")]
#[path = "breaker.rs"]
mod breaker;

mod sync {
    pub(super) use shuttle::sync::Arc;
    pub(super) use shuttle::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
    pub(super) use shuttle::sync::{Mutex, MutexGuard};

    pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
}

/// Runs `run` under random schedules, and under schedules with a few untimely switches.
fn explore(run: impl Fn() + Send + Sync + Copy + 'static) {
    let run = move || {
        let _seed = Seed::set(1, Duration::from_secs(1_700_000_000));
        run();
    };
    let config = || {
        let mut config = Config::new();
        // Unoptimized code needs a larger stack than the default.
        config.stack_size = 1 << 20;
        config.silence_warnings = true;
        config
    };
    Runner::new(RandomScheduler::new(1_000), config()).run(run);
    Runner::new(PctScheduler::new(3, 1_000), config()).run(run);
}

#[derive(Default)]
struct Seen {
    trials: AtomicUsize,
    opened: AtomicUsize,
    closing: AtomicUsize,
    closed: AtomicUsize,
}

/// Trials come one at a time, only `close` closes an open breaker, and each opening is reported once.
#[test]
fn the_breaker() {
    explore(|| {
        let partition = Arc::new((Breaker::new(2), Seen::default()));
        let spawn = |run: fn(&Breaker, &Seen)| {
            let partition = Arc::clone(&partition);
            thread::spawn(move || (0..4).for_each(|_| run(&partition.0, &partition.1)))
        };
        let ask = |breaker: &Breaker, seen: &Seen| {
            let Some(ticket) = breaker.admit() else {
                return;
            };
            if ticket == Ticket::Trial {
                assert_eq!(seen.trials.fetch_add(1, SeqCst), 0, "two concurrent trials");
                yield_now();
                seen.trials.fetch_sub(1, SeqCst);
            }
            match thread_rng().gen_range(0..4) {
                0 => breaker.succeeded(ticket),
                1 => breaker.learned_nothing(ticket),
                _ if breaker.failed(ticket, false, 0) => drop(seen.opened.fetch_add(1, SeqCst)),
                _ => {}
            }
        };
        let watch = |breaker: &Breaker, seen: &Seen| {
            let closed = seen.closed.load(SeqCst);
            if breaker.is_open() && !breaker.is_open() {
                assert!(seen.closing.load(SeqCst) > closed, "closed by none");
            }
        };
        let close = |breaker: &Breaker, seen: &Seen| {
            if breaker.is_open() {
                seen.closing.fetch_add(1, SeqCst);
                assert!(breaker.close(1).is_some());
                seen.closed.fetch_add(1, SeqCst);
            }
        };
        let threads = [
            spawn(ask),
            spawn(ask),
            spawn(ask),
            spawn(watch),
            spawn(close),
        ];
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        let (breaker, seen) = &*partition;
        let (opened, closed) = (seen.opened.load(SeqCst), seen.closed.load(SeqCst));
        assert_eq!(opened, closed + usize::from(breaker.is_open()), "openings");
    });
}

/// For any order of replies, reconciliations and grants, the fallback counts at least its own grants.
#[test]
fn warming_keeps_what_was_granted() {
    struct Partition {
        breaker: Breaker,
        accounts: Accounts,
        primary: LocalStore,
        local: LocalStore,
        policies: Policies,
        granted: AtomicUsize,
    }

    let decide = |store: &LocalStore, check: &Check| match store.check(check.clone()) {
        Answer::Ready { answer } => answer.unwrap(),
        Answer::Pending { .. } => unreachable!(),
    };

    explore(move || {
        let policies = Policy::new("test", Strategy::Gcra, Quota::per_day(1_000))
            .unwrap()
            .into();
        let (primary, local) = (LocalStore::default(), LocalStore::default());
        let (breaker, accounts) = (
            Breaker::new(1),
            Accounts::new(Arc::new(AtomicUsize::new(16))),
        );
        let partition = Arc::new(Partition {
            breaker,
            accounts,
            primary,
            local,
            policies,
            granted: AtomicUsize::new(0),
        });

        let asking = Arc::clone(&partition);
        let ask = move || {
            let Partition {
                breaker,
                accounts,
                primary,
                local,
                policies,
                granted,
            } = &*asking;
            let check = Check::take(Key::GLOBAL, policies, 1);
            for _ in 0..3 {
                let epoch = accounts.epoch();
                if let Some(ticket) = breaker.admit() {
                    let decision = decide(primary, &check);
                    yield_now();
                    breaker.succeeded(ticket);
                    let caller = accounts.caller(&Key::GLOBAL);
                    if caller.has_all_grants(epoch) {
                        yield_now();
                        local.backend().warm(&Key::GLOBAL, &decision);
                    }
                    continue;
                }
                let mut caller = accounts.caller(&Key::GLOBAL);
                let decision = decide(local, &check);
                yield_now();
                assert!(caller.record(&check, &decision, 0));
                drop(caller);
                granted.fetch_add(1, SeqCst);
            }
        };
        let failing = Arc::clone(&partition);
        let fail = move || {
            failing.breaker.failed(Ticket::Free, false, 0);
        };
        let reconciling = Arc::clone(&partition);
        let reconcile = move || {
            let Partition {
                breaker,
                accounts,
                primary,
                policies,
                ..
            } = &*reconciling;
            for _ in 0..2 {
                let caller = || accounts.caller(&Key::GLOBAL);
                loop {
                    let Some(check) = caller().send(policies, 0) else {
                        break;
                    };
                    let answer = Ok(decide(primary, &check));
                    caller().replied(policies, &check, &answer);
                }
                for shard in accounts.shards() {
                    accounts.sweep(shard, 0, &mut vec![]);
                }
                if breaker.is_open() {
                    breaker.close(0);
                }
            }
        };
        let threads = [
            thread::spawn(ask.clone()),
            thread::spawn(ask),
            thread::spawn(fail),
            thread::spawn(reconcile),
        ];
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());

        let granted = partition.granted.load(SeqCst);
        let peek = decide(
            &partition.local,
            &Check::peek(Key::GLOBAL, &partition.policies, 0),
        );
        let used = (peek.capacity() - peek.remaining()) as usize;
        assert!(
            used >= granted,
            "the fallback has granted {granted} and counts {used}"
        );
    });
}
