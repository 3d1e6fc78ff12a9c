//! The clients, and the settlement of their grants.

use std::future::Future;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{sleep, timeout};

use super::ledger::Rule;
use super::plan::{Caller, Habit, LONGEST};
use super::world::{Far, World, WorldState};
use crate::Limiter;
use crate::error::StoreError;
use crate::held_slots::Slot;
use crate::limit::{Check, Decision};
use crate::settle::{Reservation, ReserveError};
use crate::simulation::{pick, verdict};
use crate::util::instant;
use crate::wait_queues::{Spent, WaitQueues};

/// A client of one caller on one runtime. It runs until the last fault has ended, or longer if it
/// is steady.
pub(super) struct Client {
    pub(super) world: World,
    pub(super) limiter: Limiter<Far>,
    /// Queues for requests in flight: a limiter does not observe their end.
    pub(super) wait_queues: WaitQueues,
    pub(super) caller: usize,
    pub(super) runtime: usize,
    pub(super) rng: Rng,
}

impl Client {
    pub(super) async fn run(mut self) {
        let (habit, most, drops, is_steady, end, last) = {
            let WorldState { plan, .. } = &*self.world.state();
            let Caller {
                habit,
                cost,
                drops,
                is_steady,
                ..
            } = plan.callers[self.caller];
            (
                habit,
                cost,
                drops,
                is_steady,
                plan.end,
                if is_steady { plan.last() } else { plan.end },
            )
        };
        // Some clients are never idle, others rarely send.
        let pause = *pick(&mut self.rng, if is_steady { &[5] } else { &[10, 40, 150] });
        loop {
            sleep(Duration::from_millis(self.rng.u64(1..=pause))).await;
            let now = self.world.state().now();
            if now >= last {
                return;
            }
            let rng = &mut self.rng;
            let cost = rng.u32(1..=most);
            let patience = (drops && now < end && rng.u8(..4) == 0)
                .then(|| Duration::from_millis(rng.u64(..100)));
            match habit {
                Habit::Waiting => {
                    let max = Duration::from_millis(*pick(rng, &[0, 40, 400, 3000, 3000]));
                    self.wait(cost, max, patience).await;
                }
                Habit::Reserving => {
                    let real = if rng.bool() {
                        rng.u32(..=cost)
                    } else {
                        cost * 2
                    };
                    let lasts = Duration::from_millis(rng.u64(..150));
                    if let Some(held) = self.reserve(cost, patience).await {
                        sleep(lasts).await;
                        held.settle(real);
                    }
                }
                Habit::InFlight => {
                    let lasts = Duration::from_millis(*pick(
                        rng,
                        if is_steady {
                            &[1, 5, 60]
                        } else {
                            &[5, 60, 300]
                        },
                    ));
                    if let Some(held) = self.reserve(1, patience).await {
                        sleep(lasts).await;
                        drop(held);
                    }
                }
                Habit::Queueing => {
                    let max = Duration::from_millis(*pick(rng, &[0, 40, 400, 3000, 3000]));
                    let lasts = Duration::from_millis(*pick(rng, &[1, 20, LONGEST]));
                    if let Some(held) = self.queue(max, patience).await {
                        sleep(lasts).await;
                        drop(held);
                    }
                }
            }
        }
    }

    /// Waits for a cost.
    pub(super) async fn wait(&self, cost: u32, max: Duration, patience: Option<Duration>) {
        let waits = Waits::new(self, cost, max);
        let key = self.world.state().plan.callers[self.caller].key;
        if let Some(answer) = within(patience, self.limiter.wait(key, cost, max)).await {
            let granted = answer
                .as_ref()
                .map(|decision| i64::from(decision.granted()))
                .unwrap_or_default();
            let text = answer
                .as_ref()
                .map_or_else(|error| format!("error: {error}"), verdict);
            waits.end(
                Some(granted).filter(|granted| *granted > 0),
                answer.as_ref().err(),
                &text,
            );
        }
    }

    /// Waits for a slot.
    pub(super) async fn queue(&self, max: Duration, patience: Option<Duration>) -> Option<Held> {
        let waits = Waits::new(self, 1, max);
        let take = {
            let Caller { key, policies, .. } = &self.world.state().plan.callers[self.caller];
            Check::take(*key, policies, 1)
        };
        let deadline = instant().checked_add(max);
        let turn = async { self.wait_queues.join(&take, deadline, None)?.await };
        match within(patience, turn).await? {
            Ok(permit) => {
                let Spent { decision, slot, .. } = permit.spend();
                waits.end(Some(1), None, &verdict(&decision));
                Some(Held::new(
                    self.world.clone(),
                    self.caller,
                    1,
                    &decision,
                    Kept::InFlight {
                        _slot: slot.unwrap(),
                    },
                ))
            }
            Err(refusal) => {
                let answer = refusal.into_answer();
                let text = answer
                    .as_ref()
                    .map_or_else(|error| format!("error: {error}"), verdict);
                waits.end(None, answer.as_ref().err(), &text);
                None
            }
        }
    }

    /// Reserves a cost.
    pub(super) async fn reserve(&self, cost: u32, patience: Option<Duration>) -> Option<Held> {
        let (world, caller) = (&self.world, self.caller);
        let key = world.state().plan.callers[caller].key;
        let mut reserving = Reserving {
            world,
            caller,
            cost,
            has_result: false,
        };
        let answer = within(patience, self.limiter.reserve(key, cost)).await?;
        reserving.has_result = true;
        match answer {
            Ok(reservation) => {
                let decision = reservation.decision().clone();
                Some(Held::new(
                    world.clone(),
                    caller,
                    cost,
                    &decision,
                    Kept::Reserved(Box::new(reservation)),
                ))
            }
            Err(ReserveError::Denied(_)) => None,
            Err(ReserveError::Failed(error)) => {
                reserving.has_result = error.is_not_sent();
                world.state().failed(caller, &error);
                None
            }
        }
    }
}

/// Returns `None` if the patience ran out first.
async fn within<T>(patience: Option<Duration>, future: impl Future<Output = T>) -> Option<T> {
    match patience {
        None => Some(future.await),
        Some(patience) => timeout(patience, future).await.ok(),
    }
}

/// A waiting request. Dropping it cancels the wait.
struct Waits<'a> {
    client: &'a Client,
    number: u64,
}

impl<'a> Waits<'a> {
    fn new(client: &'a Client, cost: u32, max: Duration) -> Self {
        let &Client {
            caller, runtime, ..
        } = client;
        let state = &mut *client.world.state();
        let (now, max) = (state.now(), max.as_millis() as u64);
        let number = state.ledger.waits(caller, runtime, cost, now, max);
        state.say(Some(caller), || {
            format!("r{runtime} w{number} waits for {cost}, up to {max} ms")
        });
        Self { client, number }
    }

    fn end(self, granted: Option<i64>, error: Option<&StoreError>, text: &str) {
        let (
            &Client {
                caller, runtime, ..
            },
            number,
        ) = (self.client, self.number);
        let state = &mut *self.client.world.state();
        state.say(Some(caller), || {
            format!("r{runtime} w{number} gets: {text}")
        });
        if let Some(error) = error {
            state.failed(caller, error);
        } else if granted.is_none() && state.plan.is_well() && state.plan.callers[caller].is_ample()
        {
            state.breaks(
                Rule::Slow,
                Some(caller),
                format!("w{number} is denied, though the capacity is ample"),
            );
        }
        state
            .ledger
            .waited(&state.plan, state.now(), caller, number, granted);
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let state = &mut *self.client.world.state();
        state.ledger.waited(
            &state.plan,
            state.now(),
            self.client.caller,
            self.number,
            None,
        );
    }
}

/// A request for a reservation. Dropping it without a result leaves its outcome unknown.
struct Reserving<'a> {
    world: &'a World,
    caller: usize,
    cost: u32,
    has_result: bool,
}

impl Drop for Reserving<'_> {
    fn drop(&mut self) {
        if !self.has_result {
            self.world
                .state()
                .ledger
                .is_unknown(self.caller, self.cost.into());
        }
    }
}

/// The reservation of a client. Dropping it refunds everything.
pub(super) struct Held {
    world: World,
    caller: usize,
    cost: u32,
    kept: Option<Kept>,
}

enum Kept {
    Reserved(Box<Reservation>),
    InFlight { _slot: Slot },
}

impl Held {
    fn new(world: World, caller: usize, cost: u32, decision: &Decision, kept: Kept) -> Self {
        {
            let state = &mut *world.state();
            state.say(Some(caller), || format!("begins: {}", verdict(decision)));
            if state.plan.callers[caller].habit.is_in_flight() {
                state.ledger.begins(&state.plan, caller);
            }
        }
        Self {
            world,
            caller,
            cost,
            kept: Some(kept),
        }
    }

    pub(super) fn settle(mut self, cost: u32) {
        self.ends(cost);
        if let Some(Kept::Reserved(reservation)) = self.kept.take() {
            reservation.settle(cost);
        }
    }

    /// Records the end of the request, before the store can see it.
    fn ends(&self, cost: u32) {
        let state = &mut *self.world.state();
        state.say(Some(self.caller), || {
            format!("ends with a cost of {cost} for {}", self.cost)
        });
        match state.plan.callers[self.caller].habit {
            Habit::InFlight | Habit::Queueing => state.ledger.ends(self.caller),
            _ => state
                .ledger
                .settles(self.caller, self.cost.into(), cost.into()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(kept) = self.kept.take() {
            self.ends(0);
            drop(kept);
        }
    }
}
