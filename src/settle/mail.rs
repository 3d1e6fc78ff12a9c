use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use crate::limit::{Check, Decision, Key, Policies};
use crate::store::{Error, instant};

/// What is to be done in a store, and who is told of it.
pub(crate) struct Mail {
    what: What,
    then: Option<Then>,
    pub(super) put_at: Instant,
    /// How often the store has not sent it.
    pub(super) tries: u32,
}

/// Is told what came of it.
type Then = Box<dyn FnOnce(Result<Decision, Error>) + Send>;

enum What {
    Check(Check),
    /// What a policy still counts of it depends on how long ago it was charged: the checks are made when they are sent.
    GiveBack(Box<GiveBack>),
}

#[derive(Clone)]
struct GiveBack {
    decision: Decision,
    key: Key,
    cost: u32,
    since: Instant,
    /// Under which of the decision's policies.
    policies: Policies,
}

impl Mail {
    /// Asks this check.
    pub(super) fn of_check(check: Check, then: Option<Then>) -> Self {
        Self { what: What::Check(check), then, put_at: instant(), tries: 0 }
    }

    /// Charges without asking.
    pub(crate) fn charge(key: Key, policies: &Policies, cost: u32) -> Self {
        Self::of_check(Check::charge(key, policies, cost), None)
    }

    /// Gives back `cost` of what this decision has granted to a caller, who asked at the time `since`.
    pub(crate) fn give_back(decision: Decision, key: Key, cost: u32, since: Instant) -> Self {
        let policies = decision.policies().clone();
        let what = What::GiveBack(Box::new(GiveBack { decision, key, cost, since, policies }));
        Self { what, then: None, put_at: instant(), tries: 0 }
    }

    /// Whose mail it is.
    pub(super) fn key(&self) -> &Key {
        match &self.what {
            What::Check(check) => check.key(),
            What::GiveBack(back) => &back.key,
        }
    }

    /// Whether it still matters: nothing is left of a charge after the longest period of its policies.
    pub(super) fn matters(&self, now: Instant) -> bool {
        let policies = match &self.what {
            What::Check(check) => check.policies(),
            What::GiveBack(back) => &back.policies,
        };
        let age = now.saturating_duration_since(self.put_at);
        i64::try_from(age.as_micros()).is_ok_and(|age| age < policies.longest_period())
    }

    /// What to ask for now, mostly one check, each with the mail to try that again.
    pub(super) fn attempts(self, now: Instant) -> SmallVec<[(Check, Self); 1]> {
        match self.what {
            What::Check(ref check) => smallvec![(check.clone(), self)],
            What::GiveBack(back) => {
                let (put_at, tries) = (self.put_at, self.tries);
                let attempt = |check: Check| {
                    let policies = check.policies().clone();
                    let what = What::GiveBack(Box::new(GiveBack { policies, ..(*back).clone() }));
                    (check, Self { what, then: None, put_at, tries })
                };
                back.checks(now).into_iter().map(attempt).collect()
            }
        }
    }

    /// Tells what came of it.
    pub(super) fn tell(self, answer: Result<Decision, Error>) {
        if let Some(then) = self.then {
            then(answer);
        }
    }
}

impl GiveBack {
    /// One check, or several where the policies differ in what they still count.
    fn checks(&self, now: Instant) -> SmallVec<[Check; 1]> {
        let age = now.saturating_duration_since(self.since);
        let checks = give_back(&self.decision, self.key, self.cost, age);
        checks.into_iter().filter_map(|check| self.narrow(check)).collect()
    }

    /// The same check under the policies that are still to be given back to.
    fn narrow(&self, check: Check) -> Option<Check> {
        if check.policies().is(&self.policies) || self.policies.is(self.decision.policies()) {
            return Some(check);
        }
        let names: SmallVec<[&str; 4]> = self.policies.iter().map(|policy| policy.name()).collect();
        let left = check.policies().iter().filter(|policy| names.contains(&policy.name())).cloned();
        let left = Policies::new(left).ok()?;
        Some(check.under(left))
    }
}

/// The checks that give back what was granted so long ago.
fn give_back(decision: &Decision, key: Key, cost: u32, _age: Duration) -> Option<Check> {
    (cost > 0).then(|| Check::give_back(key, decision.policies(), cost))
}
