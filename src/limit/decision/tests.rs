use std::time::SystemTime;

use super::*;
use crate::limit::{Counts, Quota, Strategy};

const SOURCE: Source = Source::Other("test");

fn policies() -> Policies {
    let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota).unwrap();
    Policies::new([
        policy("ten", Quota::per_second(10)),
        policy("five", Quota::per_second(5)),
    ])
    .unwrap()
}

#[test]
fn every_policy_must_allow_a_check() {
    let policies = policies();
    let check = Check::take(Key::GLOBAL, &policies, 2);
    let mut seen = vec![];
    let decision = check.decided(SOURCE, 2, |policy| {
        seen.push(policy.name().to_owned());
        Verdict::allowed()
    });
    assert_eq!(seen, ["ten", "five"]);
    assert_eq!(
        (
            decision.granted(),
            decision.policy().name(),
            decision.remaining()
        ),
        (2, "five", 3)
    );
    assert_eq!(decision.source().as_str(), "test");

    let decision = check.decided(SOURCE, 2, |policy| match policy.name() {
        "ten" => Verdict::denied(Duration::from_secs(1)),
        _ => Verdict::allowed(),
    });
    assert_eq!((decision.granted(), decision.policy().name()), (0, "ten"));

    let equal = check.decided(SOURCE, 2, |_| Verdict::allowed().with_remaining(1));
    assert_eq!(equal.policy().name(), "ten", "the first");
    assert_ne!(equal, decision);
}

/// The usage under each policy, which is never above its capacity.
#[test]
fn usage_is_all_that_does_not_remain() {
    let (policies, mut counts) = (policies(), Counts::default());
    let mut used_after = |check: Check| {
        let decision = counts.decide(&check, SystemTime::UNIX_EPOCH, SOURCE);
        let each: Vec<u32> = decision.each().map(|each| each.used()).collect();
        (decision.policy().name().to_owned(), decision.used(), each)
    };
    let peek = || Check::peek(Key::GLOBAL, &policies, 0);
    assert_eq!(used_after(peek()).2, [0, 0]);
    let taken = used_after(Check::take(Key::GLOBAL, &policies, 3));
    assert_eq!(taken, ("five".to_owned(), 3, vec![3, 3]));
    assert_eq!(used_after(Check::take(Key::GLOBAL, &policies, 3)).2, [3, 3]);
    let debt = used_after(Check::charge(Key::GLOBAL, &policies, 5));
    assert_eq!(debt, ("five".to_owned(), 5, vec![8, 5]));
    assert_eq!(used_after(peek()), debt);
}

#[test]
fn expired_charges_are_not_refunded() {
    let (key, policies, second) = (Key::GLOBAL, policies(), Duration::from_secs(1));
    let verdict = Verdict::allowed().with_reset_after(second);
    let whole = Check::take(key, &policies, 2).decided(SOURCE, 2, |_| verdict);
    let just_before = Duration::from_micros(999_999);
    for (cost, age, refunds) in [(2, just_before, 1), (2, second, 0), (0, just_before, 0)] {
        assert_eq!(
            whole.refund(key, cost, age).iter().count(),
            refunds,
            "{cost} after {age:?}"
        );
    }
}

#[test]
fn impossible_values_are_never_returned() {
    let policies = policies();
    let decided = |check: Check, granted, verdict| check.decided(SOURCE, granted, |_| verdict);
    let numbers = |check: Check, granted, verdict| {
        let decision = decided(check, granted, verdict);
        (decision.granted(), decision.remaining())
    };
    let (key, many) = (Key::GLOBAL, Verdict::allowed().with_remaining(u32::MAX));
    assert_eq!(numbers(Check::take(key, &policies, 2), 99, many), (2, 3));
    assert_eq!(
        numbers(Check::take(key, &policies, 9), 9, many),
        (9, 0),
        "more than its capacity"
    );
    assert_eq!(numbers(Check::up_to(key, &policies, 2), 99, many), (2, 3));
    assert_eq!(numbers(Check::up_to(key, &policies, 2), 1, many), (1, 4));
    assert_eq!(numbers(Check::peek(key, &policies, 2), 99, many), (0, 5));
    assert_eq!(numbers(Check::refund(key, &policies, 2), 99, many), (2, 5));
    assert_eq!(numbers(Check::reset(key, &policies), 99, many), (99, 5));
    let uploads = Policy::in_flight("uploads", 5).unwrap().into();
    assert_eq!(
        numbers(Check::take(key, &uploads, 2), 99, many),
        (2, 4),
        "of one request"
    );
    assert_eq!(
        numbers(Check::charge(key, &uploads, 2), 99, many),
        (2, 3),
        "of two requests"
    );

    let denied = Verdict::denied(Duration::ZERO)
        .with_remaining(u32::MAX)
        .with_reset_after(Duration::ZERO);
    for (check, remaining) in [
        (Check::take(key, &policies, 2), 1),
        (Check::take(key, &policies, 0), 0),
        (Check::take(key, &policies, 99), 5),
        (Check::peek(key, &policies, 2), 1),
        (Check::up_to(key, &policies, 2), 0),
        (Check::charge(key, &policies, 2), 0),
    ] {
        let decision = decided(check, 99, denied);
        let microsecond = Duration::from_micros(1);
        assert_eq!(
            decision.outcome(),
            Outcome::Denied {
                retry_after: microsecond
            }
        );
        assert_eq!(
            (decision.granted(), decision.remaining()),
            (0, remaining),
            "{decision:?}"
        );
        assert_eq!(decision.reset_after(), microsecond);
    }
    let never = decided(
        Check::take(key, &policies, 11),
        11,
        Verdict::exceeds_capacity(),
    );
    assert_eq!(
        (never.outcome(), never.granted(), never.remaining()),
        (Outcome::ExceedsCapacity, 0, 5)
    );
    let long = decided(
        Check::take(key, &policies, 2),
        0,
        Verdict::denied(Duration::MAX),
    );
    assert_eq!(
        long.retry_after(),
        Some(Duration::from_micros(LONGEST as u64))
    );
    let nanosecond = decided(
        Check::take(key, &policies, 2),
        0,
        Verdict::denied(Duration::from_nanos(1_001)),
    );
    assert_eq!(nanosecond.retry_after(), Some(Duration::from_micros(2)));
}

#[test]
fn a_due_turn_is_refunded_as_a_turn() {
    let key = Key::new("ann");
    let quota = Quota::per_second(1).burst(10);
    let policies = Policy::new("api", Strategy::Gcra, quota).unwrap().into();
    let (mut counts, start) = (
        Counts::default(),
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000),
    );
    let [first, turn, later] = [0; 3].map(|_| {
        let ahead = Check::take_ahead(key, &policies, 10, Duration::from_secs(60));
        counts.decide(&ahead, start, Source::Local)
    });
    assert!(first.is_allowed());
    let due_in = turn.due_in().unwrap();
    assert!(later.due_in().unwrap() > due_in);
    // The later turn keeps its time, so nothing of this one may be granted again.
    let refund = turn.due().refund(key, 9, Duration::ZERO);
    let refunded = refund.map_or(0, |refund| {
        counts
            .decide(&refund, start + due_in, Source::Local)
            .granted()
    });
    assert_eq!(refunded, 0);
}
