//! The rules, and the accounts that check them.
//!
//! The ledger sees every request that reaches the primary store, whether it was executed, and every decision of every
//! instance. So it knows what each instance owes the primary store, which no instance can know.

mod accounts;
mod reconciliation;
mod rules;

pub(super) use rules::Rule;

use accounts::{Account, Left, Parts, Sums};

use super::plan::{Habit, Plan};
use crate::limit::{Check, Decision, Mode, Source};
use crate::simulation::{Log, flows};

#[derive(Debug)]
pub(super) struct Ledger {
    sums: Vec<Sums>,
    /// By caller and instance.
    accounts: Vec<Vec<Account>>,
    /// Number of times that the primary store has lost all counts.
    pub(super) emptied: i64,
    /// Number of times that a breaker has opened. Windows of an instance and of the primary store do not begin
    /// together, so each change between the two may start a new window.
    pub(super) opened: i64,
    /// Number of requests that the primary store has executed.
    runs: u64,
    /// Number of times that the number of live instances was reduced, and whether it has ever changed. Counts under one
    /// share are only estimates under another, and so are the charges reconciled then.
    pub(super) fewer: i64,
    pub(super) changed: bool,
    /// Charges with ids that a reconciliation sent and that were not executed, by caller.
    unreconciled: Vec<i64>,
    pub(super) log: Log<Rule>,
}

/// A local decision of an instance.
pub(super) struct Granted<'a> {
    pub(super) caller: usize,
    pub(super) instance: usize,
    pub(super) mode: Mode,
    pub(super) cost: i64,
    pub(super) id: Option<&'a [u8]>,
    /// Whether it refunds an older charge. Only the stores know the drained part of that.
    pub(super) of_older: bool,
    /// Whether the request was not sent to the primary store.
    pub(super) unasked: bool,
    pub(super) degraded: bool,
}

impl Ledger {
    pub(super) fn new(plan: &Plan, log: Log<Rule>) -> Self {
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
            unreconciled: vec![0; callers],
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

    /// The primary store has executed a client's request.
    pub(super) fn ran(
        &mut self,
        caller: usize,
        mode: Mode,
        granted: i64,
        id: Option<&[u8]>,
    ) -> Ran {
        self.runs += 1;
        let sums = &mut self.sums[caller];
        if let Some(id) = id {
            let id = sums.ids.entry(id.to_vec()).or_default();
            if granted > 0 {
                (id.cost, id.ran) = (granted, true);
            }
        }
        match mode {
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge => sums.charged += granted,
            Mode::Refund => sums.refunded += granted,
            Mode::Reset => sums.resets += 1,
            Mode::Peek | Mode::Renew | Mode::Release => {}
        }
        Ran {
            run: self.runs,
            charged: sums.charged,
        }
    }

    /// An instance has received a reply of the primary store with the breaker closed.
    ///
    /// Its fallback may adopt the reply only if the reply includes all grants of the instance: nothing is owed, and all
    /// earlier grants were charged before the reply was made, or given up. If other charges were reconciled since the
    /// request, it may ignore the reply.
    pub(super) fn hears(&mut self, plan: &Plan, now: u64, heard: &Heard, decision: &Decision) {
        let &Heard {
            caller,
            instance,
            ran: Ran { run, charged },
            since,
            turned,
        } = heard;
        let account = &mut self.accounts[caller][instance];
        let awaits = account.flying > 0 && now <= account.given_up_at;
        let knows_of_all = !awaits && !account.owes() && run >= account.landed;
        // The debt of a vague account is uncertain, so the reply may be adopted or ignored. So is the
        // debt of a caller whose checks have ids.
        let vague = account.vague || plan.callers[caller].habit == Habit::WithIds;
        if !knows_of_all && !vague {
            return;
        }
        let left = decision
            .verdicts()
            .each
            .iter()
            .map(|verdict| Left::new(verdict, now))
            .collect();
        let news = Account {
            heard: Some(left),
            ..Account::default()
        };
        let part = |account: &Account| account.part(plan, caller, self.fewer, now);
        let (before, after) = (part(account), part(&news));
        if since > turned && !vague || after >= before - account.since {
            (account.heard, account.heard_at, account.since) = (news.heard, charged, 0);
        }
    }

    /// An instance has decided locally.
    pub(super) fn decides(&mut self, plan: &Plan, now: u64, asked: &Granted<'_>, granted: i64) {
        let &Granted {
            caller,
            instance,
            mode,
            cost,
            id,
            of_older,
            unasked,
            degraded,
        } = asked;
        let (sums, account) = (&mut self.sums[caller], &mut self.accounts[caller][instance]);
        sums.in_doubt |= !unasked;
        let mut again = false;
        if let (Some(id), true) = (id, granted > 0) {
            let id = sums.ids.entry(id.to_vec()).or_default();
            let bit = 1 << instance;
            again = id.instances & bit != 0;
            (id.cost, id.instances) = (cost, id.instances | bit);
            id.local += i64::from(unasked && !again);
        }
        match mode {
            _ if again => {}
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge => {
                account.since += granted;
                match unasked {
                    true if granted > 0 => {
                        account.owe(now, granted);
                        if !degraded {
                            (account.well, account.alone) =
                                (account.well + granted, account.alone + 1);
                        }
                    }
                    true => {}
                    false => {
                        sums.unanswered += granted;
                        account.unanswered.push_back((now, granted));
                    }
                }
            }
            Mode::Refund => {
                account.since -= granted;
                sums.refunded += granted;
                account.refunded = true;
                account.vague |= of_older;
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
                (account.reset, account.owed, account.beyond) = (true, 0, 0);
                account.resets += 1;
                account.grants.clear();
            }
            Mode::Peek | Mode::Renew | Mode::Release => {}
        }
        // After a local refund, the count of the instance may be more exact than the replies that
        // it receives.
        if plan.callers[caller].lasting && granted > 0 && !account.refunded {
            let part = account.part(plan, caller, self.fewer, now);
            self.log.checks(Rule::Part);
            if account.since > part {
                let (since, heard) = (account.since, &account.heard);
                let problem = format!(
                    "i{instance} granted {since} since Redis told it that {heard:?} is left, of which its part is {part}"
                );
                self.breaks(Rule::Part, Some(caller), problem);
            }
        }
    }

    /// A client has received a decision.
    ///
    /// `resets_told` is the number of resets that were answered when the client sent its check.
    pub(super) fn answers(
        &mut self,
        caller: usize,
        check: &Check,
        decision: &Decision,
        resets_told: u32,
    ) {
        let sums = &mut self.sums[caller];
        match check.mode() {
            Mode::Refund if resets_told < sums.resets_told => {
                sums.refunded_about_reset += i64::from(check.cost());
            }
            Mode::Refund => sums.told -= i64::from(check.cost()),
            Mode::Reset => {
                (sums.told, sums.refunded_about_reset) = (0, 0);
                sums.resets_told += 1;
                sums.reset_later |= decision.source() == Source::Local;
            }
            _ => sums.told += i64::from(decision.granted()),
        }
    }

    /// Number of resets of a caller that were answered.
    pub(super) fn resets_told(&self, caller: usize) -> u32 {
        self.sums[caller].resets_told
    }

    /// A refund has failed.
    pub(super) fn refuses(&mut self, caller: usize, unsent: bool) {
        self.sums[caller].in_doubt |= !unsent;
    }

    /// A client has received a grant.
    pub(super) fn grants(
        &mut self,
        plan: &Plan,
        now: u64,
        caller: usize,
        cost: i64,
        id: Option<&[u8]>,
    ) {
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
        // Less cannot break it, however the instances share the limit.
        if plan.callers[caller]
            .capacities()
            .any(|capacity| granted > capacity)
        {
            self.checks(Rule::Granted);
        }
        if granted > bound {
            self.breaks(
                Rule::Granted,
                Some(caller),
                format!("{granted} granted of {bound} = {why}"),
            );
        }
    }

    /// The upper bound of the grants to a caller so far, with an explanation.
    ///
    /// - `L` is the limit, `C` the charges of the primary store, and `V` these plus all grants of
    ///   instances that the primary store lacks.
    /// - An instance grants its share of `L - C`, with the `C` of its last report. It lacks the
    ///   growth `P` of `C` since that report. So `V` may exceed `L` by `P`, but by no more than the
    ///   instance grants.
    /// - The primary store lacks `V - C`. So `V` may exceed `L` by the grants of the primary store
    ///   until the reconciliation, but by no more than `V - C`.
    /// - Both are `min(granted, P)`, with `P` from the last report to the reconciliation.
    /// - Requests without an answer and lost counts come in addition.
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
            let flowing = if who.lasting {
                0
            } else {
                let period = policy.params().period;
                let windows = self.accounts[caller]
                    .iter()
                    .map(|account| account.windows(policy.strategy(), period, now));
                flows(policy, now) + capacity * (self.opened + windows.sum::<i64>())
            };
            (
                capacity * (1 + forgotten) + parts.beyond(capacity, plan.instances) + flowing,
                capacity,
            )
        }))
        .min()
        .unwrap_or_default();
        let bound = least + sums.refunded + sums.unanswered + excess;
        let why = format!(
            "{least} (limit {limit}, forgotten {forgotten} times) + {} refunded + {} unanswered + {excess} that Redis \
             or an instance did not know of",
            sums.refunded, sums.unanswered
        );
        (bound, why)
    }

    /// After all activity has ended, nothing may be owed. `used` is the primary store's count.
    pub(super) fn rests(&mut self, plan: &Plan, caller: usize, used: i64) {
        let who = &plan.callers[caller];
        if who.habit == Habit::WithIds {
            let ids = self.sums[caller].ids.values();
            let possible: i64 = ids.map(|id| id.cost * (id.local + i64::from(id.ran))).sum();
            let lost = self.unreconciled[caller];
            if possible > 0 {
                self.checks(Rule::Id);
            }
            if used > possible {
                self.breaks(
                    Rule::Id,
                    Some(caller),
                    format!("Redis counts {used} for ids that cost {possible}"),
                );
            } else if self.emptied == 0
                && !self.changed
                && possible <= who.capacities().min().unwrap_or(0)
                && used < possible - lost
            {
                self.breaks(
                    Rule::Lost,
                    Some(caller),
                    format!("Redis counts {used} for ids that cost {possible}"),
                );
            }
            return;
        }
        if who.habit.reserves() {
            let Sums {
                told,
                refunded_about_reset,
                reset_later,
                in_doubt,
                ..
            } = self.sums[caller];
            // Counts in ticks are rounded up for each charge.
            let off = i64::from(
                who.policies
                    .iter()
                    .any(|policy| policy.frees().is_gradual()),
            );
            // A reset that the primary store receives later drops the earlier grants there.
            let least = if reset_later || self.emptied > 0 {
                0
            } else {
                told - refunded_about_reset - off
            };
            if !in_doubt && told > 0 {
                self.checks(Rule::Exact);
            }
            if !in_doubt && !(least..=told + off).contains(&used) {
                self.breaks(
                    Rule::Exact,
                    Some(caller),
                    format!("Redis counts {used}, and {told} was charged"),
                );
            }
        }
        if !who.lasting || self.changed {
            return;
        }
        for instance in 0..plan.instances {
            let Account {
                owed,
                well,
                beyond,
                vague,
                reset,
                refunded,
                has_owed,
                ..
            } = self.accounts[caller][instance];
            if !vague {
                let cases = [
                    (refunded, Rule::Back),
                    (has_owed, Rule::Lost),
                    (well > 0, Rule::Late),
                ];
                for (_, rule) in cases.into_iter().filter(|(is_case, _)| *is_case) {
                    self.checks(rule);
                }
            }
            let (rule, problem) = match owed {
                _ if reset && !vague => (Rule::Back, "of a reset".to_owned()),
                owed if owed < 0 && !vague => (Rule::Back, format!("of {} refunded", -owed)),
                _ if vague => continue,
                owed if owed > beyond + well => (Rule::Lost, format!("of {owed} granted")),
                owed if owed > beyond => {
                    (Rule::Late, format!("of {owed} granted while not degraded"))
                }
                _ => continue,
            };
            self.breaks(
                rule,
                Some(caller),
                format!("i{instance} never told Redis {problem}"),
            );
        }
    }
}

/// The execution of a request by the primary store.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ran {
    /// Its number among all executed requests.
    run: u64,
    /// The caller's total charges at that time.
    charged: i64,
}

/// A reply of the primary store.
pub(super) struct Heard {
    pub(super) caller: usize,
    pub(super) instance: usize,
    pub(super) ran: Ran,
    /// Time of the request, and time until which the last probe or reconciling check of the
    /// instance may have no reply.
    pub(super) since: u64,
    pub(super) turned: u64,
}

/// A check that a reconciliation sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reconciled {
    pub(super) caller: usize,
    pub(super) instance: usize,
    /// Whether it is a reset. Otherwise it is a charge.
    pub(super) is_reset: bool,
    pub(super) cost: i64,
}
