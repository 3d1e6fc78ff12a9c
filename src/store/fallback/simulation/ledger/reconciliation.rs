//! The checks that reconciliations send to the primary store.

use super::*;

impl Ledger {
    /// The reconciliation of an instance sends a check.
    pub(in super::super) fn reconciles(&mut self, plan: &Plan, now: u64, sent: &Reconciled) {
        let &Reconciled {
            caller,
            instance,
            mode,
            cost,
            with_id,
        } = sent;
        let (who, account) = (&plan.callers[caller], &mut self.accounts[caller][instance]);
        (account.flying, account.given_up_at) = (account.flying + 1, now + 2 * plan.deadline);
        if with_id || who.habit == Habit::WithIds {
            return;
        }
        match mode {
            Mode::Charge if account.reset => {
                account.before -= cost;
                if account.before < 0 && !account.vague {
                    let problem =
                        format!("i{instance} charges {cost}, which its reset will forget");
                    self.breaks(Rule::Back, Some(caller), problem);
                }
            }
            Mode::Charge => {
                account.owed -= cost;
                let owed = account.owed;
                let counts = account.counts(who, now);
                account.forget(cost);
                if owed < 0 && who.takes_only() {
                    let problem =
                        format!("i{instance} charges {cost}, {} more than it granted", -owed);
                    self.breaks(Rule::Twice, Some(caller), problem);
                } else if cost > counts && who.takes_only() && !self.changed {
                    let problem =
                        format!("i{instance} charges {cost}, of which only {counts} still count");
                    self.breaks(Rule::Lapsed, Some(caller), problem);
                }
            }
            Mode::Refund => account.owed += cost,
            Mode::Reset => {
                if account.resets == 0 {
                    self.breaks(
                        Rule::Twice,
                        Some(caller),
                        format!("i{instance} resets what nobody has reset"),
                    );
                }
                let account = &mut self.accounts[caller][instance];
                (account.reset, account.before, account.resets) =
                    (false, 0, account.resets.saturating_sub(1));
            }
            Mode::Take
            | Mode::TakeAhead
            | Mode::UpTo
            | Mode::Peek
            | Mode::Renew
            | Mode::Release => {}
        }
    }

    /// The primary store has executed a reconciling check, and charged or refunded this much.
    pub(in super::super) fn reconciled(&mut self, sent: &Reconciled, charged: i64) {
        let &Reconciled {
            caller,
            instance,
            mode,
            ..
        } = sent;
        self.runs += 1;
        match mode {
            Mode::Charge => {
                self.sums[caller].charged += charged;
                if let Some(open) = &mut self.accounts[caller][instance].open {
                    open.told += charged;
                }
            }
            // The primary store may have had more to refund than the instance.
            Mode::Refund => self.sums[caller].refunded += charged,
            Mode::Take
            | Mode::TakeAhead
            | Mode::UpTo
            | Mode::Peek
            | Mode::Reset
            | Mode::Renew
            | Mode::Release => {}
        }
        self.landed(caller, instance);
    }

    /// A reconciling check was not executed. If it was certainly not sent, its cost is owed again.
    pub(in super::super) fn failed(&mut self, now: u64, sent: &Reconciled, unsent: bool) {
        let &Reconciled {
            caller,
            instance,
            mode,
            cost,
            with_id,
        } = sent;
        let account = &mut self.accounts[caller][instance];
        self.sums[caller].in_doubt |= !unsent;
        match (unsent, mode) {
            (true, _) if with_id => {}
            (true, Mode::Charge) if account.reset => account.before += cost,
            (true, Mode::Charge) => {
                account.owed += cost;
                account.grants.push_front((now, cost));
            }
            (true, Mode::Refund) => account.owed -= cost,
            (true, Mode::Reset) => (account.reset, account.resets) = (true, account.resets + 1),
            (false, Mode::Charge) => {
                account.excess += cost;
                self.unreconciled[caller] += cost;
            }
            _ => {}
        }
        self.landed(caller, instance);
    }

    /// An instance has no reply to a reconciling check. It repeats a reset, which is then executed twice.
    pub(in super::super) fn unanswered(&mut self, sent: &Reconciled) {
        if sent.mode == Mode::Reset {
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
