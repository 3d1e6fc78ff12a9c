//! The reconciliation: what was done in place of the primary store is done there too, once.
//!
//! Callers are taken out of the notes one by one, those first who have used most of a limit: what another instance
//! might grant them once more is too much. What is still to be done about a caller is reckoned then, so that nothing is
//! sent that no longer counts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Id;
use tokio::task::{JoinError, JoinSet, yield_now};
use tokio::time::sleep;

use super::grants::Lists;
use super::notes::{Notes, Step};
use super::shared::Shared;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Key, Mode};
use crate::observe::event;
use crate::store::Store;
use crate::util::instant;
use crate::util::lock;

/// How many steps are under way at once: as many as the primary store answers in time, so that live traffic is not held
/// up.
#[derive(Debug)]
struct Window {
    now: usize,
    least: usize,
    most: usize,
}

/// How soon a step is sent again that has found the queue full. Such steps are few: see [`Window::learn`].
const FULL: Duration = Duration::from_millis(2);

/// After so many looks for what may be sent others get their turn on the runtime.
const LOOKS: usize = 256;

/// What was charged and not told yet, in units of cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sums {
    charged: u64,
    dropped: u64,
}

impl Window {
    const START: usize = 64;
    /// Keeps the connections of a Redis store busy, and is a tenth of its queue.
    const MOST: usize = 1_024;
    /// Of each of many partitions.
    const LEAST: usize = 16;

    /// That of one of so many partitions.
    fn of(partitions: usize) -> Self {
        let most = (Self::MOST / partitions).max(Self::LEAST);
        let least = most.min(Self::START);
        Self { now: least, least, most }
    }

    /// One more if a step took less than a quarter of the deadline, and else one less. What is sent before that is
    /// noticed may double what is under way, and is answered in time all the same.
    fn learn(&mut self, took: Duration, deadline: Duration) {
        self.now = if took < deadline / 4 { self.now + 1 } else { self.now - 1 }.clamp(self.least, self.most);
    }
}

impl<P: Store, F: Store> Shared<P, F> {
    /// Does all that is noted in the primary store, and adds it up. `false` if that fails again, or the task on this
    /// `runtime` has lost the lease: what was not sent is for the next time.
    pub(super) async fn reconcile(self: &Arc<Self>, runtime: Id) -> bool {
        if self.grants.is_empty() {
            return true;
        }
        let mut round = Round::new(self);
        for shard in 0..self.grants.shards() {
            let dropped = self.grants.list(shard, &mut round.callers);
            lock(&self.sums).dropped += dropped;
            yield_now().await;
        }
        let (mut calls, mut window, mut looks) = (JoinSet::new(), Window::of(self.partitions), 0);
        loop {
            while !round.failed && calls.len() < window.now {
                looks += 1;
                if looks % LOOKS == 0 {
                    yield_now().await;
                    round.failed |= !self.renew(runtime);
                }
                match round.look() {
                    Look::Send(call, check, asked) => {
                        let shared = Arc::clone(self);
                        calls.spawn(async move {
                            let since = instant();
                            (call, shared.send(check, &asked).await, since.elapsed())
                        });
                    }
                    Look::Again => {}
                    Look::Later => break,
                }
            }
            let Some(ended) = calls.join_next().await else { break };
            if let Ok((.., took)) = &ended {
                window.learn(*took, self.settings.deadline);
            }
            round.ended(ended);
            round.failed |= !self.renew(runtime);
        }
        !round.failed
    }

    /// Does one step, unless it has been taken back. How much was granted. That a queue is full tells nothing of the
    /// primary store: this waits for its place there.
    async fn send(&self, check: Check, asked: &AtomicBool) -> Option<Result<u64, StoreError>> {
        let since = instant();
        loop {
            if asked.swap(true, Ordering::Relaxed) {
                return None;
            }
            match self.asked_in_time(check.clone()).await {
                Err(error) if error.kind() == ErrorKind::QueueFull && since.elapsed() < self.settings.deadline => {
                    asked.store(false, Ordering::Relaxed);
                    sleep(FULL).await;
                }
                answer => return Some(answer.map(|decision| decision.granted().into())),
            }
        }
    }

    /// Tells the observer what has been reconciled since the last time.
    pub(super) fn tell(&self) {
        let sums = std::mem::take(&mut *lock(&self.sums));
        if sums != Sums::default() {
            self.observe(|observer| observer.reconciled(&event::Reconciled::new(sums.charged, sums.dropped)));
        }
    }
}

/// A step that is under way. Whoever sets `asked` first decides whether it is sent or noted again.
struct Call {
    /// The number of what it is of.
    account: u64,
    step: Step,
    asked: Arc<AtomicBool>,
}

/// The number of a call, what was answered, if it was sent, and how long that took.
type Ended = (u64, Option<Result<u64, StoreError>>, Duration);

/// What was taken out of the notes of a caller, and is not done.
struct Account {
    key: Key,
    lists: Lists,
    /// What may be sent now, of this stage of all lists.
    due: Vec<Step>,
    stage: u8,
    under_way: usize,
    /// Whether the next stage waits for what is under way.
    waits: bool,
}

/// What a look for the next step has found.
enum Look {
    /// This is under way from now on.
    Send(u64, Check, Arc<AtomicBool>),
    /// Nothing yet.
    Again,
    /// Nothing until a call ends, if one is under way.
    Later,
}

/// A reconciliation. When it ends, or its runtime does, what was not sent is noted again.
struct Round<'a, P: Store, F: Store> {
    shared: &'a Shared<P, F>,
    number: u64,
    /// Who is still to be taken out of the notes, by how much of a limit they have used.
    callers: BTreeMap<u8, Vec<Key>>,
    /// Those who have been taken out, by a number.
    accounts: BTreeMap<u64, Account>,
    /// Of which something may be sent now.
    ready: Vec<u64>,
    /// By a number, in the order in which they were begun.
    calls: BTreeMap<u64, Call>,
    /// How many numbers have been given.
    numbers: u64,
    back: Vec<Step>,
    /// Whether any step was begun.
    begun: bool,
    failed: bool,
}

impl<'a, P: Store, F: Store> Round<'a, P, F> {
    fn new(shared: &'a Shared<P, F>) -> Self {
        Self {
            shared,
            number: shared.grants.begin(),
            callers: BTreeMap::new(),
            accounts: BTreeMap::new(),
            ready: vec![],
            calls: BTreeMap::new(),
            numbers: 0,
            back: vec![],
            begun: false,
            failed: false,
        }
    }

    /// Looks a little further for the next step.
    fn look(&mut self) -> Look {
        let Some(number) = self.ready.last().copied() else { return self.take() };
        let Some(account) = self.accounts.get_mut(&number) else { return Look::Later };
        let now = self.shared.clock.micros();
        if let Some(step) = account.next(now) {
            account.under_way += 1;
            let (check, asked) = (step.check(now), Arc::new(AtomicBool::new(false)));
            self.numbers += 1;
            self.begun = true;
            self.calls.insert(self.numbers, Call { account: number, step, asked: Arc::clone(&asked) });
            return Look::Send(self.numbers, check, asked);
        }
        if account.waits {
            self.ready.pop();
        } else if account.stage == Notes::STAGES {
            self.ready.pop();
            self.accounts.remove(&number);
        }
        Look::Again
    }

    /// Takes out the next caller.
    fn take(&mut self) -> Look {
        let Some(mut callers) = self.callers.last_entry() else { return Look::Later };
        let Some(key) = callers.get_mut().pop() else {
            callers.remove();
            return Look::Again;
        };
        let lists = self.shared.grants.take(self.number, &key);
        self.numbers += 1;
        self.accounts.insert(self.numbers, Account { key, lists, due: vec![], stage: 0, under_way: 0, waits: false });
        self.ready.push(self.numbers);
        Look::Again
    }

    fn ended(&mut self, ended: Result<Ended, JoinError>) {
        // What a task that panicked leaves behind is for the end.
        let Ok((call, result, _)) = ended else { return self.failed = true };
        let Some(Call { account: number, step, .. }) = self.calls.remove(&call) else { return };
        if let Some(account) = self.accounts.get_mut(&number) {
            account.under_way -= 1;
            if account.under_way == 0 && std::mem::take(&mut account.waits) {
                self.ready.push(number);
            }
        }
        match result {
            None => self.back.push(step),
            Some(Ok(granted)) if step.mode == Mode::Charge => lock(&self.shared.sums).charged += granted,
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                // What is known not to have been done is sent again, and what is done once by its id.
                let again = error.is_unsent() || (step.id.is_some() && !error.is_of_check());
                self.failed |= again || !error.is_of_check();
                if again { self.back.push(step) } else { self.lost(&step) }
            }
        }
    }

    fn lost(&self, step: &Step) {
        if step.mode == Mode::Charge {
            lock(&self.shared.sums).dropped += step.cost;
        }
    }
}

impl Account {
    /// The next step of this stage. Without one, this is to be asked again unless it `waits`, or is at the end.
    fn next(&mut self, now: i64) -> Option<Step> {
        if self.due.is_empty() {
            let Self { key, lists, due, stage, .. } = self;
            if !lists.iter_mut().any(|notes| notes.take_some(*key, *stage, now, due)) {
                self.waits = self.under_way > 0;
                self.stage += u8::from(!self.waits);
            }
        }
        self.due.pop()
    }
}

impl<P: Store, F: Store> Drop for Round<'_, P, F> {
    fn drop(&mut self) {
        let (shared, now) = (self.shared, self.shared.clock.micros());
        // The last first, since each is put before what is noted.
        for Account { key, lists, due, .. } in std::mem::take(&mut self.accounts).into_values() {
            lists.into_iter().rev().for_each(|notes| shared.grants.restore(&key, notes, now));
            due.into_iter().for_each(|step| shared.grants.put_back(step, now));
        }
        // Calls are left only if the runtime has ended under them.
        for Call { step, asked, .. } in std::mem::take(&mut self.calls).into_values() {
            let sent = asked.swap(true, Ordering::Relaxed);
            if sent && step.id.is_none() { self.lost(&step) } else { self.back.push(step) }
        }
        for step in self.back.drain(..).rev() {
            shared.grants.put_back(step, now);
        }
        match self.begun {
            true => shared.grants.reconciled(self.number),
            false => shared.grants.lapsed(self.number),
        }
    }
}
