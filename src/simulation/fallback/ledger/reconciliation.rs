//! The checks that reconciliations send to the primary store.

use super::*;

impl Ledger {
    /// The reconciliation of an instance sends a check.
    pub(in super::super) fn reconciles(&mut self, plan: &Plan, now: u64, sent: &Reconciled) {
        let &Reconciled {
            caller,
            instance,
            is_reset,
            cost,
        } = sent;
        let (who, account) = (&plan.callers[caller], &mut self.accounts[caller][instance]);
        (account.flying, account.given_up_at) = (account.flying + 1, now + 2 * plan.deadline);
        if who.habit == Habit::WithIds {
            return;
        }
        let broken = if is_reset {
            let is_first = account.resets == 0;
            self.log.checks(Rule::Twice);
            (account.reset, account.resets) = (false, account.resets.saturating_sub(1));
            is_first.then(|| (Rule::Twice, "resets what nobody has reset".to_owned()))
        } else if account.reset {
            let problem = format!("charges {cost}, which its reset will forget");
            if !account.vague {
                self.log.checks(Rule::Back);
            }
            (!account.vague).then_some((Rule::Back, problem))
        } else {
            account.owed -= cost;
            let (owed, counts) = (account.owed, account.counts(who, now));
            account.forget(cost);
            if who.takes_only() {
                self.log.checks(Rule::Twice);
                if !self.changed {
                    self.log.checks(Rule::Lapsed);
                }
            }
            if !who.takes_only() {
                None
            } else if owed < 0 {
                let problem = format!("charges {cost}, {} more than it granted", -owed);
                Some((Rule::Twice, problem))
            } else {
                let problem = format!("charges {cost}, of which only {counts} still count");
                (cost > counts && !self.changed).then_some((Rule::Lapsed, problem))
            }
        };
        if let Some((rule, problem)) = broken {
            self.breaks(rule, Some(caller), format!("i{instance} {problem}"));
        }
    }

    /// The primary store has executed a reconciling check, and charged this much.
    pub(in super::super) fn reconciled(&mut self, sent: &Reconciled, charged: i64) {
        let &Reconciled {
            caller,
            instance,
            is_reset,
            ..
        } = sent;
        self.runs += 1;
        if !is_reset {
            self.sums[caller].charged += charged;
            if let Some(open) = &mut self.accounts[caller][instance].open {
                open.told += charged;
            }
        }
        self.landed(caller, instance);
    }

    /// A reconciling check was not executed. If it was certainly not sent, its cost is owed again, unless a reset has
    /// dropped it.
    pub(in super::super) fn failed(&mut self, now: u64, sent: &Reconciled, unsent: bool) {
        let &Reconciled {
            caller,
            instance,
            is_reset,
            cost,
        } = sent;
        let account = &mut self.accounts[caller][instance];
        self.sums[caller].in_doubt |= !unsent;
        match (unsent, is_reset) {
            (true, true) => (account.reset, account.resets) = (true, account.resets + 1),
            (true, false) if account.reset => {}
            (true, false) => {
                account.owed += cost;
                account.grants.push_front((now, cost));
            }
            (false, true) => {}
            (false, false) => {
                account.excess += cost;
                self.unreconciled[caller] += cost;
            }
        }
        self.landed(caller, instance);
    }

    /// An instance has no reply to a reconciling check. The check may still be executed, after
    /// later ones. The instance repeats a reset, so that the primary store may execute it twice.
    pub(in super::super) fn unanswered(&mut self, sent: &Reconciled) {
        self.sums[sent.caller].in_doubt = true;
        if sent.is_reset {
            self.sums[sent.caller].resets += 1;
            let account = &mut self.accounts[sent.caller][sent.instance];
            (account.reset, account.resets) = (true, account.resets + 1);
        }
    }

    pub(super) fn landed(&mut self, caller: usize, instance: usize) {
        let charged = self.sums[caller].charged;
        let account = &mut self.accounts[caller][instance];
        account.flying -= 1;
        account.landed = self.runs;
        if account.flying == 0
            && !account.owes()
            && let Some(open) = account.open.take()
        {
            account.excess += open.granted.min(charged - open.from - open.told);
        }
    }
}
