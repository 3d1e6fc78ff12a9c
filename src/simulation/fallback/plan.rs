//! The contents of a seed: the instances, the callers and their policies, and the faults.

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
    /// Whether requests of one instance in the same millisecond share a call.
    pub(super) batched: bool,
    pub(super) callers: Vec<Caller>,
    pub(super) faults: Vec<Fault>,
    /// End of the last fault. Clients send no checks after it.
    pub(super) end: u64,
    /// Start of the instances' clocks and of the primary store's clock, since the Unix epoch.
    pub(super) clocks: [Duration; 2],
}

/// The divisor of a limit for an instance's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// The real number of instances.
    Fixed,
    /// The reported number of live instances, which changes.
    Alive,
}

#[derive(Debug)]
pub(super) struct Caller {
    pub(super) key: Key,
    pub(super) policies: Policies,
    pub(super) habit: Habit,
    /// Whether no charge expires during the run.
    pub(super) lasting: bool,
    /// Maximum cost of a check.
    pub(super) cost: u32,
}

/// The behavior of a caller's clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    /// Sends checks continuously.
    Steady,
    /// Sends many concurrent checks while an instance is degraded.
    Bursting,
    /// Sends checks with ids, and repeats ids at any instance.
    WithIds,
    /// Refunds a part of its grants.
    GivingBack,
    /// Drops some futures before the answer, and polls others late.
    Dropping,
    /// Is reset at intervals.
    Resetting,
    /// Reserves, and later settles the difference by a refund or a charge.
    Reserving,
    /// Reserves in the same way, at one instance only, and is reset at intervals.
    ReservingAlone,
}

/// A fault between some instances and the primary store.
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
    /// There is no connection, and nothing is sent.
    Down,
    /// Like `Down`, and the primary store loses its counts.
    Emptied,
    /// Every request fails with an error, and is not executed.
    Refusing,
    /// Some requests fail with an error that concerns only them.
    RefusingSome,
    /// The queue is full for some requests.
    QueueFull,
    /// Some requests are lost.
    LosingRequests,
    /// Some requests are executed, and their replies are lost.
    LosingReplies,
    /// Some requests are executed, and then the connection breaks.
    Cutting,
    /// Replies take about as long as the deadline.
    Late,
    /// Replies take longer than the deadline.
    Slow,
    /// Requests are executed when the fault ends.
    Frozen,
    /// A mixture of all faults.
    Mixed,
}

/// Replies around the deadline occur more often, because they have caused most of the errors.
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

/// Faults in which no sent request fails.
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

/// A period in which not even one unit of a thousand expires during a run.
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
        // A day into a period of 90 days, and a part of the next hour.
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

/// The head of a log.
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
            // A caller that reserves needs a limit above all its charges.
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
