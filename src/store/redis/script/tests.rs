use redis::{Cmd, Value};

use super::call::PlanKey;
use super::*;
use crate::error::ErrorKind;
use crate::limit::{Check, Key, Policies, Policy, Quota, Refill, Strategy, Verdict, Verdicts};
use crate::util::own_list;

fn policies(limit: u32) -> Policies {
    Policy::new("api", Strategy::Gcra, Quota::per_second(limit))
        .unwrap()
        .into()
}

/// The verdicts that a call reads in a reply.
fn read_all(
    call: &ScriptCall,
    reply: &Value,
) -> Result<Vec<Result<Verdicts, StoreError>>, StoreError> {
    let mut all = vec![];
    match call.read(reply, |verdicts| all.push(verdicts)) {
        Ok(()) => assert_eq!(all.len(), call.len()),
        Err(_) => assert!(all.is_empty()),
    }
    call.read(reply, |_| {}).map(|()| all)
}

#[test]
fn equal_lists_share_a_plan_among_thousands() {
    let lists: Vec<Policies> = (1..=1_000).map(policies).collect();
    let mut call = ScriptCall::default();
    for _ in 0..2 {
        call.clear();
        for round in 0..3 {
            for (i, list) in lists.iter().enumerate() {
                // A copy is an equal list in a separate allocation.
                let list = if round == 0 {
                    list.clone()
                } else {
                    own_list(list)
                };
                call.push(
                    "rl",
                    &Check::take(Key::new(format!("{round}-{i}")), &list, 1),
                );
            }
        }
        assert_eq!(call.plans.len(), lists.len());
        assert!(
            call.plans
                .iter()
                .zip(&lists)
                .all(|(plan, list)| plan.policies == *list)
        );
        let plans = call.entries.iter().map(|entry| entry.plan);
        assert!(plans.eq((0..3).flat_map(|_| 0..lists.len())));
    }
}

#[test]
fn modes_costs_and_ids_get_separate_plans() {
    let list = policies(10);
    let take = |cost| Check::take(Key::GLOBAL, &list, cost);
    let mut call = ScriptCall::default();
    for check in [
        take(1),
        take(2),
        take(1).with_id("a"),
        Check::peek(Key::GLOBAL, &list, 1),
        take(1),
    ] {
        call.push("rl", &check);
    }
    let plans: Vec<usize> = call.entries.iter().map(|entry| entry.plan).collect();
    assert_eq!(plans, [0, 1, 2, 3, 0]);
}

#[test]
fn lists_of_one_id_stay_apart() {
    let (one, two, three) = (policies(1), policies(2), policies(3));
    let take = |list| Check::take(Key::GLOBAL, list, 1);
    let mut call = ScriptCall::default();
    call.push("rl", &take(&one));
    call.push("rl", &take(&two));
    // Simulates a collision: gives the third list the id of the first.
    call.plan_of.insert(PlanKey::of(&take(&three)), 0);
    for list in [&three, &one, &two, &three] {
        call.push("rl", &take(list));
        let entry = call.entries[call.checks[call.checks.len() - 1].entry];
        assert!(call.plans[entry.plan].policies == *list);
    }
}

fn named(names: &[&str]) -> Policies {
    let policy =
        |name: &&str| Policy::new(name, Strategy::Gcra, Quota::per_second(10).burst(20)).unwrap();
    Policies::new(names.iter().map(policy)).unwrap()
}

/// The keys, and the numbers in each packed argument.
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
    let mut packed = vec![numbers(args.next().unwrap(), &[4, 4, 7])];
    let (policies, plans) = (packed[0][0] as usize, packed[0][1] as usize);
    packed.extend(
        args.by_ref()
            .take(policies)
            .map(|bytes| numbers(&bytes[..29], &[1, 7, 7, 7, 7])),
    );
    packed.extend(
        args.by_ref()
            .take(plans)
            .map(|bytes| numbers(bytes, &[1, 4, 7])),
    );
    packed.extend(args.map(|bytes| numbers(bytes, &[4, 4, 4])));
    (keys, packed)
}

/// Unpacks numbers of these widths in bytes, and then numbers of 4 bytes.
fn numbers(mut bytes: &[u8], widths: &[usize]) -> Vec<i64> {
    let mut numbers = vec![];
    for &width in widths.iter().chain(std::iter::repeat(&4)) {
        let Some((number, rest)) = bytes.split_at_checked(width) else {
            break;
        };
        numbers.push(
            number
                .iter()
                .rev()
                .fold(0, |sum, byte| sum << 8 | i64::from(*byte)),
        );
        bytes = rest;
    }
    assert!(bytes.is_empty(), "{bytes:?} is left");
    numbers
}

/// Packs numbers as the script does.
fn reply(numbers: impl IntoIterator<Item = i64>) -> Value {
    Value::BulkString(numbers.into_iter().flat_map(i64::to_le_bytes).collect())
}

#[test]
fn equal_consecutive_checks_share_a_plan() {
    let (one, two) = (named(&["api"]), named(&["burst", "daily"]));
    let mut call = ScriptCall::default();
    call.push("rl", &Check::take(Key::new("ann"), &one, 1));
    call.push("rl", &Check::take(Key::new("bob"), &one, 1));
    call.push("rl", &Check::peek(Key::new("cid"), &two, 3));
    call.push("rl", &Check::take(Key::new("dan"), &one, 1));
    let keys = [
        "rl:{ann}:api:g",
        "rl:{bob}:api:g",
        "rl:{cid}:burst:g",
        "rl:{cid}:daily:g",
        "rl:{dan}:api:g",
    ]
    .map(str::to_owned);
    let policy = vec![7, 20, 100_000, 1, 0];
    let expected = vec![
        vec![3, 2, 0],
        policy.clone(),
        policy.clone(),
        policy.clone(),
        vec![1, 1, 0, 1],
        vec![3, 3, 0, 2, 3],
        vec![1, 2, 1],
        vec![2, 1, 1],
        vec![1, 1, 1],
    ];
    assert_eq!(
        arguments(&call.command("EVALSHA", "")),
        (keys.to_vec(), expected)
    );

    call.clear();
    call.push("rl", &Check::take(Key::new("eve"), &one, 1));
    call.push("rl", &Check::take(Key::new("eve"), &two, 1));
    call.now = 7;
    let (_, packed) = arguments(&call.command("EVALSHA", ""));
    assert_eq!(packed[..2], [vec![3, 2, 7], policy]);
}

/// Each run of takes is one argument.
#[test]
fn takes_under_meters_have_a_script_of_their_own() {
    let greedy = |name| {
        let greedy = Strategy::TokenBucket(Refill::Greedy);
        Policies::from(Policy::new(name, greedy, Quota::per_second(10)).unwrap())
    };
    let (gcra, bucket) = (named(&["api"]), greedy("burst"));
    let take = |caller: &str, policies, cost| Check::take(Key::new(caller), policies, cost);
    let mut call = ScriptCall::default();
    for check in [
        take("ann", &gcra, 1),
        take("bob", &gcra, 1),
        take("cid", &bucket, 2),
        take("cid", &bucket, 2),
        take("dan", &gcra, u32::MAX),
    ] {
        call.push("rl", &check);
    }
    call.now = 7;
    let cmd = call.command("EVALSHA", call.script().hash());
    let args: Vec<&[u8]> = cmd
        .args_iter()
        .map(|arg| match arg {
            redis::Arg::Simple(bytes) => bytes,
            _ => unreachable!(),
        })
        .collect();
    let keys = [
        "rl:{ann}:api:g",
        "rl:{bob}:api:g",
        "rl:{cid}:burst:t",
        "rl:{dan}:api:g",
    ];
    assert_eq!(args[2], b"4");
    assert_eq!(args[3..7], keys.map(str::as_bytes));
    // The writer: an interval of 3 bytes, ticks of 1, and the capacity.
    let runs = args[7..]
        .iter()
        .map(|bytes| numbers(bytes, &[7, 7, 7, 7, 4, 4, 3, 1, 3, 1]));
    // A cost above the capacity is lowered to just above it.
    let expected = [
        [7, 2_000_000, 100_000, 1, 2, 1, 100_000, 1, 20, 25],
        [7, 1_000_000, 200_000, 1, 1, 2, 100_000, 1, 10, 25],
        [7, 2_000_000, 2_100_000, 1, 1, 1, 100_000, 1, 20, 25],
    ];
    assert_eq!(runs.collect::<Vec<_>>(), expected);

    let of_takes = call.script().hash();
    let is_of_takes = |checks: &[Check]| {
        let mut call = ScriptCall::default();
        checks.iter().for_each(|check| call.push("rl", check));
        call.script().hash() == of_takes
    };
    let one = || take("ann", &gcra, 1);
    assert!(is_of_takes(&[one(), one(), take("bob", &bucket, 0)]));
    let window = Policy::new("w", Strategy::SlidingCounter, Quota::per_second(10)).unwrap();
    let interval = Strategy::TokenBucket(Refill::Interval);
    let interval = Policy::new("t", interval, Quota::per_second(10)).unwrap();
    for other in [
        one().with_id("17"),
        Check::peek(Key::new("bob"), &gcra, 1),
        take("bob", &named(&["burst", "daily"]), 1),
        take("bob", &window.into(), 1),
        take("bob", &interval.into(), 1),
        take("bob", &Policy::in_flight("open", 2).unwrap().into(), 1),
        // The second take of a caller depends on the first.
        take("ann", &gcra, 2),
    ] {
        assert!(!is_of_takes(&[one(), other.clone()]), "{other:?}");
    }
}

/// Packs an answer of `lua/takes.lua`.
fn state(at: i64, level: i64) -> Vec<u8> {
    let number = |number: i64| number.to_le_bytes().into_iter().take(7);
    // The expiry of a charged one.
    let last = if level < 0 { [0; 5] } else { [9; 5] };
    number(at).chain(number(level)).chain(last).collect()
}

#[test]
fn takes_are_decided_by_the_returned_level() {
    // A unit is 100,000 ticks of 1 us, and the capacity is 20 units.
    let policies = named(&["api"]);
    let take = |caller: &str, cost| Check::take(Key::new(caller), &policies, cost);
    let mut call = ScriptCall::default();
    for check in [
        take("ann", 3),
        take("bob", 3),
        take("bob", 3),
        take("bob", 3),
        take("cid", 3),
    ] {
        call.push("rl", &check);
    }
    let reply = [
        state(1_790, 500_000),
        state(1_790, -1 - 1_250_000),
        state(1_790, -1 - 1_700_001),
    ];
    let reply = Value::BulkString(reply.concat());
    let verdicts: Vec<_> = read_all(&call, &reply)
        .unwrap()
        .into_iter()
        .map(|verdicts| {
            let verdicts = verdicts.unwrap();
            let first = verdicts.each[0];
            let granted = (verdicts.granted, verdicts.at);
            (granted, first.remaining, first.wait, first.reset)
        })
        .collect();
    let expected = [
        ((3, 1_790), 15, 0, 500_000),
        ((3, 1_790), 4, 0, 1_550_000),
        ((3, 1_790), 1, 0, 1_850_000),
        ((0, 1_790), 1, 150_000, 1_850_000),
        ((0, 1_790), 2, 1, 1_700_001),
    ];
    assert_eq!(verdicts, expected);
}

/// While another quota drains the level, its times follow the answers.
#[test]
fn times_of_another_quota_follow_the_answers() {
    let policies = named(&["api"]);
    let mut call = ScriptCall::default();
    for (caller, cost) in [("ann", 3), ("bob", 3), ("bob", 3), ("cid", 0), ("dan", 21)] {
        call.push("rl", &Check::take(Key::new(caller), &policies, cost));
    }
    let numbered = |level: i64, number| {
        let mut answer = state(1_790, -1 - level);
        answer[14] = number;
        answer
    };
    let answers = [
        state(1_790, -1 - 1_800_000),
        numbered(1_800_000, 1),
        numbered(1_900_000, 2),
        numbered(1_500_000, 3),
    ];
    let times = [state(7, 90), state(0, 95), state(0, 75)].map(|mut times| {
        times[14..].fill(0);
        times
    });
    let read = |records: &[&[Vec<u8>]]| {
        let reply = Value::BulkString(records.concat().concat());
        let verdicts: Result<Vec<_>, _> = read_all(&call, &reply)?.into_iter().collect();
        let verdicts: Vec<_> = verdicts?;
        Ok::<_, StoreError>(
            verdicts
                .iter()
                .map(|verdicts| {
                    let first = verdicts.each[0];
                    (verdicts.granted, first.remaining, first.wait, first.reset)
                })
                .collect::<Vec<_>>(),
        )
    };
    let expected = [
        (0, 2, 100_000, 1_800_000),
        (0, 2, 7, 90),
        (0, 2, 7, 90),
        (0, 1, 0, 95),
        (0, 5, Verdict::NEVER, 75),
    ];
    assert_eq!(read(&[&answers, &times]).unwrap(), expected);
    for wrong in [
        vec![],
        times[..2].to_vec(),
        [&times[..], &times[..1]].concat(),
        // A denial without a wait, and an allowed take with one.
        vec![times[1].clone(), times[1].clone(), times[2].clone()],
        vec![times[0].clone(), times[0].clone(), times[2].clone()],
    ] {
        let error = read(&[&answers, &wrong]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
    }
}

#[test]
fn any_reply_to_a_take_is_a_verdict_or_an_error() {
    let mut call = ScriptCall::default();
    call.push("rl", &Check::take(Key::new("ann"), &named(&["api"]), 1));
    let read = |bytes: Vec<u8>| {
        let mut all = read_all(&call, &Value::BulkString(bytes))?;
        all.remove(0)
    };
    let kind = |bytes: Vec<u8>| read(bytes).unwrap_err().kind();

    assert_eq!(read(state(1_790, 100_000)).unwrap().granted, 1);
    assert_eq!(read(state(1_790, -1 - 1_900_001)).unwrap().granted, 0);
    for (problem, expected) in [
        (-1, ErrorKind::Refused),
        (-2, ErrorKind::OutOfMemory),
        (-3, ErrorKind::ReadOnly),
        (-4, ErrorKind::Protocol),
        (-5, ErrorKind::Refused),
        (-6, ErrorKind::NotReady),
        (-7, ErrorKind::Protocol),
        (-10, ErrorKind::Permission),
        (-11, ErrorKind::Permission),
        (-26, ErrorKind::Permission),
        (-27, ErrorKind::Protocol),
        (-1 << 55, ErrorKind::Protocol),
    ] {
        assert_eq!(kind(state(problem, 0)), expected, "{problem}");
    }
    for (at, level) in [
        // Levels below empty and above full.
        (1_790, 0),
        (1_790, 99_999),
        (1_790, 2_000_001),
        (1_790, (1 << 55) - 1),
        // Denied, although the level has capacity left.
        (1_790, -1),
        (1_790, -1 - 1_900_000),
        (1_790, -1 << 55),
        (1 << 53, 100_000),
        ((1 << 55) - 1, -1 - 1_900_001),
    ] {
        assert_eq!(kind(state(at, level)), ErrorKind::Protocol, "{at} {level}");
    }
    for wrong in [
        vec![],
        vec![0; 18],
        vec![0; 20],
        [state(1_790, 100_000), state(1_790, 100_000)].concat(),
    ] {
        assert_eq!(kind(wrong.clone()), ErrorKind::Protocol, "{wrong:?}");
    }
    for wrong in [Value::Nil, Value::Int(1), Value::Array(vec![])] {
        assert!(read_all(&call, &wrong).is_err(), "{wrong:?}");
    }

    // A replica rejects each take.
    let is_read_only = |problem| {
        let reply = Value::BulkString(state(problem, 0));
        call.is_read_only(&reply)
    };
    assert!(is_read_only(-3) && !is_read_only(-2) && !is_read_only(1_790));
}

#[test]
fn equal_checks_of_a_caller_share_entries() {
    let one = named(&["api"]);
    let mut call = ScriptCall::default();
    let take = |caller: &str, cost| Check::take(Key::new(caller), &one, cost);
    for check in [
        take("ann", 1),
        take("bob", 1),
        take("ann", 1),
        take("ann", 2),
        take("ann", 1),
    ] {
        call.push("rl", &check);
    }
    call.push("rl", &Check::peek(Key::new("ann"), &one, 1));
    call.push("rl", &Check::peek(Key::new("ann"), &one, 1));
    let (keys, packed) = arguments(&call.command("EVALSHA", ""));
    let (ann, bob) = ("rl:{ann}:api:g", "rl:{bob}:api:g");
    assert_eq!(keys, [ann, bob, ann, ann, ann, ann]);
    // Two answers for ann's first entry, one for bob's, then the others in order of arrival.
    let runs = [[1, 1, 2], [1, 1, 1], [2, 1, 1], [1, 1, 1], [3, 2, 1]];
    assert_eq!(packed[packed.len() - 5..], runs.map(Vec::from));

    // An entry's answers are consecutive, in the order of its checks.
    let answers = [10, 11, 20, 30, 12, 40, 50]
        .iter()
        .flat_map(|left| [1, *left, 0, 1]);
    let reply = reply(answers.chain([1_790]));
    let read = read_all(&call, &reply).unwrap().into_iter();
    let left: Vec<i64> = read
        .map(|verdicts| verdicts.unwrap().each[0].remaining)
        .collect();
    assert_eq!(left, [10, 20, 11, 30, 12, 40, 50]);
}

/// An id that reads as a span names no other count.
#[test]
fn an_id_is_no_span() {
    let gcra = |quota| Policy::new("p", Strategy::Gcra, quota).unwrap();
    let pause = gcra("5/s").of_pauses();
    for (policy, id) in [
        (gcra("1/s"), pause.span()),
        (
            Policy::new("p", Strategy::TokenBucket(Refill::Greedy), "5/s").unwrap(),
            "i",
        ),
    ] {
        let mut call = ScriptCall::default();
        let policies = Policies::from(policy);
        call.push(
            "rl",
            &Check::take(Key::new("ann"), &policies, 1).with_id(id),
        );
        let (keys, _) = arguments(&call.command("EVALSHA", ""));
        let rest = keys[0].strip_prefix("rl").unwrap();
        assert_eq!(read_key(rest), None, "{rest}");
    }
}

#[test]
fn each_id_has_a_separate_key() {
    let mut call = ScriptCall::default();
    call.push(
        "rl",
        &Check::take(Key::new("ann"), &named(&["burst", "daily"]), 1).with_id("17"),
    );
    let (keys, packed) = arguments(&call.command("EVALSHA", ""));
    assert_eq!(
        keys,
        [
            "rl:{ann}:burst:g:daily:g::17",
            "rl:{ann}:burst:g",
            "rl:{ann}:daily:g"
        ]
    );
    assert_eq!(packed[3..], [vec![1, 1, 1_000_000, 1, 2], vec![1, 1, 1]]);

    // An answer with an id ends with the time of the charge.
    let read = |charged_at| {
        let reply = reply([1, 9, 0, 100, 1, 19, 0, 100, charged_at, 1_790]);
        read_all(&call, &reply).and_then(|mut all| all.remove(0))
    };
    let verdicts = read(1_000).unwrap();
    assert_eq!(
        (verdicts.granted, verdicts.at, verdicts.age),
        (1, 1_000, 790)
    );
    assert_eq!(read(-1).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn any_reply_is_verdicts_or_an_error() {
    let mut call = ScriptCall::default();
    call.push("rl", &Check::up_to(Key::new("ann"), &named(&["api"]), 1));
    let ints = |ints: &[i64]| reply(ints.iter().copied());
    let read = |value: Value| read_all(&call, &value).and_then(|mut all| all.remove(0));

    let verdicts = read(ints(&[1, 9, 0, 100, 1_790])).unwrap();
    assert_eq!((verdicts.granted, verdicts.at), (1, 1_790));
    for (code, kind) in [
        (-1, ErrorKind::Refused),
        (-2, ErrorKind::OutOfMemory),
        (-3, ErrorKind::ReadOnly),
        (-4, ErrorKind::Protocol),
        (-5, ErrorKind::Refused),
        (-6, ErrorKind::NotReady),
        (-7, ErrorKind::Protocol),
        (-10, ErrorKind::Permission),
        (-13, ErrorKind::Permission),
        (-26, ErrorKind::Permission),
        (-27, ErrorKind::Protocol),
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
        ints(&[2, 9, 0, 100, 1]),
        ints(&[i64::MAX, 9, 0, 100, 1]),
        ints(&[1, 9, i64::MAX, 1, 1]),
        Value::Array(vec![
            Value::Int(1),
            Value::Int(9),
            Value::Int(0),
            Value::Int(100),
            Value::Int(1),
        ]),
        Value::Array(vec![
            Value::Int(1),
            Value::Nil,
            Value::Int(0),
            Value::Int(0),
            Value::Int(1),
        ]),
        Value::BulkString(vec![0; 39]),
        Value::BulkString(vec![0; 41]),
    ] {
        assert_eq!(
            read(wrong.clone()).unwrap_err().kind(),
            ErrorKind::Protocol,
            "{wrong:?}"
        );
    }
}

fn call_of(times: usize, check: &Check) -> ScriptCall {
    let mut call = ScriptCall::default();
    for _ in 0..times {
        call.push("rl", check);
    }
    call
}

/// `push_only`, which is faster, encodes a single check as `push` does.
#[test]
fn a_lone_check_is_encoded_as_any_other() {
    let (rates, ann) = (named(&["api", "day"]), Key::new("ann"));
    let in_flight = Policies::from(Policy::in_flight("open", 3).unwrap());
    let slot = Check::take(ann, &in_flight, 1).slot().unwrap();
    for check in [
        Check::take(ann, &policies(10), 2),
        Check::take(ann, &rates, 2).with_id("17"),
        Check::refund(ann, &rates, 2),
        Check::reset(ann, &rates),
        Check::take(ann, &in_flight, 1),
        Check::renew(ann, &in_flight, slot),
        Check::release(ann, &in_flight, slot),
    ] {
        let mut lone = ScriptCall::default();
        lone.push_only("rl", &check);
        let [lone, other] = [lone, call_of(1, &check)].map(|call| {
            call.command("EVALSHA", call.script().hash())
                .get_packed_command()
        });
        assert_eq!(lone, other, "{check:?}");
    }
}

#[test]
fn a_take_alone_has_its_own_script() {
    let policy = |strategy| Policy::new("api", strategy, Quota::per_second(10)).unwrap();
    let meter: Policies = policy(Strategy::Gcra).into();
    let take = Check::take(Key::new("ann"), &meter, 2);
    let args = |now| {
        let mut call = call_of(1, &take);
        call.now = now;
        let cmd = call.command("EVALSHA", TAKE.hash());
        let args = cmd.args_iter().skip(2).map(|arg| match arg {
            redis::Arg::Simple(bytes) => bytes.to_vec(),
            _ => unreachable!(),
        });
        args.collect::<Vec<_>>()
    };
    let packed = [1_000_000.0, 200_000.0, 1.0].map(f64::to_le_bytes);
    // The writer: an interval of 100,000 in 3 bytes, ticks in 1, a capacity of 10 in 3, and these lengths.
    let writer = [0xa0, 0x86, 0x01, 1, 10, 0, 0, 8 * 3 + 1];
    let packed = [packed.as_flattened(), &writer].concat();
    let expected = [b"1", &b"rl:{ann}:api:g"[..], &packed];
    assert_eq!(args(0), expected);
    assert_eq!(args(7), [&expected[..], &[b"7"]].concat());

    let script = |times, check: &Check| call_of(times, check).script().hash();
    let window = policy(Strategy::SlidingCounter).into();
    assert_eq!(script(1, &take), TAKE.hash());
    assert_eq!(script(2, &take), TAKES.hash());
    for other in [
        Check::peek(Key::new("ann"), &meter, 1),
        Check::take(Key::new("ann"), &meter, 1).with_id("17"),
        Check::take(Key::new("ann"), &window, 1),
    ] {
        assert_eq!(script(1, &other), CHECK.hash(), "{other:?}");
    }
}

#[test]
fn a_time_outside_of_a_calendar_is_no_verdict() {
    let months = "fixed-window(month)".parse().unwrap();
    let policies = Policy::new("plan", months, "10/month").unwrap().into();
    let call = call_of(1, &Check::take(Key::new("ann"), &policies, 1));
    let late = reply([1_801_440_000_000_000]);
    assert_eq!(call.outside(&late), Some(1_801_440_000_000_000));
    let Err(error) = read_all(&call, &late) else {
        panic!("a reply without answers was read");
    };
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert_eq!(call.outside(&reply([1, 9, 0, 100, 1_790])), None);
}
