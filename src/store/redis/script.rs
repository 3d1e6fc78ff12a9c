//! The script: how a batch of checks becomes its arguments, and its reply their verdicts.
//!
//! `lua/call.lua` has the contract of both.

use redis::{Cmd, Value};

use super::batch::{Batch, Plan};
use super::lua::Lua;
use super::wire;
use crate::limit::{Charged, Check, Key, Mode, Order, Policies, Policy, Verdict, Verdicts};
use crate::store::{ErrorKind, StoreError};

/// It decides the checks of a batch.
pub(super) static SCRIPT: Lua = Lua::new(wire::SCRIPT);

impl Batch {
    /// Writes the Redis keys of an entry.
    pub(super) fn push_keys(&mut self, prefix: &str, check: &Check) {
        if let Some(id) = check.id() {
            self.push_caller(prefix, check.key());
            for policy in check.policies().iter() {
                self.push_count(policy);
            }
            self.keys.push(b':');
            self.keys.extend_from_slice(id.as_bytes());
            self.ends.push(self.keys.len());
        }
        for policy in check.policies().iter() {
            self.push_caller(prefix, check.key());
            self.push_count(policy);
            self.ends.push(self.keys.len());
        }
    }

    fn push_caller(&mut self, prefix: &str, caller: &Key) {
        self.keys.extend_from_slice(prefix.as_bytes());
        if *caller == Key::PROBE {
            // Without the braces each key of the probe is in a slot of its own, so that a cluster refuses it.
            self.keys.push(b':');
            self.keys.extend_from_slice(caller.as_bytes());
        } else {
            self.keys.extend_from_slice(b":{");
            self.keys.extend_from_slice(caller.as_bytes());
            self.keys.push(b'}');
        }
    }

    /// What follows the caller: `:name:strategy`.
    fn push_count(&mut self, policy: &Policy) {
        for part in [":", policy.name(), ":", policy.kind().letter()] {
            self.keys.extend_from_slice(part.as_bytes());
        }
    }

    /// The call of the script with this batch, by an instance of this number. `now` is 0 for Redis's own time.
    pub(super) fn command(&self, name: &str, script: &str, now: i64, instance: u64) -> Cmd {
        let mut cmd = Cmd::with_capacity(self.ends.len() + 64, self.keys.len() + script.len() + 256);
        cmd.arg(name).arg(script).arg(self.ends.len());
        let mut start = 0;
        for &end in &self.ends {
            cmd.arg(&self.keys[start..end]);
            start = end;
        }

        let policies = || self.plans.iter().flat_map(|plan| plan.policies.iter());
        let mut packed = Packed::default();
        packed.u32(policies().count()).u32(self.plans.len()).i56(now).u48(instance).add_to(&mut cmd);
        for policy in policies() {
            packed.u8(wire::kind_number(policy.kind()));
            for argument in wire::arguments(policy) {
                packed.i56(argument);
            }
            packed.add_to(&mut cmd);
        }
        let mut first = 1;
        for plan in &self.plans {
            let time = if plan.with_id { plan.policies.longest_period() } else { plan.within };
            packed.u8(wire::mode_number(plan.mode)).u32(plan.cost as usize).i56(time);
            for place in first..first + plan.policies.iter().len() {
                packed.u32(place);
            }
            if plan.mode == Mode::Refund {
                let just_now = Charged::just_now(plan.cost.into());
                let charged = |policy| plan.charged.get(policy).unwrap_or(&just_now);
                packed.u32(charged(0).cost as usize).i56(charged(0).age).i56(charged(0).at.max(0));
                for policy in 0..plan.policies.iter().len() {
                    packed.i56(charged(policy).reset);
                }
            }
            packed.add_to(&mut cmd);
            first += plan.policies.iter().len();
        }
        for run in self.entries.chunk_by(|a, b| a == b) {
            packed.u32(run[0].plan + 1).u32(run.len()).u32(run[0].times as usize).add_to(&mut cmd);
        }
        cmd
    }

    /// The verdicts on the checks, in the order in which they were pushed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`] for a reply that is no list, or not as long as this batch makes it, or does not end with a time.
    pub(super) fn read(&self, reply: Value) -> Result<impl Iterator<Item = Result<Verdicts, StoreError>>, StoreError> {
        // Of an answer: four for each policy; and when it was charged, if it may have been before.
        let numbers = |plan: &Plan| 4 * plan.policies.iter().len() + usize::from(plan.with_id);
        // Where the next answer of each entry begins.
        let mut end = 0;
        let mut next: Vec<usize> = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            next.push(end);
            end += numbers(&self.plans[entry.plan]) * entry.times as usize;
        }
        let Value::Array(values) = reply else { return Err(StoreError::new(ErrorKind::Protocol)) };
        match values.get(end) {
            Some(&Value::Int(at)) if values.len() == end + 1 && WHOLE.contains(&at) => {
                Ok(self.checks.iter().map(move |entry| {
                    let plan = &self.plans[self.entries[*entry].plan];
                    let (from, length) = (next[*entry], numbers(plan));
                    next[*entry] += length;
                    let place = u32::try_from(from).unwrap_or(u32::MAX);
                    verdicts(&values[from..from + length], &plan.policies, (at, place))
                }))
            }
            _ => Err(StoreError::new(ErrorKind::Protocol)),
        }
    }
}

/// An argument of packed numbers, lowest byte first.
#[derive(Default)]
struct Packed(Vec<u8>);

impl Packed {
    fn u8(&mut self, number: u8) -> &mut Self {
        self.0.push(number);
        self
    }

    /// A count, or a cost.
    fn u32(&mut self, number: usize) -> &mut Self {
        self.0.extend_from_slice(&(number as u32).to_le_bytes());
        self
    }

    /// A number that a double holds exactly.
    fn i56(&mut self, number: i64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes()[..7]);
        self
    }

    fn u48(&mut self, number: u64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes()[..6]);
        self
    }

    /// Ends the argument, and begins the next.
    fn add_to(&mut self, cmd: &mut Cmd) {
        cmd.arg(self.0.as_slice());
        self.0.clear();
    }
}

/// What the script tells of rooms and times, which a double holds exactly.
const WHOLE: std::ops::Range<i64> = 0..1 << 53;

/// One answer of this time and place: four numbers for each policy. If it has an id, then when it was charged.
///
/// # Errors
///
/// What kept Redis from deciding this one check, or [`ErrorKind::Protocol`] for numbers that the script never makes.
fn verdicts(answer: &[Value], policies: &Policies, (at, place): Order) -> Result<Verdicts, StoreError> {
    let protocol = || StoreError::new(ErrorKind::Protocol);
    let (mut granted, mut problem) = (0, 0);
    let answer = answer.chunks_exact(4);
    let charged_at = match *answer.remainder() {
        [] => at,
        [Value::Int(charged_at)] if WHOLE.contains(&charged_at) => charged_at,
        _ => return Err(protocol()),
    };
    let each = answer.zip(policies).map(|(answer, policy)| {
        let [Value::Int(grants), Value::Int(remaining), Value::Int(wait), Value::Int(reset)] = *answer else {
            return Err(protocol());
        };
        if policies.tells_granted(policy) {
            granted = granted.max(grants);
        }
        problem = problem.min(grants);
        if !(WHOLE.contains(&remaining) && (wait == Verdict::NEVER || WHOLE.contains(&wait)) && WHOLE.contains(&reset))
        {
            problem = i64::MIN;
        }
        Ok(Verdict { remaining, wait, reset })
    });
    let each = each.collect::<Result<_, _>>()?;
    match problem {
        0.. => Ok(Verdicts { granted, at: charged_at, place, age: (at - charged_at).max(0), each }),
        wire::REFUSED => Err(StoreError::new(ErrorKind::Refused).of_check()),
        // Redis refuses the first write of a script for these reasons, and then nothing was charged, or none at all.
        wire::NO_WRITES => Err(StoreError::new(ErrorKind::Refused).unsent()),
        wire::OUT_OF_MEMORY => Err(StoreError::new(ErrorKind::OutOfMemory).unsent()),
        wire::READ_ONLY => Err(StoreError::new(ErrorKind::ReadOnly).unsent()),
        wire::NO_PERMISSION => Err(StoreError::new(ErrorKind::Permission).of_check()),
        _ => Err(protocol()),
    }
}

/// Whether the server is a replica, and so refused a check that would write.
pub(super) fn is_read_only(reply: &Value) -> bool {
    // Nothing else is told by this number.
    matches!(reply, Value::Array(values) if values.contains(&Value::Int(wire::READ_ONLY)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Policies, Quota, Strategy};

    fn policies(names: &[&str]) -> Policies {
        let policy = |name: &&str| Policy::new(name, Strategy::Gcra, Quota::per_second(10).burst(20)).unwrap();
        Policies::new(names.iter().map(policy)).unwrap()
    }

    /// The keys, and the numbers of each packed argument.
    fn arguments(cmd: &Cmd) -> (Vec<String>, Vec<Vec<i64>>) {
        let args = cmd.args_iter().map(|arg| match arg {
            redis::Arg::Simple(bytes) => bytes,
            _ => unreachable!(),
        });
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut args = args.skip(2);
        let keys: Vec<String> = {
            let count = text(args.next().unwrap()).parse().unwrap();
            args.by_ref().take(count).map(text).collect()
        };
        let mut packed = vec![numbers(args.next().unwrap(), &[4, 4, 7, 6])];
        let (policies, plans) = (packed[0][0] as usize, packed[0][1] as usize);
        packed.extend(args.by_ref().take(policies).map(|bytes| numbers(bytes, &[1, 7, 7, 7, 7])));
        packed.extend(args.by_ref().take(plans).map(|bytes| numbers(bytes, &[1, 4, 7])));
        packed.extend(args.map(|bytes| numbers(bytes, &[4, 4, 4])));
        (keys, packed)
    }

    /// Numbers of these widths in bytes; what follows them is of 4.
    fn numbers(mut bytes: &[u8], widths: &[usize]) -> Vec<i64> {
        let mut numbers = vec![];
        for &width in widths.iter().chain(std::iter::repeat(&4)) {
            let Some((number, rest)) = bytes.split_at_checked(width) else { break };
            numbers.push(number.iter().rev().fold(0, |sum, byte| sum << 8 | i64::from(*byte)));
            bytes = rest;
        }
        assert!(bytes.is_empty(), "{bytes:?} is left");
        numbers
    }

    #[test]
    fn checks_in_a_row_that_ask_the_same_share_a_plan() {
        let (one, two) = (policies(&["api"]), policies(&["burst", "daily"]));
        let mut batch = Batch::default();
        batch.push("rl", &Check::take(Key::new("ann"), &one, 1));
        batch.push("rl", &Check::take(Key::new("bob"), &one, 1));
        batch.push("rl", &Check::peek(Key::new("cid"), &two, 3));
        batch.push("rl", &Check::take(Key::new("dan"), &one, 1));
        let keys = ["rl:{ann}:api:g", "rl:{bob}:api:g", "rl:{cid}:burst:g", "rl:{cid}:daily:g", "rl:{dan}:api:g"];
        let policy = vec![7, 20, 100_000, 1, 0];
        let expected = vec![
            vec![3, 2, 0, 9],
            policy.clone(),
            policy.clone(),
            policy.clone(),
            vec![1, 1, 0, 1],
            vec![3, 3, 0, 2, 3],
            vec![1, 2, 1],
            vec![2, 1, 1],
            vec![1, 1, 1],
        ];
        assert_eq!(arguments(&batch.command("EVALSHA", "", 0, 9)), (keys.map(str::to_owned).to_vec(), expected));

        batch.clear();
        batch.push("rl", &Check::take(Key::new("eve"), &one, 1));
        let expected = vec![vec![1, 1, 7, 9], policy, vec![1, 1, 0, 1], vec![1, 1, 1]];
        assert_eq!(arguments(&batch.command("EVALSHA", "", 7, 9)), (vec!["rl:{eve}:api:g".to_owned()], expected));
    }

    #[test]
    fn checks_of_one_caller_that_ask_the_same_share_an_entry() {
        let one = policies(&["api"]);
        let mut batch = Batch::default();
        let take = |caller: &str, cost| Check::take(Key::new(caller), &one, cost);
        for check in [take("ann", 1), take("bob", 1), take("ann", 1), take("ann", 2), take("ann", 1)] {
            batch.push("rl", &check);
        }
        batch.push("rl", &Check::peek(Key::new("ann"), &one, 1));
        batch.push("rl", &Check::peek(Key::new("ann"), &one, 1));
        let (keys, packed) = arguments(&batch.command("EVALSHA", "", 0, 9));
        let (ann, bob) = ("rl:{ann}:api:g", "rl:{bob}:api:g");
        assert_eq!(keys, [ann, bob, ann, ann, ann, ann]);
        // Two of ann's first, bob's, and then in the order in which they came.
        let runs = [[1, 1, 2], [1, 1, 1], [2, 1, 1], [1, 1, 1], [3, 2, 1]];
        assert_eq!(packed[packed.len() - 5..], runs.map(Vec::from));

        // The answers of an entry follow each other, and go to its checks in their order.
        let answers = [10, 11, 20, 30, 12, 40, 50].iter().flat_map(|left| [1, *left, 0, 1]);
        let reply = Value::Array(answers.chain([1_790]).map(Value::Int).collect());
        let read = batch.read(reply).unwrap().map(Result::unwrap);
        let (left, order): (Vec<i64>, Vec<Order>) =
            read.map(|verdicts| (verdicts.first().remaining, (verdicts.at, verdicts.place))).unzip();
        assert_eq!(left, [10, 20, 11, 30, 12, 40, 50]);
        // In which they were decided.
        assert_eq!(order, [0, 8, 4, 12, 16, 20, 24].map(|place| (1_790, place)));
    }

    #[test]
    fn an_id_has_a_key_of_its_own() {
        let mut batch = Batch::default();
        batch.push("rl", &Check::take(Key::new("ann"), &policies(&["burst", "daily"]), 1).with_id("17"));
        let (keys, packed) = arguments(&batch.command("EVALSHA", "", 0, 9));
        assert_eq!(keys, ["rl:{ann}:burst:g:daily:g:17", "rl:{ann}:burst:g", "rl:{ann}:daily:g"]);
        assert_eq!(packed[3..], [vec![1, 1, 1_000_000, 1, 2], vec![1, 1, 1]]);

        // Its answer ends with when it was charged.
        let read = |charged_at| {
            let reply = [1, 9, 0, 100, 1, 19, 0, 100, charged_at, 1_790].map(Value::Int);
            batch.read(Value::Array(reply.into())).and_then(|mut all| all.next().unwrap())
        };
        let verdicts = read(1_000).unwrap();
        assert_eq!((verdicts.granted, verdicts.at, verdicts.age), (1, 1_000, 790));
        assert_eq!(read(-1).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn any_reply_is_verdicts_or_an_error() {
        let mut batch = Batch::default();
        batch.push("rl", &Check::take(Key::new("ann"), &policies(&["api"]), 1));
        let ints = |ints: &[i64]| Value::Array(ints.iter().map(|i| Value::Int(*i)).collect());
        let read = |value| batch.read(value).and_then(|mut all| all.next().unwrap());

        let verdicts = read(ints(&[1, 9, 0, 100, 1_790])).unwrap();
        assert_eq!((verdicts.granted, verdicts.at), (1, 1_790));
        for (code, kind) in [
            (-1, ErrorKind::Refused),
            (-2, ErrorKind::OutOfMemory),
            (-3, ErrorKind::ReadOnly),
            (-4, ErrorKind::Permission),
            (-5, ErrorKind::Refused),
            (-6, ErrorKind::Protocol),
            (i64::MIN, ErrorKind::Protocol),
        ] {
            assert_eq!(read(ints(&[code, 0, 0, 0, 1])).unwrap_err().kind(), kind);
        }
        for wrong in [
            Value::Nil,
            Value::Int(1),
            Value::SimpleString("OK".to_owned()),
            ints(&[]),
            ints(&[1, 9, 0]),
            ints(&[1, 9, 0, 100]),
            ints(&[1, 9, 0, 100, 1, 1]),
            ints(&[1, 9, 0, 100, -1]),
            ints(&[1, 9, 0, 100, i64::MAX]),
            ints(&[1, -1, 0, 100, 1]),
            ints(&[1, 9, -2, 100, 1]),
            ints(&[1, 9, 0, -1, 1]),
            ints(&[1, 9, 0, i64::MAX, 1]),
            ints(&[1, i64::MAX, 0, 1, 1]),
            ints(&[1, 9, i64::MAX, 1, 1]),
            Value::Array(vec![Value::Int(1), Value::Nil, Value::Int(0), Value::Int(0), Value::Int(1)]),
            Value::Array(vec![Value::Int(1), Value::Int(9), Value::Int(0), Value::Int(100), Value::Nil]),
        ] {
            assert_eq!(read(wrong.clone()).unwrap_err().kind(), ErrorKind::Protocol, "{wrong:?}");
        }
    }
}
