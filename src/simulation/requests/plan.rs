//! The plan that a seed determines: the instances and their runtimes, the callers, and the faults.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

use crate::limit::{Key, Policies, Policy, Quota, Strategy};
use crate::simulation::pick;

/// All times are in milliseconds since the start.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) instances: usize,
    pub(super) runtimes: Vec<Runtime>,
    pub(super) callers: Vec<Caller>,
    pub(super) faults: Vec<Fault>,
    /// Maximum delay of a runtime.
    pub(super) step: u64,
    /// Maximum travel time of a request, each way.
    pub(super) delay: u64,
    /// When all faults have ended and clients no longer cancel. Only steady clients send requests
    /// after this.
    pub(super) end: u64,
    /// The start of the store's clock, in microseconds since the Unix epoch.
    pub(super) wall: i64,
}

#[derive(Debug)]
pub(super) struct Runtime {
    pub(super) instance: usize,
    /// When the runtime shuts down, if before the end. One runtime of each instance does not.
    pub(super) ends_at: Option<u64>,
    /// When the runtime stalls: start and end.
    pub(super) still: Option<(u64, u64)>,
}

#[derive(Debug)]
pub(super) struct Caller {
    pub(super) key: Key,
    pub(super) policies: Policies,
    pub(super) habit: Habit,
    /// Maximum cost of a request.
    pub(super) cost: u32,
    /// The number of clients on each runtime.
    pub(super) clients: usize,
    /// Whether some futures are dropped before they are ready.
    pub(super) drops: bool,
    /// Whether there are many clients, which rarely pause and continue after the last fault.
    pub(super) is_steady: bool,
}

/// The behavior of a caller's clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    /// Wait for a cost.
    Waiting,
    /// Reserve a cost, and settle it afterwards.
    Reserving,
    /// Reserve a slot for a while.
    InFlight,
    /// Wait for a slot, and keep it for a while.
    Queueing,
}

/// A fault between an instance and the store.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) from: u64,
    pub(super) until: u64,
    pub(super) instance: usize,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing is sent.
    Down,
    /// Some requests never arrive.
    LosingRequests,
    /// Some requests are executed, but their replies are lost.
    LosingReplies,
    /// Requests and replies take up to half a second each.
    Slow,
    /// Requests run when the fault has ended.
    Frozen,
}

impl Habit {
    /// Returns `true` if the clients wait in a queue.
    pub(super) fn waits(self) -> bool {
        matches!(self, Self::Waiting | Self::Queueing)
    }

    /// Returns `true` if the clients' requests are in flight.
    pub(super) fn is_in_flight(self) -> bool {
        matches!(self, Self::InFlight | Self::Queueing)
    }
}

const KINDS: [Kind; 5] = [
    Kind::Down,
    Kind::LosingRequests,
    Kind::LosingReplies,
    Kind::Slow,
    Kind::Frozen,
];
const HABITS: [Habit; 4] = [
    Habit::Waiting,
    Habit::Reserving,
    Habit::InFlight,
    Habit::Queueing,
];

/// How long steady clients continue after the store's counts should be correct again.
const STEADY: u64 = 1000;

/// A limit above the demand of all clients.
const AMPLE: u32 = 50_000;
/// Maximum time that a request is in flight.
pub(super) const LONGEST: u64 = 300;
/// The store's maximum reply time.
pub(super) const TIMEOUT: u64 = 1000;
/// A period in which nothing refills during a run.
const LONG: Duration = Duration::from_secs(90 * 86_400);
/// A time to live longer than any fault, and a shorter one that expires within a run.
const LEASES: [Duration; 2] = [Duration::from_secs(12), Duration::from_millis(1500)];

impl Plan {
    pub(super) fn new(rng: &mut Rng) -> Self {
        let instances = *pick(rng, &[1, 2, 2, 3]);
        let end = rng.u64(300..2000);
        let is_well = rng.u8(..3) == 0;
        let mut runtimes = Vec::new();
        for instance in 0..instances {
            let several = !is_well && rng.u8(..3) == 0;
            for i in 0..1 + usize::from(several) {
                let ends_at = (i > 0 && rng.bool()).then(|| rng.u64(50..end));
                let still = (several && rng.u8(..3) == 0).then(|| {
                    let from = rng.u64(50..end);
                    (from, (from + rng.u64(50..1500)).min(end))
                });
                runtimes.push(Runtime {
                    instance,
                    ends_at,
                    still,
                });
            }
        }
        let faults = (0..if is_well { 0 } else { rng.usize(..=2) }).map(|_| {
            let from = rng.u64(..end);
            let until = (from + rng.u64(20..900)).min(end);
            Fault {
                from,
                until,
                instance: rng.usize(..instances),
                kind: *pick(rng, &KINDS),
            }
        });
        let faults = faults.collect();
        let callers = (0..rng.usize(1..=2)).map(|i| Caller::new(rng, i)).collect();
        let mut plan = Self {
            instances,
            runtimes,
            callers,
            faults,
            step: *pick(rng, &[4, 10, 25]),
            delay: *pick(rng, &[1, 4, 40]),
            end,
            wall: (LONG * 220).as_micros() as i64 + rng.i64(0..90_000_000_000),
        };
        let is_far = plan.delay > 10;
        for caller in plan
            .callers
            .iter_mut()
            .filter(|caller| is_far && caller.habit == Habit::InFlight)
        {
            if rng.bool() {
                caller.never_pauses(rng);
            }
        }
        plan
    }

    /// Returns `true` if there are no faults; clients may still cancel.
    pub(super) fn is_well(&self) -> bool {
        self.faults.is_empty()
            && self
                .runtimes
                .iter()
                .all(|it| it.ends_at.is_none() && it.still.is_none())
    }

    /// Returns when the store's counts of steady callers must be correct: requests and replies may
    /// arrive long after the last fault.
    pub(super) fn heals_at(&self) -> u64 {
        self.end + if self.is_well() { 1000 } else { 4500 }
    }

    /// Returns when the last client sends a request.
    pub(super) fn last(&self) -> u64 {
        if self.callers.iter().any(|caller| caller.is_steady) {
            self.heals_at() + STEADY
        } else {
            self.end
        }
    }

    /// Returns the fault of an instance at `now`.
    pub(super) fn fault(&self, instance: usize, now: u64) -> Option<&Fault> {
        self.faults
            .iter()
            .find(|fault| fault.instance == instance && (fault.from..fault.until).contains(&now))
    }

    /// Returns `true` if the runtime is stalled at `now`.
    pub(super) fn is_still(&self, runtime: usize, now: u64) -> bool {
        self.runtimes[runtime]
            .still
            .is_some_and(|(from, until)| (from..until).contains(&now))
    }

    pub(super) fn has_ended(&self, runtime: usize, now: u64) -> bool {
        self.runtimes[runtime].ends_at.is_some_and(|at| at <= now)
    }
}

/// The heading of a log.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            instances,
            step,
            delay,
            end,
            ..
        } = self;
        writeln!(
            f,
            "{instances} instances, steps of {step} ms, delays of {delay} ms, until {end} ms"
        )?;
        for (
            i,
            Runtime {
                instance,
                ends_at,
                still,
            },
        ) in self.runtimes.iter().enumerate()
        {
            writeln!(
                f,
                "r{i} of i{instance}, ends at {ends_at:?}, stalls {still:?}"
            )?;
        }
        for Fault {
            from,
            until,
            instance,
            kind,
        } in &self.faults
        {
            writeln!(f, "{from} to {until} ms: {kind:?} for i{instance}")?;
        }
        for (
            i,
            Caller {
                policies,
                habit,
                cost,
                clients,
                drops,
                is_steady,
                ..
            },
        ) in self.callers.iter().enumerate()
        {
            write!(f, "c{i} {habit:?}, cost up to {cost}, {clients} clients")?;
            write!(
                f,
                "{}",
                if *is_steady {
                    ", which never pause"
                } else {
                    ""
                }
            )?;
            write!(f, "{}:", if *drops { ", which cancel" } else { "" })?;
            policies
                .iter()
                .try_for_each(|policy| write!(f, " {policy:?}"))?;
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Caller {
    fn new(rng: &mut Rng, index: usize) -> Self {
        let habit = *pick(rng, &HABITS);
        let policy = match habit {
            Habit::Waiting => {
                let (limit, period) = *pick(
                    rng,
                    &[(2, 200), (10, 300), (10, 1000), (50, 1000), (AMPLE, 1000)],
                );
                Policy::new(
                    "wait",
                    *pick(rng, Strategy::ALL),
                    Quota::per(limit, Duration::from_millis(period)),
                )
            }
            Habit::Reserving => {
                let quota = Quota::per(*pick(rng, &[10, 40, 500]), LONG);
                Policy::new("reserve", *pick(rng, Strategy::ALL), quota)
            }
            Habit::InFlight => {
                let (limit, lease) = (*pick(rng, &[1, 2, 4]), *pick(rng, &LEASES));
                Policy::in_flight("flight", limit).and_then(|policy| policy.slot_ttl(lease))
            }
            Habit::Queueing => {
                let (limit, lease) = (*pick(rng, &[1, 4, AMPLE]), *pick(rng, &LEASES));
                Policy::in_flight("queue", limit).and_then(|policy| policy.slot_ttl(lease))
            }
        };
        let policy = policy.unwrap();
        let clients = if policy.quota().limit() == AMPLE {
            10..=30
        } else {
            1..=5
        };
        Self {
            key: Key::new(format!("c{index}")),
            policies: policy.into(),
            habit,
            cost: if habit.is_in_flight() {
                1
            } else {
                rng.u32(1..=3).min(2)
            },
            clients: rng.usize(clients),
            drops: rng.u8(..3) == 0,
            is_steady: false,
        }
    }

    fn never_pauses(&mut self, rng: &mut Rng) {
        let (limit, lease) = (*pick(rng, &[8, 16]), self.policy().quota().period());
        self.policies = Policy::in_flight("flight", limit)
            .unwrap()
            .slot_ttl(lease)
            .unwrap()
            .into();
        (self.clients, self.drops, self.is_steady) = (rng.usize(10..=20), true, true);
    }

    /// Returns `true` if the limit is above the demand of all clients.
    pub(super) fn is_ample(&self) -> bool {
        self.policy().quota().limit() == AMPLE
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policies[0]
    }
}
