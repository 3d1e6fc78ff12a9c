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

#[test]
fn expired_charges_are_not_refunded() {
    let (key, policies, second) = (Key::GLOBAL, policies(), Duration::from_secs(1));
    let verdict = Verdict::allowed().with_reset_after(second);
    let whole = Check::take(key, &policies, 2).decided(SOURCE, 2, |_| verdict);
    let part = whole.part(Check::take(key, &policies, 1), 1, second / 2);
    let just_before = Duration::from_micros(999_999);
    for (decision, cost, age, refunds) in [
        (&whole, 2, just_before, 1),
        (&whole, 2, second, 0),
        (&whole, 0, just_before, 0),
        (&part, 1, just_before - second / 2, 1),
        (&part, 1, second / 2, 0),
    ] {
        assert_eq!(
            decision.refund(key, cost, age).count(),
            refunds,
            "{cost} after {age:?}"
        );
    }
}

/// Settling a cost of 4 at `cost` more, with `used` of 6 per minute used.
#[test]
fn settling_changes_the_reset() {
    let second = Duration::from_secs;
    for (strategy, used, cost, reset) in [
        (Strategy::Gcra, 4, 1, 50),
        (Strategy::Gcra, 4, -1, 30),
        (Strategy::Gcra, 4, -4, 0),
        (Strategy::Gcra, 0, 1, 10),
        (Strategy::SlidingLog, 4, 1, 40),
        (Strategy::SlidingLog, 4, -1, 40),
        (Strategy::SlidingLog, 4, -4, 0),
        (Strategy::SlidingLog, 0, 1, 60),
    ] {
        let policies = Policy::new("test", strategy, Quota::per_minute(6))
            .unwrap()
            .into();
        let verdict = Verdict::allowed()
            .with_remaining(6 - used)
            .with_reset_after(second(u64::from(used) * 10));
        let decision = Check::charge(Key::GLOBAL, &policies, 0).decided(SOURCE, 0, |_| verdict);
        let settled = decision.settled(4, 4_u32.wrapping_add_signed(cost));
        assert_eq!(
            settled.reset_after(),
            second(reset),
            "{strategy}: {cost} with {used} used"
        );
    }
    let uploads = Policy::in_flight("uploads", 6).unwrap().into();
    let verdict = Verdict::allowed()
        .with_remaining(2)
        .with_reset_after(second(30));
    let settled = Check::take(Key::GLOBAL, &uploads, 4)
        .decided(SOURCE, 4, |_| verdict)
        .settled(4, 0);
    assert_eq!(
        (settled.remaining(), settled.reset_after()),
        (2, second(30)),
        "still in flight"
    );
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
    let refund = turn.due().refund(key, 9, Duration::ZERO).next();
    let refunded = refund.map_or(0, |refund| {
        counts
            .decide(&refund, start + due_in, Source::Local)
            .granted()
    });
    assert_eq!(refunded, 0);
}
