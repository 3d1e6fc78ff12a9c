//! The states of the breaker.

use std::num::NonZeroU32;
use std::time::Duration;

use super::super::breaker::{Breaker, Ticket};

/// Admits the next check as a trial.
fn trial(breaker: &Breaker) -> Ticket {
    let ticket = breaker.admit().expect("one is let through");
    assert_eq!(ticket, Ticket::Trial);
    ticket
}

/// Reports a failure, and the failures of two trials.
fn fail(breaker: &Breaker) -> [bool; 3] {
    let begins = breaker.failed(Ticket::Free, false, 10);
    [
        begins,
        breaker.failed(trial(breaker), false, 20),
        breaker.failed(trial(breaker), false, 30),
    ]
}

#[test]
fn opens_at_threshold_and_closes_once() {
    let breaker = Breaker::new(3);
    assert_eq!(fail(&breaker), [false, false, true]);
    assert!(breaker.is_open());
    assert!(
        !breaker.failed(Ticket::Probe, false, 40),
        "it is open already"
    );
    assert_eq!(breaker.close(1_000_030), Some(Duration::from_secs(1)));
    assert!(breaker.is_closed());
    assert_eq!(breaker.close(1_000_040), None);
}

#[test]
fn a_success_starts_the_count_again() {
    let breaker = Breaker::new(4);
    for _ in 0..10 {
        assert_eq!(fail(&breaker), [false; 3]);
        breaker.succeeded(trial(&breaker));
        assert!(breaker.is_closed());
    }
}

#[test]
fn a_recovery_resets_the_failure_count() {
    let breaker = Breaker::new(4);
    fail(&breaker);
    breaker.close(40);
    assert_eq!(fail(&breaker), [false; 3]);
}

#[test]
fn concurrent_failures_count_once() {
    let breaker = Breaker::new(2);
    assert!((0..100).all(|now| !breaker.failed(Ticket::Free, false, now)));
    assert!(breaker.failed(trial(&breaker), false, 100));
    assert!(Breaker::new(1).failed(Ticket::Free, false, 0));
    assert!(
        Breaker::new(3).failed(Ticket::Free, true, 0),
        "a lasting one needs no other"
    );
}

#[test]
fn a_half_open_breaker_admits_one_trial() {
    let breaker = Breaker::new(3);
    assert_eq!(breaker.admit(), Some(Ticket::Free));
    breaker.failed(Ticket::Free, false, 0);
    let first = trial(&breaker);
    // A check that was sent before the trial is no evidence about it.
    breaker.failed(Ticket::Free, false, 110);
    breaker.succeeded(Ticket::Free);
    breaker.learned_nothing(Ticket::Free);
    assert_eq!(breaker.admit(), None);
    breaker.failed(first, false, 120);
    let second = trial(&breaker);
    assert_eq!(breaker.admit(), None);
    breaker.learned_nothing(second);
    breaker.succeeded(Ticket::Free);
    breaker.succeeded(trial(&breaker));
    assert_eq!([breaker.admit(), breaker.admit()], [Some(Ticket::Free); 2]);
}

/// A check is still in flight when the probe fails.
#[test]
fn a_failed_probe_admits_no_second_trial() {
    let breaker = Breaker::new(5);
    breaker.failed(Ticket::Free, false, 0);
    trial(&breaker);
    assert!(!breaker.failed(Ticket::Probe, false, 10));
    assert_eq!(breaker.admit(), None);
    assert!((0..2).all(|now| !breaker.failed(Ticket::Probe, false, now)));
    assert!(breaker.failed(Ticket::Probe, false, 30), "it counts");
    breaker.close(40);
    breaker.failed(Ticket::Free, false, 50);
    breaker.succeeded(Ticket::Probe);
    assert!(breaker.is_closed());
}

#[test]
fn probes_back_off_to_250_ms() {
    let longest = |instances| Breaker::longest_delay(NonZeroU32::new(instances).unwrap());
    let delays: Vec<u128> = (0..8)
        .map(|probes| Breaker::delay(probes, longest(500)).as_millis())
        .collect();
    assert_eq!(delays, [50, 100, 200, 250, 250, 250, 250, 250]);
    assert_eq!(
        Breaker::delay(u32::MAX, longest(1_000)),
        Duration::from_millis(500)
    );
}
