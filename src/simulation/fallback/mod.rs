//! A simulation of instances whose primary store fails in every known way.
//!
//! One seed determines everything: the instances, the callers and their policies, the faults, and the requests with
//! their times. Time is paused, everything runs on one thread, and a run takes milliseconds. The rules of `ledger` are
//! checked after each step. To replay a seed that breaks one, with its log:
//!
//! ```sh
//! cargo xtask simulate fallback --seed 17
//! ```

mod clients;
mod ledger;
mod plan;
mod primary;
mod streak;
mod world;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use fastrand::Rng;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use self::clients::{Client, Instance};
use self::ledger::Rule;
use self::plan::{Habit, Kind, Plan, Sharing};
use self::primary::{Local, Primary};
use self::world::{LogObserver, World, WorldState};
use super::clocked::paused;
use super::{Outcome, Simulation};
use crate::store::{Fallback, Instances, LocalStore};
use crate::util::Seed;

const FALLBACK: Simulation<Rule> = Simulation {
    name: "fallback",
    run,
};

/// Runs a seed, with a log if `kept`.
fn run(seed: u64, kept: bool) -> Outcome<Rule> {
    let mut rng = Rng::with_seed(seed);
    let plan = Plan::new(&mut rng);
    paused().block_on(live(plan, rng, kept))
}

/// Maximum time from the last fault until the primary store decides for every instance.
const RECOVERY: Duration = Duration::from_secs(1);
/// Maximum additional time until all activity ends.
const REST: Duration = Duration::from_secs(2);
/// Time for which tasks of dropped stores may run.
const REMAINS: Duration = Duration::from_secs(3);

async fn live(plan: Plan, mut rng: Rng, kept: bool) -> Outcome<Rule> {
    let shown = plan.to_string();
    let [wall, elsewhere] = plan.clocks;
    let counts = {
        let _seed = Seed::set(rng.u64(..), elsewhere);
        LocalStore::default()
    };
    let _seed = Seed::set(rng.u64(..), wall);
    let world = World::new(WorldState::new(plan, rng.fork(), kept, counts));
    let alive = Arc::new(AtomicU32::new(0));
    let instances: Vec<Instance> = instances(&world, &alive);

    let mut tasks = JoinSet::new();
    tasks.spawn(inject_faults(world.clone(), alive, rng.fork()));
    let callers = world.state().plan.callers.len();
    for caller in 0..callers {
        let is_alone = world.state().plan.callers[caller].habit == Habit::ReservingAlone;
        for _ in 0..if is_alone { 1 } else { rng.usize(1..=2) } {
            let (world, instances) = (world.clone(), instances.clone());
            tasks.spawn(
                Client {
                    world,
                    instances,
                    caller,
                    rng: rng.fork(),
                    resets: Arc::default(),
                }
                .run(),
            );
        }
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    sleep(RECOVERY).await;
    if world.state().ledger.opened > 0 {
        world.state().check_rule(Rule::Recovery);
    }
    for (i, instance) in instances.iter().enumerate() {
        if instance.is_degraded() {
            world.state().break_rule(
                Rule::Recovery,
                format!("i{i} has not recovered {RECOVERY:?} after the last fault"),
            );
        }
    }
    sleep(REST).await;
    world.state().rests();
    drop(instances);
    sleep(REMAINS).await;
    let left = Handle::current().metrics().num_alive_tasks();
    world.state().check_rule(Rule::Left);
    if left > 0 {
        world.state().break_rule(
            Rule::Left,
            format!("{left} tasks live on, {REMAINS:?} after their stores"),
        );
    }
    let log = world.state().ledger.log.take();
    Outcome { plan: shown, log }
}

fn instances(world: &World, alive: &Arc<AtomicU32>) -> Vec<Instance> {
    let state = world.state();
    let plan = &state.plan;
    alive.store(plan.instances as u32, Relaxed);
    let instance = |instance| {
        let primary = Primary {
            world: world.clone(),
            instance,
        };
        let local = Local {
            world: world.clone(),
            instance,
            store: LocalStore::default(),
        };
        Fallback::builder(primary, local)
            .deadline(Duration::from_millis(plan.deadline))
            .unwrap()
            .failures(NonZeroU32::new(plan.failures).unwrap())
            .share(match plan.share {
                Sharing::Fixed => Instances::from(plan.instances as u32),
                Sharing::Alive => counted(alive),
            })
            .observer(LogObserver {
                world: world.clone(),
                instance,
            })
            .build()
    };
    (0..plan.instances).map(instance).collect()
}

fn counted(alive: &Arc<AtomicU32>) -> Instances {
    let alive = Arc::clone(alive);
    Instances::new(move || NonZeroU32::new(alive.load(Relaxed)).unwrap())
}

/// Injects faults: starts and ends them, clears the primary store, and changes the number of live instances.
async fn inject_faults(world: World, alive: Arc<AtomicU32>, mut rng: Rng) {
    let mut events = vec![];
    let (instances, share) = {
        let state = world.state();
        for fault in &state.plan.faults {
            let whom = (0..state.plan.instances).filter(|i| fault.instances >> i & 1 == 1);
            let whom: Vec<String> = whom.map(|i| format!("i{i}")).collect();
            let empties = fault.kind == Kind::Emptied;
            events.push((
                fault.from,
                false,
                format!("--- {:?} begins for {}", fault.kind, whom.join(", ")),
            ));
            // End the fault 1 ms early, so that the counts are lost before requests are answered
            // again.
            events.push((
                fault.until - 1,
                empties,
                format!("--- {:?} ends", fault.kind),
            ));
        }
        (state.plan.instances as u32, state.plan.share)
    };
    events.sort();
    for (at, empties, text) in events {
        while world.state().now() < at {
            let left = at - world.state().now();
            sleep(Duration::from_millis(left.min(rng.u64(100..400)))).await;
            if share == Sharing::Alive {
                // Report the right number at least half of the time.
                let count = if rng.bool() {
                    instances
                } else {
                    rng.u32(1..=instances)
                };
                let before = alive.swap(count, Relaxed);
                let mut state = world.state();
                state.ledger.fewer += i64::from(count < before);
                state.ledger.changed |= count != before;
                state.note(format!("{count} instances are said to be alive"));
            }
        }
        world.state().note(text);
        if empties {
            world.state().empties();
        }
    }
    alive.store(instances, Relaxed);
}

#[test]
fn every_seed_keeps_the_rules() {
    FALLBACK.explore();
}

#[test]
fn a_seed_replays() {
    FALLBACK.replays(0..50);
}
