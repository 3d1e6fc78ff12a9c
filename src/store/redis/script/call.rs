//! Encodes checks as the arguments of one script call, and decodes its reply into their verdicts.

use std::collections::HashMap;

use redis::{Cmd, Value};
use smallvec::SmallVec;

use super::count;
use super::{CHECK, Call, Script, TAKE, TAKES, no_command, wire};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{
    Check, EachCharge, Extra, Joint, Key, Mode, Policies, Policy, PolicyCharge, SlotId, State,
    Verdict, Verdicts, Writer, longest_period,
};
use crate::store::probe;

/// A batch of checks as one script call. Checks with the same parameters share a plan. Equal checks of one caller share
/// an entry.
#[derive(Debug, Default)]
pub(crate) struct ScriptCall {
    /// The keys of each entry: `prefix:{caller}` with each policy's `:name:strategy:span`, of one or several callers. For a check with an id,
    /// these are preceded by one key of `prefix:{caller}`, all of those suffixes, and `:id`, or `::id` after a suffix without
    /// a span.
    keys: Vec<u8>,
    /// End of each key in `keys`.
    ends: Vec<usize>,
    pub(super) plans: Vec<Plan>,
    pub(super) entries: Vec<Entry>,
    /// The place of each check, in the order of the pushes.
    pub(super) checks: Vec<CheckPlace>,
    /// The slots that checks take, renew or release, with the index of the entry.
    slots: Vec<(usize, SlotId)>,
    /// Whether a caller has entries of several plans.
    has_several_of_a_caller: bool,
    /// Index of the plan for these parameters, except the last plan, so that plans need no linear search.
    pub(super) plan_of: HashMap<PlanKey, usize>,
    /// Index of each caller's last entry. The next check joins that entry if its plan is the same.
    last_entry: HashMap<Key, usize>,
    /// The time that tests set, or 0 for Redis's own time.
    pub(crate) now: i64,
    /// An estimate of Redis's time, for the borders of calendars.
    pub(crate) clock: i64,
    /// Whether `ASKING` precedes the call, because the node imports the slot.
    pub(crate) needs_asking: bool,
}

/// The parameters of a check without its caller; entries of many callers share them.
#[derive(Debug)]
pub(super) struct Plan {
    key: PlanKey,
    pub(super) policies: Policies,
    /// For a refund, the refunded charge under each policy; empty for a charge made just before.
    charged: EachCharge,
}

/// The parameters of a plan that are cheap to compare. Two lists of policies may share an id by chance, so
/// [`Plan::matches`] compares the policies too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    list: u64,
    mode: Mode,
    cost: u32,
    with_id: bool,
    /// Maximum time in microseconds until a take ahead is due.
    within: i64,
    age: i64,
    /// The cost that a repetition is granted, if the check only records an id.
    recorded: Option<u32>,
    /// How the policies are divided among several callers: 0 for one caller.
    division: u32,
}

/// Checks of one caller under one plan, repeated `times`.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) struct Entry {
    pub(super) plan: usize,
    times: i64,
}

/// Where a check is in a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct CheckPlace {
    /// Index of its entry.
    pub(super) entry: usize,
    /// Number of the entry's checks before it.
    earlier: i64,
}

/// Returns the charge that a refund returns, under each policy; empty for a charge made just before.
fn charged(check: &Check) -> &[PolicyCharge] {
    match check.extra() {
        Some(Extra::Charged(charged)) => charged,
        _ => &[],
    }
}

impl PlanKey {
    pub(super) fn of(check: &Check) -> Self {
        Self {
            list: check.policies().id(),
            mode: check.mode(),
            cost: check.cost(),
            with_id: check.id().is_some(),
            within: check.within(),
            age: charged(check).first().map_or(0, |charge| charge.age),
            recorded: match check.extra() {
                Some(Extra::Recorded(_, granted)) => Some(*granted),
                _ => None,
            },
            division: check.joint().map_or(0, Joint::division),
        }
    }
}

impl Plan {
    fn new(key: PlanKey, check: &Check) -> Self {
        Self {
            key,
            policies: check.policies().clone(),
            charged: EachCharge::from_slice(charged(check)),
        }
    }

    fn matches(&self, key: PlanKey, check: &Check) -> bool {
        self.key == key && self.policies == *check.policies() && self.charged[..] == *charged(check)
    }

    /// The policy, if the check is a take without an id under one meter that drains every microsecond.
    fn taken_from_meter(&self) -> Option<&Policy> {
        let is_take = self.key.mode == Mode::Take && !self.key.with_id;
        match self.policies.as_slice() {
            [policy] if is_take && policy.frees().is_gradual() => Some(policy),
            _ => None,
        }
    }

    /// Adds the arguments of `lua/take.lua`.
    fn add_take(&self, meter: &Policy, cmd: &mut Cmd, now: i64) {
        let params = meter.params();
        Packed::default()
            .f64(params.full)
            .f64(params.ticks_of_take(self.key.cost))
            .f64(params.ticks)
            .writer(meter)
            .add_to(cmd);
        if now != 0 {
            cmd.arg(now);
        }
    }

    /// Packs the plan for `lua/call.lua`. Its policies are counted from `first`.
    fn pack(&self, first: usize, packed: &mut Packed) {
        match self.key.recorded {
            Some(granted) => packed.u8(wire::RECORD as u8).u32(granted as usize),
            None => packed
                .u8(wire::mode_number(self.key.mode))
                .u32(self.key.cost as usize),
        };
        packed.i56(self.number());
        let count = self.policies.iter().len();
        for place in first..first + count {
            packed.u32(place);
        }
        if self.key.mode == Mode::Refund {
            let charge = self.charged_under(0);
            packed
                .u32(charge.cost as usize)
                .i56(charge.age)
                .i56(charge.at.micros());
            for policy in 0..count {
                packed.i56(self.charged_under(policy).reset);
            }
        }
    }

    /// The number after the cost. `lua/call.lua` describes it.
    fn number(&self) -> i64 {
        if self.key.with_id {
            return longest_period(&self.policies);
        }
        match self.key.mode {
            Mode::Refund if self.charged_under(0).is_turn => -1,
            Mode::Refund => 0,
            Mode::Charge => -self.key.within,
            _ => self.key.within,
        }
    }

    /// The charge that a refund returns, under the n-th policy.
    fn charged_under(&self, policy: usize) -> PolicyCharge {
        match self.charged.get(policy) {
            Some(charge) => *charge,
            None => PolicyCharge::just_now(self.key.cost.into()),
        }
    }

    /// Decodes an answer of `lua/takes.lua` to an entry of `times` takes: the verdict on the take that follows `earlier`
    /// others. The answer has the level of the meter, from which the Rust half decides as the script did.
    ///
    /// # Errors
    ///
    /// Returns the reason why Redis did not decide the entry, or [`ErrorKind::Protocol`] for numbers that the script
    /// never returns.
    fn read_take(
        &self,
        answer: &[u8; TAKEN_LENGTH],
        of_writers: &[[u8; TAKEN_LENGTH]],
        times: i64,
        earlier: i64,
    ) -> Result<Verdicts, StoreError> {
        let at = i56(&answer[..7]);
        let level = i56(&answer[7..14]);
        if at < 0 {
            return Err(failure(at));
        }
        let Some(policy) = self.taken_from_meter() else {
            return Err(protocol());
        };
        let params = policy.params();
        let ticks = params.ticks_of_take(self.key.cost);
        // A level after the take, if that is the only one and was charged. Otherwise -1 minus the level before the first.
        let was_charged = level >= 0;
        let before_first = if was_charged {
            level - ticks
        } else {
            -1 - level
        };
        let fits = ticks > 0 && before_first + ticks <= params.full;
        let is_only_grant = fits && times == 1;
        let is_exact = EXACT.contains(&at) && EXACT.contains(&before_first);
        if !is_exact || was_charged != is_only_grant {
            return Err(protocol());
        }
        if let Some(number) = number_of(answer) {
            let of_writer = of_writers.get(number - 1).ok_or_else(protocol)?;
            let is_allowed = before_first + ticks <= params.full;
            let verdict = self.read_times(policy, of_writer, before_first, is_allowed)?;
            return Ok(Verdicts {
                at,
                ..Verdicts::of_one(0, verdict)
            });
        }
        let take = State::replay_take(policy, at, before_first, self.key.cost, earlier);
        let (verdict, granted) = take.ok_or_else(protocol)?;
        Ok(Verdicts {
            at,
            ..Verdicts::of_one(granted, verdict)
        })
    }

    /// Decodes the verdict on a take that charged nothing, while another quota drains the level.
    fn read_times(
        &self,
        policy: &Policy,
        times: &[u8; TAKEN_LENGTH],
        level: i64,
        is_allowed: bool,
    ) -> Result<Verdict, StoreError> {
        let params = policy.params();
        let (wait, reset) = (i56(&times[..7]), i56(&times[7..14]));
        let is_too_large = i64::from(self.key.cost) > params.capacity;
        // Only a take of nothing is allowed and charges nothing.
        let is_consistent = is_allowed == (wait == 0) || is_too_large;
        if !EXACT.contains(&wait) || !EXACT.contains(&reset) || !is_consistent {
            return Err(protocol());
        }
        Ok(Verdict {
            remaining: ((params.full - level) / params.interval).max(0),
            wait: if is_too_large { Verdict::NEVER } else { wait },
            reset,
        })
    }

    /// Numbers in an answer of `lua/check.lua`: four for each policy, and the time of the charge for an answer that may
    /// repeat an earlier one.
    fn answer_length(&self) -> usize {
        4 * self.policies.iter().len() + usize::from(self.key.with_id)
    }

    /// Decodes an answer of `lua/check.lua`: four numbers for each policy and, with an id, the time of the charge. `at` is
    /// the time of the call.
    ///
    /// # Errors
    ///
    /// Returns the reason why Redis did not decide this check, or [`ErrorKind::Protocol`] for numbers that the script never
    /// returns.
    fn read_check(&self, answer: &[[u8; 8]], at: i64) -> Result<Verdicts, StoreError> {
        let (of_policies, rest) = answer.as_chunks();
        let charged_at = match rest {
            [charged_at] => i64::from_le_bytes(*charged_at),
            _ => at,
        };
        if !EXACT.contains(&charged_at) {
            return Err(protocol());
        }
        // The lowest number is the most specific problem.
        let mut problem = 0;
        for numbers in of_policies {
            problem = problem.min(i64::from_le_bytes(numbers[0]));
        }
        if problem < 0 {
            return Err(failure(problem));
        }
        let most = self.max_granted();
        let is_of_slots = self.policies.without_in_flight().is_none();
        let mut granted = 0;
        let mut each = SmallVec::new();
        for (numbers, policy) in of_policies.iter().zip(&self.policies) {
            let [grants, remaining, wait, reset] = numbers.map(i64::from_le_bytes);
            let is_wait = wait == Verdict::NEVER || EXACT.contains(&wait);
            let is_exact = EXACT.contains(&remaining) && is_wait && EXACT.contains(&reset);
            if grants > most || !is_exact {
                return Err(protocol());
            }
            // Together with other policies, one of requests in flight grants one request, not a cost.
            if is_of_slots || !policy.is_in_flight() {
                granted = granted.max(grants);
            }
            each.push(Verdict {
                remaining,
                wait,
                reset,
            });
        }
        Ok(Verdicts {
            granted,
            at: charged_at,
            ahead: 0,
            age: (at - charged_at).max(0),
            each,
        })
    }

    /// Maximum grant that a reply may report for one policy.
    fn max_granted(&self) -> i64 {
        match self.key.mode {
            // A repeated id returns its earlier answer, which may be of another cost.
            _ if self.key.with_id => u32::MAX.into(),
            // A request in flight is granted as 1, regardless of its cost.
            Mode::Take
            | Mode::TakeAhead
            | Mode::UpTo
            | Mode::Peek
            | Mode::Charge
            | Mode::Refund => i64::from(self.key.cost).max(1),
            Mode::Renew | Mode::Release => 1,
            // Returns the sum of earlier charges, or the number of requests in flight.
            Mode::Reset => EXACT.end,
        }
    }
}

impl ScriptCall {
    pub(crate) fn clear(&mut self) {
        // By name, so that a new field cannot be left out: it would reach the next call.
        let Self {
            keys,
            ends,
            plans,
            entries,
            checks,
            slots,
            has_several_of_a_caller,
            plan_of,
            last_entry,
            now,
            clock,
            needs_asking,
        } = self;
        keys.clear();
        ends.clear();
        plans.clear();
        entries.clear();
        checks.clear();
        slots.clear();
        *has_several_of_a_caller = false;
        plan_of.clear();
        last_entry.clear();
        *now = 0;
        *clock = 0;
        *needs_asking = false;
    }

    /// Adds the only check of a call.
    pub(crate) fn push_only(&mut self, prefix: &str, check: &Check) {
        let plan = self.plan(check);
        self.push_entry(plan, prefix, check);
    }

    /// Adds a check.
    pub(crate) fn push(&mut self, prefix: &str, check: &Check) {
        let plan = self.plan(check);
        let entry = self.entries.len();
        // The script decides equal checks one after the other. So no key occurs twice in a run of takes.
        let joins = matches!(
            check.mode(),
            Mode::Take | Mode::Refund | Mode::Renew | Mode::Release
        );
        if let Some(joint) = check.joint() {
            match self.last_joint_entry(check, joint) {
                Some(same) if joins && check.id().is_none() && self.entries[same].plan == plan => {
                    return self.repeat(same, check);
                }
                _ => self.set_last_joint_entry(check, joint, entry),
            }
        } else if joins && check.id().is_none() {
            let last = self.last_entry.entry(*check.key()).or_insert(entry);
            match self.entries.get(*last) {
                Some(same) if same.plan == plan => {
                    let same = *last;
                    return self.repeat(same, check);
                }
                Some(_) => {
                    *last = entry;
                    // `lua/takes.lua` reads all states before it decides the first entry.
                    self.has_several_of_a_caller = true;
                }
                None => {}
            }
        } else {
            // A later check that joined an earlier entry would overtake this one.
            self.last_entry.remove(check.key());
        }
        self.push_entry(plan, prefix, check);
    }

    /// Returns the last entry of the callers of a check, if it is the same for all of them, and of the same check.
    fn last_joint_entry(&self, check: &Check, joint: &Joint) -> Option<usize> {
        let last = *self.last_entry.get(check.key())?;
        let mut callers = joint.keys();
        let is_last_of_all = callers.all(|caller| self.last_entry.get(caller) == Some(&last));
        is_last_of_all.then_some(last)
    }

    /// No later check of one of the callers overtakes this entry.
    fn set_last_joint_entry(&mut self, check: &Check, joint: &Joint, entry: usize) {
        self.last_entry.insert(*check.key(), entry);
        for caller in joint.keys() {
            self.last_entry.insert(*caller, entry);
        }
    }

    /// Returns the index of the plan for this check, and creates the plan if it is new.
    fn plan(&mut self, check: &Check) -> usize {
        let key = PlanKey::of(check);
        let plans = &mut self.plans;
        // Usually all checks of a batch have the same parameters.
        if let Some(last) = plans.last()
            && last.matches(key, check)
        {
            return plans.len() - 1;
        }
        if let Some(&index) = self.plan_of.get(&key)
            && plans[index].matches(key, check)
        {
            return index;
        }
        if let Some(last) = plans.last() {
            self.plan_of.insert(last.key, plans.len() - 1);
        }
        plans.push(Plan::new(key, check));
        plans.len() - 1
    }

    /// Number of checks.
    pub(crate) fn len(&self) -> usize {
        self.checks.len()
    }

    /// The plan and its meter, if `lua/take.lua` can decide the call.
    fn one_take(&self) -> Option<(&Plan, &Policy)> {
        match self.entries.as_slice() {
            [Entry { plan, times: 1 }] => {
                let plan = &self.plans[*plan];
                Some((plan, plan.taken_from_meter()?))
            }
            _ => None,
        }
    }

    /// Returns `true` if `lua/takes.lua` can decide all entries. `lua/take.lua` gives the same answers.
    fn is_of_takes(&self) -> bool {
        let mut plans = self.plans.iter();
        !self.has_several_of_a_caller
            && self.entries.len() <= MAX_TAKES
            && plans.all(|plan| plan.taken_from_meter().is_some())
    }

    /// Adds a check with the parameters of this entry.
    fn repeat(&mut self, entry: usize, check: &Check) {
        let times = &mut self.entries[entry].times;
        self.checks.push(CheckPlace {
            entry,
            earlier: *times,
        });
        *times += 1;
        self.push_slot(entry, check);
    }

    fn push_slot(&mut self, entry: usize, check: &Check) {
        if let Some(slot) = check.slot() {
            self.slots.push((entry, slot));
        }
    }

    /// Adds a check as a new entry of this plan.
    fn push_entry(&mut self, plan: usize, prefix: &str, check: &Check) {
        let entry = self.entries.len();
        self.checks.push(CheckPlace { entry, earlier: 0 });
        self.push_slot(entry, check);
        self.entries.push(Entry { plan, times: 1 });
        if let Some(id) = check.id() {
            self.push_caller(prefix, check.key());
            for policy in check.policies().iter() {
                self.push_count(policy);
            }
            if let Some(last) = check.policies().as_slice().last()
                && last.span().is_empty()
            {
                // Without it, an id could be read as a span, and name another count.
                self.keys.push(b':');
            }
            self.keys.push(b':');
            self.keys.extend_from_slice(id.as_bytes());
            self.ends.push(self.keys.len());
        }
        let mut callers = check.joint().map(Joint::key_of_each);
        for policy in check.policies().iter() {
            let caller = callers.as_mut().and_then(Iterator::next);
            self.push_caller(prefix, caller.unwrap_or(check.key()));
            self.push_count(policy);
            self.ends.push(self.keys.len());
        }
    }

    fn push_caller(&mut self, prefix: &str, caller: &Key) {
        self.keys.extend_from_slice(prefix.as_bytes());
        if *caller == probe::KEY {
            // No braces around the probe's caller: each of its keys has a separate hash slot, so that a cluster rejects
            // the call.
            self.keys.push(b':');
            self.keys.extend_from_slice(caller.as_bytes());
        } else {
            self.keys.extend_from_slice(b":{");
            self.keys.extend_from_slice(caller.as_bytes());
            self.keys.push(b'}');
        }
    }

    /// Appends the part of a key after the caller.
    fn push_count(&mut self, policy: &Policy) {
        self.keys.push(b':');
        self.keys.extend_from_slice(policy.count().as_bytes());
    }

    /// Adds the arguments of `lua/takes.lua`.
    fn add_takes(&self, cmd: &mut Cmd) {
        let mut packed = Packed::default();
        for run in self.entries.chunk_by(|a, b| a == b) {
            let plan = &self.plans[run[0].plan];
            // Never: `is_of_takes` has found the meter of each plan.
            let Some(policy) = plan.taken_from_meter() else {
                continue;
            };
            let params = policy.params();
            packed
                .i56(self.now)
                .i56(params.full)
                .i56(params.ticks_of_take(plan.key.cost))
                .i56(params.ticks)
                .u32(run.len())
                .u32(run[0].times as usize)
                .writer(policy)
                .add_to(cmd);
        }
    }

    /// Adds the arguments of `lua/call.lua`.
    fn add_checks(&self, cmd: &mut Cmd) {
        let mut packed = Packed::default();
        packed
            .u32(self.policies().count())
            .u32(self.plans.len())
            .i56(self.now)
            .add_to(cmd);
        for policy in self.policies() {
            packed.u8(wire::kind_number(policy.kind()));
            for argument in wire::arguments(policy, self.clock) {
                packed.i56(argument);
            }
            packed.writer(policy).add_to(cmd);
        }
        let mut first = 1;
        for plan in &self.plans {
            plan.pack(first, &mut packed);
            packed.add_to(cmd);
            first += plan.policies.iter().len();
        }
        self.add_runs(cmd);
    }

    /// The policies of each plan.
    fn policies(&self) -> impl Iterator<Item = &Policy> {
        self.plans.iter().flat_map(|plan| plan.policies.iter())
    }

    /// Adds the runs of `lua/call.lua`.
    fn add_runs(&self, cmd: &mut Cmd) {
        let mut packed = Packed::default();
        // Sort by entry: a check may have joined an earlier entry of its caller.
        let mut sorted = self.slots.clone();
        sorted.sort_by_key(|(entry, _)| *entry);
        let mut slots = sorted.into_iter().peekable();
        let mut entry = 0;
        for run in self.entries.chunk_by(|a, b| a == b) {
            packed
                .u32(run[0].plan + 1)
                .u32(run.len())
                .u32(run[0].times as usize);
            entry += run.len();
            while let Some((_, slot)) = slots.next_if(|(of, _)| *of < entry) {
                packed.0.extend_from_slice(&slot.to_bytes());
            }
            packed.add_to(cmd);
        }
    }

    /// Decodes the verdicts on the checks, and passes them to `each` in the order of the pushes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`] if the reply is not a string, has the wrong length for this call, or does not end with a
    /// time. Then `each` gets nothing.
    pub(crate) fn read(
        &self,
        reply: &Value,
        each: impl FnMut(Result<Verdicts, StoreError>),
    ) -> Result<(), StoreError> {
        if self.is_of_takes() {
            self.read_takes(reply, each)
        } else {
            self.read_checks(reply, each)
        }
    }

    /// Reads a reply of `lua/takes.lua`: an answer for each entry, and then the times of the numbered answers, whose
    /// levels drain at the rate of another quota.
    fn read_takes(
        &self,
        reply: &Value,
        mut each: impl FnMut(Result<Verdicts, StoreError>),
    ) -> Result<(), StoreError> {
        let records = records(reply).ok_or_else(protocol)?;
        let (answers, of_writers) = records
            .split_at_checked(self.entries.len())
            .ok_or_else(protocol)?;
        let numbered = answers.iter().filter(|answer| number_of(answer).is_some());
        if numbered.count() != of_writers.len() {
            return Err(protocol());
        }
        for &CheckPlace { entry, earlier } in &self.checks {
            let Entry { plan, times } = self.entries[entry];
            each(self.plans[plan].read_take(&answers[entry], of_writers, times, earlier));
        }
        Ok(())
    }

    /// Reads a reply of `lua/call.lua`: the answers of each entry, and the time of the call.
    fn read_checks(
        &self,
        reply: &Value,
        mut each: impl FnMut(Result<Verdicts, StoreError>),
    ) -> Result<(), StoreError> {
        if self.outside(reply).is_some() {
            return Err(no_window());
        }
        let mut end = 0;
        let mut starts: Vec<usize> = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            starts.push(end);
            end += self.plans[entry.plan].answer_length() * entry.times as usize;
        }
        let Some([numbers @ .., at]) = records(reply) else {
            return Err(protocol());
        };
        let at = i64::from_le_bytes(*at);
        if numbers.len() != end || !EXACT.contains(&at) {
            return Err(protocol());
        }
        for &CheckPlace { entry, earlier } in &self.checks {
            let plan = &self.plans[self.entries[entry].plan];
            let length = plan.answer_length();
            let start = starts[entry] + length * earlier as usize;
            each(plan.read_check(&numbers[start..start + length], at));
        }
        Ok(())
    }

    /// Returns Redis's time if the script has decided nothing, because that is outside of the borders of a calendar.
    pub(crate) fn outside(&self, reply: &Value) -> Option<i64> {
        match records(reply) {
            Some([at]) if !self.is_of_takes() => Some(i64::from_le_bytes(*at)),
            _ => None,
        }
    }

    /// Returns `true` if the server is a replica and so rejected a check that would write.
    pub(crate) fn is_read_only(&self, reply: &Value) -> bool {
        // No other number in a reply has this value.
        if self.is_of_takes() {
            let answers = records::<TAKEN_LENGTH>(reply).unwrap_or_default();
            answers
                .iter()
                .any(|answer| i56(&answer[..7]) == wire::READ_ONLY)
        } else {
            let numbers = records(reply).unwrap_or_default();
            numbers.contains(&wire::READ_ONLY.to_le_bytes())
        }
    }
}

impl Call for ScriptCall {
    fn script(&self) -> &'static Script {
        if self.one_take().is_some() {
            &TAKE
        } else if self.is_of_takes() {
            &TAKES
        } else {
            &CHECK
        }
    }

    fn needs_asking(&self) -> bool {
        self.needs_asking
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        let mut cmd =
            Cmd::with_capacity(self.ends.len() + 16, self.keys.len() + script.len() + 256);
        cmd.arg(name).arg(script).arg(self.ends.len());
        let mut start = 0;
        for &end in &self.ends {
            cmd.arg(&self.keys[start..end]);
            start = end;
        }
        if let Some((plan, meter)) = self.one_take() {
            plan.add_take(meter, &mut cmd, self.now);
        } else if self.is_of_takes() {
            self.add_takes(&mut cmd);
        } else {
            self.add_checks(&mut cmd);
        }
        cmd
    }
}

/// Parses the part of a count's key after the prefix, as [`ScriptCall::push`] writes it, into the caller and a policy
/// with that count. Returns `None` for other keys.
pub(crate) fn read_key(rest: &str) -> Option<(Key, Policy)> {
    let (caller, count) = rest.strip_prefix(":{")?.split_once("}:")?;
    // The key of a remembered answer ends with an id, which no span contains.
    let (name, kind) = count.split_once(':')?;
    let (letter, span) = kind.split_once(':').unwrap_or((kind, ""));
    Some((Key::of_redis(caller)?, count::read(name, letter, span)?))
}

/// Returns the policy that wrote the value of a bucket. Returns `None` for a value of another form.
pub(crate) fn read_bucket(of: &Policy, value: &[u8]) -> Option<Policy> {
    let writer = value.get(TAKEN_LENGTH..)?;
    let number = |from: usize| Some(u64::from_le_bytes(*writer.get(from..)?.first_chunk()?));
    let code = number(0)?;
    let is_long = code >> 56 == 0;
    let rest = if is_long { number(8)? } else { 0 };
    count::of_writer(of, Writer { code, rest })
}

/// An argument of packed numbers, least significant byte first.
#[derive(Default)]
struct Packed(SmallVec<[u8; 56]>);

impl Packed {
    fn u8(&mut self, number: u8) -> &mut Self {
        self.0.push(number);
        self
    }

    /// Appends a count or a cost.
    fn u32(&mut self, number: usize) -> &mut Self {
        self.0.extend_from_slice(&(number as u32).to_le_bytes());
        self
    }

    /// Appends a number below 2^53, which a double represents exactly.
    fn i56(&mut self, number: i64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes()[..7]);
        self
    }

    /// Appends the bytes that name the quota of a meter in a value; none for another kind of count.
    fn writer(&mut self, policy: &Policy) -> &mut Self {
        if policy.frees().has_burst() {
            self.0.extend_from_slice(&policy.params().writer.to_bytes());
        }
        self
    }

    /// Appends a number below 2^53 as a double.
    fn f64(&mut self, number: i64) -> &mut Self {
        self.0.extend_from_slice(&(number as f64).to_le_bytes());
        self
    }

    /// Adds the argument to the command and starts the next one.
    fn add_to(&mut self, cmd: &mut Cmd) {
        cmd.arg(self.0.as_slice());
        self.0.clear();
    }
}

/// The range of the capacities, levels and times in a reply: a double represents each exactly.
const EXACT: std::ops::Range<i64> = 0..1 << 53;
/// Maximum number of entries in a call of `lua/takes.lua`: Lua passes no more than 8,000 values to a function.
const MAX_TAKES: usize = 4_000;
/// Length in bytes of an answer of `lua/takes.lua`.
const TAKEN_LENGTH: usize = 19;

/// The records of `N` bytes in a reply. `None` if the reply is not a string of whole records.
fn records<const N: usize>(reply: &Value) -> Option<&[[u8; N]]> {
    let Value::BulkString(bytes) = reply else {
        return None;
    };
    match bytes.as_chunks() {
        (records, []) => Some(records),
        _ => None,
    }
}

/// Decodes a number of 7 bytes, least significant first; 0 if there are fewer.
fn i56(bytes: &[u8]) -> i64 {
    let mut number = [0; 8];
    if let Some(high) = number.get_mut(1..=bytes.len()) {
        high.copy_from_slice(bytes);
    }
    // In the high bytes first: the shift keeps the sign.
    i64::from_le_bytes(number) >> 8
}

/// Returns the number of the times that belong to an answer, counted from 1. `None` if the take was charged.
fn number_of(answer: &[u8; TAKEN_LENGTH]) -> Option<usize> {
    if i56(&answer[7..14]) >= 0 {
        return None;
    }
    let mut number = [0; 8];
    number[..5].copy_from_slice(&answer[14..]);
    let number = usize::try_from(u64::from_le_bytes(number)).ok()?;
    (number > 0).then_some(number)
}

fn protocol() -> StoreError {
    StoreError::new(ErrorKind::Protocol)
}

/// The error of checks that the script has not decided, also with borders around its time.
fn no_window() -> StoreError {
    let error = StoreError::new(ErrorKind::Configuration).check_only();
    error.with_message(
        "a calendar has no window at the time of the server: check its clock, and that the function of a custom calendar always \
         returns the same windows",
    )
}

/// The error of a check with this problem, or [`ErrorKind::Protocol`] if the number is unknown.
fn failure(problem: i64) -> StoreError {
    match problem {
        wire::REFUSED => {
            let reason = "a command of the script failed: allow all that `RedisStore` needs, and let nobody else write its keys";
            StoreError::explained(ErrorKind::Refused, reason).check_only()
        }
        // Redis rejects the first write of a script for these reasons, so nothing was charged.
        wire::NO_WRITES => {
            let reason = "it takes no writes: let it save to disk, and have the replicas that it is configured to want";
            StoreError::explained(ErrorKind::Refused, reason).not_sent()
        }
        wire::ELSEWHERE => StoreError::new(ErrorKind::NotReady).not_sent().check_only(),
        wire::OUT_OF_MEMORY => StoreError::new(ErrorKind::OutOfMemory).not_sent(),
        wire::READ_ONLY => StoreError::new(ErrorKind::ReadOnly).not_sent(),
        wire::NO_PERMISSION => StoreError::new(ErrorKind::Permission).check_only(),
        _ => {
            if let Some(right) = right_of(problem, wire::NO_COMMAND) {
                let command = format!("`{}`", right.to_uppercase());
                return no_command(&command).check_only();
            }
            match right_of(problem, wire::NO_PERMISSION) {
                Some(right) => {
                    let reason = format!("the right `+{right}` is missing");
                    StoreError::explained(ErrorKind::Permission, reason).check_only()
                }
                None => protocol(),
            }
        }
    }
}

/// Returns the n-th right of a problem numbered `first` - n.
fn right_of(problem: i64, first: i64) -> Option<&'static str> {
    let place = usize::try_from(first - problem - 1).ok()?;
    Some(*wire::RIGHTS.get(place)?)
}
