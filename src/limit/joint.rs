//! Checks over several keys, which are allowed together or not at all.

use std::time::Instant;

use smallvec::SmallVec;

use super::{Charge, Check, Decision, Extra, Key, MadeBy, Mode, Policies, Source, Verdicts};
use crate::error::ConfigError;

/// One request over several keys, such as a user, its organization and the whole service: each part takes the same cost
/// of one caller under its policies, and either all of them are charged or none.
///
/// ```
/// use tower_redis_ratelimit::check::JointCheck;
/// use tower_redis_ratelimit::store::Store;
/// use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Strategy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let per_user = Policies::from(Policy::new("user", Strategy::Gcra, "10/h")?);
/// let per_org = Policies::from(Policy::new("org", Strategy::Gcra, "15/h")?);
/// let store = LocalStore::default();
/// let take = |user| JointCheck::take([(Key::new(user), &per_user), (Key::new("acme"), &per_org)], 10);
///
/// assert!(store.check_all(take("ann")?).await?.decision().is_allowed());
/// let denied = store.check_all(take("bob")?).await?.into_decision();
/// assert_eq!((denied.is_allowed(), denied.policy().name()), (false, "org"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct JointCheck {
    /// Takes without an id, of one cost and with one slot.
    parts: SmallVec<[Check; 2]>,
    /// The policies of all parts, in order.
    policies: Policies,
    id: Option<Key>,
}

/// The decision on a [`JointCheck`], and that of each part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JointDecision {
    whole: Decision,
    /// `None` for a part that was not decided.
    parts: Vec<Option<Decision>>,
}

/// The callers of a check under the policies of several. The check's key identifies them together.
#[derive(Debug, Clone)]
pub(crate) struct Joint {
    callers: SmallVec<[JointCaller; 2]>,
    pub(super) id: Option<Key>,
}

#[derive(Debug, Clone)]
struct JointCaller {
    key: Key,
    policies: Policies,
}

impl JointCheck {
    /// Maximum number of keys in one check.
    pub const MAX_KEYS: usize = 4;

    /// Takes `cost` of each of these keys under its policies, all or nothing: see [`Check::take`]. A key may occur in
    /// several parts.
    ///
    /// # Errors
    ///
    /// Returns an error for no key, for more than [`MAX_KEYS`](Self::MAX_KEYS), for more than [`Policies::MAX`] policies
    /// in all, and for two policies of the same name.
    pub fn take<'a>(
        parts: impl IntoIterator<Item = (Key, &'a Policies)>,
        cost: u32,
    ) -> Result<Self, ConfigError> {
        let mut checks = SmallVec::<[Check; 2]>::new();
        for (key, policies) in parts {
            checks.push(Check::take(key, policies, cost));
        }
        if checks.is_empty() {
            return Err(ConfigError::new(
                "a check over several keys has no key: add at least one key with its policies",
            ));
        }
        if checks.len() > Self::MAX_KEYS {
            let text = format!(
                "{} keys for one check: use at most {}",
                checks.len(),
                Self::MAX_KEYS
            );
            return Err(ConfigError::new(text));
        }
        let slot = checks.iter().find_map(Check::slot);
        let policies = Policies::joined(&lists_of(&checks))?;
        for check in &mut checks {
            check.share_slot(slot);
        }
        Ok(Self {
            parts: checks,
            policies,
            id: None,
        })
    }

    /// Adds an id, so that a repeated request is charged once: see [`Check::with_id`]. It is one id for all keys: the
    /// request is repeated only if each part knows it. If the parts are in several partitions of a Redis Cluster, and in
    /// a custom store, the id is stored after the decision, and costs another round trip before it.
    #[must_use]
    pub fn with_id(self, id: impl AsRef<[u8]>) -> Self {
        self.with_key_as_id(Some(Key::new(id)))
    }

    pub(crate) fn with_key_as_id(self, id: Option<Key>) -> Self {
        Self {
            // A repeated request would have no slot.
            id: id.filter(|_| self.policies.in_flight().is_none()),
            ..self
        }
    }

    /// Returns the check of each key, in order, without the [id](Self::id).
    pub fn parts(&self) -> &[Check] {
        &self.parts
    }

    /// Returns the policies of all parts, in order.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Returns the cost that each part takes.
    pub fn cost(&self) -> u32 {
        self.first().cost()
    }

    /// Returns the [id](Self::with_id).
    pub fn id(&self) -> Option<&Key> {
        self.id.as_ref()
    }

    /// Creates the decision from the decision on each part, for your own [`Store`](crate::store::Store) that has charged all
    /// parts or none. It allows the request if all parts do.
    pub fn decided(&self, decide: impl FnMut(&Check) -> Decision) -> JointDecision {
        self.combine(self.parts.iter().map(decide).map(Some).collect())
    }

    /// Returns the check of the first key.
    pub(crate) fn first(&self) -> &Check {
        &self.parts[0]
    }

    /// Returns the parts with the id, as questions whether each knows it: they charge nothing.
    pub(crate) fn questions(&self) -> Option<SmallVec<[Check; 2]>> {
        let id = self.id?;
        let mut questions = SmallVec::new();
        for part in &self.parts {
            let question = part.clone().with_mode(Mode::Peek);
            questions.push(question.with_extra(Extra::Id(id)));
        }
        Some(questions)
    }

    /// Returns the checks that store the id of a granted request in each part.
    pub(crate) fn records(&self) -> SmallVec<[Check; 2]> {
        let mut records = SmallVec::new();
        if let Some(id) = self.id {
            for part in &self.parts {
                let record = Check::charge(*part.key(), part.policies(), 0);
                records.push(record.with_extra(Extra::Recorded(id, part.cost())));
            }
        }
        records
    }

    /// Marks all parts as limited in time by their sender.
    pub(crate) fn timed(mut self) -> Self {
        for part in &mut self.parts {
            part.sending_mut().sender_limits_time = true;
        }
        self
    }

    /// Returns one check under the policies of all parts, for a store that decides them in one step.
    pub(crate) fn as_one(&self) -> Check {
        if let [only] = self.parts.as_slice() {
            return match self.id {
                Some(id) => only.clone().with_extra(Extra::Id(id)),
                None => only.clone(),
            };
        }
        let mut callers = SmallVec::new();
        let mut keys = SmallVec::<[Key; 4]>::new();
        for part in &self.parts {
            let key = *part.key();
            keys.push(key);
            callers.push(JointCaller {
                key,
                policies: part.policies().clone(),
            });
        }
        // So that it differs from the key of a caller by a tuple.
        keys.push(Key::JOINT);
        let joint = Joint {
            callers,
            id: self.id,
        };
        let slot = self.parts.iter().find_map(Check::slot);
        let first = self.first().clone();
        first.jointly(Key::tuple(&keys), self.policies.clone(), slot, joint)
    }

    /// Splits the decision on [`as_one`](Self::as_one).
    pub(crate) fn split(&self, whole: Decision) -> JointDecision {
        if self.parts.len() == 1 {
            return JointDecision {
                parts: vec![Some(whole.clone())],
                whole,
            };
        }
        let mut parts = Vec::with_capacity(self.parts.len());
        let mut first = 0;
        for part in &self.parts {
            let verdicts = whole.verdicts().part(first, part.policies());
            first += part.policies().len();
            let decision = part.clone().answer(verdicts, whole.source());
            parts.push(Some(decision.with_maker(whole.made_by())));
        }
        JointDecision {
            whole: whole.with_maker(MadeBy::Several),
            parts,
        }
    }

    /// Combines the decisions on the parts; at least one is `Some`. The result allows the request if all parts do.
    pub(crate) fn combine(&self, parts: Vec<Option<Decision>>) -> JointDecision {
        let whole = self.whole_of(&parts);
        JointDecision { whole, parts }
    }

    fn whole_of(&self, parts: &[Option<Decision>]) -> Decision {
        let mut decided = parts.iter().flatten();
        if let (Some(only), None) = (decided.next(), decided.next()) {
            return if self.parts.len() == 1 {
                only.clone()
            } else {
                only.clone().with_maker(MadeBy::Several)
            };
        }
        let mut lists = SmallVec::<[&Policies; 2]>::new();
        let mut all = Verdicts::new(0, SmallVec::new());
        all.age = i64::MAX;
        let mut calendar_micros = None;
        let mut is_local = false;
        for decision in parts.iter().flatten() {
            let verdicts = decision.verdicts();
            lists.push(decision.policies());
            all.each.extend(verdicts.each.iter().copied());
            all.granted = all.granted.max(verdicts.granted);
            all.at = all.at.max(verdicts.at);
            all.age = all.age.min(verdicts.age);
            calendar_micros = calendar_micros.max(verdicts.calendar_micros());
            is_local |= decision.source() == Source::Local;
        }
        if let Some(micros) = calendar_micros {
            all.ahead = micros - all.at - all.age;
        }
        if !all.is_allowed() {
            all.granted = 0;
        }
        let source = if is_local {
            Source::Local
        } else {
            source_of(parts, all.decider())
        };
        // A custom store may have decided on other policies than requested.
        let policies = Policies::joined(&lists).unwrap_or_else(|_| self.policies.clone());
        Decision::new(policies, all, source).with_maker(MadeBy::Several)
    }
}

fn lists_of(checks: &[Check]) -> SmallVec<[&Policies; 2]> {
    checks.iter().map(Check::policies).collect()
}

/// Returns the source of the decision under the n-th policy of all parts.
fn source_of(parts: &[Option<Decision>], policy: usize) -> Source {
    let mut end = 0;
    let mut source = Source::Local;
    for decision in parts.iter().flatten() {
        source = decision.source();
        end += decision.policies().len();
        if policy < end {
            break;
        }
    }
    source
}

impl JointDecision {
    /// Returns the decision on all parts together. It lists the policies of all parts, in order. Its
    /// [deciding policy](Decision::policy) denies with the longest wait, or has the least remaining. A denial from
    /// memory lists only the policies of the denying keys.
    ///
    /// It has no [refund](Decision::refund): refund the decision of each [part](Self::parts).
    pub fn decision(&self) -> &Decision {
        &self.whole
    }

    /// Returns the [decision](Self::decision) by value.
    pub fn into_decision(self) -> Decision {
        self.whole
    }

    /// Returns the decision on each part, in order. If the whole is a denial, a part may allow the request, but nothing
    /// of it is charged. `None` for a part that was not decided.
    pub fn parts(&self) -> &[Option<Decision>] {
        &self.parts
    }

    /// Returns the charge of each part that has policies of costs, of a check that was sent at `sent_at`. The decision,
    /// which has arrived at `now`, allows the request, and repeats no earlier one.
    pub(crate) fn charges(
        &self,
        check: &JointCheck,
        sent_at: impl Into<Instant>,
        now: impl Into<Instant>,
    ) -> SmallVec<[Charge; 1]> {
        let sent_at = sent_at.into();
        let now = now.into();
        let mut charges = SmallVec::new();
        for (part, decision) in check.parts.iter().zip(&self.parts) {
            if let Some(decision) = decision
                && part.policies().without_in_flight().is_some()
            {
                let decision = decision.clone();
                charges.push(Charge::new(
                    *part.key(),
                    decision,
                    part.cost(),
                    sent_at,
                    now,
                ));
            }
        }
        charges
    }

    /// Returns the key of the deciding policy.
    pub(crate) fn decider<'a>(&self, check: &'a JointCheck) -> &'a Key {
        let mut end = 0;
        for (part, decision) in check.parts.iter().zip(&self.parts) {
            let Some(decision) = decision else {
                continue;
            };
            end += decision.policies().len();
            if self.whole.decider() < end {
                return part.key();
            }
        }
        check.first().key()
    }
}

impl Joint {
    /// Iterates over the keys of the policies, one for each.
    pub(crate) fn key_of_each(&self) -> impl Iterator<Item = &Key> {
        self.callers
            .iter()
            .flat_map(|caller| caller.policies.iter().map(|_| &caller.key))
    }

    /// Iterates over the keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key> + Clone {
        self.callers.iter().map(|caller| &caller.key)
    }

    /// Returns how the policies are divided among the callers, as a number that is 0 for no other division.
    pub(crate) fn division(&self) -> u32 {
        let mut division = 0;
        for caller in &self.callers {
            // At most `Policies::MAX` for each of `JointCheck::MAX_KEYS` callers.
            division = division << 8 | caller.policies.len() as u32;
        }
        division
    }

    /// Splits a check and its verdicts by key.
    pub(crate) fn each(&self, check: &Check, verdicts: &Verdicts) -> Vec<(Check, Verdicts)> {
        let mut each = Vec::with_capacity(self.callers.len());
        let mut first = 0;
        for JointCaller { key, policies } in &self.callers {
            let part = Check::take(*key, policies, check.cost());
            each.push((part, verdicts.part(first, policies)));
            first += policies.len();
        }
        each
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Policy, Strategy, Verdict};

    fn list(name: &str) -> Policies {
        Policy::new(name, Strategy::Gcra, "9/h").unwrap().into()
    }

    #[test]
    fn one_check_is_of_all_callers() {
        let lists = ["user", "org"].map(list);
        let keys = ["ann", "acme"].map(Key::new);
        let joint = JointCheck::take(keys.into_iter().zip(&lists), 2).unwrap();
        let one = joint.with_id("1").as_one();
        for key in &keys {
            assert!(one.is_of_any(|caller| caller == key));
        }
        assert!(!one.is_of_any(|caller| *caller == Key::new("bob")));
        assert_eq!((one.id(), one.policies().len()), (Some(&Key::new("1")), 2));
        let joint = one.joint().unwrap();
        assert!(joint.key_of_each().eq(&keys));
    }

    /// The decision on all keys names the policy that denies with the longest wait.
    #[test]
    fn a_custom_store_may_decide_all_keys() {
        let lists = ["user", "org", "all"].map(list);
        let keys = [Key::new("ann"), Key::new("acme"), Key::GLOBAL];
        let joint = JointCheck::take(keys.into_iter().zip(&lists), 2).unwrap();
        let decide = |waits: [u64; 3]| {
            let mut waits = waits.into_iter();
            joint.decided(|part| {
                let verdict = match waits.next() {
                    Some(0) | None => Verdict::allowed(),
                    Some(wait) => Verdict::denied(std::time::Duration::from_secs(wait)),
                };
                part.decided(Source::Other("own"), 2, |_| verdict)
            })
        };
        let allowed = decide([0, 0, 0]);
        assert_eq!(allowed.decision().granted(), 2);
        assert!(
            allowed
                .decision()
                .refund(keys[0], 2, Default::default())
                .is_none()
        );
        let denied = decide([5, 9, 0]);
        assert_eq!(denied.decision().policy().name(), "org");
        assert_eq!(
            (denied.decision().granted(), denied.decider(&joint)),
            (0, &keys[1])
        );
    }
}
