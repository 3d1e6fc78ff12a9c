//! What must hold, and the accounts that tell whether it does.
//!
//! The ledger sees every request that reaches the primary store, whether it ran, and every decision of every instance. So
//! it knows what each instance owes the primary store, which no instance can know.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use super::plan::{Caller, Habit, Plan, Sharing};
use crate::limit::{Decision, Mode, Strategy};

/// What must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// All that a caller is granted stays within the bound of `docs/faults.md`.
    Granted,
    /// In an outage an instance grants no more than its part of what it last heard to be left.
    Part,
    /// The primary store is charged nothing that it was charged before.
    Twice,
    /// The primary store is charged nothing that has lapsed.
    Lapsed,
    /// The primary store is told what was granted in an outage.
    Lost,
    /// The primary store is told soon what was granted for a request that failed alone.
    Late,
    /// The primary store is told what was given back and reset in its place.
    Back,
    /// Whatever is asked with one id is charged once.
    Id,
    /// A primary store that has fallen silent is sent no more requests, one after another, than it takes to open the breaker.
    Silence,
    /// No request fails.
    Failed,
    /// No request waits for longer than the deadline.
    Wait,
    /// A decision makes sense.
    Sense,
    /// Two seconds after the last fault the primary store decides again.
    Recovery,
    /// Nothing goes on once the stores are gone.
    Left,
    /// Nothing panics.
    Panic,
}

/// A rule that was broken.
#[derive(Debug, Clone)]
pub(super) struct Broken {
    pub(super) rule: Rule,
    pub(super) caller: Option<usize>,
    pub(super) problem: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, problem, caller } = self;
        let whose = caller.map_or(String::new(), |caller| format!(" of c{caller}"));
        write!(f, "broken: {rule:?}{whose}: {problem}")
    }
}

/// What is known of one caller.
#[derive(Debug, Default)]
struct Sums {
    /// What its clients were granted.
    granted: i64,
    /// What instances granted it for requests that were sent and not answered: they may be charged too.
    unanswered: i64,
    given_back: i64,
    resets: i64,
    /// What the primary store ever charged.
    charged: i64,
    ids: BTreeMap<Vec<u8>, Id>,
}

/// What is known of one id of a caller.
#[derive(Debug, Default)]
struct Id {
    cost: i64,
    /// Whether a client was granted it.
    granted: bool,
    /// Whether the primary store charged it, or must. Else it was sent and not answered, and is charged at most.
    certain: bool,
    /// A bit for every instance that has granted it, and for each that did so for a request without an answer.
    instances: u8,
    unanswered: u8,
}

/// What an instance has to do with a caller.
#[derive(Debug, Default)]
struct Account {
    /// What the primary store last said is left under each policy, and what it had charged by then.
    heard: Option<Vec<i64>>,
    heard_at: i64,
    /// What the instance granted since, less what it took back.
    since: i64,
    /// What was granted and not told to the primary store, less what was given back.
    owed: i64,
    /// How much of it was granted while the instance was not degraded.
    well: i64,
    /// The same, by the time.
    grants: VecDeque<(u64, i64)>,
    /// What was granted for requests without an answer, by the time.
    unanswered: VecDeque<(u64, i64)>,
    /// How much more was asked to be given back than the instance had.
    beyond: i64,
    /// Whether it gave back or forgot something that Redis may have given back or forgotten too: it cannot know which of
    /// what it owes that was.
    vague: bool,
    /// Whether it has given back something by itself.
    gave_back: bool,
    /// A reset that the primary store was not told, and what was owed before it.
    reset: bool,
    before: i64,
    /// How many resets it may yet tell.
    resets: u32,
    /// Charges on their way to the primary store.
    flying: u32,
    /// How much the primary store had run when the last of them ran.
    landed: u64,
    open: Option<Open>,
    /// What others may have been granted on top, because they did not know of what this instance granted.
    excess: i64,
}

/// What an instance owes, from the first grant until all is told.
#[derive(Debug)]
struct Open {
    granted: i64,
    /// What the primary store had charged when the instance last heard of it.
    from: i64,
    /// What it charged of this.
    told: i64,
}

#[derive(Debug)]
pub(super) struct Ledger {
    sums: Vec<Sums>,
    /// By the caller, and the instance.
    accounts: Vec<Vec<Account>>,
    /// How often the primary store has forgotten everything.
    pub(super) emptied: i64,
    /// How often a breaker has opened. The windows of an instance and of the primary store do not begin together, so that
    /// a change from one to the other may be to a new window.
    pub(super) opened: i64,
    /// How much the primary store has run.
    runs: u64,
    /// How often fewer instances were said to be alive than before, and whether the number has ever changed. What was
    /// counted under one part is an estimate under another: what is settled then is no more certain.
    pub(super) fewer: i64,
    pub(super) changed: bool,
    /// What the settlement sent with ids and did not run, by the caller.
    unsettled: Vec<i64>,
    /// The first break of each rule.
    pub(super) broken: Vec<Broken>,
}

/// A decision of an instance by itself.
pub(super) struct Granted<'a> {
    pub(super) caller: usize,
    pub(super) instance: usize,
    pub(super) mode: Mode,
    pub(super) cost: i64,
    pub(super) id: Option<&'a [u8]>,
    /// Whether the primary store was not asked.
    pub(super) unasked: bool,
    pub(super) degraded: bool,
    /// Whether a settlement may be under way.
    pub(super) settling: bool,
}

impl Ledger {
    pub(super) fn new(plan: &Plan) -> Self {
        let callers = plan.callers.len();
        let accounts = || (0..plan.instances).map(|_| Account::default()).collect();
        Self {
            sums: (0..callers).map(|_| Sums::default()).collect(),
            accounts: (0..callers).map(|_| accounts()).collect(),
            emptied: 0,
            opened: 0,
            runs: 0,
            fewer: 0,
            changed: false,
            unsettled: vec![0; callers],
            broken: vec![],
        }
    }

    /// The first break of each rule counts.
    pub(super) fn breaks(&mut self, rule: Rule, caller: Option<usize>, problem: String) {
        if self.broken.iter().all(|broken| broken.rule != rule) {
            self.broken.push(Broken { rule, caller, problem });
        }
    }

    /// The primary store charged a request of a client.
    pub(super) fn ran(&mut self, caller: usize, mode: Mode, granted: i64, id: Option<&[u8]>) -> Ran {
        self.runs += 1;
        let sums = &mut self.sums[caller];
        if let Some(id) = id {
            let id = sums.ids.entry(id.to_vec()).or_default();
            if granted > 0 {
                (id.cost, id.certain) = (granted, true);
            }
        }
        match mode {
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge => sums.charged += granted,
            Mode::GiveBack => sums.given_back += granted,
            Mode::Reset => sums.resets += 1,
            Mode::Peek => {}
        }
        Ran { run: self.runs, charged: sums.charged }
    }

    /// An instance has heard from the primary store, while that decides for it.
    ///
    /// It goes on from there only if the answer knows of all that the instance has granted: nothing is owed, and what was
    /// has been charged before the answer was made. If something else was settled since it asked, it need not.
    pub(super) fn hears(&mut self, plan: &Plan, heard: &Heard, decision: &Decision) {
        let &Heard { caller, instance, ran: Ran { run, charged }, since, turned } = heard;
        let account = &mut self.accounts[caller][instance];
        if account.flying > 0 || account.owes() || run < account.landed {
            return;
        }
        let left = decision.verdicts().map(|(_, verdict)| verdict.remaining).collect();
        let news = Account { heard: Some(left), ..Account::default() };
        let (before, after) = (account.part(plan, caller, self.fewer), news.part(plan, caller, self.fewer));
        if since > turned || after >= before - account.since {
            (account.heard, account.heard_at, account.since) = (news.heard, charged, 0);
        }
    }

    /// An instance has decided by itself.
    pub(super) fn decides(&mut self, plan: &Plan, now: u64, asked: &Granted<'_>, granted: i64) {
        let &Granted { caller, instance, mode, cost, id, unasked, degraded, settling } = asked;
        let (sums, account) = (&mut self.sums[caller], &mut self.accounts[caller][instance]);
        let mut again = false;
        if let (Some(id), true) = (id, granted > 0) {
            let id = sums.ids.entry(id.to_vec()).or_default();
            let bit = 1 << instance;
            again = id.instances & bit != 0;
            (id.cost, id.instances) = (cost, id.instances | bit);
            if !unasked {
                id.unanswered |= bit;
            }
            // An instance may keep to itself what it has once granted to a request without an answer.
            id.certain |= unasked && id.unanswered & bit == 0;
        }
        match mode {
            _ if again => {}
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge => {
                account.since += granted;
                match unasked {
                    true if granted > 0 => {
                        account.owe(now, granted);
                        account.well += if degraded { 0 } else { granted };
                    }
                    true => {}
                    false => {
                        sums.unanswered += granted;
                        account.unanswered.push_back((now, granted));
                    }
                }
            }
            Mode::GiveBack => {
                account.since -= granted;
                sums.given_back += granted;
                account.gave_back = true;
                if unasked {
                    account.owed -= granted;
                    account.beyond += cost - granted;
                } else {
                    account.vague = true;
                }
            }
            Mode::Reset => {
                (account.heard, account.heard_at, account.since) = (None, 0, 0);
                sums.resets += 1;
                if unasked {
                    account.before = account.owed + if account.reset { account.before } else { 0 };
                    (account.reset, account.owed, account.beyond) = (true, 0, 0);
                    account.resets += 1;
                    // What has been taken out to be settled may come before or after it.
                    account.vague |= settling;
                    account.grants.clear();
                } else {
                    account.vague = true;
                }
            }
            Mode::Peek => {}
        }
        // Once it has given back by itself, it may know better than the answers that it hears.
        if plan.callers[caller].lasting && granted > 0 && !account.gave_back {
            let part = account.part(plan, caller, self.fewer);
            if account.since > part {
                let (since, heard) = (account.since, &account.heard);
                let problem = format!(
                    "i{instance} granted {since} since Redis told it that {heard:?} is left, of which its part is {part}"
                );
                self.breaks(Rule::Part, Some(caller), problem);
            }
        }
    }

    /// A client was granted so much.
    pub(super) fn grants(&mut self, plan: &Plan, now: u64, caller: usize, cost: i64, id: Option<&[u8]>) {
        let sums = &mut self.sums[caller];
        if let Some(id) = id {
            let id = sums.ids.entry(id.to_vec()).or_default();
            if std::mem::replace(&mut id.granted, true) {
                return;
            }
        }
        sums.granted += cost;
        let granted = sums.granted;
        let (bound, why) = self.bound(plan, now, caller);
        if granted > bound {
            self.breaks(Rule::Granted, Some(caller), format!("{granted} granted of {bound} = {why}"));
        }
    }

    /// The most that a caller may have been granted by now, and why.
    ///
    /// Let C be what the primary store has charged of the limit L, and V what it would have if it knew what the
    /// instances have granted and not yet told. An instance grants its part of L - C, as it last heard of C. What C has
    /// grown since, by P, it does not know: V may grow beyond L by that, but no more than by what the instance grants.
    /// The primary store does not know of V - C: V may grow beyond L by what it grants until it is told, but no more than
    /// by V - C. Both are `min(granted, P)`, with P from when the instance last heard until it has told. On top comes what
    /// was sent and never answered, and what the store forgot.
    fn bound(&self, plan: &Plan, now: u64, caller: usize) -> (i64, String) {
        let (sums, who) = (&self.sums[caller], &plan.callers[caller]);
        let simple = who.takes_only();
        let excess: i64 = self.accounts[caller]
            .iter()
            .map(|account| {
                let open = account.open.as_ref();
                account.excess
                    + open.map_or(0, |open| match simple {
                        true => open.granted.min(sums.charged - open.from - open.told),
                        false => open.granted,
                    })
            })
            .sum();
        let forgotten = self.emptied + sums.resets;
        let (least, limit) = (who.policies.iter().map(|policy| {
            let capacity = policy.params().capacity;
            let parts = Parts::of(plan, capacity, self.fewer);
            let flows = if who.lasting {
                0
            } else {
                flows(policy.strategy(), policy.params().period, capacity, now) + capacity * self.opened
            };
            (capacity * (1 + forgotten) + parts.beyond(capacity, plan.instances) + flows, capacity)
        }))
        .min()
        .unwrap_or_default();
        let bound = least + sums.given_back + sums.unanswered + excess;
        let why = format!(
            "{least} (limit {limit}, forgotten {forgotten} times) + {} given back + {} unanswered + {excess} that Redis \
             or an instance did not know of",
            sums.given_back, sums.unanswered
        );
        (bound, why)
    }

    /// The settlement of an instance sends something.
    pub(super) fn settles(&mut self, plan: &Plan, now: u64, sent: &Settled) {
        let &Settled { caller, instance, mode, cost, with_id } = sent;
        let (who, account) = (&plan.callers[caller], &mut self.accounts[caller][instance]);
        account.flying += 1;
        if with_id || who.habit == Habit::WithIds {
            return;
        }
        match mode {
            Mode::Charge if account.reset => {
                account.before -= cost;
                if account.before < 0 && !account.vague {
                    let problem = format!("i{instance} charges {cost}, which its reset will forget");
                    self.breaks(Rule::Back, Some(caller), problem);
                }
            }
            Mode::Charge => {
                account.owed -= cost;
                let owed = account.owed;
                let counts = account.counts(who, now);
                account.forget(cost);
                if owed < 0 && who.takes_only() {
                    let problem = format!("i{instance} charges {cost}, {} more than it granted", -owed);
                    self.breaks(Rule::Twice, Some(caller), problem);
                } else if cost > counts && who.takes_only() && !self.changed {
                    let problem = format!("i{instance} charges {cost}, of which only {counts} still count");
                    self.breaks(Rule::Lapsed, Some(caller), problem);
                }
            }
            Mode::GiveBack => account.owed += cost,
            Mode::Reset => {
                if account.resets == 0 {
                    self.breaks(Rule::Twice, Some(caller), format!("i{instance} resets what nobody has reset"));
                }
                let account = &mut self.accounts[caller][instance];
                (account.reset, account.before, account.resets) = (false, 0, account.resets.saturating_sub(1));
            }
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Peek => {}
        }
    }

    /// The primary store ran what the settlement sent, and charged so much of it.
    pub(super) fn settled(&mut self, sent: &Settled, charged: i64) {
        let &Settled { caller, instance, mode, .. } = sent;
        self.runs += 1;
        match mode {
            Mode::Charge => {
                self.sums[caller].charged += charged;
                if let Some(open) = &mut self.accounts[caller][instance].open {
                    open.told += charged;
                }
            }
            // It may have had more to give back than the instance.
            Mode::GiveBack => self.sums[caller].given_back += charged,
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Peek | Mode::Reset => {}
        }
        self.landed(caller, instance);
    }

    /// What the settlement sent did not run. If it was not sent at all, it is owed again.
    pub(super) fn failed(&mut self, now: u64, sent: &Settled, unsent: bool) {
        let &Settled { caller, instance, mode, cost, with_id } = sent;
        let account = &mut self.accounts[caller][instance];
        match (unsent, mode) {
            (true, _) if with_id => {}
            (true, Mode::Charge) if account.reset => account.before += cost,
            (true, Mode::Charge) => {
                account.owed += cost;
                account.grants.push_front((now, cost));
            }
            (true, Mode::GiveBack) => account.owed -= cost,
            (true, Mode::Reset) => (account.reset, account.resets) = (true, account.resets + 1),
            (false, Mode::Charge) => {
                account.excess += cost;
                self.unsettled[caller] += cost;
            }
            _ => {}
        }
        self.landed(caller, instance);
    }

    fn landed(&mut self, caller: usize, instance: usize) {
        let charged = self.sums[caller].charged;
        let account = &mut self.accounts[caller][instance];
        account.flying -= 1;
        account.landed = self.runs;
        if account.flying == 0
            && account.owed == 0
            && let Some(open) = account.open.take()
        {
            account.excess += open.granted.min(charged - open.from - open.told);
        }
    }

    /// Everything has come to rest: nothing may be owed. `used` is what the primary store counts.
    pub(super) fn rests(&mut self, plan: &Plan, caller: usize, used: i64) {
        let who = &plan.callers[caller];
        if who.habit == Habit::WithIds {
            let ids = || self.sums[caller].ids.values();
            let certain: i64 = ids().filter(|id| id.certain).map(|id| id.cost).sum();
            let possible = ids().map(|id| id.cost).sum();
            let lost = self.unsettled[caller];
            if used > possible {
                self.breaks(Rule::Id, Some(caller), format!("Redis counts {used} for ids that cost {possible}"));
            } else if self.emptied == 0
                && !self.changed
                && possible <= who.capacities().min().unwrap_or(0)
                && used < certain - lost
            {
                self.breaks(Rule::Lost, Some(caller), format!("Redis counts {used} for ids that cost {certain}"));
            }
            return;
        }
        if !who.lasting || self.changed {
            return;
        }
        for instance in 0..plan.instances {
            let Account { owed, well, beyond, vague, reset, .. } = self.accounts[caller][instance];
            let (rule, problem) = match owed {
                _ if reset && !vague => (Rule::Back, "of a reset".to_owned()),
                owed if owed < 0 && !vague => (Rule::Back, format!("of {} given back", -owed)),
                _ if vague => continue,
                owed if owed > beyond + well => (Rule::Lost, format!("of {owed} granted")),
                owed if owed > beyond => (Rule::Late, format!("of {owed} granted while not degraded")),
                _ => continue,
            };
            self.breaks(rule, Some(caller), format!("i{instance} never told Redis {problem}"));
        }
    }
}

/// When the primary store ran something.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ran {
    /// Its number among all that ran.
    run: u64,
    /// What the caller had been charged by then.
    charged: i64,
}

/// An answer of the primary store.
pub(super) struct Heard {
    pub(super) caller: usize,
    pub(super) instance: usize,
    pub(super) ran: Ran,
    /// When it was asked, and when the instance last did something by itself.
    pub(super) since: u64,
    pub(super) turned: u64,
}

/// What a settlement sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settled {
    pub(super) caller: usize,
    pub(super) instance: usize,
    pub(super) mode: Mode,
    pub(super) cost: i64,
    pub(super) with_id: bool,
}

impl Account {
    /// Whether the primary store does not know of something.
    fn owes(&self) -> bool {
        self.owed != 0 || self.reset
    }

    fn owe(&mut self, now: u64, granted: i64) {
        self.owed += granted;
        self.grants.push_back((now, granted));
        self.open.get_or_insert(Open { granted: 0, from: self.heard_at, told: 0 }).granted += granted;
    }

    /// How much of what is owed still counts. An instance may take what counts of a request without an answer for some
    /// of it, since it keeps one count of both.
    fn counts(&mut self, who: &Caller, now: u64) -> i64 {
        // It need not know to the moment when each began.
        let lifetime = 2 * who.lifetime();
        let mut counts = 0;
        for grants in [&mut self.grants, &mut self.unanswered] {
            grants.retain(|(at, _)| at + lifetime >= now);
            counts += grants.iter().map(|(_, granted)| granted).sum::<i64>();
        }
        counts
    }

    /// The oldest are told first.
    fn forget(&mut self, mut cost: i64) {
        while cost > 0
            && let Some((_, granted)) = self.grants.front_mut()
        {
            let told = cost.min(*granted);
            (cost, *granted) = (cost - told, *granted - told);
            if *granted == 0 {
                self.grants.pop_front();
            }
        }
    }

    /// How much the instance may grant by itself, from what it has heard.
    fn part(&self, plan: &Plan, caller: usize, fewer: i64) -> i64 {
        let parts = plan.callers[caller].capacities().enumerate().map(|(i, capacity)| {
            let left = self.heard.as_ref().map_or(capacity, |heard| heard[i].min(capacity));
            Parts::of(plan, capacity, fewer).left(left, capacity)
        });
        parts.min().unwrap_or(0)
    }
}

/// The least and the largest part of a limit that an instance may have.
struct Parts {
    least: i64,
    most: i64,
    /// What it may have on top, since the number of instances has changed.
    changed: i64,
}

impl Parts {
    fn of(plan: &Plan, capacity: i64, fewer: i64) -> Self {
        let least = (capacity / plan.instances as i64).max(1);
        match plan.share {
            Sharing::Fixed => Self { least, most: least, changed: 0 },
            // One that has used some of a smaller part may go on with a larger one. And a small part forgets what was
            // used of a larger one beyond twice its own size.
            Sharing::Alive => Self { least, most: capacity, changed: capacity - least + fewer * capacity },
        }
    }

    /// The part of what is left of a capacity.
    fn left(&self, left: i64, capacity: i64) -> i64 {
        left * self.least / capacity + self.changed
    }

    /// What all parts together are above the whole.
    fn beyond(&self, capacity: i64, instances: usize) -> i64 {
        let instances = instances as i64;
        (instances * self.most - capacity).max(0) + instances * self.changed
    }
}

/// What may flow back within so many milliseconds, in every store on its own.
fn flows(strategy: Strategy, period: i64, capacity: i64, now: u64) -> i64 {
    let elapsed = now as i64 * 1000;
    match strategy.is_steady() {
        true => capacity + capacity * elapsed / period + 1,
        false => capacity * (elapsed / period + 2),
    }
}

impl Caller {
    /// Whether nothing is ever given back to it.
    fn takes_only(&self) -> bool {
        matches!(self.habit, Habit::Steady | Habit::Bursting | Habit::Dropping)
    }

    /// After how many milliseconds a charge counts nothing any more.
    fn lifetime(&self) -> u64 {
        let lifetimes = self.policies.iter().map(|policy| match policy.strategy() {
            Strategy::SlidingCounter | Strategy::SlidingWindow { .. } => 2 * policy.params().period,
            _ => policy.params().period,
        });
        lifetimes.max().unwrap_or(0).unsigned_abs() / 1000
    }
}
