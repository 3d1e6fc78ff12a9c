//! The clients: their checks, and their use of the futures.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use super::plan::{Caller, Habit};
use super::primary::{Local, Primary};
use super::world::World;
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::simulation::pick;
use crate::store::{Answer, Fallback, Store};

pub(super) type Instance = Fallback<Primary, Local>;

/// One client of a caller, until the last fault has ended.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) world: World,
    pub(super) instances: Vec<Instance>,
    pub(super) caller: usize,
    pub(super) rng: Rng,
    /// Number of resets. A charge from before the last reset is not refunded: that would be
    /// deducted from later charges.
    pub(super) resets: Arc<AtomicU64>,
}

/// A client's use of a future. Times are in milliseconds.
#[derive(Debug, Clone, Copy)]
enum Patience {
    Waits,
    /// Drops it after this time.
    Drops(u64),
    /// Polls it for the first time after this time.
    PollsAfter(u64),
}

/// Pause before a refund is sent again, and the number of attempts.
const AGAIN: Duration = Duration::from_millis(100);
const TRIES: u32 = 60;

impl Client {
    pub(super) async fn run(mut self) {
        let (key, policies, habit, most, end) = {
            let state = self.world.state();
            let Caller {
                key,
                ref policies,
                habit,
                cost,
                ..
            } = state.plan.callers[self.caller];
            (key, policies.clone(), habit, cost, state.plan.end)
        };
        // Some callers are never idle, some send few checks.
        let pause = *pick(&mut self.rng, &[8, 20, 60]);
        // The last grant, and the time of its check.
        let mut taken: Option<(Decision, u64)> = None;
        // Reservations: the decision, the instance, and the time of the check.
        let mut reserved: Vec<(Decision, usize, u64)> = vec![];
        let home = self.rng.usize(..self.instances.len());
        loop {
            sleep(Duration::from_millis(self.rng.u64(1..=pause))).await;
            let now = self.world.state().now();
            if now >= end {
                return;
            }
            let rng = &mut self.rng;
            let mut instance = rng.usize(..self.instances.len());
            let cost = rng.u32(1..=most);
            let take = match rng.u8(..10) {
                0 => Check::up_to(key, &policies, cost * 2),
                1 => Check::peek(key, &policies, cost),
                _ => Check::take(key, &policies, cost),
            };
            match habit {
                Habit::Steady => drop(self.ask(instance, take, Patience::Waits).await),
                Habit::Bursting => {
                    let degraded = self.instances.iter().position(Fallback::is_degraded);
                    let count = if degraded.is_some() { 8 } else { 1 };
                    instance = degraded.unwrap_or(instance);
                    join_all((0..count).map(|_| self.ask(instance, take.clone(), Patience::Waits)))
                        .await;
                }
                Habit::WithIds => {
                    // A few new ids at intervals; each is repeated for a while.
                    let id = now / 400 * 3 + rng.u64(..5);
                    let take = Check::take(key, &policies, most).with_id(format!("id-{id}"));
                    self.ask(instance, take, Patience::Waits).await;
                }
                Habit::GivingBack => {
                    let back =
                        Check::refund(key, &policies, if rng.bool() { cost } else { 3 * cost });
                    let older = taken.take_if(|_| rng.u8(..3) == 0);
                    let check = if rng.u8(..4) == 0 { back } else { take };
                    if let Some((decision, at)) = older {
                        self.refund(instance, decision, cost, at).await;
                        continue;
                    }
                    let decision = self.ask(instance, check, Patience::Waits).await;
                    taken = taken.or(decision
                        .filter(Decision::is_allowed)
                        .map(|decision| (decision, now)));
                }
                Habit::Dropping => {
                    let millis = rng.u64(..150);
                    let patience = *pick(
                        rng,
                        &[
                            Patience::Waits,
                            Patience::Drops(millis / 5),
                            Patience::PollsAfter(millis),
                        ],
                    );
                    self.ask(instance, take, patience).await;
                }
                Habit::Resetting => {
                    let check = if rng.u8(..12) == 0 {
                        Check::reset(key, &policies)
                    } else {
                        take
                    };
                    self.ask(instance, check, Patience::Waits).await;
                }
                Habit::Reserving | Habit::ReservingAlone => {
                    let is_alone = habit == Habit::ReservingAlone;
                    if !reserved.is_empty() && rng.bool() {
                        let (decision, instance, at) =
                            reserved.swap_remove(rng.usize(..reserved.len()));
                        match rng.u32(..=decision.granted()) {
                            0 => {
                                let charge = Check::charge(key, &policies, cost);
                                self.ask(instance, charge, Patience::Waits).await;
                            }
                            // One unit less, so that the part of a unit that has drained since does not matter.
                            back => self.refund(instance, decision, back - 1, at).await,
                        }
                        continue;
                    }
                    let instance = if is_alone { home } else { instance };
                    if is_alone && rng.u8(..20) == 0 {
                        reserved.clear();
                        self.resets.fetch_add(1, Relaxed);
                        self.ask(instance, Check::reset(key, &policies), Patience::Waits)
                            .await;
                        continue;
                    }
                    let take = Check::take(key, &policies, 3 * cost);
                    let decision = self.ask(instance, take, Patience::Waits).await;
                    let decision = decision.filter(|decision| decision.granted() > 0);
                    reserved.extend(decision.map(|decision| (decision, instance, now)));
                }
            }
        }
    }

    /// Refunds a part of a decision on a check that was sent at `at`. Retries until it is sent, as the background queue
    /// does.
    async fn refund(&self, instance: usize, decision: Decision, cost: u32, at: u64) {
        let key = self.world.state().plan.callers[self.caller].key;
        let (this, resets) = (self.clone(), self.resets.load(Relaxed));
        let is_not_sent = async move || {
            let age = Duration::from_millis(this.world.state().now() - at);
            let check = decision.refund(key, cost, age);
            let Some(check) = check.filter(|_| this.resets.load(Relaxed) == resets) else {
                return false;
            };
            let answer = this.answer(instance, check, Patience::Waits).await;
            answer.is_some_and(|answer| answer.is_err_and(|error| error.is_not_sent()))
        };
        if cost > 0 && is_not_sent().await {
            tokio::spawn(async move {
                for _ in 0..TRIES {
                    sleep(AGAIN).await;
                    if !is_not_sent().await {
                        return;
                    }
                }
            });
        }
    }

    async fn ask(&self, instance: usize, check: Check, patience: Patience) -> Option<Decision> {
        self.answer(instance, check, patience).await?.ok()
    }

    /// Awaits the answer. `None` if the client drops the future first.
    async fn answer(
        &self,
        instance: usize,
        check: Check,
        patience: Patience,
    ) -> Option<Result<Decision, StoreError>> {
        let (world, store) = (&self.world, &self.instances[instance]);
        let ask = world.state().asks(instance, self.caller, &check);
        let future = match world.during(ask, || store.check(check)) {
            Answer::Ready { answer } => {
                let now = world.state().now();
                world
                    .state()
                    .answered(ask, now, store.is_degraded(), &answer);
                return Some(answer);
            }
            Answer::Pending { future } => future,
        };
        let future = Watched {
            world,
            ask,
            future: Box::pin(future),
        };
        let mut polled = 0;
        let answer = match patience {
            Patience::Waits => Some(future.await),
            Patience::Drops(0) => None,
            Patience::Drops(millis) => timeout(Duration::from_millis(millis), future).await.ok(),
            Patience::PollsAfter(millis) => {
                sleep(Duration::from_millis(millis)).await;
                polled = world.state().now();
                Some(future.await)
            }
        };
        match &answer {
            Some(answer) => world
                .state()
                .answered(ask, polled, store.is_degraded(), answer),
            None => world.state().dropped(ask),
        }
        answer
    }
}

/// A client's future. While it is polled, the world attributes requests to its check.
struct Watched<'a, F> {
    world: &'a World,
    ask: usize,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for Watched<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let (world, ask) = (self.world, self.ask);
        world.during(ask, || self.future.as_mut().poll(cx))
    }
}
