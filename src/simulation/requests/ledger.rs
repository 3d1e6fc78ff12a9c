//! What must hold, and the sums that show whether it does.

use std::collections::VecDeque;

use super::plan::{Habit, LONGEST, Plan, TIMEOUT};
use crate::limit::{Frees, Mode, Policy};
use crate::simulation::{self, Breaks};

/// What must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// Nobody passes who was not charged.
    Charged,
    /// Nobody passes before the limit has room.
    Early,
    /// Those of one runtime who wait for one caller pass in the order in which they came.
    Order,
    /// Whoever waits is answered in time.
    Late,
    /// While somebody waits, what has room passes.
    Idle,
    /// Where there is room for all, how long one waits does not grow with how many do.
    Slow,
    /// A store that is well fails nobody.
    Failed,
    /// Nothing is settled twice.
    Twice,
    /// What is to be settled is settled, or the observer is notified.
    Lost,
    /// In the end the store counts the real costs.
    Cost,
    /// No more requests are in flight than the limit.
    InFlight,
    /// Though requests never pause, the store soon counts what is in flight.
    Steady,
    /// When no request is in flight, the store counts none.
    Left,
    /// No task lives on when all is done.
    Tasks,
    /// Nothing panics.
    Panic,
}

impl simulation::Rule for Rule {
    const PANIC: Self = Self::Panic;
}

#[derive(Debug)]
pub(super) struct Ledger {
    callers: Vec<Sums>,
    /// The first break of each rule.
    pub(super) broken: Breaks<Rule>,
}

/// What is known of one caller.
#[derive(Debug, Default)]
struct Sums {
    /// What the store charged and refunded.
    charged: i64,
    refunded: i64,
    /// What passed.
    passed: i64,
    /// Who waits, in the order in which they came.
    waiting: VecDeque<Waiter>,
    came: u64,
    /// Since when somebody waits for whom there might be room, and nobody passes.
    idle_since: u64,
    /// What is to be settled: how often, and how much is to be refunded and charged.
    settled: u64,
    to_refund: i64,
    to_charge: i64,
    /// What of that has run.
    runs: u64,
    ran_back: i64,
    ran_charge: i64,
    /// How often the observer was notified that it has not.
    reported: u64,
    /// What requests have cost in the end, and what those had asked for of which nobody knows.
    real: i64,
    unknown: i64,
    in_flight: i64,
    /// How many the store counted too many, at least and at most, while requests never paused.
    surplus: Option<(i64, i64)>,
}

/// Somebody who waits.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    number: u64,
    runtime: usize,
    since: u64,
    max: u64,
}

impl Ledger {
    pub(super) fn new(plan: &Plan) -> Self {
        Self {
            callers: plan.callers.iter().map(|_| Sums::default()).collect(),
            broken: Breaks::default(),
        }
    }

    pub(super) fn breaks(&mut self, rule: Rule, caller: Option<usize>, problem: String) {
        self.broken.add(rule, caller, problem);
    }

    /// The store ran a request.
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
    /// Somebody begins to wait. Returns their number.
    pub(super) fn waits(&mut self, caller: usize, runtime: usize, since: u64, max: u64) -> u64 {
        let sums = &mut self.callers[caller];
        if sums.waiting.is_empty() {
            sums.idle_since = since;
        }
        sums.came += 1;
        sums.waiting.push_back(Waiter {
            number: sums.came,
            runtime,
            since,
            max,
        });
        sums.came
    }

    /// Somebody waits no more, and passes if `granted`.
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
        // Calls overtake each other: then the turn of one whose time would be up goes to that one.
        let until = waiter.since + waiter.max;
        let before = sums.waiting.iter().find(|other| {
            let is_before = other.runtime == waiter.runtime && other.number < number;
            is_before && other.since + other.max <= until
        });
        let before = before.map(|other| other.number);
        sums.passed += cost;
        sums.idle_since = now;
        let &mut Sums {
            passed,
            charged,
            refunded,
            ..
        } = sums;
        if let Some(before) = before {
            self.breaks(
                Rule::Order,
                Some(caller),
                format!("w{number} passes before w{before}"),
            );
        }
        // What is in flight begins then, and is refunded when it ends.
        if plan.callers[caller].habit == Habit::Queueing {
            return;
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

    /// Time has passed, by a step at most.
    pub(super) fn passes(&mut self, plan: &Plan, now: u64, step: u64) {
        let call = 2 * (plan.delay + step) + 2;
        let slack = 2 * call + 20;
        // One that is under way, the one that they are asked for by, and one more if others took what was there.
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
            let sums = &self.callers[caller];
            let late = sums
                .waiting
                .iter()
                .find(|waiter| now > waiter.since + waiter.max + calls + slack + trouble);
            let slow = sums
                .waiting
                .front()
                .filter(|waiter| now > waiter.since + calls + slack);
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
                // Who cannot have their turn in time is refused, and keeps nobody from it.
                let since = sums
                    .waiting
                    .iter()
                    .filter(|waiter| waiter.max >= longest)
                    .map(|waiter| waiter.since)
                    .min();
                if since.is_some_and(|since| now > since.max(sums.idle_since) + longest) {
                    let problem = format!(
                        "nobody has passed for more than {longest} ms while somebody waited"
                    );
                    self.breaks(Rule::Idle, Some(caller), problem);
                }
            }
        }
    }
}

/// Settling.
impl Ledger {
    /// What was reserved is to be settled by its real cost.
    pub(super) fn settles(&mut self, caller: usize, reserved: i64, real: i64) {
        let sums = &mut self.callers[caller];
        sums.real += real;
        sums.settled += u64::from(reserved != real);
        sums.to_refund += (reserved - real).max(0);
        sums.to_charge += (real - reserved).max(0);
    }

    /// Nobody knows whether it was charged.
    pub(super) fn is_unknown(&mut self, caller: usize, cost: i64) {
        self.callers[caller].unknown += cost;
    }

    /// The observer is notified that something was not settled.
    pub(super) fn is_reported(&mut self, caller: usize) {
        self.callers[caller].reported += 1;
    }

    /// Whatever was to be settled has run at most once.
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

    /// Everything has come to rest. `used` is what the store counts.
    pub(super) fn rests(&mut self, plan: &Plan, caller: usize, used: i64) {
        self.was_steady(caller);
        let who = &plan.callers[caller];
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
                if runs + reported < settled {
                    let problem = format!(
                        "{settled} were to be settled, {runs} were, and of {reported} the observer was notified"
                    );
                    self.breaks(Rule::Lost, Some(caller), problem);
                }
                // Of what flows back all the time the store counts parts of a unit, and reports whole ones. A debt it does not report.
                let steady = i64::from(who.policy().frees().is_gradual());
                let capacity = who.policy().params().capacity;
                let costs = (real - steady).min(capacity)..=(real + unknown + steady).min(capacity);
                if reported == 0 && !costs.contains(&used) {
                    let problem = format!(
                        "the store counts {used}, {real} were the real costs, and maybe {unknown} more"
                    );
                    self.breaks(Rule::Cost, Some(caller), problem);
                }
            }
            Habit::InFlight | Habit::Queueing if used != in_flight => {
                let problem =
                    format!("the store counts {used} in flight, and there are {in_flight}");
                self.breaks(Rule::Left, Some(caller), problem);
            }
            Habit::InFlight | Habit::Queueing => {}
        }
    }
}

/// In flight.
impl Ledger {
    /// A request begins.
    pub(super) fn begins(&mut self, plan: &Plan, caller: usize) {
        let sums = &mut self.callers[caller];
        sums.in_flight += 1;
        let (in_flight, policy) = (sums.in_flight, plan.callers[caller].policy());
        // What stands still for longer than the lease time, or does not answer, is counted no more.
        let is_kept = plan.is_well() || policy.params().period > 10_000_000;
        if in_flight > policy.params().capacity && is_kept {
            let problem = format!("{in_flight} are in flight of {}", policy.params().capacity);
            self.breaks(Rule::InFlight, Some(caller), problem);
        }
    }

    pub(super) fn ends(&mut self, caller: usize) {
        self.callers[caller].in_flight -= 1;
    }

    /// Requests never pause. The store counts so many that will not be released, if none were in flight.
    pub(super) fn is_steady(&mut self, caller: usize, counted: i64) {
        let sums = &mut self.callers[caller];
        let surplus = counted - sums.in_flight;
        let (least, most) = sums.surplus.unwrap_or((surplus, surplus));
        sums.surplus = Some((least.min(surplus), most.max(surplus)));
    }

    /// They end. What is refunded just now may be counted still: but not all the time.
    fn was_steady(&mut self, caller: usize) {
        if let Some((least, most)) = self.callers[caller].surplus
            && (least > 0 || most < 0)
        {
            let problem = format!("the store counted {least} to {most} too many for all the time");
            self.breaks(Rule::Steady, Some(caller), problem);
        }
    }
}

/// How long it may take until somebody passes, at most, if instances take turns. What flows back at once does so within two
/// periods.
fn longest_gap(plan: &Plan, policy: &Policy, cost: u32) -> u64 {
    let (capacity, period) = (
        policy.params().capacity as u64,
        policy.params().period as u64 / 1000,
    );
    match policy.frees() {
        Frees::OnRelease => LONGEST + 150,
        Frees::Gradually => period * u64::from(cost) * plan.instances as u64 / capacity + 150,
        Frees::InBatches | Frees::WithWindow | Frees::OneByOne | Frees::Fading => 2 * period,
    }
}
