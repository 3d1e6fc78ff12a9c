//! What a seed stands for: the instances, the callers and their policies, and the faults.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

use crate::limit::{Key, Policies, Policy, Quota, Strategy};
use crate::simulation::pick;

/// All times are in milliseconds since the start.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) instances: usize,
    pub(super) share: Sharing,
    pub(super) deadline: u64,
    pub(super) failures: u32,
    /// Whether requests of one instance and millisecond are one call.
    pub(super) batched: bool,
    pub(super) callers: Vec<Caller>,
    pub(super) faults: Vec<Fault>,
    /// When the last fault is over. No client asks from then on.
    pub(super) end: u64,
    /// Where the clock of the instances starts, since the Unix epoch, and that of the primary store.
    pub(super) clocks: [Duration; 2],
}

/// What the instances take their part by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// As many as there are.
    Fixed,
    /// As many as are said to be alive, which changes.
    Alive,
}

#[derive(Debug)]
pub(super) struct Caller {
    pub(super) key: Key,
    pub(super) policies: Policies,
    pub(super) habit: Habit,
    /// Whether nothing flows back while the run lasts.
    pub(super) lasting: bool,
    /// The most that may be asked for at once.
    pub(super) cost: u32,
}

/// How a caller's clients ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    /// Again and again.
    Steady,
    /// Many at once while an instance is degraded.
    Bursting,
    /// With ids, which are repeated at any instance.
    WithIds,
    /// Refunds some of what it took.
    GivingBack,
    /// Drops some futures before they are answered, and polls others late.
    Dropping,
    /// Is forgotten now and then.
    Resetting,
    /// Reserves, and reconciles it later: gives some back, or is charged more.
    Reserving,
    /// The same alone at one instance, and is forgotten now and then.
    ReservingAlone,
}

/// Something that goes wrong between some instances and the primary store.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) from: u64,
    pub(super) until: u64,
    /// A bit for each instance.
    pub(super) instances: u8,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing is sent: there is no connection.
    Down,
    /// As `Down`, and what was counted is forgotten.
    Emptied,
    /// Every request is answered with an error and does not run.
    Refusing,
    /// Some requests are answered with an error that says nothing of others.
    RefusingSome,
    /// There is no place for some requests.
    QueueFull,
    /// Some requests never arrive.
    LosingRequests,
    /// Some requests run and are never answered.
    LosingReplies,
    /// Some requests run, and then the connection breaks.
    Cutting,
    /// Answers take about as long as the deadline.
    Late,
    /// Answers take longer than the deadline.
    Slow,
    /// Requests run when it is over.
    Frozen,
    /// A little of everything.
    Mixed,
}

/// Answers around the deadline are where the most has gone wrong.
const KINDS: [Kind; 14] = [
    Kind::Down,
    Kind::Emptied,
    Kind::Refusing,
    Kind::RefusingSome,
    Kind::QueueFull,
    Kind::LosingRequests,
    Kind::LosingReplies,
    Kind::Cutting,
    Kind::Late,
    Kind::Late,
    Kind::Late,
    Kind::Slow,
    Kind::Frozen,
    Kind::Mixed,
];

/// Those of which nothing is sent that fails.
const MILD: [Kind; 3] = [Kind::Down, Kind::QueueFull, Kind::QueueFull];

const HABITS: [Habit; 9] = [
    Habit::Steady,
    Habit::Bursting,
    Habit::Bursting,
    Habit::WithIds,
    Habit::GivingBack,
    Habit::Dropping,
    Habit::Resetting,
    Habit::Reserving,
    Habit::ReservingAlone,
];

/// So long that nothing flows back in a run, even of a thousand units.
const LONG: Duration = Duration::from_secs(90 * 86_400);

impl Plan {
    pub(super) fn new(rng: &mut Rng) -> Self {
        let instances = *pick(rng, &[1, 1, 2, 2, 3, 4]);
        let kinds: &[Kind] = if rng.u8(..4) == 0 { &MILD } else { &KINDS };
        let mut at = if rng.u8(..8) == 0 {
            0
        } else {
            rng.u64(50..400)
        };
        let faults = (0..rng.usize(1..=3)).map(|_| {
            let from = at;
            let until = from
                + match rng.u8(..3) {
                    0 => rng.u64(20..200),
                    1 => 400,
                    _ => 900,
                };
            at = until + if rng.bool() { 0 } else { rng.u64(50..1500) };
            let all = (1u8 << instances) - 1;
            let some = if rng.u8(..3) == 0 {
                rng.u8(1..=all)
            } else {
                all
            };
            let kind = *pick(rng, kinds);
            Fault {
                from,
                until,
                instances: if kind == Kind::Emptied { all } else { some },
                kind,
            }
        });
        let faults: Vec<Fault> = faults.collect();
        let end = faults.iter().map(|fault| fault.until).max().unwrap_or(0);
        let callers = (0..rng.usize(1..=3)).map(|i| Caller::new(rng, i)).collect();
        // A day into a period of 90 days, and some of the next hour.
        let wall = |rng: &mut Rng| {
            LONG * 220 + Duration::from_micros(86_400_000_000 + rng.u64(..3_600_000_000))
        };
        Self {
            instances,
            share: if rng.u8(..4) == 0 {
                Sharing::Alive
            } else {
                Sharing::Fixed
            },
            deadline: *pick(rng, &[20, 50, 100]),
            failures: *pick(rng, &[1, 3, 3, 5]),
            batched: rng.bool(),
            callers,
            faults,
            end,
            clocks: [wall(rng), wall(rng)],
        }
    }
}

/// As it stands above a log.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            instances,
            share,
            deadline,
            failures,
            batched,
            callers,
            ..
        } = self;
        let calls = if *batched { ", in batches" } else { "" };
        writeln!(
            f,
            "{instances} instances, share {share:?}, deadline {deadline} ms, {failures} failures open{calls}"
        )?;
        for (
            i,
            Caller {
                policies,
                habit,
                cost,
                ..
            },
        ) in callers.iter().enumerate()
        {
            write!(f, "c{i} {habit:?}, cost up to {cost}:")?;
            policies
                .iter()
                .try_for_each(|policy| write!(f, " {policy:?}"))?;
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Habit {
    pub(super) fn reserves(self) -> bool {
        matches!(self, Self::Reserving | Self::ReservingAlone)
    }
}

impl Caller {
    fn new(rng: &mut Rng, index: usize) -> Self {
        let habit = *pick(rng, &HABITS);
        let takes_only = matches!(habit, Habit::Steady | Habit::Bursting | Habit::Dropping);
        let lasting = !takes_only || rng.u8(..3) > 0;
        let period = if lasting {
            LONG
        } else {
            Duration::from_millis(*pick(rng, &[300, 1000, 4000]))
        };
        let mut policy = |name: &str| {
            let strategy = *pick(rng, Strategy::ALL);
            // Who reserves can bear whatever is charged.
            let limit = if habit.reserves() {
                10_000
            } else {
                *pick(rng, &[4, 10, 40, 100, 500])
            };
            Policy::new(name, strategy, Quota::per(limit, period)).unwrap()
        };
        let first = policy("one");
        let several = takes_only && index == 2;
        let policies: Policies = if several {
            Policies::new([first, policy("two")]).unwrap()
        } else {
            first.into()
        };
        let cost = rng.u32(1..=3);
        Self {
            key: Key::new(format!("c{index}")),
            policies,
            habit,
            lasting,
            cost,
        }
    }

    /// The capacity of each of its policies.
    pub(super) fn capacities(&self) -> impl Iterator<Item = i64> {
        self.policies.iter().map(|policy| policy.params().capacity)
    }
}
