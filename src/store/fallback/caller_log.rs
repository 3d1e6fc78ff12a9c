//! The log of one caller: what was granted, refunded and reset, to be replayed on the primary store.

use std::iter::repeat;
use std::sync::atomic::{AtomicI64, Ordering};

use indexmap::IndexMap;
use smallvec::SmallVec;

use super::charges::Charges;
use super::refunds::{Refund, Refunds};
use crate::limit::{Charged, Check, Decision, EachCharged, Key, Mode, Policies, State};

/// What is noted of one caller under one list of policies.
///
/// Whatever was done without an id comes to refunding so much, down to nothing charged, and then charging so much.
/// For example, to take 5, give 20 back and take 3 is to give 15 back and then to charge 3.
#[derive(Debug)]
pub(super) struct CallerLog {
    policies: Policies,
    /// Its own number, and that of the first log that was noted again in this: of which it holds charges.
    number: i64,
    first: i64,
    /// What was done under an id, once each: before what is refunded, and after it.
    before: IndexMap<Key, Once>,
    after: IndexMap<Key, Once>,
    refunds: Refunds,
    /// What is to be charged without an id.
    charge: Charges,
    /// The same with what is charged under ids, to tell when each of these lapses. `None` until there is one.
    all: Option<Charges>,
    /// How much of a limit the caller has used, in 255ths.
    used: u8,
}

#[derive(Debug, Clone, Copy, Default)]
struct Amount {
    cost: u64,
    /// When it counts no longer, in microseconds.
    expires_at: i64,
}

#[derive(Debug, Clone, Copy)]
struct Once {
    mode: Mode,
    amount: Amount,
}

/// One operation to replay on the primary store.
#[derive(Debug)]
pub(super) struct ReplayOp {
    pub(super) key: Key,
    pub(super) policies: Policies,
    pub(super) id: Option<Key>,
    /// To charge, to refund or to reset.
    pub(super) mode: Mode,
    pub(super) cost: u64,
    expires_at: i64,
    /// What it refunds without an id.
    refund: Option<Refund>,
    /// What this charges, if that is known for each policy and there is no id. And of which log.
    charge: Option<Charges>,
    first: i64,
    used: u8,
}

impl ReplayOp {
    pub(super) fn check(&self, now: i64) -> Check {
        let (key, policies) = (self.key, &self.policies);
        let cost = u32::try_from(self.cost).unwrap_or(u32::MAX);
        let check = match self.mode {
            Mode::Reset => Check::reset(key, policies),
            Mode::Refund => match &self.refund {
                Some(refund) => Check::refund_of(key, policies, cost, refund.charged(now)),
                None => Check::refund(key, policies, cost),
            },
            _ => Check::charge(key, policies, cost),
        };
        check.with_id_key(self.id)
    }
}

impl CallerLog {
    /// What is noted is done in so many stages, one after the other: what came before what is refunded, that, and what
    /// came after it. The order within a stage does not matter.
    pub(super) const STAGES: u8 = 3;

    pub(super) fn new(policies: Policies) -> Self {
        let (before, after, refunds) = (IndexMap::new(), IndexMap::new(), Refunds::default());
        let (charge, number) = (Charges::none(&policies), another());
        Self {
            policies,
            number,
            first: number,
            before,
            after,
            refunds,
            charge,
            all: None,
            used: 0,
        }
    }

    /// Begins with a decision of the fallback, which charged so much: whatever else that counted, the primary store counts.
    pub(super) fn begin(&mut self, decision: &Decision, charged: u32, now: i64) {
        self.charge = Charges::after(&self.policies, decision.clone().settled(charged, 0), now);
    }

    /// By which a charge is known that is noted now.
    pub(super) fn number(&self) -> i64 {
        self.number
    }

    pub(super) fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Whether it is of the same counts.
    pub(super) fn is_under(&self, policies: &Policies) -> bool {
        self.policies.id() == policies.id()
    }

    /// Counts by the quotas of this list from now on, which is of the same counts: a quota may have changed meanwhile.
    pub(super) fn go_under(&mut self, policies: &Policies) {
        if !self.policies.is(policies) {
            self.policies = policies.clone();
        }
    }

    pub(super) fn has_id(&self, id: &Key) -> bool {
        self.before.contains_key(id) || self.after.contains_key(id)
    }

    /// Whether nothing is left to be done.
    pub(super) fn is_done(&self, now: i64) -> bool {
        let ids = self.before.len() + self.after.len();
        ids == 0
            && self.refunds.is_empty()
            && self.charge.left(&self.policies, now).all(|left| left == 0)
    }

    /// How much of a limit the caller had used when it was last granted something, in 255ths, rounded down.
    pub(super) fn used(&self) -> u8 {
        self.used
    }

    pub(super) fn set_used(&mut self, decision: &Decision) {
        self.used = decision
            .verdicts()
            .map(|(policy, verdict)| verdict.used(policy))
            .max()
            .unwrap_or(0);
    }

    /// How much room it takes.
    pub(super) fn len(&self) -> usize {
        1 + self.before.len() + self.after.len()
    }

    /// Records what was done now. What was charged counts for as long as the whole policies say, which may be less than an
    /// instance's part of them: its rate is lower. Under an id that was `sent` to the primary store, it counts for no longer
    /// than that knows the id. What was refunded is `of` a charge, if not of just now.
    pub(super) fn add(
        &mut self,
        mode: Mode,
        id: Option<Key>,
        cost: u64,
        of: &[Charged],
        now: i64,
        sent: bool,
    ) {
        let Some(id) = id else {
            return match mode {
                Mode::Charge => self.charge(cost, now),
                Mode::Reset => self.reset(self.undone(now)),
                _ => self.refund(cost, of, now),
            };
        };
        if self.has_id(&id) {
            return;
        }
        let mut expires_at = match mode {
            Mode::Charge => self.charge_with_id(cost, now),
            _ => self.undone(now),
        };
        if sent {
            expires_at = expires_at.min(now.saturating_add(self.policies.longest_period()));
        }
        let amount = Amount { cost, expires_at };
        self.after.insert(id, Once { mode, amount });
        match mode {
            Mode::Reset => self.reset(expires_at),
            Mode::Refund => {
                let of = repeat(Charged::just_now(i64::try_from(cost).unwrap_or(i64::MAX)));
                self.all.get_or_insert_with(|| self.charge.clone()).refund(
                    &self.policies,
                    cost,
                    of,
                    now,
                );
            }
            _ => {}
        }
    }

    /// Until when what is refunded now may matter: what it undoes was charged before, and counts no longer than a full
    /// count takes to flow back.
    fn undone(&self, now: i64) -> i64 {
        now.saturating_add(self.policies.longest_count())
    }

    /// Records again what is still to be done, before all of this.
    pub(super) fn put_back(&mut self, op: ReplayOp, now: i64) {
        let ReplayOp {
            id,
            mode,
            cost,
            expires_at,
            refund,
            charge,
            first,
            used,
            ..
        } = op;
        let amount = Amount { cost, expires_at };
        self.used = self.used.max(used);
        match (mode, id) {
            (_, Some(id)) => {
                if !self.has_id(&id) {
                    self.before.insert(id, Once { mode, amount });
                    if mode == Mode::Charge {
                        self.charge_with_id(cost, now);
                    }
                }
            }
            (Mode::Reset, None) => self.refunds.reset(expires_at),
            (Mode::Refund, None) => refund
                .into_iter()
                .for_each(|refund| self.refunds.add(refund)),
            // The reset came after it.
            (_, None) if self.refunds.reset_until.is_some() => {}
            (_, None) => {
                let policies = &self.policies;
                let mut older = charge.unwrap_or_else(|| {
                    let mut charge = self.charge.emptied();
                    charge.charge(policies, repeat(cost), now);
                    charge
                });
                // What has been refunded since comes first of this.
                self.refunds.spend(policies, &mut older, first, now);
                let left = older.left(policies, now).max().unwrap_or(0);
                // As old as it was, or what fails again and again would never lapse: rather what has been charged since gets newer.
                older.charge(policies, self.charge.left(policies, now), now);
                if let Some(all) = &mut self.all {
                    all.charge(policies, repeat(left), now);
                }
                self.charge = older;
                self.first = self.first.min(first);
            }
        }
    }

    /// Refunds of a charge: here if that is noted here, and else in the primary store. What is noted and counts no longer
    /// is not refunded there. If it is not said of which charge, as much as there is is refunded here, and the rest there.
    fn refund(&mut self, cost: u64, of: &[Charged], now: i64) {
        let charged = if of.is_empty() {
            self.just_now(cost, now)
        } else {
            of.into()
        };
        let mut refund = Refund::new(cost, charged, now);
        if refund
            .log_number()
            .is_some_and(|number| (self.first..=self.number).contains(&number))
        {
            let given = refund.take_out(&self.policies, &mut self.charge, now);
            if let Some(all) = &mut self.all {
                refund.take_out(&self.policies, all, now);
            }
            refund.cost -= if of.is_empty() { given.min(cost) } else { cost };
        }
        if refund.cost > 0 {
            self.refunds.add(refund);
            self.before.append(&mut self.after);
        }
    }

    /// A charge of just now, as the first of a caller.
    fn just_now(&self, cost: u64, now: i64) -> EachCharged {
        let cost = u32::try_from(cost).unwrap_or(u32::MAX);
        let mut states: SmallVec<[State; 1]> = self
            .policies
            .iter()
            .map(|policy| State::fresh(policy.kind()))
            .collect();
        let verdicts = Check::charge(Key::GLOBAL, &self.policies, cost).decide(&mut states, now);
        let charged = Charged {
            age: 0,
            at: -self.number,
            cost: cost.into(),
            reset: 0,
            is_turn: false,
        };
        verdicts
            .each
            .iter()
            .map(|verdict| Charged {
                reset: verdict.reset,
                ..charged
            })
            .collect()
    }

    /// Forgets what is still to be charged.
    fn reset(&mut self, until: i64) {
        (self.charge, self.all) = (Charges::none(&self.policies), None);
        self.number = another();
        self.first = self.number;
        self.refunds.reset(until);
        self.before.append(&mut self.after);
    }

    fn charge(&mut self, cost: u64, now: i64) {
        for charges in self.all.iter_mut().chain([&mut self.charge]) {
            charges.charge(&self.policies, repeat(cost), now);
        }
    }

    /// Charges under an id. When all of that lapses.
    fn charge_with_id(&mut self, cost: u64, now: i64) -> i64 {
        let all = self.all.get_or_insert_with(|| self.charge.clone());
        all.charge(&self.policies, repeat(cost), now);
        now.saturating_add(all.reset_after(&self.policies, now))
    }

    /// Takes out a little of what is to be done in a stage, but for what no longer counts. `false` if nothing is left in it.
    pub(super) fn take_some(
        &mut self,
        key: Key,
        stage: u8,
        now: i64,
        ops: &mut Vec<ReplayOp>,
    ) -> bool {
        let (policies, first, used) = (&self.policies, self.first, self.used);
        let op = |id, mode, Amount { cost, expires_at }| {
            let policies = policies.clone();
            ReplayOp {
                key,
                policies,
                id,
                mode,
                cost,
                expires_at,
                refund: None,
                charge: None,
                first,
                used,
            }
        };
        if let Some((id, Once { mode, amount })) = match stage {
            0 => self.before.pop(),
            2 => self.after.pop(),
            _ => None,
        } {
            // A reset is in what is refunded.
            if mode != Mode::Reset && amount.expires_at > now {
                ops.push(op(Some(id), mode, amount));
            }
            return true;
        }
        if stage == 1 && !self.refunds.is_empty() {
            let refunds = std::mem::take(&mut self.refunds);
            if let Some(expires_at) = refunds.reset_until.filter(|until| *until > now) {
                ops.push(op(
                    None,
                    Mode::Reset,
                    Amount {
                        cost: 0,
                        expires_at,
                    },
                ));
            }
            ops.extend(refunds.into_each(now).map(|refund| {
                let amount = Amount {
                    cost: refund.cost,
                    expires_at: now,
                };
                ReplayOp {
                    refund: Some(refund),
                    ..op(None, Mode::Refund, amount)
                }
            }));
            return true;
        }
        let counts: SmallVec<[u64; 1]> = self.charge.left(policies, now).collect();
        if stage != 2 || counts.iter().all(|count| *count == 0) {
            return false;
        }
        // As much as counts under all policies, then what is left under some of them.
        let mut charged = 0;
        while let Some(next) = counts
            .iter()
            .copied()
            .filter(|count| *count > charged)
            .min()
        {
            let some = policies
                .iter()
                .zip(&counts)
                .filter(|(_, count)| **count > charged)
                .map(|(policy, _)| policy.clone());
            let mut op = op(
                None,
                Mode::Charge,
                Amount {
                    cost: next - charged,
                    expires_at: now,
                },
            );
            if counts.iter().all(|count| *count == next) {
                op.charge = Some(self.charge.clone());
            } else if counts.contains(&charged) {
                op.policies = Policies::new(some).unwrap_or(op.policies);
            }
            ops.push(op);
            charged = next;
        }
        self.charge = self.charge.emptied();
        true
    }

    /// All that is to be done, in the order of its stages.
    pub(super) fn into_ops(mut self, key: Key, now: i64) -> Vec<ReplayOp> {
        let mut ops = vec![];
        for stage in 0..Self::STAGES {
            while self.take_some(key, stage, now, &mut ops) {}
        }
        ops
    }
}

/// A greater number than that of any log before, also of other stores.
fn another() -> i64 {
    static NUMBERS: AtomicI64 = AtomicI64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Policy, Quota, Strategy};
    use proptest::prelude::*;

    fn log() -> CallerLog {
        CallerLog::new(
            Policy::new("test", Strategy::Gcra, Quota::per_day(1_000_000))
                .unwrap()
                .into(),
        )
    }

    fn ops(log: CallerLog) -> Vec<ReplayOp> {
        ops_at(log, 0)
    }

    fn ops_at(log: CallerLog, now: i64) -> Vec<ReplayOp> {
        log.into_ops(Key::GLOBAL, now)
    }

    fn done(used: u64, mode: Mode, cost: u64) -> u64 {
        match mode {
            Mode::Charge => used + cost,
            Mode::Refund => used.saturating_sub(cost),
            _ => 0,
        }
    }

    /// What a caller is charged after these ops, if it was charged this much before.
    fn charged(start: u64, log: CallerLog) -> u64 {
        ops(log)
            .iter()
            .fold(start, |used, op| done(used, op.mode, op.cost))
    }

    #[test]
    fn notes_skip_repeated_ids_and_expired_charges() {
        let mut log = log();
        let later = 2 * 86_400_000_000;
        log.add(Mode::Charge, Some(Key::new("c")), 5, &[], 0, false);
        log.add(Mode::Refund, None, 5, &[], 0, false);
        for id in ["a", "b", "a"] {
            log.add(Mode::Charge, Some(Key::new(id)), 5, &[], later, false);
        }
        assert_eq!(log.len(), 4);
        assert!(!log.is_done(later));
        let ops = ops_at(log, later);
        assert!(ops.iter().all(|op| op.mode == Mode::Charge));
        assert_eq!(ops.iter().map(|op| op.cost).sum::<u64>(), 10);
    }

    /// It is sent as old as it is by then, and not at all once its charge counts no more.
    #[test]
    fn noted_refunds_age() {
        const S: i64 = 1_000_000;
        let policies: Policies = Policy::new("test", Strategy::SlidingLog, Quota::per_minute(10))
            .unwrap()
            .into();
        let of = Charged {
            age: 20 * S,
            at: 0,
            cost: 5,
            reset: 60 * S,
            is_turn: false,
        };
        let sent = |at: i64| {
            let mut log = CallerLog::new(policies.clone());
            log.add(Mode::Refund, None, 3, &[of], 0, false);
            let ops = ops_at(log, at);
            ops.iter()
                .map(|op| op.check(at).charged()[0].age)
                .collect::<Vec<_>>()
        };
        assert_eq!(sent(30 * S), [50 * S]);
        assert_eq!(sent(40 * S - 1), [60 * S - 1]);
        assert!(sent(40 * S).is_empty());
    }

    /// However often its reconciliation fails, and whatever is charged meanwhile.
    #[test]
    fn restored_notes_lapse() {
        for &strategy in Strategy::ALL {
            let quota = Quota::per(100, std::time::Duration::from_millis(300));
            let policies: Policies = Policy::new("test", strategy, quota).unwrap().into();
            let mut log = CallerLog::new(policies.clone());
            let mut noted = 0;
            for now in (0..10).map(|i| i * 100_000) {
                let ops = ops_at(
                    std::mem::replace(&mut log, CallerLog::new(policies.clone())),
                    now,
                );
                log.add(Mode::Charge, None, 10, &[], now, false);
                noted = ops.iter().map(|op| op.cost).sum();
                ops.into_iter().rev().for_each(|op| log.put_back(op, now));
            }
            // Of two periods at most.
            assert!(noted <= 70, "{strategy}: {noted}");
        }
    }

    /// Of a charge in the outage what has flowed back is not refunded of another's charge in the primary store.
    #[test]
    fn noted_charges_are_refunded_locally() {
        const HOUR: i64 = 3_600_000_000;
        let policies: Policies = Policy::new("test", Strategy::Gcra, Quota::per_day(24))
            .unwrap()
            .into();
        let mut log = CallerLog::new(policies);
        log.add(Mode::Charge, None, 10, &[], 0, false);
        let of = Charged {
            age: 4 * HOUR,
            at: -log.number(),
            cost: 10,
            reset: 10 * HOUR,
            is_turn: false,
        };
        log.add(Mode::Refund, None, 10, &[of], 4 * HOUR, false);
        assert!(ops_at(log, 4 * HOUR).is_empty());
    }

    #[test]
    fn what_came_first_is_done_first() {
        let mut log = log();
        log.add(Mode::Charge, Some(Key::new("id")), 1, &[], 0, false);
        log.add(Mode::Refund, None, 7, &[], 0, false);
        log.add(Mode::Charge, None, 5, &[], 0, false);
        let mut stage = |stage| {
            let mut ops = vec![];
            while log.take_some(Key::GLOBAL, stage, 0, &mut ops) {}
            ops.iter().map(|op| (op.mode, op.cost)).collect::<Vec<_>>()
        };
        assert_eq!(
            [0, 1, 2].map(&mut stage),
            [
                [(Mode::Charge, 1)],
                [(Mode::Refund, 7)],
                [(Mode::Charge, 5)]
            ]
        );
    }

    /// It was under way when it was refunded, and has failed.
    #[test]
    fn a_charge_noted_again_is_refunded_once() {
        let mut log = log();
        log.add(Mode::Charge, None, 10, &[], 0, false);
        let taken = ops(std::mem::replace(&mut log, self::log()));
        log.add(Mode::Refund, None, 4, &[], 0, false);
        taken.into_iter().for_each(|op| log.put_back(op, 0));
        let ops = ops(log);
        assert_eq!(
            ops.iter().map(|op| (op.mode, op.cost)).collect::<Vec<_>>(),
            [(Mode::Charge, 6)]
        );
    }

    /// By what was charged before it and not refunded, at whatever time that was noted again.
    #[test]
    fn later_ids_lapse_after_earlier_ones() {
        const HOUR: i64 = 3_600_000_000;
        let new = || {
            CallerLog::new(
                Policy::new("test", Strategy::Gcra, Quota::per_day(24))
                    .unwrap()
                    .into(),
            )
        };
        let id = |name| Some(Key::new(name));
        let left = |log, hours| {
            ops_at(log, hours * HOUR)
                .iter()
                .filter(|op| op.id == id("last"))
                .count()
        };
        for (refunded, again, hours) in [(false, false, 11), (true, false, 1), (false, true, 11)] {
            for (at, expected) in [(hours - 1, 1), (hours, 0)] {
                let mut log = new();
                log.add(Mode::Charge, id("first"), 10, &[], 0, false);
                if refunded {
                    log.add(Mode::Refund, id("refund"), 10, &[], 0, false);
                }
                if again {
                    let ops = ops(log);
                    log = new();
                    ops.into_iter().for_each(|op| log.put_back(op, 0));
                }
                log.add(Mode::Charge, id("last"), 1, &[], 0, false);
                assert_eq!(left(log, at), expected, "after {at} hours");
            }
        }
    }

    proptest! {
        /// Also if part of it was to be done and was not, and is noted again.
        #[test]
        fn notes_sum_up_all_changes(
            start in 0u64..50,
            all in prop::collection::vec((prop::sample::select(vec![Mode::Charge, Mode::Refund, Mode::Reset]), 1u64..20), 0..20),
            cut in 0usize..20,
        ) {
            let (mut used, mut log, mut taken) = (start, log(), vec![]);
            for (i, (mode, cost)) in all.into_iter().enumerate() {
                if i == cut {
                    taken = ops(std::mem::replace(&mut log, self::log()));
                }
                log.add(mode, None, cost, &[], 0, false);
                used = done(used, mode, cost);
            }
            for op in taken.into_iter().rev() {
                log.put_back(op, 0);
            }
            prop_assert_eq!(charged(start, log), used);
        }

        /// What was charged before a reset is forgotten, also under an id.
        #[test]
        fn a_reset_forgets_earlier_charges_only(before in 0u64..5, after in 0u64..5, again: bool, by_id: bool) {
            let mut log = log();
            for id in 0..before {
                log.add(Mode::Charge, Some(Key::new(id.to_string())), 1, &[], 0, false);
            }
            let taken = if again { ops(std::mem::replace(&mut log, self::log())) } else { vec![] };
            log.add(Mode::Reset, by_id.then(|| Key::new("reset")), 0, &[], 0, false);
            for id in before..before + after {
                log.add(Mode::Charge, Some(Key::new(id.to_string())), 1, &[], 0, false);
            }
            for op in taken.into_iter().rev() {
                log.put_back(op, 0);
            }
            prop_assert_eq!(charged(10, log), after);
        }
    }
}
