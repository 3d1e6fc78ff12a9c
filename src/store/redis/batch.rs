//! A batch: checks pushed one by one, those that ask the same put together.

use std::collections::HashMap;

use crate::limit::{Check, EachCharged, Key, Mode, Policies};

/// What one script call asks. Its other half, in [`script`](super::script), writes the call and reads the reply.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// For every entry its keys: `prefix:{caller}` and each policy's `:name:strategy`; before them, for a check with
    /// an id, `prefix:{caller}`, all of those, and `:id`.
    pub(super) keys: Vec<u8>,
    /// Where each key ends.
    pub(super) ends: Vec<usize>,
    pub(super) plans: Vec<Plan>,
    /// The index of the plan that asks this.
    plan_of: HashMap<PlanKey, usize>,
    pub(super) entries: Vec<Entry>,
    /// For every check its entry.
    pub(super) checks: Vec<usize>,
    /// For every caller the plan and the index of its last entry, which the next check joins if it asks the same.
    open: HashMap<Key, (usize, usize)>,
}

/// What is asked, of whoever asks it.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) policies: Policies,
    pub(super) mode: Mode,
    pub(super) cost: u32,
    pub(super) with_id: bool,
    /// Within how many microseconds a take ahead has to be due.
    pub(super) within: i64,
    /// The charge of which a part is refunded, if it is not of just now.
    pub(super) charged: EachCharged,
}

/// What a plan is found by, instead of a search through all of them. Two lists of policies could by chance share an
/// identity: so [`Plan::asks`] has the last word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PlanKey {
    identity: u64,
    mode: Mode,
    cost: u32,
    with_id: bool,
    within: i64,
    age: i64,
}

/// Checks of one caller that ask the same.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) struct Entry {
    pub(super) plan: usize,
    pub(super) times: i64,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        let Self { keys, ends, plans, plan_of, entries, checks, open } = self;
        keys.clear();
        ends.clear();
        plans.clear();
        plan_of.clear();
        entries.clear();
        checks.clear();
        open.clear();
    }

    pub(super) fn push(&mut self, prefix: &str, check: &Check) {
        let plan = self.plan(check);
        let entry = self.entries.len();
        let joins = matches!(check.mode(), Mode::Take | Mode::Refund | Mode::Renew | Mode::Hold);
        if joins && check.id().is_none() {
            let open = self.open.entry(*check.key()).or_insert((plan, entry));
            if open.0 != plan {
                *open = (plan, entry);
            }
            if open.1 != entry {
                self.entries[open.1].times += 1;
                self.checks.push(open.1);
                return;
            }
        } else {
            self.open.remove(check.key());
        }
        self.entries.push(Entry { plan, times: 1 });
        self.checks.push(entry);
        self.push_keys(prefix, check);
    }

    /// The index of the plan that asks what the check does; made if there is none.
    fn plan(&mut self, check: &Check) -> usize {
        // Mostly all checks ask the same.
        if self.plans.last().is_some_and(|plan| plan.asks(check)) {
            return self.plans.len() - 1;
        }
        let key = PlanKey::of(check);
        if let Some(&index) = self.plan_of.get(&key)
            && self.plans[index].asks(check)
        {
            return index;
        }
        let index = self.plans.len();
        self.plans.push(Plan {
            policies: check.policies().clone(),
            mode: check.mode(),
            cost: check.cost(),
            with_id: check.id().is_some(),
            within: check.within(),
            charged: check.charged().into(),
        });
        self.plan_of.insert(key, index);
        index
    }
}

impl Plan {
    fn asks(&self, check: &Check) -> bool {
        self.policies.is(check.policies())
            && self.mode == check.mode()
            && self.cost == check.cost()
            && self.with_id == check.id().is_some()
            && self.within == check.within()
            && self.charged[..] == *check.charged()
    }
}

impl PlanKey {
    fn of(check: &Check) -> Self {
        Self {
            identity: check.policies().identity(),
            mode: check.mode(),
            cost: check.cost(),
            with_id: check.id().is_some(),
            within: check.within(),
            age: check.charged_under(0).age,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Policy, Quota, Strategy};

    fn policies(limit: u32) -> Policies {
        Policy::new("api", Strategy::Gcra, Quota::per_second(limit)).unwrap().into()
    }

    #[test]
    fn a_list_has_one_plan_among_a_thousand() {
        let lists: Vec<Policies> = (1..=1_000).map(policies).collect();
        let mut batch = Batch::default();
        for _ in 0..2 {
            batch.clear();
            for round in 0..3 {
                for (i, list) in lists.iter().enumerate() {
                    // A copy is of the same policies in memory.
                    let list = if round == 0 { list.clone() } else { list.copy() };
                    batch.push("rl", &Check::take(Key::new(format!("{round}-{i}")), &list, 1));
                }
            }
            assert_eq!(batch.plans.len(), lists.len());
            assert!(batch.plans.iter().zip(&lists).all(|(plan, list)| plan.policies.is(list)));
            let plans = batch.entries.iter().map(|entry| entry.plan);
            assert!(plans.eq((0..3).flat_map(|_| 0..lists.len())));
        }
    }

    #[test]
    fn modes_costs_and_ids_have_plans_of_their_own() {
        let list = policies(10);
        let take = |cost| Check::take(Key::GLOBAL, &list, cost);
        let mut batch = Batch::default();
        for check in [take(1), take(2), take(1).with_id("a"), Check::peek(Key::GLOBAL, &list, 1), take(1)] {
            batch.push("rl", &check);
        }
        let plans: Vec<usize> = batch.entries.iter().map(|entry| entry.plan).collect();
        assert_eq!(plans, [0, 1, 2, 3, 0]);
    }

    #[test]
    fn lists_of_one_identity_stay_apart() {
        let (one, two, three) = (policies(1), policies(2), policies(3));
        let take = |list| Check::take(Key::GLOBAL, list, 1);
        let mut batch = Batch::default();
        batch.push("rl", &take(&one));
        batch.push("rl", &take(&two));
        // As if the third had the identity of the first.
        batch.plan_of.insert(PlanKey::of(&take(&three)), 0);
        for list in [&three, &one, &two, &three] {
            batch.push("rl", &take(list));
            let entry = batch.entries[batch.checks[batch.checks.len() - 1]];
            assert!(batch.plans[entry.plan].policies.is(list));
        }
    }
}
