//! The reconciliation: what was done in place of the primary store is replayed there, once.
//!
//! Callers are taken out of the outage log one by one, those first who have used most of a limit: what another instance
//! might grant them once more is too much. What is still to be done about a caller is reckoned then, so that nothing is
//! sent that no longer counts.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::{JoinError, JoinSet, yield_now};
use tokio::time::sleep;

use super::caller_log::{CallerLog, ReplayOp};
use super::outage_log::CallerLogs;
use super::partition::{Partition, Sums};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Key, Mode};
use crate::observe::event;
use crate::store::Store;
use crate::util::{Task, instant, lock};

/// How many ops are under way at once: as many as the primary store answers in time, so that live traffic is not held
/// up.
#[derive(Debug)]
struct Window {
    now: usize,
    least: usize,
    most: usize,
}

/// How soon an op is sent again that has found the queue full. Such ops are few: see [`Window::learn`].
const FULL: Duration = Duration::from_millis(2);

/// For how long an op may go without a reply: no request waits for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// After so many looks for what may be sent others get their turn on the runtime.
const LOOKS: usize = 256;

impl Window {
    const START: usize = 64;
    /// Of all instances. Keeps the connections of a Redis store busy, and is a tenth of its queue.
    const MOST: usize = 1_024;
    /// Of each of many partitions.
    const LEAST: usize = 16;

    /// That of one of so many partitions, in one of so many instances.
    fn of(partitions: usize, instances: NonZeroU32) -> Self {
        let most = (Self::MOST / instances.get() as usize).max(Self::START);
        let most = (most / partitions).max(Self::LEAST);
        let least = most.min(Self::START);
        Self {
            now: least,
            least,
            most,
        }
    }

    /// One more if an op took less than a quarter of the deadline, and else one less. What is sent before that is
    /// noticed may double what is under way, and is answered in time all the same.
    fn learn(&mut self, took: Duration, deadline: Duration) {
        self.now = if took < deadline / 4 {
            self.now + 1
        } else {
            self.now - 1
        }
        .clamp(self.least, self.most);
    }
}

impl<P: Store, F: Store> Partition<P, F> {
    /// Does all that is noted in the primary store, and adds it up. `false` if that fails again, or another `task`
    /// has taken over: what was not sent is for the next time.
    pub(super) async fn reconcile(self: &Arc<Self>, task: &Task) -> bool {
        if self.outages.is_empty() {
            return true;
        }
        let mut reconciliation = Reconciliation::new(self);
        for shard in 0..self.outages.shards() {
            let dropped = self.outages.list(shard, &mut reconciliation.callers);
            lock(&self.sums).dropped += dropped;
            yield_now().await;
        }
        let (mut calls, mut window, mut looks) = (
            JoinSet::new(),
            Window::of(self.partitions, self.settings.share.instances()),
            0,
        );
        loop {
            while !reconciliation.failed && calls.len() < window.now {
                looks += 1;
                if looks % LOOKS == 0 {
                    yield_now().await;
                    reconciliation.failed |= !self.renew(task);
                }
                match reconciliation.look() {
                    Look::Send(call, check, asked) => {
                        let partition = Arc::clone(self);
                        calls.spawn(async move {
                            let since = instant();
                            (call, partition.send(check, &asked).await, since.elapsed())
                        });
                    }
                    Look::Again => {}
                    Look::Later => break,
                }
            }
            let Some(ended) = calls.join_next().await else {
                break;
            };
            if let Ok((.., took)) = &ended {
                window.learn(*took, self.settings.deadline);
            }
            reconciliation.ended(ended);
            reconciliation.failed |= !self.renew(task);
        }
        !reconciliation.failed
    }

    /// Does one op, unless it has been taken back. How much was granted. That a queue is full tells nothing of the
    /// primary store: this waits for its place there.
    async fn send(&self, check: Check, asked: &AtomicBool) -> Option<Result<u64, StoreError>> {
        let since = instant();
        loop {
            if asked.swap(true, Ordering::Relaxed) {
                return None;
            }
            match self
                .asked_within(check.clone(), PATIENCE.max(self.settings.deadline))
                .await
            {
                Err(error)
                    if error.kind() == ErrorKind::QueueFull
                        && since.elapsed() < self.settings.deadline =>
                {
                    asked.store(false, Ordering::Relaxed);
                    sleep(FULL).await;
                }
                answer => return Some(answer.map(|decision| decision.granted().into())),
            }
        }
    }

    /// Notifies the observer of what has been reconciled since the last time.
    pub(super) fn notify(&self) {
        let sums = std::mem::take(&mut *lock(&self.sums));
        if sums != Sums::default() {
            self.observe(|observer| {
                observer.reconciled(&event::Reconciled::new(sums.charged, sums.dropped))
            });
        }
    }
}

/// An op that is under way. Whoever sets `asked` first decides whether it is sent or noted again.
struct Call {
    /// The number of what it is of.
    replay: u64,
    op: ReplayOp,
    asked: Arc<AtomicBool>,
}

/// The number of a call, what was answered, if it was sent, and how long that took.
type Ended = (u64, Option<Result<u64, StoreError>>, Duration);

/// What was taken out of the log of a caller, and is not done.
struct CallerReplay {
    key: Key,
    logs: CallerLogs,
    /// What may be sent now, of this stage of all logs.
    due: Vec<ReplayOp>,
    stage: u8,
    under_way: usize,
    /// Whether the next stage waits for what is under way.
    waits: bool,
}

/// What a look for the next op has found.
enum Look {
    /// This is under way from now on.
    Send(u64, Check, Arc<AtomicBool>),
    /// Nothing yet.
    Again,
    /// Nothing until a call ends, if one is under way.
    Later,
}

/// A reconciliation. When it ends, or its runtime does, what was not sent is noted again.
struct Reconciliation<'a, P: Store, F: Store> {
    partition: &'a Partition<P, F>,
    number: u64,
    /// Who is still to be taken out of the log, by how much of a limit they have used.
    callers: BTreeMap<u8, Vec<Key>>,
    /// Those who have been taken out, by a number.
    replays: BTreeMap<u64, CallerReplay>,
    /// Of which something may be sent now.
    ready: Vec<u64>,
    /// By a number, in the order in which they were begun.
    calls: BTreeMap<u64, Call>,
    /// How many numbers have been given.
    numbers: u64,
    again: Vec<ReplayOp>,
    /// Whether any op was begun.
    begun: bool,
    failed: bool,
}

impl<'a, P: Store, F: Store> Reconciliation<'a, P, F> {
    fn new(partition: &'a Partition<P, F>) -> Self {
        Self {
            partition,
            number: partition.outages.begin(),
            callers: BTreeMap::new(),
            replays: BTreeMap::new(),
            ready: vec![],
            calls: BTreeMap::new(),
            numbers: 0,
            again: vec![],
            begun: false,
            failed: false,
        }
    }

    /// Looks a little further for the next op.
    fn look(&mut self) -> Look {
        let Some(number) = self.ready.last().copied() else {
            return self.take();
        };
        let Some(replay) = self.replays.get_mut(&number) else {
            return Look::Later;
        };
        let now = self.partition.clock.micros();
        if let Some(op) = replay.next(now) {
            replay.under_way += 1;
            let (check, asked) = (op.check(now), Arc::new(AtomicBool::new(false)));
            self.numbers += 1;
            self.begun = true;
            self.calls.insert(
                self.numbers,
                Call {
                    replay: number,
                    op,
                    asked: Arc::clone(&asked),
                },
            );
            return Look::Send(self.numbers, check, asked);
        }
        if replay.waits {
            self.ready.pop();
        } else if replay.stage == CallerLog::STAGES {
            self.ready.pop();
            self.replays.remove(&number);
        }
        Look::Again
    }

    /// Takes out the next caller.
    fn take(&mut self) -> Look {
        let Some(mut callers) = self.callers.last_entry() else {
            return Look::Later;
        };
        let Some(key) = callers.get_mut().pop() else {
            callers.remove();
            return Look::Again;
        };
        let logs = self.partition.outages.take(self.number, &key);
        self.numbers += 1;
        self.replays.insert(
            self.numbers,
            CallerReplay {
                key,
                logs,
                due: vec![],
                stage: 0,
                under_way: 0,
                waits: false,
            },
        );
        self.ready.push(self.numbers);
        Look::Again
    }

    fn ended(&mut self, ended: Result<Ended, JoinError>) {
        // What a task that panicked leaves behind is for the end.
        let Ok((call, result, _)) = ended else {
            return self.failed = true;
        };
        let Some(Call {
            replay: number, op, ..
        }) = self.calls.remove(&call)
        else {
            return;
        };
        if let Some(replay) = self.replays.get_mut(&number) {
            replay.under_way -= 1;
            if replay.under_way == 0 && std::mem::take(&mut replay.waits) {
                self.ready.push(number);
            }
        }
        match result {
            None => self.again.push(op),
            Some(Ok(granted)) if op.mode == Mode::Charge => {
                lock(&self.partition.sums).charged += granted
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                // What is known not to have been done is sent again, and what is done once by its id.
                let again = error.is_unsent() || (op.id.is_some() && !error.is_of_check());
                self.failed |= again || !error.is_of_check();
                if again {
                    self.again.push(op)
                } else {
                    self.lost(&op)
                }
            }
        }
    }

    fn lost(&self, op: &ReplayOp) {
        if op.mode == Mode::Charge {
            lock(&self.partition.sums).dropped += op.cost;
        }
    }
}

impl CallerReplay {
    /// The next op of this stage. Without one, this is to be asked again unless it `waits`, or is at the end.
    fn next(&mut self, now: i64) -> Option<ReplayOp> {
        if self.due.is_empty() {
            let Self {
                key,
                logs,
                due,
                stage,
                ..
            } = self;
            if !logs
                .iter_mut()
                .any(|log| log.take_some(*key, *stage, now, due))
            {
                self.waits = self.under_way > 0;
                self.stage += u8::from(!self.waits);
            }
        }
        self.due.pop()
    }
}

impl<P: Store, F: Store> Drop for Reconciliation<'_, P, F> {
    fn drop(&mut self) {
        let (partition, now) = (self.partition, self.partition.clock.micros());
        // The last first, since each is put before what is noted.
        for CallerReplay { key, logs, due, .. } in std::mem::take(&mut self.replays).into_values() {
            logs.into_iter()
                .rev()
                .for_each(|log| partition.outages.restore(&key, log, now));
            due.into_iter()
                .for_each(|op| partition.outages.put_back(op, now));
        }
        // Calls are left only if the runtime has ended under them.
        for Call { op, asked, .. } in std::mem::take(&mut self.calls).into_values() {
            let sent = asked.swap(true, Ordering::Relaxed);
            if sent && op.id.is_none() {
                self.lost(&op)
            } else {
                self.again.push(op)
            }
        }
        for op in self.again.drain(..).rev() {
            partition.outages.put_back(op, now);
        }
        match self.begun {
            true => partition.outages.reconciled(self.number),
            false => partition.outages.lapsed(self.number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_the_answers() {
        let (mut window, deadline) = (Window::of(1, NonZeroU32::MIN), Duration::from_millis(100));
        let mut after = |took, ops| {
            (0..ops).for_each(|_| window.learn(Duration::from_millis(took), deadline));
            window.now
        };
        assert_eq!([after(24, 10), after(25, 5), after(90, 1)], [74, 69, 68]);
        assert_eq!(
            [after(0, 10_000), after(25, 10_000)],
            [Window::MOST, Window::START]
        );
        assert_eq!(Window::of(100, NonZeroU32::MIN).now, Window::LEAST);
        assert_eq!(Window::of(1, NonZeroU32::MAX).most, Window::START);
    }
}
