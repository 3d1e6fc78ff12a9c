//! A simulation of requests that wait, settle their real cost afterwards, or are in flight. Their
//! store replies late and out of order, loses requests and replies, and is sometimes unreachable.
//!
//! Each instance has runtimes, and each runtime a clock that the simulation moves, so that one
//! runtime may shut down or stall while others run. Recorded times are accurate to one step, as on
//! a busy machine.

mod clients;
mod ledger;
mod plan;
mod world;

use std::env;
use std::process::Command;
use std::time::Duration;

use fastrand::Rng;
use tokio::runtime::Builder;
use tokio::time::Instant;

use self::clients::Client;
use self::ledger::Rule;
use self::plan::{Habit, Plan, TIMEOUT};
use self::world::{Far, Recorder, World, WorldState};
use super::clocked::Clocked;
use super::{Outcome, Simulation};
use crate::Limiter;
use crate::held_slots::InFlightTracker;
use crate::store::Waiters;
use crate::util::Seed;
use crate::wait_queues::{Bounds, WaitQueues};

const REQUESTS: Simulation<Rule> = Simulation {
    name: "requests",
    run,
};

const SECOND: Duration = Duration::from_secs(1);
/// Milliseconds after the last fault until everything must be settled.
const REST: u64 = 3 * TIMEOUT + 3000;
/// Milliseconds that tasks may outlive their limiters.
const REMAINS: u64 = 2 * TIMEOUT + 3000;

/// A runtime that shuts down drops its tasks in an order that depends on their ids, which count up
/// over all runs. This makes every run start with an equivalent id.
fn align_task_numbers() {
    let runtime = Builder::new_current_thread().build().unwrap();
    while !runtime
        .spawn(async {})
        .id()
        .to_string()
        .parse::<u64>()
        .unwrap()
        .is_multiple_of(16)
    {}
}

fn run(seed: u64, kept: bool) -> Outcome<Rule> {
    align_task_numbers();
    let mut rng = Rng::with_seed(seed);
    let plan = Plan::new(&mut rng);
    let shown = plan.to_string();
    let seed = Seed::set(rng.u64(..), Duration::from_micros(plan.wall.unsigned_abs()));
    let world = World::new(WorldState::new(plan, rng.fork(), kept));
    Simulated::new(&world, rng, seed).run();
    let log = world.state().ledger.log.take();
    Outcome { plan: shown, log }
}

struct Simulated<'a> {
    world: &'a World,
    rng: Rng,
    seed: Seed,
    start: Instant,
    runtimes: Vec<Clocked>,
    /// Per instance and caller.
    limiters: Vec<Vec<(Limiter<Far>, WaitQueues)>>,
    now: u64,
    /// Maximum duration of a step, in milliseconds.
    step: u64,
}

impl<'a> Simulated<'a> {
    fn new(world: &'a World, rng: Rng, seed: Seed) -> Self {
        let state = world.state();
        let plan = &state.plan;
        let (runtimes, start) = Clocked::all(plan.runtimes.len());
        for runtime in &runtimes {
            runtime.starts_at(start);
        }
        seed.set_now(start);
        let limiters = (0..plan.instances).map(|instance| {
            let store = Far {
                world: world.clone(),
                instance,
                waiters: Waiters::default(),
            };
            let limiter = |caller: &plan::Caller| {
                let recorder = Recorder {
                    world: world.clone(),
                    instance,
                };
                let in_flight = InFlightTracker::new(&store, None);
                let wait_queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
                let wait_queues = wait_queues.with_tracker(in_flight);
                (
                    Limiter::new(store.clone(), caller.policies.clone()).observer(recorder),
                    wait_queues,
                )
            };
            plan.callers.iter().map(limiter).collect()
        });
        let limiters = limiters.collect();
        Self {
            world,
            rng,
            seed,
            start,
            runtimes,
            limiters,
            now: 0,
            step: plan.step,
        }
    }

    fn client(&mut self, runtime: usize, caller: usize) -> Client {
        let instance = self.world.state().plan.runtimes[runtime].instance;
        let (limiter, wait_queues) = self.limiters[instance][caller].clone();
        Client {
            world: self.world.clone(),
            limiter,
            wait_queues,
            caller,
            runtime,
            rng: self.rng.fork(),
        }
    }

    fn spawn(&self, runtime: usize, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtimes[runtime].runtime {
            drop(runtime.spawn(task));
        }
    }

    fn run(mut self) {
        let (callers, end, last) = {
            let WorldState { plan, .. } = &*self.world.state();
            let callers: Vec<_> = plan
                .callers
                .iter()
                .map(|caller| (caller.habit, caller.clients))
                .collect();
            (callers, plan.end, plan.last())
        };
        for runtime in 0..self.runtimes.len() {
            for (caller, (_, clients)) in callers.iter().enumerate() {
                for _ in 0..*clients {
                    let client = self.client(runtime, caller);
                    self.spawn(runtime, client.run());
                }
            }
        }
        self.passes_to(end);
        self.world.state().say(None, || "faults end".to_owned());
        self.passes_to(last);
        self.step = 50;
        // Keep some traffic: work that a runtime has left is done by the next request on another
        // one.
        while self.now < last + REST {
            for runtime in 0..self.runtimes.len() {
                for (caller, (habit, _)) in callers.iter().enumerate() {
                    let client = self.client(runtime, caller);
                    match habit {
                        Habit::Waiting => {}
                        Habit::Reserving => {
                            self.spawn(runtime, async move { drop(client.reserve(0, None).await) })
                        }
                        Habit::InFlight => {
                            self.spawn(runtime, async move { drop(client.reserve(1, None).await) })
                        }
                        Habit::Queueing => {
                            self.spawn(
                                runtime,
                                async move { drop(client.queue(SECOND, None).await) },
                            )
                        }
                    }
                }
            }
            self.passes_to(self.now + 500);
        }
        self.passes_to(self.now + 1000);
        self.rests(&callers);
        self.limiters.clear();
        self.passes_to(self.now + REMAINS);
        self.world.state().ledger.checks(Rule::Tasks);
        for (i, Clocked { runtime, .. }) in self.runtimes.iter().enumerate() {
            let left = runtime
                .as_ref()
                .map_or(0, |runtime| runtime.metrics().num_alive_tasks());
            if left > 0 {
                let problem =
                    format!("{left} tasks still live {REMAINS} ms after their limiters, on r{i}");
                self.world.state().breaks(Rule::Tasks, None, problem);
            }
        }
    }

    fn rests(&mut self, callers: &[(Habit, usize)]) {
        let state = &mut *self.world.state();
        state.say(None, || "all is quiet".to_owned());
        for caller in 0..callers.len() {
            let used = state.used(caller);
            state.ledger.rests(&state.plan, caller, used);
        }
        state.say(None, || "the end".to_owned());
    }

    /// Advances the time in steps.
    fn passes_to(&mut self, until: u64) {
        while self.now < until {
            self.now = (self.now + self.rng.u64(1..=self.step)).min(until);
            self.seed.set_now(self.start + self.elapsed());
            self.world.passes_to(self.now);
            let first = self.rng.usize(..self.runtimes.len());
            for i in 0..self.runtimes.len() {
                self.run_one((first + i) % self.runtimes.len());
            }
            let state = &mut *self.world.state();
            state.ledger.passes(&state.plan, self.now, self.step);
            state.watch_steady();
            state.ledger.log.say_broken(self.now);
        }
    }

    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    fn run_one(&mut self, runtime: usize) {
        let (is_still, has_ended) = {
            let state = self.world.state();
            (
                state.plan.is_still(runtime, self.now),
                state.plan.has_ended(runtime, self.now),
            )
        };
        if has_ended && let Some(ended) = self.runtimes[runtime].runtime.take() {
            self.world.state().say(None, || format!("r{runtime} ends"));
            drop(ended);
        } else if !is_still {
            let elapsed = self.elapsed();
            self.runtimes[runtime].passes_to(elapsed, 3);
        }
    }
}

#[test]
fn every_seed_keeps_the_rules() {
    REQUESTS.explore();
}

/// In a process that runs no other test: these would number tasks too. See [`align_task_numbers`].
#[test]
fn a_seed_replays() {
    if env::args().any(|arg| arg == "--exact") {
        return REQUESTS.replays(100..150);
    }
    let this = "simulation::requests::a_seed_replays";
    let status = Command::new(env::current_exe().unwrap())
        .args(["--exact", this])
        .status();
    assert!(status.unwrap().success(), "{this} alone");
}
