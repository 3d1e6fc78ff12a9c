//! The rules, and the sums that show whether they hold.

use std::collections::VecDeque;
use std::mem;

use super::plan::{Habit, LONGEST, Plan, TIMEOUT};
use crate::limit::{Frees, Mode, Policy};
use crate::simulation::{self, Log};

/// The rules of this simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// Only charged requests are granted.
    Charged,
    /// No more is granted than the limit allows at that time.
    Early,
    /// Waiters of one runtime for one caller are granted in FIFO order. If turns are reserved, the waiters of each cost.
    /// Waiters that are granted at the same time may run in any order.
    Order,
    /// Every waiter gets a result in time.
    Late,
    /// While a caller has waiters, available capacity is granted.
    Idle,
    /// If the capacity is ample, a wait does not grow with the number of waiters.
    Slow,
    /// A healthy store returns no errors.
    Failed,
    /// No settlement runs twice.
    Twice,
    /// Every settlement runs, or is reported to the observer.
    Lost,
    /// At the end, the store's count equals the real costs.
    Cost,
    /// Requests in flight never exceed the limit.
    InFlight,
    /// The store's count of requests in flight soon becomes correct, even if requests never pause.
    Steady,
    /// If no request is in flight, the store counts none.
    Left,
    /// No task outlives its work.
    Tasks,
    /// Nothing panics.
    Panic,
}

impl simulation::Rule for Rule {
    const ALL: &[Self] = &[
        Self::Charged,
        Self::Early,
        Self::Order,
        Self::Late,
        Self::Idle,
        Self::Slow,
        Self::Failed,
        Self::Twice,
        Self::Lost,
        Self::Cost,
        Self::InFlight,
        Self::Steady,
        Self::Left,
        Self::Tasks,
    ];
    const PANIC: Self = Self::Panic;
}

#[derive(Debug)]
pub(super) struct Ledger {
    callers: Vec<Sums>,
    pub(super) log: Log<Rule>,
}

/// The sums of one caller.
#[derive(Debug, Default)]
struct Sums {
    /// The costs that the store has charged and refunded.
    charged: i64,
    refunded: i64,
    /// The cost granted to waiters.
    passed: i64,
    /// The waiters in FIFO order.
    waiting: VecDeque<Waiter>,
    came: u64,
    /// Pairs of a waiter that has passed and an earlier waiter that has not.
    overtaken: Vec<(u64, u64)>,
    /// The time since which a waiter might be granted, but none is.
    idle_since: u64,
    /// The settlements that are due: their number, and their refunds and charges.
    settled: u64,
    to_refund: i64,
    to_charge: i64,
    /// The settlements that ran.
    runs: u64,
    ran_back: i64,
    ran_charge: i64,
    /// The number of settlements that the observer was notified of as lost.
    reported: u64,
    /// The sum of real costs, and the costs of requests whose outcome is unknown.
    real: i64,
    unknown: i64,
    in_flight: i64,
    /// The minimum and maximum excess of the store's count while requests never paused.
    surplus: Option<(i64, i64)>,
}

/// A waiting request.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    number: u64,
    runtime: usize,
    cost: u32,
    since: u64,
    max: u64,
}

impl Ledger {
    pub(super) fn new(plan: &Plan, log: Log<Rule>) -> Self {
        Self {
            callers: plan.callers.iter().map(|_| Sums::default()).collect(),
            log,
        }
    }

    pub(super) fn breaks(&mut self, rule: Rule, caller: Option<usize>, problem: String) {
        self.log.breaks(rule, caller, problem);
    }

    /// Records that a rule is checked on a case that may break it.
    pub(super) fn checks(&mut self, rule: Rule) {
        self.log.checks(rule);
    }

    /// Records that the store executed a request.
    pub(super) fn ran(&mut self, caller: usize, mode: Mode, cost: i64, granted: i64) {
        let sums = &mut self.callers[caller];
        match mode {
            Mode::Take | Mode::TakeAhead | Mode::UpTo => sums.charged += granted,
            Mode::Charge => {
                sums.charged += granted;
                (sums.runs, sums.ran_charge) = (sums.runs + 1, sums.ran_charge + cost);
            }
            Mode::Refund => {
                sums.refunded += granted;
                (sums.runs, sums.ran_back) = (sums.runs + 1, sums.ran_back + cost);
            }
            Mode::Peek | Mode::Reset | Mode::Renew | Mode::Release => {}
        }
    }
}

/// Waiting.
impl Ledger {
    /// Records the start of a wait. Returns the waiter's number.
    pub(super) fn waits(
        &mut self,
        caller: usize,
        runtime: usize,
        cost: u32,
        since: u64,
        max: u64,
    ) -> u64 {
        let sums = &mut self.callers[caller];
        if sums.waiting.is_empty() {
            sums.idle_since = since;
        }
        sums.came += 1;
        sums.waiting.push_back(Waiter {
            number: sums.came,
            runtime,
            cost,
            since,
            max,
        });
        sums.came
    }

    /// Records the end of a wait, with the granted cost if there is one.
    pub(super) fn waited(
        &mut self,
        plan: &Plan,
        now: u64,
        caller: usize,
        number: u64,
        granted: Option<i64>,
    ) {
        let sums = &mut self.callers[caller];
        let Some(place) = sums
            .waiting
            .iter()
            .position(|waiter| waiter.number == number)
        else {
            return;
        };
        let waiter = sums.waiting.remove(place).unwrap();
        let Some(cost) = granted else { return };
        let policies = &plan.callers[caller].policies;
        let by_cost = policies.iter().all(|policy| policy.frees().is_gradual());
        // A waiter whose deadline has passed still waits for the reply to its check. If several are served together after a
        // stall, it may run first, because its deadline has woken it.
        let is_late = |waiter: &Waiter| now > waiter.since + waiter.max;
        let before = sums.waiting.iter().filter(|other| {
            let is_before = other.runtime == waiter.runtime && other.number < number;
            let is_alike = other.cost == waiter.cost || !by_cost;
            is_before && is_alike && !is_late(&waiter) && !is_late(other)
        });
        let is_alone = sums
            .waiting
            .iter()
            .all(|other| other.runtime != waiter.runtime || other.cost != waiter.cost && by_cost);
        if !is_alone {
            self.log.checks(Rule::Order);
        }
        sums.overtaken
            .extend(before.map(|other| (number, other.number)));
        sums.overtaken.retain(|(_, before)| *before != number);
        sums.passed += cost;
        sums.idle_since = now;
        let &mut Sums {
            passed,
            charged,
            refunded,
            ..
        } = sums;
        // A request in flight is refunded when it ends, so the sums below do not apply.
        if plan.callers[caller].habit == Habit::Queueing {
            return;
        }
        self.log.checks(Rule::Charged);
        // Until then, no wait is needed.
        if passed >= plan.callers[caller].policy().params().capacity {
            self.log.checks(Rule::Early);
        }
        if passed > charged - refunded {
            let problem = format!("{passed} passed, {charged} charged, {refunded} refunded");
            self.breaks(Rule::Charged, Some(caller), problem);
        }
        let room = simulation::flows(plan.callers[caller].policy(), now) + refunded;
        if passed > room {
            self.breaks(
                Rule::Early,
                Some(caller),
                format!("{passed} passed after {now} ms, with room for {room}"),
            );
        }
    }

    /// Checks the rules after time has passed, by at most `step`.
    pub(super) fn passes(&mut self, plan: &Plan, now: u64, step: u64) {
        let call = 2 * (plan.delay + step) + 2;
        let slack = 2 * call + 20;
        // A call in progress, the waiter's own call, and another one if others took the capacity
        // first.
        let calls = 3 * call;
        let trouble = if plan.is_well() {
            0
        } else {
            2 * TIMEOUT + 1500
        };
        for (caller, who) in plan
            .callers
            .iter()
            .enumerate()
            .filter(|(_, who)| who.habit.waits())
        {
            for (number, before) in mem::take(&mut self.callers[caller].overtaken) {
                let problem = format!("w{number} passes before w{before}");
                self.breaks(Rule::Order, Some(caller), problem);
            }
            let sums = &self.callers[caller];
            let late = sums
                .waiting
                .iter()
                .find(|waiter| now > waiter.since + waiter.max + calls + slack + trouble);
            let slow = sums
                .waiting
                .front()
                .filter(|waiter| now > waiter.since + calls + slack);
            let is_due = |waiter: &Waiter| now > waiter.since + waiter.max;
            if sums.waiting.iter().any(is_due) {
                self.log.checks(Rule::Late);
            }
            if plan.is_well() && who.is_ample() && !sums.waiting.is_empty() {
                self.log.checks(Rule::Slow);
            }
            if let Some(&Waiter {
                number, since, max, ..
            }) = late
            {
                let problem = format!("w{number} waits since {since} ms, for {max} ms at most");
                self.breaks(Rule::Late, Some(caller), problem);
            } else if let Some(&Waiter { number, since, .. }) =
                slow.filter(|_| plan.is_well() && who.is_ample())
            {
                let problem =
                    format!("w{number} waits since {since} ms, though there is room for all");
                self.breaks(Rule::Slow, Some(caller), problem);
            } else if plan.is_well() && !sums.waiting.is_empty() && !who.drops {
                let longest = 2 * longest_gap(plan, who.policy(), who.cost) + slack;
                // A waiter whose turn would be too late is denied, and does not block others.
                let since = sums
                    .waiting
                    .iter()
                    .filter(|waiter| waiter.max >= longest)
                    .map(|waiter| waiter.since)
                    .min();
                if since.is_some() {
                    self.log.checks(Rule::Idle);
                }
                if since.is_some_and(|since| now > since.max(sums.idle_since) + longest) {
                    let problem = format!("no waiter was granted for more than {longest} ms");
                    self.breaks(Rule::Idle, Some(caller), problem);
                }
            }
        }
    }
}

/// Settling.
impl Ledger {
    /// Records a reservation that will be settled at its real cost.
    pub(super) fn settles(&mut self, caller: usize, reserved: i64, real: i64) {
        let sums = &mut self.callers[caller];
        sums.real += real;
        sums.settled += u64::from(reserved != real);
        sums.to_refund += (reserved - real).max(0);
        sums.to_charge += (real - reserved).max(0);
    }

    /// Records a request that may or may not have been charged.
    pub(super) fn is_unknown(&mut self, caller: usize, cost: i64) {
        self.callers[caller].unknown += cost;
    }

    /// Records that the observer was notified of a lost settlement.
    pub(super) fn is_reported(&mut self, caller: usize) {
        self.callers[caller].reported += 1;
    }

    /// Checks that no settlement ran more than once.
    pub(super) fn runs_once(&mut self, caller: usize) {
        let &Sums {
            settled,
            runs,
            to_refund,
            ran_back,
            to_charge,
            ran_charge,
            ..
        } = &self.callers[caller];
        if runs > settled || ran_back > to_refund || ran_charge > to_charge {
            let problem = format!(
                "{runs} of {settled} settlements, which gave {ran_back} of {to_refund} back and charged {ran_charge} of {to_charge}"
            );
            self.breaks(Rule::Twice, Some(caller), problem);
        }
    }

    /// Checks the sums after everything has settled. `used` is the store's count.
    pub(super) fn rests(&mut self, plan: &Plan, caller: usize, used: i64) {
        self.was_steady(caller);
        let who = &plan.callers[caller];
        if plan.is_well() {
            self.log.checks(Rule::Failed);
        }
        let &Sums {
            settled,
            runs,
            reported,
            real,
            unknown,
            in_flight,
            ..
        } = &self.callers[caller];
        match who.habit {
            Habit::Waiting => {}
            Habit::Reserving => {
                self.runs_once(caller);
                if settled > 0 {
                    self.log.checks(Rule::Twice);
                    self.log.checks(Rule::Lost);
                }
                if real > 0 && reported == 0 {
                    self.log.checks(Rule::Cost);
                }
                if runs + reported < settled {
                    let problem = format!(
                        "{settled} settlements due, {runs} done, {reported} reported as lost"
                    );
                    self.breaks(Rule::Lost, Some(caller), problem);
                }
                // A gradual strategy counts fractions of a unit, but reports integers. It does not
                // report a debt.
                let steady = i64::from(who.policy().frees().is_gradual());
                let capacity = who.policy().params().capacity;
                let costs = (real - steady).min(capacity)..=(real + unknown + steady).min(capacity);
                if reported == 0 && !costs.contains(&used) {
                    let problem = format!(
                        "the store counts {used}, the real costs are {real}, plus up to {unknown}"
                    );
                    self.breaks(Rule::Cost, Some(caller), problem);
                }
            }
            Habit::InFlight | Habit::Queueing if used != in_flight => {
                self.log.checks(Rule::Left);
                let problem =
                    format!("the store counts {used} in flight, and there are {in_flight}");
                self.breaks(Rule::Left, Some(caller), problem);
            }
            Habit::InFlight | Habit::Queueing => self.log.checks(Rule::Left),
        }
    }
}

/// In flight.
impl Ledger {
    /// Records the start of a request.
    pub(super) fn begins(&mut self, plan: &Plan, caller: usize) {
        let sums = &mut self.callers[caller];
        sums.in_flight += 1;
        let (in_flight, policy) = (sums.in_flight, plan.callers[caller].policy());
        // The slots of an instance that stalls or gets no reply for longer than their time to live
        // have expired.
        let is_kept = plan.is_well() || policy.params().period > 10_000_000;
        if in_flight == policy.params().capacity && is_kept {
            self.log.checks(Rule::InFlight);
        }
        if in_flight > policy.params().capacity && is_kept {
            let problem = format!("{in_flight} are in flight of {}", policy.params().capacity);
            self.breaks(Rule::InFlight, Some(caller), problem);
        }
    }

    pub(super) fn ends(&mut self, caller: usize) {
        self.callers[caller].in_flight -= 1;
    }

    /// Records the store's count, without requests that are about to be released, while requests
    /// never pause.
    pub(super) fn is_steady(&mut self, caller: usize, counted: i64) {
        let sums = &mut self.callers[caller];
        let surplus = counted - sums.in_flight;
        let (least, most) = sums.surplus.unwrap_or((surplus, surplus));
        sums.surplus = Some((least.min(surplus), most.max(surplus)));
    }

    /// Checks the counts after such requests have ended. A single count may include a release in
    /// progress, but not all of them.
    fn was_steady(&mut self, caller: usize) {
        let Some((least, most)) = self.callers[caller].surplus else {
            return;
        };
        self.log.checks(Rule::Steady);
        if least > 0 || most < 0 {
            let problem = format!("the store counted {least} to {most} too many for all the time");
            self.breaks(Rule::Steady, Some(caller), problem);
        }
    }
}

/// Returns the maximum time in milliseconds until a waiter is granted, if instances take turns.
/// Capacity that is freed in batches is freed within two periods.
fn longest_gap(plan: &Plan, policy: &Policy, cost: u32) -> u64 {
    let (capacity, period) = (
        policy.params().capacity as u64,
        policy.params().period as u64 / 1000,
    );
    match policy.frees() {
        Frees::OnRelease => LONGEST + 150,
        Frees::Gradually => period * u64::from(cost) * plan.instances as u64 / capacity + 150,
        Frees::InBatches
        | Frees::WithWindow
        | Frees::WithCell
        | Frees::OneByOne
        | Frees::Fading => 2 * period,
    }
}
